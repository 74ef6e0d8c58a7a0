"""What a step reads: each row its own blocks, however long the others are; and where it writes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.reads import Part, RaggedBlocks, Reads
from agentcache.kv.step_cache import Writes
from tests.examples import examples
from tests.kv.paired_tables import paired_tables


def plan(lengths: list[int], num_tokens: int = 1, window: int | None = None) -> Reads:
    tables, taken = [], 0
    for length in lengths:
        count = -(-(length + num_tokens) // 256)
        tables.append(BlockTable(list(range(taken, taken + count))))
        taken += count
    return Reads(tables, lengths, num_tokens, window)


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=6), st.sampled_from([1, 3, 300]))
def test_no_block_is_read_for_another_rows_length(lengths: list[int], num_tokens: int) -> None:
    blocks = plan(lengths, num_tokens).blocks
    counts = [-(-(length + num_tokens) // 256) for length in lengths]
    assert blocks.ids.size == sum(counts)
    assert blocks.ids.tolist() == list(range(sum(counts)))
    assert blocks.rows.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]


def test_a_window_reads_its_last_blocks_only() -> None:
    step = plan([9000, 100], window=512)
    assert step.blocks.starts == [33 * 256, 34 * 256, 35 * 256, 0]
    assert step.blocks.ids.tolist() == [33, 34, 35, 36]


def test_a_part_of_the_rows_reads_what_these_rows_read() -> None:
    step = plan([9000, 100, 3000], window=512)
    assert step.of_rows([2, 0]).rows == [step.rows[2], step.rows[0]]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_block_mask_is_the_padded_mask_cut_into_blocks(num_tokens: int, window: int | None) -> None:
    step = plan([700, 3, 256], num_tokens, window)
    padded = np.array(step.mask).reshape(3, num_tokens, -1, 256)
    mask, index = np.array(step.block_mask), 0
    assert mask.shape == (step.blocks.ids.size, num_tokens, 256)
    for row, count in enumerate(np.bincount(np.array(step.blocks.rows))):
        for block in range(count):
            assert np.array_equal(mask[index], padded[row, :, block])
            index += 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2**31))
def test_sums_and_maxima_are_each_rows_own(counts: list[int], seed: int) -> None:
    blocks = RaggedBlocks([[0] * count for count in counts], [0] * sum(counts))
    x = np.random.default_rng(seed).normal(size=(sum(counts), 2, 3)).astype(np.float32)
    parts = np.split(x, np.cumsum(counts)[:-1])
    np.testing.assert_allclose(np.array(blocks.sum(mx.array(x))), [part.sum(0) for part in parts], atol=1e-5)
    np.testing.assert_array_equal(np.array(blocks.max(mx.array(x))), [part.max(0) for part in parts])
    spread = np.array(blocks.spread(mx.arange(len(counts))[:, None]))[:, 0]
    assert spread.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]


LENGTHS = [(0, 1), (255, 2), (300, 600), (512, 256), (90, 1)]


@pytest.mark.parametrize(("length", "num_tokens"), LENGTHS)
def test_runs_and_places_are_the_same_tokens(length: int, num_tokens: int) -> None:
    writes = Writes([BlockTable(list(range(40, 44)), first_block=0)], [length], num_tokens)
    positions = range(length, length + num_tokens)
    expected = [(40 + position // 256, position % 256) for position in positions]
    block_ids, offsets = writes.slots_and_offsets
    assert block_ids.dtype == offsets.dtype == mx.int32
    assert list(zip(block_ids.tolist(), offsets.tolist(), strict=True)) == expected
    runs = [(run.block_id, run.offset + i) for run in writes.runs for i in range(run.stop - run.start)]
    assert runs == expected
    assert [run.start for run in writes.runs] == [0, *(run.stop for run in writes.runs[:-1])]


def blocks_of(part: Part) -> list[tuple[int, int, bool]]:
    """Number, slot and form of each block."""
    return [(part.start // 256 + index, slot, part.is_open) for index, slot in enumerate(part.ids.tolist())]


@given(st.integers(0, 1100), st.integers(1, 600), st.none() | st.integers(1, 900))
@settings(max_examples=examples(150), deadline=None)
def test_queries_read_the_first_block_and_their_own_in_the_open_form(
    length: int, num_tokens: int, window: int | None
) -> None:
    full, opened = paired_tables(length, num_tokens, window)
    step = Reads([full], [length], num_tokens, window, [opened])
    has_first = False
    for start, stop, reads in step.segments:
        own, first = (length + start) // 256, 0 if window is None else max(0, length + start - window + 1) // 256
        expected = [(at, 200 + at, True) if at in (0, own) else (at, 100 + at, False) for at in range(first, own + 1)]
        assert [block for part in reads.parts for block in blocks_of(part)] == expected
        assert (reads.key_start, reads.num_keys) == (first * 256, length + stop - first * 256)
        assert sum(part.num_tokens for part in reads.parts) == reads.num_keys
        starts = [start for part in reads.parts for start in reads.blocks.starts[part.span]]
        assert starts == [at * 256 for at, *_ in expected]
        assert reads.mask.shape == (1, stop - start, 256 * len(expected))
        assert reads.block_mask.sum().item() == reads.mask.sum().item()
        [row] = reads.rows
        assert row.base >= 256 and row.first_slot == (200 if first == 0 < own else -1)
        has_first = has_first or row.first_slot >= 0
    [row] = step.rows
    assert (row.first_slot >= 0) is has_first
    last = (length + num_tokens - 1) // 256
    assert step.full_ids.tolist() == [100 + at for at in range(row.base // 256, last)]


def test_a_step_without_the_first_blocks_slot_is_refused() -> None:
    full, opened = BlockTable([8, 9], 1), BlockTable([5], 2)
    assert Reads([full], [600], 1, 300, [opened]).rows[0].first_slot == -1
    with pytest.raises(BrokenInvariant, match="block 0"):
        Reads([full], [600], 1, None, [opened])


def test_a_table_of_sealed_blocks_that_begins_with_block_0_is_refused() -> None:
    """Its blocks would be read as later ones."""
    every = BlockTable([0, 1, 2])
    with pytest.raises(BrokenInvariant, match="stays open"):
        Reads([every], [520], 1, None, [every])


def test_a_step_seals_the_blocks_that_it_fills_but_not_the_first() -> None:
    full, opened = BlockTable([8, 9], 1), BlockTable([3, 4, 5])
    writes = Writes([opened], [200], 500, [full])
    assert writes.full_rows == [[-1, 8, 9]] and writes.filled == [(4, 8)]
    assert not Writes([opened], [200], 56, [full]).filled
    assert Writes([opened, opened], [200, 510], 70, [full, full]).filled == [(4, 8)]


def test_places_of_several_rows_lie_one_behind_the_other() -> None:
    writes = Writes([BlockTable([7, 8]), BlockTable([3], first_block=2)], [254, 600], 3)
    assert [array.tolist() for array in writes.slots_and_offsets] == [[7, 7, 8, 3, 3, 3], [254, 255, 0, 88, 89, 90]]


def test_a_step_needs_reserved_blocks() -> None:
    Writes([BlockTable([2])], [255], 1)
    with pytest.raises(BrokenInvariant, match="without reserving"):
        Writes([BlockTable([2])], [255], 2)


def test_what_becomes_of_a_table_later_changes_nothing() -> None:
    """The device may be at work on the step when blocks fall out of the window, or are given up."""
    table = BlockTable([5, 6, 7])
    reads, writes = Reads([table], [600], 5, None), Writes([table], [600], 5)
    table.block_ids.clear()
    assert reads.block_ids.tolist() == [[5, 6, 7]] and reads.blocks.ids.tolist() == [5, 6, 7]
    assert writes.slots_and_offsets[0].tolist() == [7] * 5 and [run.block_id for run in writes.runs] == [7]
