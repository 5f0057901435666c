#pragma once
// What a kernel source may say, spelled once for three compilers: nvcc (CUDA), clang -x hip (HIP), and any C++ compiler, which builds it for the host
// executor (core/simt.h). No kernel source names a vendor; what only one vendor has lives in the per-architecture files beside an op.
//
// Rules of kernel sources:
//   - kWave is 32 or 64; a tree over a row is written for explicit widths, so that both give the same bits
//   - shared memory is taken from SharedMemory and touched through Shared<T>, which the executor watches
//   - every thread reaches every barrier and wave operation: idle threads go along with nothing to do
//   - fma is written gpu::fma; nothing else is contracted (-ffp-contract=off, -fmad=false)
//
// Source: GPU spec 1.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/context.h"

#if defined(__CUDACC__)
#define LOCKSTEP_GPU_CUDA 1
#include <cuda_runtime.h>
#elif defined(__HIP__)
#define LOCKSTEP_GPU_HIP 1
#include <hip/hip_runtime.h>
#else
#define LOCKSTEP_GPU_SIMT 1
#include <cmath>
#include <tuple>

#include "core/simt.h"
#endif
#include "core/gpu_check.h"

#if LOCKSTEP_GPU_SIMT
#define GPU_KERNEL inline void
#define GPU_INLINE inline
#define GPU_BOUNDS(...)
#define GPU_PLACE_PARAMETER , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define GPU_ONLY_PLACE_PARAMETER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define GPU_PLACE ::lockstep::simt::Place{file, line}
#define GPU_FORWARD_PLACE , file, line
#else
#define GPU_KERNEL __global__ void
#define GPU_INLINE __device__ __forceinline__
#define GPU_BOUNDS(...) __launch_bounds__(__VA_ARGS__)  // threads of a block, and how many blocks should fit at least
#define GPU_PLACE_PARAMETER
#define GPU_ONLY_PLACE_PARAMETER
#define GPU_FORWARD_PLACE
#endif

namespace lockstep::gpu {

#if LOCKSTEP_GPU_CUDA
inline constexpr int kWave = 32;
#elif LOCKSTEP_GPU_HIP
inline constexpr int kWave = 64;
#else
#ifndef LOCKSTEP_SIMT_WAVE
#define LOCKSTEP_SIMT_WAVE 32
#endif
inline constexpr int kWave = LOCKSTEP_SIMT_WAVE;
static_assert(kWave == 32 || kWave == 64);
#endif

// Shared memory that a block may have without asking (and asking is the launch's business): 227 KB on Hopper, 160 KB on CDNA4.
inline constexpr size_t kSharedBytesMax = kWave == 64 ? size_t{160} << 10 : size_t{227} << 10;

// Place of the calling thread.
#if LOCKSTEP_GPU_SIMT
GPU_INLINE int thread_x() { return static_cast<int>(simt::self().thread_idx.x); }
GPU_INLINE int block_x() { return static_cast<int>(simt::self().block_idx.x); }
GPU_INLINE int block_y() { return static_cast<int>(simt::self().block_idx.y); }
GPU_INLINE int block_dim() { return static_cast<int>(simt::self().block_dim.x); }
GPU_INLINE int grid_dim() { return static_cast<int>(simt::self().grid_dim.x); }
#elif LOCKSTEP_GPU_HIP  // the headers' threadIdx calls a device library
GPU_INLINE int thread_x() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
GPU_INLINE int block_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
GPU_INLINE int block_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }
GPU_INLINE int block_dim() { return static_cast<int>(__builtin_amdgcn_workgroup_size_x()); }
GPU_INLINE int grid_dim() { return static_cast<int>(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()); }
#else
GPU_INLINE int thread_x() { return static_cast<int>(threadIdx.x); }
GPU_INLINE int block_x() { return static_cast<int>(blockIdx.x); }
GPU_INLINE int block_y() { return static_cast<int>(blockIdx.y); }
GPU_INLINE int block_dim() { return static_cast<int>(blockDim.x); }
GPU_INLINE int grid_dim() { return static_cast<int>(gridDim.x); }
#endif
// Blocks are one-dimensional.
GPU_INLINE int lane() { return thread_x() % kWave; }
GPU_INLINE int wave() { return thread_x() / kWave; }

// Barriers. sync_wave also orders the wave's shared memory.
#if LOCKSTEP_GPU_SIMT
GPU_INLINE void sync_block(GPU_ONLY_PLACE_PARAMETER) { simt::block_barrier(GPU_PLACE); }
GPU_INLINE void sync_wave(GPU_ONLY_PLACE_PARAMETER) { simt::wave_barrier(GPU_PLACE); }
#elif LOCKSTEP_GPU_CUDA
GPU_INLINE void sync_block() { __syncthreads(); }
GPU_INLINE void sync_wave() { __syncwarp(); }
#else
GPU_INLINE void sync_block() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(), __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); }
GPU_INLINE void sync_wave() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"), __builtin_amdgcn_wave_barrier(), __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"); }
#endif

// The value of lane `from` of this wave; T is 4 or 8 bytes.
template <typename T>
GPU_INLINE T shuffle(T v, int from GPU_PLACE_PARAMETER) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
#if LOCKSTEP_GPU_SIMT
  uint64_t word = 0;
  std::memcpy(&word, &v, sizeof(T));
  const uint64_t* all = simt::exchange(&word, 1, GPU_PLACE);
  std::memcpy(&v, &all[from % kWave], sizeof(T));
  return v;
#elif LOCKSTEP_GPU_CUDA
  return __shfl_sync(0xffffffffu, v, from);
#else
  return __shfl(v, from, kWave);
#endif
}
template <typename T>
GPU_INLINE T shuffle_xor(T v, int mask GPU_PLACE_PARAMETER) {
#if LOCKSTEP_GPU_SIMT
  return shuffle(v, lane() ^ mask, file, line);
#elif LOCKSTEP_GPU_CUDA
  return __shfl_xor_sync(0xffffffffu, v, mask);
#else
  return __shfl_xor(v, mask, kWave);
#endif
}
// Bit i: what lane i said.
GPU_INLINE uint64_t ballot(bool mine GPU_PLACE_PARAMETER) {
#if LOCKSTEP_GPU_SIMT
  const uint64_t word = mine ? 1 : 0;
  const uint64_t* all = simt::exchange(&word, 1, GPU_PLACE);
  uint64_t bits = 0;
  for (int i = 0; i < kWave; ++i) bits |= all[i] << i;
  return bits;
#elif LOCKSTEP_GPU_CUDA
  return __ballot_sync(0xffffffffu, mine);
#else
  return __ballot(mine);
#endif
}

// Number of bits that are set, and place of the lowest of a word that is not 0. (nvcc 13 reads std::countr_zero of a kernel as the constant 64, and countr_one likewise.)
GPU_INLINE int count_bits(uint64_t word) {
#if LOCKSTEP_GPU_CUDA
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}
GPU_INLINE int lowest_bit(uint64_t word) {
#if LOCKSTEP_GPU_CUDA
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// How many of the lowest bits are set before the first that is not.
GPU_INLINE int trailing_ones(uint64_t word) { return ~word == 0 ? 64 : lowest_bit(~word); }

// Arithmetic whose bits matter.
GPU_INLINE float fma(float a, float b, float c) {
#if LOCKSTEP_GPU_SIMT
  return std::fma(a, b, c);
#else
  return fmaf(a, b, c);
#endif
}

// x * by, which keeps the sign of a NaN x; a GPU's own product does not.
GPU_INLINE float scaled(float x, float by) { return x == x ? x * by : x; }

// Vectors of N elements lie at multiples of N * sizeof(T) bytes.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T v[N];
};

// Stores v in global memory. nvcc takes the assignment of a struct apart, and may leave a store for every element where another branch stores them singly.
template <typename T, int N>
GPU_INLINE void store_vector(T* to, const Vector<T, N>& v) {
#if LOCKSTEP_GPU_CUDA
  if constexpr (sizeof(v) >= 4) {
    using Word = std::conditional_t<sizeof(v) % 16 == 0, uint4, std::conditional_t<sizeof(v) == 8, uint2, unsigned>>;
    struct Words {
      Word v[sizeof(Vector<T, N>) / sizeof(Word)];
    };
    const auto words = std::bit_cast<Words>(v);
#pragma unroll
    for (size_t i = 0; i < sizeof(v) / sizeof(Word); ++i) __stwb(reinterpret_cast<Word*>(to) + i, words.v[i]);
    return;
  }
#endif
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

// A piece of the block's shared memory.

template <typename T>
class Shared {
 public:
  GPU_INLINE explicit Shared(T* p) : p_(p) {}
  GPU_INLINE T load(int i GPU_PLACE_PARAMETER) const { return load_vector<1>(i GPU_FORWARD_PLACE).v[0]; }
  GPU_INLINE void store(int i, T v GPU_PLACE_PARAMETER) const { store_vector<1>(i, {{v}} GPU_FORWARD_PLACE); }
  template <int N>
  GPU_INLINE Vector<T, N> load_vector(int i GPU_PLACE_PARAMETER) const {
#if LOCKSTEP_GPU_SIMT
    simt::shared_read(p_ + i, sizeof(Vector<T, N>), GPU_PLACE);
#endif
    return *reinterpret_cast<const Vector<T, N>*>(p_ + i);
  }
  template <int N>
  GPU_INLINE void store_vector(int i, Vector<T, N> v GPU_PLACE_PARAMETER) const {
#if LOCKSTEP_GPU_SIMT
    simt::shared_write(p_ + i, sizeof(Vector<T, N>), GPU_PLACE);
#endif
    *reinterpret_cast<Vector<T, N>*>(p_ + i) = v;
  }
  GPU_INLINE Shared from(int i) const { return Shared(p_ + i); }
  GPU_INLINE T* data() const { return p_; }  // for instructions that take addresses

 private:
  T* p_;
};

// Adds to a word of shared memory, which any threads may do at once; what lay there before.
GPU_INLINE uint32_t atomic_add(Shared<uint32_t> to, int i, uint32_t v GPU_PLACE_PARAMETER) {
#if LOCKSTEP_GPU_SIMT
  simt::shared_atomic(to.data() + i, sizeof(uint32_t), GPU_PLACE);
  const uint32_t before = to.data()[i];
  to.data()[i] = before + v;
  return before;
#elif LOCKSTEP_GPU_CUDA
  return atomicAdd(to.data() + i, v);
#else
  return __hip_atomic_fetch_add(to.data() + i, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#endif
}

// Hands out the launch's shared memory, in the same order in every thread. Its base lies at a multiple of 128 bytes. Offsets from it, not addresses, are
// rounded: a pointer that was an integer would be of any memory to the compilers, whose accesses to that are slower.
class SharedMemory {
 public:
  template <typename T>
  GPU_INLINE Shared<T> take(int n, int align = 16) {
    at_ = (at_ + static_cast<size_t>(align) - 1) / static_cast<size_t>(align) * static_cast<size_t>(align);
    T* const p = reinterpret_cast<T*>(base() + at_);
    at_ += static_cast<size_t>(n) * sizeof(T);
    return Shared<T>(p);
  }

 private:
  GPU_INLINE static char* base() {
#if LOCKSTEP_GPU_SIMT
    return simt::shared_base();
#else
    extern __shared__ __align__(128) char lockstep_shared[];
    return lockstep_shared;
#endif
  }
  size_t at_ = 0;
};

// 16 bytes from global to shared memory in the background: commit closes a group, wait leaves at most the newest `Groups` open. A block barrier
// must follow the wait before other threads read.
#if LOCKSTEP_GPU_SIMT
template <typename T>
GPU_INLINE void copy_async(Shared<T> to, int i, const T* from GPU_PLACE_PARAMETER) {
  simt::copy_async(to.data() + i, from, 16, GPU_PLACE);
}
GPU_INLINE void copy_commit() { simt::copy_commit(); }
template <int Groups>
GPU_INLINE void copy_wait(GPU_ONLY_PLACE_PARAMETER) {
  simt::copy_wait(Groups, GPU_PLACE);
}
#elif LOCKSTEP_GPU_CUDA
template <typename T>
GPU_INLINE void copy_async(Shared<T> to, int i, const T* from) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to.data() + i));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
GPU_INLINE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Groups>
GPU_INLINE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}
#else
// CDNA's direct loads place a wave's data lane after lane, which not every tile wants; here the copy is a plain load and store.
template <typename T>
GPU_INLINE void copy_async(Shared<T> to, int i, const T* from) {
  to.template store_vector<16 / sizeof(T)>(i, *reinterpret_cast<const Vector<T, 16 / sizeof(T)>*>(from));
}
GPU_INLINE void copy_commit() {}
template <int Groups>
GPU_INLINE void copy_wait() {}
#endif

// Blocks and threads of a launch. Blocks are one-dimensional, grids one- or two-dimensional; without blocks nothing is launched.
struct Grid {
  int64_t blocks = 0;
  int threads = 256;
  int64_t blocks_y = 1;
  size_t shared_bytes = 0;
};

// Enqueues a kernel on the context's stream (the executor runs it at once, but while a graph is captured).
template <typename... Parameters, typename... Arguments>
void launch(Context& c, const char* name, const Grid& grid, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (grid.blocks == 0 || grid.blocks_y == 0) return;
  GPU_CHECK(grid.shared_bytes <= kSharedBytesMax, "%s: %zu bytes of shared memory, a block has %zu", name, grid.shared_bytes, kSharedBytesMax);
#if LOCKSTEP_GPU_SIMT
  simt::enqueue(c.stream, [name, grid, kernel, values = std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)] {
    const simt::DeviceAccess access;
    simt::run({.kernel = name,
               .grid = {static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.blocks_y)},
               .block = {static_cast<unsigned>(grid.threads)},
               .shared_bytes = grid.shared_bytes,
               .wave = kWave},
              simt::Body([&] { std::apply(kernel, values); }));
  });
#else
  const dim3 blocks(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.blocks_y));
#if LOCKSTEP_GPU_CUDA
  if (grid.shared_bytes > (size_t{48} << 10)) {
    const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
    GPU_CHECK(allowed == cudaSuccess, "%s with %zu bytes of shared memory: %s", name, grid.shared_bytes, cudaGetErrorString(allowed));
  }
  kernel<<<blocks, grid.threads, grid.shared_bytes, static_cast<cudaStream_t>(c.stream)>>>(static_cast<Parameters>(arguments)...);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "%s: %s", name, cudaGetErrorString(e));
#else
  if (grid.shared_bytes > (size_t{64} << 10)) {
    const hipError_t allowed =
        hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), hipFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
    GPU_CHECK(allowed == hipSuccess, "%s with %zu bytes of shared memory: %s", name, grid.shared_bytes, hipGetErrorString(allowed));
  }
  kernel<<<blocks, grid.threads, grid.shared_bytes, static_cast<hipStream_t>(c.stream)>>>(static_cast<Parameters>(arguments)...);
  const hipError_t e = hipGetLastError();
  GPU_CHECK(e == hipSuccess, "%s: %s", name, hipGetErrorString(e));
#endif
#endif
}
constexpr int64_t blocks_for(int64_t items, int64_t a_block) { return (items + a_block - 1) / a_block; }

}  // namespace lockstep::gpu
