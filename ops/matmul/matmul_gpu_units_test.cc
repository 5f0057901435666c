// The products and gradients on matrix units (matmul_gpu.h): Hopper's and CDNA4's on the device, CDNA4's as the executor's waves of 64 run them. Values against f64,
// over odd shapes and strides, with experts, segments and accumulation; rows of any other M; E4M3 under the executor against the CPU's bits, whose order it follows.
// On a device also at the model's sizes, where tiles are large and leave by other ways.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/device.h"
#include "ops/gpu_testing.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/measure.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::int_tensor;
using testing::random_tensor;
using testing::Tensor;

const std::vector<int32_t> kOffsets = {0, 0, 5, 73, 73, 140, 141};
constexpr int64_t kExperts = 6, kRows = 141;

bool emulated() { return device_info().emulated; }
int64_t expert_of(const std::vector<int32_t>& offsets, int64_t row) { return std::upper_bound(offsets.begin(), offsets.end(), row) - offsets.begin() - 1; }
int64_t expert_of(int64_t row) { return expert_of(kOffsets, row); }
float at(ConstTensorView v, int64_t row, int64_t column) { return to_f32(v.ptr<bf16>()[row * v.row_stride + column]); }

// Every element of `got`, in every row_step-th row, is there + the sum of terms(i, j, add), but for one rounding of 2^-24 an addition, 2^-23 where units cut
// instead; bf16 rounds once more.
template <typename Terms>
void expect_sums(ConstTensorView got, ConstTensorView there, const Terms& terms, int64_t row_step = 1) {
  const double addition = emulated() ? 0x1p-24 : 0x1p-23;
  double worst = 0;
  for (int64_t i = 0; i < got.dim(0); i += row_step)
    for (int64_t j = 0; j < got.dim(1); ++j) {
      double sum = there.data == nullptr ? 0.0 : static_cast<double>(there.row<float>(i)[j]), size = std::fabs(sum);
      int count = 2;
      terms(i, j, [&](float a, float b) {
        const double term = static_cast<double>(a) * static_cast<double>(b);
        sum += term;
        size += std::fabs(term);
        ++count;
      });
      const bool f32 = got.dtype == DType::f32;
      const double value = f32 ? got.row<float>(i)[j] : to_f32(got.row<bf16>(i)[j]), difference = std::fabs(value - sum);
      const double bound = size * count * addition + (f32 ? 0 : std::fabs(sum) * 0x1p-8);
      if (!(difference <= 0)) worst = std::isnan(difference) ? INFINITY : std::max(worst, difference / bound);
    }
  EXPECT_LE(worst, 1) << got.shape.str();
}

// The same of E4M3 on Hopper: the unit adds 32 products and the sum so far, each aligned to the largest and cut 13 bits below it; then come f32 sums over blocks.
// The largest of a block of 128 columns is at most the sum so far, which its products bound.
template <typename Terms>
void expect_sums_of_cut_products(ConstTensorView got, int64_t k, const Terms& terms) {
  const double blocks = static_cast<double>(num_blocks(k, 128));
  double worst = 0;
  for (int64_t i = 0; i < got.dim(0); ++i)
    for (int64_t j = 0; j < got.dim(1); ++j) {
      double sum = 0, bound = 0, largest = 0;
      int64_t l = 0;
      terms(i, j, [&](float a, float b) {
        const double term = static_cast<double>(a) * static_cast<double>(b);
        sum += term;
        largest = l % 128 == 0 ? std::fabs(term) : largest + std::fabs(term);
        if (l % 32 == 31 || l + 1 == k) bound += 33 * 0x1p-13 * largest;
        bound += std::fabs(term) * (blocks + 2) * 0x1p-24;
        ++l;
      });
      const double difference = std::fabs(got.row<float>(i)[j] - sum);
      if (!(difference <= 0)) worst = std::isnan(difference) ? INFINITY : std::max(worst, difference / bound);
    }
  EXPECT_LE(worst, 1) << got.shape.str();
}

struct Shapes {
  int64_t m, n, k;
};
// Those, and on a device others.
std::vector<Shapes> shapes(std::vector<Shapes> small, std::initializer_list<Shapes> more) {
  if (!emulated()) small.insert(small.end(), more);
  return small;
}

gpu::MatmulProblem problem(TensorView y, ConstTensorView x, ConstTensorView w) {
  return {.m = x.dim(0), .n = y.dim(1), .k = x.dim(1), .x = x.data, .w = w.data, .y = y.data, .x_stride = x.row_stride, .w_stride = w.row_stride,
          .y_stride = y.row_stride, .y_is_f32 = y.dtype == DType::f32};
}

TEST(MatmulUnits, ValuesAreSums) {
  testing::Gpu gpu;
  for (const auto& [m, n, k] : shapes({{1, 1, 8}, {3, 70, 40}, {70, 65, 200}, {33, 129, 64}}, {{130, 257, 200}, {64, 300, 1032}, {200, 70, 4096}}))
    for (const bool f32 : {false, true})
      for (const bool accumulate : {false, true})
        for (const int64_t k_segment : {0, 64, 512}) {
          if (accumulate && !f32) continue;
          const int64_t pitch = (k + 15) / 8 * 8;
          const Tensor x = random_tensor(1, DType::bf16, {m, pitch}), w = random_tensor(2, DType::bf16, {n, pitch}), y = random_tensor(3, f32 ? DType::f32 : DType::bf16, {m, n + 3});
          const TensorView gx = gpu.put(x), gw = gpu.put(w), gy = gpu.put(y);
          gpu::MatmulProblem p = problem(gy.cols(1, n), gx.cols(0, k), gw.cols(0, k));
          p.accumulate = accumulate;
          p.k_segment = k_segment;
          gpu::matmul_bf16(p, gpu.context().stream);
          const Tensor got = gpu.get(gy);
          expect_sums(got.view().cols(1, n), accumulate ? ConstTensorView(y.view().cols(1, n)) : ConstTensorView(), [&, k = k](int64_t i, int64_t j, const auto& add) {
            for (int64_t l = 0; l < k; ++l) add(at(x, i, l), at(w, j, l));
          });
          for (int64_t i = 0; i < m; ++i) {  // what lies beside stays
            EXPECT_EQ(got.get(i * (n + 3)), y.get(i * (n + 3)));
            EXPECT_EQ(got.get(i * (n + 3) + n + 1), y.get(i * (n + 3) + n + 1));
          }
        }
}

TEST(MatmulUnits, ExpertsHaveTheirOwnRows) {
  testing::Gpu gpu;
  const int64_t n = 72, k = 136;
  const Tensor x = random_tensor(1, DType::bf16, {kRows, k}), w = random_tensor(2, DType::bf16, {kExperts, n, k}), y(DType::f32, {kRows, n});
  const TensorView gx = gpu.put(x), gw = gpu.put(w), gy = gpu.put(y), offsets = gpu.put(int_tensor(kOffsets));
  gpu::MatmulProblem p = problem(gy, gx, gw);
  p.w_stride = k;
  p.offsets = offsets.ptr<int32_t>();
  p.experts = kExperts;
  gpu::matmul_bf16(p, gpu.context().stream);
  const ConstTensorView flat = w.view().reshape({kExperts * n, k});
  const Tensor all = gpu.get(gy);
  expect_sums(all, {}, [&](int64_t i, int64_t j, const auto& add) {
    for (int64_t l = 0; l < k; ++l) add(at(x, i, l), at(flat, expert_of(i) * n + j, l));
  });
  // A row has the bits of a product with its expert alone.
  for (const int64_t e : {1, 2, 5}) {
    const int64_t first = kOffsets[static_cast<size_t>(e)], rows = kOffsets[static_cast<size_t>(e) + 1] - first;
    const TensorView part = gpu.make(DType::f32, {rows, n});
    gpu::MatmulProblem alone = problem(part, gx.slice(first, rows), gw);
    alone.w = gw.ptr<bf16>() + e * n * k;
    alone.w_stride = k;
    gpu::matmul_bf16(alone, gpu.context().stream);
    EXPECT_EQ(count_bit_differences(gpu.get(part), all.view().slice(first, rows)), 0);
  }
}

TEST(MatmulUnits, GradientsAreSums) {
  testing::Gpu gpu;
  const TensorView offsets = gpu.put(int_tensor(kOffsets));
  for (const auto& [m, n, k] : shapes({{3, 8, 16}, {kRows, 72, 40}, {kRows, 136, 72}}, {{kRows, 520, 1032}}))
    for (const bool grouped : {false, true})
      for (const bool accumulate : {false, true}) {
        if (grouped && m != kRows) continue;
        const int64_t experts = grouped ? kExperts : 1;
        const Tensor dy = random_tensor(1, DType::bf16, {m, n}), x = random_tensor(2, DType::bf16, {m, k}), w = random_tensor(3, DType::bf16, {experts * n, k}),
                     dx = random_tensor(4, DType::f32, {m, k}), dw = random_tensor(5, DType::f32, {experts * n, k});
        const TensorView gdy = gpu.put(dy), gx = gpu.put(x), gw = gpu.put(w), gdx = gpu.put(dx), gdw = gpu.put(dw);
        gpu::MatmulBackwardProblem p = {.m = m, .n = n, .k = k, .dy = gdy.data, .other = gw.data, .grad = gdx.ptr<float>(), .dy_stride = n, .other_stride = k,
                                        .grad_stride = k, .accumulate = accumulate, .offsets = grouped ? offsets.ptr<int32_t>() : nullptr, .experts = experts};
        gpu::matmul_backward_input_bf16(p, gpu.context().stream);
        expect_sums(gpu.get(gdx), accumulate ? ConstTensorView(dx) : ConstTensorView(), [&, n = n](int64_t i, int64_t j, const auto& add) {
          const int64_t e = grouped ? expert_of(i) : 0;
          for (int64_t l = 0; l < n; ++l) add(at(dy, i, l), at(w, e * n + l, j));
        });
        p.other = gx.data;
        p.grad = gdw.ptr<float>();
        gpu::matmul_backward_weight_bf16(p, gpu.context().stream);
        expect_sums(gpu.get(gdw), dw, [&, m = m, n = n](int64_t i, int64_t j, const auto& add) {
          const int64_t first = grouped ? kOffsets[static_cast<size_t>(i / n)] : 0, last = grouped ? kOffsets[static_cast<size_t>(i / n) + 1] : m;
          for (int64_t l = first; l < last; ++l) add(at(dy, l, i % n), at(x, l, j));
        });
      }
}

// Small tiles and large ones, whatever M.
TEST(MatmulUnits, RowsAreThoseOfAnyM) {
  testing::Gpu gpu;
  const int64_t most = 129, k = 24;
  const TensorView x = gpu.put(random_tensor(1, DType::bf16, {most, k}));
  for (const int64_t n : {128 * 130, 128 * 256}) {  // tiles of 128 x 128, of 256 x 128
    const TensorView w = gpu.put(random_tensor(2, DType::bf16, {n, k}));
    const auto run = [&](int64_t first, int64_t m) {
      const TensorView y = gpu.make(DType::f32, {m, n});
      gpu::matmul_bf16(problem(y, x.slice(first, m), w), gpu.context().stream);
      return gpu.get(y);
    };
    const Tensor whole = run(0, most);
    for (const int64_t m : {1, 3}) EXPECT_EQ(count_bit_differences(run(101, m), whole.view().slice(101, m)), 0) << m;
  }
}

TEST(MatmulUnits, E4m3) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const auto& [m, n, k] : shapes({{1, 1, 16}, {5, 70, 128}, {66, 130, 400}}, {{200, 257, 208}, {200, 300, 1152}, {100, 130, 4096}}))
    for (const int64_t k_segment : {0, 128}) {
      const int64_t blocks = (k + 127) / 128;
      const Tensor x = random_tensor(1, DType::bf16, {m, k}), dense = random_tensor(2, DType::bf16, {n, k}), codes(DType::e4m3, {n, k}),
                   y(DType::f32, {m, n});
      const BlockGrid rows = {128, 0}, columns = {128, k_segment};
      const Tensor scales(DType::ue8m0, {rows.blocks_in(n), columns.blocks_in(k)});
      quantize_by_grid(cpu, codes, scales, rows, columns, dense);
      matmul(cpu, y, x, {.rows = codes, .panels = {}, .scales = scales, .row_grid = rows, .col_grid = columns}, k_segment);

      const TensorView gx = gpu.put(x), gcodes = gpu.put(codes), gscales = gpu.put(scales), gy = gpu.make(DType::f32, {m, n});
      const TensorView x_codes = gpu.make(DType::e4m3, {m, k}), x_scales = gpu.make(DType::f32, {m, blocks});
      gpu::quantize_rows(gpu, x_codes, x_scales, gx);
      gpu::Fp8Problem p = {.codes = problem(gy, x_codes, gcodes), .x_scale = x_scales.ptr<float>(), .w_scale = static_cast<const uint8_t*>(gscales.data),
                           .x_scale_stride = blocks, .w_scale_stride = blocks};
      p.codes.k_segment = k_segment;
      gpu::matmul_fp8(p, gpu.context().stream);
      const Tensor sx = gpu.get(x_scales), cx = gpu.get(x_codes), got = gpu.get(gy);
      const auto value = [](ConstTensorView codes, int64_t row, int64_t column, float scale) { return to_f32(codes.row<e4m3>(row)[column]) * scale; };
      const auto terms = [&, k = k](int64_t i, int64_t j, const auto& add) {
        for (int64_t l = 0; l < k; ++l)
          add(value(cx, i, l, sx.view().row<float>(i)[l / 128]), value(codes, j, l, to_f32(scales.view().row<ue8m0>(j / 128)[l / 128])));
      };
      if (emulated()) {
        expect_sums(got, {}, terms);
        EXPECT_EQ(count_bit_differences(got, y), 0) << m << ' ' << n << ' ' << k << ' ' << k_segment;
      } else {
        expect_sums_of_cut_products(got, k, terms);
      }
    }
}

// Large tiles on their way out: sums in some rows; bf16 are the f32 rounded.
TEST(MatmulUnitsOfADevice, LargeTiles) {
  if (emulated()) GTEST_SKIP() << "no GPU";
  testing::Gpu gpu;
  Operands operands(gpu.context());
  void* const stream = gpu.context().stream;
  const int64_t m = 1000, n = 8200, k = 520, experts = 4;
  const std::vector<int32_t> offsets = {0, 300, 300, 729, 1000};
  const TensorView at_offsets = operands.ints(offsets, {experts + 1}), x = operands.random(DType::bf16, {m, k}), w = operands.random(DType::bf16, {experts * n, k}),
                   dy = operands.random(DType::bf16, {m, n});
  const Tensor hx = gpu.get(x), hw = gpu.get(w), hdy = gpu.get(dy);
  for (const bool grouped : {false, true})
    for (const int64_t k_segment : {0, 128}) {
      const TensorView y = operands.make(DType::f32, {m, n}), rounded = operands.make(DType::bf16, {m, n});
      gpu::MatmulProblem p = problem(y, x, w);
      p.k_segment = k_segment;
      p.offsets = grouped ? at_offsets.ptr<int32_t>() : nullptr;
      p.experts = grouped ? experts : 1;
      gpu::matmul_bf16(p, stream);
      p.y = rounded.data;
      p.y_is_f32 = false;
      gpu::matmul_bf16(p, stream);
      const Tensor hy = gpu.get(y);
      EXPECT_EQ(count_bit_differences(gpu.get(rounded), testing::to_dtype(hy, DType::bf16)), 0);
      expect_sums(
          hy, {},
          [&](int64_t i, int64_t j, const auto& add) {
            const int64_t e = grouped ? expert_of(offsets, i) : 0;
            for (int64_t l = 0; l < k; ++l) add(at(hx, i, l), at(hw, e * n + j, l));
          },
          29);
    }
  const TensorView dw = operands.zeros(DType::f32, {n, k});
  gpu::matmul_backward_weight_bf16({.m = m, .n = n, .k = k, .dy = dy.data, .other = x.data, .grad = dw.ptr<float>(), .dy_stride = n, .other_stride = k, .grad_stride = k}, stream);
  expect_sums(
      gpu.get(dw), {},
      [&](int64_t i, int64_t j, const auto& add) {
        for (int64_t l = 0; l < m; ++l) add(at(hdy, l, i), at(hx, l, j));
      },
      67);
  // dx [m, n] of dy [m, k], which is x here, and w [k, n]: experts' matrices lie k * n apart.
  const TensorView dx = operands.make(DType::f32, {m, n});
  gpu::matmul_backward_input_bf16({.m = m, .n = k, .k = n, .dy = x.data, .other = w.data, .grad = dx.ptr<float>(), .dy_stride = k, .other_stride = n, .grad_stride = n,
                                   .offsets = at_offsets.ptr<int32_t>(), .experts = experts},
                                  stream);
  const ConstTensorView across = hw.view().reshape({experts * k, n});
  expect_sums(
      gpu.get(dx), {},
      [&](int64_t i, int64_t j, const auto& add) {
        for (int64_t l = 0; l < k; ++l) add(at(hx, i, l), at(across, expert_of(offsets, i) * k + l, j));
      },
      29);
}

constexpr int64_t kMost = 8192, kWide = 4096, kManyExperts = 24;  // rows, columns both ways

// run(first, m, y): rows [first, first + m) of kMost into y [m, kWide] bf16. They have the bits of the call with all rows.
template <typename Run>
void expect_rows_of_any_m(const char* what, testing::Gpu& gpu, Operands& operands, const Run& run) {
  const ArenaScope scope(operands.arena());
  const auto rows = [&](int64_t first, int64_t m) {
    const ArenaScope made(operands.arena());
    const TensorView y = operands.make(DType::bf16, {m, kWide});
    run(first, m, y);
    return gpu.get(y);
  };
  const Tensor whole = rows(0, kMost);
  for (const int64_t m : {1, 3, 8, 64, 257, 2048, 8192})
    for (const int64_t first : {int64_t{0}, std::min<int64_t>(kMost - m, 1001)})
      EXPECT_EQ(count_bit_differences(rows(first, m), whole.view().slice(first, m)), 0) << what << ", " << m << " rows from " << first;
}
// Offsets of rows [first, first + m) when expert e has rows [e * kMost / kManyExperts, (e + 1) * kMost / kManyExperts).
TensorView part_of_offsets(Operands& operands, int64_t first, int64_t m) {
  std::vector<int32_t> v;
  for (int64_t e = 0; e <= kManyExperts; ++e) v.push_back(static_cast<int32_t>(std::clamp(e * kMost / kManyExperts, first, first + m) - first));
  return operands.ints(v, {kManyExperts + 1});
}

TEST(MatmulUnitsOfADevice, RowsOfAnyM) {
  if (emulated()) GTEST_SKIP() << "no GPU";
  testing::Gpu gpu;
  Operands operands(gpu.context());
  void* const stream = gpu.context().stream;
  const TensorView x = operands.random(DType::bf16, {kMost, kWide}), w = operands.random(DType::bf16, {kManyExperts * kWide, kWide});
  for (const int64_t k_segment : {0, 512})
    expect_rows_of_any_m("bf16", gpu, operands, [&](int64_t first, int64_t m, TensorView y) {
      gpu::MatmulProblem p = problem(y, x.slice(first, m), w);
      p.k_segment = k_segment;
      gpu::matmul_bf16(p, stream);
    });
  const auto of_experts = [&](int64_t first, int64_t m, TensorView y) {
    gpu::MatmulProblem p = problem(y, x.slice(first, m), w);
    p.offsets = part_of_offsets(operands, first, m).ptr<int32_t>();
    p.experts = kManyExperts;
    gpu::matmul_bf16(p, stream);
  };
  expect_rows_of_any_m("experts in bf16", gpu, operands, of_experts);
  const TensorView together = operands.make(DType::bf16, {kMost, kWide}), alone = operands.make(DType::bf16, {kMost, kWide});
  of_experts(0, kMost, together);
  for (int64_t e = 0; e < kManyExperts; ++e) {
    const int64_t first = e * kMost / kManyExperts, rows = (e + 1) * kMost / kManyExperts - first;
    gpu::matmul_bf16(problem(alone.slice(first, rows), x.slice(first, rows), w.slice(e * kWide, kWide)), stream);
  }
  EXPECT_EQ(count_bit_differences(gpu.get(together), gpu.get(alone)), 0) << "each expert alone";

  const auto input = [&](int64_t first, int64_t m) {
    const TensorView dx = operands.make(DType::f32, {m, kWide});
    gpu::matmul_backward_input_bf16({.m = m, .n = kWide, .k = kWide, .dy = x.slice(first, m).data, .other = w.data, .grad = dx.ptr<float>(), .dy_stride = kWide, .other_stride = kWide,
                                     .grad_stride = kWide},
                                    stream);
    return gpu.get(dx);
  };
  const Tensor whole = input(0, kMost);
  for (const int64_t m : {1, 3, 64, 257, 2048}) EXPECT_EQ(count_bit_differences(input(1001, m), whole.view().slice(1001, m)), 0) << "dx, " << m << " rows";
}

TEST(MatmulUnitsOfADevice, RowsOfAnyMInE4m3) {
  if (emulated()) GTEST_SKIP() << "no GPU";
  testing::Gpu gpu;
  Operands operands(gpu.context());
  const int64_t blocks = kWide / 128;
  const TensorView x = operands.random(DType::e4m3, {kMost, kWide}), x_scales = operands.random(DType::f32, {kMost, blocks});
  const WeightView w = operands.weight(DType::e4m3, {kManyExperts, kWide, kWide});
  for (const auto& [k_segment, grouped] : {std::pair<int64_t, bool>{0, false}, {512, false}, {0, true}})
    expect_rows_of_any_m("e4m3", gpu, operands, [&, k_segment = k_segment, grouped = grouped](int64_t first, int64_t m, TensorView y) {
      gpu::Fp8Problem p = {.codes = problem(y, x.slice(first, m), w.rows), .x_scale = x_scales.slice(first, m).ptr<float>(), .w_scale = static_cast<const uint8_t*>(w.scales.data),
                           .x_scale_stride = blocks, .w_scale_stride = blocks};
      p.codes.w_stride = kWide;
      p.codes.k_segment = k_segment;
      if (grouped) p.codes.offsets = part_of_offsets(operands, first, m).ptr<int32_t>(), p.codes.experts = kManyExperts;
      gpu::matmul_fp8(p, gpu.context().stream);
    });
}

}  // namespace
}  // namespace lockstep
