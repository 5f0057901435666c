#pragma once
// Internal to ops/quantize: the implementations, without argument checks. Same bits. device: on the GPU, quantize_gpu.cu, also for what products make of their inputs.

#include <algorithm>

#include "ops/quantize/quantize.h"

namespace lockstep {

// The part of a matrix [rows, cols] that block (i, j) covers.
struct BlockRange {
  int64_t row0, row1, col0, col1;
};
template <typename Void>
BlockRange block_range(const BasicQuantView<Void>& q, int64_t i, int64_t j, int64_t rows, int64_t cols) {
  return {i * q.block_rows, std::min(rows, (i + 1) * q.block_rows), j * q.block_cols, std::min(cols, (j + 1) * q.block_cols)};
}

// What x counts as, given its block's scale (NaN: of an E2M1 block with a NaN, where none overflows) and its code.
template <typename T>
constexpr QuantStats quant_stats_of(float x, float scale, uint32_t code) {
  constexpr uint32_t kMagnitude = (1u << FloatFormat<T>::kSignShift) - 1u;
  QuantStats s;
  s.elements = 1;
  const uint32_t bits = std::bit_cast<uint32_t>(x) & kF32Magnitude, scaled = std::bit_cast<uint32_t>(x * (1.0f / scale)) & kF32Magnitude;
  if (bits >= kF32Infinity) s.nonfinite = 1;
  else if (scaled <= kF32Infinity && unbounded_code<T>(scaled) > FloatFormat<T>::kMaxCode) s.saturated = 1;
  else if (bits != 0 && (code & kMagnitude) == 0) s.underflowed = 1;
  return s;
}

// Stores the scale that `amax`, the largest finite magnitude of a block, asks for; returns it. T is the type of the codes.
template <typename T>
float store_scale(const QuantView& q, int64_t i, int64_t j, float amax, float amax_floor) {
  const float a = std::max(std::max(amax, amax_floor), FloatFormat<T>::kMax * 0x1p-126f);
  if (q.scales.dtype == DType::f32) return q.scales.row<float>(i)[j] = f32_scale<T>(a);
  return to_f32(q.scales.row<ue8m0>(i)[j] = ue8m0_scale<T>(a));
}

namespace reference {
QuantStats quantize(QuantView q, ConstTensorView x, float amax_floor, bool given_scales);
QuantStats quantize_block(QuantView q, ConstTensorView x, float amax_floor, bool given_scales, int64_t i, int64_t j);
void dequantize(TensorView y, ConstQuantView q);
RecodeStats recode_fp4(QuantView to, TensorView lossy, ConstQuantView from);
QuantStats quant_stats(ConstQuantView q, ConstTensorView x);
RecodeStats recode_block(QuantView to, TensorView lossy, ConstQuantView from, int64_t i, int64_t j);
}  // namespace reference

namespace simd {
// A tile is up to so many blocks of one row of blocks: as wide as can be, since rows are then read in long runs. Narrow tiles of rows a
// power of two apart share few cache sets. Between the search for its largest magnitudes and its encoding a tile waits in the outer cache.
constexpr int64_t kTileBlocksMax = 64;
// How far ahead of the search memory is asked for, in bytes: the hardware's own prefetchers stop at each page. Measured on
// bf16, one thread, 1e9 numbers a second: 7.4 without, 10.1 with 8 KiB, 8.0 with 64 KiB.
constexpr uintptr_t kFetchAhead = 8192;

struct QuantizeRun {
  float amax_floor;
  bool given_scales;
  int64_t tile_blocks;
};

QuantStats quantize(Context& c, QuantView q, ConstTensorView x, float amax_floor, bool given_scales);
void dequantize(Context& c, TensorView y, ConstQuantView q);
RecodeStats recode_fp4(Context& c, QuantView to, TensorView lossy, ConstQuantView from);
}  // namespace simd

// Where scales come from: the block's largest magnitude, as the header says for their type; the same as a power of two whatever their type; or they are there.
enum class ScaleRule { of_format, power_of_two, given };

namespace device {
// row_of [rows of q] i32, for blocks of one row: row r is x[row_of[r]]. Empty: x[r].
void quantize(Context& c, QuantView q, ConstTensorView x, ScaleRule rule, float amax_floor, ConstTensorView row_of = {});
QuantStats quant_stats(Context& c, ConstQuantView q, ConstTensorView x);
void dequantize(Context& c, TensorView y, ConstQuantView q);
void recode_fp4(Context& c, QuantView to, TensorView lossy, ConstQuantView from);
}  // namespace device

}  // namespace lockstep
