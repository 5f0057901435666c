// The products and gradients on CDNA4's matrix units, as the executor's waves of 64 run them: values against f64, over odd shapes and strides, with experts, segments
// and accumulation; rows of any other M; E4M3 also against the CPU's bits, whose order the executor follows.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/device.h"
#include "ops/gpu_testing.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/matmul_gpu.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::int_tensor;
using testing::random_tensor;
using testing::Tensor;

const std::vector<int32_t> kOffsets = {0, 0, 5, 73, 73, 140, 141};
constexpr int64_t kExperts = 6, kRows = 141;

int64_t expert_of(int64_t row) { return std::upper_bound(kOffsets.begin(), kOffsets.end(), row) - kOffsets.begin() - 1; }
float at(ConstTensorView v, int64_t row, int64_t column) { return to_f32(v.ptr<bf16>()[row * v.row_stride + column]); }

// Every element of `got` is there + the sum of terms(i, j, add), but for one rounding of 2^-24 an addition; bf16 rounds once more.
void expect_sums(ConstTensorView got, ConstTensorView there, const std::function<void(int64_t, int64_t, const std::function<void(float, float)>&)>& terms) {
  double worst = 0;
  for (int64_t i = 0; i < got.dim(0); ++i)
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
      const double bound = size * count * 0x1p-24 + (f32 ? 0 : std::fabs(sum) * 0x1p-8);
      if (difference > 0) worst = std::isnan(difference) ? INFINITY : std::max(worst, difference / bound);
    }
  EXPECT_LE(worst, 1) << got.shape.str();
}

struct Shapes {
  int64_t m, n, k;
};

gpu::MatmulProblem problem(TensorView y, ConstTensorView x, ConstTensorView w) {
  return {.m = x.dim(0), .n = y.dim(1), .k = x.dim(1), .x = x.data, .w = w.data, .y = y.data, .x_stride = x.row_stride, .w_stride = w.row_stride,
          .y_stride = y.row_stride, .y_is_f32 = y.dtype == DType::f32};
}

TEST(MatmulCdna4, ValuesAreSums) {
  testing::Gpu gpu;
  for (const auto& [m, n, k] : {Shapes{1, 1, 8}, Shapes{3, 70, 40}, Shapes{70, 65, 200}, Shapes{33, 129, 64}})
    for (const bool f32 : {false, true})
      for (const bool accumulate : {false, true})
        for (const int64_t k_segment : {0, 64}) {
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

TEST(MatmulCdna4, ExpertsHaveTheirOwnRows) {
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

TEST(MatmulCdna4, GradientsAreSums) {
  testing::Gpu gpu;
  const TensorView offsets = gpu.put(int_tensor(kOffsets));
  for (const auto& [m, n, k] : {Shapes{3, 8, 16}, Shapes{kRows, 72, 40}, Shapes{kRows, 136, 72}})
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
TEST(MatmulCdna4, RowsAreThoseOfAnyM) {
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

TEST(MatmulCdna4, E4m3) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const auto& [m, n, k] : {Shapes{1, 1, 16}, Shapes{5, 70, 128}, Shapes{66, 130, 400}})
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
      expect_sums(got, {}, [&, k = k](int64_t i, int64_t j, const auto& add) {
        for (int64_t l = 0; l < k; ++l)
          add(value(cx, i, l, sx.view().row<float>(i)[l / 128]), value(codes, j, l, to_f32(scales.view().row<ue8m0>(j / 128)[l / 128])));
      });
      if (device_info().emulated) {
        EXPECT_EQ(count_bit_differences(got, y), 0) << m << ' ' << n << ' ' << k << ' ' << k_segment;
      }
    }
}

}  // namespace
}  // namespace lockstep
