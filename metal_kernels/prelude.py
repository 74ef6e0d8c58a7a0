"""Preludes for Metal and CUDA; `kernel_text` describes their functions."""

from __future__ import annotations

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
// With a scale and a bias for each value.
METAL_FUNC void unpack_word(threadgroup half* to, uint word, const thread half* scale, const thread half* bias) {
    UNROLL for (int i = 0; i < 2; ++i) {
        half4 x = half4(half(0));
        UNROLL for (int e = 0; e < 4; ++e)
            x[e] = fma(as_type<half>(ushort(((word >> (16 * i + 4 * e)) & 15u) | 0x6400u)) - half(1024),
                       scale[4 * i + e], bias[4 * i + e]);
        ((threadgroup half4*)to)[i] = x;
    }
}
METAL_FUNC void unpack_word(threadgroup float* to, uint word, const thread half* scale, const thread half* bias) {
    UNROLL for (int i = 0; i < 2; ++i) {
        float4 x = float4(0.0f);
        UNROLL for (int e = 0; e < 4; ++e)
            x[e] = fma(float((word >> (16 * i + 4 * e)) & 15u), float(scale[4 * i + e]), float(bias[4 * i + e]));
        ((threadgroup float4*)to)[i] = x;
    }
}
// Eight 8-bit values, lowest byte first.
METAL_FUNC void unpack_bytes(threadgroup half* to, uint first, uint second, half scale, half bias) {
    UNROLL for (int i = 0; i < 2; ++i) {
        half4 x = half4(half(0));
        UNROLL for (int e = 0; e < 4; ++e)
            x[e] = fma(as_type<half>(ushort((((i == 0 ? first : second) >> (8 * e)) & 255u) | 0x6400u)) - half(1024),
                       scale, bias);
        ((threadgroup half4*)to)[i] = x;
    }
}
METAL_FUNC void unpack_bytes(threadgroup float* to, uint first, uint second, half scale, half bias) {
    UNROLL for (int i = 0; i < 2; ++i) {
        float4 x = float4(0.0f);
        UNROLL for (int e = 0; e < 4; ++e)
            x[e] = fma(float(((i == 0 ? first : second) >> (8 * e)) & 255u), float(scale), float(bias));
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


CUDA = """
#define device
#define constant
#define thread
#define threadgroup __shared__
#define METAL_FUNC __device__ __forceinline__
#define SHARED_POINTER(T) T*
#define UNROLL _Pragma("unroll")
#define ROW_PEER_1 ushort(1)
#define ROW_PEER_2 ushort(2)
typedef unsigned int uint;
typedef unsigned short ushort;
typedef __half half;
struct mem_flags { enum { mem_none, mem_device, mem_threadgroup }; };
METAL_FUNC void threadgroup_barrier(int) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(int) { __syncwarp(); }
template <class T> METAL_FUNC T simd_shuffle_xor(T x, ushort lanes) { return __shfl_xor_sync(~0u, x, lanes); }
template <class T> METAL_FUNC T simd_shuffle(T x, ushort lane) { return __shfl_sync(~0u, x, lane); }
namespace metal {
METAL_FUNC float exp2(float x) { return exp2f(x); }
METAL_FUNC float tanh(float x) { return tanhf(x); }
METAL_FUNC float rint(float x) { return rintf(x); }
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC float max(float a, float b) { return fmaxf(a, b); }
METAL_FUNC float min(float a, float b) { return fminf(a, b); }
METAL_FUNC int max(int a, int b) { return a > b ? a : b; }
METAL_FUNC int min(int a, int b) { return a < b ? a : b; }
}
METAL_FUNC int tile_row(int lane) { return lane >> 2; }
METAL_FUNC int tile_column(int lane) { return (lane & 3) << 1; }
METAL_FUNC int own_lane() { return threadIdx.x & 31; }
METAL_FUNC uint as_uint(__half2 x) { uint r; memcpy(&r, &x, 4); return r; }
METAL_FUNC __half2 as_half2(uint x) { __half2 r; memcpy(&r, &x, 4); return r; }

template <int Q> struct Sums { float x[Q][2]; };
template <typename S, int Q> struct Left;
template <int Q> struct Left<half, Q> { uint x[Q][2]; };
template <int Q> struct Left<float, Q> { float x[Q][2][2]; };

template <int Q> METAL_FUNC void clear(Sums<Q>& sums) {
    UNROLL for (int i = 0; i < Q; ++i) sums.x[i][0] = sums.x[i][1] = 0.0f;
}
template <int Q> METAL_FUNC float element(Sums<Q>& sums, int i, int e) { return sums.x[i][e]; }
template <int Q> METAL_FUNC void put(Sums<Q>& sums, int i, int e, float x) { sums.x[i][e] = x; }
template <int Q> METAL_FUNC void load_left(Left<half, Q>& left, const half* from, int width) {
    const half* row = from + tile_row(own_lane()) * width + tile_column(own_lane());
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int k = 0; k < 2; ++k) left.x[i][k] = *(const uint*)(row + i * 8 * width + k * 8);
    }
}
template <int Q> METAL_FUNC void load_left(Left<float, Q>& left, const float* from, int width) {
    const float* row = from + tile_row(own_lane()) * width + tile_column(own_lane());
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int k = 0; k < 2; ++k) {
            UNROLL for (int e = 0; e < 2; ++e) left.x[i][k][e] = row[i * 8 * width + k * 8 + e];
        }
    }
}
template <int Q> METAL_FUNC void to_left(Left<half, Q>& left, Sums<Q>& a, Sums<Q>& b) {
    UNROLL for (int i = 0; i < Q; ++i) {
        left.x[i][0] = as_uint(__floats2half2_rn(a.x[i][0], a.x[i][1]));
        left.x[i][1] = as_uint(__floats2half2_rn(b.x[i][0], b.x[i][1]));
    }
}
template <int Q> METAL_FUNC void to_left(Left<float, Q>& left, Sums<Q>& a, Sums<Q>& b) {
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
            left.x[i][0][e] = a.x[i][e];
            left.x[i][1][e] = b.x[i][e];
        }
    }
}
METAL_FUNC void mma(float& c0, float& c1, float& c2, float& c3, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The matrix unit takes 16 rows at a time: two eights, or one and nothing.
METAL_FUNC void add_product(Sums<1>& sums, Left<half, 1>& left, uint b0, uint b1) {
    float none0 = 0.0f, none1 = 0.0f;
    mma(sums.x[0][0], sums.x[0][1], none0, none1, left.x[0][0], 0u, left.x[0][1], 0u, b0, b1);
}
template <int Q> METAL_FUNC void add_product(Sums<Q>& sums, Left<half, Q>& left, uint b0, uint b1) {
    static_assert(Q % 2 == 0, "one tile of eight rows, or pairs of them");
    UNROLL for (int i = 0; i < Q; i += 2)
        mma(sums.x[i][0], sums.x[i][1], sums.x[i + 1][0], sums.x[i + 1][1],
            left.x[i][0], left.x[i + 1][0], left.x[i][1], left.x[i + 1][1], b0, b1);
}
template <int Q> METAL_FUNC void add_product_rows(Sums<Q>& sums, Left<half, Q>& left, const half* from, int width) {
    const half* row = from + tile_row(own_lane()) * width + tile_column(own_lane());
    add_product(sums, left, *(const uint*)row, *(const uint*)(row + 8));
}
template <int K = 16, int Q>
METAL_FUNC void add_product_columns(Sums<Q>& sums, Left<half, Q>& left, const half* from, int width) {
    static_assert(K == 16, "in half, sixteen rows at a time");
    uint b0, b1;
    const uint at = uint(__cvta_generic_to_shared(from + (own_lane() & 15) * width));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b0), "=r"(b1)
                 : "r"(at));  // volatile, since it reads memory: the same address holds other values each time
    add_product(sums, left, b0, b1);
}
// The left operand's element k of a row is in the lane of that row that has column k.
template <int Q> METAL_FUNC float left_element(Left<float, Q>& left, int i, int k) {
    return __shfl_sync(~0u, left.x[i][k / 8][k % 2], (own_lane() & ~3) | (k % 8) / 2);
}
template <int Q> METAL_FUNC void add_product_rows(Sums<Q>& sums, Left<float, Q>& left, const float* from, int width) {
    const float* row = from + tile_column(own_lane()) * width;
    UNROLL for (int k = 0; k < 16; ++k) {
        UNROLL for (int i = 0; i < Q; ++i) {
            const float x = left_element(left, i, k);
            sums.x[i][0] = fmaf(x, row[k], sums.x[i][0]);
            sums.x[i][1] = fmaf(x, row[width + k], sums.x[i][1]);
        }
    }
}
template <int K = 16, int Q>
METAL_FUNC void add_product_columns(Sums<Q>& sums, Left<float, Q>& left, const float* from, int width) {
    const float* column = from + tile_column(own_lane());
    UNROLL for (int k = 0; k < K; ++k) {
        UNROLL for (int i = 0; i < Q; ++i) {
            const float x = left_element(left, i, k);
            sums.x[i][0] = fmaf(x, column[k * width], sums.x[i][0]);
            sums.x[i][1] = fmaf(x, column[k * width + 1], sums.x[i][1]);
        }
    }
}
template <typename S> using Low = Left<S, 2>;
using Rebuilt = Sums<2>;
template <typename S> struct Keys;
template <> struct Keys<half> { uint x[2]; };
template <> struct Keys<float> { float x[2][2]; };
template <typename S, int Q> struct Eight;
template <int Q> struct Eight<half, Q> { uint x[Q]; };
template <int Q> struct Eight<float, Q> { float x[Q][2]; };

// Four values of rank a lane, in one load; the order of what is summed over is free, so long as it is one.
METAL_FUNC void load_low(Left<half, 2>& low, const half* from, int width) {
    UNROLL for (int i = 0; i < 2; ++i) {
        const uint2 four = *(const uint2*)(from + (i * 8 + tile_row(own_lane())) * width + tile_column(own_lane()) * 2);
        low.x[i][0] = four.x;
        low.x[i][1] = four.y;
    }
}
METAL_FUNC void load_low(Left<float, 2>& low, const float* from, int width) { load_left(low, from, width); }
METAL_FUNC void rebuild(Rebuilt& made, Left<half, 2>& low, const half* matrix, int width) {
    const uint2 four = *(const uint2*)(matrix + tile_row(own_lane()) * width + tile_column(own_lane()) * 2);
    add_product(made, low, four.x, four.y);
}
METAL_FUNC void rebuild(Rebuilt& made, Left<float, 2>& low, const float* matrix, int width) {
    // As sums are: a lane's two columns are two rows of the matrix.
    add_product_rows(made, low, matrix, width);
}
METAL_FUNC void turn(Keys<half>& a, Keys<half>& b, Rebuilt& x, Rebuilt& y, const half* turns, int width, int lane) {
    UNROLL for (int i = 0; i < 2; ++i) {
        const uint2 at = *(const uint2*)(turns + (i * 8 + tile_row(lane)) * width + tile_column(lane) * 2);
        const __half2 cosines = as_half2(at.x), sines = as_half2(at.y);
        const __half2 first = __floats2half2_rn(x.x[i][0], x.x[i][1]), second = __floats2half2_rn(y.x[i][0], y.x[i][1]);
        a.x[i] = as_uint(__hfma2(first, cosines, __hneg2(__hmul2(second, sines))));
        b.x[i] = as_uint(__hfma2(second, cosines, __hmul2(first, sines)));
    }
}
METAL_FUNC void turn(Keys<float>& a, Keys<float>& b, Rebuilt& x, Rebuilt& y, const float* turns, int width, int lane) {
    UNROLL for (int i = 0; i < 2; ++i) {
        const float* at = turns + (i * 8 + tile_row(lane)) * width + tile_column(lane) * 2;
        UNROLL for (int e = 0; e < 2; ++e) {
            a.x[i][e] = x.x[i][e] * at[e] - y.x[i][e] * at[2 + e];
            b.x[i][e] = y.x[i][e] * at[e] + x.x[i][e] * at[2 + e];
        }
    }
}
METAL_FUNC void keep(Keys<half>& a, Rebuilt& x) {
    UNROLL for (int i = 0; i < 2; ++i) a.x[i] = as_uint(__floats2half2_rn(x.x[i][0], x.x[i][1]));
}
METAL_FUNC void keep(Keys<float>& a, Rebuilt& x) {
    UNROLL for (int i = 0; i < 2; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) a.x[i][e] = x.x[i][e];
    }
}
template <int Q> METAL_FUNC void take(Eight<half, Q>& eight, Left<half, Q>& left, int k) {
    UNROLL for (int i = 0; i < Q; ++i) eight.x[i] = left.x[i][k];
}
template <int Q> METAL_FUNC void take(Eight<float, Q>& eight, Left<float, Q>& left, int k) {
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) eight.x[i][e] = left.x[i][k][e];
    }
}
template <int Q> METAL_FUNC void turn_back(Eight<half, Q>& a, Eight<half, Q>& b, const half* turns, int lane) {
    const uint2 at = *(const uint2*)(turns + tile_column(lane) * 2);
    const __half2 cosines = as_half2(at.x), sines = as_half2(at.y);
    UNROLL for (int i = 0; i < Q; ++i) {
        const __half2 first = as_half2(a.x[i]), second = as_half2(b.x[i]);
        a.x[i] = as_uint(__hfma2(first, cosines, __hmul2(second, sines)));
        b.x[i] = as_uint(__hfma2(second, cosines, __hneg2(__hmul2(first, sines))));
    }
}
template <int Q> METAL_FUNC void turn_back(Eight<float, Q>& a, Eight<float, Q>& b, const float* turns, int lane) {
    const float* at = turns + tile_column(lane) * 2;
    UNROLL for (int i = 0; i < Q; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
            const float first = a.x[i][e], second = b.x[i][e];
            a.x[i][e] = first * at[e] + second * at[2 + e];
            b.x[i][e] = second * at[e] - first * at[2 + e];
        }
    }
}
METAL_FUNC void add_product_keys(Sums<1>& sums, Eight<half, 1>& a, Eight<half, 1>& b, Keys<half>& x, Keys<half>& y,
                                 int i) {
    float none0 = 0.0f, none1 = 0.0f;
    mma(sums.x[0][0], sums.x[0][1], none0, none1, a.x[0], 0u, b.x[0], 0u, x.x[i], y.x[i]);
}
template <int Q>
METAL_FUNC void add_product_keys(Sums<Q>& sums, Eight<half, Q>& a, Eight<half, Q>& b, Keys<half>& x, Keys<half>& y,
                                 int i) {
    UNROLL for (int r = 0; r < Q; r += 2)
        mma(sums.x[r][0], sums.x[r][1], sums.x[r + 1][0], sums.x[r + 1][1],
            a.x[r], a.x[r + 1], b.x[r], b.x[r + 1], x.x[i], y.x[i]);
}
// A query's value k is in the lane of its row that has column k, a token's in that of the row that the token is.
template <int Q>
METAL_FUNC void add_product_keys(Sums<Q>& sums, Eight<float, Q>& a, Eight<float, Q>& b, Keys<float>& x, Keys<float>& y,
                                 int i) {
    UNROLL for (int k = 0; k < 8; ++k) {
        float left[2][Q], right[2][2];
        UNROLL for (int r = 0; r < Q; ++r) {
            left[0][r] = __shfl_sync(~0u, a.x[r][k % 2], (own_lane() & ~3) | k / 2);
            left[1][r] = __shfl_sync(~0u, b.x[r][k % 2], (own_lane() & ~3) | k / 2);
        }
        UNROLL for (int e = 0; e < 2; ++e) {
            right[0][e] = __shfl_sync(~0u, x.x[i][k % 2], (tile_column(own_lane()) + e) * 4 + k / 2);
            right[1][e] = __shfl_sync(~0u, y.x[i][k % 2], (tile_column(own_lane()) + e) * 4 + k / 2);
        }
        UNROLL for (int r = 0; r < Q; ++r) {
            UNROLL for (int e = 0; e < 2; ++e)
                sums.x[r][e] = fmaf(left[0][r], right[0][e], fmaf(left[1][r], right[1][e], sums.x[r][e]));
        }
    }
}
// Nibbles 0 and 4 of a word, 1 and 5, ... are two halves of 1024 + n; then they are put in order.
METAL_FUNC void unpack_word(half* to, uint word, half scale, half bias) {
    const __half2 s = __half2half2(scale), b = __half2half2(bias), offset = as_half2(0x64006400u);
    uint x[4];
    UNROLL for (int e = 0; e < 4; ++e)
        x[e] = as_uint(__hfma2(__hsub2(as_half2((word >> (4 * e)) & 0x000F000Fu | 0x64006400u), offset), s, b));
    uint4 ordered;
    ordered.x = __byte_perm(x[0], x[1], 0x5410);
    ordered.y = __byte_perm(x[2], x[3], 0x5410);
    ordered.z = __byte_perm(x[0], x[1], 0x7632);
    ordered.w = __byte_perm(x[2], x[3], 0x7632);
    *(uint4*)to = ordered;
}
METAL_FUNC void unpack_word(float* to, uint word, half scale, half bias) {
    const float s = __half2float(scale), b = __half2float(bias);
    UNROLL for (int e = 0; e < 8; ++e) to[e] = fmaf(float((word >> (4 * e)) & 15u), s, b);
}
METAL_FUNC void unpack_word(half* to, uint word, const half* scale, const half* bias) {
    const __half2 offset = as_half2(0x64006400u);
    uint x[4];
    UNROLL for (int e = 0; e < 4; ++e)
        x[e] = as_uint(__hsub2(as_half2((word >> (4 * e)) & 0x000F000Fu | 0x64006400u), offset));
    uint ordered[4];
    ordered[0] = __byte_perm(x[0], x[1], 0x5410);
    ordered[1] = __byte_perm(x[2], x[3], 0x5410);
    ordered[2] = __byte_perm(x[0], x[1], 0x7632);
    ordered[3] = __byte_perm(x[2], x[3], 0x7632);
    UNROLL for (int e = 0; e < 4; ++e)
        ordered[e] = as_uint(__hfma2(as_half2(ordered[e]), __halves2half2(scale[2 * e], scale[2 * e + 1]),
                                     __halves2half2(bias[2 * e], bias[2 * e + 1])));
    *(uint4*)to = make_uint4(ordered[0], ordered[1], ordered[2], ordered[3]);
}
METAL_FUNC void unpack_word(float* to, uint word, const half* scale, const half* bias) {
    UNROLL for (int e = 0; e < 8; ++e)
        to[e] = fmaf(float((word >> (4 * e)) & 15u), __half2float(scale[e]), __half2float(bias[e]));
}
// Bytes 0 and 1 of a word, 2 and 3, are two halves of 1024 + n.
METAL_FUNC void unpack_bytes(half* to, uint first, uint second, half scale, half bias) {
    const __half2 s = __half2half2(scale), b = __half2half2(bias), offset = as_half2(0x64006400u);
    uint x[4] = {__byte_perm(first, 0x64646464u, 0x4140), __byte_perm(first, 0x64646464u, 0x4342),
                 __byte_perm(second, 0x64646464u, 0x4140), __byte_perm(second, 0x64646464u, 0x4342)};
    UNROLL for (int e = 0; e < 4; ++e) x[e] = as_uint(__hfma2(__hsub2(as_half2(x[e]), offset), s, b));
    *(uint4*)to = make_uint4(x[0], x[1], x[2], x[3]);
}
METAL_FUNC void unpack_bytes(float* to, uint first, uint second, half scale, half bias) {
    const float s = __half2float(scale), b = __half2float(bias);
    UNROLL for (int e = 0; e < 4; ++e) {
        to[e] = fmaf(float((first >> (8 * e)) & 255u), s, b);
        to[4 + e] = fmaf(float((second >> (8 * e)) & 255u), s, b);
    }
}
METAL_FUNC void load8(const half* from, half* x) {
    const uint4 eight = *(const uint4*)from;
    memcpy(x, &eight, 16);
}
METAL_FUNC void stage8(half* to, const half* x) {
    uint4 eight;
    memcpy(&eight, x, 16);
    *(uint4*)to = eight;
}
METAL_FUNC void stage8(float* to, const half* x) {
    UNROLL for (int e = 0; e < 8; ++e) to[e] = __half2float(x[e]);
}
template <typename T> METAL_FUNC void store8(T* to, const float* x) {
    alignas(16) T eight[8];
    UNROLL for (int e = 0; e < 8; ++e) eight[e] = static_cast<T>(x[e]);
    UNROLL for (int i = 0; i < int(sizeof(T)) / 2; ++i) ((uint4*)to)[i] = ((uint4*)eight)[i];
}
"""
