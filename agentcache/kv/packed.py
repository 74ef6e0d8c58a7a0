"""Quantisation of cached values as in `mx.quantize` (value = q * scale + bias, low nibble first), and its inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from agentcache.kv.backing import ARRAY_DTYPES
from agentcache.kv.by_channel import pack_by_channel, unpack_by_channel
from agentcache.kv.packed_arrays import Packed, limited
from agentcache.kv.packing import ByChannel, Packing, Plain

_PLAIN_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16}


class PackedBlocks(NamedTuple):
    """Blocks [n, H, 256, ·] of one packing."""

    packed: Packed
    packing: Packing


Pack = Callable[[mx.array, Packing], Packed]


def quantise(x: mx.array, quantisation: Packing) -> Packed:
    """Quantise floats [..., D], by channel [..., 256, D], in float32, after `limited`."""
    if isinstance(quantisation, ByChannel):
        return pack_by_channel(x, quantisation.bits)
    x = limited(x)
    if isinstance(quantisation, Plain):
        rounded = x.astype(_PLAIN_DTYPES[quantisation.dtype])
        return Packed(rounded.view(ARRAY_DTYPES[quantisation.dtype]))
    data, scales, biases = mx.quantize(x, group_size=quantisation.group_size, bits=quantisation.bits)
    return Packed(data, scales.astype(mx.float16), biases.astype(mx.float16))


def dequantise(packed: Packed, quantisation: Packing, dtype: mx.Dtype) -> mx.array:
    """Values [..., D] for attention, computed in float32."""
    if isinstance(quantisation, Plain):
        return packed.data.view(_PLAIN_DTYPES[quantisation.dtype]).astype(dtype)
    if isinstance(quantisation, ByChannel):
        return unpack_by_channel(packed, dtype, quantisation.bits)
    assert packed.scales is not None and packed.biases is not None
    values = mx.dequantize(
        packed.data,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        group_size=quantisation.group_size,
        bits=quantisation.bits,
    )
    return values.astype(dtype)
