"""Whether the blocks suffice for one more request. Plain arithmetic; takes nothing and evicts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.blocks.allocator import BlockAllocator, min_blocks
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.slots import Group


@dataclass(frozen=True)
class Growth:
    """A running request: its block tables, one per group, and the tokens that it is known to need room for."""

    tables: Sequence[BlockTable]
    num_tokens: int


def has_room(
    allocator: BlockAllocator,
    running: Sequence[Growth],
    prefix: CachedPrefix,
    num_tokens: int,
    *,
    evicts: bool = True,
    beside: int = 0,
) -> bool:
    """Whether all of `running` and a request of `num_tokens` tokens that starts with `prefix` fit side by side.

    What the budget still lets the pools grow by counts as room.

    Args:
        evicts: slots that only caches hold count as room too.
        beside: bytes of the budget that others are to have meanwhile.
    """
    fits = _fits if evicts else _fits_beside_the_cached
    indices = range(len(allocator.slots.groups))
    return all(fits(allocator, index, running, prefix, num_tokens, beside) for index in indices)


def _fits(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: CachedPrefix,
    num_tokens: int,
    beside: int,
) -> bool:
    room = allocator.slots.pools[index].capacity + allocator.affordable_growth(index, beside)
    return slots_needed(allocator, index, running, prefix, num_tokens) <= room


def _fits_beside_the_cached(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: CachedPrefix,
    num_tokens: int,
    beside: int,
) -> bool:
    group = allocator.slots.groups[index]
    # A block that is partly filled is copied, for others may go on from it too.
    there = sum(node.is_full and index in node.block_ids for node in prefix.lane(index).nodes)
    needed = max(0, _most_blocks(group, num_tokens) - there)
    room = allocator.slots.pools[index].num_free + allocator.affordable_growth(index, beside)
    return _promised(group, index, running) + needed <= room


def slots_needed(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: CachedPrefix | None = None,
    num_tokens: int = 0,
) -> int:
    """Slots of a group without which all of `running`, and one that starts with `prefix`, do not fit side by side."""
    group, read = allocator.slots.groups[index], {slot for g in running for slot in g.tables[index].block_ids}
    # What others read already costs the newcomer nothing.
    shared = 0 if prefix is None else sum(node.block_ids.get(index) in read for node in prefix.lane(index).nodes)
    needed = max(0, _most_blocks(group, num_tokens) - shared)
    return len(read) + _promised(group, index, running) + needed


def _promised(group: Group, index: int, running: Sequence[Growth]) -> int:
    return sum(max(0, _most_blocks(group, g.num_tokens) - len(g.tables[index].block_ids)) for g in running)


def _most_blocks(group: Group, num_tokens: int) -> int:
    """Blocks that a sequence holds at a time on its way to `num_tokens` tokens."""
    blocks = -(-num_tokens // BLOCK_SIZE)
    return blocks if group.window is None else min(blocks, min_blocks(group))
