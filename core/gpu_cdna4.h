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

// The same of E4M3 and E2M1, each element times the scale of its lane.
inline void multiply_scaled(Float16& acc, const Vector<e4m3, 32>& a, ue8m0 a_scale, const Vector<e2m1x2, 16>& b, ue8m0 b_scale, const char* file, int line) {
  static_assert(kWave == 64);
  struct alignas(8) Lane {
    Vector<e4m3, 32> a;
    Vector<e2m1x2, 16> b;
    ue8m0 a_scale, b_scale;
  };
  constexpr int kWords = sizeof(Lane) / 8;
  uint64_t mine[kWords] = {};
  const Lane my = {a, b, a_scale, b_scale};
  std::memcpy(mine, &my, sizeof my);
  const uint64_t* const all = simt::exchange(mine, kWords, GPU_PLACE);
  Lane lanes[kWave];
  std::memcpy(lanes, all, sizeof lanes);
  for (int i = 0; i < 16; ++i)
    for (int half = 0; half < 2; ++half) {
      const Lane &row = lanes[32 * half + result_row(i)], &column = lanes[32 * half + result_column()];
      for (int k = 0; k < 32; ++k) {
        const e2m1x2 pair = column.b.v[k / 2];
        acc[i] = fma(to_f32(row.a.v[k]) * to_f32(row.a_scale), (k % 2 == 0 ? low_to_f32(pair) : high_to_f32(pair)) * to_f32(column.b_scale), acc[i]);
      }
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

// K of 64, E4M3 by E2M1, a lane's 32 elements of each times a scale of theirs: the lowest byte of a_scale, byte ScaleByte of b_scales.
template <int ScaleByte>
GPU_INLINE void multiply_e4m3_e2m1(Float16& acc, const Vector<e4m3, 32>& a, uint32_t a_scale, const Vector<e2m1x2, 16>& b, uint32_t b_scales GPU_PLACE_PARAMETER) {
#if LOCKSTEP_GPU_SIMT
  multiply_scaled(acc, a, {static_cast<uint8_t>(a_scale)}, b, {static_cast<uint8_t>(b_scales >> 8 * ScaleByte)}, file, line);
#else
  typedef int Int8 __attribute__((ext_vector_type(8)));
  typedef int Int4 __attribute__((ext_vector_type(4)));
  const auto codes = __builtin_bit_cast(Int4, b);  // the instruction takes four registers of this format, whatever the builtin says
  acc = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(__builtin_bit_cast(Int8, a), __builtin_shufflevector(codes, codes, 0, 1, 2, 3, -1, -1, -1, -1), acc, 0, 4, 0,
                                                        static_cast<int>(a_scale), ScaleByte, static_cast<int>(b_scales));
#endif
}

}  // namespace lockstep::gpu::cdna4
