from __future__ import annotations

from agentcache.metal_kernels.kernel_text import KernelText

# A thread unpacks 32 values of a token; the first of those that share a scale loads it.
_FUNCTIONS = """
template <int D, int GS, int BITS, int TOKENS, int THREADS, int UNITS, typename Table>
METAL_FUNC void load_latents(const device uint* data, const device half* scales, const device half* biases,
                             Table slots, int t, int stop, int tid, thread uint* words, thread half* scale,
                             thread half* bias) {
    const int SHARE = GS / 32;
    const int first = (tid & 31) / SHARE * SHARE;
    UNROLL for (int u = 0; u < UNITS; ++u) {
        const int unit = u * THREADS + tid;
        const int place = t + unit / (D / 32);
        const int part = unit % (D / 32);
        float own_scale = 0.0f;
        float own_bias = 0.0f;
        UNROLL for (int w = 0; w < BITS; ++w) words[u * BITS + w] = 0;
        if (unit < TOKENS * (D / 32) && place < stop) {
            const size_t row = size_t(slots[place / 256]) * 256 + place % 256;
            const device uint4* from = (const device uint4*)(data + (row * (D / 32) + part) * BITS);
            UNROLL for (int w = 0; w < BITS / 4; ++w) {
                const uint4 four = from[w];
                words[u * BITS + 4 * w] = four.x;
                words[u * BITS + 4 * w + 1] = four.y;
                words[u * BITS + 4 * w + 2] = four.z;
                words[u * BITS + 4 * w + 3] = four.w;
            }
            if (part % SHARE == 0) {
                own_scale = float(scales[row * (D / GS) + part / SHARE]);
                own_bias = float(biases[row * (D / GS) + part / SHARE]);
            }
        }
        scale[u] = half(simd_shuffle(own_scale, ushort(first)));
        bias[u] = half(simd_shuffle(own_bias, ushort(first)));
    }
}
template <typename S, int BITS>
METAL_FUNC void unpack_unit(SHARED_POINTER(S) to, const thread uint* words, half scale, half bias) {
    UNROLL for (int w = 0; w < BITS; ++w) {
        if (BITS == 4) {
            unpack_word(to + 8 * w, words[w], scale, bias);
        } else {
            UNROLL for (int e = 0; e < 4; ++e) {
                const float code = float((words[w] >> (8 * e)) & 255u);
                to[4 * w + e] = static_cast<S>(metal::fma(code, float(scale), float(bias)));
            }
        }
    }
}
"""

# Simdgroups take columns in turn: sixteen at a time for scores, eight at a time for values.
_BODY = """
    const int lane = int(thread_index_in_simdgroup);
    const int sg = int(simdgroup_index_in_threadgroup);
    const int tid = int(thread_index_in_threadgroup);
    const int tg = int(threadgroup_position_in_grid.x);
    const int splits = params[0];
    const int width = params[1];
    const int row_tokens = params[2];
    const int heads_at = tg % HEAD_GROUPS * (Q * 8);
    const int split = tg / HEAD_GROUPS % splits;
    const int query = tg / (HEAD_GROUPS * splits);
    const int base = spans[5 * query];
    const int begin = spans[5 * query + 1];
    const int end = spans[5 * query + 2];
    const int D = R + P;
    const int ROWS = Q * 8;
    const int THREADS = NSG * 32;
    const int UNITS = (TOKENS * (D / 32) + THREADS - 1) / THREADS;
    const int STEPS = (D / 16 + NSG - 1) / NSG;
    const int COLUMNS = (R / 8 + NSG - 1) / NSG;
    const int SHARES = (ROWS * TOKENS + THREADS - 1) / THREADS;
    const float NONE = -1.0e30f;
    threadgroup float4 pool[POOL];
    threadgroup float parts[NSG * Q * 8 * TOKENS];
    threadgroup float4 weighed[Q * 8 * 16 / 4];
    threadgroup float keeps[Q * 8];
    SHARED_POINTER(S) tile = (SHARED_POINTER(S))pool;
    SHARED_POINTER(S) weights = (SHARED_POINTER(S))weighed;

    SHARED_POINTER(S) own = tile + sg * ROWS * 16;
    const size_t row_at = size_t(query / row_tokens) * HEADS;
    Left<S, Q> queries[STEPS];
    UNROLL for (int j = 0; j < STEPS; ++j) {
        const int k = j * NSG + sg;
        for (int i = lane; i < ROWS * 16; i += 32) {
            const int head = heads_at + i / 16;
            const int column = k * 16 + i % 16;
            float x = 0.0f;
            if (head < HEADS && column < D) {
                const size_t from = (row_at + head) * row_tokens + query % row_tokens;
                x = column < R ? float(q[from * R + column]) : float(qr[from * P + column - R]) * factors[1];
            }
            own[i] = static_cast<S>(metal::max(-65504.0f, metal::min(65504.0f, x)));
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        load_left(queries[j], own, 16);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int i = tid; i < ROWS * 16; i += THREADS) weights[i] = static_cast<S>(0.0f);
    float m[SHARES];
    float z[SHARES];
    UNROLL for (int s = 0; s < SHARES; ++s) {
        m[s] = NONE;
        z[s] = 0.0f;
    }
    Sums<Q> out[COLUMNS];
    UNROLL for (int j = 0; j < COLUMNS; ++j) clear(out[j]);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int per = (end - begin + splits * TOKENS - 1) / (splits * TOKENS) * TOKENS;
    const int first = begin + split * per;
    const int stop = metal::min(end, first + per);
    uint words[UNITS * BITS];
    half scale[UNITS];
    half bias[UNITS];
    load_latents<D, GS, BITS, TOKENS, THREADS, UNITS>(
        data, scales, biases, table + query * width, first - base, stop - base, tid, words, scale, bias);
    for (int t0 = first; t0 < stop; t0 += TOKENS) {
        UNROLL for (int u = 0; u < UNITS; ++u) {
            const int unit = u * THREADS + tid;
            if (unit < TOKENS * (D / 32))
                unpack_unit<S, BITS>(
                    tile + unit / (D / 32) * LD + unit % (D / 32) * 32, words + u * BITS, scale[u], bias[u]);
        }
        // What comes next is on its way while this is computed.
        load_latents<D, GS, BITS, TOKENS, THREADS, UNITS>(
            data, scales, biases, table + query * width, t0 + TOKENS - base, stop - base, tid, words, scale, bias);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        Sums<Q> scores[TOKENS / 8];
        UNROLL for (int n = 0; n < TOKENS / 8; ++n) clear(scores[n]);
        UNROLL for (int j = 0; j < STEPS; ++j) {
            const int k = j * NSG + sg;
            if (k < D / 16) {
                UNROLL for (int n = 0; n < TOKENS / 8; ++n)
                    add_product_rows(scores[n], queries[j], tile + n * 8 * LD + k * 16, LD);
            }
        }
        UNROLL for (int n = 0; n < TOKENS / 8; ++n) {
            UNROLL for (int i = 0; i < Q; ++i) {
                const int at = (sg * ROWS + i * 8 + tile_row(lane)) * TOKENS + n * 8 + tile_column(lane);
                UNROLL for (int e = 0; e < 2; ++e) parts[at + e] = element(scores[n], i, e);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // A thread a score: neighbours have the tokens of one head.
        UNROLL for (int s = 0; s < SHARES; ++s) {
            const int at = s * THREADS + tid;
            const bool real = at < ROWS * TOKENS;
            float x = NONE;
            if (real && t0 + at % TOKENS < stop) {
                x = 0.0f;
                for (int g = 0; g < NSG; ++g) x += parts[g * ROWS * TOKENS + at];
                x *= factors[0];
            }
            float top = metal::max(m[s], x);
            UNROLL for (int b = TOKENS / 2; b > 0; b >>= 1) top = metal::max(top, simd_shuffle_xor(top, ushort(b)));
            const float keep = metal::exp2(m[s] - top);
            const float p = x > NONE ? metal::exp2(x - top) : 0.0f;
            m[s] = top;
            z[s] = z[s] * keep + p;
            if (real) {
                weights[at / TOKENS * 16 + at % TOKENS] = static_cast<S>(p);
                if (at % TOKENS == 0) keeps[at / TOKENS] = keep;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        Left<S, Q> left;
        load_left(left, weights, 16);
        UNROLL for (int i = 0; i < Q; ++i) {
            const float keep = keeps[i * 8 + tile_row(lane)];
            UNROLL for (int j = 0; j < COLUMNS; ++j) {
                UNROLL for (int e = 0; e < 2; ++e) put(out[j], i, e, element(out[j], i, e) * keep);
            }
        }
        UNROLL for (int j = 0; j < COLUMNS; ++j) {
            const int n = j * NSG + sg;
            if (n < R / 8) add_product_columns<TOKENS>(out[j], left, tile + n * 8, LD);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    const int mine = query * HEADS + heads_at;
    UNROLL for (int s = 0; s < SHARES; ++s) {
        const int at = s * THREADS + tid;
        UNROLL for (int b = TOKENS / 2; b > 0; b >>= 1) z[s] += simd_shuffle_xor(z[s], ushort(b));
        if (at < ROWS * TOKENS && at % TOKENS == 0 && heads_at + at / TOKENS < HEADS) {
            const size_t to = size_t(mine + at / TOKENS) * splits + split;
            tops[to * 2] = m[s];
            tops[to * 2 + 1] = z[s];
        }
    }
    UNROLL for (int i = 0; i < Q; ++i) {
        const int row = i * 8 + tile_row(lane);
        if (heads_at + row < HEADS) {
            const size_t to = (size_t(mine + row) * splits + split) * R;
            UNROLL for (int j = 0; j < COLUMNS; ++j) {
                const int n = j * NSG + sg;
                if (n < R / 8) {
                    UNROLL for (int e = 0; e < 2; ++e)
                        sums[to + n * 8 + tile_column(lane) + e] = element(out[j], i, e);
                }
            }
        }
    }
"""

LATENT_DECODE = KernelText(
    "agentcache_latent_decode",
    ("q", "qr", "data", "scales", "biases", "table", "spans", "factors", "params", "written"),
    ("sums", "tops"),
    _BODY,
    _FUNCTIONS,
)
