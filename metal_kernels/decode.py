"""Attention of few queries over packed blocks in place (flash-decoding, arXiv 2311.01282).

A threadgroup computes one split of a group's tokens (`Span`) for one kv head and all its query heads, so that packed
bytes are read once per group (shared prefixes: Hydragen, arXiv 2402.05099). `merge` merges the splits of up to two sets
of groups. Sums are in float; 16-bit models multiply in half.

If keys are by channel (KIVI, arXiv 2402.02750), a query reads block 0 and its own block of 256 tokens from the open
blocks, in 8 bits by token, and all others from keys and values.

Rows with residuals (ForkKV, arXiv 2604.06370) add (x·A)·B to base's KV: out = P·V + (P·x·A)·B. A token's x·A is staged
behind its value, so that one product with P sums both; `merge` multiplies with B. A key's residual R(x·A·B) is rebuilt
where it is multiplied, for all query heads. For normed keys, base's scores are divided by the norm factor without the
adapter before the sum, and the sum is multiplied by the factor with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.metal_kernels.decode_plan import MAX_SPLITS, DecodePlan, Groups, no_sinks, nothing_written
from agentcache.metal_kernels.decode_text import DECODE
from agentcache.metal_kernels.kernel_text import KernelText, traced
from agentcache.metal_kernels.numbers import floats, ints, one_a_thread
from agentcache.metal_kernels.rope_tables import RopeTables
from agentcache.metal_kernels.tiling import TILE, HeadShape, ResidualKind, Tiling, own_tiling, shared_tiling

# data uint32 [slots, H_kv, 256, D * bits / 32], scales and biases float16 [slots, H_kv, 256, D/group_size];
# of keys by channel: scales and biases float16 [slots, H_kv, 4, D]
PackedArrays = tuple[mx.array, mx.array, mx.array]

THREADGROUPS = 1024  # best on an H100
_LOG2_E = math.log2(math.e)


@cache
def _constants(shape: HeadShape, tiling: Tiling, has_softcap: bool) -> Mapping[str, Any]:
    return {
        "S": shape.staged,
        "D": shape.dim,
        "HEADS": shape.kv_heads,
        "GQA": shape.queries_per_head,
        "GS": shape.group_size,
        "KEY_BITS": shape.bits,
        "VALUE_BITS": shape.value_bits,
        "BY_CHANNEL": shape.by_channel,
        "MEMBERS": tiling.members,
        "Q": tiling.tiles,
        "NSG": tiling.simdgroups,
        "COOPERATIVE": tiling.cooperative,
        "LD": shape.row_width,
        "POOL": tiling.pool_size(shape),
        "SOFTCAP": has_softcap,
        "RANK": shape.value_rank,
        "KEY_RANK": shape.key_rank,
        "PAIRS": shape.pairs,
        "INTERLEAVED": shape.interleaved,
        "NORMED": shape.normed,
    }


class Launch(NamedTuple):
    tiling: Tiling
    num_groups: int
    size: int
    splits: int

    @classmethod
    def of(cls, groups: Groups, tiling: Tiling, kv_heads: int, threadgroups: int) -> Launch:
        splits = groups.splits(kv_heads, tiling.simdgroups * TILE, threadgroups)
        return cls(tiling, len(groups.spans), groups.size, splits)


class StepKind(NamedTuple):
    """Key of a step's compiled launches."""

    shape: HeadShape
    batch: int
    num_tokens: int
    own: Launch
    shared: Launch | None
    has_softcap: bool
    has_sinks: bool


class ValueResiduals(NamedTuple):
    """Residuals of values: x·A, float16 [slots, 256, r], and B, float32 [H_kv, r, D]."""

    low_rank: mx.array
    b: mx.array


class KeyResiduals(NamedTuple):
    """Residuals of keys: x·A, float16 [slots, 256, r], and B of `packed_b`.

    `norms`: factors of each head's norm without and with the adapter, float16 [slots, 256, H_kv, 2], or None.
    """

    low_rank: mx.array
    norms: mx.array | None
    b: mx.array
    turns: RopeTables


class Residuals(NamedTuple):
    """Residual KV of one adapter; keys and values use the same slots."""

    keys: KeyResiduals | None = None
    values: ValueResiduals | None = None

    @property
    def kind(self) -> ResidualKind:
        value_rank = 0 if self.values is None else self.values.low_rank.shape[2]
        if self.keys is None:
            return ResidualKind(value_rank)
        low_rank, norms, _, turns = self.keys
        return ResidualKind(value_rank, low_rank.shape[2], turns.pairs, turns.interleaved, norms is not None)

    def arrays(self, shape: HeadShape) -> Sequence[mx.array]:
        none, nothing = no_residuals(shape.staged), no_residuals(mx.float16)
        values = (nothing, no_residuals(mx.float32)) if self.values is None else self.values
        if self.keys is None:
            return *values, nothing, nothing, none, none, none
        low_rank, norms, b, turns = self.keys
        return *values, low_rank, nothing if norms is None else norms, b, turns.near, turns.far


def decode(
    queries: mx.array,
    keys: PackedArrays,
    values: PackedArrays,
    plan: DecodePlan,
    *,
    scale: float,
    open_keys: PackedArrays | None = None,
    open_values: PackedArrays | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    written: mx.array | None = None,
    residuals: Residuals | None = None,
    threadgroups: int = THREADGROUPS,
) -> mx.array:
    """Attention of `queries` [B, H_q, n, D] over the plan's rows; returns [B, H_q, n, D].

    Args:
        open_keys, open_values: open blocks, in 8 bits by token; given if `keys` are by channel.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: additional logits [H_q].
        written: result of `append` for these arrays in the same graph.
        residuals: in slots `residual_ids` of the plan.
        threadgroups: number that fills the device.
    """
    kv_heads, dim = keys[0].shape[1], queries.shape[3]
    group_size = dim // values[1].shape[3]
    bits, value_bits = (side[0].shape[3] * 32 // dim for side in (keys, values))
    heads = (dim, kv_heads, queries.shape[1] // kv_heads)
    shape = HeadShape(*heads, group_size, queries.dtype, bits, value_bits, open_keys is not None)
    shape = shape if residuals is None else residuals.kind.on(shape)
    key = (queries.shape, shape, scale, softcap, sinks is None, threadgroups)
    if key not in plan.launches:
        plan.launches[key] = prepare(plan, shape, scale, softcap, sinks is not None, threadgroups)
    return plan.launches[key](queries, keys, values, open_keys, open_values, sinks, written, residuals)


class PreparedDecode(NamedTuple):
    """A traced step for all layers of a cache group."""

    compute: Callable[..., mx.array]
    shape: HeadShape
    arrays: Sequence[mx.array]

    def __call__(
        self,
        queries: mx.array,
        keys: Sequence[mx.array],
        values: Sequence[mx.array],
        open_keys: Sequence[mx.array] | None,
        open_values: Sequence[mx.array] | None,
        sinks: mx.array | None,
        written: mx.array | None,
        residuals: Residuals | None = None,
    ) -> mx.array:
        written = nothing_written() if written is None else written
        sinks = no_sinks() if sinks is None else sinks
        beside = (residuals or Residuals()).arrays(self.shape)
        packed = (*keys, *values, *(open_keys or no_packed()), *(open_values or no_packed()))
        return self.compute(queries, *packed, *beside, written, sinks, *self.arrays)


def prepare(
    plan: DecodePlan,
    shape: HeadShape,
    scale: float,
    softcap: float | None,
    has_sinks: bool,
    threadgroups: int = THREADGROUPS,
) -> PreparedDecode:
    num_tokens, kv_heads = plan.rows.num_tokens, shape.kv_heads
    own = Launch.of(plan.own, own_tiling(shape, num_tokens), kv_heads, threadgroups)
    shared = None if plan.shared is None else Launch.of(plan.shared, shared_tiling(shape), kv_heads, threadgroups)
    factor = scale * _LOG2_E if softcap is None else scale / softcap
    splits = (own.splits, 0 if shared is None else shared.splits)
    arrays = [
        plan.positions,
        floats(factor, (softcap or 0.0) * _LOG2_E),
        plan.places,
        ints((num_tokens, *splits)),
    ]
    for groups, launch in ((plan.own, own), (plan.shared, shared)):
        if groups is not None and launch is not None:
            params = ints((launch.splits, groups.width, plan.window, num_tokens))
            beside = groups if plan.beside is None else plan.beside
            arrays += [groups.table, beside.table, groups.bounds, groups.members, params]
    kind = StepKind(shape, len(plan.rows.lengths), num_tokens, own, shared, softcap is not None, has_sinks)
    return PreparedDecode(traced(_compute, kind), shape, arrays)


@one_a_thread
def no_residuals(dtype: mx.Dtype) -> mx.array:
    return mx.zeros(8, dtype)  # Metal passes smaller arrays as constants


def no_packed() -> PackedArrays:
    return no_residuals(mx.uint32), no_residuals(mx.float16), no_residuals(mx.float16)


def _compute(kind: StepKind, queries: mx.array, *given: mx.array) -> mx.array:
    packed, (low_rank, value_b), of_keys = given[:12], given[12:14], given[14:19]
    written, sinks, positions, factors, places, merging = given[19:25]
    shape = kind.shape

    def partial_sums(launch: Launch, arrays: Sequence[mx.array]) -> list[mx.array]:
        table, residual_table, bounds, members, params = arrays
        rows = launch.num_groups * shape.kv_heads * launch.tiling.members * shape.queries_per_head
        return DECODE.launch(
            [
                *(queries, *packed, low_rank, *of_keys, table, residual_table),
                *(bounds, members, positions, factors, params, written),
            ],
            _constants(shape, launch.tiling, kind.has_softcap),
            threadgroups=launch.num_groups * shape.kv_heads * launch.splits,
            threads=launch.tiling.simdgroups * 32,
            outputs=[((rows, launch.splits, shape.value_width), mx.float32), ((rows, launch.splits, 2), mx.float32)],
        )

    own = partial_sums(kind.own, given[25:30])
    shared = own if kind.shared is None else partial_sums(kind.shared, given[30:35])
    return merge(
        shape,
        queries.shape,
        [*own, *shared],
        *(value_b, places, sinks.astype(mx.float32), merging),
        own_members=kind.own.size,
        shared_members=1 if kind.shared is None else kind.shared.size,
        has_sinks=kind.has_sinks,
    )


_THREADS = 512

# Memory latency bounds short steps. So PARTS sets of threads (a power of two) divide the splits, threads issue their
# loads at once, and every simdgroup computes all weights: lane s has those of splits s and s + 32. A thread sums one
# value; those behind the first D are residuals, and a set's last threads may have none.
_BODY = """
    const int at = int(threadgroup_position_in_grid.x);
    const int tid = int(thread_index_in_threadgroup);
    const int lane = int(thread_index_in_simdgroup);
    const int DV = D + (RANK + 7) / 8 * 8;
    const int WIDTH = (DV + 31) / 32 * 32;
    const int EACH = MAX_SPLITS / PARTS;
    const int d = tid % WIDTH;
    const int part = tid / WIDTH;
    const int row_tokens = params[0];
    const int token = at % row_tokens;
    const int head = at / row_tokens % (HEADS * GQA);
    const int who = at / (row_tokens * HEADS * GQA) * row_tokens + token;
    const int own = places[2 * who];
    const int shared = places[2 * who + 1];
    const int own_splits = own >= 0 ? params[1] : 0;
    const int splits = own_splits + (shared >= 0 ? params[2] : 0);
    const int own_row = (own / OWN_MEMBERS * HEADS + head / GQA) * (OWN_MEMBERS * GQA) + own % OWN_MEMBERS * GQA;
    const int shared_row =
        (shared / SHARED_MEMBERS * HEADS + head / GQA) * (SHARED_MEMBERS * GQA) + shared % SHARED_MEMBERS * GQA;
    const size_t own_at = size_t(own_row + head % GQA) * params[1];
    const size_t shared_at = size_t(shared_row + head % GQA) * params[2];
    threadgroup float parts[PARTS * WIDTH];
    threadgroup float low[RANK > 0 ? RANK : 1];
    float x[EACH];
    UNROLL for (int e = 0; e < EACH; ++e) {
        const int s = part + e * PARTS;
        x[e] = 0.0f;
        if (d < DV && s < own_splits) x[e] = own_sums[(own_at + s) * DV + d];
        else if (d < DV && s < splits) x[e] = shared_sums[(shared_at + s - own_splits) * DV + d];
    }
    const float sink = SINKS ? sinks[head] * 1.4426950408889634f : -1.0e30f;
    float weights[MAX_SPLITS / 32];
    float totals[MAX_SPLITS / 32];
    float top = sink;
    UNROLL for (int i = 0; i < MAX_SPLITS / 32; ++i) {
        const int s = lane + i * 32;
        weights[i] = -1.0e30f;
        totals[i] = 0.0f;
        if (s < splits) {
            const bool mine = s < own_splits;
            const size_t from = mine ? (own_at + s) * 2 : (shared_at + s - own_splits) * 2;
            weights[i] = mine ? own_tops[from] : shared_tops[from];
            totals[i] = mine ? own_tops[from + 1] : shared_tops[from + 1];
        }
        top = metal::max(top, weights[i]);
    }
    UNROLL for (int b = 16; b > 0; b >>= 1) top = metal::max(top, simd_shuffle_xor(top, ushort(b)));
    float total = 0.0f;
    UNROLL for (int i = 0; i < MAX_SPLITS / 32; ++i) {
        weights[i] = metal::exp2(weights[i] - top);
        total += weights[i] * totals[i];
    }
    UNROLL for (int b = 16; b > 0; b >>= 1) total += simd_shuffle_xor(total, ushort(b));
    if (SINKS) total += metal::exp2(sink - top);
    float sum = 0.0f;
    UNROLL for (int e = 0; e < EACH; ++e) {
        const int s = part + e * PARTS;
        sum += simd_shuffle(weights[e * PARTS / 32], ushort(s % 32)) * x[e];
    }
    parts[part * WIDTH + d] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (part == 0) {
        UNROLL for (int p = 1; p < PARTS; ++p) sum += parts[p * WIDTH + d];
    }
    if (RANK > 0) {
        if (part == 0 && d >= D && d < D + RANK) low[d - D] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (part == 0 && d < D) {
            for (int r = 0; r < RANK; ++r) sum += low[r] * value_b[(head / GQA * RANK + r) * D + d];
        }
    }
    if (part == 0 && d < D) out[size_t(at) * D + d] = static_cast<T>(sum / total);
"""

MERGE = KernelText(
    "agentcache_merge",
    ("own_sums", "own_tops", "shared_sums", "shared_tops", "value_b", "places", "sinks", "params"),
    ("out",),
    _BODY,
)


def merge(
    shape: HeadShape,
    out_shape: tuple[int, ...],
    sums: Sequence[mx.array],
    *given: mx.array,
    own_members: int = 1,
    shared_members: int = 1,
    has_sinks: bool = False,
) -> mx.array:
    """Merge the splits of up to two sets of groups into attention [B, H_q, n, D] (`out_shape`).

    Args:
        sums, given: inputs of `MERGE`: sums of weighted values, float32 [rows, splits, D], and tops, the largest
            exponent and sum of weights, float32 [rows, splits, 2].
        own_members, shared_members: queries per group.
    """
    batch, heads, num_tokens, _ = out_shape
    width = -(-shape.value_width // 32) * 32
    parts = next(parts for parts in (16, 8, 4, 2, 1) if parts == 1 or parts * width <= _THREADS)
    [out] = MERGE.launch(
        [*sums, *given],
        {
            "T": shape.dtype,
            "D": shape.dim,
            "HEADS": shape.kv_heads,
            "GQA": shape.queries_per_head,
            "OWN_MEMBERS": own_members,
            "SHARED_MEMBERS": shared_members,
            "SINKS": has_sinks,
            "MAX_SPLITS": 2 * MAX_SPLITS,
            "PARTS": parts,
            "RANK": shape.value_rank,
        },
        threadgroups=batch * heads * num_tokens,
        threads=parts * width,
        outputs=[(out_shape, shape.dtype)],
    )
    return out
