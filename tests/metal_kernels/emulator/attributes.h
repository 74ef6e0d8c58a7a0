// The attributes of a thread, as a kernel's parameters name them.
struct msl_attributes { unsigned position[3], local[3], threadgroup_at[3], groups[3], size[3], grid[3]; };
extern "C" {
const msl_attributes* emulator_attributes();
unsigned emulator_thread();
unsigned emulator_simdgroup();
unsigned emulator_simdgroups();
}
#define MSL_VECTOR(name, field)                            \
  static uint3 at_##name() {                               \
    auto* a = emulator_attributes();                       \
    uint3 v = {a->field[0], a->field[1], a->field[2]};     \
    return v;                                              \
  }
#define MSL_NUMBER(name, value) static uint at_##name() { return value; }
MSL_VECTOR(thread_position_in_grid, position)
MSL_VECTOR(thread_position_in_threadgroup, local)
MSL_VECTOR(threadgroup_position_in_grid, threadgroup_at)
MSL_VECTOR(threadgroups_per_grid, groups)
MSL_VECTOR(threads_per_threadgroup, size)
MSL_VECTOR(dispatch_threads_per_threadgroup, size)
MSL_VECTOR(threads_per_grid, grid)
MSL_NUMBER(thread_index_in_threadgroup, emulator_thread())
MSL_NUMBER(thread_index_in_simdgroup, emulator_lane())
MSL_NUMBER(simdgroup_index_in_threadgroup, emulator_simdgroup())
MSL_NUMBER(simdgroups_per_threadgroup, emulator_simdgroups())
MSL_NUMBER(dispatch_simdgroups_per_threadgroup, emulator_simdgroups())
MSL_NUMBER(threads_per_simdgroup, 32)
MSL_NUMBER(thread_execution_width, 32)
