"""The text of the decode kernel; `decode` says what it computes and launches it."""

from __future__ import annotations

from agentcache.metal_kernels.kernel_text import KernelText

# A simdgroup's tile: 16 tokens, of which each lane takes whole quantisation groups, so that each is loaded once.
_FUNCTIONS = """
template <int HEADS, int GROUPS, int UNITS, typename Table>
METAL_FUNC void find_tile(Table slots, int t, int stop, int head, int lane, thread size_t* at, thread bool* there) {
    UNROLL for (int u = 0; u < UNITS; ++u) {
        const int token = (u * 32 + lane) / GROUPS;
        const int place = t + token;
        there[u] = token < 16 && place < stop;
        at[u] = 0;
        if (there[u]) {
            const size_t row = (size_t(slots[place / 256]) * HEADS + head) * 256 + place % 256;
            at[u] = row * GROUPS + (u * 32 + lane) % GROUPS;
        }
    }
}
template <int WORDS, int UNITS>
METAL_FUNC void load_tile(const device uint* data, const device half* scales, const device half* biases,
                          const thread size_t* at, const thread bool* there, thread uint* words, thread half* scale,
                          thread half* bias) {
    UNROLL for (int u = 0; u < UNITS; ++u) {
        scale[u] = half(0.0f);
        bias[u] = half(0.0f);
        UNROLL for (int w = 0; w < WORDS; ++w) words[u * WORDS + w] = 0;
        if (there[u]) {
            const device uint4* from = (const device uint4*)(data + at[u] * WORDS);
            UNROLL for (int w = 0; w < WORDS / 4; ++w) {
                const uint4 four = from[w];
                words[u * WORDS + 4 * w] = four.x;
                words[u * WORDS + 4 * w + 1] = four.y;
                words[u * WORDS + 4 * w + 2] = four.z;
                words[u * WORDS + 4 * w + 3] = four.w;
            }
            scale[u] = scales[at[u]];
            bias[u] = biases[at[u]];
        }
    }
}
template <typename S, int GROUPS, int WORDS, int UNITS>
METAL_FUNC void stage_tile(SHARED_POINTER(S) stage, int width, int lane, const thread uint* words,
                           const thread half* scale, const thread half* bias) {
    UNROLL for (int u = 0; u < UNITS; ++u) {
        const int token = (u * 32 + lane) / GROUPS;
        const int column = (u * 32 + lane) % GROUPS * WORDS * 8;
        if (token < 16) {
            UNROLL for (int w = 0; w < WORDS; ++w)
                unpack_word(stage + token * width + column + w * 8, words[u * WORDS + w], scale[u], bias[u]);
        }
    }
}
// Of the tile's tokens, what is kept of rank RANK, in eights, which zeros fill up.
template <int RANK, int EIGHTS, int LOADS, typename Table>
METAL_FUNC void load_residuals(const device half* residuals, Table slots, int t, int stop, int lane, thread half* x) {
    UNROLL for (int u = 0; u < LOADS; ++u) {
        const int token = (u * 32 + lane) / EIGHTS;
        const int column = (u * 32 + lane) % EIGHTS * 8;
        const int place = t + token;
        UNROLL for (int e = 0; e < 8; ++e) x[u * 8 + e] = half(0.0f);
        if (token < 16 && place < stop) {
            const device half* from = residuals + (size_t(slots[place / 256]) * 256 + place % 256) * RANK + column;
            if (RANK % 8 == 0) {
                load8(from, x + u * 8);
            } else {
                UNROLL for (int e = 0; e < 8; ++e) {
                    if (column + e < RANK) x[u * 8 + e] = from[e];
                }
            }
        }
    }
}
template <typename S, int EIGHTS, int LOADS>
METAL_FUNC void stage_residuals(SHARED_POINTER(S) stage, int width, int lane, const thread half* x) {
    UNROLL for (int u = 0; u < LOADS; ++u) {
        const int token = (u * 32 + lane) / EIGHTS;
        const int column = (u * 32 + lane) % EIGHTS * 8;
        if (token < 16) {
            UNROLL for (int e = 0; e < 8; ++e) stage[token * width + column + e] = static_cast<S>(float(x[u * 8 + e]));
        }
    }
}
"""

# A query's row in a tile: member * GQA + its head among those of the kv head. COOPERATIVE: all simdgroups unpack for
# all, and each has queries of its own; else each has tokens of its own, and all have the same queries.
_BODY = """
    const int lane = int(thread_index_in_simdgroup);
    const int sg = int(simdgroup_index_in_threadgroup);
    const int tid = int(thread_index_in_threadgroup);
    const int tg = int(threadgroup_position_in_grid.x);
    const int splits = params[0];
    const int width = params[1];
    const int window = params[2];
    const int row_tokens = params[3];
    const int split = tg % splits;
    const int head = tg / splits % HEADS;
    const int group = tg / (splits * HEADS);
    const int base = spans[3 * group];
    const int begin = spans[3 * group + 1];
    const int end = spans[3 * group + 2];
    const int GROUPS = D / GS;
    const int WORDS = GS / 8;
    const int UNITS = (16 * GROUPS + 31) / 32;
    const int EIGHTS = RANK > 0 ? (RANK + 7) / 8 : 1;
    const int LOADS = (16 * EIGHTS + 31) / 32;
    const int DV = RANK > 0 ? D + EIGHTS * 8 : D;
    const int TILES = COOPERATIVE ? NSG : 1;
    const int ROWS = COOPERATIVE ? NSG * Q * 8 : Q * 8;
    const int own_rows = COOPERATIVE ? sg * Q * 8 : 0;
    const float NONE = -1.0e30f;
    threadgroup float4 pool[POOL];
    threadgroup float peaks[NSG * Q * 8];
    threadgroup float totals[NSG * Q * 8];
    SHARED_POINTER(S) stage = (SHARED_POINTER(S))pool;
    SHARED_POINTER(float) merged = (SHARED_POINTER(float))pool;
    SHARED_POINTER(S) tiles = stage + (COOPERATIVE ? 0 : sg * 16 * LD);

    for (int i = tid; i < ROWS * D; i += NSG * 32) {
        const int row = i / D;
        const int who = row < MEMBERS * GQA ? members[group * MEMBERS + row / GQA] : -1;
        float x = 0.0f;
        if (who >= 0) {
            const size_t from = size_t(who / row_tokens) * (HEADS * GQA) + head * GQA + row % GQA;
            x = float(q[(from * row_tokens + who % row_tokens) * D + i % D]);
        }
        stage[row * LD + i % D] = static_cast<S>(metal::max(-65504.0f, metal::min(65504.0f, x)));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Left<S, Q> queries[D / 16];
    UNROLL for (int k = 0; k < D / 16; ++k) load_left(queries[k], stage + own_rows * LD + k * 16, LD);
    int last[Q];
    float m[Q];
    float z[Q];
    UNROLL for (int i = 0; i < Q; ++i) {
        const int row = own_rows + i * 8 + tile_row(lane);
        const int who = row < MEMBERS * GQA ? members[group * MEMBERS + row / GQA] : -1;
        last[i] = who >= 0 ? positions[who] : -1;
        m[i] = NONE;
        z[i] = 0.0f;
    }
    Sums<Q> out[DV / 8];
    UNROLL for (int n = 0; n < DV / 8; ++n) clear(out[n]);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int per = (end - begin + splits * NSG * 16 - 1) / (splits * NSG * 16) * (NSG * 16);
    const int first = begin + split * per;
    const int stop = metal::min(end, first + per);
    uint kw[UNITS * WORDS];
    uint vw[UNITS * WORDS];
    half ksc[UNITS];
    half kbi[UNITS];
    half vsc[UNITS];
    half vbi[UNITS];
    half low[LOADS * 8];
    size_t at[UNITS];
    bool there[UNITS];
    find_tile<HEADS, GROUPS, UNITS>(table + group * width, first + sg * 16 - base, stop - base, head, lane, at, there);
    load_tile<WORDS, UNITS>(kq, ks, kb, at, there, kw, ksc, kbi);
    load_tile<WORDS, UNITS>(vq, vs, vb, at, there, vw, vsc, vbi);
    if (RANK > 0)
        load_residuals<RANK, EIGHTS, LOADS>(
            residuals, residual_table + group * width, first + sg * 16 - base, stop - base, lane, low);
    for (int t0 = first; t0 < stop; t0 += NSG * 16) {
        // What comes next is on its way while this is computed.
        const int next = t0 + NSG * 16 + sg * 16 - base;
        find_tile<HEADS, GROUPS, UNITS>(table + group * width, next, stop - base, head, lane, at, there);
        stage_tile<S, GROUPS, WORDS, UNITS>(stage + sg * 16 * LD, LD, lane, kw, ksc, kbi);
        load_tile<WORDS, UNITS>(kq, ks, kb, at, there, kw, ksc, kbi);
        if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);
        else simdgroup_barrier(mem_flags::mem_threadgroup);
        Sums<Q> scores[TILES * 2];
        UNROLL for (int n = 0; n < TILES * 2; ++n) clear(scores[n]);
        UNROLL for (int k = 0; k < D / 16; ++k) {
            UNROLL for (int n = 0; n < TILES * 2; ++n)
                add_product_rows(scores[n], queries[k], tiles + n * 8 * LD + k * 16, LD);
        }
        if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);
        else simdgroup_barrier(mem_flags::mem_threadgroup);
        stage_tile<S, GROUPS, WORDS, UNITS>(stage + sg * 16 * LD, LD, lane, vw, vsc, vbi);
        load_tile<WORDS, UNITS>(vq, vs, vb, at, there, vw, vsc, vbi);
        if (RANK > 0) {
            stage_residuals<S, EIGHTS, LOADS>(stage + sg * 16 * LD + D, LD, lane, low);
            load_residuals<RANK, EIGHTS, LOADS>(
                residuals, residual_table + group * width, next, stop - base, lane, low);
        }
        UNROLL for (int i = 0; i < Q; ++i) {
            float top = m[i];
            UNROLL for (int n = 0; n < TILES * 2; ++n) {
                UNROLL for (int e = 0; e < 2; ++e) {
                    const int t = t0 + (COOPERATIVE ? 0 : sg * 16) + n * 8 + tile_column(lane) + e;
                    float x = element(scores[n], i, e) * factors[0];
                    if (SOFTCAP) x = factors[1] * metal::tanh(x);
                    x = t < stop && t <= last[i] && t > last[i] - window ? x : NONE;
                    put(scores[n], i, e, x);
                    top = metal::max(top, x);
                }
            }
            top = metal::max(top, simd_shuffle_xor(top, ROW_PEER_1));
            top = metal::max(top, simd_shuffle_xor(top, ROW_PEER_2));
            const float keep = metal::exp2(m[i] - top);
            m[i] = top;
            z[i] *= keep;
            UNROLL for (int n = 0; n < TILES * 2; ++n) {
                UNROLL for (int e = 0; e < 2; ++e) {
                    const float x = element(scores[n], i, e);
                    const float p = x > NONE ? metal::exp2(x - top) : 0.0f;
                    z[i] += p;
                    put(scores[n], i, e, p);
                }
            }
            UNROLL for (int n = 0; n < DV / 8; ++n) {
                UNROLL for (int e = 0; e < 2; ++e) put(out[n], i, e, element(out[n], i, e) * keep);
            }
        }
        if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);
        else simdgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int tile = 0; tile < TILES; ++tile) {
            Left<S, Q> weights;
            to_left(weights, scores[2 * tile], scores[2 * tile + 1]);
            UNROLL for (int n = 0; n < DV / 8; ++n)
                add_product_columns(out[n], weights, tiles + tile * 16 * LD + n * 8, LD);
        }
        if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);
        else simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    const int mine = (group * HEADS + head) * (MEMBERS * GQA);
    UNROLL for (int i = 0; i < Q; ++i) {
        z[i] += simd_shuffle_xor(z[i], ROW_PEER_1);
        z[i] += simd_shuffle_xor(z[i], ROW_PEER_2);
        const int row = i * 8 + tile_row(lane);
        if (COOPERATIVE) {
            if (own_rows + row < MEMBERS * GQA) {
                const size_t to = size_t(mine + own_rows + row) * splits + split;
                UNROLL for (int n = 0; n < DV / 8; ++n) {
                    UNROLL for (int e = 0; e < 2; ++e)
                        sums[to * DV + n * 8 + tile_column(lane) + e] = element(out[n], i, e);
                }
                if (tile_column(lane) == 0) {
                    tops[to * 2] = m[i];
                    tops[to * 2 + 1] = z[i];
                }
            }
        } else if (tile_column(lane) == 0) {
            peaks[sg * Q * 8 + row] = m[i];
            totals[sg * Q * 8 + row] = z[i];
        }
    }
    if (!COOPERATIVE) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int i = 0; i < Q; ++i) {
            const int row = i * 8 + tile_row(lane);
            float top = NONE;
            for (int g = 0; g < NSG; ++g) top = metal::max(top, peaks[g * Q * 8 + row]);
            const float keep = metal::exp2(m[i] - top);
            UNROLL for (int n = 0; n < DV / 8; ++n) {
                UNROLL for (int e = 0; e < 2; ++e) put(out[n], i, e, element(out[n], i, e) * keep);
            }
        }
        for (int g = 0; g < NSG; ++g) {
            if (sg == g) {
                UNROLL for (int i = 0; i < Q; ++i) {
                    UNROLL for (int n = 0; n < DV / 8; ++n) {
                        UNROLL for (int e = 0; e < 2; ++e) {
                            const int at = (i * 8 + tile_row(lane)) * DV + n * 8 + tile_column(lane) + e;
                            merged[at] = (g == 0 ? 0.0f : merged[at]) + element(out[n], i, e);
                        }
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (int i = tid; i < MEMBERS * GQA * DV; i += NSG * 32) {
            const int row = i / DV;
            const size_t to = size_t(mine + row) * splits + split;
            sums[to * DV + i % DV] = merged[i];
            if (i % DV == 0) {
                float top = NONE;
                for (int g = 0; g < NSG; ++g) top = metal::max(top, peaks[g * Q * 8 + row]);
                float total = 0.0f;
                for (int g = 0; g < NSG; ++g)
                    total += totals[g * Q * 8 + row] * metal::exp2(peaks[g * Q * 8 + row] - top);
                tops[to * 2] = top;
                tops[to * 2 + 1] = total;
            }
        }
    }
"""

DECODE = KernelText(
    "agentcache_decode",
    (
        *("q", "kq", "ks", "kb", "vq", "vs", "vb", "residuals", "table", "residual_table"),
        *("spans", "members", "positions", "factors", "params", "written"),
    ),
    ("sums", "tops"),
    _BODY,
    _FUNCTIONS,
)
