// Forward bits: the vector kernels equal the plain loops on every SIMD target and thread count, whatever M, place and strides.
// Values: both directions against f64 formulas written with other loops, within derived bounds.

#include "ops/matmul/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ops/matmul/matmul_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::for_each_simd_target;
using testing::random_tensor;
using testing::Tensor;

constexpr DType kFloats[] = {DType::f32, DType::bf16};

double value(ConstTensorView v, int64_t row, int64_t col) {
  const int64_t i = row * v.row_stride + col;
  return v.dtype == DType::f32 ? static_cast<const float*>(v.data)[i] : to_f32(static_cast<const bf16*>(v.data)[i]);
}

Tensor pack(Context& c, ConstTensorView rows) {
  Tensor panels(rows.dtype, panel_shape(rows.shape));
  pack_panels(c, panels, rows);
  return panels;
}

// A matrix with `gap` columns between rows that must stay as they are, and its view.
struct Strided {
  Tensor storage;
  TensorView view;
  int64_t gap_start;

  Strided(uint64_t seed, DType dtype, int64_t rows, int64_t columns, int64_t gap)
      : storage(random_tensor(seed, dtype, {rows, columns + gap})), view(storage.view().cols(0, columns)), gap_start(columns) {}
  // Bits of the gap differing from a fresh copy of the same random numbers.
  int64_t touched(uint64_t seed) const {
    const Tensor fresh = random_tensor(seed, storage.view().dtype, storage.view().shape);
    const int64_t gap = storage.view().shape[1] - gap_start;
    return count_bit_differences(storage.view().cols(gap_start, gap), fresh.view().cols(gap_start, gap));
  }
};

struct Sizes {
  int64_t m, n, k;
};

// Zero, one, odd, every remainder of a tile, several blocks of rows (96), of K (512) and of columns (512).
const std::vector<Sizes> kSizes = {{0, 5, 3},     {3, 0, 4},    {1, 1, 1},     {1, 16, 1},    {1, 130, 33},  {1, 300, 700},
                                   {2, 200, 65},  {3, 100, 17}, {4, 70, 9},    {5, 24, 40},   {6, 64, 64},   {7, 33, 31},
                                   {8, 16, 128},  {9, 48, 5},   {10, 47, 8},   {11, 32, 100}, {12, 32, 7},   {13, 31, 6},
                                   {25, 24, 512}, {37, 97, 50}, {101, 40, 33}, {200, 70, 20}, {30, 600, 12}, {17, 20, 1100}};

// y rounded to bf16 loses half a unit in the last place of 8 bits; f32 nothing beyond the chain.
double rounding(DType t) { return t == DType::bf16 ? 0x1p-8 : 0.0; }

TEST(Matmul, MatchesFormulaInF64) {
  CpuContext c(2);
  for (const DType xt : kFloats)
    for (const DType wt : kFloats)
      for (const DType yt : kFloats)
        for (const Sizes& s : kSizes) {
          const Tensor x = random_tensor(1, xt, {s.m, s.k}), w = random_tensor(2, wt, {s.n, s.k});
          Tensor y = random_tensor(3, yt, {s.m, s.n});
          matmul(c, y, x, {w, pack(c, w)});
          for (int64_t i = 0; i < s.m; ++i)
            for (int64_t j = 0; j < s.n; ++j) {
              double sum = 0, sizes = 0;
              for (int64_t l = s.k - 1; l >= 0; --l) {
                const double p = value(x, i, l) * value(w, j, l);
                sum += p;
                sizes += std::abs(p);
              }
              // Each of k fused steps rounds a partial sum of magnitude below `sizes` once: k u sizes, u = 2^-24 (Higham 3.1).
              const double bound = 1.01 * static_cast<double>(s.k) * 0x1p-24 * sizes;
              ASSERT_NEAR(value(y, i, j), sum, bound + rounding(yt) * (std::abs(sum) + bound)) << s.m << " " << s.n << " " << s.k;
            }
        }
}

TEST(Matmul, BitsEqualThePlainLoops) {
  for_each_simd_target([&](const std::string& target) {
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads);
      for (const DType xt : kFloats)
        for (const DType wt : kFloats)
          for (const Sizes& s : kSizes) {
            const DType yt = s.m % 2 == 0 ? wt : xt;
            const Strided x(4, xt, s.m, s.k, 5), w(5, wt, s.n, s.k, 3);
            Strided y(6, yt, s.m, s.n, 7);
            Tensor expected(yt, {s.m, s.n});
            reference::matmul(expected, x.view, {w.view, {}}, 0);
            const Tensor panels = pack(c, w.view);
            matmul(c, y.view, x.view, {w.view, panels});
            ASSERT_EQ(count_bit_differences(y.view, expected), 0)
                << target << " " << threads << " threads " << s.m << " " << s.n << " " << s.k;
            ASSERT_EQ(y.touched(6), 0) << target << " wrote between rows";

            Tensor unpacked(yt, {s.m, s.n});
            matmul(c, unpacked, x.view, {w.view, {}});
            ASSERT_EQ(count_bit_differences(unpacked, expected), 0) << target << " without panels";
          }
    }
  });
}

TEST(Matmul, SegmentsAreChainsOfTheirOwn) {
  for_each_simd_target([&](const std::string& target) {
    for (const int threads : {1, 3}) {
      CpuContext c(threads);
      for (const DType t : kFloats)
        for (const Sizes& s : {Sizes{1, 40, 96}, Sizes{14, 33, 64}, Sizes{110, 64, 1536}}) {
          const Tensor x = random_tensor(7, t, {s.m, s.k}), w = random_tensor(8, t, {s.n, s.k});
          const Tensor panels = pack(c, w);
          for (const int64_t segment : {s.k / 2, s.k / 4, int64_t{7}, s.k, s.k + 1}) {
            if (s.k > 1000 && segment == 7) continue;
            Tensor y(t, {s.m, s.n}), expected(t, {s.m, s.n});
            reference::matmul(expected, x, {w, {}}, segment);
            matmul(c, y, x, {w, panels}, segment);
            ASSERT_EQ(count_bit_differences(y, expected), 0) << target << " segment " << segment << " of " << s.k;
          }
          // The same numbers by hand: one product a segment, sums added in order.
          Tensor y(DType::f32, {s.m, s.n}), sum(DType::f32, {s.m, s.n});
          const int64_t half = s.k / 2;
          matmul(c, y, x, {w, panels}, half);
          for (int64_t g = 0; g < 2; ++g) {
            Tensor part(DType::f32, {s.m, s.n});
            matmul(c, part, x.view().cols(g * half, half), {w.view().cols(g * half, half), {}});
            for (int64_t i = 0; i < sum.elements(); ++i) sum.ptr<float>()[i] += part.ptr<float>()[i];
          }
          ASSERT_EQ(count_bit_differences(y, sum), 0) << target;
        }
    }
  });
}

// Negative control: with this data a split of K does change bits, so the comparisons above would see one.
TEST(Matmul, SplittingKWouldChangeBits) {
  CpuContext c(1);
  for (const DType t : kFloats) {
    const Tensor x = random_tensor(4, t, {25, 512}), w = random_tensor(5, t, {24, 512});
    const Tensor panels = pack(c, w);
    Tensor chain(DType::f32, {25, 24}), split(DType::f32, {25, 24});
    matmul(c, chain, x, {w, panels});
    matmul(c, split, x, {w, panels}, 256);
    EXPECT_GT(count_bit_differences(chain, split), 25 * 24 / 4);
    EXPECT_LT(testing::relative_l2(split, chain), 1e-5);
  }
}

// Rows alone, in chunks of every size and at shuffled places give the bits of the whole.
TEST(Matmul, RowContract) {
  for_each_simd_target([&](const std::string& target) {
    CpuContext c(2);
    for (const DType t : kFloats)
      for (const Sizes& s : {Sizes{131, 72, 80}, Sizes{40, 24, 530}}) {
        const Strided x(9, t, s.m, s.k, 9);
        const Tensor w = random_tensor(10, t, {s.n, s.k});
        const Tensor panels = pack(c, w);
        Tensor whole(t, {s.m, s.n}), cut(t, {s.m, s.n});
        matmul(c, whole, x.view, {w, panels});
        Philox rng(11, RngPurpose::test);
        for (int64_t first = 0; first < s.m;) {
          const int64_t count = std::min<int64_t>(s.m - first, 1 + rng.below(30));
          matmul(c, cut.view().slice(first, count), x.view.slice(first, count), {w, panels});
          first += count;
        }
        ASSERT_EQ(count_bit_differences(cut, whole), 0) << target;

        // Row r of the whole at another place of a bigger call.
        Tensor other = random_tensor(12, t, {2 * s.m, s.k});
        std::vector<int64_t> place(static_cast<size_t>(s.m));
        for (int64_t r = 0; r < s.m; ++r) {
          place[static_cast<size_t>(r)] = 2 * ((r * 37 + 5) % s.m) + rng.below(2);
          for (int64_t k = 0; k < s.k; ++k) other.set(place[static_cast<size_t>(r)] * s.k + k, value(x.view, r, k));
        }
        Tensor y(t, {2 * s.m, s.n});
        matmul(c, y, other, {w, panels});
        for (int64_t r = 0; r < s.m; ++r)
          ASSERT_EQ(count_bit_differences(y.view().slice(place[static_cast<size_t>(r)], 1), whole.view().slice(r, 1)), 0)
              << target << " row " << r;
      }
  });
}

// Products with zeros of a panel's padding never reach a result, and what does not belong to a row cannot poison it.
TEST(Matmul, InfinitiesStayInTheirRowsAndColumns) {
  CpuContext c(1);
  Tensor x = random_tensor(13, DType::f32, {14, 20}), w = random_tensor(14, DType::f32, {18, 20});
  x.set(3 * 20 + 7, std::numeric_limits<double>::infinity());
  w.set(17 * 20 + 2, std::numeric_limits<double>::quiet_NaN());
  Tensor y(DType::f32, {14, 18});
  matmul(c, y, x, {w, {}});
  for (int64_t m = 0; m < 14; ++m)
    for (int64_t n = 0; n < 18; ++n) EXPECT_EQ(std::isfinite(y.get(m * 18 + n)), m != 3 && n != 17) << m << " " << n;
}

TEST(Matmul, NoColumnsOfWeightsGiveZeros) {
  CpuContext c(1);
  const Tensor x(DType::bf16, {3, 0}), w(DType::bf16, {5, 0});
  Tensor y = random_tensor(15, DType::bf16, {3, 5});
  matmul(c, y, x, {w, {}});
  EXPECT_EQ(count_bit_differences(y, Tensor(DType::bf16, {3, 5})), 0);
}

TEST(Matmul, PanelsHoldTheRows) {
  for_each_simd_target([&](const std::string& target) {
    for (const int threads : {1, 3}) {
      CpuContext c(threads);
      for (const DType t : kFloats)
        for (const Shape& shape : {Shape{1, 1}, Shape{16, 8}, Shape{17, 9}, Shape{40, 37}, Shape{3, 24, 20}, Shape{2, 5, 7},
                                   Shape{0, 4}, Shape{4, 0}}) {
          const Tensor rows = random_tensor(16, t, shape);
          Tensor expected(t, panel_shape(shape)), panels = random_tensor(17, t, panel_shape(shape));
          reference::pack_panels(expected, rows);
          pack_panels(c, panels, rows);
          ASSERT_EQ(count_bit_differences(panels, expected), 0) << target << " " << shape.str();
          Tensor back = random_tensor(18, t, shape);
          unpack_panels(c, back, panels);
          ASSERT_EQ(count_bit_differences(back, rows), 0) << shape.str();
          const bool grouped = shape.rank == 3;
          const int64_t experts = grouped ? shape[0] : 1, n = shape[grouped], k = shape[grouped + 1];
          for (int64_t e = 0; e < experts; ++e)
            for (int64_t j = 0; j < panel_shape(Shape{n, k})[0] * kPanelWidth; ++j)
              for (int64_t i = 0; i < k; ++i) {
                const int64_t per_expert = panel_shape(Shape{n, k}).elements();
                const float held = panels.get(e * per_expert + (j / kPanelWidth * k + i) * kPanelWidth + j % kPanelWidth);
                ASSERT_EQ(held, j < n ? rows.get((e * n + j) * k + i) : 0.0f) << target;
              }
        }
    }
  });
  CpuContext c(1);
  const Strided rows(18, DType::f32, 19, 10, 6);
  const Tensor dense = testing::to_dtype(rows.view, DType::f32);
  EXPECT_EQ(count_bit_differences(pack(c, rows.view), pack(c, dense)), 0);
}

// A product with columns of a matrix, panels where they lie, has the bits of one with a copy of these columns.
TEST(Matmul, ColumnsOfAWeight) {
  CpuContext c(2);
  for (const DType t : kFloats)
    for (const int64_t n : {5, 16, 40}) {
      const Tensor w = random_tensor(19, t, {n, 24}), panels = pack(c, w), x = random_tensor(20, t, {7, 24});
      for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 24}, {0, 8}, {8, 11}, {19, 5}}) {
        const WeightView columns = columns_of({w, panels}, begin, count);
        const Tensor copy = testing::to_dtype(columns.rows, t);
        const ConstTensorView part = ConstTensorView(x).cols(begin, count);
        Tensor y(DType::f32, {7, n}), expected(DType::f32, {7, n});
        matmul(c, y, part, columns);
        reference::matmul(expected, part, {copy, {}}, 0);
        EXPECT_EQ(count_bit_differences(y, expected), 0) << n << " columns from " << begin;
        matmul(c, y, part, columns_of({w, {}}, begin, count));
        EXPECT_EQ(count_bit_differences(y, expected), 0) << n << " columns from " << begin;
      }
    }
}

// Gradients. The forward is linear, so its f64 derivative along a direction is exact: with L = sum dy * y and y = x w^T,
// dL/dx[m, k] = L(w's column k against dy[m, .]) and so on; written here as full f64 sums in descending order.
TEST(MatmulBackward, MatchesFormulaInF64) {
  CpuContext c(2);
  for (const DType t : kFloats)
    for (const Sizes& s : kSizes) {
      const Strided dy(20, DType::f32, s.m, s.n, 2), x(21, t, s.m, s.k, 4), w(22, t, s.n, s.k, 1);
      for (const bool accumulate : {false, true}) {
        const Tensor before = random_tensor(23, DType::f32, {s.m, s.k});
        Tensor dx = random_tensor(23, DType::f32, {s.m, s.k});
        matmul_backward_input(c, dx, dy.view, {w.view, {}}, accumulate);
        for (int64_t m = 0; m < s.m; ++m)
          for (int64_t k = 0; k < s.k; ++k) {
            double sum = accumulate ? before.get(m * s.k + k) : 0.0, sizes = std::abs(sum);
            for (int64_t n = s.n - 1; n >= 0; --n) {
              const double p = value(dy.view, m, n) * value(w.view, n, k);
              sum += p;
              sizes += std::abs(p);
            }
            ASSERT_NEAR(value(dx, m, k), sum, 1.01 * static_cast<double>(s.n) * 0x1p-24 * sizes);  // as in the forward test
          }
      }
      const Tensor before = random_tensor(24, DType::f32, {s.n, s.k});
      Tensor dw = random_tensor(24, DType::f32, {s.n, s.k});
      matmul_backward_weight(c, dw, dy.view, x.view);
      for (int64_t n = 0; n < s.n; ++n)
        for (int64_t k = 0; k < s.k; ++k) {
          double sum = before.get(n * s.k + k), sizes = std::abs(sum);
          for (int64_t m = s.m - 1; m >= 0; --m) {
            const double p = value(dy.view, m, n) * value(x.view, m, k);
            sum += p;
            sizes += std::abs(p);
          }
          ASSERT_NEAR(value(dw, n, k), sum, 1.01 * static_cast<double>(s.m) * 0x1p-24 * sizes);
        }
    }
}

// The two gradients belong to the forward: moving x or w by a step changes L = sum dy * y by the gradient times the step.
TEST(MatmulBackward, IsTheDerivativeOfTheForward) {
  CpuContext c(1);
  const int64_t m = 7, n = 19, k = 23;
  Tensor x = random_tensor(25, DType::f32, {m, k}), w = random_tensor(26, DType::f32, {n, k});
  const Tensor dy = random_tensor(27, DType::f32, {m, n});
  Tensor dx(DType::f32, {m, k}), dw(DType::f32, {n, k});
  matmul_backward_input(c, dx, dy, {w, {}});
  matmul_backward_weight(c, dw, dy, x);
  const auto loss = [&] {
    double sum = 0;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j)
        for (int64_t l = 0; l < k; ++l) sum += value(dy, i, j) * value(x, i, l) * value(w, j, l);
    return sum;
  };
  // L is linear in each operand, so the difference quotient is exact up to f64 rounding of L (3059 terms below 1, step 2):
  // 3059^2 * 2^-53 < 1.1e-9; the f32 chain adds at most 19 * 2^-24 * 19.
  const double bound = 1.1e-9 + 19 * 0x1p-24 * 19;
  for (int64_t i = 0; i < x.elements(); i += 5) EXPECT_NEAR(testing::finite_difference(loss, x, i, 1.0), dx.get(i), bound);
  for (int64_t i = 0; i < w.elements(); i += 7) EXPECT_NEAR(testing::finite_difference(loss, w, i, 1.0), dw.get(i), bound);
}

TEST(MatmulBackward, BitsEqualThePlainLoops) {
  for_each_simd_target([&](const std::string& target) {
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads);
      for (const DType t : kFloats)
        for (const Sizes& s : kSizes) {
          const Strided dy(30, DType::f32, s.m, s.n, 2), x(31, t, s.m, s.k, 4), w(32, t, s.n, s.k, 1);
          for (const bool accumulate : {false, true}) {
            Strided dx(33, DType::f32, s.m, s.k, 3);
            Tensor expected = testing::to_dtype(dx.view, DType::f32);
            reference::matmul_backward_input(expected, dy.view, {w.view, {}}, accumulate);
            matmul_backward_input(c, dx.view, dy.view, {w.view, {}}, accumulate);
            ASSERT_EQ(count_bit_differences(dx.view, expected), 0) << target << " dx " << s.m << " " << s.n << " " << s.k;
            ASSERT_EQ(dx.touched(33), 0);
          }
          Strided dw(34, DType::f32, s.n, s.k, 6);
          Tensor expected = testing::to_dtype(dw.view, DType::f32);
          reference::matmul_backward_weight(expected, dy.view, x.view);
          matmul_backward_weight(c, dw.view, dy.view, x.view);
          ASSERT_EQ(count_bit_differences(dw.view, expected), 0) << target << " dw " << s.m << " " << s.n << " " << s.k;
          ASSERT_EQ(dw.touched(34), 0);
        }
    }
  });
}

// Columns of dy far apart are packed, near ones read in place; the last rows of a matrix must not be read past.
TEST(MatmulBackward, WideColumnsGiveTheSameBits) {
  for_each_simd_target([&](const std::string& target) {
    CpuContext c(2);
    for (const int64_t n : {256, 257, 300, 310})
      for (const int64_t m : {1, 70, 600}) {
        const Tensor dy = random_tensor(35, DType::f32, {m, n}), x = random_tensor(36, DType::bf16, {m, 21});
        Tensor dw = random_tensor(37, DType::f32, {n, 21}), expected = random_tensor(37, DType::f32, {n, 21});
        reference::matmul_backward_weight(expected, dy, x);
        matmul_backward_weight(c, dw, dy, x);
        ASSERT_EQ(count_bit_differences(dw, expected), 0) << target << " " << m << " rows, " << n;
      }
  });
}

// The chains of dw go on from what dw holds, so rows may come in any number of calls.
TEST(MatmulBackward, RowsInSeveralCallsGiveTheBitsOfOne) {
  CpuContext c(1);
  const Tensor dy = random_tensor(38, DType::f32, {90, 40}), x = random_tensor(39, DType::bf16, {90, 33});
  Tensor once(DType::f32, {40, 33}), twice(DType::f32, {40, 33});
  matmul_backward_weight(c, once, dy, x);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 31}, {31, 1}, {32, 58}})
    matmul_backward_weight(c, twice, dy.view().slice(first, count), x.view().slice(first, count));
  EXPECT_EQ(count_bit_differences(once, twice), 0);
}

const std::vector<std::vector<int32_t>> kOffsets = {{0, 0},
                                                    {0, 5},
                                                    {0, 0, 0, 0},
                                                    {0, 3, 3, 20, 21},
                                                    {0, 130, 131, 131, 140, 260, 262, 275, 300},
                                                    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}};

TEST(GroupedMatmul, EqualsEachExpertAlone) {
  for_each_simd_target([&](const std::string& target) {
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads);
      for (const DType t : kFloats)
        for (const auto& [n, k] : {std::pair<int64_t, int64_t>{40, 24}, {64, 32}, {17, 90}})
          for (const std::vector<int32_t>& at : kOffsets) {
            const Tensor offsets = testing::int_tensor(at);
            const int64_t experts = static_cast<int64_t>(at.size()) - 1, rows = at.back();
            const Strided x(40, t, rows, k, 8), dy(41, DType::f32, rows, n, 1);
            const Tensor w = random_tensor(42, t, {experts, n, k});
            const Tensor panels = pack(c, w);
            Strided y(43, t, rows, n, 5), dx(44, DType::f32, rows, k, 2);
            Tensor dw = random_tensor(45, DType::f32, {experts, n, k});
            Tensor y_alone(t, {rows, n}), y_plain(t, {rows, n}), dx_alone(DType::f32, {rows, k}),
                dw_alone = random_tensor(45, DType::f32, {experts, n, k});
            for (int64_t e = 0; e < experts; ++e) {
              const int64_t first = at[static_cast<size_t>(e)], count = at[static_cast<size_t>(e) + 1] - first;
              const WeightView we{w.view().at(e), panels.view().at(e)};
              matmul(c, y_alone.view().slice(first, count), x.view.slice(first, count), we);
              matmul_backward_input(c, dx_alone.view().slice(first, count), dy.view.slice(first, count), we);
              matmul_backward_weight(c, dw_alone.view().at(e), dy.view.slice(first, count), x.view.slice(first, count));
            }
            reference::grouped_matmul(y_plain, x.view, {w, {}}, offsets);
            grouped_matmul(c, y.view, x.view, {w, panels}, offsets);
            ASSERT_EQ(count_bit_differences(y.view, y_alone), 0) << target << " " << threads;
            ASSERT_EQ(count_bit_differences(y.view, y_plain), 0) << target << " " << threads;
            ASSERT_EQ(y.touched(43), 0);
            grouped_matmul(c, y_plain, x.view, {w, {}}, offsets);
            ASSERT_EQ(count_bit_differences(y_plain, y_alone), 0) << target << " without panels";

            grouped_matmul_backward_input(c, dx.view, dy.view, {w, panels}, offsets);
            ASSERT_EQ(count_bit_differences(dx.view, dx_alone), 0) << target << " " << threads;
            reference::grouped_matmul_backward_input(dx_alone, dy.view, {w, {}}, offsets, true);
            grouped_matmul_backward_input(c, dx.view, dy.view, {w, panels}, offsets, true);
            ASSERT_EQ(count_bit_differences(dx.view, dx_alone), 0) << target << " accumulated";

            grouped_matmul_backward_weight(c, dw, dy.view, x.view, offsets);
            ASSERT_EQ(count_bit_differences(dw, dw_alone), 0) << target << " " << threads;
            reference::grouped_matmul_backward_weight(dw_alone, dy.view, x.view, offsets);
            grouped_matmul_backward_weight(c, dw, dy.view, x.view, offsets);
            ASSERT_EQ(count_bit_differences(dw, dw_alone), 0) << target << " twice";
          }
    }
  });
}

TEST(Matmul, ScratchIsGivenBack) {
  CpuContext c(2);
  const Tensor x = random_tensor(50, DType::bf16, {50, 600}), w = random_tensor(51, DType::bf16, {40, 600});
  Tensor y(DType::bf16, {50, 40});
  matmul(c, y, x, {w, {}}, 300);
  EXPECT_EQ(c.workspace().used_bytes(), 0u);
  c.workspace().seal();
  matmul(c, y, x, {w, {}}, 300);
}

TEST(MatmulDeathTest, WrongArguments) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  CpuContext c(1);
  const Tensor x(DType::f32, {4, 8}), w(DType::f32, {6, 8}), w3(DType::f32, {2, 6, 8}), dy(DType::f32, {4, 6}),
      ints(DType::i32, {4, 8});
  Tensor y(DType::f32, {4, 6}), wrong(DType::f32, {4, 7}), dx(DType::f32, {4, 8}), dw(DType::f32, {6, 8}),
      dw3(DType::f32, {2, 6, 8}), half(DType::bf16, {6, 8});
  EXPECT_DEATH(matmul(c, wrong, x, {w, {}}), "x is \\[4, 8\\], w is \\[6, 8\\], y is \\[4, 7\\]");
  EXPECT_DEATH(matmul(c, y, ints, {w, {}}), "x is i32");
  EXPECT_DEATH(matmul(c, y, x, {w3, {}}), "wanted \\[N, K\\]");
  EXPECT_DEATH(matmul(c, y, x, {w, Tensor(DType::f32, {1, 8, 8})}), "wanted panels \\[1, 8, 16\\]");
  EXPECT_DEATH(matmul(c, y, x, {w, Tensor(DType::bf16, {1, 8, 16})}), "panels are bf16");
  EXPECT_DEATH(matmul(c, y, x, {w, {}}, -1), "k_segment -1");
  EXPECT_DEATH(matmul_backward_input(c, wrong, dy, {w, {}}), "dx is \\[4, 7\\]");
  EXPECT_DEATH(matmul_backward_weight(c, half, dy, x), "dw_accum is bf16");
  EXPECT_DEATH(pack_panels(c, Tensor(DType::f32, {1, 6, 16}), w), "pack_panels");
  EXPECT_DEATH(grouped_matmul(c, y, x, {w3, {}}, testing::int_tensor({0, 4})), "wanted i32 \\[3\\]");
  EXPECT_DEATH(grouped_matmul(c, y, x, {w3, {}}, testing::int_tensor({0, 2, 5})), "run from 0 to 5, wanted 0 to 4");
  EXPECT_DEATH(grouped_matmul_backward_input(c, dx, dy, {w3, {}}, testing::int_tensor({0, 6, 4})), "fall from 6 to 4");
  EXPECT_DEATH(grouped_matmul_backward_weight(c, dw, dy, x, testing::int_tensor({0, 4})), "wanted f32 \\[E, N, K\\]");
}

}  // namespace
}  // namespace lockstep
