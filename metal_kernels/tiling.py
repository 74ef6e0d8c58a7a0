"""Shapes and threadgroups of the decode kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx

TILE = 16  # tokens that a simdgroup unpacks at once
_THREADGROUP_BYTES = 32768


@dataclass(frozen=True)
class HeadShape:
    """Head shape of a compiled kernel.

    Args:
        dim: a multiple of 32.
        group_size: of values, of keys by token, and of the open block.
        dtype: of queries and results.
        bits, value_bits: of keys and of values, 4 or 8.
        value_rank, key_rank: 0 without residuals.
        pairs: pairs that rope rotates, a multiple of 8; 0 without key residuals.
        by_channel: whether keys of full blocks are quantised by channel, in 4 bits, and open blocks by token, in 8.
        interleaved: whether a pair's values are neighbours, else half of the rotated values apart.
    """

    dim: int
    kv_heads: int
    queries_per_head: int
    group_size: int
    dtype: mx.Dtype
    bits: int = 4
    value_bits: int = 4
    by_channel: bool = False
    value_rank: int = 0
    key_rank: int = 0
    pairs: int = 0
    interleaved: bool = False
    normed: bool = False

    @property
    def staged(self) -> mx.Dtype:
        """Dtype of products."""
        return mx.float32 if self.dtype == mx.float32 else mx.float16

    @property
    def value_width(self) -> int:
        """A value and its residual, padded to a multiple of 8."""
        return self.dim + -(-self.value_rank // 8) * 8

    @property
    def row_width(self) -> int:
        """Row stride in threadgroup memory: rows start in different banks."""
        width = max(self.value_width, self.dim + self.padded_key_rank)
        return width + (4 if self.staged == mx.float32 else 8)

    @property
    def padded_key_rank(self) -> int:
        return -(-self.key_rank // 16) * 16

    @property
    def tile_bytes(self) -> int:
        return TILE * self.row_width * self.staged.size


class ResidualKind(NamedTuple):
    value_rank: int = 0
    key_rank: int = 0
    pairs: int = 0
    interleaved: bool = False
    normed: bool = False

    def on(self, shape: HeadShape) -> HeadShape:
        return replace(shape, **self._asdict())


NO_RESIDUALS = ResidualKind()


@dataclass(frozen=True)
class Tiling:
    """Layout of a threadgroup: `members` queries, `tiles` of eight query rows per simdgroup.

    `cooperative`: whether simdgroups have own queries.
    """

    members: int
    tiles: int
    simdgroups: int
    cooperative: bool

    def pool_size(self, shape: HeadShape) -> int:
        """Threadgroup memory in float4, for alignment: queries, then unpacked tokens, then sums."""
        rows = self.tiles * 8 * (self.simdgroups if self.cooperative else 1)
        queries = rows * shape.row_width * shape.staged.size
        sums = 0 if self.cooperative else rows * shape.value_width * 4
        return -(-max(self.simdgroups * shape.tile_bytes, queries, sums) // 16)


@cache
def own_tiling(shape: HeadShape, num_tokens: int) -> Tiling:
    """Layout for queries of one row."""
    members = max(1, min(num_tokens, 16 // shape.queries_per_head))
    tiles = 1 if members * shape.queries_per_head <= 8 else 2
    return Tiling(members, tiles, _simdgroups(shape, tiles), cooperative=False)


@cache
def shared_tiling(shape: HeadShape) -> Tiling:
    """Layout for queries of several rows."""
    simdgroups = _simdgroups(shape, 2)
    return Tiling(max(1, simdgroups * 16 // shape.queries_per_head), 2, simdgroups, cooperative=True)


def _simdgroups(shape: HeadShape, tiles: int) -> int:
    spare = _THREADGROUP_BYTES - 2 * 4 * tiles * 8 * 4
    return next(count for count in (4, 2, 1) if count * shape.tile_bytes <= spare)
