"""Quantisation of keys by channel: each channel of each 64 tokens has its own scale and bias (arXiv 2402.02750)."""

from __future__ import annotations

import mlx.core as mx

from agentcache.kv.packed_arrays import Packed, limited

GROUP_TOKENS = 64
# The smallest normal float16: smaller ones lose digits, and then the highest code misses by more than a step.
SMALLEST_SCALE = 2.0**-14
_FEW_QUERIES = 2  # with more, unpacking once is faster than MLX's product with codes
_WORDS = {2: mx.uint16, 4: mx.uint32}  # that hold eight codes


def pack_by_channel(x: mx.array, bits: int = 4) -> Packed:
    """Quantise floats [..., T, D] to codes along D, lowest bits first, in float32. T is a multiple of 64.

    NaN becomes 0 and values saturate, as in `limited`. Scales and biases are [..., T/64, D].
    """
    groups = limited(x).reshape(*x.shape[:-2], -1, GROUP_TOKENS, x.shape[-1])
    low, high = groups.min(axis=-2, keepdims=True), groups.max(axis=-2, keepdims=True)
    most = 2**bits - 1
    biases = low.astype(mx.float16)
    rounded = mx.abs(biases.astype(mx.float32) - low)
    # A step is at least the rounding error of the bias: equal values far from 0 are then right to a step.
    scales = mx.maximum(mx.maximum((high - low) / most, rounded), SMALLEST_SCALE).astype(mx.float16)
    steps = mx.round((groups - biases.astype(mx.float32)) / scales.astype(mx.float32))
    codes = mx.clip(steps, 0, most).astype(mx.uint8).reshape(x.shape)
    return Packed(_packed_codes(codes, bits), scales.squeeze(-2), biases.squeeze(-2))


def unpack_by_channel(packed: Packed, dtype: mx.Dtype, bits: int = 4) -> mx.array:
    """Values [..., T, D], computed in float32. Groups may have fewer tokens, but equally many."""
    scales, biases = _factors(packed)
    codes = _codes(packed.data, bits)
    groups = codes.reshape(*scales.shape[:-1], -1, codes.shape[-1])
    values = groups * scales[..., None, :] + biases[..., None, :]
    return values.reshape(codes.shape).astype(dtype)


def product_by_channel(q: mx.array, packed: Packed, bits: int = 4) -> mx.array:
    """Multiply float32 `q` [..., n, D] with keys, transposed: [..., n, T]."""
    return (product_of_codes if q.shape[-2] <= _FEW_QUERIES else product_of_values)(q, packed, bits)


def product_of_values(q: mx.array, packed: Packed, bits: int = 4) -> mx.array:
    """`product_by_channel` with unpacked keys."""
    return q @ unpack_by_channel(packed, mx.float32, bits).swapaxes(-1, -2)


def product_of_codes(q: mx.array, packed: Packed, bits: int = 4) -> mx.array:
    """`product_by_channel` by `mx.quantized_matmul`, with scales and biases folded into the queries of each group."""
    scales, biases = _factors(packed)
    q = q[..., None, :, :]
    data = packed.data.reshape(*scales.shape[:-1], GROUP_TOKENS, -1)
    group_size = 64 if q.shape[-1] % 64 == 0 else 32
    ones = mx.ones((*data.shape[:-1], q.shape[-1] // group_size))
    products = mx.quantized_matmul(
        q * scales[..., None, :], data, ones, mx.zeros_like(ones), transpose=True, group_size=group_size, bits=bits
    )
    products = products + q @ biases[..., None]
    return products.swapaxes(-2, -3).reshape(*products.shape[:-3], q.shape[-2], -1)


def _factors(packed: Packed) -> tuple[mx.array, mx.array]:
    assert packed.scales is not None and packed.biases is not None
    return packed.scales.astype(mx.float32), packed.biases.astype(mx.float32)


def _packed_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack bytes [..., D] to uint32 [..., D * bits / 32]: eight at a time, which lie in an integer of 64 bits."""
    x = codes.view(mx.uint64)
    for fold in range(3):
        x = (x | (x >> _wide((8 - bits) << fold))) & _wide(_mask(bits, fold + 1))
    return x.view(mx.uint8).reshape(*x.shape, 8)[..., :bits].reshape(*x.shape[:-1], -1).view(mx.uint32)


def _codes(data: mx.array, bits: int) -> mx.array:
    """Codes as float32 [..., D]: `_packed_codes` backwards."""
    if bits in _WORDS:
        x = data.view(_WORDS[bits]).astype(mx.uint64)
    else:
        of_eight = data.view(mx.uint8).reshape(*data.shape[:-1], -1, bits)
        x = mx.pad(of_eight, [(0, 0)] * data.ndim + [(0, 8 - bits)]).view(mx.uint64).squeeze(-1)
    for fold in (2, 1, 0):
        x = (x | (x << _wide((8 - bits) << fold))) & _wide(_mask(bits, fold))
    return x.view(mx.uint8).astype(mx.float32)


def _wide(value: int) -> mx.array:
    return mx.array(value, mx.uint64)


def _mask(bits: int, fold: int) -> int:
    """Lowest `bits * 2**fold` of each `8 * 2**fold` bits."""
    ones, width = (1 << (bits << fold)) - 1, 8 << fold
    return sum(ones << at for at in range(0, 64, width))
