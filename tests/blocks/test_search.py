"""The searches for cached prefixes, over random trees with windows, checkpoints, adapters and residual caches."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.blocks import hidden_state_match, residual_match, search
from agentcache.blocks.hidden_states import HiddenStateCache, HiddenStateKey
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.prefix_cache import PrefixCache
from tests.blocks.cache_model import FakeGroup
from tests.blocks.old_and_new import assert_same, assert_same_ahead
from tests.blocks.sequence_machine import Adapter
from tests.examples import examples

FULL, OTHER, SLIDING = FakeGroup("full", None, 100), FakeGroup("other", None, 100), FakeGroup("sliding", 300, 70)
STATE = FakeGroup("state", None, 10)
BASE, RESIDUAL = "base root", "residual root"
CUT = 3
SEEDS = st.integers(0, 2**32)


class Texts:
    """Prompts that branch from each other, and the KV origins of an adapter's prompts."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._known: list[list[int]] = [[]]

    def next(self) -> list[int]:
        rng, known = self.rng, self.rng.choice(self._known)
        kept = known[: int(len(known) * rng.choice([0.3, 0.9, 1, 1]))]
        pieces = [[rng.choice([1, 2])] * rng.choice([1, 5, 16, 60, 200, 256, 256, 512]) for _ in range(3)]
        self._known.append([*kept, *(token for piece in pieces for token in piece)][: 6 * BLOCK_SIZE])
        return self._known[-1]

    def producer(self, num_groups: int, *, has_state: bool) -> KVOrigin | None:
        adapter = self.rng.choice([None, Adapter("a", False), Adapter("b", False), Adapter("c", True)])
        start = self.rng.choice([0, 5, 60, 255, 256, 300, 511, 700])
        return None if adapter is None else adapter.producer(start, num_groups, has_state)


def fill(cache: PrefixCache, root: str, texts: Texts, *, has_adapters: bool = False) -> None:
    """Compute some prompts; then let blocks and checkpoints leave RAM, some of them for good."""
    rng = texts.rng
    for _ in range(4):
        tokens = texts.next()
        has_state = cache.snapshots is not None
        producer = texts.producer(len(cache.groups), has_state=has_state) if has_adapters else None
        sequence = cache.open(root, cache.match_prefix(root, tokens, len(tokens) - 1, producer))
        for load in sequence.loads:
            cache.loaded(sequence, load)
        cache.state_taken(sequence)
        keeps_windows = rng.random() < 0.5
        while (begin := sequence.num_tokens) < len(tokens):
            end = min(len(tokens), begin + rng.choice([100, 256, 300]))
            cache.reserve(sequence, end - begin)
            cache.advance(sequence, tokens[begin:end])
            cache.leave_window(sequence, end if keeps_windows else None)
            if has_state and rng.random() < 0.5:
                cache.keep_state(sequence, end)
        cache.close(sequence, len(tokens) - rng.choice([0, 0, 1, 300]) if len(tokens) > 300 else None)
        disturb(cache, rng)
    cache.check_integrity()


def disturb(cache: PrefixCache, rng: random.Random) -> None:
    for node in list(cache.tree.walk()):
        for index in list(node.block_ids):
            if rng.random() < 0.4:
                cache.mark_stored(node, index)
        if rng.random() < 0.3:
            cache.slots.evict(node, rng.choice([None, (0,), (len(cache.groups) - 1,)]))
        if cache.snapshots is not None and node.state is not None and rng.random() < 0.2:
            cache.snapshots.evict(node)


def hide(cache: PrefixCache, rng: random.Random) -> HiddenStateCache:
    """Hidden states of most of the cache's blocks."""
    hidden_states = HiddenStateCache(64, 1, cache.ledger)
    for node in cache.tree.walk():
        if rng.random() < 0.8 and (slot := hidden_states.allocate()) is not None:
            hidden_states.publish(HiddenStateKey(node.chain, CUT), slot)
    return hidden_states


def prefix_cache(*groups: FakeGroup, state: FakeGroup | None = None, name: str = "base") -> PrefixCache:
    return PrefixCache(groups, Ledger(1 << 30), state=state, state_budget=1000, name=name)


@given(SEEDS, st.sampled_from([(FULL,), (FULL, SLIDING), (SLIDING, FULL), (SLIDING,), ()]), st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_old_and_new_find_the_same_prefix(seed: int, groups: tuple[FakeGroup, ...], has_state: bool) -> None:
    texts = Texts(random.Random(seed))
    cache = prefix_cache(*groups, state=STATE if has_state or not groups else None)
    fill(cache, BASE, texts, has_adapters=True)
    for _ in range(5):
        tokens = texts.next()
        producer = texts.producer(len(groups), has_state=cache.snapshots is not None)
        limit = texts.rng.choice([len(tokens), len(tokens) - 1, len(tokens) // 2])
        old = cache.match_prefix(BASE, tokens, limit, producer)
        assert_same(cache.finder(BASE, tokens, producer).match(limit), old)


@given(SEEDS, st.sampled_from([(FULL, FULL), (FULL, SLIDING), (SLIDING, SLIDING)]))
@settings(max_examples=examples(400), deadline=None)
def test_old_and_new_find_the_same_residuals(seed: int, kinds: tuple[FakeGroup, FakeGroup]) -> None:
    texts = Texts(random.Random(seed))
    base, residuals = prefix_cache(FULL, kinds[0]), prefix_cache(kinds[1], name="residual.x")
    fill(base, BASE, texts)
    fill(residuals, RESIDUAL, texts)
    for _ in range(5):
        tokens = texts.next()
        limit = texts.rng.choice([len(tokens), len(tokens) - 1, len(tokens) // 2])
        old = residual_match.match_residual_kv(base, BASE, residuals, RESIDUAL, tokens, limit)
        new = search.match_residual_kv(base.finder(BASE, tokens), residuals.finder(RESIDUAL, tokens), limit)
        assert new.residuals is not None
        assert new.residuals.known_tokens == old.found
        assert_same(replace(new.residuals, known_tokens=0), old.residuals)
        assert_same(new, old.base)


@given(SEEDS, st.sampled_from([(FULL, OTHER), (SLIDING, FULL), (SLIDING, FULL, OTHER)]), st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_old_and_new_find_the_same_hidden_states(seed: int, groups: tuple[FakeGroup, ...], durable: bool) -> None:
    texts = Texts(random.Random(seed))
    cache = prefix_cache(*groups)
    fill(cache, BASE, texts, has_adapters=True)
    hidden_states = hide(cache, texts.rng)
    for _ in range(5):
        tokens, producer = texts.next(), texts.producer(len(groups), has_state=False)
        limit = texts.rng.choice([0, len(tokens) - 1])
        prefix = cache.match_prefix(BASE, tokens, limit, producer)
        finder = cache.finder(BASE, tokens[:-1], producer)
        old = hidden_state_match.match_hidden_states(
            cache, hidden_states, BASE, tokens[:-1], prefix, CUT, durable=durable
        )
        new = search.match_hidden_states(finder.match(limit), finder, hidden_states, CUT, durable=durable)
        assert_same_ahead(new, old, prefix)
