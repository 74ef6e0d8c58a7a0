"""What the decode kernel is compiled for, and how a threadgroup of it is laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx

TILE = 16  # tokens that a simdgroup unpacks at a time
_THREADGROUP_BYTES = 32768


@dataclass(frozen=True)
class HeadShape:
    """What a kernel is compiled for.

    Args:
        dim: values a head, a multiple of 32.
        queries_per_head: query heads that share a kv head.
        group_size: of the quantisation.
        dtype: of queries and results.
        bits: a key or value.
        value_rank: of the residuals that are added to values; 0 for none.
        key_rank: of those that are added to keys.
        pairs: of a key's values that rope turns, where there are residuals of keys; a multiple of 8.
        interleaved: a pair are neighbours, not half of what is turned apart.
        normed: keys are normed, head by head.
    """

    dim: int
    kv_heads: int
    queries_per_head: int
    group_size: int
    dtype: mx.Dtype
    bits: int = 4
    value_rank: int = 0
    key_rank: int = 0
    pairs: int = 0
    interleaved: bool = False
    normed: bool = False

    @property
    def staged(self) -> mx.Dtype:
        """What is multiplied."""
        return mx.float32 if self.dtype == mx.float32 else mx.float16

    @property
    def value_width(self) -> int:
        """What is summed of a token: its value, and behind it its residual, filled up to whole eights."""
        return self.dim + -(-self.value_rank // 8) * 8

    @property
    def row_width(self) -> int:
        """Values between two rows in threadgroup memory: a few more than needed, so that rows begin in other banks."""
        width = max(self.value_width, self.dim + self.padded_key_rank)
        return width + (4 if self.staged == mx.float32 else 8)

    @property
    def padded_key_rank(self) -> int:
        """What is multiplied at a time is sixteen of rank."""
        return -(-self.key_rank // 16) * 16

    @property
    def tile_bytes(self) -> int:
        return TILE * self.row_width * self.staged.size


class ResidualKind(NamedTuple):
    """What of `HeadShape` is of residuals."""

    value_rank: int = 0
    key_rank: int = 0
    pairs: int = 0
    interleaved: bool = False
    normed: bool = False

    def on(self, shape: HeadShape) -> HeadShape:
        """Heads of this shape, with these residuals."""
        return replace(shape, **self._asdict())


NO_RESIDUALS = ResidualKind()


@dataclass(frozen=True)
class Tiling:
    """How a threadgroup is laid out.

    Args:
        members: queries of a group.
        tiles: of eight query rows, that one simdgroup holds.
        cooperative: every simdgroup has queries of its own.
    """

    members: int
    tiles: int
    simdgroups: int
    cooperative: bool

    def pool_size(self, shape: HeadShape) -> int:
        """float4 (for their alignment) of threadgroup memory: unpacked tokens; queries at first, sums at last."""
        rows = self.tiles * 8 * (self.simdgroups if self.cooperative else 1)
        queries = rows * shape.row_width * shape.staged.size
        sums = 0 if self.cooperative else rows * shape.value_width * 4
        return -(-max(self.simdgroups * shape.tile_bytes, queries, sums) // 16)


@cache
def own_tiling(shape: HeadShape, num_tokens: int) -> Tiling:
    """For groups of one row's queries, `num_tokens` of them."""
    members = max(1, min(num_tokens, 16 // shape.queries_per_head))
    tiles = 1 if members * shape.queries_per_head <= 8 else 2
    return Tiling(members, tiles, _simdgroups(shape, tiles), cooperative=False)


@cache
def shared_tiling(shape: HeadShape) -> Tiling:
    """For groups of many rows' queries."""
    simdgroups = _simdgroups(shape, 2)
    return Tiling(max(1, simdgroups * 16 // shape.queries_per_head), 2, simdgroups, cooperative=True)


def _simdgroups(shape: HeadShape, tiles: int) -> int:
    spare = _THREADGROUP_BYTES - 2 * 4 * tiles * 8 * 4
    return next(count for count in (4, 2, 1) if count * shape.tile_bytes <= spare)
