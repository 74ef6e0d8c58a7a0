"""Where an adapter begins that goes on from two caches, whatever each of them has."""

from __future__ import annotations

import random

import pytest

from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.search import Cached, match_residual_kv
from tests.blocks.cache_model import FakeGroup

BASE_ROOT, RESIDUAL_ROOT = "base root", "residual root"
FULL, SLIDING = FakeGroup("full", None, 100), FakeGroup("sliding", 300, 70)
IDS = random.Random(1).choices(range(1000), k=900)
LIMIT = len(IDS) - 1


def cache(*groups: FakeGroup, name: str = "base") -> PrefixCache:
    return PrefixCache(groups, Ledger(1 << 20), name=name)


def fill(cache: PrefixCache, root: str, num_tokens: int, *, keeps_windows: bool = False) -> None:
    """Somebody has computed so many tokens."""
    sequence = cache.open(root, cache.match_prefix(root, (), 0))
    for begin in range(0, num_tokens, 100):
        end = min(begin + 100, num_tokens)
        cache.reserve(sequence, end - begin)
        cache.advance(sequence, IDS[begin:end])
        cache.leave_window(sequence, end if keeps_windows else None)
    cache.close(sequence)


def both(base: PrefixCache, residuals: PrefixCache, limit: int = LIMIT) -> Cached:
    finders = base.finder(BASE_ROOT, IDS), residuals.finder(RESIDUAL_ROOT, IDS)
    return match_residual_kv(*finders, limit)


@pytest.mark.parametrize("of_base", [0, 256, 300, LIMIT])
@pytest.mark.parametrize("of_residuals", [0, 256, 300, LIMIT])
def test_the_shorter_one(of_base: int, of_residuals: int) -> None:
    base, residuals = cache(FULL), cache(FULL, name="residual.x")
    fill(base, BASE_ROOT, of_base)
    fill(residuals, RESIDUAL_ROOT, of_residuals)
    match = both(base, residuals)
    assert match.own.num_tokens == min(of_base, of_residuals)
    assert match.num_tokens == of_base, "all of it: base goes on from there"
    assert match.own.known_tokens == of_residuals


def test_no_more_than_is_asked_for() -> None:
    base, residuals = cache(FULL), cache(FULL, name="residual.x")
    fill(base, BASE_ROOT, 900)
    fill(residuals, RESIDUAL_ROOT, 900)
    match = both(base, residuals, 500)
    assert (match.num_tokens, match.own.num_tokens, match.own.known_tokens) == (500, 500, 500)


def test_a_window_that_base_has_left_is_computed_again() -> None:
    """The adapter begins at its beginning, and reads base's windows from there on."""
    base, residuals = cache(FULL, SLIDING), cache(FULL, SLIDING, name="residual.x")
    fill(base, BASE_ROOT, 800)
    assert base.match_prefix(BASE_ROOT, IDS, LIMIT).num_tokens == 800
    match = both(base, residuals)
    assert (match.num_tokens, match.own.num_tokens) == (0, 0)


def test_windows_that_are_kept_for_such_readers_are_of_use() -> None:
    base, residuals = cache(FULL, SLIDING), cache(FULL, SLIDING, name="residual.x")
    fill(base, BASE_ROOT, 800, keeps_windows=True)
    match = both(base, residuals)
    assert (match.num_tokens, match.own.num_tokens) == (800, 0)
    sequence = base.open(BASE_ROOT, match)
    assert [table.first_block for table in sequence.tables] == [0, 0], "from where the adapter begins"
    base.leave_window(sequence, 700)
    assert [table.first_block for table in sequence.tables] == [0, (700 - 300 + 1) // 256]
    base.abandon(sequence)
    base.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_both_are_always_usable(seed: int) -> None:
    """Whatever has been evicted: no block that would be read is missing, and nothing that could be used is left out."""
    rng = random.Random(seed)
    base, residuals = cache(FULL, SLIDING), cache(SLIDING, name="residual.x")
    fill(base, BASE_ROOT, rng.randrange(900), keeps_windows=rng.random() < 0.7)
    fill(residuals, RESIDUAL_ROOT, rng.randrange(900))
    for each in (base, residuals):
        for node in list(each.tree.residents):
            if rng.random() < 0.2:
                each.slots.evict(node)
    match = both(base, residuals)
    start = match.own.num_tokens
    assert start <= min(match.num_tokens, match.own.known_tokens)
    lower = base.open(BASE_ROOT, match)
    upper = residuals.open(RESIDUAL_ROOT, match.own)
    for group, table in zip(base.groups, lower.tables, strict=True):
        assert table.first_block <= group.first_block_needed(start)
    base.abandon(lower)
    residuals.abandon(upper)
    base.check_integrity()
    residuals.check_integrity()
