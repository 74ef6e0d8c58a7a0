// Types of the Metal shading language.
#pragma once
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;
typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned int uint32_t;
typedef long int64_t; typedef unsigned long uint64_t; typedef unsigned long size_t; typedef long ptrdiff_t;
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef _Float16 half; typedef __bf16 bfloat;
#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL_VERSION__ 310
#define __METAL__ 1
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define FLT_MAX 3.402823466e+38f
#define HALF_MAX 65504.0h
#ifdef MSL_STRICT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif
#define thread
constexpr half operator""h(long double x) { return half(x); }
constexpr bfloat operator""bf(long double x) { return bfloat(x); }

#define double __msl_has_no_double__
// ---- vector types: clang ext_vector (same swizzles as MSL); T4(a,b,c,d) through function-like macros
#define MSL_VEC(T) typedef T T##2 __attribute__((ext_vector_type(2))); typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VEC(float) MSL_VEC(half) MSL_VEC(bfloat) MSL_VEC(char) MSL_VEC(uchar) MSL_VEC(short) MSL_VEC(ushort) MSL_VEC(int) MSL_VEC(uint)
MSL_VEC(long) MSL_VEC(ulong)
namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;
template <bool C, class T = void> struct enable_if {}; template <class T> struct enable_if<true, T> { typedef T type; };
template <bool C, class A, class B> struct conditional { typedef A type; }; template <class A, class B> struct conditional<false, A, B> { typedef B type; };
template <bool C, class A, class B> using conditional_t = typename conditional<C, A, B>::type;
template <class T> struct msl_dim { static constexpr int n = 1; typedef T elem; };
template <class T, int N> struct msl_dim<T __attribute__((ext_vector_type(N)))> { static constexpr int n = N; typedef T elem; };
template <class V, class... A> METAL_FUNC constexpr V msl_mk(A... a) {
  typedef typename msl_dim<V>::elem E; constexpr int N = msl_dim<V>::n; constexpr int have = (0 + ... + msl_dim<A>::n);
  if constexpr (sizeof...(A) == 1 && have == 1) { return (V)((E)(a, ...)); }
  else if constexpr (sizeof...(A) == 1) { static_assert(have == N, "vector size"); return (__builtin_convertvector(a, V), ...); }
  else { static_assert(have == N, "vector constructor: component count"); V v = 0; int i = 0;
    auto put = [&](auto x) { if constexpr (msl_dim<decltype(x)>::n == 1) v[i++] = (E)x; else for (int j = 0; j < msl_dim<decltype(x)>::n; ++j) v[i++] = (E)x[j]; };
    (put(a), ...); return v; }
}
}
#define float2(...) metal::msl_mk<float2>(__VA_ARGS__)
#define float3(...) metal::msl_mk<float3>(__VA_ARGS__)
#define float4(...) metal::msl_mk<float4>(__VA_ARGS__)
#define half2(...) metal::msl_mk<half2>(__VA_ARGS__)
#define half4(...) metal::msl_mk<half4>(__VA_ARGS__)
#define uint2(...) metal::msl_mk<uint2>(__VA_ARGS__)
#define uint3(...) metal::msl_mk<uint3>(__VA_ARGS__)
#define uint4(...) metal::msl_mk<uint4>(__VA_ARGS__)
#define int2(...) metal::msl_mk<int2>(__VA_ARGS__)
#define int4(...) metal::msl_mk<int4>(__VA_ARGS__)
#define ulong2(...) metal::msl_mk<ulong2>(__VA_ARGS__)

template <class To, class From> METAL_FUNC To as_type(From x) { static_assert(sizeof(To) == sizeof(From), "as_type size"); return __builtin_bit_cast(To, x); }
