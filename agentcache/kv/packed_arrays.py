"""Stored keys or values as arrays."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Below this, unpacking in float16 cannot overflow: q * scale is at most 15/7 of the largest value.
LARGEST_VALUE = 30000.0


class Packed(NamedTuple):
    """Stored values.

    Quantised: `data` uint32 [..., T, D*bits/32], `scales` and `biases` float16 [..., T, D/group_size], by channel
    [..., T/group_tokens, D]. Else `data` [..., D]: float16, or bfloat16's bits as uint16.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    @property
    def parts(self) -> tuple[mx.array, ...]:
        return tuple(part for part in self if part is not None)


def limited(x: mx.array) -> mx.array:
    """Return finite float32 values: masked reads would spread NaN and infinity. NaN becomes 0, values saturate."""
    x = x.astype(mx.float32)
    return mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST_VALUE, LARGEST_VALUE)
