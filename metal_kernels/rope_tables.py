"""How rope turns keys, as the kernels read it: no sine or cosine is computed in them.

A key at position p is turned by as much as one at the tile's beginning, a multiple of 16, and by what it lies behind
that; so two small tables do for all positions. Which values are a pair, how quickly each turns, and a factor that some
ropes have are read off the layer's own rope.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Positions between two rows of `far`, and rows of `near`: a tile begins anywhere between two of them.
STEP, NEAR = 16, 32


class RopeTables(NamedTuple):
    """A layer's rope.

    Args:
        near: of positions 0 … 31, [32, 2 * pairs] as `laid_out` has them, in what keys are multiplied in; with rope's
            factor.
        far: of every sixteenth position, [n, 2 * pairs], without it.
        interleaved: a pair are neighbours.
    """

    near: mx.array
    far: mx.array
    interleaved: bool

    @property
    def pairs(self) -> int:
        return 0 if self.near.ndim == 1 else self.near.shape[1] // 2


def laid_out(cosines: mx.array, sines: mx.array, dtype: mx.Dtype) -> mx.array:
    """[n, pairs] each as [n, 2 * pairs]: of two pairs the cosines, then the sines, then the next two's."""
    count, pairs = cosines.shape
    both = mx.stack([side.reshape(count, pairs // 2, 2) for side in (cosines, sines)], axis=2)
    return mx.contiguous(both.reshape(count, 2 * pairs).astype(dtype))


def no_rope(dtype: mx.Dtype) -> RopeTables:
    """Of keys that stay as they are."""
    return RopeTables(mx.zeros(8, dtype), mx.zeros(8, dtype), False)


def packed_b(b: mx.array, turns: RopeTables, dtype: mx.Dtype) -> mx.array:
    """What x·A of keys is multiplied with, float [H_kv, r, D], as the decode kernel reads it: [H_kv, D, r'].

    Transposed, its rank filled up to sixteens, first values of pairs in front of second ones.
    """
    heads, rank, dim = b.shape
    if turns.interleaved:
        width = 2 * turns.pairs
        b = mx.concatenate([b[..., 0:width:2], b[..., 1:width:2], b[..., width:]], axis=-1)
    filled = mx.pad(b.swapaxes(1, 2), [(0, 0), (0, 0), (0, -rank % 16)])
    return mx.contiguous(filled.astype(dtype).reshape(heads, dim, -1))
