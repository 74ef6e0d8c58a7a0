"""The kernel that makes results of what the decode kernels have summed, split by split."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from agentcache.metal_kernels.decode_plan import MAX_SPLITS
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.tiling import HeadShape

# A short step waits for memory here: so eight loads are on their way at a time.
_FUNCTIONS = """
template <int DV>
METAL_FUNC float add_splits(float sum, const device float* from, SHARED_POINTER(const float) weights, int count) {
    int s = 0;
    for (; s + 8 <= count; s += 8) {
        float x[8];
        UNROLL for (int e = 0; e < 8; ++e) x[e] = from[(s + e) * DV];
        UNROLL for (int e = 0; e < 8; ++e) sum += weights[s + e] * x[e];
    }
    for (; s < count; ++s) sum += weights[s] * from[s * DV];
    return sum;
}
"""

# One threadgroup a query and head, one thread a summed value: those behind the first D are of residuals, and the last
# threads of a simdgroup may have none. Two sets of splits: places[2 * query] and the next one say in
# which group and as which member a query took part, -1 for not at all.
_MERGE = """
    const int at = int(threadgroup_position_in_grid.x);
    const int d = int(thread_index_in_threadgroup);
    const int lane = int(thread_index_in_simdgroup);
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
    const float sink = SINKS ? sinks[head] * 1.4426950408889634f : -1.0e30f;
    const int DV = D + (RANK + 7) / 8 * 8;
    const int NSG = (DV + 31) / 32;
    threadgroup float weights[MAX_SPLITS];
    threadgroup float peaks[NSG];
    threadgroup float totals[NSG];
    threadgroup float low[RANK > 0 ? RANK : 1];
    float top = sink;
    for (int s = d; s < splits; s += NSG * 32) {
        const bool mine = s < own_splits;
        const size_t from = mine ? (own_at + s) * 2 : (shared_at + s - own_splits) * 2;
        top = metal::max(top, mine ? own_tops[from] : shared_tops[from]);
    }
    UNROLL for (int b = 16; b > 0; b >>= 1) top = metal::max(top, simd_shuffle_xor(top, ushort(b)));
    if (lane == 0) peaks[d / 32] = top;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int g = 0; g < NSG; ++g) top = metal::max(top, peaks[g]);
    float total = 0.0f;
    for (int s = d; s < splits; s += NSG * 32) {
        const bool mine = s < own_splits;
        const size_t from = mine ? (own_at + s) * 2 : (shared_at + s - own_splits) * 2;
        const float weight = metal::exp2((mine ? own_tops[from] : shared_tops[from]) - top);
        weights[s] = weight;
        total += weight * (mine ? own_tops[from + 1] : shared_tops[from + 1]);
    }
    UNROLL for (int b = 16; b > 0; b >>= 1) total += simd_shuffle_xor(total, ushort(b));
    if (lane == 0) totals[d / 32] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = SINKS ? metal::exp2(sink - top) : 0.0f;
    UNROLL for (int g = 0; g < NSG; ++g) total += totals[g];
    float sum = 0.0f;
    if (d < DV) {
        sum = add_splits<DV>(0.0f, own_sums + own_at * DV + d, weights, own_splits);
        sum = add_splits<DV>(sum, shared_sums + shared_at * DV + d, weights + own_splits, splits - own_splits);
    }
    if (RANK > 0) {
        if (d >= D && d < D + RANK) low[d - D] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (d < D) {
            for (int r = 0; r < RANK; ++r) sum += low[r] * value_b[(head / GQA * RANK + r) * D + d];
        }
    }
    if (d < D) out[size_t(at) * D + d] = static_cast<T>(sum / total);
"""

MERGE = KernelText(
    "agentcache_merge",
    ("own_sums", "own_tops", "shared_sums", "shared_tops", "value_b", "places", "sinks", "params"),
    ("out",),
    _MERGE,
    _FUNCTIONS,
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
    """Attention [B, H_q, n, D] (`out_shape`), from up to two sets of groups.

    Args:
        sums: own_sums, own_tops, shared_sums, shared_tops: of each split of a group's tokens, for each of its queries,
            the weighted sum of values, float32 [rows, splits, D]; the largest exponent and the weights' sum,
            float32 [rows, splits, 2].
        given: value_b, places, sinks, params.
        own_members, shared_members: queries of a group, in either set.
    """
    batch, heads, num_tokens, _ = out_shape
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
            "RANK": shape.value_rank,
        },
        threadgroups=batch * heads * num_tokens,
        threads=-(-shape.value_width // 32) * 32,
        outputs=[(out_shape, shape.dtype)],
    )
    return out
