"""Rope tables: kernels compute no sines or cosines."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

STEP = 16  # positions between rows of `far`; rows of `near`


class RopeTables(NamedTuple):
    """Rope tables of a layer: `far` for the multiple of 16 before a tile, `near` for positions from there.

    Args:
        near: positions 0 … 15, [16, 2 * pairs] by `laid_out`, in the dtype of products, with rope's scale factor.
        far: every sixteenth position, [n, 2 * pairs], without that factor.
        interleaved: as in `HeadShape`.
    """

    near: mx.array
    far: mx.array
    interleaved: bool

    @property
    def pairs(self) -> int:
        return 0 if self.near.ndim == 1 else self.near.shape[1] // 2


def laid_out(cosines: mx.array, sines: mx.array, dtype: mx.Dtype) -> mx.array:
    """Two [n, pairs] as [n, 2 * pairs]: for each two pairs, cosines, then sines."""
    count, pairs = cosines.shape
    both = mx.stack([side.reshape(count, pairs // 2, 2) for side in (cosines, sines)], axis=2)
    return mx.contiguous(both.reshape(count, 2 * pairs).astype(dtype))


def no_rope(dtype: mx.Dtype) -> RopeTables:
    """Placeholders for keys without rope."""
    return RopeTables(mx.zeros(8, dtype), mx.zeros(8, dtype), False)


def packed_b(b: mx.array, turns: RopeTables, dtype: mx.Dtype) -> mx.array:
    """B of keys, float [H_kv, r, D], as [H_kv, D, r'], r' a multiple of 16; pairs' first values come first."""
    heads, rank, dim = b.shape
    if turns.interleaved:
        width = 2 * turns.pairs
        b = mx.concatenate([b[..., 0:width:2], b[..., 1:width:2], b[..., width:]], axis=-1)
    filled = mx.pad(b.swapaxes(1, 2), [(0, 0), (0, 0), (0, -rank % 16)])
    return mx.contiguous(filled.astype(dtype).reshape(heads, dim, -1))
