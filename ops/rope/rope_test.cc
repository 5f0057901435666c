#include "ops/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/rope/rope_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

TEST(Rope, SpecVector) {
  CpuContext c;
  Tensor table(DType::f32, {4, 4});
  rope_table(table, 10000, {});
  Tensor x(DType::f32, {1, 4});
  x.set(0, 1);
  x.set(3, 1);
  rope(c, x, testing::int_tensor({3}), table, 1, false);
  EXPECT_NEAR(x.get(0), -0.98999250, 1e-7);
  EXPECT_NEAR(x.get(1), 0.14112001, 1e-7);
  EXPECT_NEAR(x.get(2), -0.02999550, 1e-8);
  EXPECT_NEAR(x.get(3), 0.99955003, 1e-7);
}

// V4 spec 2.0. The values there are f32 results printed with 8 digits or more; power, reciprocal, two blends: within 4 ulp.
TEST(Rope, YarnFrequenciesOfTheRelease) {
  float theta[32];
  rope_frequencies(theta, 64, 160000, {.factor = 16, .original_positions = 65536});
  const std::pair<int, double> want[] = {{0, 1.0},           {1, 0.68765600},    {15, 3.6355385836e-3}, {16, 2.265625e-3},
                                         {20, 2.9697778e-4}, {24, 1.953125e-5}, {25, 5.3723127e-6},    {31, 5.6805290e-7}};
  for (const auto& [j, value] : want) EXPECT_NEAR(theta[j], value, value * 4 * 0x1p-23) << j;
  float plain[32];
  rope_frequencies(plain, 64, 160000, {});
  EXPECT_EQ(theta[15], plain[15]);
  EXPECT_NE(theta[16], plain[16]);
  EXPECT_EQ(theta[25], plain[25] / 16);
  for (int j = 0; j < 32; ++j) EXPECT_NEAR(plain[j], std::pow(160000.0, -j / 32.0), plain[j] * 2 * 0x1p-24) << j;
}

TEST(Rope, TableHoldsTheAnglesOfF32Products) {
  Tensor wide(DType::f32, {3000, 9});
  const TensorView table = wide.view().cols(1, 6);
  rope_table(table, 10000, {});
  float theta[3];
  rope_frequencies(theta, 6, 10000, {});
  for (const int p : {0, 1, 777, 2999})
    for (int j = 0; j < 3; ++j) {
      const float angle = static_cast<float>(p) * theta[j];
      EXPECT_EQ(table.row<float>(p)[2 * j], static_cast<float>(std::cos(static_cast<double>(angle))));
      EXPECT_EQ(table.row<float>(p)[2 * j + 1], static_cast<float>(std::sin(static_cast<double>(angle))));
    }
  EXPECT_EQ(wide.get(9 * 777), 0.0f);
  EXPECT_EQ(wide.get(9 * 777 + 7), 0.0f);
}

struct Case {
  int64_t rows, heads, width, rotary;
};
const Case kCases[] = {{0, 2, 8, 4},  {1, 1, 2, 2},   {3, 2, 5, 0},     {9, 3, 11, 6},
                       {7, 4, 16, 8}, {5, 2, 30, 28}, {300, 8, 64, 16}, {4, 64, 96, 64}};

TEST(Rope, MatchesTheFormulaAndTurnsBack) {
  CpuContext c(2);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Case& k : kCases) {
      Tensor table(DType::f32, {100, k.rotary});
      rope_table(table, 10000, {});
      const Tensor start = testing::random_tensor(1, dtype, {k.rows, k.heads * k.width}),
                   pos = testing::random_ints(2, {k.rows}, 100);
      Tensor x = testing::to_dtype(start, dtype);
      rope(c, x, pos, table, k.heads, false);
      // |e'| <= sqrt(2) in two products and one sum, table and angle (up to 100) rounded, then storage.
      const double storage = dtype == DType::bf16 ? 0x1p-8 : 0;
      const double tolerance = 1.5 * (storage + (4 + 100) * 0x1p-24);
      for (int64_t t = 0; t < k.rows; ++t)
        for (int64_t i = 0; i < k.heads * k.width; ++i) {
          const int64_t at = t * k.heads * k.width + i, channel = i % k.width - (k.width - k.rotary);
          if (channel < 0) {
            EXPECT_EQ(x.get(at), start.get(at));
            continue;
          }
          const double angle =
              pos.ptr<int32_t>()[t] * std::pow(10000.0, -static_cast<double>(channel / 2 * 2) / static_cast<double>(k.rotary));
          const double even = start.get(at - channel % 2), odd = start.get(at - channel % 2 + 1);
          const double want =
              channel % 2 == 0 ? even * std::cos(angle) - odd * std::sin(angle) : even * std::sin(angle) + odd * std::cos(angle);
          EXPECT_NEAR(x.get(at), want, tolerance);
        }
      rope(c, x, pos, table, k.heads, true);
      EXPECT_LE(testing::max_abs_difference(x, start), 3 * (storage + 4 * 0x1p-24));
    }
}

// The gradient of sum(dy * rope(x)) by differences of a linear function: exact but for rounding.
TEST(Rope, InverseIsTheGradient) {
  CpuContext c;
  Tensor table(DType::f32, {50, 6}), x = testing::random_tensor(1, DType::f32, {3, 16});
  rope_table(table, 10000, {});
  const Tensor pos = testing::int_tensor({0, 7, 49}), dy = testing::random_tensor(2, DType::f32, {3, 16});
  const auto loss = [&] {
    Tensor y = testing::to_dtype(x, DType::f32);
    rope(c, y, pos, table, 2, false);
    double sum = 0;
    for (int64_t i = 0; i < y.elements(); ++i) sum += static_cast<double>(dy.get(i)) * y.get(i);
    return sum;
  };
  Tensor dx = testing::to_dtype(dy, DType::f32);
  rope(c, dx, pos, table, 2, true);
  // Both rotated values of the pair carry two roundings of numbers below 3, divided by 2h.
  for (int64_t i = 0; i < x.elements(); ++i)
    EXPECT_NEAR(dx.get(i), testing::finite_difference(loss, x, i, 0.5), 8 * 3 * 0x1p-24) << i;
}

TEST(Rope, SimdGivesTheReferencesBits) {
  std::vector<std::unique_ptr<CpuContext>> contexts;
  for (int threads = 1; threads <= 4; ++threads) contexts.push_back(std::make_unique<CpuContext>(threads));
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Case& k : kCases)
      for (const bool inverse : {false, true}) {
        Tensor table(DType::f32, {100, k.rotary});
        rope_table(table, 10000, {});
        const int64_t columns = k.heads * k.width;
        const Tensor start = testing::random_tensor(1, dtype, {k.rows, columns + 5}),
                     pos = testing::random_ints(2, {k.rows}, 100);
        Tensor want = testing::to_dtype(start, dtype);
        reference::rope(*contexts[0], want.view().cols(3, columns), pos, table, k.heads, inverse);
        testing::for_each_simd_target([&](const std::string& target) {
          for (auto& c : contexts) {
            Tensor got = testing::to_dtype(start, dtype);
            rope(*c, got.view().cols(3, columns), pos, table, k.heads, inverse);
            EXPECT_EQ(testing::count_bit_differences(got, want), 0) << target;
          }
        });
      }
}

TEST(Rope, RowContract) {
  CpuContext c(2);
  Tensor table(DType::f32, {500, 16});
  rope_table(table, 10000, {});
  const Tensor start = testing::random_tensor(1, DType::bf16, {120, 64}), pos = testing::random_ints(2, {120}, 500);
  Tensor all = testing::to_dtype(start, DType::bf16);
  rope(c, all, pos, table, 2, false);
  Philox rng(5, RngPurpose::test);
  for (int trial = 0; trial < 30; ++trial) {
    const int64_t begin = rng.below(120), count = 1 + rng.below(static_cast<uint32_t>(120 - begin));
    Tensor part = testing::to_dtype(start.view().slice(begin, count), DType::bf16);
    rope(c, part, ConstTensorView(pos).slice(begin, count), table, 2, false);
    EXPECT_EQ(testing::count_bit_differences(part, all.view().slice(begin, count)), 0);
  }
}

TEST(RopeDeath, ChecksPositionsAndShapes) {
  CpuContext c;
  Tensor table(DType::f32, {10, 4}), x(DType::f32, {2, 8});
  EXPECT_DEATH(rope(c, x, testing::int_tensor({3, 10}), table, 2, false), "position 10 of row 1");
  EXPECT_DEATH(rope(c, x, testing::int_tensor({3, -1}), table, 2, false), "position -1");
  EXPECT_DEATH(rope(c, x, testing::int_tensor({3, 1}), table, 4, false), "4 heads");
  EXPECT_DEATH(rope(c, x, testing::int_tensor({3}), table, 2, false), "pos \\[1\\]");
}

}  // namespace
}  // namespace lockstep
