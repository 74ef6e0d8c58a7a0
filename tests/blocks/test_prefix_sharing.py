"""Sequences over the same tokens at once: what one has computed, another takes."""

from __future__ import annotations

import pytest

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from tests.blocks.cache_model import FakeGroup

ROOT = "root"
IDS = list(range(1, 5 * BLOCK_SIZE))
GROUPS = (FakeGroup("full", None, 100), FakeGroup("sliding", 300, 70))


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(GROUPS[:1], Ledger(10_000))


def begin(cache: PrefixCache, producer: KVOrigin | None = None) -> BlockTables:
    return cache.open(ROOT, cache.match_prefix(ROOT, IDS, len(IDS), producer))


def compute(cache: PrefixCache, sequence: BlockTables, num_tokens: int) -> None:
    start = sequence.num_tokens
    cache.reserve(sequence, num_tokens)
    cache.advance(sequence, IDS[start : start + num_tokens])
    cache.leave_window(sequence)


def test_it_goes_on_behind_what_another_has_computed(cache: PrefixCache) -> None:
    first, second = begin(cache), begin(cache)
    compute(cache, first, 2 * BLOCK_SIZE + 10)
    assert cache.tokens_ahead(second, IDS, len(IDS)) == 2 * BLOCK_SIZE
    assert cache.tokens_ahead(second, IDS, 2 * BLOCK_SIZE - 1) == BLOCK_SIZE, "no further than it is asked"
    assert cache.tokens_ahead(second, IDS, 2 * BLOCK_SIZE) == 2 * BLOCK_SIZE, "but up to there"
    cache.catch_up(second, IDS, len(IDS))
    assert second.num_tokens == 2 * BLOCK_SIZE and list(second.token_ids) == IDS[: 2 * BLOCK_SIZE]
    assert second.tables[0].block_ids == first.tables[0].block_ids[:2]
    cache.check_integrity()
    compute(cache, second, 2 * BLOCK_SIZE)
    cache.catch_up(first, IDS, len(IDS))
    assert first.num_tokens == 2 * BLOCK_SIZE + 10, "within a block there is nothing to take"
    compute(cache, first, BLOCK_SIZE - 10)
    cache.catch_up(first, IDS, len(IDS))
    assert first.num_tokens == 4 * BLOCK_SIZE
    for sequence in (first, second):
        cache.close(sequence)
    cache.check_integrity()
    assert cache.count_blocks().live == 0


def test_slots_that_were_reserved_are_free_again(cache: PrefixCache) -> None:
    first, second = begin(cache), begin(cache)
    cache.reserve(second, 3 * BLOCK_SIZE)
    compute(cache, first, 2 * BLOCK_SIZE)
    live = cache.count_blocks().live
    cache.catch_up(second, IDS, len(IDS))
    assert cache.count_blocks().live == live - 2
    assert second.tables[0].end_block == 3
    cache.check_integrity()


def test_other_tokens_and_other_producers_have_nothing_for_it(cache: PrefixCache) -> None:
    first, adapted = begin(cache), begin(cache, KVOrigin("adapter", BLOCK_SIZE, frozenset({0})))
    compute(cache, first, 3 * BLOCK_SIZE)
    assert cache.tokens_ahead(adapted, IDS, len(IDS)) == BLOCK_SIZE, "in front of its start it is base"
    other = cache.open(ROOT, cache.match_prefix(ROOT, IDS[1:], len(IDS)))
    assert cache.tokens_ahead(other, IDS[1:], len(IDS) - 1) == 0
    cache.check_integrity()


def test_what_has_left_a_window_is_not_there() -> None:
    cache = PrefixCache(GROUPS, Ledger(100_000))
    first, second = begin(cache), begin(cache)
    compute(cache, first, BLOCK_SIZE)
    assert cache.tokens_ahead(second, IDS, len(IDS)) == BLOCK_SIZE
    for _ in range(3):
        compute(cache, first, BLOCK_SIZE)
    assert cache.tokens_ahead(second, IDS, len(IDS)) == 0
    cache.check_integrity()
