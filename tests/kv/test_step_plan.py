"""Which blocks a step reads: each row its own, however long the others are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.blocks.pool import BlockTable
from agentcache.kv.step_plan import RaggedBlocks, StepPlan


def plan(lengths: list[int], num_tokens: int = 1, window: int | None = None) -> StepPlan:
    tables, taken = [], 0
    for length in lengths:
        count = -(-(length + num_tokens) // 256)
        tables.append(BlockTable(list(range(taken, taken + count))))
        taken += count
    return StepPlan(tables, lengths, num_tokens, window)


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
