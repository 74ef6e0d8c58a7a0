// Barriers and what the lanes of a simdgroup exchange.
#pragma once
extern "C" {
void emulator_barrier(int of_simdgroup, int flags, int site) __attribute__((convergent));
const void* emulator_exchange(const void* value, int bytes, unsigned* active, int site) __attribute__((convergent));
unsigned emulator_lane(void);
void* emulator_threadgroup_memory(int id, unsigned long bytes);
void emulator_atomic(void* at, void* old, const void* now, int bytes);
float emulator_jitter(float);
}
// The place in the source, by which lanes that reach another operation are told apart.
#define MSL_SITE int site = __builtin_LINE() * 1024 + __builtin_COLUMN()

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags flags, MSL_SITE) { emulator_barrier(0, int(flags), site); }
METAL_FUNC void simdgroup_barrier(mem_flags flags, MSL_SITE) { emulator_barrier(1, int(flags), site); }

// All lanes' values; those of lanes that took no part are rubbish.
template <class T> struct msl_lanes {
  const unsigned char (*values)[16];
  unsigned active;
  METAL_FUNC T operator[](unsigned lane) const { T x; __builtin_memcpy(&x, values[lane], sizeof(T)); return x; }
  METAL_FUNC bool has(unsigned lane) const { return lane < 32 && (active >> lane & 1); }
  METAL_FUNC T pick(unsigned lane, T own) const { return has(lane) ? (*this)[lane] : own; }
};
template <class T> METAL_FUNC msl_lanes<T> msl_exchange(T x, int site) {
  static_assert(sizeof(T) <= 16, "simdgroup operation on more than 16 bytes");
  msl_lanes<T> lanes;
  lanes.values = (const unsigned char (*)[16])emulator_exchange(&x, sizeof(T), &lanes.active, site);
  return lanes;
}
// In the order of a butterfly, over the lanes that take part.
template <class T, class F> METAL_FUNC T msl_reduce(T x, int site, F combine) {
  static_assert(sizeof(typename msl_dim<T>::elem) <= 4, "MSL reduces no 64-bit types");
  msl_lanes<T> lanes = msl_exchange(x, site);
  T v[32];
  unsigned on = lanes.active;
  for (int i = 0; i < 32; ++i) if (on >> i & 1) v[i] = lanes[i];
  for (int d = 16; d; d >>= 1)
    for (int i = 0; i < d; ++i) {
      int j = i + d;
      if (!(on >> j & 1)) continue;
      if (on >> i & 1) v[i] = combine(v[i], v[j]); else { v[i] = v[j]; on |= 1u << i; }
    }
  return v[0];
}
#define MSL_REDUCTION(name, expression) \
  template <class T> METAL_FUNC T name(T x, MSL_SITE) { return msl_reduce(x, site, [](T a, T b) -> T { return expression; }); }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a * b)
MSL_REDUCTION(simd_max, a > b ? a : b)
MSL_REDUCTION(simd_min, a < b ? a : b)
MSL_REDUCTION(simd_and, a & b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)
#define MSL_SHUFFLE(name, index, from) \
  template <class T> METAL_FUNC T name(T x, index i, MSL_SITE) { return msl_exchange(x, site).pick(from, x); }
MSL_SHUFFLE(simd_shuffle, ushort, i)
MSL_SHUFFLE(simd_broadcast, ushort, i)
MSL_SHUFFLE(simd_shuffle_xor, ushort, emulator_lane() ^ i)
MSL_SHUFFLE(simd_shuffle_down, ushort, emulator_lane() + i)
MSL_SHUFFLE(simd_shuffle_up, ushort, emulator_lane() - i)
template <class T> METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort by, MSL_SITE) {
  T shifted = msl_exchange(x, site).pick(emulator_lane() - by, x), filled = msl_exchange(fill, site).pick(32 + emulator_lane() - by, x);
  return emulator_lane() >= by ? shifted : filled;
}
template <class T> METAL_FUNC T simd_broadcast_first(T x, MSL_SITE) {
  msl_lanes<T> lanes = msl_exchange(x, site);
  return lanes[__builtin_ctz(lanes.active)];
}
template <class T> METAL_FUNC T simd_prefix_inclusive_sum(T x, MSL_SITE) {
  msl_lanes<T> lanes = msl_exchange(x, site);
  T sum = lanes[0];
  for (unsigned i = 1; i <= emulator_lane(); ++i) sum = sum + lanes[i];
  return sum;
}
template <class T> METAL_FUNC T simd_prefix_exclusive_sum(T x, MSL_SITE) {
  msl_lanes<T> lanes = msl_exchange(x, site);
  T sum = 0;
  for (unsigned i = 0; i < emulator_lane(); ++i) sum = sum + lanes[i];
  return sum;
}
METAL_FUNC bool simd_all(bool x, MSL_SITE) { return msl_reduce(int(x), site, [](int a, int b) { return a & b; }); }
METAL_FUNC bool simd_any(bool x, MSL_SITE) { return msl_reduce(int(x), site, [](int a, int b) { return a | b; }); }
METAL_FUNC bool simd_is_first(MSL_SITE) { return emulator_lane() == (unsigned)__builtin_ctz(msl_exchange(0, site).active); }
}  // namespace metal
