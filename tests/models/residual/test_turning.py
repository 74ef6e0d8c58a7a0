"""How a rope turns keys, read off it: the tables that kernels are given turn as the rope does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from agentcache.metal_kernels.rope_tables import STEP
from agentcache.models.residual.fused import Turning, turning_of
from agentcache.models.residual.kv import KeyForm

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def still(x: mx.array, offset: Any = 0) -> mx.array:
    return x


ROPES = {
    "plain": (nn.RoPE(64), 64, 32, False),
    "interleaved": (nn.RoPE(64, traditional=True), 64, 32, True),
    "partial": (nn.RoPE(32, base=1e6), 64, 16, False),
    "partial, interleaved": (nn.RoPE(16, traditional=True), 96, 8, True),
    "scaled": (nn.RoPE(128, scale=0.125), 128, 64, False),
    "llama3": (initialize_rope(64, 500000.0, False, LLAMA3, 131072), 64, 32, False),
    "yarn, with a gain": (initialize_rope(64, 10000.0, False, YARN, 16384), 64, 32, False),
    "none": (still, 64, 0, False),
}


@pytest.mark.parametrize(("rope", "dim", "pairs", "interleaved"), ROPES.values(), ids=ROPES)
def test_two_turns_are_the_ropes(rope: Any, dim: int, pairs: int, interleaved: bool) -> None:
    turning = Turning(rope, dim)
    assert (turning.pairs, turning.interleaved, turning.why_not) == (pairs, interleaved, "")
    if not pairs:
        assert turning.turns(100, mx.float32).pairs == 0
        return
    positions = np.array([0, 15, 16, 300, 4095])
    turns = turning.turns(4096, mx.float32)
    assert turns.near.shape == (STEP, 2 * pairs)
    assert turns.far.shape[0] > 4095 // STEP
    near, far = (
        np.array(table).reshape(-1, pairs // 2, 2, 2).swapaxes(1, 2).reshape(-1, 2, pairs)
        for table in (turns.near[mx.array(positions % STEP)], turns.far[mx.array(positions // STEP)])
    )
    near, far = (table.reshape(len(positions), 2, pairs) for table in (near, far))
    x = np.random.default_rng(0).standard_normal((len(positions), dim)).astype(np.float32)
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else _halves(pairs)
    made = x.copy()
    for table in (near, far):
        one, two = made[:, first].copy(), made[:, second].copy()
        made[:, first] = one * table[:, 0] - two * table[:, 1]
        made[:, second] = two * table[:, 0] + one * table[:, 1]
    expected = np.array(rope(mx.array(x)[:, None, None], offset=mx.array(positions)))[:, 0, 0]
    assert np.abs(made - expected).max() < 2e-3, "at 4095, where a float32 angle is off by as much"
    assert np.abs(made - expected)[:3].max() < 1e-5


def _halves(pairs: int) -> tuple[slice, slice]:
    return slice(0, pairs), slice(pairs, 2 * pairs)


def grows(x: mx.array, offset: Any = 0) -> mx.array:
    """As dynamic NTK does: its base depends on the position."""
    rows = [
        mx.fast.rope(row[None], 64, traditional=False, base=10000.0 * (1 + int(at) / 100), scale=1.0, offset=int(at))
        for row, at in zip(x, offset.tolist(), strict=True)
    ]
    return mx.concatenate(rows)


@pytest.mark.parametrize(
    ("rope", "dim", "why"), [(grows, 64, "no multiples of the position"), (nn.RoPE(20), 64, "a rope of 10 pairs")]
)
def test_what_no_kernel_does_is_refused(rope: Any, dim: int, why: str) -> None:
    assert why in Turning(rope, dim).why_not


def test_layers_that_turn_alike_have_one_and_it_grows() -> None:
    forms = [KeyForm(nn.RoPE(64, base=base), None) for base in (7e3, 7e3, 8e3)]
    one, same, other = (turning_of(form, 64) for form in forms)
    assert one is same and one is not other
    short, again, long = (one.turns(count, mx.float16) for count in (10, 4096, 4097))
    assert short is again
    assert long.far.shape[0] > short.far.shape[0]
    assert mx.array_equal(long.far[: short.far.shape[0]], short.far)
