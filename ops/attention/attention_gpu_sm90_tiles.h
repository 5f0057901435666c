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

// 16 bytes in the background; zeros for a null source.
GPU_INLINE void copy_or_zero(void* to, const bf16* from, const bf16* somewhere) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(sm90::shared_address(to)), "l"(from == nullptr ? somewhere : from), "r"(from == nullptr ? 0 : 16)
               : "memory");
}
// The thread's copies so far count as one of the barrier's arrivals, once they are done.
GPU_INLINE void arrive_when_copied(sm90::Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sm90::shared_address(&barrier)) : "memory");
}

// A warp's share of `Channels` of a tile of `Rows`: rows warp, warp + 4, ...; lane i holds the source of the i-th (null: zeros).
template <int Channels, int Rows = kRows>
GPU_INLINE void copy_rows(bf16* tile, const bf16* source, const bf16* somewhere, int warp, int lane) {
#pragma unroll 4
  for (int i = 0; i < Rows / 4; ++i) {
    const auto from = reinterpret_cast<const bf16*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(source), i));
    const int row = warp + 4 * i;
#pragma unroll
    for (int unit = lane; unit < Channels / 8; unit += 32)
      copy_or_zero(tile + unit / 8 * (Rows * 64) + row * 64 + (unit % 8 ^ row % 8) * 8, from == nullptr ? nullptr : from + unit * 8, somewhere);
  }
}

// Operands made of a tile, from step k of 16 on. Along: K is the channels of a chunk. Across: K is the tile's rows; N (or M) are the channels, chunk after chunk.
GPU_INLINE unsigned long long along_channels(const bf16* chunk, int k) { return sm90::operand_along_k(chunk, 32u * static_cast<unsigned>(k)); }
GPU_INLINE unsigned long long across_channels(const bf16* chunk, int k) { return sm90::operand_across_k(chunk, 2048u * static_cast<unsigned>(k), kChunk * 2); }

}  // namespace lockstep::gpu::sm90_attention
