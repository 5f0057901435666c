// The product with quantised weights. Values: against f64 with another quantiser (search over all codes), within a derived bound. Bits: vector
// kernels equal the plain loops on every SIMD target and thread count; a row's bits do not depend on the call it is in.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/matmul/matmul.h"
#include "ops/matmul/matmul_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::for_each_simd_target;
using testing::int_tensor;
using testing::random_tensor;
using testing::Tensor;

struct QuantWeight {
  Tensor codes, scales, panels, panel_scales;
  WeightView view;

  QuantWeight(Context& c, ConstTensorView w, const QuantFormat& f, int64_t row_period, int64_t col_period) {
    const int e = w.shape.rank - 2;
    const BlockGrid rows = {f.block_rows, row_period}, cols = {f.block_cols, col_period};
    const int64_t n = w.shape[e], k = w.shape[e + 1], bytes = f.codes == DType::e2m1x2 ? (k + 1) / 2 : k;
    codes = Tensor(f.codes, e == 0 ? Shape{n, bytes} : Shape{w.shape[0], n, bytes});
    scales = Tensor(DType::ue8m0, e == 0 ? Shape{rows.blocks_in(n), cols.blocks_in(k)} : Shape{w.shape[0], rows.blocks_in(n), cols.blocks_in(k)});
    quantize_by_grid(c, codes, scales, rows, cols, w);
    view = {codes, {}, scales, {}, rows, cols};
    panels = Tensor(f.codes, panel_shape(codes.view().shape));
    panel_scales = Tensor(DType::f32, panel_scale_shape(view));
    pack_panels(c, panels, codes);
    pack_panel_scales(c, panel_scales, view);
    view.panels = panels;
    view.panel_scales = panel_scales;
  }
  WeightView without_panels() const {
    WeightView v = view;
    v.panels = v.panel_scales = {};
    return v;
  }
};

// Rows of very different sizes, zeros among them.
Tensor wide_range(uint64_t seed, DType dtype, Shape shape) {
  Tensor t = random_tensor(seed, dtype, shape);
  const int64_t k = shape[shape.rank - 1];
  for (int64_t i = 0; i < t.elements(); ++i) t.set(i, t.get(i) * std::ldexp(1.0, static_cast<int>(i / k * 7 % 24) - 12) * (i % 5 == 0 ? 0.01 : i % 11 == 0 ? 0.0 : 1.0));
  return t;
}

struct Case {
  int64_t m, n, k;
  bool fp4 = false;
  int64_t row_period = 0, col_period = 0, k_segment = 0;
};
const std::vector<Case> kCases = {{0, 5, 3},
                                  {1, 1, 1},
                                  {1, 16, 128},
                                  {1, 300, 700},
                                  {1, 130, 33, true},
                                  {1, 300, 1100, true},
                                  {2, 200, 129},
                                  {5, 24, 127, true},
                                  {7, 33, 256},
                                  {12, 32, 640},
                                  {13, 31, 96, true},
                                  {13, 200, 100, false, 24},
                                  {25, 40, 96, false, 0, 24},
                                  {30, 70, 96, false, 0, 24, 24},
                                  {3, 20, 510, false, 0, 255, 255},
                                  {14, 20, 1280, false, 10, 640, 640},
                                  {9, 20, 200, false, 0, 5, 5},
                                  {101, 600, 300},
                                  {200, 70, 1030, true}};

std::string name(const Case& s) { return fmt::format("{} x {} x {}{} periods {} {} segment {}", s.m, s.n, s.k, s.fp4 ? " fp4" : "", s.row_period, s.col_period, s.k_segment); }

// ceil(log2(amax / largest)) and the nearest code by trying all; ties to the even code.
double nearest(double x, double amax, const std::vector<double>& codes) {
  const double scale = std::exp2(std::ceil(std::log2(amax / codes.back())));
  size_t best = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    const double error = std::abs(std::abs(x) / scale - codes[i]), so_far = std::abs(std::abs(x) / scale - codes[best]);
    if (error < so_far || (error == so_far && i % 2 == 0)) best = i;
  }
  return std::copysign(codes[best] * scale, x);
}
std::vector<double> e4m3_codes() {
  std::vector<double> codes;
  for (int i = 0; i < 127; ++i) codes.push_back(i < 8 ? std::ldexp(i, -9) : std::ldexp(8 + i % 8, i / 8 - 10));
  return codes;
}
const std::vector<double> kE2m1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

// Blocks of one dimension as (begin, end), in other words than BlockGrid's.
std::vector<std::pair<int64_t, int64_t>> blocks_of(int64_t n, int64_t block, int64_t period) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (int64_t p = 0; p < n; p += period == 0 ? n : period)
    for (int64_t b = p, end = period == 0 ? n : std::min(n, p + period); b < end; b += block) out.emplace_back(b, std::min(end, b + block));
  return out;
}

std::vector<double> quantized(ConstTensorView x, int64_t block_rows, int64_t block_cols, int64_t row_period, int64_t col_period, double floor,
                              const std::vector<double>& codes) {
  const int64_t k = x.dim(1);
  const auto at = [&](int64_t i, int64_t j) { return static_cast<double>(x.dtype == DType::f32 ? x.row<float>(i)[j] : to_f32(x.row<bf16>(i)[j])); };
  std::vector<double> out(static_cast<size_t>(x.rows() * k));
  for (const auto& [r0, r1] : blocks_of(x.rows(), block_rows, row_period))
    for (const auto& [c0, c1] : blocks_of(k, block_cols, col_period)) {
      double amax = floor;
      for (int64_t i = r0; i < r1; ++i)
        for (int64_t j = c0; j < c1; ++j) amax = std::max(amax, std::abs(at(i, j)));
      for (int64_t i = r0; i < r1; ++i)
        for (int64_t j = c0; j < c1; ++j) out[static_cast<size_t>(i * k + j)] = amax == 0 ? 0 : nearest(at(i, j), amax, codes);
    }
  return out;
}

TEST(QuantizedMatmul, MatchesFormulaInF64) {
  CpuContext c(2);
  const std::vector<double> e4m3 = e4m3_codes();
  for (const DType t : {DType::f32, DType::bf16})
    for (const Case& s : kCases) {
      if (s.m * s.n * s.k > 10'000'000) continue;
      const Tensor x = wide_range(1, t, {s.m, s.k}), w = wide_range(2, DType::f32, {s.n, s.k});
      const QuantWeight q(c, w, s.fp4 ? kFp4 : kFp8Weight, s.row_period, s.col_period);
      Tensor y(DType::f32, {s.m, s.n}), y16(DType::bf16, {s.m, s.n});
      matmul(c, y, x, q.view, s.k_segment);
      matmul(c, y16, x, q.view, s.k_segment);
      const std::vector<double> xq = quantized(x, 1, 128, 0, s.col_period, 1e-4f, e4m3);
      const std::vector<double> wq = s.fp4 ? quantized(w, 1, 32, s.row_period, 0, 0, kE2m1) : quantized(w, 128, 128, s.row_period, s.col_period, 0, e4m3);
      for (int64_t i = 0; i < s.m; ++i)
        for (int64_t j = 0; j < s.n; ++j) {
          double sum = 0, sizes = 0;
          for (int64_t l = 0; l < s.k; ++l) {
            const double p = xq[static_cast<size_t>(i * s.k + l)] * wq[static_cast<size_t>(j * s.k + l)];
            sum += p;
            sizes += std::abs(p);
          }
          // A term passes at most 128 roundings in its chain, then one a block of columns and one a segment.
          const auto promotions = static_cast<double>(q.view.col_grid.blocks_in(s.k) + (s.k_segment > 0 ? s.k / s.k_segment : 0));
          const double bound = 1.01 * (128 + promotions) * 0x1p-24 * sizes;
          ASSERT_NEAR(y.ptr<float>()[i * s.n + j], sum, bound) << name(s) << " " << dtype_name(t);
          ASSERT_EQ(y16.ptr<bf16>()[i * s.n + j].bits, to_bf16(y.ptr<float>()[i * s.n + j]).bits);
        }
    }
}

TEST(QuantizedMatmul, BitsEqualThePlainLoops) {
  for_each_simd_target([&](const std::string& target) {
    for (const int threads : {1, 2, 3}) {
      CpuContext c(threads);
      for (const Case& s : kCases) {
        const DType xt = s.m % 2 == 0 ? DType::f32 : DType::bf16, yt = s.n % 2 == 0 ? DType::bf16 : DType::f32;
        const Tensor wide = wide_range(3, xt, {s.m, s.k + 5}), w = wide_range(4, DType::f32, {s.n, s.k});
        const ConstTensorView x = wide.view().cols(0, s.k);
        const QuantWeight q(c, w, s.fp4 ? kFp4 : kFp8Weight, s.row_period, s.col_period);
        Tensor expected(yt, {s.m, s.n}), storage = random_tensor(5, yt, {s.m, s.n + 3}), bare(yt, {s.m, s.n});
        reference::quantized_matmul(expected, x, q.view, s.k_segment);
        matmul(c, storage.view().cols(0, s.n), x, q.view, s.k_segment);
        ASSERT_EQ(count_bit_differences(storage.view().cols(0, s.n), expected), 0) << target << " " << threads << " threads " << name(s);
        ASSERT_EQ(count_bit_differences(storage.view().cols(s.n, 3), random_tensor(5, yt, {s.m, s.n + 3}).view().cols(s.n, 3)), 0) << target;
        matmul(c, bare, x, q.without_panels(), s.k_segment);
        ASSERT_EQ(count_bit_differences(bare, expected), 0) << target << " without panels " << name(s);
      }
    }
  });
}

TEST(QuantizedMatmul, ARowsBitsDoNotDependOnTheCall) {
  CpuContext c(2), one(1);
  Philox rng(6, RngPurpose::test);
  for (const bool fp4 : {false, true})
    for (int draw = 0; draw < 20; ++draw) {
      const int64_t m = 1 + rng.below(70), n = 1 + rng.below(90), k = 1 + rng.below(400);
      const Tensor x = wide_range(7, DType::bf16, {m, k}), w = wide_range(8, DType::f32, {n, k});
      const QuantWeight q(c, w, fp4 ? kFp4 : kFp8Weight, 0, 0);
      Tensor all(DType::bf16, {m, n}), pieces(DType::bf16, {m, n});
      matmul(c, all, x, q.view);
      for (int64_t at = 0, count = 0; at < m; at += count) {
        count = std::min<int64_t>(m - at, 1 + rng.below(20));
        matmul(one, pieces.view().slice(at, count), x.view().slice(at, count), q.view);
      }
      ASSERT_EQ(count_bit_differences(all, pieces), 0) << m << " " << n << " " << k;
    }
}

TEST(QuantizedMatmul, GroupsOfColumnsGiveTheSegmentsOfTheWhole) {
  CpuContext c(2);
  for (const int64_t group : {5, 64, 128, 200}) {
    const int64_t m = 9, n = 40, groups = 3;
    const Tensor x = wide_range(9, DType::bf16, {m, groups * group}), w = wide_range(10, DType::f32, {n, groups * group});
    const QuantWeight q(c, w, kFp8Weight, 0, group);
    Tensor whole(DType::f32, {m, n}), sum(DType::f32, {m, n});
    matmul(c, whole, x, q.view, group);
    for (int64_t g = 0; g < groups; ++g) {
      Tensor part(DType::f32, {m, n});
      matmul(c, part, x.view().cols(g * group, group), columns_of(q.view, g * group, group));
      for (int64_t i = 0; i < sum.elements(); ++i) sum.ptr<float>()[i] += part.ptr<float>()[i];
      // What another rank quantises on its own has the same codes.
      Tensor own(DType::f32, {n, group}), own_part(DType::f32, {m, n});
      for (int64_t i = 0; i < own.elements(); ++i) own.set(i, w.get(i / group * groups * group + g * group + i % group));
      const QuantWeight alone(c, own, kFp8Weight, 0, group);
      matmul(c, own_part, x.view().cols(g * group, group), alone.view);
      ASSERT_EQ(count_bit_differences(own_part, part), 0);
    }
    ASSERT_EQ(count_bit_differences(whole, sum), 0) << group;
  }
}

TEST(QuantizedMatmul, GroupedRowsHaveTheBitsOfTheirExpertAlone) {
  for_each_simd_target([&](const std::string& target) {
    CpuContext c(3);
    for (const bool fp4 : {false, true}) {
      const int64_t E = 5, n = 37, k = 150;
      const Tensor offsets = int_tensor({0, 1, 1, 20, 23, 90});
      const Tensor x = wide_range(11, DType::bf16, {90, k}), w = wide_range(12, DType::f32, {E, n, k});
      const QuantWeight q(c, w, fp4 ? kFp4 : kFp8Weight, n, 0);
      Tensor y(DType::bf16, {90, n});
      grouped_matmul(c, y, x, q.view, offsets);
      for (int64_t e = 0; e < E; ++e) {
        const int32_t first = offsets.ptr<int32_t>()[e], rows = offsets.ptr<int32_t>()[e + 1] - first;
        Tensor expected(DType::bf16, {rows, n});
        const QuantWeight alone(c, w.view().at(e), fp4 ? kFp4 : kFp8Weight, 0, 0);
        reference::quantized_matmul(expected, x.view().slice(first, rows), alone.view, 0);
        ASSERT_EQ(count_bit_differences(y.view().slice(first, rows), expected), 0) << target << " expert " << e;
      }
    }
  });
}

// Rows of the unit matrix pick single numbers out of a product: 1 is a power of two, which E4M3 has.
TEST(QuantizedMatmul, UnpackedPanelsAreWhatTheProductSees) {
  CpuContext c(2);
  for (const DType t : {DType::f32, DType::bf16, DType::e4m3, DType::e2m1x2})
    for (const auto& [n, k, period] : {std::tuple{37, 150, 0}, {20, 129, 10}, {16, 300, 0}}) {
      SCOPED_TRACE(fmt::format("{} {} x {}", dtype_name(t), n, k));
      const bool codes = t == DType::e4m3 || t == DType::e2m1x2;
      const Tensor w = wide_range(21, codes ? DType::f32 : t, {3, n, k});
      Tensor panels(t, panel_shape(w.view().shape));
      WeightView view{w, panels};
      std::optional<QuantWeight> q;
      if (codes) {
        view = q.emplace(c, w, t == DType::e4m3 ? kFp8Weight : kFp4, n, t == DType::e4m3 ? period : 0).view;
      } else {
        pack_panels(c, panels, w);
      }
      Tensor unpacked(DType::f32, {3, n, k}), unit(DType::bf16, {k, k}), seen(DType::f32, {k, n});
      unpack_panels(c, unpacked, view);
      for (int64_t i = 0; i < k; ++i) unit.set(i * k + i, 1);
      for (int64_t e = 0; e < 3; ++e) {
        matmul(c, seen, unit, view.at(e), t == DType::e4m3 ? period : 0);
        for (int64_t i = 0; i < n; ++i)
          for (int64_t j = 0; j < k; ++j) ASSERT_EQ(unpacked.view().at(e).row<float>(i)[j], seen.view().row<float>(j)[i]) << e << " " << i << " " << j;
      }
    }
}

// The straight-through gradient is the plain one with the numbers that the codes stand for.
TEST(QuantizedMatmul, InputGradientUsesTheDequantisedWeights) {
  for (const int threads : {1, 3}) {
    CpuContext c(threads);
    for (const Case& s : {Case{7, 40, 96, false, 10, 24, 24}, Case{30, 33, 200}, Case{5, 20, 75, true}}) {
      const Tensor dy = random_tensor(13, DType::f32, {s.m, s.n}), w = wide_range(14, DType::f32, {s.n, s.k});
      const QuantWeight q(c, w, s.fp4 ? kFp4 : kFp8Weight, s.row_period, s.col_period);
      const std::vector<double> wq = s.fp4 ? quantized(w, 1, 32, s.row_period, 0, 0, kE2m1) : quantized(w, 128, 128, s.row_period, s.col_period, 0, e4m3_codes());
      Tensor plain(DType::f32, {s.n, s.k}), dx = random_tensor(15, DType::f32, {s.m, s.k}), expected = random_tensor(15, DType::f32, {s.m, s.k});
      for (int64_t i = 0; i < plain.elements(); ++i) plain.set(i, wq[static_cast<size_t>(i)]);
      matmul_backward_input(c, dx, dy, q.view, true);
      matmul_backward_input(c, expected, dy, {plain, {}}, true);
      ASSERT_EQ(count_bit_differences(dx, expected), 0) << name(s);
    }
    const Tensor offsets = int_tensor({0, 3, 3, 10}), dy = random_tensor(16, DType::f32, {10, 20}), w = wide_range(17, DType::f32, {3, 20, 70});
    const QuantWeight q(c, w, kFp4, 20, 0);
    Tensor dx(DType::f32, {10, 70});
    grouped_matmul_backward_input(c, dx, dy, q.view, offsets);
    for (int64_t e = 0; e < 3; ++e) {
      const int32_t first = offsets.ptr<int32_t>()[e], rows = offsets.ptr<int32_t>()[e + 1] - first;
      Tensor expected(DType::f32, {rows, 70});
      matmul_backward_input(c, expected, dy.view().slice(first, rows), q.view.at(e));
      ASSERT_EQ(count_bit_differences(dx.view().slice(first, rows), expected), 0);
    }
  }
}

TEST(QuantizedMatmul, NotANumberIsNotLost) {
  for_each_simd_target([&](const std::string& target) {
    CpuContext c(1);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const int64_t m : {1, 30}) {
      Tensor x = random_tensor(18, DType::f32, {m, 200}), w = random_tensor(19, DType::f32, {20, 200});
      w.set(3 * 200 + 150, nan);
      x.set((m - 1) * 200 + 5, nan);
      for (const bool fp4 : {false, true}) {
        const QuantWeight q(c, w, fp4 ? kFp4 : kFp8Weight, 0, 0);
        Tensor y(DType::f32, {m, 20});
        matmul(c, y, x, q.view);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < 20; ++j) ASSERT_EQ(std::isnan(y.ptr<float>()[i * 20 + j]), i == m - 1 || j == 3) << target << " " << i << " " << j;
      }
    }
  });
}

TEST(QuantizedMatmulDeath, WrongShapes) {
  CpuContext c(1);
  const Tensor x(DType::bf16, {2, 64}), w(DType::f32, {16, 64});
  QuantWeight q(c, w, kFp8Weight, 0, 32);
  Tensor y(DType::f32, {2, 16}), wide(DType::bf16, {2, 65});
  EXPECT_DEATH(matmul(c, y, wide, q.view), "for 65 columns");
  EXPECT_DEATH(matmul(c, y, x, q.view, 16), "k_segment 16, blocks begin anew every 32");
  EXPECT_DEATH(columns_of(q.view, 16, 32), "blocks begin every 32");
  q.view.scales = q.scales.view().cols(0, 1);
  EXPECT_DEATH(matmul(c, y, x, q.view), "wanted ue8m0 \\[1, 2\\]");
}

}  // namespace
}  // namespace lockstep
