// Atomics: relaxed only, since one CPU thread runs every fiber.
#pragma once
namespace metal {
// ---- atomics (relaxed only, one CPU thread runs all fibers)
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T v; };
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<float> atomic_float;
#define MSL_AT(AS) \
  template <class T> METAL_FUNC T atomic_load_explicit(const AS atomic<T>* p, memory_order) { T o; emulator_atomic((void*)p, &o, 0, sizeof(T)); return o; } \
  template <class T> METAL_FUNC void atomic_store_explicit(AS atomic<T>* p, T x, memory_order) { emulator_atomic((void*)p, 0, &x, sizeof(T)); } \
  MSL_RMW(AS, add, o + T(x)) MSL_RMW(AS, sub, o - T(x)) MSL_RMW(AS, max, o > T(x) ? o : T(x)) MSL_RMW(AS, min, o < T(x) ? o : T(x)) MSL_RMW(AS, or, o | T(x)) MSL_RMW(AS, and, o & T(x))
#define MSL_RMW(AS, name, expr) template <class T, class U> METAL_FUNC T atomic_fetch_##name##_explicit(AS atomic<T>* p, U x, memory_order) { T o; emulator_atomic((void*)p, &o, 0, sizeof(T)); T n = expr; emulator_atomic((void*)p, 0, &n, sizeof(T)); return o; }
MSL_AT(device)
#ifdef MSL_STRICT
MSL_AT(threadgroup)
#endif
}  // namespace metal
