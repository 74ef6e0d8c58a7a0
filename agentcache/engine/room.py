from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.blocks.allocator import BlockAllocator, min_blocks
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.search import Cached
from agentcache.blocks.slots import Group


@dataclass(frozen=True)
class Growth:
    """Block tables of an admitted request, by group, and its token count."""

    tables: Sequence[BlockTable]
    num_tokens: int


def has_room(
    allocator: BlockAllocator,
    running: Sequence[Growth],
    prefix: Cached,
    num_tokens: int,
    *,
    evicts: bool = True,
    beside: int = 0,
) -> bool:
    """Return whether `running` and a request with cached `prefix` fit, if pools grow within the budget.

    Args:
        evicts: whether slots can be evicted.
        beside: bytes reserved for other uses.
    """
    fits = _fits if evicts else _fits_beside_the_cached
    indices = range(len(allocator.slots.groups))
    return all(fits(allocator, index, running, prefix, num_tokens, beside) for index in indices)


def _fits(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: Cached,
    num_tokens: int,
    beside: int,
) -> bool:
    room = allocator.slots.pools[index].capacity + allocator.affordable_growth(index, beside)
    return slots_needed(allocator, index, running, prefix, num_tokens) <= room


def _fits_beside_the_cached(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: Cached,
    num_tokens: int,
    beside: int,
) -> bool:
    group = allocator.slots.groups[index]
    # Partly filled blocks are copied, as other requests may extend them.
    there = sum(node.is_full and index in node.block_ids for node in prefix.path(index).nodes)
    needed = max(0, _most_blocks(group, num_tokens) - there)
    room = allocator.slots.pools[index].num_free + allocator.affordable_growth(index, beside)
    return _promised(group, index, running) + needed <= room


def slots_needed(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: Cached | None = None,
    num_tokens: int = 0,
) -> int:
    """Return the slots of a group that `running` and one more request need."""
    group, read = allocator.slots.groups[index], {slot for g in running for slot in g.tables[index].block_ids}
    # Blocks that running requests read cost nothing more.
    shared = 0 if prefix is None else sum(node.block_ids.get(index) in read for node in prefix.path(index).nodes)
    needed = max(0, _most_blocks(group, num_tokens) - shared)
    return len(read) + _promised(group, index, running) + needed


def _promised(group: Group, index: int, running: Sequence[Growth]) -> int:
    return sum(max(0, _most_blocks(group, g.num_tokens) - len(g.tables[index].block_ids)) for g in running)


def _most_blocks(group: Group, num_tokens: int) -> int:
    blocks = -(-num_tokens // BLOCK_SIZE)
    return blocks if group.window is None else min(blocks, min_blocks(group))
