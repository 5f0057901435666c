#include "ops/quantize/quantize_cpu.h"

#include <cmath>

namespace lockstep::reference {

namespace {

float element(const ConstTensorView& x, int64_t r, int64_t k) {
  return x.dtype == DType::f32 ? x.row<float>(r)[k] : to_f32(x.row<bf16>(r)[k]);
}

// Writes code k of a row; an even nibble also clears its neighbour, which comes next or does not exist.
template <typename T>
void put_code(const QuantView& q, int64_t r, int64_t k, uint8_t code) {
  if constexpr (std::is_same_v<T, e2m1x2>) {
    e2m1x2& pair = q.codes.row<e2m1x2>(r)[k / 2];
    pair.bits = static_cast<uint8_t>(k % 2 == 0 ? code : pair.bits | (code << 4));
  } else {
    q.codes.row<T>(r)[k].bits = code;
  }
}
uint8_t nibble(const ConstQuantView& q, int64_t r, int64_t k) {
  return static_cast<uint8_t>(q.codes.row<e2m1x2>(r)[k / 2].bits >> (k % 2 * 4) & 15);
}

template <typename T>
QuantStats quantize_block_to(const QuantView& q, const ConstTensorView& x, float amax_floor, bool given_scales, int64_t i, int64_t j) {
  const BlockRange b = block_range(q, i, j, x.rows(), x.dim(1));
  float amax = 0;
  bool has_nan = false;
  for (int64_t r = b.row0; r < b.row1; ++r)
    for (int64_t k = b.col0; k < b.col1; ++k) {
      const float v = element(x, r, k);
      has_nan |= std::isnan(v);
      if (std::isfinite(v)) amax = std::max(amax, std::abs(v));
    }
  const float scale = given_scales ? q.scale(i, j) : store_scale<T>(q, i, j, amax, amax_floor);
  const float inverse = 1.0f / scale;

  QuantStats stats;
  for (int64_t r = b.row0; r < b.row1; ++r)
    for (int64_t k = b.col0; k < b.col1; ++k) {
      const float v = element(x, r, k);
      const uint8_t code = encode<T>(v * inverse);
      put_code<T>(q, r, k, code);
      stats += quant_stats_of<T>(v, scale, code);
    }
  if (std::is_same_v<T, e2m1x2> && has_nan && !given_scales) {
    if (q.scales.dtype == DType::f32) q.scales.row<float>(i)[j] = std::bit_cast<float>(kF32Nan);
    else q.scales.row<ue8m0>(i)[j] = kUe8m0Nan;
  }
  return stats;
}

template <typename T>
QuantStats count(const ConstQuantView& q, const ConstTensorView& x) {
  QuantStats stats;
  for (int64_t r = 0; r < x.rows(); ++r)
    for (int64_t k = 0; k < x.dim(1); ++k) {
      uint32_t code = 0;
      if constexpr (std::is_same_v<T, e2m1x2>) code = nibble(q, r, k);
      else code = q.codes.row<T>(r)[k].bits;
      stats += quant_stats_of<T>(element(x, r, k), q.scale(r / q.block_rows, k / q.block_cols), code);
    }
  return stats;
}

}  // namespace

QuantStats quant_stats(ConstQuantView q, ConstTensorView x) {
  if (q.codes.dtype == DType::e4m3) return count<e4m3>(q, x);
  if (q.codes.dtype == DType::e5m2) return count<e5m2>(q, x);
  return count<e2m1x2>(q, x);
}

QuantStats quantize_block(QuantView q, ConstTensorView x, float amax_floor, bool given_scales, int64_t i, int64_t j) {
  if (q.codes.dtype == DType::e4m3) return quantize_block_to<e4m3>(q, x, amax_floor, given_scales, i, j);
  if (q.codes.dtype == DType::e5m2) return quantize_block_to<e5m2>(q, x, amax_floor, given_scales, i, j);
  return quantize_block_to<e2m1x2>(q, x, amax_floor, given_scales, i, j);
}

QuantStats quantize(QuantView q, ConstTensorView x, float amax_floor, bool given_scales) {
  QuantStats stats;
  for (int64_t i = 0; i < q.scales.rows(); ++i)
    for (int64_t j = 0; j < q.scales.dim(1); ++j) stats += quantize_block(q, x, amax_floor, given_scales, i, j);
  return stats;
}

void dequantize(TensorView y, ConstQuantView q) {
  for (int64_t r = 0; r < y.rows(); ++r)
    for (int64_t k = 0; k < y.dim(1); ++k) {
      float value = 0;
      if (q.codes.dtype == DType::e4m3) value = to_f32(q.codes.row<e4m3>(r)[k]);
      else if (q.codes.dtype == DType::e5m2) value = to_f32(q.codes.row<e5m2>(r)[k]);
      else value = decode<e2m1x2>(nibble(q, r, k));
      value *= q.scale(r / q.block_rows, k / q.block_cols);
      if (std::isnan(value)) value = std::bit_cast<float>(kF32Nan);
      if (y.dtype == DType::f32) y.row<float>(r)[k] = value;
      else y.row<bf16>(r)[k] = to_bf16(value);
    }
}

RecodeStats recode_block(QuantView to, TensorView lossy, ConstQuantView from, int64_t i, int64_t j) {
  const BlockRange b = block_range(to, i, j, from.rows(), from.code_cols());
  const auto sub_scale = [&](int64_t r, int64_t k) { return from.scales.row<ue8m0>(r)[k / from.block_cols]; };
  // Exponents as UE8M0 bytes. `tight`: v <= kMax * 2^t, by exponents alone since no E2M1 mantissa is over kMax's 1.75; code m of
  // magnitude 1..7 has the exponent (m >> 1) - 1, kMax has 8.
  int largest = 0, tight = 0;
  for (int64_t r = b.row0; r < b.row1; ++r)
    for (int64_t k = b.col0; k < b.col1; ++k) {
      const int s = sub_scale(r, k).bits, magnitude = nibble(from, r, k) & 7;
      if (s == kUe8m0Nan.bits) continue;
      largest = std::max(largest, s);
      if (magnitude != 0) tight = std::max(tight, s + (magnitude >> 1) - 9);
    }
  RecodeStats stats;
  // Codes under the scale byte t; returns how many are inexact.
  const auto write = [&](int t) {
    int64_t inexact = 0;
    stats.nonfinite = 0;
    for (int64_t r = b.row0; r < b.row1; ++r)
      for (int64_t k = b.col0; k < b.col1; ++k) {
        e4m3& code = to.codes.row<e4m3>(r)[k];
        const ue8m0 s = sub_scale(r, k);
        if (s.bits == kUe8m0Nan.bits) {
          code.bits = static_cast<uint8_t>(FloatFormat<e4m3>::kNanCode);
          ++stats.nonfinite;
          continue;
        }
        // 2^-100 of anything is as inexact as less would be, without becoming zero in f32; 2^100 can only multiply zeros.
        const float v = std::ldexp(decode<e2m1x2>(nibble(from, r, k)), std::clamp(s.bits - t, -100, 100));
        code = to_e4m3(v);
        inexact += to_f32(code) != v;
      }
    return inexact;
  };
  int scale = std::max(largest - 6, 0);
  stats.blocks = 1;
  stats.inexact = write(scale);
  if (stats.inexact != 0) stats.inexact = write(scale = tight);
  stats.lossy_blocks = stats.inexact != 0;
  const ue8m0 stored{static_cast<uint8_t>(scale)};
  if (to.scales.dtype == DType::f32) to.scales.row<float>(i)[j] = to_f32(stored);
  else to.scales.row<ue8m0>(i)[j] = stored;
  if (lossy.data != nullptr) lossy.row<uint8_t>(i)[j] = stats.lossy_blocks != 0;
  return stats;
}

RecodeStats recode_fp4(QuantView to, TensorView lossy, ConstQuantView from) {
  RecodeStats stats;
  for (int64_t i = 0; i < to.scales.rows(); ++i)
    for (int64_t j = 0; j < to.scales.dim(1); ++j) stats += recode_block(to, lossy, from, i, j);
  return stats;
}

}  // namespace lockstep::reference
