"""What is kept is what `mx.quantize` makes, and finite whatever comes in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import Quantisation
from tests.kv.arena_cases import Q32, Q64, random


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("quantisation", [Q64, Q32, Quantisation(8, 64)])
def test_quantise_is_mx_quantize_with_float16_scales(dtype: mx.Dtype, quantisation: Quantisation) -> None:
    x = random((3, 5, 128), dtype=dtype, size=4.0)
    data, scales, biases = mx.quantize(x.astype(mx.float32), quantisation.group_size, quantisation.bits)
    packed = quantise(x, quantisation)
    assert [part.dtype for part in packed] == [mx.uint32, mx.float16, mx.float16]
    assert mx.array_equal(packed.data, data)
    assert mx.array_equal(packed.scales, scales.astype(mx.float16))
    assert mx.array_equal(packed.biases, biases.astype(mx.float16))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dequantise_is_mx_dequantize_on_the_float16_scales(dtype: mx.Dtype) -> None:
    packed = quantise(random((3, 5, 128)), Q64)
    expected = mx.dequantize(packed.data, packed.scales.astype(mx.float32), packed.biases.astype(mx.float32), 64, 4)
    actual = dequantise(packed, Q64, dtype)
    assert actual.dtype == dtype
    assert mx.array_equal(actual, expected.astype(dtype))


def test_a_value_moves_by_at_most_a_step() -> None:
    x = random((50, 64), size=3.0)
    error = mx.abs(dequantise(quantise(x, Q64), Q64, mx.float32) - x)
    steps = mx.abs(quantise(x, Q64).scales.astype(mx.float32))
    assert mx.all(error <= 1.01 * steps).item()
    assert mx.mean(error <= 0.51 * steps).item() > 0.9


def test_low_nibble_comes_first() -> None:
    packed = Packed(mx.array([[0x76543210] + [0] * 7], dtype=mx.uint32), *(mx.array([[v]], mx.float16) for v in (1, 0)))
    assert dequantise(packed, Q64, mx.float32)[0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e6, 65504.0, -65504.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_scales_are_finite_whatever_comes_in(value: float, dtype: mx.Dtype) -> None:
    x = random((4, 128), size=1.0)
    x[1, 3] = value
    x[2] = value
    packed = quantise(x.astype(dtype), Q64)
    for part in (packed.scales, packed.biases, dequantise(packed, Q64, mx.float16)):
        assert mx.isfinite(part).all().item()
    assert mx.abs(dequantise(packed, Q64, mx.float32)).max().item() < 33000
    assert mx.array_equal(packed.data[0], quantise(x[:1].astype(dtype), Q64).data[0])


def test_large_values_do_not_wreck_their_neighbours() -> None:
    x = random((1, 128))
    x[0, 3] = 1e6  # in the first of two groups
    error = mx.abs(dequantise(quantise(x, Q64), Q64, mx.float32) - x)
    assert error[0, 4:64].max().item() <= 2000  # one step of a group up to 30000
    assert error[0, 64:].max().item() < 0.5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_masked_values_add_nothing_however_large(dtype: mx.Dtype) -> None:
    """Weight zero times a slot's content is zero: products of float16 would turn an infinity into NaN."""
    values = random((1, 256, 64))
    values[:, 100:] = random((1, 156, 64), 1, size=1e6)
    weights = mx.zeros((1, 1, 256)).at[..., :100].add(0.01).astype(dtype)
    out = mx.quantized_matmul(weights, *quantise(values, Q64), transpose=False, group_size=64, bits=4)
    near = mx.quantized_matmul(weights[..., :100], *quantise(values[:, :100], Q64), False, 64, 4)
    assert mx.isfinite(out).all().item()
    assert mx.abs(out - near).max().item() < 0.01
