"""Values as they are kept: made, and made into floats again.

As `mx.quantize` packs them: value = q * scale + bias, low nibble first; or 16-bit floats as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from agentcache.kv.backing import ARRAY_DTYPES
from agentcache.kv.packing import Packing, Plain

_PLAIN_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16}
# Quantised values within this limit can be unpacked in float16: q * scale is at most 15/7 of the largest value.
LARGEST_VALUE = 30000.0


class Packed(NamedTuple):
    """Values as they are kept.

    Quantised: `data` uint32 [..., D*bits/32], `scales` and `biases` float16 [..., D/group_size]. Else `data` alone
    [..., D]: float16, or the bits of bfloat16 as uint16.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    @property
    def parts(self) -> tuple[mx.array, ...]:
        """Those that there are."""
        return tuple(part for part in self if part is not None)


# Packs [..., D] along the last axis.
Pack = Callable[[mx.array, Packing], Packed]


def quantise(x: mx.array, quantisation: Packing) -> Packed:
    """Quantise [..., D] of any float dtype along the last axis, in float32, keeping scales and biases in float16.

    NaN becomes 0 and values saturate: a slot is also read, masked, by rows it does not belong to, so nothing in it may
    turn into NaN or infinity there.
    """
    x = x.astype(mx.float32)
    limited = mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST_VALUE, LARGEST_VALUE)
    if isinstance(quantisation, Plain):
        rounded = limited.astype(_PLAIN_DTYPES[quantisation.dtype])
        return Packed(rounded.view(ARRAY_DTYPES[quantisation.dtype]))
    data, scales, biases = mx.quantize(limited, group_size=quantisation.group_size, bits=quantisation.bits)
    return Packed(data, scales.astype(mx.float16), biases.astype(mx.float16))


def dequantise(packed: Packed, quantisation: Packing, dtype: mx.Dtype) -> mx.array:
    """The values [..., D] that attention sees, computed in float32."""
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
