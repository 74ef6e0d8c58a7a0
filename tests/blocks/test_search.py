"""The search for cached prefixes over random caches, beside its rules by brute force (`cache_model.Reference`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.blocks.hidden_states import HiddenStateCache, HiddenStateKey
from agentcache.blocks.keys import BLOCK_SIZE, KVOrigin
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import Group
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import longest_common, match_hidden_states, match_residual_kv
from agentcache.errors import BrokenInvariant
from tests.blocks.cache_model import FakeGroup, Groups, Reference, groups_of, last_layers, pair
from tests.blocks.sequence_machine import Adapter
from tests.examples import examples

FULL, OTHER, SLIDING = FakeGroup("full", None, 100), FakeGroup("other", None, 100), FakeGroup("sliding", 300, 70)
PAIR, STATE = pair("full"), FakeGroup("state", None, 10)
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

    def producer(self, groups: Sequence[Group], *, has_state: bool) -> KVOrigin | None:
        adapter = self.rng.choice([None, Adapter("a", False), Adapter("b", False), Adapter("c", True)])
        start = self.rng.choice([0, 5, 60, 255, 256, 300, 511, 700])
        return None if adapter is None else adapter.producer(start, len(groups), has_state, last_layers(groups))


def fill(cache: PrefixCache, root: str, texts: Texts, *, has_adapters: bool = False) -> None:
    """Compute some prompts; then let blocks and checkpoints leave RAM, some of them for good."""
    rng = texts.rng
    for _ in range(4):
        tokens = texts.next()
        has_state = cache.snapshots is not None
        producer = texts.producer(cache.groups, has_state=has_state) if has_adapters else None
        sequence = cache.open(root, cache.match_prefix(root, tokens, len(tokens) - 1, producer))
        for load in sequence.loads:
            cache.loaded(sequence, load)
        cache.checkpoints.release_start(sequence)
        keeps_windows = rng.random() < 0.5
        while (begin := sequence.num_tokens) < len(tokens):
            end = min(len(tokens), begin + rng.choice([100, 256, 300]))
            cache.reserve(sequence, end - begin)
            cache.advance(sequence, tokens[begin:end])
            cache.leave_window(sequence, end if keeps_windows else None)
            if has_state and rng.random() < 0.5:
                cache.checkpoints.keep(sequence, end)
        keep = len(tokens) - rng.choice([0, 0, 1, 300]) if len(tokens) > 300 else len(tokens)
        cache.close(sequence, cache.open_blocks.keepable(sequence, min(keep, sequence.num_tokens)))
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


def reference(cache: PrefixCache, groups: Groups, *, has_state: bool = False, least: int | None = None) -> Reference:
    nodes = list(cache.tree.walk())
    files = {(node.chain, index) for node in nodes for index in node.stored}
    return Reference(nodes, groups, files, has_state=has_state, least=least)


def most_of(served: set[int], limit: int) -> int:
    return max((n for n in served if n <= limit), default=0)


def choose_limit(tokens: list[int], rng: random.Random) -> int:
    return rng.choice([len(tokens), len(tokens) - 1, len(tokens) // 2, 0])


@given(st.lists(st.sets(st.integers(1, 20)), min_size=1, max_size=4), st.integers(0, 25))
def test_the_longest_that_all_can_serve(served: list[set[int]], limit: int) -> None:
    finders = [partial(most_of, each) for each in served]
    assert longest_common(limit, *finders) == most_of(set.intersection(*served), limit)


def test_a_finder_may_lower_its_own_answer() -> None:
    """Only the first one's answers are exact."""
    assert longest_common(9, lambda n: n, lambda n: max(3, n - 1)) == 3


def test_a_finder_that_answers_with_more_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(BrokenInvariant):
        longest_common(9, lambda n: n + 1, lambda n: n - 1)


PAIRS = [(*PAIR, FULL), PAIR, (*pair("window", 300), *PAIR), (FULL, *pair("window", 300))]


@given(SEEDS, st.sampled_from([(FULL,), (FULL, SLIDING), (SLIDING, FULL), (SLIDING,), (), *PAIRS]), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_the_longest_prefix(seed: int, groups: Groups, has_state: bool) -> None:
    texts, has_state = Texts(random.Random(seed)), has_state or not groups
    cache = prefix_cache(*groups, state=STATE if has_state else None)
    fill(cache, BASE, texts, has_adapters=True)
    rules, of_kv = reference(cache, groups, has_state=has_state), reference(cache, groups, least=1)
    for _ in range(4):
        tokens, producer = texts.next(), texts.producer(groups, has_state=has_state)
        limit = choose_limit(tokens, texts.rng)
        finder = cache.finder(BASE, tokens, producer)
        cached = finder.match(limit)
        assert cached.num_tokens == rules.longest(BASE, tokens[:limit], producer)
        assert {path.num_tokens for path in cached.paths} == {cached.num_tokens}
        assert cached == cache.match_prefix(BASE, tokens, limit, producer), "nothing is changed"
        if producer is None:
            known = limit if not groups else of_kv.longest(BASE, tokens[:limit], None)
            assert cached.known_tokens == (known if has_state else 0)
        answers = [finder.longest(n) for n in range(0, limit + 1, 50)]
        assert answers == sorted(answers), "fewer tokens never get more"
        assert answers == [finder.longest(n) for n in answers]


def full_groups(groups: Groups, node: Node) -> frozenset[int]:
    return frozenset(groups_of(groups, node.position * BLOCK_SIZE, node.end))


KINDS = [((FULL, FULL), FULL), ((FULL, FULL), SLIDING), ((FULL, SLIDING), SLIDING)]
PAIRED = [(PAIR, FULL), ((*PAIR, SLIDING), SLIDING), (pair("window", 300), SLIDING)]


@given(SEEDS, st.sampled_from([*KINDS, *PAIRED]))
@settings(max_examples=examples(300), deadline=None)
def test_the_longest_residuals(seed: int, kinds: tuple[Groups, FakeGroup]) -> None:
    """As many of the adapter's tokens as base can be read from on; then as many of base's."""
    texts = Texts(random.Random(seed))
    base, residuals = prefix_cache(*kinds[0]), prefix_cache(kinds[1], name="residual.x")
    fill(base, BASE, texts)
    fill(residuals, RESIDUAL, texts)
    below, above = reference(base, kinds[0]), reference(residuals, (kinds[1],))
    for _ in range(4):
        whole = texts.next()
        tokens = whole[: choose_limit(whole, texts.rng)]
        cached = match_residual_kv(base.finder(BASE, whole), residuals.finder(RESIDUAL, whole), len(tokens))
        ends = sorted({0, *below.ends(BASE, tokens), *above.ends(RESIDUAL, tokens)}, reverse=True)
        expected = next(
            (start, end)
            for start in ends
            if above.can_use(RESIDUAL, tokens, start)
            for end in ends
            if end >= start and below.can_use(BASE, tokens, end, read_from=start)
        )
        assert (cached.own.num_tokens, cached.num_tokens) == expected
        assert cached.own.known_tokens == above.longest(RESIDUAL, tokens, None)
        assert {path.read_from for path in cached.paths} == {cached.own.num_tokens}


@given(SEEDS, st.sampled_from([(FULL, OTHER), (SLIDING, FULL), (SLIDING, FULL, OTHER), *PAIRS[2:]]), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_the_longest_hidden_states(seed: int, groups: Groups, durable: bool) -> None:
    """Whole blocks after the prefix that base's path can continue from."""
    texts = Texts(random.Random(seed))
    cache = prefix_cache(*groups)
    fill(cache, BASE, texts, has_adapters=True)
    hidden_states = hide(cache, texts.rng)
    rules = reference(cache, groups)
    for _ in range(4):
        tokens, producer = texts.next(), texts.producer(groups, has_state=False)
        finder = cache.finder(BASE, tokens, producer)
        limit = len(tokens) - 1
        prefix = finder.match(texts.rng.choice([0, limit]))
        if len(prefix.paths) == 1:
            continue
        cached = match_hidden_states(prefix, finder, limit, hidden_states, CUT, durable=durable)
        first, below = prefix.num_tokens // BLOCK_SIZE, frozenset(prefix.paths[0].groups)
        most = max(
            (
                len(path)
                for count in range(first + 1, limit // BLOCK_SIZE + 1)
                for path in rules.paths(BASE, tokens[: count * BLOCK_SIZE], None)
                if rules.has(path, below, count * BLOCK_SIZE)
                and all(hidden_states.match([HiddenStateKey(node.chain, CUT)]) for node in path[first:])
                and (not durable or all(node.all_available(below & full_groups(groups, node)) for node in path[first:]))
            ),
            default=first,
        )
        found = cached.hidden_states
        assert (first if found is None else found.end // BLOCK_SIZE) == most
        assert (found is None) is (cached == prefix)
        if found is not None:
            assert (found.first, found.cut, cached.num_tokens) == (first, CUT, prefix.num_tokens)
            assert [node.chain for node in cached.paths[0].all_nodes[first:]] == [name.chain for name in found.names]
