// exp, log and friends: every vector width gives the scalar's bits, and the scalar is within its stated error of libm in f64.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/fixed_math_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

void EvaluateAll(const float* x, int64_t n, float* exp_out, float* log_out, float* sigmoid_out, float* softplus_out,
                 bf16* rounded, float* sum) {
  const F32Tag d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(kF32Lanes)) {
    const auto v = hn::LoadU(d, x + i);
    hn::StoreU(ExpF32(d, v), d, exp_out + i);
    hn::StoreU(LogF32(d, v), d, log_out + i);
    hn::StoreU(SigmoidF32(d, v), d, sigmoid_out + i);
    hn::StoreU(SoftplusF32(d, v), d, softplus_out + i);
    StoreF32(d, v, rounded + i);
  }
  *sum = TreeSumSquares(x + 3, 1000 + 7);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ops/testing.h"

namespace lockstep {
HWY_EXPORT(EvaluateAll);

namespace {

// All special values, then a stride through every bit pattern.
std::vector<float> inputs() {
  std::vector<float> x = {0.0f, -0.0f, 1.0f, -1.0f, 20.0f, 20.000002f, 88.72283f, 88.72284f, -87.33654f, -87.33655f, 1e-38f, 1e-40f,
                          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()};
  for (uint64_t u = 0; u < (uint64_t{1} << 32); u += 65521) x.push_back(std::bit_cast<float>(static_cast<uint32_t>(u)));
  Philox rng(7, RngPurpose::test);
  while (x.size() % 16 != 0 || x.size() < 200000) x.push_back((rng.uniform() - 0.5f) * 180.0f);
  return x;
}

bool same_bits(float a, float b) { return (a != a && b != b) || std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

TEST(FixedMath, VectorsGiveTheScalarsBits) {
  const std::vector<float> x = inputs();
  const size_t n = x.size();
  std::vector<float> e(n), l(n), s(n), p(n);
  std::vector<bf16> r(n);
  std::vector<float> row(1010);
  for (size_t i = 0; i < row.size(); ++i) row[i] = 0.001f * static_cast<float>(i) - 0.4f;
  testing::for_each_simd_target([&](const std::string& target) {
    float sum = 0;
    HWY_DYNAMIC_DISPATCH(EvaluateAll)(x.data(), static_cast<int64_t>(n), e.data(), l.data(), s.data(), p.data(), r.data(), &sum);
    int64_t different = 0;
    for (size_t i = 0; i < n; ++i) {
      different += !same_bits(e[i], exp_f32(x[i])) + !same_bits(l[i], log_f32(x[i])) + !same_bits(s[i], sigmoid_f32(x[i])) +
                   !same_bits(p[i], softplus_f32(x[i])) + (r[i].bits != to_bf16(x[i]).bits);
    }
    EXPECT_EQ(different, 0) << target;
    HWY_DYNAMIC_DISPATCH(EvaluateAll)(row.data(), 16, e.data(), l.data(), s.data(), p.data(), r.data(), &sum);
    const float want = tree_dot(1007, [&](int64_t i) { return row[i + 3]; }, [&](int64_t i) { return row[i + 3]; });
    EXPECT_TRUE(same_bits(sum, want)) << target;
  });
}

TEST(FixedMath, ScalarsAreWithinTwoUlpOfLibm) {
  double exp_ulp = 0, log_ulp = 0, softplus_relative = 0;
  Philox rng(3, RngPurpose::test);
  for (int i = 0; i < 400000; ++i) {
    const float x = (rng.uniform() - 0.5f) * 170.0f;
    const double want = std::exp(static_cast<double>(x));
    exp_ulp = std::max(exp_ulp, std::abs(exp_f32(x) - want) / (want * 0x1p-23));
    const float y = std::bit_cast<float>(0x00800000u + rng.below(0x7f000000u));
    const double log_want = std::log(static_cast<double>(y));
    log_ulp = std::max(log_ulp, std::abs(log_f32(y) - log_want) / std::max(std::abs(log_want) * 0x1p-23, 0x1p-30));
    const double soft = std::log1p(std::exp(static_cast<double>(x)));
    if (soft > 1e-30) softplus_relative = std::max(softplus_relative, std::abs(softplus_f32(x) - soft) / soft);
  }
  EXPECT_LT(exp_ulp, 2.0);
  EXPECT_LT(log_ulp, 2.0);
  EXPECT_LT(softplus_relative, 6 * 0x1p-23);
}

TEST(FixedMath, SpecVectors) {
  EXPECT_NEAR(sqrtsoftplus_f32(-10.0f), 0.00673787, 1e-8);
  EXPECT_NEAR(sqrtsoftplus_f32(-1.0f), 0.55969785, 1e-7);
  EXPECT_NEAR(sqrtsoftplus_f32(0.0f), 0.83255461, 1e-7);
  EXPECT_NEAR(sqrtsoftplus_f32(1.0f), 1.14597630, 2e-7);
  EXPECT_NEAR(sqrtsoftplus_f32(5.0f), 2.23756907, 4e-7);
  EXPECT_EQ(sqrtsoftplus_f32(25.0f), 5.0f);
}

}  // namespace
}  // namespace lockstep
#endif  // HWY_ONCE
