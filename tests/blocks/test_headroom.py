"""What the machine can give, beside what the budget says; and slots that are given back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.allocator import least_bytes
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.errors import OutOfBlocks, OutOfMemory
from tests.blocks.cache_model import FakeGroup

ROOT = "root"
GROUPS = (FakeGroup("full", None, 100), FakeGroup("sliding", 300, 70))
LEAST = least_bytes(GROUPS)


def run(cache: PrefixCache, num_blocks: int, seed: int) -> BlockTables:
    """A request that has computed so many blocks and is still there."""
    ids = random.Random(seed).choices(range(1000), k=num_blocks * BLOCK_SIZE)
    sequence = cache.open(ROOT, cache.match_prefix(ROOT, ids, len(ids)))
    try:
        for begin in range(sequence.num_tokens, len(ids), BLOCK_SIZE):
            cache.reserve(sequence, BLOCK_SIZE)
            cache.advance(sequence, ids[begin : begin + BLOCK_SIZE])
            cache.leave_window(sequence)
    except OutOfBlocks:
        cache.abandon(sequence)
        raise
    return sequence


def bounded(room: int, budget: int = 10**6) -> PrefixCache:
    """Of a machine that has `room` bytes for it, whatever the budget."""
    cache = PrefixCache(GROUPS, Ledger(budget))
    cache.allocator.headroom = lambda: room - cache.allocator.capacity_bytes
    return cache


@given(st.integers(0, 5000), st.lists(st.integers(1, 9), max_size=8))
def test_the_cache_stays_within_the_machine_and_gets_its_least_in_any_case(room: int, requests: list[int]) -> None:
    cache = bounded(room)
    for seed, num_blocks in enumerate(requests):
        try:
            cache.close(run(cache, num_blocks, seed))
        except OutOfMemory:
            assert num_blocks > 4, "what a short sequence needs is always there"
        assert cache.allocator.capacity_bytes <= max(room, LEAST)
        cache.check_integrity()


def test_idle_blocks_go_before_anybody_is_refused() -> None:
    cache = bounded(LEAST + 600)
    for seed in range(5):
        cache.close(run(cache, 4, seed))
    assert cache.slots.evicted_blocks > 0


def test_the_budget_and_the_machine_are_told_apart() -> None:
    with pytest.raises(OutOfMemory, match="the machine has no memory left"):
        run(bounded(LEAST), 9, seed=1)
    with pytest.raises(OutOfBlocks, match="the RAM budget of") as error:
        run(bounded(10**9, budget=LEAST), 9, seed=1)
    assert not isinstance(error.value, OutOfMemory)


def test_while_memory_is_short_idle_blocks_go_before_the_cache_grows() -> None:
    growing, sparing = PrefixCache(GROUPS, Ledger(10**6)), PrefixCache(GROUPS, Ledger(10**6))
    sparing.allocator.is_sparing = True
    for seed in range(6):
        for cache in (growing, sparing):
            cache.close(run(cache, 4, seed))
    assert growing.slots.evicted_blocks == 0 < sparing.slots.evicted_blocks
    assert sparing.allocator.capacity_bytes < growing.allocator.capacity_bytes // 2
    sparing.close(run(sparing, 12, seed=9))
    sparing.check_integrity()


def test_slots_that_are_free_are_given_back_down_to_what_a_short_sequence_needs() -> None:
    cache = PrefixCache(GROUPS, Ledger(10**6))
    cache.allocator.preallocate(9000)
    before = cache.allocator.capacity_bytes
    sequence = run(cache, 6, seed=1)
    freed = cache.allocator.give_back()
    assert freed == before - cache.allocator.capacity_bytes > 0
    assert max(sequence.tables[0].block_ids) == cache.slots.pools[0].capacity - 1
    cache.abandon(sequence)
    for node in list(cache.tree.residents)[::-1]:
        cache.slots.evict(node)
    cache.allocator.give_back()
    assert cache.allocator.capacity_bytes == LEAST
