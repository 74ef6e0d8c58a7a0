"""Rows of any length join, grow, fork and leave; each stays bit for bit what it is alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.packing import PARTS
from agentcache.kv.reads import Reads
from tests.examples import examples
from tests.kv.cache_cases import DIM, HEADS, Desk, History, assert_rows, batch_of, step

LENGTHS = [3, 256, 300, 511]


@pytest.mark.parametrize("chunks", [[1], [256], [257], [100] * 7, [255, 1, 1], [1000, 24, 1]])
def test_one_row(chunks: list[int]) -> None:
    desk = Desk()
    cache, history = desk.cache(), History(0)
    for chunk in chunks:
        step(cache, [history], chunk)
    assert_rows(cache, [history])
    assert cache.offset == cache.size() == sum(chunks)
    desk.check(cache)


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_ragged_rows_grow_together(num_tokens: int) -> None:
    desk = Desk()
    cache, histories = batch_of(desk, LENGTHS)
    step(cache, histories, num_tokens)
    assert_rows(cache, histories)
    assert cache.offset.tolist() == [length + num_tokens for length in LENGTHS]
    desk.check(cache)


OPERATIONS = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 300)),
    st.tuples(st.just("step"), st.sampled_from([1, 1, 2, 7, 256, 270])),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("fork"), st.integers(0, 9)),
    st.tuples(st.just("turn"), st.integers(0, 9)),
    st.tuples(st.just("trim"), st.sampled_from([1, 3, 260])),
)


class Crowd:
    """A batch under random joins and leaves, beside the histories of its rows."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.cache = self.desk.cache()
        self.histories = [History(0)]
        self.seeds = iter(range(1, 1000))

    def run(self, operation: str, number: int) -> None:
        getattr(self, operation)(number)
        assert_rows(self.cache, self.histories)
        self.desk.check(self.cache)

    def join(self, length: int) -> None:
        other, histories = self.desk.cache(), [History(next(self.seeds))]
        if length:
            step(other, histories, length)
        self.cache.extend(other)
        self.histories += histories

    def step(self, num_tokens: int) -> None:
        if self.histories:
            step(self.cache, self.histories, num_tokens)

    def leave(self, number: int) -> None:
        if self.histories:
            kept = [i for i in range(len(self.histories)) if i != number % len(self.histories)]
            self.cache.filter(mx.array(kept, dtype=mx.int32))
            self.histories = [self.histories[i] for i in kept]

    def turn(self, number: int) -> None:
        order = [(i + number) % len(self.histories) for i in range(len(self.histories))]
        self.cache.filter(order)
        self.histories = [self.histories[i] for i in order]

    def fork(self, number: int) -> None:
        """A row's copy goes on alone for a token, then joins."""
        if self.histories:
            index = number % len(self.histories)
            other, history = self.cache.extract(index), self.histories[index].fork(next(self.seeds))
            step(other, [history], 1)
            self.cache.extend(other)
            self.histories.append(history)

    def trim(self, num_tokens: int) -> None:
        trimmed = self.cache.trim(num_tokens)
        assert trimmed == min([num_tokens, *(history.length for history in self.histories)])
        for history in self.histories:
            history.trim(trimmed)


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX 0.32.4 ends the process on CUDA: floating point exception")
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(OPERATIONS, max_size=10))
def test_random_joins_and_leaves(operations: list[tuple[str, int]]) -> None:
    crowd = Crowd()
    for operation, number in operations:
        crowd.run(operation, number)


def test_an_extracted_row_outlives_the_batch() -> None:
    """mlx-lm takes a finished row out of the batch and then filters it away; the batch goes on in other slots."""
    desk = Desk()
    cache, histories = batch_of(desk, [300, 40])
    extracted = cache.extract(0)
    cache.filter([1])
    step(cache, histories[1:], 700)
    assert_rows(extracted, histories[:1])
    assert_rows(cache, histories[1:])
    desk.check(cache, extracted)


def test_a_fork_shares_slots_until_it_writes() -> None:
    desk = Desk()
    cache, histories = batch_of(desk, [300])
    twin = cache.extract(0)
    assert twin.tables[0].block_ids == cache.tables[0].block_ids
    fork = histories[0].fork(9)
    step(twin, [fork], 2)
    step(cache, histories, 3)
    assert_rows(twin, [fork])
    assert_rows(cache, histories)
    first, second = (c.tables[0].block_ids for c in (cache, twin))
    assert first[0] == second[0] and first[1] != second[1]


@pytest.mark.parametrize("window", [None, 32, 300])
def test_rows_go_into_a_batch_and_come_out_bit_for_bit(window: int | None) -> None:
    """Rows grown here, read from files, forked, and with a window, in any mixture and order."""
    desk = Desk(window)
    grown, histories = batch_of(desk, [0, 40, 256, 700])
    from_disk = [read_back(desk, grown.extract(index)) for index in (1, 3)]
    forks = [grown.extract(index) for index in (3, 3, 2)]
    rows = [*(grown.extract(index) for index in range(4)), *from_disk, *forks]
    known = [*histories, *(histories[i].fork(10 + i) for i in (1, 3)), *(histories[i].fork(20 + i) for i in (3, 3, 2))]
    before = [contents(row) for row in rows]
    free = desk.pool.num_free
    merged = BatchQuantizedKVCache.merge(rows)
    assert desk.pool.num_free == free
    assert [contents(merged.extract(index)) for index in range(len(rows))] == before
    known[7].seed = 99  # the two forks of one row write differently
    step(merged, known, 3)
    for index in reversed(range(len(rows))):
        if window is None:
            assert_rows(merged.extract(index), [known[index]])
        assert contents(merged.extract(index)) == contents_of_row(merged, index)


def read_back(desk: Desk, row: BatchQuantizedKVCache) -> BatchQuantizedKVCache:
    """The row's blocks as a file would hold them, put into other slots."""
    table = row.tables[0]
    desk.pool.grow(desk.pool.capacity + len(table.block_ids))
    target = [desk.pool.allocate() for _ in table.block_ids]
    desk.arena.grow(desk.pool.capacity)
    for _, side in desk.arena.sides:
        for name, part in zip(PARTS, side.gather(mx.array(table.block_ids)), strict=True):
            side.parts[name].upload(target, part)
    return BatchQuantizedKVCache(desk.arena, desk.pool, [BlockTable(target, table.first_block)], row.lengths)


def contents(row: BatchQuantizedKVCache) -> list[bytes]:
    return contents_of_row(row, 0)


def contents_of_row(cache: BatchQuantizedKVCache, index: int) -> list[bytes]:
    """Every byte of a row that counts."""
    if not cache.lengths[index]:
        return []
    return [np.array(part).tobytes() for packed in cache.row(index).values() for part in packed]


def test_merging_copies_no_kv() -> None:
    desk = Desk()
    caches = [desk.cache() for _ in range(2)]
    for seed, cache in enumerate(caches):
        step(cache, [History(seed)], 300)
    tables = [cache.tables[0].block_ids for cache in caches]
    merged = BatchQuantizedKVCache.merge(caches)
    assert [table.block_ids for table in merged.tables] == tables
    assert merged.nbytes == 4 * 256 * HEADS * 2 * (DIM // 2 + 4)


def test_rows_of_different_arenas_do_not_merge() -> None:
    with pytest.raises(BrokenInvariant, match="different arenas"):
        BatchQuantizedKVCache.merge([Desk().cache(), Desk().cache()])


def test_empty_caches() -> None:
    desk = Desk()
    cache = desk.cache(2)
    assert cache.empty() and cache.size() == 0 and cache.nbytes == 0 and cache.state == () and cache.trim(3) == 0
    histories = [History(0), History(1)]
    step(cache, histories, 4)
    assert not cache.empty() and cache.is_trimmable() and cache.bits == 4 and cache.group_size == 32
    cache.trim(4)
    assert cache.empty()


def test_the_state_of_a_row_without_tokens() -> None:
    cache, _ = batch_of(Desk(), [10, 0])
    (data, _, _), _ = cache.state
    assert data.shape == (2, HEADS, 256, DIM // 8)


def test_padding_on_the_left_is_refused() -> None:
    with pytest.raises(BrokenInvariant, match="left"):
        Desk().cache().prepare(left_padding=[1])


@pytest.mark.parametrize("window", [None, 1, 32, 256, 300])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_masks(window: int | None, num_tokens: int) -> None:
    """Bit for bit mlx-lm's causal mask, once a row's keys are put where they are read from."""
    lengths = [0, 5, 255, 700]
    cache, _ = batch_of(Desk(window), lengths)
    mask = cache.make_mask(num_tokens, window_size=window)
    reads = Reads(cache.tables, lengths, num_tokens, window)
    assert mask.shape == (4, 1, num_tokens, reads.block_ids.shape[1] * 256)
    for index, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window + 1) // 256
        expected = np.zeros((num_tokens, first * 256 + mask.shape[3]), bool)
        expected[:, : length + num_tokens] = create_causal_mask(num_tokens, length, window_size=window)
        np.testing.assert_array_equal(np.array(mask[index, 0]), expected[:, first * 256 :])
        assert not expected[:, : first * 256].any()


def test_another_window_is_refused() -> None:
    with pytest.raises(BrokenInvariant, match="window is 32, the model asks for 64"):
        Desk(32).cache().make_mask(1, window_size=64)


def test_a_window_reads_only_the_blocks_it_needs() -> None:
    table = BlockTable(list(range(40)))
    reads = Reads([table], [9000], 1, 512)
    assert reads.block_ids.tolist() == [[33, 34, 35]]
    assert Reads([BlockTable([7, 8, 9], first_block=33)], [9000], 1, 512).block_ids.tolist() == [[7, 8, 9]]


@pytest.mark.parametrize("length", [10, 300, 600])
def test_a_row_with_a_window_starts_at_its_first_block(length: int) -> None:
    cache, (history,) = batch_of(Desk(32), [length])
    start = max(0, length - 31) // 256 * 256
    expected = history.packed()["value_cache"].data[:, start:]
    assert mx.array_equal(cache.row(0)["value_cache"].data, expected)


def test_rows_without_values() -> None:
    desk = Desk(value_dim=0)
    cache = desk.cache()
    history = History(0)
    cache.update(mx.array(history.draw(5)[0])[None], None)
    assert list(cache.row(0)) == ["key_cache"]
    assert mx.array_equal(cache.row(0)["key_cache"].data, history.packed()["key_cache"].data)
