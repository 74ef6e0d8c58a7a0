from __future__ import annotations

from agentcache.metal_kernels.kernel_text import KernelText

# A simdgroup's tile has 16 tokens of one block, and begins at a multiple of 16.
_FUNCTIONS = """
// A tile's first token in an arena, of tokens of all heads; tokens `first` ... `last` - 1 of the tile count.
struct TileRows {
    size_t row;
    int first;
    int last;
};
// The tile at `place` of a block table, of whose tokens `from` ... `stop` - 1 count.
template <int HEADS, typename Table>
METAL_FUNC TileRows find_tile(Table slots, int head, int place, int from, int stop) {
    TileRows rows;
    rows.row = 0;
    rows.first = metal::max(0, from - place);
    rows.last = metal::min(16, stop - place);
    if (rows.first < rows.last) rows.row = (size_t(slots[place / 256]) * HEADS + head) * 256 + place % 256;
    return rows;
}
// Quantised by token: a lane has whole groups of GS values, so that it loads each scale once.
template <int D, int GS, int BITS> struct TokenTile {
    uint words[(16 * (D / GS) + 31) / 32 * (GS * BITS / 32)];
    half scale[(16 * (D / GS) + 31) / 32];
    half bias[(16 * (D / GS) + 31) / 32];
};
// 4 bits, quantised by channel of 64 tokens, in full blocks: a lane has eight channels of every AT_ONCE-th token.
template <int D> struct ChannelTile {
    uint words[16 / (32 / (D / 8))];
    half scale[8];
    half bias[8];
};
template <bool BY_CHANNEL, int D, int GS, int BITS> struct KeyTile { typedef TokenTile<D, GS, BITS> type; };
template <int D, int GS, int BITS> struct KeyTile<true, D, GS, BITS> { typedef ChannelTile<D> type; };

template <int D, int GS, int BITS>
METAL_FUNC void load_tile(thread TokenTile<D, GS, BITS>& tile, const device uint* data, const device half* scales,
                          const device half* biases, TileRows rows, int lane) {
    const int GROUPS = D / GS;
    const int WORDS = GS * BITS / 32;
    UNROLL for (int u = 0; u < (16 * GROUPS + 31) / 32; ++u) {
        const int token = (u * 32 + lane) / GROUPS;
        tile.scale[u] = half(0.0f);
        tile.bias[u] = half(0.0f);
        UNROLL for (int w = 0; w < WORDS; ++w) tile.words[u * WORDS + w] = 0;
        if (token >= rows.first && token < rows.last) {
            const size_t at = rows.row * GROUPS + (u * 32 + lane);
            const device uint4* from = (const device uint4*)(data + at * WORDS);
            UNROLL for (int w = 0; w < WORDS / 4; ++w) {
                const uint4 four = from[w];
                tile.words[u * WORDS + 4 * w] = four.x;
                tile.words[u * WORDS + 4 * w + 1] = four.y;
                tile.words[u * WORDS + 4 * w + 2] = four.z;
                tile.words[u * WORDS + 4 * w + 3] = four.w;
            }
            tile.scale[u] = scales[at];
            tile.bias[u] = biases[at];
        }
    }
}
template <int D>
METAL_FUNC void load_tile(thread ChannelTile<D>& tile, const device uint* data, const device half* scales,
                          const device half* biases, TileRows rows, int lane) {
    const int WORDS = D / 8;
    const int AT_ONCE = 32 / WORDS;
    const int column = lane % WORDS;
    // Also of tokens before a window: scores are masked.
    const bool loads = lane < WORDS * AT_ONCE && rows.first < rows.last;
    UNROLL for (int e = 0; e < 8; ++e) {
        tile.scale[e] = half(0.0f);
        tile.bias[e] = half(0.0f);
    }
    if (loads) {
        const size_t at = rows.row / 64 * D + column * 8;
        load8(scales + at, tile.scale);
        load8(biases + at, tile.bias);
    }
    UNROLL for (int u = 0; u < 16 / AT_ONCE; ++u) {
        const int token = u * AT_ONCE + lane / WORDS;
        tile.words[u] = 0;
        if (loads) tile.words[u] = data[(rows.row + token) * WORDS + column];
    }
}
template <int BITS, typename S>
METAL_FUNC void unpack_eight(SHARED_POINTER(S) to, const thread uint* words, half scale, half bias) {
    if (BITS == 8) unpack_bytes(to, words[0], words[1], scale, bias);
    else unpack_word(to, words[0], scale, bias);
}
template <typename S, int D, int GS, int BITS>
METAL_FUNC void stage_tile(SHARED_POINTER(S) stage, int width, thread TokenTile<D, GS, BITS>& tile, int lane) {
    const int GROUPS = D / GS;
    const int WORDS = GS * BITS / 32;
    UNROLL for (int u = 0; u < (16 * GROUPS + 31) / 32; ++u) {
        const int token = (u * 32 + lane) / GROUPS;
        const int column = (u * 32 + lane) % GROUPS * GS;
        if (token < 16) {
            UNROLL for (int e = 0; e < GS / 8; ++e)
                unpack_eight<BITS>(stage + token * width + column + e * 8, tile.words + u * WORDS + e * BITS / 4,
                                   tile.scale[u], tile.bias[u]);
        }
    }
}
template <typename S, int D>
METAL_FUNC void stage_tile(SHARED_POINTER(S) stage, int width, thread ChannelTile<D>& tile, int lane) {
    const int WORDS = D / 8;
    const int AT_ONCE = 32 / WORDS;
    if (lane < WORDS * AT_ONCE) {
        UNROLL for (int u = 0; u < 16 / AT_ONCE; ++u) {
            const int token = u * AT_ONCE + lane / WORDS;
            unpack_word(stage + token * width + lane % WORDS * 8, tile.words[u], tile.scale, tile.bias);
        }
    }
}
// A tile of an open block, in 8 bits by token; `place` is within it.
template <int HEADS, int D, int GS, typename S>
METAL_FUNC void stage_open(SHARED_POINTER(S) stage, int width, const device uint* data, const device half* scales,
                           const device half* biases, int slot, int head, int place, int from, int stop, int lane) {
    TokenTile<D, GS, 8> tile;
    load_tile(tile, data, scales, biases, find_tile<HEADS>(&slot, head, place, from, stop), lane);
    stage_tile(stage, width, tile, lane);
}
// As `find_tile`, of residuals: `place` counts on at `tail` with tokens `from` ... `sealed` - 1, `back` before.
template <typename Table>
METAL_FUNC TileRows find_beside(Table slots, int place, int tail, int back, int from, int sealed, int stop) {
    return place < tail ? find_tile<1>(slots, 0, place, from, stop)
                        : find_tile<1>(slots, 0, place - back, from, metal::min(sealed, stop));
}
// Of the tile's tokens, what is kept of rank RANK, in eights, which zeros fill up.
template <int RANK, int EIGHTS, int LOADS>
METAL_FUNC void load_residuals(const device half* residuals, TileRows rows, int lane, thread half* x) {
    UNROLL for (int u = 0; u < LOADS; ++u) {
        const int token = (u * 32 + lane) / EIGHTS;
        const int column = (u * 32 + lane) % EIGHTS * 8;
        UNROLL for (int e = 0; e < 8; ++e) x[u * 8 + e] = half(0.0f);
        if (token >= rows.first && token < rows.last && column < RANK) {
            const device half* from = residuals + (rows.row + token) * RANK + column;
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
        if (token < 16) stage8(stage + token * width + column, x + u * 8);
    }
}
// Each of the first 16 lanes has a token's norms: of its key without the adapter, and with it.
template <int HEADS>
METAL_FUNC void load_norms(const device half* norms, TileRows rows, int head, int lane, thread half* x) {
    x[0] = half(0.0f);
    x[1] = half(0.0f);
    if (lane >= rows.first && lane < rows.last) {
        const size_t at = ((rows.row + lane) * HEADS + head) * 2;
        x[0] = norms[at];
        x[1] = norms[at + 1];
    }
}
// By a factor of each token, which the first 16 lanes have.
template <int Q> METAL_FUNC void scale_scores(thread Sums<Q>* scores, float factor, int lane) {
    UNROLL for (int n = 0; n < 2; ++n) {
        UNROLL for (int e = 0; e < 2; ++e) {
            const float own = simd_shuffle(factor, ushort(n * 8 + tile_column(lane) + e));
            UNROLL for (int i = 0; i < Q; ++i) put(scores[n], i, e, element(scores[n], i, e) * own);
        }
    }
}
// What an adapter adds to 16 keys, times the queries: keys are put together, eight values at a time, and turned to
// where they are within the tile; queries are turned back by what the tile begins at. So turns are read by the tile,
// and nothing is computed of an angle.
template <typename S, int D, int PAIRS, int RANKS, int Q>
METAL_FUNC void add_keys(thread Sums<Q>* scores, thread Left<S, Q>* queries, SHARED_POINTER(const S) stage, int width,
                         const device S* matrix, const device S* near, const device S* far, int lane) {
    Low<S> low[RANKS];
    UNROLL for (int r = 0; r < RANKS; ++r) load_low(low[r], stage + r * 16, width);
    UNROLL for (int k = 0; k < D / 16; ++k) {
        const bool turns = k < PAIRS / 8;
        const int n = turns ? k : 2 * k;
        const int m = turns ? k + PAIRS / 8 : 2 * k + 1;
        Rebuilt x;
        Rebuilt y;
        clear(x);
        clear(y);
        UNROLL for (int r = 0; r < RANKS; ++r) {
            rebuild(x, low[r], matrix + (n * 8 * RANKS + r) * 16, RANKS * 16);
            rebuild(y, low[r], matrix + (m * 8 * RANKS + r) * 16, RANKS * 16);
        }
        Eight<S, Q> a;
        Eight<S, Q> b;
        take(a, queries[n / 2], n % 2);
        take(b, queries[m / 2], m % 2);
        Keys<S> first;
        Keys<S> second;
        if (turns) {
            turn(first, second, x, y, near + n * 16, 2 * PAIRS, lane);
            turn_back(a, b, far + n * 16, lane);
        } else {
            keep(first, x);
            keep(second, y);
        }
        UNROLL for (int i = 0; i < 2; ++i) add_product_keys(scores[i], a, b, first, second, i);
    }
}
"""

# Query rows in a tile: member * GQA + head within the kv head. COOPERATIVE: simdgroups have own queries and unpack
# tokens for each other; otherwise they have own tokens and share the queries.
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
    const int base = spans[5 * group];
    const int begin = spans[5 * group + 1];
    const int end = spans[5 * group + 2];
    const int own_slot = spans[5 * group + 3];
    // Tokens from `sealed` to `opens` are in full blocks, those before in block 0, those behind in the own block.
    const int sealed = spans[5 * group + 4];
    const int opens = BY_CHANNEL && own_slot >= 0 ? (end - 1) / 256 * 256 : end;
    const int EIGHTS = RANK > 0 ? (RANK + 7) / 8 : 1;
    const int LOADS = (16 * EIGHTS + 31) / 32;
    const int DV = RANK > 0 ? D + EIGHTS * 8 : D;
    const int KEY_RANKS = KEY_RANK > 0 ? (KEY_RANK + 15) / 16 : 1;
    const int WAYS = KEY_RANK > 0 && INTERLEAVED ? 2 : 1;
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

    // Splits take turns by rounds, so that tiles of open blocks, which are not loaded ahead, go to several of them. A
    // round lies within a group of 64 tokens. Block 0 in its open form comes last, as if it were at `tail`. The first
    // tiles are on their way while queries are put where they are multiplied.
    const int ROUND = NSG * 16;
    const int first = sealed / ROUND * ROUND + split * ROUND;
    const int tail = (end + ROUND - 1) / ROUND * ROUND;
    const int back = tail - begin / ROUND * ROUND;
    typename KeyTile<BY_CHANNEL, D, GS, KEY_BITS>::type keys;
    TokenTile<D, GS, VALUE_BITS> values;
    half low[LOADS * 8];
    half key_low[KEY_RANKS * 8];
    half norms[2];
    TileRows rows =
        find_tile<HEADS>(table + group * width, head, first + sg * 16 - base, sealed - base, opens - base);
    load_tile(keys, kq, ks, kb, rows, lane);
    load_tile(values, vq, vs, vb, rows, lane);

    Left<S, Q> queries[WAYS * (D / 16)];
    UNROLL for (int way = 0; way < WAYS; ++way) {
        for (int i = tid; i < ROWS * D; i += NSG * 32) {
            const int row = i / D;
            const int who = row < MEMBERS * GQA ? members[group * MEMBERS + row / GQA] : -1;
            // Once more with first values of pairs in front of second ones, as `key_b` has them.
            const int column = way == 0 || i % D >= 2 * PAIRS ? i % D : i % D / 2 + i % 2 * PAIRS;
            float x = 0.0f;
            if (who >= 0) {
                const size_t from = size_t(who / row_tokens) * (HEADS * GQA) + head * GQA + row % GQA;
                x = float(q[(from * row_tokens + who % row_tokens) * D + i % D]);
            }
            stage[row * LD + column] = static_cast<S>(metal::max(-65504.0f, metal::min(65504.0f, x)));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int k = 0; k < D / 16; ++k)
            load_left(queries[way * (D / 16) + k], stage + own_rows * LD + k * 16, LD);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
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

    const int residuals_end = RANK > 0 || KEY_RANK > 0 ? end - base : 0;
    rows = find_beside(residual_table + group * width, first + sg * 16 - base, tail - base, back, begin - base,
                       sealed - base, residuals_end);
    if (RANK > 0) load_residuals<RANK, EIGHTS, LOADS>(residuals, rows, lane, low);
    if (KEY_RANK > 0) load_residuals<KEY_RANK, KEY_RANKS * 2, KEY_RANKS>(key_residuals, rows, lane, key_low);
    if (NORMED) load_norms<HEADS>(key_norms, rows, head, lane, norms);
    // Full blocks, then open ones: two loops when unrolled, since each needs registers that the other does not.
    int turn = first;
    UNROLL for (int form = 0; form < (BY_CHANNEL ? 2 : 1); ++form) {
        const bool is_open = form == 1;
        const int until = is_open ? back + sealed / ROUND * ROUND : opens;
        for (; turn < until; turn += splits * ROUND) {
            const bool is_first = is_open && turn >= tail;
            const int t0 = is_first ? turn - back : turn;
            const int here = t0 + sg * 16;
            const int slot = is_first ? table[group * width] : own_slot;
            const int slot_at = is_first ? base : opens;
            // What comes next is on its way while this is computed.
            const int next = turn + sg * 16 + splits * ROUND - base;
            rows = find_tile<HEADS>(table + group * width, head, next, sealed - base, opens - base);
            if (is_open) {
                stage_open<HEADS, D, GS>(stage + sg * 16 * LD, LD, okq, oks, okb, slot, head, here - slot_at,
                                         begin - slot_at, end - slot_at, lane);
            } else {
                stage_tile(stage + sg * 16 * LD, LD, keys, lane);
                load_tile(keys, kq, ks, kb, rows, lane);
            }
            const float without = NORMED ? float(norms[0]) : 1.0f;
            const float agent = NORMED ? float(norms[1]) : 1.0f;
            const TileRows beside = find_beside(residual_table + group * width, next, tail - base, back, begin - base,
                                                sealed - base, residuals_end);
            if (NORMED) load_norms<HEADS>(key_norms, beside, head, lane, norms);
            if (KEY_RANK > 0) {
                stage_residuals<S, KEY_RANKS * 2, KEY_RANKS>(stage + sg * 16 * LD + D, LD, lane, key_low);
                load_residuals<KEY_RANK, KEY_RANKS * 2, KEY_RANKS>(key_residuals, beside, lane, key_low);
            }
            if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);
            else simdgroup_barrier(mem_flags::mem_threadgroup);
            Sums<Q> scores[TILES * 2];
            UNROLL for (int n = 0; n < TILES * 2; ++n) clear(scores[n]);
            UNROLL for (int k = 0; k < D / 16; ++k) {
                UNROLL for (int n = 0; n < TILES * 2; ++n)
                    add_product_rows(scores[n], queries[k], tiles + n * 8 * LD + k * 16, LD);
            }
            if (KEY_RANK > 0) {
                if (NORMED) scale_scores(scores, without > 0.0f ? 1.0f / without : 0.0f, lane);
                const int begins = metal::min(here, end - 1);
                add_keys<S, D, PAIRS, KEY_RANKS, Q>(
                    scores, queries + (WAYS - 1) * (D / 16), stage + sg * 16 * LD + D, LD,
                    key_b + size_t(head) * (D * KEY_RANKS * 16), near_turns,
                    far_turns + size_t(begins / 16) * (2 * PAIRS), lane);
                if (NORMED) scale_scores(scores, agent, lane);
            }
            if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);
            else simdgroup_barrier(mem_flags::mem_threadgroup);
            if (is_open) {
                stage_open<HEADS, D, GS>(stage + sg * 16 * LD, LD, ovq, ovs, ovb, slot, head, here - slot_at,
                                         begin - slot_at, end - slot_at, lane);
            } else {
                stage_tile(stage + sg * 16 * LD, LD, values, lane);
                load_tile(values, vq, vs, vb, rows, lane);
            }
            if (RANK > 0) {
                stage_residuals<S, EIGHTS, LOADS>(stage + sg * 16 * LD + D, LD, lane, low);
                load_residuals<RANK, EIGHTS, LOADS>(residuals, beside, lane, low);
            }
            UNROLL for (int i = 0; i < Q; ++i) {
                float top = m[i];
                UNROLL for (int n = 0; n < TILES * 2; ++n) {
                    UNROLL for (int e = 0; e < 2; ++e) {
                        const int t = t0 + (COOPERATIVE ? 0 : sg * 16) + n * 8 + tile_column(lane) + e;
                        float x = element(scores[n], i, e) * factors[0];
                        if (SOFTCAP) x = factors[1] * metal::tanh(x);
                        x = t < end && t <= last[i] && t > last[i] - window ? x : NONE;
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
        *("q", "kq", "ks", "kb", "vq", "vs", "vb", "okq", "oks", "okb", "ovq", "ovs", "ovb"),
        *("residuals", "key_residuals", "key_norms", "key_b"),
        *("near_turns", "far_turns", "table", "residual_table"),
        *("spans", "members", "positions", "factors", "params", "written"),
    ),
    ("sums", "tops"),
    _BODY,
    _FUNCTIONS,
)
