from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from agentcache.metal_kernels.decode_plan import MAX_SPLITS
from agentcache.metal_kernels.kernel_text import KernelText
from agentcache.metal_kernels.tiling import HeadShape

_THREADS = 512

# For a short step this kernel is bound by memory latency. So PARTS sets of threads (a power of two) divide the splits,
# every thread issues all its loads at once, and every simdgroup computes all weights itself: lane s has those of splits
# s and s + 32. A thread of a set sums one value; those behind the first D are residuals, and a set's last threads may
# have none. There are two sets of groups: places[2 * query] and the next give group and member, -1 for none.
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
    """Attention [B, H_q, n, D] (`out_shape`), from up to two sets of groups.

    Args:
        sums: own_sums, own_tops, shared_sums, shared_tops. For each split and query: weighted sums of values, float32
            [rows, splits, D]; largest exponent and sum of weights, float32 [rows, splits, 2].
        given: value_b, places, sinks, params.
        own_members, shared_members: queries of a group in each set.
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
