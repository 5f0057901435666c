#pragma once
// CDNA4's matrix products under names: of one wave of 64 lanes, 32 x 32 results in f32. Under the executor the lanes hand each other their operands and each
// computes its elements as one fma chain, K ascending from what the accumulator holds; the hardware's own rounding inside an instruction may differ from that.
//
// Lane l holds row l % 32 of A (and of B, which is transposed: a row is a column of the product), of K the slice l / 32 of two, contiguous. Of the result it holds
// column l % 32, element i being row 8 (i / 4) + 4 (l / 32) + i % 4.
// Source: GPU spec 4.3; CDNA4 ISA, chapter on matrix instructions.

#include "core/dtype.h"
#include "core/gpu.h"
#if LOCKSTEP_GPU_SIMT
#include "core/formats.h"
#endif

namespace lockstep::gpu::cdna4 {

typedef float Float16 __attribute__((vector_size(64)));

GPU_INLINE int result_row(int i) { return 8 * (i / 4) + 4 * (lane() / 32) + i % 4; }
GPU_INLINE int result_column() { return lane() % 32; }

#if LOCKSTEP_GPU_SIMT
// acc += A [32, 2 * kEach] . B [32, 2 * kEach]^T of elements T.
template <typename T, int kEach>
void multiply(Float16& acc, const Vector<T, kEach>& a, const Vector<T, kEach>& b, const char* file, int line) {
  static_assert(kWave == 64);
  constexpr int kWords = kEach * sizeof(T) / 8;
  uint64_t mine[2 * kWords];
  std::memcpy(mine, &a, sizeof a);
  std::memcpy(mine + kWords, &b, sizeof b);
  const uint64_t* const all = simt::exchange(mine, 2 * kWords, GPU_PLACE);
  const auto slice = [&](int row, int half, int operand) { return reinterpret_cast<const T*>(all + (32 * half + row) * 2 * kWords + operand * kWords); };
  float column[2 * kEach];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < kEach; ++k) column[half * kEach + k] = to_f32(slice(result_column(), half, 1)[k]);
  for (int i = 0; i < 16; ++i) {
    float sum = acc[i];
    for (int half = 0; half < 2; ++half) {
      const T* const row = slice(result_row(i), half, 0);
      for (int k = 0; k < kEach; ++k) sum = fma(to_f32(row[k]), column[half * kEach + k], sum);
    }
    acc[i] = sum;
  }
}
#endif

// K of 16, bf16.
GPU_INLINE void multiply_bf16(Float16& acc, const Vector<bf16, 8>& a, const Vector<bf16, 8>& b GPU_PLACE_PARAMETER) {
#if LOCKSTEP_GPU_SIMT
  multiply(acc, a, b, file, line);
#else
  typedef __bf16 Bf16x8 __attribute__((ext_vector_type(8)));
  acc = __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(Bf16x8, a), __builtin_bit_cast(Bf16x8, b), acc, 0, 0, 0);
#endif
}
// K of 64, E4M3: the scaled instruction with scales of one.
GPU_INLINE void multiply_e4m3(Float16& acc, const Vector<e4m3, 32>& a, const Vector<e4m3, 32>& b GPU_PLACE_PARAMETER) {
#if LOCKSTEP_GPU_SIMT
  multiply(acc, a, b, file, line);
#else
  typedef int Int8 __attribute__((ext_vector_type(8)));
  acc = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(__builtin_bit_cast(Int8, a), __builtin_bit_cast(Int8, b), acc, 0, 0, 0, 0x7f7f7f7f, 0, 0x7f7f7f7f);
#endif
}

}  // namespace lockstep::gpu::cdna4
