// A Hopper multiprocessor on a CPU, as far as the code that TileLang makes of this project's kernels needs one: threads
// of a block, warps' votes and shuffles, named barriers, mbarriers, TMA loads and wgmma, with their layouts in shared
// memory. By NVIDIA's "PTX ISA", sections on wgmma's matrix fragments and descriptors, mbarrier, and tensor copies.
//
// Threads are fibers of one thread: each runs until it waits for something, in an order that is drawn anew for every
// round. TMA's copies happen in any order, of some blocks only when all threads wait for something; wgmmas either when
// they are issued or when they are waited for, drawn for each block. So what is read too early, or overwritten, shows.
// If all threads wait and nothing is on its way, or something still is when all are done, the run ends with a message.
//
// Memory has one order, and kernels run one after the other: a missing fence does not show, nor a griddepcontrol.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

// --- fibers ----------------------------------------------------------------------------------------------------------

struct Index { int x, y, z; };
static Index threadIdx, blockIdx;

namespace emulated {

constexpr int MAX_THREADS = 1024, STACK = 256 << 10, SHARED = 256 << 10;
alignas(1024) inline unsigned char shared_memory[SHARED];

struct Fiber {
  ucontext_t start;
  jmp_buf state;
  std::unique_ptr<char[]> stack;
  bool begun, done;
  std::vector<std::function<void()>> open;               // wgmmas, not yet in a group
  std::deque<std::vector<std::function<void()>>> groups;  // of them, not yet waited for
};
struct Meeting { int arrived = 0; unsigned round = 0; int votes = 0, result = 0; };
struct Warp { Meeting meeting; unsigned values[32]; };

inline Fiber fibers[MAX_THREADS];
inline Warp warps[MAX_THREADS / 32];
inline Meeting barriers[16];
inline std::vector<std::function<void()>> copies;  // TMA's, on their way
inline jmp_buf scheduler;
inline int current, threads;
inline long progress;  // events that somebody may wait for
inline std::function<void()> body;
inline std::mt19937 dice;
inline bool late, lazy;  // wgmmas run when they are waited for; copies when all threads wait
inline char message[256];

template <typename F> void wait_until(F ready) {
  const int me = current;
  while (!ready())
    if (_setjmp(fibers[me].state) == 0) _longjmp(scheduler, 1);
  threadIdx = {me, 0, 0};
}

// Now and then, let others go first.
inline void pause() {
  if (dice() % 4 != 0) return;
  ++progress;
  bool paused = false;
  wait_until([&] { return std::exchange(paused, true); });
}

inline void meet(Meeting& m, int count) {
  const unsigned round = m.round;
  if (++m.arrived == count) m.arrived = 0, ++m.round, ++progress;
  else wait_until([&] { return m.round != round; });
}

inline void fiber_main() {
  body();
  fibers[current].done = true;
  ++progress;
  _longjmp(scheduler, 1);
}

inline void resume(int thread) {
  current = thread;
  threadIdx = {thread, 0, 0};
  if (_setjmp(scheduler) != 0) return;
  Fiber& f = fibers[thread];
  if (f.begun) _longjmp(f.state, 1);
  f.begun = true;
  setcontext(&f.start);
}

inline void copy_one() {
  const auto one = copies.begin() + dice() % copies.size();
  auto copy = *one;
  copies.erase(one);
  ++progress;
  copy();
}

// One block. False, with ``message`` set, if it hangs.
inline bool run_block(int count, std::function<void()> what) {
  body = std::move(what);
  threads = count;
  copies.clear();
  late = dice() % 2, lazy = dice() % 2;
  std::fill(std::begin(warps), std::end(warps), Warp{});
  std::fill(std::begin(barriers), std::end(barriers), Meeting{});
  std::memset(shared_memory, 0xff, SHARED);  // NaN
  for (int i = 0; i < count; ++i) {
    Fiber& f = fibers[i];
    getcontext(&f.start);
    if (!f.stack) f.stack = std::make_unique_for_overwrite<char[]>(STACK);
    f.start.uc_stack.ss_sp = f.stack.get();
    f.start.uc_stack.ss_size = STACK;
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
    f.begun = f.done = false;
    f.open.clear(), f.groups.clear();
  }
  for (;;) {
    const long before = progress;
    // Warps in any order; the threads of a warp one after the other, from any of them on.
    const int warp_count = (count + 31) / 32, first_lane = dice() % 32;
    std::vector<int> turn(warp_count);
    for (int w = 0; w < warp_count; ++w) turn[w] = w;
    std::shuffle(turn.begin(), turn.end(), dice);
    bool all_done = true;
    for (int w : turn)
      for (int i = 0; i < 32; ++i) {
        const int thread = w * 32 + (first_lane + i) % 32;
        if (thread >= count || fibers[thread].done) continue;
        all_done = false;
        resume(thread);
      }
    const char* wrong = nullptr;
    if (all_done) {
      bool waited = true;
      for (int i = 0; i < count; ++i) waited &= fibers[i].open.empty() && fibers[i].groups.empty();
      if (copies.empty() && waited) return true;
      wrong = waited ? "ends before its copies do" : "ends before its products do";
    }
    if (!copies.empty() && (progress == before || (!lazy && dice() % 2))) copy_one();
    if (progress == before) wrong = "hangs: its threads wait for each other";
    if (wrong) {
      std::snprintf(message, sizeof message, "block (%d, %d, %d) %s", blockIdx.x, blockIdx.y, blockIdx.z, wrong);
      return false;
    }
  }
}

// --- numbers ---------------------------------------------------------------------------------------------------------

template <typename T> T from_bits(unsigned bits) {
  static_assert(sizeof(T) <= 4);
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
template <typename T> unsigned to_bits(T x) {
  static_assert(sizeof(T) <= 4);
  unsigned bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

}  // namespace emulated

using uchar = unsigned char;
using uint = unsigned;

struct half_t {
  _Float16 value;
  half_t() = default;
  explicit half_t(float x) : value(static_cast<_Float16>(x)) {}
  operator float() const { return value; }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    unsigned b = emulated::to_bits(x);
    bits = x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
  }
  operator float() const { return emulated::from_bits<float>(unsigned(bits) << 16); }
};

template <typename T> unsigned emulated_pair(float high, float low) {
  return emulated::to_bits(T(high)) << 16 | emulated::to_bits(T(low));
}

struct uint1 { unsigned x; };
struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct half2 { half_t x, y; };
struct __nv_bfloat162 { bfloat16_t x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline half2 __float22half2_rn(float2 x) { return {half_t(x.x), half_t(x.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {bfloat16_t(x.x), bfloat16_t(x.y)}; }
inline unsigned __pack_half2(half_t x, half_t y) { return emulated::to_bits(half2{x, y}); }
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return emulated::to_bits(__nv_bfloat162{x, y}); }

template <typename A, typename B> auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return std::max(T(a), T(b));
}
template <typename A, typename B> auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return std::min(T(a), T(b));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const int byte = selector >> 4 * i & 7;
    result |= ((byte < 4 ? x : y) >> byte % 4 * 8 & 255) << 8 * i;
  }
  return result;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
constexpr float CUDART_INF_F = INFINITY;

// --- warps, barriers -------------------------------------------------------------------------------------------------

inline unsigned emulated_exchange(unsigned value, int from) {
  emulated::Warp& warp = emulated::warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  emulated::meet(warp.meeting, 32);
  const unsigned got = warp.values[from];
  emulated::meet(warp.meeting, 32);
  return got;
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  emulated::Warp& warp = emulated::warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = vote;
  emulated::meet(warp.meeting, 32);
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= warp.values[i] << i;
  emulated::meet(warp.meeting, 32);
  return all;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline void __syncwarp(unsigned = ~0u) { emulated::meet(emulated::warps[threadIdx.x / 32].meeting, 32); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int distance) {
  return emulated::from_bits<T>(emulated_exchange(emulated::to_bits(x), (threadIdx.x % 32) ^ distance));
}
template <typename T> T __shfl_sync(unsigned, T x, int lane, int = 32) {
  return emulated::from_bits<T>(emulated_exchange(emulated::to_bits(x), lane));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) {
  for (int d = 1; d < 32; d *= 2) x = std::min(x, __shfl_xor_sync(mask, x, d));
  return x;
}
inline void __syncthreads() { emulated::meet(emulated::barriers[0], emulated::threads); }
inline int emulated_any(int barrier, int count, int condition) {
  emulated::Meeting& m = emulated::barriers[barrier];
  const unsigned round = m.round;
  m.votes |= condition;
  if (++m.arrived == count) m = {0, round + 1, 0, m.votes}, ++emulated::progress;
  else emulated::wait_until([&] { return m.round != round; });
  return m.result;
}
template <typename T> T atomicOr(T* p, std::type_identity_t<T> x) {
  const T old = *p;
  *p |= x;
  return old;
}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() {}

struct Barrier {  // an mbarrier
  int16_t count, pending;
  int32_t transactions : 31;
  uint32_t phase : 1;
  void init(int n) { *this = {int16_t(n), int16_t(n), 0, 0}; }
  void check() {
    if (pending == 0 && transactions == 0) phase ^= 1, pending = count, ++emulated::progress;
  }
  void arrive() { --pending, check(), emulated::pause(); }
  void expect_transaction(int bytes) { transactions += bytes; }
  void complete(int bytes) { transactions -= bytes, check(); }
  void wait(int parity) { emulated::wait_until([&] { return int(phase) != parity; }); }
};
static_assert(sizeof(Barrier) == 8);

struct CUtensorMap {
  char* base;
  int64_t sizes[4], strides[4], box[4];  // the innermost dimension first; strides in bytes
};

// --- what TileLang's own headers have --------------------------------------------------------------------------------

namespace tl {

enum class DataType { kFloat16, kBFloat16, kFloat32 };
struct MaxOp { float operator()(float a, float b) const { return std::fmax(a, b); } };
struct SumOp { float operator()(float a, float b) const { return a + b; } };
template <int threads> struct NamedBarrier {};

// ``threads`` neighbours; more than a warp's never reduce here.
template <typename Op, int threads, int scale, int offset, typename B> struct AllReduce {
  static_assert(threads <= 32 && scale == 1);
  static float run(float x) {
    for (int d = threads / 2; d > 0; d /= 2) x = Op()(x, __shfl_xor_sync(~0u, x, d));
    return x;
  }
};

template <int extent> bool tl_shuffle_elect() { return extent == 0 ? threadIdx.x == 0 : threadIdx.x % extent == 0; }
inline void __sync_thread_partial(int id, int count) { emulated::meet(emulated::barriers[id], count); }
inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
template <int N> void warpgroup_reg_alloc() {}
template <int N> void warpgroup_reg_dealloc() {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {
  emulated::Fiber& f = emulated::fibers[threadIdx.x];
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}
template <int N> void wait_wgmma() {
  auto& groups = emulated::fibers[threadIdx.x].groups;
  while (groups.size() > N) {
    for (auto& wgmma : groups.front()) wgmma();
    groups.pop_front();
  }
}
inline void issue(std::function<void()> wgmma) {
  if (emulated::late) emulated::fibers[threadIdx.x].open.push_back(std::move(wgmma));
  else wgmma();
}
template <typename T> void warpgroup_fence_operand(T*, int) {}

// A box of 128 bytes a row, swizzled so. What is outside of the tensor becomes 0.
inline void tma_load(const CUtensorMap& map, Barrier& barrier, void* to, int x, int y, int z, int u) {
  const int64_t at[4] = {x, y, z, u};
  emulated::copies.push_back([=, &barrier] {
    const CUtensorMap& m = map;
    int64_t row = 0;
    const int width = int(m.box[0]) * 2;
    for (int64_t d = 0; d < m.box[3]; ++d)
      for (int64_t c = 0; c < m.box[2]; ++c)
        for (int64_t b = 0; b < m.box[1]; ++b, ++row)
          for (int64_t a = 0; a < m.box[0]; ++a) {
            const int64_t p[4] = {at[0] + a, at[1] + b, at[2] + c, at[3] + d};
            bool inside = true;
            int64_t from = 0;
            for (int i = 0; i < 4; ++i) inside &= p[i] >= 0 && p[i] < m.sizes[i], from += p[i] * m.strides[i];
            size_t target = static_cast<unsigned char*>(to) - emulated::shared_memory + row * width + a * 2;
            target ^= (target >> 7 & 7) << 4;
            uint16_t value = 0;
            if (inside) std::memcpy(&value, m.base + from, 2);
            std::memcpy(emulated::shared_memory + target, &value, 2);
          }
    barrier.complete(int(row) * width);
  });
}

union GmmaDescriptor {
  uint64_t bits;
  struct { uint64_t address : 14, : 2, leading : 14, : 2, stride : 14, : 3, base : 3, : 10, layout : 2; } field;
  uint32_t words[2];
  explicit operator uint64_t() const { return bits; }
  GmmaDescriptor operator+(int x) const { GmmaDescriptor d = *this; d.words[0] += x; return d; }
};

template <int layout, int leading, int stride, typename T> void initialize_wgmma_descriptor(GmmaDescriptor& d, T* p) {
  static_assert(layout >= 1 && layout <= 3);  // swizzled
  d.bits = 0;
  d.field.address = (reinterpret_cast<unsigned char*>(p) - emulated::shared_memory) >> 4;
  d.field.layout = layout, d.field.leading = leading, d.field.stride = stride;
}
template <typename T> void increase_descriptor_offset(GmmaDescriptor& d, T bytes) { d.words[0] += bytes >> 4; }

// Values that lie together, of an operand in shared memory: of column ``at`` (MAJOR: of rows ``at``) and those behind, up
// to 8. The other index is ``line``. With MAJOR false k runs along a line, else rows (of A) or columns (of B) do.
template <typename T, int COUNT> void load(uint64_t bits, int line, int at, float* out) {
  GmmaDescriptor d;
  d.bits = bits;
  const int width = d.field.layout == 1 ? 128 : d.field.layout == 2 ? 64 : 32, swizzle = width / 16 - 1;
  size_t byte = size_t(d.field.address) << 4;
  byte += line / 8 * (size_t(d.field.stride) << 4) + line % 8 * width;  // groups of 8 lines
  byte += at * 2 / width * (size_t(d.field.leading) << 4) + at * 2 % width;
  byte ^= (byte >> 7 & swizzle) << 4;
  T values[COUNT];
  std::memcpy(values, emulated::shared_memory + byte % emulated::SHARED, sizeof values);
  for (int i = 0; i < COUNT; ++i) out[i] = values[i];
}

// c += a * b: 2 rows of a thread, and of the columns the 2 of every 8 that are its own.
template <typename T, int N, bool MAJOR> void multiply(const float (*a)[16], uint64_t desc_b, float* c, bool add) {
  const int lane = threadIdx.x % 32;
  for (int n = 0; n < N; n += 8) {
    const int column = n + lane % 4 * 2;
    float b[2][16];
    if constexpr (MAJOR) {
      for (int k = 0; k < 16; ++k) {
        float x[2];
        load<T, 2>(desc_b, k, column, x);
        b[0][k] = x[0], b[1][k] = x[1];
      }
    } else {
      for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; k += 8) load<T, 8>(desc_b, column + i, k, b[i] + k);
    }
    for (int r = 0; r < 2; ++r)
      for (int i = 0; i < 2; ++i) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[r][k] * b[i][k];
        float& x = c[n / 2 + r * 2 + i];
        x = (add ? x : 0.f) + sum;
      }
  }
}

template <DataType A, DataType, DataType, int M, int N, int K, bool MAJOR_A, bool MAJOR_B, int, int>
void wgmma_ss(uint64_t desc_a, uint64_t desc_b, uint32_t* c, bool add) {
  static_assert(M == 64 && K == 16);
  using T = std::conditional_t<A == DataType::kBFloat16, bfloat16_t, half_t>;
  issue([=] {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float a[2][16];
    for (int r = 0; r < 2; ++r)
      if constexpr (MAJOR_A) {
        for (int k = 0; k < 16; ++k) load<T, 1>(desc_a, k, row + 8 * r, a[r] + k);
      } else {
        for (int k = 0; k < 16; k += 8) load<T, 8>(desc_a, row + 8 * r, k, a[r] + k);
      }
    multiply<T, N, MAJOR_B>(a, desc_b, reinterpret_cast<float*>(c), add);
  });
}

template <DataType A, DataType, DataType, int M, int N, int K, bool MAJOR_A, bool MAJOR_B, int, int>
void wgmma_rs(const uint32_t* registers, uint64_t desc_b, uint32_t* c, bool add) {
  static_assert(M == 64 && K == 16 && !MAJOR_A);
  using T = std::conditional_t<A == DataType::kBFloat16, bfloat16_t, half_t>;
  issue([=] {
    const int lane = threadIdx.x % 32;
    float a[2][16];
    for (int r = 0; r < 2; ++r)
      for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 4; ++j) {
          const unsigned pair = emulated_exchange(registers[half * 2 + r], lane / 4 * 4 + j);
          a[r][half * 8 + j * 2] = emulated::from_bits<T>(pair & 0xffff);
          a[r][half * 8 + j * 2 + 1] = emulated::from_bits<T>(pair >> 16);
        }
    multiply<T, N, MAJOR_B>(a, desc_b, reinterpret_cast<float*>(c), add);
  });
}

}  // namespace tl
