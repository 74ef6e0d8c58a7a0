// simdgroup_matrix: 8x8, two neighbouring elements of a row in each lane, where MLX's steel/gemm/mma.h has them.
#pragma once
namespace metal {
METAL_FUNC uint msl_row(uint lane) { return ((lane / 4) & 4) + ((lane / 2) % 4); }
METAL_FUNC uint msl_column(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
METAL_FUNC uint msl_lane(uint row, uint column) {  // that holds an element
  return (row / 4) * 16 + (column / 4) * 8 + (row % 4) * 2 + (column % 4) / 2;
}
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "8x8 only");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  METAL_FUNC simdgroup_matrix(T diagonal) {
    uint row = msl_row(emulator_lane()), column = msl_column(emulator_lane());
    e = 0;
    if (row == column) e.x = diagonal;
    if (row == column + 1) e.y = diagonal;
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C> METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> m;
  m.e = x;
  return m;
}
#define MSL_MATRIX_IN(space)                                                                                           \
  template <class T> METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* p,             \
                                                    ulong width = 8, ulong2 origin = 0, bool transpose = false) {      \
    for (uint k = 0; k < 2; ++k) {                                                                                     \
      ulong row = msl_row(emulator_lane()), column = msl_column(emulator_lane()) + k;                                  \
      m.e[k] = transpose ? p[(origin.y + column) * width + origin.x + row]                                             \
                         : p[(origin.y + row) * width + origin.x + column];                                            \
    }                                                                                                                  \
  }                                                                                                                    \
  template <class T> METAL_FUNC void simdgroup_store(thread const simdgroup_matrix<T, 8, 8>& m, space T* p,            \
                                                     ulong width = 8, ulong2 origin = 0, bool transpose = false) {     \
    for (uint k = 0; k < 2; ++k) {                                                                                     \
      ulong row = msl_row(emulator_lane()), column = msl_column(emulator_lane()) + k;                                  \
      (transpose ? p[(origin.y + column) * width + origin.x + row]                                                     \
                 : p[(origin.y + row) * width + origin.x + column]) = m.e[k];                                          \
    }                                                                                                                  \
  }
MSL_MATRIX_IN(device)
#ifdef MSL_STRICT
MSL_MATRIX_IN(threadgroup)
#endif
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, thread const simdgroup_matrix<A, 8, 8>& a,
                                              thread const simdgroup_matrix<B, 8, 8>& b,
                                              thread const simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
  struct Operands { float a[2], b[2]; };
  Operands own = {{float(a.e.x), float(a.e.y)}, {float(b.e.x), float(b.e.y)}};
  msl_lanes<Operands> lanes = msl_exchange(own, site);
  uint row = msl_row(emulator_lane()), column = msl_column(emulator_lane());
  float x = float(c.e.x), y = float(c.e.y);
  for (uint k = 0; k < 8; ++k) {
    float left = lanes[msl_lane(row, k)].a[k % 2];
    Operands right = lanes[msl_lane(k, column)];
    x += left * right.b[0];
    y += left * right.b[1];
  }
  d.e.x = D(x);
  d.e.y = D(y);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, thread const simdgroup_matrix<A, 8, 8>& a,
                                   thread const simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), site);
}
}  // namespace metal
