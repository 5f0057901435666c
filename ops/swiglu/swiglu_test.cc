#include "ops/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/swiglu/swiglu_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

constexpr double kUnit = 0x1p-24;

double formula(double g, double u, double rho, double limit) {
  if (limit > 0) {
    g = std::min(g, limit);
    u = std::clamp(u, -limit, limit);
  }
  return rho * g / (1 + std::exp(-g)) * u;
}

TEST(Swiglu, SpecVectors) {
  CpuContext c;
  Tensor g(DType::f32, {1, 2}), u(DType::f32, {1, 2}), a(DType::f32, {1, 2});
  g.set(0, 12);
  u.set(0, -15);
  g.set(1, -12);
  u.set(1, 3);
  swiglu(c, a, g, u, {}, 10.0f);
  EXPECT_NEAR(a.get(0), -99.9954602, 99.9954602 * 9 * kUnit);
  EXPECT_NEAR(a.get(1), -2.2119029e-4, 2.2119029e-4 * (9 * kUnit + 1e-8));
}

const std::vector<Shape> kShapes = {{0, 8}, {1, 1}, {3, 7}, {2, 16}, {5, 40}, {300, 128}, {2, 2048}};

// exp within 2 ulp (4 units), 1 + e and the division: 6; three products: 9; then storage.
TEST(Swiglu, MatchesTheFormula) {
  CpuContext c(2);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : kShapes)
      for (const float limit : {0.0f, 5.0f})
        for (const bool routed : {true, false}) {
          const Tensor g = testing::random_tensor(1, dtype, shape, 12.0f), u = testing::random_tensor(2, dtype, shape, 9.0f);
          const Tensor rho = testing::random_tensor(3, DType::f32, {shape[0]});
          Tensor a(dtype, shape);
          swiglu(c, a, g, u, routed ? ConstTensorView(rho) : ConstTensorView(), limit);
          for (int64_t i = 0; i < a.elements(); ++i) {
            const double want = formula(g.get(i), u.get(i), routed ? rho.get(i / shape[1]) : 1.0, limit);
            EXPECT_NEAR(a.get(i), want, std::abs(want) * (9 * kUnit + (dtype == DType::bf16 ? 0x1p-8 : 0)));
          }
        }
}

TEST(Swiglu, SimdGivesTheReferencesBits) {
  std::vector<std::unique_ptr<CpuContext>> contexts;
  for (int threads = 1; threads <= 4; ++threads) contexts.push_back(std::make_unique<CpuContext>(threads));
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : kShapes)
      for (const float limit : {0.0f, 5.0f})
        for (const bool routed : {true, false}) {
          const int64_t rows = shape[0], n = shape[1];
          // Gate and up as the halves of one product, outputs inside wider tensors that are compared whole.
          Tensor gu = testing::random_tensor(1, dtype, {rows, 2 * n}, 12.0f);
          if (gu.elements() > 5) {
            gu.set(0, INFINITY);
            gu.set(1, -INFINITY);
            gu.set(2, 200.0);
            gu.set(3, -200.0);
            gu.set(4, 5.0);
            gu.set(5, -5.0);
          }
          const ConstTensorView g = ConstTensorView(gu).cols(0, n), u = ConstTensorView(gu).cols(n, n);
          const Tensor da = testing::random_tensor(2, DType::f32, {rows, n}),
                       rho_all = testing::random_tensor(3, DType::f32, {rows});
          const ConstTensorView rho = routed ? ConstTensorView(rho_all) : ConstTensorView();
          struct Outputs {
            Tensor a, dgu, drho;
          };
          const auto outputs = [&] {
            return Outputs{testing::random_tensor(4, dtype, {rows, n + 3}),
                           testing::random_tensor(5, DType::f32, {rows, 2 * n + 4}), Tensor(DType::f32, {rows})};
          };
          Outputs want = outputs();
          reference::swiglu(*contexts[0], want.a.view().cols(1, n), g, u, rho, limit);
          reference::swiglu_backward(*contexts[0], want.dgu.view().cols(1, n), want.dgu.view().cols(n + 2, n),
                                     routed ? want.drho.view() : TensorView(), da, g, u, rho, limit);
          testing::for_each_simd_target([&](const std::string& target) {
            for (auto& c : contexts) {
              Outputs got = outputs();
              swiglu(*c, got.a.view().cols(1, n), g, u, rho, limit);
              swiglu_backward(*c, got.dgu.view().cols(1, n), got.dgu.view().cols(n + 2, n),
                              routed ? got.drho.view() : TensorView(), da, g, u, rho, limit);
              EXPECT_EQ(testing::count_bit_differences(got.a, want.a), 0) << target << shape.str();
              EXPECT_EQ(testing::count_bit_differences(got.dgu, want.dgu), 0) << target << shape.str();
              EXPECT_EQ(testing::count_bit_differences(got.drho, want.drho), 0) << target << shape.str();
            }
          });
        }
}

TEST(Swiglu, RowContract) {
  CpuContext c(2);
  const int64_t rows = 150, n = 40;
  const Tensor g = testing::random_tensor(1, DType::bf16, {rows, n}, 9.0f),
               u = testing::random_tensor(2, DType::bf16, {rows, n}, 9.0f);
  const Tensor rho = testing::random_tensor(3, DType::f32, {rows}), da = testing::random_tensor(4, DType::f32, {rows, n});
  Tensor a(DType::bf16, {rows, n}), dg(DType::f32, {rows, n}), du(DType::f32, {rows, n}), drho(DType::f32, {rows});
  swiglu(c, a, g, u, rho, 5.0f);
  swiglu_backward(c, dg, du, drho, da, g, u, rho, 5.0f);
  Philox rng(5, RngPurpose::test);
  for (int trial = 0; trial < 30; ++trial) {
    const int64_t begin = rng.below(rows), count = 1 + rng.below(static_cast<uint32_t>(rows - begin));
    const auto part = [&](const Tensor& x) { return ConstTensorView(x).slice(begin, count); };
    Tensor pa(DType::bf16, {count, n}), pg(DType::f32, {count, n}), pu(DType::f32, {count, n}), pr(DType::f32, {count});
    swiglu(c, pa, part(g), part(u), part(rho), 5.0f);
    swiglu_backward(c, pg, pu, pr, part(da), part(g), part(u), part(rho), 5.0f);
    EXPECT_EQ(testing::count_bit_differences(pa, part(a)), 0);
    EXPECT_EQ(testing::count_bit_differences(pg, part(dg)), 0);
    EXPECT_EQ(testing::count_bit_differences(pu, part(du)), 0);
    EXPECT_EQ(testing::count_bit_differences(pr, part(drho)), 0);
  }
}

// Central differences of the f64 formula, h = 1e-4: truncation h^2 |third derivative| / 6 below 1e-8 * 10 for |u| <= 9.
TEST(Swiglu, BackwardIsTheGradient) {
  CpuContext c;
  const double h = 1e-4;
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{4, 50}})
    for (const float limit : {0.0f, 5.0f}) {
      const int64_t rows = shape[0], n = shape[1];
      const Tensor g = testing::random_tensor(1, DType::f32, shape, 9.0f), u = testing::random_tensor(2, DType::f32, shape, 9.0f);
      const Tensor rho = testing::random_tensor(3, DType::f32, {rows}), da = testing::random_tensor(4, DType::f32, shape);
      Tensor dg(DType::f32, shape), du(DType::f32, shape), drho(DType::f32, {rows});
      Tensor dg_in_place = testing::to_dtype(da, DType::f32);
      swiglu_backward(c, dg, du, drho, da, g, u, rho, limit);
      swiglu_backward(c, dg_in_place, du, drho, dg_in_place, g, u, rho, limit);
      EXPECT_EQ(testing::count_bit_differences(dg_in_place, dg), 0);
      for (int64_t t = 0; t < rows; ++t) {
        double want_drho = 0, size = 0;
        for (int64_t i = t * n; i < (t + 1) * n; ++i) {
          const double gd = g.get(i), ud = u.get(i), r = rho.get(t);
          const double one = formula(gd, ud, 1.0, limit);
          want_drho += da.get(i) * one;
          size += std::abs(da.get(i) * one);
          ASSERT_GT(std::abs(gd - 5), h);
          ASSERT_GT(std::abs(std::abs(ud) - 5), h);
          const double slope_g = da.get(i) * (formula(gd + h, ud, r, limit) - formula(gd - h, ud, r, limit)) / (2 * h);
          const double slope_u = da.get(i) * (formula(gd, ud + h, r, limit) - formula(gd, ud - h, r, limit)) / (2 * h);
          // Numbers up to 9 * 1.1 pass some 15 roundings (6 of the sigmoid).
          EXPECT_NEAR(dg.get(i), slope_g, 15 * kUnit * 10 + 1e-7);
          EXPECT_NEAR(du.get(i), slope_u, 15 * kUnit * 10 + 1e-7);
        }
        EXPECT_NEAR(drho.get(t), want_drho, (static_cast<double>(n) / 16 + 5 + 9) * kUnit * size);
      }
    }
}

TEST(Swiglu, GradientPassesAtTheLimitAndStopsBeyond) {
  CpuContext c;
  Tensor g(DType::f32, {1, 4}), u(DType::f32, {1, 4}), da(DType::f32, {1, 4}), dg(DType::f32, {1, 4}), du(DType::f32, {1, 4});
  const float gs[4] = {10.0f, 10.000001f, -50.0f, 1.0f}, us[4] = {10.0f, -10.000001f, -10.0f, 10.000001f};
  for (int i = 0; i < 4; ++i) {
    g.set(i, gs[i]);
    u.set(i, us[i]);
    da.set(i, 1);
  }
  swiglu_backward(c, dg, du, {}, da, g, u, {}, 10.0f);
  EXPECT_NEAR(dg.get(0), 10.0, 0.01);
  EXPECT_EQ(dg.get(1), 0.0f);
  EXPECT_NE(dg.get(2), 0.0f);  // no lower bound on the gate
  EXPECT_GT(dg.get(3), 1.0f);
  EXPECT_NEAR(du.get(0), 10.0, 0.01);
  EXPECT_EQ(du.get(1), 0.0f);
  EXPECT_NE(du.get(2), 0.0f);
  EXPECT_EQ(du.get(3), 0.0f);
}

TEST(SwigluDeath, ChecksShapesAndTypes) {
  CpuContext c;
  Tensor x(DType::f32, {2, 4}), y(DType::f32, {2, 3}), z(DType::f32, {2, 4}), half(DType::bf16, {2, 4}), rho(DType::f32, {3});
  EXPECT_DEATH(swiglu(c, x, x, y, {}, 0), "g \\[2, 4\\], u \\[2, 3\\]");
  EXPECT_DEATH(swiglu(c, half, x, z, {}, 0), "a bf16");
  EXPECT_DEATH(swiglu(c, x, x, z, rho, 0), "rho f32 \\[3\\]");
  EXPECT_DEATH(swiglu_backward(c, x, x, {}, z, z, z, {}, 0), "share memory");
  EXPECT_DEATH(swiglu_backward(c, x, z, rho, z, z, z, {}, 0), "drho f32 \\[3\\]");
}

}  // namespace
}  // namespace lockstep
