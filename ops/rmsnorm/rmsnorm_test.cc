#include "ops/rmsnorm/rmsnorm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/rmsnorm/rmsnorm_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

constexpr float kEps = 0.01f;  // large enough to be missed
constexpr double kUnit = 0x1p-24;  // half an ulp of 1 in f32

const std::vector<Shape> kShapes = {{0, 8}, {1, 1}, {3, 7}, {33, 16}, {5, 64}, {700, 100}, {3, 4096}};

// Relative error of inv: each lane adds n / 16 squares and 4 folds follow (one rounding each), halved by the square root;
// division by n, + eps: 2, halved; square root and division: 2. Of y: two products more, and the storage rounding.
double inv_tolerance(int64_t n) { return ((static_cast<double>(n) / 16 + 5 + 2) / 2 + 2) * kUnit; }
double y_tolerance(int64_t n, DType dtype) { return inv_tolerance(n) + 2 * kUnit + (dtype == DType::bf16 ? 0x1p-8 : 0); }

TEST(RmsNorm, MatchesTheFormula) {
  CpuContext c(2);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : kShapes)
      for (const bool gain : {true, false}) {
        const int64_t n = shape[1];
        const Tensor x = testing::random_tensor(1, dtype, shape, 3.0f), w = testing::random_tensor(2, DType::f32, {n}, 2.0f);
        Tensor y(dtype, shape), inv(DType::f32, {shape[0]});
        rmsnorm(c, y, inv, x, gain ? ConstTensorView(w) : ConstTensorView(), kEps);
        for (int64_t t = 0; t < shape[0]; ++t) {
          double squares = 0;
          for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x.get(t * n + i)) * x.get(t * n + i);
          const double want_inv = 1 / std::sqrt(squares / static_cast<double>(n) + kEps);
          EXPECT_NEAR(inv.get(t), want_inv, want_inv * inv_tolerance(n));
          for (int64_t i = 0; i < n; ++i) {
            const double want = x.get(t * n + i) * want_inv * (gain ? w.get(i) : 1.0);
            EXPECT_NEAR(y.get(t * n + i), want, std::abs(want) * y_tolerance(n, dtype)) << shape.str();
          }
        }
      }
}

TEST(RmsNorm, SimdGivesTheReferencesBits) {
  std::vector<std::unique_ptr<CpuContext>> contexts;
  for (int threads = 1; threads <= 4; ++threads) contexts.push_back(std::make_unique<CpuContext>(threads));
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : kShapes)
      for (const bool gain : {true, false})
        for (const bool accumulate : {true, false}) {
          const int64_t rows = shape[0], n = shape[1];
          // Everything lies inside wider tensors, compared whole: what is outside must stay untouched.
          const Tensor x_wide = testing::random_tensor(1, dtype, {rows, n + 5}, 3.0f),
                       w_all = testing::random_tensor(2, DType::f32, {n});
          const Tensor dy_wide = testing::random_tensor(3, DType::f32, {rows, n + 3});
          const ConstTensorView x = ConstTensorView(x_wide).cols(2, n), dy = ConstTensorView(dy_wide).cols(1, n);
          const ConstTensorView w = gain ? ConstTensorView(w_all) : ConstTensorView();
          struct Outputs {
            Tensor y, inv, dx, dw;
          };
          const auto outputs = [&] {
            return Outputs{testing::random_tensor(4, dtype, {rows, n + 5}), Tensor(DType::f32, {rows}),
                           testing::random_tensor(5, DType::f32, {rows, n + 2}), testing::random_tensor(6, DType::f32, {n})};
          };
          Outputs want = outputs();
          reference::rmsnorm(*contexts[0], want.y.view().cols(2, n), want.inv, x, w, kEps);
          reference::rmsnorm_backward(*contexts[0], want.dx.view().cols(1, n), gain ? want.dw.view() : TensorView(), dy, x, w,
                                      want.inv, accumulate);
          testing::for_each_simd_target([&](const std::string& target) {
            for (auto& c : contexts) {
              Outputs got = outputs();
              rmsnorm(*c, got.y.view().cols(2, n), got.inv, x, w, kEps);
              rmsnorm_backward(*c, got.dx.view().cols(1, n), gain ? got.dw.view() : TensorView(), dy, x, w, got.inv, accumulate);
              EXPECT_EQ(testing::count_bit_differences(got.y, want.y), 0) << target << shape.str();
              EXPECT_EQ(testing::count_bit_differences(got.inv, want.inv), 0) << target << shape.str();
              EXPECT_EQ(testing::count_bit_differences(got.dx, want.dx), 0) << target << shape.str();
              EXPECT_EQ(testing::count_bit_differences(got.dw, want.dw), 0) << target << shape.str();
            }
          });
        }
}

TEST(RmsNorm, RowContract) {
  CpuContext c(2);
  const int64_t rows = 200, n = 48;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor x = testing::random_tensor(1, dtype, {rows, n}), w = testing::random_tensor(2, DType::f32, {n});
    const Tensor dy = testing::random_tensor(3, DType::f32, {rows, n});
    Tensor y(dtype, {rows, n}), inv(DType::f32, {rows}), dx(DType::f32, {rows, n});
    rmsnorm(c, y, inv, x, w, kEps);
    rmsnorm_backward(c, dx, {}, dy, x, w, inv);
    Philox rng(9, RngPurpose::test);
    for (int trial = 0; trial < 30; ++trial) {
      const int64_t begin = rng.below(rows), count = 1 + rng.below(static_cast<uint32_t>(rows - begin));
      Tensor part(dtype, {count, n}), part_inv(DType::f32, {count}), part_dx(DType::f32, {count, n});
      rmsnorm(c, part, part_inv, ConstTensorView(x).slice(begin, count), w, kEps);
      rmsnorm_backward(c, part_dx, {}, ConstTensorView(dy).slice(begin, count), ConstTensorView(x).slice(begin, count), w,
                       part_inv);
      EXPECT_EQ(testing::count_bit_differences(part, y.view().slice(begin, count)), 0);
      EXPECT_EQ(testing::count_bit_differences(part_inv, inv.view().slice(begin, count)), 0);
      EXPECT_EQ(testing::count_bit_differences(part_dx, dx.view().slice(begin, count)), 0);
    }
  }
}

TEST(RmsNorm, WorksInPlace) {
  CpuContext c;
  const Tensor x = testing::random_tensor(1, DType::f32, {9, 33}), w = testing::random_tensor(2, DType::f32, {33});
  const Tensor dy = testing::random_tensor(3, DType::f32, {9, 33});
  Tensor y(DType::f32, {9, 33}), inv(DType::f32, {9}), dx(DType::f32, {9, 33}), dw(DType::f32, {33}),
      dw_in_place(DType::f32, {33});
  rmsnorm(c, y, inv, x, w, kEps);
  Tensor in_place = testing::to_dtype(x, DType::f32);
  rmsnorm(c, in_place, {}, in_place, w, kEps);
  EXPECT_EQ(testing::count_bit_differences(in_place, y), 0);
  rmsnorm_backward(c, dx, dw, dy, x, w, inv);
  in_place = testing::to_dtype(dy, DType::f32);
  rmsnorm_backward(c, in_place, dw_in_place, in_place, x, w, inv);
  EXPECT_EQ(testing::count_bit_differences(in_place, dx), 0);
  EXPECT_EQ(testing::count_bit_differences(dw_in_place, dw), 0);
}

// Central differences of sum(dy * y) in f64: their own error is h^2 times a third derivative (about 1e-8) and 1e-16 / h.
TEST(RmsNorm, BackwardIsTheGradient) {
  CpuContext c;
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{4, 37}})
    for (const bool gain : {true, false}) {
      const int64_t rows = shape[0], n = shape[1];
      const Tensor x = testing::random_tensor(1, DType::f32, shape, 2.0f), w = testing::random_tensor(2, DType::f32, {n}, 2.0f);
      const Tensor dy = testing::random_tensor(3, DType::f32, shape);
      std::vector<double> xd(rows * n), wd(n);
      for (int64_t i = 0; i < rows * n; ++i) xd[i] = x.get(i);
      for (int64_t i = 0; i < n; ++i) wd[i] = gain ? w.get(i) : 1.0;
      const auto loss = [&] {
        double sum = 0;
        for (int64_t t = 0; t < rows; ++t) {
          double squares = 0;
          for (int64_t i = 0; i < n; ++i) squares += xd[t * n + i] * xd[t * n + i];
          for (int64_t i = 0; i < n; ++i)
            sum += dy.get(t * n + i) * xd[t * n + i] * wd[i] / std::sqrt(squares / static_cast<double>(n) + kEps);
        }
        return sum;
      };
      const auto slope = [&](double& at) {
        const double h = 1e-4, kept = at;
        at = kept + h;
        const double up = loss();
        at = kept - h;
        const double down = loss();
        at = kept;
        return (up - down) / (2 * h);
      };
      Tensor y(DType::f32, shape), inv(DType::f32, {rows}), dx(DType::f32, shape);
      const Tensor dx_start = testing::random_tensor(4, DType::f32, shape), dw_start = testing::random_tensor(5, DType::f32, {n});
      Tensor dx_accum = testing::to_dtype(dx_start, DType::f32), dw = testing::to_dtype(dw_start, DType::f32);
      const ConstTensorView w_view = gain ? ConstTensorView(w) : ConstTensorView();
      rmsnorm(c, y, inv, x, w_view, kEps);
      rmsnorm_backward(c, dx, gain ? dw.view() : TensorView(), dy, x, w_view, inv);
      rmsnorm_backward(c, dx_accum, {}, dy, x, w_view, inv, true);
      for (int64_t i = 0; i < rows * n; ++i) {
        // |dx| <= inv (2 + |xh| mean|xh g|), |xh| <= sqrt(n), |g| <= 2; n / 16 + 15 roundings.
        const double scale = inv.get(i / n) * (2 + 2 * std::sqrt(static_cast<double>(n)));
        const double tolerance = (static_cast<double>(n) / 16 + 15) * kUnit * scale + 2e-7;
        const double want = slope(xd[i]);
        EXPECT_NEAR(dx.get(i), want, tolerance) << shape.str() << i;
        EXPECT_NEAR(dx_accum.get(i), want + dx_start.get(i), tolerance + kUnit * (1 + scale)) << shape.str() << i;
      }
      for (int64_t i = 0; gain && i < n; ++i) {
        const double scale = static_cast<double>(rows) * std::sqrt(static_cast<double>(n)) + 1;
        EXPECT_NEAR(dw.get(i), slope(wd[i]) + dw_start.get(i), (static_cast<double>(rows) + 5) * kUnit * scale + 1e-9)
            << shape.str() << i;
      }
    }
}

// The gain's gradient is one chain over rows, so gradient accumulation over parts of a batch has the bits of the whole.
TEST(RmsNorm, GainGradientContinuesItsChain) {
  CpuContext c(2);
  const Tensor x = testing::random_tensor(1, DType::bf16, {50, 70}), w = testing::random_tensor(2, DType::f32, {70});
  const Tensor dy = testing::random_tensor(3, DType::f32, {50, 70});
  Tensor y(DType::bf16, {50, 70}), inv(DType::f32, {50}), dx(DType::f32, {50, 70}), whole(DType::f32, {70}),
      parts(DType::f32, {70});
  rmsnorm(c, y, inv, x, w, kEps);
  rmsnorm_backward(c, dx, whole, dy, x, w, inv);
  for (const auto& [begin, count] : {std::pair{0, 13}, std::pair{13, 37}})
    rmsnorm_backward(c, dx.view().slice(begin, count), parts, ConstTensorView(dy).slice(begin, count),
                     ConstTensorView(x).slice(begin, count), w, ConstTensorView(inv).slice(begin, count));
  EXPECT_EQ(testing::count_bit_differences(whole, parts), 0);
}

TEST(RmsNormDeath, ChecksShapesAndTypes) {
  CpuContext c;
  Tensor x(DType::f32, {2, 4}), y(DType::f32, {2, 3}), half(DType::bf16, {2, 4}), w(DType::f32, {3}), inv(DType::f32, {2});
  EXPECT_DEATH(rmsnorm(c, y, inv, x, {}, kEps), "x \\[2, 4\\], y \\[2, 3\\]");
  EXPECT_DEATH(rmsnorm(c, half, inv, x, {}, kEps), "x f32, y bf16");
  EXPECT_DEATH(rmsnorm(c, x, inv, x, w, kEps), "w f32 \\[3\\]");
  EXPECT_DEATH(rmsnorm(c, x, w, x, {}, kEps), "inv f32 \\[3\\]");
  EXPECT_DEATH(rmsnorm_backward(c, half, {}, x, x, {}, inv), "dx bf16");
  EXPECT_DEATH(rmsnorm_backward(c, x, {}, x, x, {}, w), "inv f32 \\[3\\]");
  EXPECT_DEATH(rmsnorm_backward(c, x, {}, x, x, {}, inv, true), "dx cannot be dy");
}

}  // namespace
}  // namespace lockstep
