"""The Metal prelude of all kernels; `kernel_text` describes its functions."""

METAL = """
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#define SHARED_POINTER(T) threadgroup T*
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROW_PEER_1 ushort(1)
#define ROW_PEER_2 ushort(8)
METAL_FUNC int tile_row(int lane) { return ((lane >> 2) & 4) | ((lane >> 1) & 3); }
METAL_FUNC int tile_column(int lane) { return ((lane >> 1) & 4) | ((lane & 1) << 1); }

template <int Q> struct Sums { simdgroup_matrix<float, 8, 8> tile[Q]; };
template <typename S, int Q> struct Left { simdgroup_matrix<S, 8, 8> tile[Q][2]; };

template <int Q> METAL_FUNC void clear(thread Sums<Q>& sums) {
    UNROLL for (int i = 0; i < Q; ++i) sums.tile[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
template <int Q> METAL_FUNC float element(thread Sums<Q>& sums, int i, int e) {
    return sums.tile[i].thread_elements()[e];
}
template <int Q> METAL_FUNC void put(thread Sums<Q>& sums, int i, int e, float x) {
    sums.tile[i].thread_elements()[e] = x;
}
template <typename S, int Q> METAL_FUNC void load_left(thread Left<S, Q>& left, const threadgroup S* from, int width) {
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int k = 0; k < 2; ++k) simdgroup_load(left.tile[i][k], from + i * 8 * width + k * 8, ulong(width));
    }
}
template <typename S, int Q> METAL_FUNC void to_left(thread Left<S, Q>& left, thread Sums<Q>& a, thread Sums<Q>& b) {
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
            left.tile[i][0].thread_elements()[e] = static_cast<S>(a.tile[i].thread_elements()[e]);
            left.tile[i][1].thread_elements()[e] = static_cast<S>(b.tile[i].thread_elements()[e]);
        }
    }
}
template <typename S, int Q>
METAL_FUNC void add_product_rows(thread Sums<Q>& sums, thread Left<S, Q>& left, const threadgroup S* from, int width) {
    UNROLL for (int k = 0; k < 2; ++k) {
        simdgroup_matrix<S, 8, 8> right;
        simdgroup_load(right, from + k * 8, ulong(width), ulong2(0, 0), true);
        UNROLL for (int i = 0; i < Q; ++i)
            simdgroup_multiply_accumulate(sums.tile[i], left.tile[i][k], right, sums.tile[i]);
    }
}
template <int K = 16, typename S, int Q>
METAL_FUNC void add_product_columns(thread Sums<Q>& sums, thread Left<S, Q>& left, const threadgroup S* from,
                                    int width) {
    UNROLL for (int k = 0; k < K / 8; ++k) {
        simdgroup_matrix<S, 8, 8> right;
        simdgroup_load(right, from + k * 8 * width, ulong(width));
        UNROLL for (int i = 0; i < Q; ++i)
            simdgroup_multiply_accumulate(sums.tile[i], left.tile[i][k], right, sums.tile[i]);
    }
}
template <typename S> struct Low { simdgroup_matrix<S, 8, 8> tile[2][2]; };
struct Rebuilt { simdgroup_matrix<float, 8, 8> tile[2]; };
template <typename S> struct Keys { simdgroup_matrix<S, 8, 8> tile[2]; };
template <typename S, int Q> struct Eight { simdgroup_matrix<S, 8, 8> tile[Q]; };

METAL_FUNC void clear(thread Rebuilt& made) {
    UNROLL for (int i = 0; i < 2; ++i) made.tile[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
template <typename S> METAL_FUNC void load_low(thread Low<S>& low, const threadgroup S* from, int width) {
    UNROLL for (int i = 0; i < 2; ++i) {
        UNROLL for (int k = 0; k < 2; ++k)
            simdgroup_load(low.tile[i][k], from + i * 8 * width + k * 8, ulong(width), ulong2(0, 0), true);
    }
}
template <typename S>
METAL_FUNC void rebuild(thread Rebuilt& made, thread Low<S>& low, const device S* matrix, int width) {
    UNROLL for (int k = 0; k < 2; ++k) {
        simdgroup_matrix<S, 8, 8> left;
        simdgroup_load(left, matrix + k * 8, ulong(width));
        UNROLL for (int i = 0; i < 2; ++i)
            simdgroup_multiply_accumulate(made.tile[i], left, low.tile[i][k], made.tile[i]);
    }
}
template <typename S>
METAL_FUNC void turn(thread Keys<S>& a, thread Keys<S>& b, thread Rebuilt& x, thread Rebuilt& y,
                     const device S* turns, int width, int lane) {
    const int value = tile_row(lane);
    UNROLL for (int i = 0; i < 2; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
            const device S* at = turns + (i * 8 + tile_column(lane) + e) * width + value / 2 * 4 + value % 2;
            const float cosine = float(at[0]);
            const float sine = float(at[2]);
            const float first = x.tile[i].thread_elements()[e];
            const float second = y.tile[i].thread_elements()[e];
            a.tile[i].thread_elements()[e] = static_cast<S>(first * cosine - second * sine);
            b.tile[i].thread_elements()[e] = static_cast<S>(second * cosine + first * sine);
        }
    }
}
template <typename S> METAL_FUNC void keep(thread Keys<S>& a, thread Rebuilt& x) {
    UNROLL for (int i = 0; i < 2; ++i) {
        UNROLL for (int e = 0; e < 2; ++e)
            a.tile[i].thread_elements()[e] = static_cast<S>(x.tile[i].thread_elements()[e]);
    }
}
template <typename S, int Q> METAL_FUNC void take(thread Eight<S, Q>& eight, thread Left<S, Q>& left, int k) {
    UNROLL for (int i = 0; i < Q; ++i) eight.tile[i] = left.tile[i][k];
}
template <typename S, int Q>
METAL_FUNC void turn_back(thread Eight<S, Q>& a, thread Eight<S, Q>& b, const device S* turns, int lane) {
    const device S* at = turns + tile_column(lane) * 2;
    UNROLL for (int e = 0; e < 2; ++e) {
        const float cosine = float(at[e]);
        const float sine = float(at[2 + e]);
        UNROLL for (int i = 0; i < Q; ++i) {
            const float first = float(a.tile[i].thread_elements()[e]);
            const float second = float(b.tile[i].thread_elements()[e]);
            a.tile[i].thread_elements()[e] = static_cast<S>(first * cosine + second * sine);
            b.tile[i].thread_elements()[e] = static_cast<S>(second * cosine - first * sine);
        }
    }
}
// Of the 16 keys, eight number `i`.
template <typename S, int Q>
METAL_FUNC void add_product_keys(thread Sums<Q>& sums, thread Eight<S, Q>& a, thread Eight<S, Q>& b,
                                 thread Keys<S>& x, thread Keys<S>& y, int i) {
    UNROLL for (int r = 0; r < Q; ++r) {
        simdgroup_multiply_accumulate(sums.tile[r], a.tile[r], x.tile[i], sums.tile[r]);
        simdgroup_multiply_accumulate(sums.tile[r], b.tile[r], y.tile[i], sums.tile[r]);
    }
}
// Eight 4-bit values, low nibble first, to where they are multiplied.
METAL_FUNC void unpack_word(threadgroup half* to, uint word, half scale, half bias) {
    UNROLL for (int i = 0; i < 2; ++i) {
        half4 x = half4(half(0));
        UNROLL for (int e = 0; e < 4; ++e)
            x[e] = fma(as_type<half>(ushort(((word >> (16 * i + 4 * e)) & 15u) | 0x6400u)) - half(1024), scale, bias);
        ((threadgroup half4*)to)[i] = x;
    }
}
METAL_FUNC void unpack_word(threadgroup float* to, uint word, half scale, half bias) {
    UNROLL for (int i = 0; i < 2; ++i) {
        float4 x = float4(0.0f);
        UNROLL for (int e = 0; e < 4; ++e)
            x[e] = fma(float((word >> (16 * i + 4 * e)) & 15u), float(scale), float(bias));
        ((threadgroup float4*)to)[i] = x;
    }
}
METAL_FUNC void load8(const device half* from, thread half* x) {
    UNROLL for (int i = 0; i < 2; ++i) {
        const half4 four = ((const device half4*)from)[i];
        UNROLL for (int e = 0; e < 4; ++e) x[4 * i + e] = four[e];
    }
}
METAL_FUNC void stage8(threadgroup half* to, const thread half* x) {
    UNROLL for (int i = 0; i < 2; ++i) {
        half4 four = half4(half(0));
        UNROLL for (int e = 0; e < 4; ++e) four[e] = x[4 * i + e];
        ((threadgroup half4*)to)[i] = four;
    }
}
METAL_FUNC void stage8(threadgroup float* to, const thread half* x) {
    UNROLL for (int i = 0; i < 2; ++i) {
        float4 four = float4(0.0f);
        UNROLL for (int e = 0; e < 4; ++e) four[e] = float(x[4 * i + e]);
        ((threadgroup float4*)to)[i] = four;
    }
}
template <typename T> METAL_FUNC void store8(device T* to, const thread float* x) {
    UNROLL for (int i = 0; i < 2; ++i) {
        vec<T, 4> four = vec<T, 4>(T(0));
        UNROLL for (int e = 0; e < 4; ++e) four[e] = static_cast<T>(x[4 * i + e]);
        ((device vec<T, 4>*)to)[i] = four;
    }
}
"""
