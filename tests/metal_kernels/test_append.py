"""The append kernel against its definition and against what MLX quantises, in the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.packed import quantise
from agentcache.kv.packing import Quantisation
from agentcache.metal_kernels.append import packed_alone
from agentcache.metal_kernels.definition import stored, unpacked
from tests.marks import slow
from tests.metal_kernels.cases import DTYPES
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule

pytestmark = needs_clang


def drawn(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Values with groups of one sign, of one value and of nothing but zeros among them."""
    x = np.random.default_rng(seed).standard_normal(shape)
    x[..., 0, :] = np.abs(x[..., 0, :]) + 3
    x[..., 1, :] = -x[..., 0, :]
    x[..., 2, :] = 0
    x[..., 3, :] = 2.5
    return mx.array(x.astype(np.float32)).astype(dtype)


def off(x: mx.array, group_size: int, bits: int = 4) -> float:
    """Largest difference from the definition, beside the rounding of scales to float16."""
    data, scales, biases = (np.array(part) for part in packed_alone(x, group_size, bits))
    wanted = unpacked(stored(np.array(x.astype(mx.float32)).astype(np.float64), group_size, bits), bits)
    return float(np.abs(unpacked((data, scales, biases), bits) - wanted).max())


SIZES = [(64, 64), (96, 32), (128, 64), (192, 64), (256, 64)]


# The types differ in how a value is read, the sizes in where it goes: all sizes with one, and two with the others.
@pytest.mark.parametrize(
    ("dim", "group_size", "dtype"),
    [
        (*size, dtype) if dtype == mx.float32 or size in SIZES[:2] else slow(*size, dtype)
        for dtype in DTYPES
        for size in SIZES
    ],
    ids=str,
)
def test_every_shape_equals_what_mlx_packs(dim: int, group_size: int, dtype: mx.Dtype, emulate: Emulate) -> None:
    emulate()
    x = drawn((2, 3, 5, dim), dtype)
    for made, wanted in zip(packed_alone(x, group_size), quantise(x, Quantisation(4, group_size)), strict=True):
        assert made.dtype == wanted.dtype
        np.testing.assert_array_equal(np.array(made), np.array(wanted))
    if dtype == mx.float32:  # values of 16 bits lie right between two steps now and then
        assert off(x, group_size) <= 1e-6


@pytest.mark.parametrize(("dim", "group_size"), [SIZES[0], SIZES[1], *(slow(*size) for size in SIZES[2:])])
def test_every_shape_equals_what_mlx_packs_in_eight_bits(dim: int, group_size: int, emulate: Emulate) -> None:
    emulate()
    x = drawn((2, 3, 5, dim), mx.float32)
    for made, wanted in zip(packed_alone(x, group_size, 8), quantise(x, Quantisation(8, group_size)), strict=True):
        assert made.dtype == wanted.dtype
        np.testing.assert_array_equal(np.array(made), np.array(wanted))
    assert off(x, group_size, 8) <= 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_finding_in_any_schedule(schedule: Schedule, bits: int, emulate: Emulate) -> None:
    emulate(schedule)
    assert off(drawn((1, 3, 5, 96), mx.float16), 32, bits) <= 0.3  # a jittered quotient may round to the next step


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_no_number_is_packed_as_one(bits: int, emulate: Emulate) -> None:
    emulate()
    x = drawn((1, 1, 4, 64), mx.float32)
    x[0, 0, 0, 3], x[0, 0, 1, 5], x[0, 0, 2, 7] = float("nan"), float("inf"), -float("inf")
    for made, wanted in zip(packed_alone(x, 64, bits), quantise(x, Quantisation(bits)), strict=True):
        np.testing.assert_array_equal(np.array(made), np.array(wanted))


@pytest.mark.parametrize("bits", [4, 8])
def test_every_byte_moves_once(bits: int, emulate: Emulate) -> None:
    log = emulate()
    packed_alone(drawn((1, 3, 5, 96), mx.float16), 32, bits)
    [result] = log
    assert result.traffic["keys"].read == 3 * 5 * 96 * 2
    assert sum(result.traffic[name].written for name in ("kq", "ks", "kb")) == 3 * 5 * (96 * bits // 8 + 96 // 32 * 4)
    assert sum(result.traffic[name].written for name in ("vq", "vs", "vb")) == 0
