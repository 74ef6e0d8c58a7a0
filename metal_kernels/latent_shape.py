"""What the kernel for latents is compiled for, and how a threadgroup of it is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

_THREADGROUP_BYTES = 32768  # of Metal; CUDA has 48 KiB
_SIMDGROUP_COLUMNS = 64
_MAX_HEADS = 16  # of a threadgroup
UNIT = 32  # values that a thread unpacks at a time


@dataclass(frozen=True)
class LatentShape:
    """A layer's latents: keys of `rank + rope` values that all query heads share, whose first `rank` are the values.

    Args:
        rank, rope: multiples of 32.
        heads: query heads.
        group_size: of the quantisation; it divides `rank` and `rank + rope`.
        dtype: of results.
        bits: 4 or 8, of a value.
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
        """What is multiplied."""
        return mx.float32 if self.dtype == mx.float32 else mx.float16

    @property
    def row_width(self) -> int:
        """Values between two tokens in threadgroup memory: a few more than `dim`, so that they begin in other banks."""
        return self.dim + (4 if self.staged == mx.float32 else 8)


@dataclass(frozen=True)
class LatentTiling:
    """How a threadgroup is laid out: it computes up to 16 query heads of one query.

    A simdgroup multiplies 64 of the latent's columns and adds up 64 values. So the registers of a thread do not depend
    on the latent's size. For 16 heads in half they are 16 of queries, 32 of sums, 8 of scores and 5 of what is being
    loaded, beside addresses: about a hundred, which two threadgroups of 288 threads find on an NVIDIA processor, and
    Apple's threads have. (By count: no compiler has said so.)
    """

    shape: LatentShape

    @cached_property
    def tiles(self) -> int:
        """Of eight query heads."""
        return min(-(-self.shape.heads // 8), _MAX_HEADS // 8)

    @cached_property
    def head_groups(self) -> int:
        """Threadgroups that read the same latents, each for other heads."""
        return -(-self.shape.heads // (8 * self.tiles))

    @cached_property
    def simdgroups(self) -> int:
        return -(-self.shape.dim // _SIMDGROUP_COLUMNS)

    @cached_property
    def tokens(self) -> int:
        """Unpacked at a time."""
        return 16 if self._bytes(16) <= _THREADGROUP_BYTES else 8

    @property
    def fits(self) -> bool:
        """Whether there is enough threadgroup memory; on CUDA `tokens` have to be 16 in half."""
        return self._bytes(self.tokens) <= _THREADGROUP_BYTES and (self.tokens == 16 or self.shape.staged == mx.float32)

    @property
    def pool_size(self) -> int:
        """float4 (for their alignment) of threadgroup memory: unpacked tokens; at first, a piece of the queries."""
        return self._pool_bytes(self.tokens) // 16

    def _pool_bytes(self, tokens: int) -> int:
        queries = self.simdgroups * 8 * self.tiles * 16
        return max(tokens * self.shape.row_width, queries) * self.shape.staged.size

    def _bytes(self, tokens: int) -> int:
        """Threadgroup memory: the pool, scores by simdgroup, probabilities and what sums are rescaled by."""
        rows = 8 * self.tiles
        scores = self.simdgroups * rows * tokens * 4
        return self._pool_bytes(tokens) + scores + rows * 16 * self.shape.staged.size + rows * 4


def partial_bytes(num_queries: int, heads: int, dim: int, threadgroups: int) -> int:
    """What a launch's threadgroups write, at most, however long the context: 16 heads' sums each, in float.

    Args:
        threadgroups: that a launch is to have, at least; beyond them there is one a query and group of heads.
    """
    launched = threadgroups + num_queries * -(-heads // _MAX_HEADS)
    return launched * _MAX_HEADS * (dim + 2) * 4
