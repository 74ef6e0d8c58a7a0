"""The cache keeps within another RAM budget from now on, as far as those who read let it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from agentcache.api.stats import BASE
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from tests.blocks.borrower import leave
from tests.blocks.cache_model import FakeGroup

ROOT = "root"
GROUPS = (FakeGroup("full", None, 100), FakeGroup("sliding", 300, 70))


def run(cache: PrefixCache, num_blocks: int, seed: int) -> BlockTables:
    """A request that has computed so many blocks and is still there."""
    ids = random.Random(seed).choices(range(1000), k=num_blocks * BLOCK_SIZE)
    sequence = cache.open(ROOT, cache.match_prefix(ROOT, ids, len(ids)))
    for begin in range(sequence.num_tokens, len(ids), BLOCK_SIZE):
        cache.reserve(sequence, BLOCK_SIZE)
        cache.advance(sequence, ids[begin : begin + BLOCK_SIZE])
        cache.leave_window(sequence)
    return sequence


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 4), st.integers(0, 4000))
def test_any_budget(idle: list[int], running: int, budget: int) -> None:
    cache = PrefixCache(GROUPS, Ledger(4000))
    for seed, num_blocks in enumerate(idle):
        cache.close(run(cache, num_blocks, seed))
    sequence = run(cache, running, seed=9)
    read = [list(table.block_ids) for table in sequence.tables]
    fits = leave(cache, budget)
    cache.check_integrity()
    assert cache.ledger.left_for(BASE) == (budget if fits else 4000)
    assert fits or read != [[], []] or budget < cache.ledger.floors
    assert cache.allocator.capacity_bytes <= cache.ledger.left_for(BASE)
    assert [list(table.block_ids) for table in sequence.tables] == read, "nobody loses what he reads"
    cache.close(sequence)
    assert leave(cache, 4000)
    cache.close(run(cache, 6, seed=1))
    cache.check_integrity()


def test_nothing_is_given_up_for_a_budget_that_suffices() -> None:
    cache = PrefixCache(GROUPS, Ledger(4000))
    cache.close(run(cache, 5, seed=1))
    before, cached = cache.allocator.capacity_bytes, cache.count_blocks().cached
    assert leave(cache, before)
    assert (cache.allocator.capacity_bytes, cache.count_blocks().cached) == (before, cached)
    assert leave(cache, cache.ledger.floors)
    assert cache.allocator.capacity_bytes == cache.ledger.floors
