"""The nearest of many, against looking at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.radix_tree import Siblings, pack, unpack

TOKEN = st.sampled_from([0, 1, 255, 256, 2**31])  # sorted as bytes the wrong way round, these change places
TOKENS = st.lists(TOKEN, min_size=1, max_size=6).map(tuple)


def make(children: set[tuple[int, ...]]) -> Siblings[tuple[int, ...]]:
    siblings = Siblings[tuple[int, ...]]()
    for child in children:
        siblings.add(pack(child), child)
    return siblings


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@given(st.sets(TOKENS, min_size=1, max_size=40), TOKENS, st.integers(1, 4), st.integers(0, 6))
def test_the_nearest_usable_one(
    children: set[tuple[int, ...]], tokens: tuple[int, ...], least: int, unusable: int
) -> None:
    """However many unusable ones lie in between."""
    nearest = make(children).nearest(pack(tokens), lambda child: len(child) != unusable, least)
    shared = {child: common(child, tokens) for child in children if len(child) != unusable}
    most = max((count for count in shared.values() if count >= least), default=0)
    best = {child for child, count in shared.items() if count == most > 0}
    assert nearest.num_tokens == most
    assert set(nearest.items) <= best
    assert len(nearest.items) == len(set(nearest.items)) >= min(len(best), 8)


@given(st.sets(TOKENS, max_size=20), st.sets(TOKENS, max_size=20))
def test_what_is_removed_is_gone(children: set[tuple[int, ...]], removed: set[tuple[int, ...]]) -> None:
    siblings = make(children)
    for child in removed & children:
        siblings.remove(pack(child))
    assert siblings.is_sorted
    assert set(siblings) == children - removed
    assert len(siblings) == len(children - removed)
    assert all(siblings.get(pack(child)) == (None if child in removed else child) for child in children)


@pytest.mark.parametrize("token_ids", [(), (0,), (1, 256, 2**32 - 1)])
def test_packing_loses_nothing(token_ids: tuple[int, ...]) -> None:
    assert tuple(unpack(pack(token_ids))) == token_ids
