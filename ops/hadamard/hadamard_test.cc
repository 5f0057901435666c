#include "ops/hadamard/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(Hadamard, MatchesTheMatrixInF64) {
  for (const int64_t n : {1, 2, 8, 32, 128}) {
    CpuContext c(2);
    const Tensor x = random_tensor(1, DType::f32, {50, n});
    Tensor y = random_tensor(1, DType::f32, {50, n});
    hadamard(c, y);
    for (int64_t t = 0; t < 50; ++t)
      for (int64_t a = 0; a < n; ++a) {
        double sum = 0, sizes = 0;
        for (int64_t b = 0; b < n; ++b) {
          const double v = x.get(t * n + b);
          sum += std::popcount(static_cast<uint64_t>(a & b)) % 2 == 0 ? v : -v;
          sizes += std::abs(v);
        }
        // One rounding a stage, and three of the scale: its root, its quotient, the product.
        const double norm = 1 / std::sqrt(static_cast<double>(n)), roundings = std::log2(static_cast<double>(n)) + 3;
        ASSERT_NEAR(y.get(t * n + a), sum * norm, 1.01 * roundings * 0x1p-24 * sizes * norm) << n;
      }
  }
}

TEST(Hadamard, RowsAloneAndRowsTogetherHaveTheSameBits) {
  CpuContext one(1), three(3);
  for (const DType t : {DType::f32, DType::bf16}) {
    Tensor all = random_tensor(2, t, {300, 70}), alone = random_tensor(2, t, {300, 70});
    hadamard(three, all.view().cols(0, 64));
    for (int64_t i = 299; i >= 0; --i) hadamard(one, alone.view().slice(i, 1).cols(0, 64));
    EXPECT_EQ(count_bit_differences(all, alone), 0);
    EXPECT_EQ(count_bit_differences(all.view().cols(64, 6), random_tensor(2, t, {300, 70}).view().cols(64, 6)), 0);
  }
  hadamard(one, Tensor(DType::f32, {0, 4}));
  EXPECT_DEATH(hadamard(one, Tensor(DType::f32, {2, 24})), "rows of 24, not a power of two");
}

}  // namespace
}  // namespace lockstep
