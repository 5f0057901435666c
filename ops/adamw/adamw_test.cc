#include "ops/adamw/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/adamw/adamw_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;
using testing::random_tensor;

constexpr size_t kSmallWorkspace = 1 << 20;
constexpr double kUnit = 0x1p-24;  // half an ulp, relative

struct State {
  Tensor w, m, v, grad;
  explicit State(int64_t n)
      : w(random_tensor(1, DType::f32, {n}, 2.0f)), m(random_tensor(2, DType::f32, {n}, 0.1f)), v(DType::f32, {n}),
        grad(random_tensor(3, DType::f32, {n}, 3.0f)) {
    for (int64_t i = 0; i < n; ++i) v.set(i, std::abs(m.get(i)) * 0.3);
  }
};

AdamWStep example_step() {
  AdamWStep s;
  s.lr = 3e-3f;
  s.beta1 = 0.9f;
  s.beta2 = 0.98f;
  s.eps = 1e-8f;
  s.weight_decay = 0.1f;
  s.bias1 = 1.0f - 0.9f * 0.9f;
  s.bias2 = 1.0f - 0.98f * 0.98f;
  s.grad_scale = 0.37f;
  return s;
}

// Against the formula of the paper in f64, with the f32 constants as given. Half-ulp counts of the operations on each path:
//   m: three roundings on a term (g, 1 - b, product), one for the sum: 4 of |b1 m| + |(1 - b1) g|.
//   v: five of its sum (g twice by squaring, square, product, 1 - b, sum): 6 of v, whose terms are positive.
//   update: m's error carried through, plus v's 6 and a division halved by the root (4), root, eps, two divisions, product: 9.
//   w: two subtractions and the product: 3 of |w|, plus the update's.
TEST(AdamW, MatchesTheFormulaInF64) {
  for (const int64_t n : {0, 1, 17, 4096, 9001}) {
    CpuContext c(2, kSmallWorkspace);
    const State before(n);
    State s(n);
    const AdamWStep p = example_step();
    adamw(c, s.w, s.m, s.v, s.grad, p);
    for (int64_t i = 0; i < n; ++i) {
      const double g = double(before.grad.get(i)) * p.grad_scale;
      const double m = p.beta1 * double(before.m.get(i)) + (1.0 - p.beta1) * g;
      const double v = p.beta2 * double(before.v.get(i)) + (1.0 - p.beta2) * g * g;
      const double denominator = std::sqrt(v / p.bias2) + p.eps;
      const double w = before.w.get(i) * (1.0 - double(p.lr) * p.weight_decay) - p.lr * (m / p.bias1) / denominator;
      const double m_bound = 4 * kUnit * (p.beta1 * std::abs(before.m.get(i)) + (1.0 - p.beta1) * std::abs(g));
      ASSERT_NEAR(s.m.get(i), m, m_bound);
      ASSERT_NEAR(s.v.get(i), v, 6 * kUnit * v);
      const double update_bound = p.lr / p.bias1 / denominator * (m_bound + 9 * kUnit * std::abs(m));
      ASSERT_NEAR(s.w.get(i), w, 3 * kUnit * std::abs(before.w.get(i)) + update_bound) << i;
      ASSERT_EQ(s.grad.get(i), before.grad.get(i));
    }
  }
}

TEST(AdamW, FirstStepMovesByTheLearningRate) {
  CpuContext c(1, kSmallWorkspace);
  Tensor w(DType::f32, {2}), m(DType::f32, {2}), v(DType::f32, {2}), grad(DType::f32, {2});
  grad.set(0, 0.25);
  grad.set(1, -4.0);
  AdamWStep p;
  p.lr = 1e-3f;
  p.beta1 = 0.9f;
  p.beta2 = 0.999f;
  p.bias1 = 1.0f - p.beta1;
  p.bias2 = 1.0f - p.beta2;
  adamw(c, w, m, v, grad, p);
  EXPECT_NEAR(w.get(0), -1e-3, 1e-9);
  EXPECT_NEAR(w.get(1), 1e-3, 1e-9);
}

TEST(AdamW, VectorsGiveTheReferencesBits) {
  for (const int64_t n : {1, 15, 16, 100, 4096, 4097, 50003}) {
    const AdamWStep p = example_step();
    State want(n);
    reference::adamw_range(want.w.ptr<float>(), want.m.ptr<float>(), want.v.ptr<float>(), want.grad.ptr<float>(), n, p);
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads, kSmallWorkspace);
      testing::for_each_simd_target([&](const std::string& target) {
        State s(n);
        adamw(c, s.w, s.m, s.v, s.grad, p);
        EXPECT_EQ(testing::count_bit_differences(s.w, want.w), 0) << target << " n " << n;
        EXPECT_EQ(testing::count_bit_differences(s.m, want.m), 0) << target << " n " << n;
        EXPECT_EQ(testing::count_bit_differences(s.v, want.v), 0) << target << " n " << n;
      });
    }
  }
}

// f32 products are within half an ulp and all terms are positive; the f64 sums' errors are far below.
TEST(SumSquares, IsTheTreeOfBlocks) {
  for (const int64_t n : {0, 1, 15, 16, 4095, 4096, 4097, 40000}) {
    const Tensor grad = random_tensor(7, DType::f32, {n}, 5.0f);
    double exact = 0, blocks = 0;
    for (int64_t i = 0; i < n; ++i) exact += double(grad.get(i)) * grad.get(i);
    for (int64_t b = 0; b < n; b += kSumSquaresBlock)
      blocks += reference::sum_squares_block(grad.ptr<float>() + b, std::min(kSumSquaresBlock, n - b));
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads, kSmallWorkspace);
      testing::for_each_simd_target([&](const std::string& target) {
        Tensor out(DType::f64, {1});
        out.set(0, -1);
        const ConstTensorView grads[] = {grad};
        sum_squares(c, out, grads);
        EXPECT_EQ(*out.ptr<double>(), blocks) << target << " n " << n << " threads " << threads;
        EXPECT_NEAR(*out.ptr<double>(), exact, exact * 1.0001 * kUnit);
      });
    }
  }
}

TEST(SumSquares, TellsNonFinite) {
  CpuContext c(1, kSmallWorkspace);
  Tensor grad(DType::f32, {100}), out(DType::f64, {1});
  grad.set(57, std::numeric_limits<float>::infinity());
  const ConstTensorView grads[] = {grad};
  sum_squares(c, out, grads);
  EXPECT_FALSE(std::isfinite(*out.ptr<double>()));
}

TEST(AllFinite, FindsOneBadElementAnywhere) {
  for (const int64_t n : {1, 16, 31, 4097, 40000}) {
    Tensor x = random_tensor(8, DType::f32, {n}, 5.0f);
    x.set(0, std::numeric_limits<float>::max());
    Tensor out(DType::i32, {1});
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads, kSmallWorkspace);
      testing::for_each_simd_target([&](const std::string& target) {
        all_finite(c, out, x);
        EXPECT_EQ(*out.ptr<int32_t>(), 1);
        for (const int64_t at : {int64_t{0}, n / 2, n - 1})
          for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
            const float kept = x.get(at);
            x.ptr<float>()[at] = bad;
            all_finite(c, out, x);
            EXPECT_EQ(*out.ptr<int32_t>(), 0) << target << " n " << n << " at " << at;
            x.ptr<float>()[at] = kept;
          }
      });
    }
  }
  CpuContext c(1, kSmallWorkspace);
  Tensor out(DType::i32, {1}), none(DType::f32, {0});
  all_finite(c, out, none);
  EXPECT_EQ(*out.ptr<int32_t>(), 1);
}

TEST(AdamWDeathTest, NamesWhatIsWrong) {
  CpuContext c(1, kSmallWorkspace);
  Tensor w(DType::f32, {4, 2}), m(DType::f32, {4, 2}), v(DType::f32, {8}), half(DType::bf16, {4, 2}), out(DType::f32, {1});
  EXPECT_DEATH(adamw(c, w, m, v, w, {}), "v is f32 \\[8\\] with stride 1, wanted contiguous f32 \\[4, 2\\]");
  EXPECT_DEATH(adamw(c, w, m, m, half, {}), "grad is bf16");
  EXPECT_DEATH(adamw(c, w.view().cols(0, 1), m.view().cols(0, 1), m.view().cols(0, 1), m.view().cols(0, 1), {}), "with stride 2");
  AdamWStep zero_bias;
  zero_bias.bias1 = 0;
  EXPECT_DEATH(adamw(c, w, m, m, m, zero_bias), "bias corrections 0 and 1");
  const ConstTensorView grads[] = {w};
  EXPECT_DEATH(sum_squares(c, out, grads), "out is f32 \\[1\\], wanted f64 \\[1\\]");
  EXPECT_DEATH(all_finite(c, out, w), "out is f32 \\[1\\], wanted one i32");
}

}  // namespace
}  // namespace lockstep
