from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.agents.caches import KeptCache
from agentcache.api.stats import RESIDUAL
from agentcache.blocks.allocator import BlockAllocator, blocks_of
from agentcache.blocks.pool import BlockTable, Group
from agentcache.blocks.search import Cached
from agentcache.errors import OutOfBlocks

if TYPE_CHECKING:
    from agentcache.plans.plan import PlanResources


@dataclass(frozen=True)
class Growth:
    """An admitted request: block tables by group, tokens to have room for."""

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
    """Whether `running` and a request with cached `prefix` fit, if pools grow and `beside` bytes go elsewhere."""
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
    # Partly filled blocks are copied.
    there = sum(node.is_full and index in node.block_ids for node in prefix.path(index).nodes)
    needed = max(0, blocks_of(group, num_tokens) - there)
    room = allocator.slots.pools[index].num_free + allocator.affordable_growth(index, beside)
    return _promised(group, index, running) + needed <= room


def slots_needed(
    allocator: BlockAllocator,
    index: int,
    running: Sequence[Growth],
    prefix: Cached | None = None,
    num_tokens: int = 0,
) -> int:
    """Slots that `running` and one more request need."""
    group, read = allocator.slots.groups[index], {slot for g in running for slot in g.tables[index].slots}
    shared = 0 if prefix is None else sum(node.block_ids.get(index) in read for node in prefix.path(index).nodes)
    needed = max(0, blocks_of(group, num_tokens) - shared)
    return len(read) + _promised(group, index, running) + needed


def _promised(group: Group, index: int, running: Sequence[Growth]) -> int:
    return sum(max(0, blocks_of(group, g.num_tokens) - len(g.tables[index].slots)) for g in running)


class Room:
    """Room for one more request in all caches, beside the open plans."""

    def __init__(self, resources: PlanResources) -> None:
        self._caches = resources.caches
        self._plans = resources.open_plans
        self._base = resources.caches.base.prefix

    def check(self, prefix: Cached, num_tokens: int, beside: int | None = None) -> None:
        """Raise OutOfBlocks unless a request with cached `prefix` fits.

        `beside`: bytes for residual KV; None for what admitted requests lack.
        """
        if beside is None:
            beside = self._lacking()[0]
        if not has_room(self._base.allocator, self._growth(self._caches.base), prefix, num_tokens, beside=beside):
            raise OutOfBlocks("running requests need all the blocks there are")

    def fits_beside_cached(self, prefix: Cached, num_tokens: int) -> bool:
        """Whether a request fits without eviction."""
        # Residuals cannot evict blocks in use: their share stays free.
        kept = self._base.ledger.share_left(RESIDUAL)
        return has_room(
            self._base.allocator, self._growth(self._caches.base), prefix, num_tokens, evicts=False, beside=kept
        )

    def check_residuals(self, cache: KeptCache, cached: Cached, num_tokens: int) -> None:
        """Raise OutOfBlocks unless a request with residuals in `cache` fits."""
        lacking, spare = self._lacking(cache, cached.own, num_tokens)
        left = self._base.ledger.share_left(RESIDUAL)
        if lacking > left + spare:
            raise OutOfBlocks("running requests need all the blocks there are for residuals")
        self.check(cached, num_tokens, min(lacking, left))

    def make(self, cache: KeptCache, prefix: Cached, num_tokens: int) -> bool:
        """Grow a residual cache; False if running requests hold the memory."""
        allocator, running = cache.prefix.allocator, self._growth(cache)
        for index in range(len(allocator.slots.groups)):
            if not allocator.grow_to(index, slots_needed(allocator, index, running, prefix, num_tokens)):
                return False
        # Growth may have taken slots that other residual requests need.
        lacking, spare = self._lacking(cache, prefix, num_tokens)
        return lacking <= spare + self._base.ledger.room

    def _growth(self, cache: KeptCache) -> list[Growth]:
        return [
            Growth(tables.tables, len(plan.token_ids) + 1)
            for plan in self._plans
            for kept, tables in plan.tables
            if kept is cache
        ]

    def _lacking(
        self, joins: KeptCache | None = None, prefix: Cached | None = None, num_tokens: int = 0
    ) -> tuple[int, int]:
        """Bytes of residual slots that requests, and one that joins, lack; and spare bytes."""
        lacking = spare = 0
        for cache in self._caches.further:
            allocator, running = cache.prefix.allocator, self._growth(cache)
            new = (prefix, num_tokens) if cache is joins else (None, 0)
            for index, group in enumerate(allocator.slots.groups):
                short = slots_needed(allocator, index, running, *new) - allocator.slots.pools[index].capacity
                lacking += max(0, short) * group.bytes_per_block
                spare += max(0, -short) * group.bytes_per_block
        return lacking, spare
