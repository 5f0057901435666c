#pragma once
// What the Hopper attention kernels share: tiles of 64 rows in shared memory, the warpgroup that gathers them, and the matrix instructions that read them.

#include "core/device.h"
#include "core/gpu_sm90.h"
#include "ops/attention/attention_gpu.h"

namespace lockstep::gpu::sm90_attention {

constexpr int kRows = 64;           // of a tile: heads, or rows of the list
constexpr int kChunk = kRows * 64;  // elements of 64 channels of a tile; its rows are 128 bytes, swizzled
constexpr int kThreads = 384, kFeeders = 128, kConsumerWarps = 8;

inline int multiprocessors() {
  static const int n = device_info().multiprocessors;
  return n;
}

// What a row beyond a list's or the heads' end is copied from.
__device__ const uint4 kZeros[512 * sizeof(bf16) / sizeof(uint4)] = {};
GPU_INLINE const bf16* zeros() { return reinterpret_cast<const bf16*>(kZeros); }

GPU_INLINE void copy_16_bytes(unsigned to, const bf16* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
// The thread's copies so far count as one of the barrier's arrivals, once they are done.
GPU_INLINE void arrive_when_copied(sm90::Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sm90::shared_address(&barrier)) : "memory");
}

// The rows of a tile of `Rows` that a feeding thread copies: 8 threads a row, 16 rows at once, each 16 of the 128 bytes of a chunk.
template <int Rows = kRows>
struct Sources {
  const bf16* at[Rows / 16];
  // The row whose source this lane finds for its warp; more lanes than rows do the same work.
  GPU_INLINE static int mine() { return static_cast<int>(threadIdx.x) / 32 * 4 + static_cast<int>(threadIdx.x) % 4 + static_cast<int>(threadIdx.x) % 16 / 4 * 16; }
  GPU_INLINE explicit Sources(const bf16* of_mine) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i)
      at[i] = reinterpret_cast<const bf16*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(of_mine), i * 4 + lane / 8)) + lane % 8 * 8;
  }
  // Chunks [first, first + Count) of the rows into those of the tile.
  template <int Count>
  GPU_INLINE void copy(bf16* tile, int first) const {
    const int group = static_cast<int>(threadIdx.x) / 8, unit = static_cast<int>(threadIdx.x) % 8;
    const unsigned to = sm90::shared_address(tile + first * (Rows * 64) + group * 64 + (unit ^ group % 8) * 8);
#pragma unroll
    for (int chunk = 0; chunk < Count; ++chunk)
#pragma unroll
      for (int i = 0; i < Rows / 16; ++i) copy_16_bytes(to + chunk * (Rows * 128) + i * (16 * 128), at[i] + (first + chunk) * 64);
  }
};

// Operands made of a tile, from step k of 16 on. Along: K is the channels of a chunk. Across: K is the tile's rows; N (or M) are the channels, chunk after chunk.
GPU_INLINE unsigned long long along_channels(const bf16* chunk, int k) { return sm90::operand_along_k(chunk, 32u * static_cast<unsigned>(k)); }
GPU_INLINE unsigned long long across_channels(const bf16* chunk, int k) { return sm90::operand_across_k(chunk, 2048u * static_cast<unsigned>(k), kChunk * 2); }

}  // namespace lockstep::gpu::sm90_attention
