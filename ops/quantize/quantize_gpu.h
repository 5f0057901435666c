#pragma once
// For kernels that write what an E4M3 product reads next (kFp8Activation): a block of 128 columns is the work of sixteen neighbouring threads of a wave, a piece
// each. Codes and scales are those of quantize().

#include "core/gpu_formats.h"
#include "ops/elements_gpu.h"
#include "ops/quantize/quantize.h"

namespace lockstep::gpu {

inline constexpr int kCodeLanes = 16;
inline constexpr int64_t kCodeBlock = kPiece * kCodeLanes;

// This thread's codes, and the block's scale. All sixteen threads call it; values past the end of a row are zero.
struct BlockCodes {
  Elements<uint8_t> codes;
  float scale;
};
GPU_INLINE BlockCodes quantize_block(const float (&v)[2][kPiece / 2]) {
  const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  uint32_t amax = std::bit_cast<uint32_t>(kFp8Activation.amax_floor);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(v[i / 4][i % 4]) & kF32Magnitude;
    if (magnitude < kF32Infinity) amax = larger(amax, magnitude);
  }
#pragma unroll
  for (int d = kCodeLanes / 2; d >= 1; d /= 2) amax = larger(amax, shuffle_xor(amax, d));
  const float scale = to_f32(ue8m0_scale<e4m3>(std::bit_cast<float>(amax))), inverse = 1.0f / scale;  // powers of two
  return {std::bit_cast<Elements<uint8_t>>(Vector<uint32_t, 2>{{encode_four<e4m3>(v[0], inverse), encode_four<e4m3>(v[1], inverse)}}), scale};
}

}  // namespace lockstep::gpu
