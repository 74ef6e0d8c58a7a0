"""Quantisation of cached values as in `mx.quantize` (value = q * scale + bias, low nibble first), and its inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from agentcache.kv.backing import ARRAY_DTYPES
from agentcache.kv.packing import Packing, Plain

_PLAIN_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16}
# Below this, unpacking in float16 cannot overflow: q * scale is at most 15/7 of the largest value.
LARGEST_VALUE = 30000.0


class Packed(NamedTuple):
    """Stored values.

    Quantised: `data` uint32 [..., D*bits/32], `scales` and `biases` float16 [..., D/group_size]. Else `data` [..., D]:
    float16, or bfloat16's bits as uint16.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    @property
    def parts(self) -> tuple[mx.array, ...]:
        return tuple(part for part in self if part is not None)


Pack = Callable[[mx.array, Packing], Packed]


def quantise(x: mx.array, quantisation: Packing) -> Packed:
    """Quantise floats [..., D], in float32.

    NaN becomes 0 and values saturate: masked reads would spread NaN and infinity.
    """
    x = x.astype(mx.float32)
    limited = mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST_VALUE, LARGEST_VALUE)
    if isinstance(quantisation, Plain):
        rounded = limited.astype(_PLAIN_DTYPES[quantisation.dtype])
        return Packed(rounded.view(ARRAY_DTYPES[quantisation.dtype]))
    data, scales, biases = mx.quantize(limited, group_size=quantisation.group_size, bits=quantisation.bits)
    return Packed(data, scales.astype(mx.float16), biases.astype(mx.float16))


def dequantise(packed: Packed, quantisation: Packing, dtype: mx.Dtype) -> mx.array:
    """Values [..., D] for attention, computed in float32."""
    if isinstance(quantisation, Plain):
        return packed.data.view(_PLAIN_DTYPES[quantisation.dtype]).astype(dtype)
    assert packed.scales is not None and packed.biases is not None
    values = mx.dequantize(
        packed.data,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        group_size=quantisation.group_size,
        bits=quantisation.bits,
    )
    return values.astype(dtype)
