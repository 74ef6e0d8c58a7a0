"""Shapes for which the kernel for latents is compiled, and its threadgroups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

_THREADGROUP_BYTES = 32768  # Metal's limit; CUDA has 48 KiB
_SIMDGROUP_COLUMNS = 64
_MAX_HEADS = 16  # per threadgroup
UNIT = 32  # values that a thread unpacks at a time


@dataclass(frozen=True)
class LatentShape:
    """A layer's latents: keys of `rank + rope` values for all query heads; the first `rank` are also the values.

    Args:
        rank, rope: multiples of 32.
        heads: query heads.
        group_size: quantisation group size; divides `rank` and `rank + rope`.
        dtype: dtype of results.
        bits: 4 or 8.
    """

    rank: int
    rope: int
    heads: int
    group_size: int
    dtype: mx.Dtype
    bits: int = 4

    @property
    def dim(self) -> int:
        return self.rank + self.rope

    @property
    def staged(self) -> mx.Dtype:
        return mx.float32 if self.dtype == mx.float32 else mx.float16

    @property
    def row_width(self) -> int:
        """Row stride in threadgroup memory, padded so that rows start in different banks."""
        return self.dim + (4 if self.staged == mx.float32 else 8)


@dataclass(frozen=True)
class LatentTiling:
    """Layout of a threadgroup, which computes up to 16 query heads of one query.

    A simdgroup multiplies 64 columns of the latents and sums 64 values, so that a thread's registers do not depend on
    the latent's size.
    """

    shape: LatentShape

    @cached_property
    def tiles(self) -> int:
        """Tiles of eight query heads."""
        return min(-(-self.shape.heads // 8), _MAX_HEADS // 8)

    @cached_property
    def head_groups(self) -> int:
        """Threadgroups for different heads of the same latents."""
        return -(-self.shape.heads // (8 * self.tiles))

    @cached_property
    def simdgroups(self) -> int:
        return -(-self.shape.dim // _SIMDGROUP_COLUMNS)

    @cached_property
    def tokens(self) -> int:
        """Tokens unpacked at a time."""
        return 16 if self._bytes(16) <= _THREADGROUP_BYTES else 8

    @property
    def fits(self) -> bool:
        """Whether threadgroup memory suffices; in half, `tokens` must be 16 for CUDA."""
        return self._bytes(self.tokens) <= _THREADGROUP_BYTES and (self.tokens == 16 or self.shape.staged == mx.float32)

    @property
    def pool_size(self) -> int:
        """Threadgroup memory in float4, for alignment: unpacked tokens, or first a part of the queries."""
        return self._pool_bytes(self.tokens) // 16

    def _pool_bytes(self, tokens: int) -> int:
        queries = self.simdgroups * 8 * self.tiles * 16
        return max(tokens * self.shape.row_width, queries) * self.shape.staged.size

    def _bytes(self, tokens: int) -> int:
        rows = 8 * self.tiles
        scores = self.simdgroups * rows * tokens * 4
        return self._pool_bytes(tokens) + scores + rows * 16 * self.shape.staged.size + rows * 4


def partial_bytes(num_queries: int, heads: int, dim: int, threadgroups: int) -> int:
    """Upper bound of a launch's partial results, for any context: 16 heads' sums per threadgroup.

    A launch has at least one threadgroup per query and group of heads.
    """
    launched = threadgroups + num_queries * -(-heads // _MAX_HEADS)
    return launched * _MAX_HEADS * (dim + 2) * 4
