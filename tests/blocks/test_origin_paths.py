"""The layout of sequences in paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.keys import BASE_ORIGIN, BLOCK_SIZE, BlockName, KVOrigin, chain_key
from agentcache.blocks.origin_paths import (
    BlockSpan,
    agreed_tokens,
    chain_keys,
    has_base_tail,
    lay_out,
    name_blocks,
    spans,
)

NUM_GROUPS = 3
ORIGINS = st.none() | st.builds(
    KVOrigin, st.sampled_from("ab"), st.integers(0, 700), st.sets(st.integers(0, 2)).map(frozenset)
)


@given(ORIGINS)
def test_each_group_is_on_one_path(producer: KVOrigin | None) -> None:
    paths = lay_out(producer, NUM_GROUPS)
    assert sorted(group for path in paths for group in path.groups) == [0, 1, 2]
    assert all(path.groups for path in paths)
    own = [path.groups for path in paths if path.producer is not None]
    assert own == ([tuple(sorted(producer.groups))] if producer and producer.groups else [])


@given(ORIGINS, st.integers(0, 700))
def test_every_token_of_every_group_is_in_one_block_of_who_computes_it(producer: KVOrigin | None, length: int) -> None:
    layout = spans(length, producer, NUM_GROUPS)
    path = layout[:-1] if has_base_tail(producer, length) else layout
    for group in range(NUM_GROUPS):
        blocks = [span for span in path if group in span.groups]
        assert [span.begin for span in blocks] == list(range(0, length, BLOCK_SIZE))
        assert [span.end for span in blocks] == [
            min(begin + BLOCK_SIZE, length) for begin in range(0, length, BLOCK_SIZE)
        ]
        for span in blocks:
            is_own = producer is not None and group in producer.groups and span.end > producer.start
            assert span.producer == (producer.text if producer and is_own else BASE_ORIGIN)
    for span in layout:
        assert (span.parent is None) is (span.begin == 0)
        if span.parent is not None:
            parent = layout[span.parent]
            assert parent.end == span.begin
            assert parent.producer in (BASE_ORIGIN, span.producer)
            assert set(span.groups) & set(parent.groups)


@given(ORIGINS, st.integers(0, 700), st.integers(0, 2))
def test_what_ends_in_front_of_a_block_is_the_layout_up_to_there(
    producer: KVOrigin | None, length: int, position: int
) -> None:
    cut = min(position * BLOCK_SIZE, length // BLOCK_SIZE * BLOCK_SIZE)
    token_ids = list(range(length))
    whole, part = spans(length, producer, NUM_GROUPS), spans(cut, producer, NUM_GROUPS)
    kept = [
        (chain, span.groups)
        for chain, span in zip(chain_keys("r", token_ids, whole), whole, strict=True)
        if span.end <= cut
    ]
    assert kept == [(chain, span.groups) for chain, span in zip(chain_keys("r", token_ids, part), part, strict=True)]


@pytest.mark.parametrize(
    ("start", "length", "expected"), [(0, 9, False), (5, 5, False), (5, 6, True), (256, 300, False), (300, 301, True)]
)
def test_the_base_tail_is_what_the_own_block_hides(start: int, length: int, expected: bool) -> None:
    producer = KVOrigin("a", start, frozenset([1]))
    assert has_base_tail(producer, length) is expected
    assert not has_base_tail(None, length)
    last = spans(length, producer, NUM_GROUPS)[-1]
    parent = 2 if start == 300 else None  # behind the own path's first block, which is base's
    tail = BlockSpan(start // BLOCK_SIZE * BLOCK_SIZE, start, BASE_ORIGIN, (0, 1, 2), parent)
    assert (last == tail) is expected


def test_base_is_laid_out_as_one_chain() -> None:
    layout = spans(600, None, 2)
    assert [(span.begin, span.end, span.producer, span.groups, span.parent) for span in layout] == [
        (0, 256, "base", (0, 1), None),
        (256, 512, "base", (0, 1), 0),
        (512, 600, "base", (0, 1), 1),
    ]
    first = chain_key("root", range(256))
    assert chain_keys("root", list(range(600)), layout)[:2] == [first, chain_key(first, range(256, 512))]


def test_the_adapters_path_leaves_bases_path_at_the_block_of_the_start() -> None:
    producer = KVOrigin("a", 300, frozenset([1]))
    layout = spans(600, producer, 2)
    assert [(span.begin, span.end, span.producer, span.groups, span.parent) for span in layout] == [
        (0, 256, "base", (0,), None),
        (256, 512, "base", (0,), 0),
        (512, 600, "base", (0,), 1),
        (0, 256, "base", (1,), None),
        (256, 512, "a@300", (1,), 3),
        (512, 600, "a@300", (1,), 4),
        (256, 300, "base", (0, 1), 3),
    ]
    chains = chain_keys("root", list(range(600)), layout)
    assert chains[0] == chains[3]
    assert len(set(chains)) == len(chains) - 1
    assert name_blocks(chains, layout)[-1].names == [BlockName(chains[-1], 0), BlockName(chains[-1], 1)]


@given(ORIGINS, ORIGINS, st.integers(0, 700))
def test_producers_agree_until_the_first_of_them_starts(
    left: KVOrigin | None, right: KVOrigin | None, length: int
) -> None:
    agreed = agreed_tokens(left, right, length)
    assert agreed == agreed_tokens(right, left, length) <= length
    if left == right:
        assert agreed == length
    else:
        assert agreed == min([length, *(producer.start for producer in (left, right) if producer)])
