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
) -> bool:
    """Whether all of `running` and a request of `num_tokens` tokens that starts with `prefix` fit side by side.

    What the budget still lets the pools grow by counts as room.

    Args:
        evicts: slots that only caches hold count as room too.
    """
    fits = _fits if evicts else _fits_beside_the_cached
    return all(fits(allocator, index, running, prefix, num_tokens) for index in range(len(allocator.slots.groups)))


def _fits_beside_the_cached(
    allocator: BlockAllocator, index: int, running: Sequence[Growth], prefix: CachedPrefix, num_tokens: int
) -> bool:
    group = allocator.slots.groups[index]
    # A block that is partly filled is copied, for others may go on from it too.
    there = sum(node.is_full and index in node.block_ids for node in prefix.lane(index).nodes)
    needed = max(0, _most_blocks(group, num_tokens) - there)
    room = allocator.slots.pools[index].num_free + allocator.affordable_growth(index)
    return _promised(group, index, running) + needed <= room


def _promised(group: Group, index: int, running: Sequence[Growth]) -> int:
    return sum(max(0, _most_blocks(group, g.num_tokens) - len(g.tables[index].block_ids)) for g in running)


def _fits(
    allocator: BlockAllocator, index: int, running: Sequence[Growth], prefix: CachedPrefix, num_tokens: int
) -> bool:
    slots = allocator.slots
    group, read = slots.groups[index], {slot for growth in running for slot in growth.tables[index].block_ids}
    # What others read already costs the newcomer nothing.
    shared = sum(node.block_ids.get(index) in read for node in prefix.lane(index).nodes)
    needed = max(0, _most_blocks(group, num_tokens) - shared)
    room = slots.pools[index].capacity - len(read) + allocator.affordable_growth(index)
    return _promised(group, index, running) + needed <= room


def _most_blocks(group: Group, num_tokens: int) -> int:
    """Blocks that a sequence holds at a time on its way to `num_tokens` tokens."""
    blocks = -(-num_tokens // BLOCK_SIZE)
    return blocks if group.window is None else min(blocks, min_blocks(group))
