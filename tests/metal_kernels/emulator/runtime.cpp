// Runs a Metal kernel's text on a CPU and watches every access.
//
// One fiber a GPU thread, one threadgroup at a time. Fibers give way only at barriers and simdgroup operations, so a
// schedule is the order in which they go on. Clang's hooks for loads and stores (-fsanitize-coverage) feed a shadow of
// every byte that the kernel may write: who wrote it last, who read it, in which epoch between two barriers. Hence:
//   out-of-bounds   outside of a buffer or of threadgroup memory
//   uninitialised   a byte that nobody wrote
//   race            two threads, one of them writing, with no barrier between them, whatever the numbers are
//   const-write     a write to an input
//   barrier         not all threads of a threadgroup reach the same threadgroup_barrier
//   divergent       a simdgroup operation or barrier that not all lanes reach
//   unwritten       bytes of an output that nobody wrote
//   undefined       clang's own checks: array index, shift, signed overflow, division, float to int
//   limit           threads, threadgroup memory
//   runaway         a loop that does not end
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr size_t kStack = 256 << 10;
constexpr size_t kThreadgroupMemory = 32 << 10;
constexpr size_t kThreadgroupSpace = 128 << 10;  // what a kernel that takes too much can still be run in
constexpr size_t kRedZone = 4096;                // around every buffer; launch.py allocates it
constexpr int kMostOfAKind = 4;
constexpr int kThreadgroupFlag = 2, kDeviceFlag = 1;

struct Options {
  int order;  // of threads and threadgroups: 0 forward, 1 reverse, 2 random
  unsigned seed;
  int jitter;  // results of transcendental functions are off by up to so many units in the last place
  int flush_to_zero;
  int check;
  uint64_t most_edges;  // branches taken until a loop counts as endless
};

enum class State { kReady, kSimd, kSimdBarrier, kBarrier, kDone };

struct Access {
  int thread = -1;  // over the whole grid
  int epoch = 0;    // of the threadgroup's barriers
  int simd_epoch = 0;
};

struct Shadow {
  Access write, read, other_read;
  bool initialised = false;
};

struct Region {
  char* begin;
  size_t size;
  std::string name;
  bool writable;
  bool threadgroup;
  std::vector<Shadow> shadow;  // of what is writable
  uint64_t read = 0, written = 0;  // bytes
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  char* stack = nullptr;
  State state = State::kReady;
  int site = 0;  // line * 1024 + column of the operation it waits in
  int flags = 0;
  unsigned lane = 0, simdgroup = 0;
  bool started = false;
  uint32_t position[3] = {};
  alignas(16) unsigned char value[16] = {};
};

struct Simdgroup {
  alignas(16) unsigned char values[32][16];
  unsigned active = 0;
  int epoch = 0;
};

struct Attributes {
  uint32_t position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint32_t threadgroups[3], threads_per_threadgroup[3], grid[3];
};

Options options;
std::mt19937 random_numbers;
std::vector<Region> buffers, threadgroup_variables;
std::vector<int> variable_ids;
std::vector<Fiber> fibers;
std::vector<Simdgroup> simdgroups;
Attributes attributes;
Fiber* current;
int current_index, threadgroup_index, threads_in_full_threadgroup;
int barrier_epoch, device_epoch;
jmp_buf scheduler;
void (*entry)();
char *stacks, *stacks_end, *threadgroup_memory;
size_t threadgroup_used;
std::string findings;
int num_findings;
std::map<std::string, int> findings_of;
uint64_t num_edges, num_switches;

void report(const char* kind, const void* pc, const char* format, ...) {
  ++num_findings;
  if (++findings_of[kind] > kMostOfAKind) return;
  char text[400], head[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  snprintf(head, sizeof head, "%s|%p|threadgroup %d, thread %d|", kind, pc, threadgroup_index, current_index);
  findings += std::string(head) + text + "\n";
}

void give_way() {
  if (!_setjmp(current->jump)) _longjmp(scheduler, 1);
}

[[noreturn]] void end_thread() {
  current->state = State::kDone;
  _longjmp(scheduler, 1);
}

// An address far off any buffer, or what clang made of an access that it knows to be wrong: the thread ends, the test
// process does not.
void on_fault(int signal, siginfo_t* info, void*) {
  if (signal == SIGSEGV) report("out-of-bounds", nullptr, "access to address %p, where nothing is", info->si_addr);
  else report("undefined", nullptr, "signal %d at %p", signal, info->si_addr);
  end_thread();
}

void fiber_main() {
  entry();
  end_thread();
}

bool conflict(const Access& before, const Access& now) {
  if (before.thread < 0 || before.thread == now.thread) return false;
  const int full = threads_in_full_threadgroup;
  if (before.thread / full != now.thread / full) return true;  // no order between threadgroups
  if (before.epoch != now.epoch) return false;
  const bool same_simdgroup = fibers[before.thread % full].simdgroup == fibers[now.thread % full].simdgroup;
  return !(same_simdgroup && before.simd_epoch != now.simd_epoch);
}

Region* find(char* address, int size) {
  for (auto& region : threadgroup_variables)
    if (address + size > region.begin && address < region.begin + region.size) return &region;
  for (auto& region : buffers)
    if (address >= region.begin && address < region.begin + region.size) return &region;
  for (auto& region : buffers)
    if (address >= region.begin - kRedZone && address < region.begin + region.size + kRedZone) return &region;
  return nullptr;
}

void watch_race(Region& region, size_t offset, int size, bool is_write, const void* pc) {
  const Access now{threadgroup_index * threads_in_full_threadgroup + current_index,
                   region.threadgroup ? barrier_epoch : device_epoch, simdgroups[current->simdgroup].epoch};
  for (size_t i = offset; i < offset + size; ++i) {
    Shadow& byte = region.shadow[i];
    if (!is_write && !byte.initialised) {
      report("uninitialised", pc, "read of %s at offset %zu, which nobody wrote", region.name.c_str(), i);
      byte.initialised = true;
      return;
    }
    if (conflict(byte.write, now)) {
      report("race", pc, "%s of %s at offset %zu, written by thread %d", is_write ? "write" : "read",
             region.name.c_str(), i, byte.write.thread);
      byte.write = now;
      return;
    }
    if (is_write) {
      for (Access* read : {&byte.read, &byte.other_read})
        if (conflict(*read, now)) {
          report("race", pc, "write of %s at offset %zu, read by thread %d", region.name.c_str(), i, read->thread);
          byte.read = byte.other_read = Access();
          return;
        }
      byte.write = now;
      byte.initialised = true;
    } else if (byte.read.thread == now.thread || byte.read.thread < 0) {
      byte.read = now;
    } else if (byte.read.epoch != now.epoch) {
      byte.read = now;
      byte.other_read = Access();
    } else {
      byte.other_read = now;
    }
  }
}

void watch(uintptr_t where, int size, bool is_write, const void* pc) {
  char* address = reinterpret_cast<char*>(where);
  if (address >= stacks && address < stacks_end) {
    if (address < current->stack || address >= current->stack + kStack)
      report("race", pc, "access to another thread's private memory");
    return;
  }
  Region* region = find(address, size);
  const char* verb = is_write ? "write" : "read";
  if (!region) {
    if (address >= threadgroup_memory && address < threadgroup_memory + kThreadgroupSpace)
      report("out-of-bounds", pc, "%s of %d bytes beside all threadgroup variables", verb, size);
    // What else a kernel may read is its own constants. It may write to nothing else, least of all to the heap of tests.
    if (is_write) {
      report("out-of-bounds", pc, "write of %d bytes far beside all buffers", size);
      end_thread();
    }
    return;
  }
  const long offset = address - region->begin;
  if (offset < 0 || offset + size > long(region->size)) {
    report("out-of-bounds", pc, "%s of %d bytes at offset %ld of %s, which has %zu", verb, size, offset,
           region->name.c_str(), region->size);
    return;
  }
  (is_write ? region->written : region->read) += size;
  if (is_write && !region->writable) {
    report("const-write", pc, "write to input %s at offset %ld", region->name.c_str(), offset);
    return;
  }
  if (!region->shadow.empty()) watch_race(*region, offset, size, is_write, pc);
}

void prepare_threadgroup(int index, const int* groups, const int* size, const int* grid) {
  threadgroup_index = index;
  const int at[3] = {index % groups[0], index / groups[0] % groups[1], index / groups[0] / groups[1]};
  int extent[3];
  for (int k = 0; k < 3; ++k) {
    attributes.threadgroup_position[k] = at[k];
    attributes.threads_per_threadgroup[k] = size[k];
    extent[k] = std::min(size[k], grid[k] - at[k] * size[k]);
  }
  memset(threadgroup_memory, 0xff, kThreadgroupSpace);
  threadgroup_used = 64;
  threadgroup_variables.clear();
  variable_ids.clear();
  barrier_epoch = device_epoch = 0;
  const int count = extent[0] * extent[1] * extent[2];
  simdgroups.assign((count + 31) / 32, Simdgroup());
  fibers.assign(count, Fiber());
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    fiber.stack = stacks + i * kStack;
    fiber.lane = i & 31;
    fiber.simdgroup = i >> 5;
    fiber.position[0] = i % extent[0];
    fiber.position[1] = i / extent[0] % extent[1];
    fiber.position[2] = i / extent[0] / extent[1];
  }
}

void resume(int index) {
  current = &fibers[index];
  current_index = index;
  ++num_switches;
  if (_setjmp(scheduler)) return;
  if (current->started) _longjmp(current->jump, 1);
  current->started = true;
  getcontext(&current->context);
  current->context.uc_stack.ss_sp = current->stack;
  current->context.uc_stack.ss_size = kStack;
  current->context.uc_link = nullptr;
  makecontext(&current->context, fiber_main, 0);
  setcontext(&current->context);
}

bool waits_in_simdgroup(const Fiber& fiber) {
  return fiber.state == State::kSimd || fiber.state == State::kSimdBarrier;
}

// Lets the lanes of every simdgroup that wait in one operation go on; true if any did.
bool exchange_in_simdgroups() {
  bool moved = false;
  const int count = fibers.size();
  for (size_t s = 0; s < simdgroups.size(); ++s) {
    const int base = s * 32, lanes = std::min(32, count - base);
    int leader = -1;
    unsigned mask = 0;
    for (int i = 0; i < lanes; ++i) {
      Fiber& fiber = fibers[base + i];
      if (!waits_in_simdgroup(fiber)) continue;
      if (leader < 0) leader = i;
      if (fiber.site == fibers[base + leader].site) mask |= 1u << i;
    }
    if (leader < 0) continue;
    current_index = base + leader;
    current = &fibers[current_index];
    const bool is_barrier = current->state == State::kSimdBarrier;
    const unsigned all = lanes == 32 ? ~0u : (1u << lanes) - 1;
    if (mask != all)
      report("divergent", nullptr, "%s of line %d reached by lanes %08x of %08x",
             is_barrier ? "simdgroup_barrier" : "simdgroup operation", current->site / 1024, mask, all);
    Simdgroup& simdgroup = simdgroups[s];
    if (is_barrier) ++simdgroup.epoch;
    simdgroup.active = mask;
    for (int i = 0; i < lanes; ++i) {
      if (!(mask >> i & 1)) continue;
      memcpy(simdgroup.values[i], fibers[base + i].value, 16);
      fibers[base + i].state = State::kReady;
    }
    moved = true;
  }
  return moved;
}

// Lets the threads that wait at a threadgroup barrier go on; false if no thread is left.
bool pass_barrier() {
  int waiting = 0, site = -1, flags = 0;
  bool mixed = false;
  for (size_t i = 0; i < fibers.size(); ++i) {
    if (fibers[i].state == State::kDone) continue;
    current_index = i;
    current = &fibers[i];
    if (site >= 0 && site != fibers[i].site) mixed = true;
    if (site < 0) site = fibers[i].site, flags = fibers[i].flags;
    ++waiting;
  }
  if (!waiting) return false;
  if (mixed || waiting != int(fibers.size()))
    report("barrier", nullptr, "threadgroup_barrier of line %d reached by %d of %zu threads%s", site / 1024, waiting,
           fibers.size(), mixed ? ", others wait at another one" : "");
  if (flags & kThreadgroupFlag) ++barrier_epoch;
  if (flags & kDeviceFlag) ++device_epoch;
  for (auto& simdgroup : simdgroups) ++simdgroup.epoch;
  for (auto& fiber : fibers)
    if (fiber.state == State::kBarrier) fiber.state = State::kReady;
  return true;
}

void run_threadgroup() {
  std::vector<int> order(fibers.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (options.order == 1) std::reverse(order.begin(), order.end());
  do {
    do {
      if (options.order == 2) std::shuffle(order.begin(), order.end(), random_numbers);
      for (int i : order)
        if (fibers[i].state == State::kReady) resume(i);
    } while (exchange_in_simdgroups());
  } while (pass_barrier());
}

void report_unwritten() {
  for (auto& region : buffers) {
    size_t missing = 0, first = 0;
    for (size_t i = 0; i < region.shadow.size(); ++i)
      if (!region.shadow[i].initialised && !missing++) first = i;
    if (missing)
      report("unwritten", nullptr, "%zu of %zu bytes of output %s, the first at %zu", missing, region.size,
             region.name.c_str(), first);
  }
}

}  // namespace

extern "C" {

#define PC __builtin_return_address(0)
#define HOOK(size)                                                                                    \
  void __sanitizer_cov_load##size(uintptr_t at) { if (options.check) watch(at, size, false, PC); }    \
  void __sanitizer_cov_store##size(uintptr_t at) { if (options.check) watch(at, size, true, PC); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)

void __sanitizer_cov_trace_pc_guard_init(uint32_t*, uint32_t*) {}
void __sanitizer_cov_trace_pc_guard(uint32_t*) {
  if (++num_edges <= options.most_edges) return;
  if (num_edges == options.most_edges + 1) report("runaway", PC, "more than %lu branches", options.most_edges);
  end_thread();
}

#define UNDEFINED(name, text) void __ubsan_handle_##name##_minimal() { report("undefined", PC, text); }
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(shift_out_of_bounds, "shift by more than the width")
UNDEFINED(divrem_overflow, "division by zero or overflow")
UNDEFINED(float_cast_overflow, "float does not fit into the integer")
UNDEFINED(mul_overflow, "signed product overflows")
UNDEFINED(add_overflow, "signed sum overflows")
UNDEFINED(sub_overflow, "signed difference overflows")
UNDEFINED(negate_overflow, "signed negation overflows")

// What compiler-rt would bring: a bfloat16 travels in the low half of xmm0.
float to_bfloat(float x) __asm__("__truncsfbf2");
float double_to_bfloat(double x) __asm__("__truncdfbf2");
float to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  bits = is_nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  memcpy(&x, &bits, 4);
  return x;
}
float double_to_bfloat(double x) { return to_bfloat(float(x)); }

unsigned emulator_lane() { return current->lane; }
uint32_t emulator_thread() { return current_index; }
uint32_t emulator_simdgroup() { return current->simdgroup; }
uint32_t emulator_simdgroups() { return simdgroups.size(); }

const Attributes* emulator_attributes() {
  for (int k = 0; k < 3; ++k) {
    attributes.position_in_threadgroup[k] = current->position[k];
    attributes.position_in_grid[k] =
        attributes.threadgroup_position[k] * attributes.threads_per_threadgroup[k] + current->position[k];
  }
  return &attributes;
}

void emulator_barrier(int of_simdgroup, int flags, int site) {
  current->state = of_simdgroup ? State::kSimdBarrier : State::kBarrier;
  current->site = site;
  current->flags = flags;
  give_way();
}

// Every lane's `value`, [32][16] bytes, valid until the simdgroup's next operation; `active` gets who took part.
const void* emulator_exchange(const void* value, int bytes, unsigned* active, int site) {
  memcpy(current->value, value, bytes);
  current->state = State::kSimd;
  current->site = site;
  give_way();
  Simdgroup& simdgroup = simdgroups[current->simdgroup];
  *active = simdgroup.active;
  return simdgroup.values;
}

void* emulator_threadgroup_memory(int id, size_t size) {
  for (size_t i = 0; i < variable_ids.size(); ++i)
    if (variable_ids[i] == id) return threadgroup_variables[i].begin;
  const size_t offset = (threadgroup_used + 15) & ~size_t(15);
  threadgroup_used = offset + size + 64;
  if (threadgroup_used > kThreadgroupSpace) {
    report("limit", nullptr, "threadgroup memory of %zu bytes", threadgroup_used);
    end_thread();
  }
  char* begin = threadgroup_memory + offset;
  threadgroup_variables.push_back(
      {begin, size, "threadgroup variable " + std::to_string(id), true, true, std::vector<Shadow>(size)});
  variable_ids.push_back(id);
  size_t total = 0;
  for (auto& region : threadgroup_variables) total += region.size;
  if (total > kThreadgroupMemory) report("limit", nullptr, "threadgroup memory of %zu bytes", total);
  return begin;
}

// One CPU thread runs every fiber, so a load and a store are one atomic step. Atomics never race with each other.
void emulator_atomic(void* at, void* old, const void* now, int size) {
  char* address = static_cast<char*>(at);
  if (Region* region = options.check ? find(address, size) : nullptr) {
    const long offset = address - region->begin;
    if (offset < 0 || offset + size > long(region->size)) {
      report("out-of-bounds", PC, "atomic at offset %ld of %s", offset, region->name.c_str());
      return;
    }
    if (!region->shadow.empty() && old && !region->shadow[offset].initialised)
      report("uninitialised", PC, "atomic on %s at offset %ld, which nobody wrote", region->name.c_str(), offset);
    if (!region->shadow.empty() && now)
      for (int i = 0; i < size; ++i) region->shadow[offset + i].initialised = true;
  }
  if (old) memcpy(old, at, size);
  if (now) memcpy(at, now, size);
}

float emulator_jitter(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const bool special = (bits & 0x7f800000) == 0x7f800000 || !(bits & 0x7fffffff) || x == 1.0f;
  if (!options.jitter || special) return x;
  bits += int(random_numbers() % (2 * options.jitter + 1)) - options.jitter;
  memcpy(&x, &bits, 4);
  return x;
}

void emulator_buffer(void* begin, size_t size, const char* name, int writable, int initialised) {
  buffers.push_back({static_cast<char*>(begin), size, name, writable != 0, false, {}});
  if (!writable) return;
  buffers.back().shadow.resize(size);
  for (auto& byte : buffers.back().shadow) byte.initialised = initialised;
}

// Runs the grid as dispatchThreads does: the last threadgroups may be partial. `traffic` gets bytes read and written
// of every buffer. Returns the number of findings, whose text goes to `text`.
int emulator_run(void (*kernel)(), const int* grid, const int* threadgroup, const Options* given, char* text,
                 int capacity, uint64_t* traffic) {
  options = *given;
  random_numbers.seed(options.seed);
  entry = kernel;
  findings.clear();
  findings_of.clear();
  num_findings = 0;
  num_edges = num_switches = 0;
  threadgroup_index = current_index = 0;
  const unsigned control = _mm_getcsr();
  if (options.flush_to_zero) _mm_setcsr(control | 0x8040);
  int size[3], groups[3];
  for (int k = 0; k < 3; ++k) {
    size[k] = std::min(threadgroup[k], grid[k]);
    groups[k] = (grid[k] + size[k] - 1) / size[k];
    attributes.grid[k] = grid[k];
    attributes.threadgroups[k] = groups[k];
  }
  threads_in_full_threadgroup = size[0] * size[1] * size[2];
  if (threads_in_full_threadgroup > 1024)
    report("limit", nullptr, "threadgroup of %d threads", threads_in_full_threadgroup);
  const size_t stack_bytes = threads_in_full_threadgroup * kStack;
  stacks = static_cast<char*>(
      mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  stacks_end = stacks + stack_bytes;
  threadgroup_memory = static_cast<char*>(aligned_alloc(4096, kThreadgroupSpace));
  constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction catching = {}, usual[4];
  catching.sa_sigaction = on_fault;
  catching.sa_flags = SA_SIGINFO | SA_NODEFER;
  for (int i = 0; i < 4; ++i) sigaction(kFaults[i], &catching, &usual[i]);
  std::vector<int> order(groups[0] * groups[1] * groups[2]);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (options.order == 1) std::reverse(order.begin(), order.end());
  if (options.order == 2) std::shuffle(order.begin(), order.end(), random_numbers);
  for (int index : order) {
    prepare_threadgroup(index, groups, size, grid);
    run_threadgroup();
  }
  for (int i = 0; i < 4; ++i) sigaction(kFaults[i], &usual[i], nullptr);
  if (options.check) report_unwritten();
  munmap(stacks, stack_bytes);
  free(threadgroup_memory);
  for (size_t i = 0; i < buffers.size(); ++i) {
    traffic[2 * i] = buffers[i].read;
    traffic[2 * i + 1] = buffers[i].written;
  }
  buffers.clear();
  threadgroup_variables.clear();
  _mm_setcsr(control);
  snprintf(text, capacity, "%s", findings.c_str());
  return num_findings;
}
}
