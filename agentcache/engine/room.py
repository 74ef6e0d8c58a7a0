"""Whether the blocks suffice for one more request. Plain arithmetic; takes nothing and evicts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentcache.blocks.allocator import BlockAllocator, most_blocks
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.pool import BlockTable
from agentcache.blocks.slots import Group


@dataclass(frozen=True)
class Growth:
    """A running request: its block tables, one per group, and the tokens that it is known to need room for.

    Args:
        at_once: how many of these may be computed at once from now on.
    """

    tables: Sequence[BlockTable]
    num_tokens: int
    at_once: int = BLOCK_SIZE


@dataclass(frozen=True)
class Newcomer:
    """A request that would start with `prefix`; the rest as for `Growth`."""

    prefix: CachedPrefix
    num_tokens: int
    at_once: int = BLOCK_SIZE


def has_room(
    allocator: BlockAllocator, running: Sequence[Growth], new: Newcomer, *, evicts: bool = True, beside: int = 0
) -> bool:
    """Whether all of `running` and one more request fit side by side.

    What the budget still lets the pools grow by counts as room.

    Args:
        evicts: slots that only caches hold count as room too.
        beside: bytes of the budget that others are to have meanwhile.
    """
    fits = _fits if evicts else _fits_beside_the_cached
    return all(fits(allocator, index, running, new, beside) for index in range(len(allocator.slots.groups)))


def _fits(allocator: BlockAllocator, index: int, running: Sequence[Growth], new: Newcomer, beside: int) -> bool:
    room = allocator.slots.pools[index].capacity + allocator.affordable_growth(index, beside)
    return slots_needed(allocator, index, running, new) <= room


def _fits_beside_the_cached(
    allocator: BlockAllocator, index: int, running: Sequence[Growth], new: Newcomer, beside: int
) -> bool:
    group = allocator.slots.groups[index]
    # A block that is partly filled is copied, for others may go on from it too.
    there = sum(node.is_full and index in node.block_ids for node in new.prefix.lane(index).nodes)
    needed = max(0, most_blocks(group, new.num_tokens, new.at_once) - there)
    room = allocator.slots.pools[index].num_free + allocator.affordable_growth(index, beside)
    return _promised(group, index, running) + needed <= room


def slots_needed(allocator: BlockAllocator, index: int, running: Sequence[Growth], new: Newcomer | None = None) -> int:
    """Slots of a group without which all of `running`, and one more if there is one, do not fit side by side."""
    group, read = allocator.slots.groups[index], {slot for g in running for slot in g.tables[index].block_ids}
    needed = len(read) + _promised(group, index, running)
    if new is None:
        return needed
    # What others read already costs the newcomer nothing.
    shared = sum(node.block_ids.get(index) in read for node in new.prefix.lane(index).nodes)
    return needed + max(0, most_blocks(group, new.num_tokens, new.at_once) - shared)


def _promised(group: Group, index: int, running: Sequence[Growth]) -> int:
    return sum(max(0, most_blocks(group, g.num_tokens, g.at_once) - len(g.tables[index].block_ids)) for g in running)
