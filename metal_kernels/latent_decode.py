"""Multi-head latent attention of few queries over packed latents, in place (DeepSeek-V2, arXiv 2405.04434).

A threadgroup computes a split of one query's tokens for up to 16 heads; its neighbours in the grid have the other heads
and read the same bytes from the device's cache. Simdgroups divide columns, and sum scores together. Dtypes are as in
`decode`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.metal_kernels.decode import PackedArrays, merge, no_residuals
from agentcache.metal_kernels.decode_plan import Groups, StepRows, no_sinks, nothing_written, own_spans
from agentcache.metal_kernels.kernel_text import traced
from agentcache.metal_kernels.latent_text import LATENT_DECODE
from agentcache.metal_kernels.numbers import floats, ints
from agentcache.metal_kernels.tiling import HeadShape

_THREADGROUP_BYTES = 32768  # Metal's limit; CUDA has 48 KiB
_SIMDGROUP_COLUMNS = 64
_MAX_HEADS = 16  # per threadgroup
UNIT = 32  # values that a thread unpacks at a time


@dataclass(frozen=True)
class LatentShape:
    """A layer's latents: keys of `rank + rope` numbers for all heads; the first `rank` are the values.

    `rank` and `rope` are multiples of 32; `group_size` divides `rank` and `rank + rope`; `bits` is 4 or 8.
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
        """Row stride in threadgroup memory: rows start in different banks."""
        return self.dim + (4 if self.staged == mx.float32 else 8)


@dataclass(frozen=True)
class LatentTiling:
    """Layout of a threadgroup, with 64 columns per simdgroup: registers do not depend on the latent's size."""

    shape: LatentShape

    @cached_property
    def tiles(self) -> int:
        """Tiles of eight query heads."""
        return min(-(-self.shape.heads // 8), _MAX_HEADS // 8)

    @cached_property
    def head_groups(self) -> int:
        """Threadgroups per split."""
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
        """Whether threadgroup memory suffices; half on CUDA needs 16 `tokens`."""
        return self._bytes(self.tokens) <= _THREADGROUP_BYTES and (self.tokens == 16 or self.shape.staged == mx.float32)

    @property
    def pool_size(self) -> int:
        """Threadgroup memory in float4, for alignment: part of the queries, later unpacked tokens."""
        return self._pool_bytes(self.tokens) // 16

    def _pool_bytes(self, tokens: int) -> int:
        queries = self.simdgroups * 8 * self.tiles * 16
        return max(tokens * self.shape.row_width, queries) * self.shape.staged.size

    def _bytes(self, tokens: int) -> int:
        rows = 8 * self.tiles
        scores = self.simdgroups * rows * tokens * 4
        return self._pool_bytes(tokens) + scores + rows * 16 * self.shape.staged.size + rows * 4


def partial_bytes(num_queries: int, heads: int, dim: int, threadgroups: int) -> int:
    """Upper bound of a launch's partial results, in bytes."""
    # At least one threadgroup per query and group of heads.
    launched = threadgroups + num_queries * -(-heads // _MAX_HEADS)
    return launched * _MAX_HEADS * (dim + 2) * 4


# Two per multiprocessor of an H100; not measured.
THREADGROUPS = 264
_LEAST_TOKENS = 64  # per split
_LOG2_E = math.log2(math.e)


class LatentPlan:
    """A step's reads, for all layers of a cache group."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self.groups = Groups(*own_spans(rows, rows.tables, [], 1))
        self.launches: dict[Any, PreparedLatents] = {}

    @cached_property
    def places(self) -> mx.array:
        """Input of `MERGE`, int32 [rows * num_tokens, 2]."""
        return ints(tuple((query, -1) for query in range(len(self.groups.spans))))


class LatentStep(NamedTuple):
    """Key of a step's compiled launches."""

    shape: LatentShape
    batch: int
    num_tokens: int
    splits: int


def latent_decode(
    queries: mx.array,
    rope_queries: mx.array,
    latents: PackedArrays,
    plan: LatentPlan,
    shape: LatentShape,
    *,
    scale: float,
    rope_scale: float = 1.0,
    written: mx.array | None = None,
    threadgroups: int = THREADGROUPS,
) -> mx.array:
    """Attention over the plan's rows, [B, H, n, rank] in the shape's dtype.

    Args:
        queries: [B, H, n, rank], in the latent space.
        rope_queries: [B, H, n, rope]; multiplied by `rope_scale`.
        written, threadgroups: as in `decode`.
    """
    key = (shape, scale, rope_scale, threadgroups)
    if key not in plan.launches:
        plan.launches[key] = prepare_latents(plan, shape, scale, rope_scale, threadgroups)
    return plan.launches[key](queries, rope_queries, latents, written)


class PreparedLatents(NamedTuple):
    """A traced step for all layers of a cache group."""

    compute: Callable[..., mx.array]
    arrays: Sequence[mx.array]

    def __call__(
        self, queries: mx.array, rope_queries: mx.array, latents: Sequence[mx.array], written: mx.array | None
    ) -> mx.array:
        written = nothing_written() if written is None else written
        return self.compute(queries, rope_queries, *latents, written, *self.arrays)


def prepare_latents(
    plan: LatentPlan, shape: LatentShape, scale: float, rope_scale: float, threadgroups: int = THREADGROUPS
) -> PreparedLatents:
    splits = plan.groups.splits(LatentTiling(shape).head_groups, _LEAST_TOKENS, threadgroups)
    num_tokens = plan.rows.num_tokens
    arrays = [
        plan.groups.table,
        plan.groups.bounds,
        floats(scale * _LOG2_E, rope_scale),
        ints((splits, plan.groups.width, num_tokens)),
        plan.places,
        ints((num_tokens, splits, 0)),
    ]
    return PreparedLatents(traced(_compute, LatentStep(shape, len(plan.rows.lengths), num_tokens, splits)), arrays)


def _compute(step: LatentStep, queries: mx.array, rope_queries: mx.array, *given: mx.array) -> mx.array:
    latents, (written, table, spans, factors, params, places, merging) = given[:3], given[3:]
    shape, tiling = step.shape, LatentTiling(step.shape)
    num_queries = step.batch * step.num_tokens
    rows = num_queries * shape.heads
    sums, tops = LATENT_DECODE.launch(
        [queries, rope_queries, *latents, table, spans, factors, params, written],
        constants(tiling),
        threadgroups=num_queries * step.splits * tiling.head_groups,
        threads=tiling.simdgroups * 32,
        outputs=[((rows, step.splits, shape.rank), mx.float32), ((rows, step.splits, 2), mx.float32)],
    )
    heads = HeadShape(shape.rank, 1, shape.heads, shape.group_size, shape.dtype)
    out_shape = (step.batch, shape.heads, step.num_tokens, shape.rank)
    return merge(heads, out_shape, [sums, tops, sums, tops], no_residuals(mx.float32), places, no_sinks(), merging)


def constants(tiling: LatentTiling) -> Mapping[str, Any]:
    shape = tiling.shape
    return {
        "S": shape.staged,
        "R": shape.rank,
        "P": shape.rope,
        "HEADS": shape.heads,
        "HEAD_GROUPS": tiling.head_groups,
        "GS": shape.group_size,
        "BITS": shape.bits,
        "Q": tiling.tiles,
        "NSG": tiling.simdgroups,
        "TOKENS": tiling.tokens,
        "LD": shape.row_width,
        "POOL": tiling.pool_size,
    }
