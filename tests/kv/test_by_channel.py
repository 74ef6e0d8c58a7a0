"""Keys packed by channel: equal to the definition bit for bit, right to a step, finite whatever comes in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.by_channel import (
    Packed,
    pack_by_channel,
    product_by_channel,
    product_of_codes,
    product_of_values,
    unpack_by_channel,
)
from agentcache.metal_kernels.definition import PackedNumpy, quantise_by_channel, unpacked_by_channel
from tests.kv.arena_cases import random

BITS = (2, 3, 4)
DIMS = (32, 64, 96, 128)


def keys(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values with channels of one value, of one sign, far from 0, and with ties between two codes among them."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[..., 0] = 0
    x[..., 1] = 2.3456789
    x[..., 2] += 100
    x[..., 3] = 29999.7
    x[..., 4] = np.where(np.arange(shape[-2]) % 2, 30000, -30000)
    x[..., 5] = np.arange(shape[-2]) % 64 * 0.5
    x[..., 6] *= 1e-6
    x[..., 7] = -29990 + x[..., 8]
    return x


def as_numpy(packed: Packed) -> PackedNumpy:
    data, scales, biases = (np.array(part) for part in packed.parts)
    return data, scales, biases


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_packing_equals_the_definition(dim: int, bits: int) -> None:
    x = keys((3, 2, 256, dim))
    packed = pack_by_channel(mx.array(x), bits)
    assert packed.data.shape == (3, 2, 256, dim * bits // 32)
    for made, wanted in zip(as_numpy(packed), quantise_by_channel(x, bits), strict=True):
        assert made.dtype == wanted.dtype
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_unpacking_equals_the_definition(bits: int, dtype: mx.Dtype) -> None:
    packed = pack_by_channel(mx.array(keys((2, 256, 96))), bits)
    expected = mx.array(unpacked_by_channel(as_numpy(packed), bits).astype(np.float32)).astype(dtype)
    made = unpack_by_channel(packed, dtype, bits)
    assert made.dtype == dtype
    assert mx.array_equal(made, expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_each_value_is_right_to_a_step(dtype: mx.Dtype, bits: int) -> None:
    x = mx.array(keys((2, 256, 64))).astype(dtype)
    packed = pack_by_channel(x, bits)
    error = mx.abs(unpack_by_channel(packed, mx.float32, bits) - x).reshape(2, 4, 64, 64)
    assert packed.scales is not None
    steps = packed.scales.astype(mx.float32)[..., None, :]
    assert mx.all(error <= 1.001 * steps).item()
    plain = error[..., 8:] / steps[..., 8:]
    assert plain.max().item() <= 0.51


def test_codes_lie_where_mlx_reads_them() -> None:
    for bits in BITS:
        packed = pack_by_channel(mx.array(keys((256, 64))), bits)
        ones = mx.ones((256, 1))
        codes = mx.dequantize(packed.data, ones, mx.zeros_like(ones), 64, bits)
        plain = Packed(packed.data, mx.ones((4, 64), mx.float16), mx.zeros((4, 64), mx.float16))
        assert mx.array_equal(codes, unpack_by_channel(plain, mx.float32, bits))


def test_each_group_of_64_tokens_has_scales_of_its_own() -> None:
    x = random((256, 32))
    packed = pack_by_channel(x)
    for group in range(4):
        own = pack_by_channel(x[64 * group : 64 * group + 64])
        assert packed.scales is not None and packed.biases is not None
        assert own.scales is not None and own.biases is not None
        assert mx.array_equal(packed.data[64 * group : 64 * group + 64], own.data)
        assert mx.array_equal(packed.scales[group : group + 1], own.scales)
        assert mx.array_equal(packed.biases[group : group + 1], own.biases)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e6, 65504.0, -65504.0])
def test_scales_are_finite_whatever_comes_in(value: float) -> None:
    x = keys((256, 32))
    x[3, 9] = value
    x[:, 10] = value
    packed = pack_by_channel(mx.array(x))
    for part in (packed.scales, packed.biases, unpack_by_channel(packed, mx.float16)):
        assert part is not None and mx.isfinite(part).all().item()
    assert mx.abs(unpack_by_channel(packed, mx.float32)).max().item() < 33000
    for made, wanted in zip(as_numpy(packed), quantise_by_channel(x), strict=True):
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("product", [product_by_channel, product_of_codes, product_of_values])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dim", "num_queries"), [(32, 1), (64, 2), (96, 3), (128, 7)])
def test_products_are_those_with_unpacked_keys(product, dim: int, num_queries: int, bits: int) -> None:  # type: ignore[no-untyped-def]
    packed = pack_by_channel(random((5, 2, 256, dim), 1), bits)
    q = random((5, 2, num_queries, dim), 2)
    expected = np.array(q).astype(np.float64) @ unpacked_by_channel(as_numpy(packed), bits).swapaxes(-1, -2)
    made = product(q, packed, bits)
    assert made.shape == (5, 2, num_queries, 256)
    np.testing.assert_allclose(np.array(made), expected, rtol=0, atol=2e-5 * dim**0.5)
