#include "ops/rope/rope_cpu.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lockstep {

void rope_frequencies(float* theta, int64_t rope_dim, double base, const RopeScaling& scaling) {
  CHECK(rope_dim >= 0 && rope_dim % 2 == 0, "rotary width {}", rope_dim);
  const double r = static_cast<double>(rope_dim);
  for (int64_t j = 0; j < rope_dim / 2; ++j)
    theta[j] = 1.0f / static_cast<float>(std::pow(base, 2.0 * static_cast<double>(j) / r));
  if (scaling.factor <= 1.0f) return;

  // YaRN: pairs that turn more than beta_fast times within the original context keep their frequency, those that turn less than
  // beta_slow times are slowed by the factor, pairs between are blended. c(turns) is the pair that turns that often.
  CHECK(scaling.original_positions > 0, "YaRN needs original_positions, got {}", scaling.original_positions);
  const auto c = [&](double turns) {
    return r * std::log(static_cast<double>(scaling.original_positions) / (2.0 * std::numbers::pi * turns)) /
           (2.0 * std::log(base));
  };
  const double low = std::max(std::floor(c(scaling.beta_fast)), 0.0);
  double high = std::min(std::ceil(c(scaling.beta_slow)), r - 1.0);
  if (low == high) high += 0.001;
  for (int64_t j = 0; j < rope_dim / 2; ++j) {
    const float slowed = std::clamp(static_cast<float>((static_cast<double>(j) - low) / (high - low)), 0.0f, 1.0f);
    theta[j] = theta[j] * (1.0f - slowed) + theta[j] / scaling.factor * slowed;
  }
}

void rope_table(TensorView table, double base, const RopeScaling& scaling) {
  CHECK(table.shape.rank == 2 && table.dtype == DType::f32 && table.dim(1) % 2 == 0, "rope_table: {} {}", dtype_name(table.dtype),
        table.shape.str());
  constexpr int64_t kMaxPairs = kMaxRopeDim / 2;
  const int64_t pairs = table.dim(1) / 2;
  CHECK(pairs <= kMaxPairs, "rope_table: {} pairs over {}", pairs, kMaxPairs);
  if (table.empty()) return;
  float theta[kMaxPairs];
  rope_frequencies(theta, 2 * pairs, base, scaling);
  for (int64_t p = 0; p < table.rows(); ++p) {
    float* row = table.row<float>(p);
    for (int64_t j = 0; j < pairs; ++j) {
      const float angle = static_cast<float>(p) * theta[j];
      row[2 * j] = static_cast<float>(std::cos(static_cast<double>(angle)));
      row[2 * j + 1] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
}

namespace reference {

namespace {

template <typename T>
void rotate(TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  const int64_t width = x.dim(1) / heads, rotary = table.dim(1);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float* turn = table.row<float>(pos.ptr<int32_t>()[t]);
    for (int64_t h = 0; h < heads; ++h) {
      T* channel = x.row<T>(t) + (h + 1) * width - rotary;
      for (int64_t i = 0; i < rotary; i += 2) {
        const float cos = turn[i], sin = inverse ? -turn[i + 1] : turn[i + 1];
        const float even = to_f32(channel[i]), odd = to_f32(channel[i + 1]);
        channel[i] = from_f32<T>(std::fmaf(even, cos, -(odd * sin)));
        channel[i + 1] = from_f32<T>(std::fmaf(even, sin, odd * cos));
      }
    }
  }
}

}  // namespace

void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  x.dtype == DType::f32 ? rotate<float>(x, pos, table, heads, inverse) : rotate<bf16>(x, pos, table, heads, inverse);
}

}  // namespace reference
}  // namespace lockstep
