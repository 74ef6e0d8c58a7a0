// Functions: computed in float; half and bfloat round the float's result.
#pragma once
namespace metal {
// ---- math: float computes, half rounds the float result; bfloat overloads live in MLX's bf16_math.h (here: shim copy)
#define MSL_F1(name, fn, J) METAL_FUNC float name(float x) { return J(fn(x)); } METAL_FUNC half name(half x) { return half(fn(float(x))); } \
  METAL_FUNC bfloat name(bfloat x) { return bfloat(fn(float(x))); } \
  template <class T, int N> METAL_FUNC vec<T, N> name(vec<T, N> v) { for (int i = 0; i < N; ++i) v[i] = name(T(v[i])); return v; }
#define MSL_ID(x) (x)
#define MSL_MATH MSL_F1(exp, __builtin_expf, emulator_jitter) MSL_F1(exp2, __builtin_exp2f, emulator_jitter) MSL_F1(log, __builtin_logf, emulator_jitter) MSL_F1(log2, __builtin_log2f, emulator_jitter) \
  MSL_F1(sin, __builtin_sinf, emulator_jitter) MSL_F1(cos, __builtin_cosf, emulator_jitter) MSL_F1(tanh, __builtin_tanhf, emulator_jitter) MSL_F1(sqrt, __builtin_sqrtf, MSL_ID) \
  METAL_FUNC float msl_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); } MSL_F1(rsqrt, msl_rsqrt, emulator_jitter)
MSL_MATH
namespace fast { MSL_MATH } namespace precise { MSL_MATH }
MSL_F1(floor, __builtin_floorf, MSL_ID) MSL_F1(ceil, __builtin_ceilf, MSL_ID) MSL_F1(round, __builtin_roundf, MSL_ID) MSL_F1(rint, __builtin_rintf, MSL_ID) MSL_F1(trunc, __builtin_truncf, MSL_ID) MSL_F1(fabs, __builtin_fabsf, MSL_ID)
METAL_FUNC float pow(float a, float b) { return emulator_jitter(__builtin_powf(a, b)); } METAL_FUNC float atan2(float a, float b) { return __builtin_atan2f(a, b); }
METAL_FUNC bool isnan(float x) { return __builtin_isnan(x); } METAL_FUNC bool isinf(float x) { return __builtin_isinf(x); }
template <class T> METAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T> METAL_FUNC T max(T a, T b) { return a > b ? a : b; }   // one T on both sides, as in MSL: max(int, uint) must not compile
template <class T> METAL_FUNC T min(T a, T b) { return a < b ? a : b; }
METAL_FUNC float fmax(float a, float b) { return __builtin_fmaxf(a, b); } METAL_FUNC float fmin(float a, float b) { return __builtin_fminf(a, b); }
template <class T> METAL_FUNC T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> METAL_FUNC T fma(T a, T b, T c) { return T(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T> METAL_FUNC T select(T a, T b, bool c) { return c ? b : a; }
METAL_FUNC float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; } METAL_FUNC float dot(float2 a, float2 b) { return a.x * b.x + a.y * b.y; }
METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); } METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; } METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
METAL_FUNC uint extract_bits(uint x, uint o, uint n) { return n ? (x >> o) & (~0u >> (32 - n)) : 0; }
template <class T> struct numeric_limits { static constexpr T max() { return T(-1) > T(0) ? T(-1) : T((1ul << (8 * sizeof(T) - 1)) - 1); } static constexpr T min() { return T(-1) > T(0) ? T(0) : T(1ul << (8 * sizeof(T) - 1)); } static constexpr T lowest() { return min(); } };
#define MSL_FLIM(T, MX, MN, EP) template <> struct numeric_limits<T> { static constexpr T max() { return T(MX); } static constexpr T min() { return T(MN); } static constexpr T lowest() { return -T(MX); } \
  static constexpr T infinity() { return T(__builtin_inff()); } static constexpr T quiet_NaN() { return T(__builtin_nanf("")); } static constexpr T epsilon() { return T(EP); } };
MSL_FLIM(float, 3.40282347e38f, 1.17549435e-38f, 1.1920929e-7f) MSL_FLIM(half, 65504.0f, 6.1035e-5f, 9.765625e-4f) MSL_FLIM(bfloat, 3.3895314e38f, 1.17549435e-38f, 7.8125e-3f)
}  // namespace metal
