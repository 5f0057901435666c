// MXFP4 products on the matrix units, Hopper's and CDNA4's on the device, CDNA4's as the executor's waves of 64 run them: values against f64 with scales far apart in a row, with
// experts and odd numbers of rows and columns; every code times every scale; rows of any other M, on a device at the model's sizes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

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

// x [m, k] and w [experts, n, k] in their codes. Neighbouring blocks of a row of w have scales up to 2^20 apart: more than the exponents of E4M3 span.
struct Operands {
  Operands(int64_t m, int64_t n, int64_t k, int64_t experts) : n(n), k(k), x(random_tensor(1, DType::bf16, {m, k})) {
    Tensor dense = random_tensor(2, DType::f32, {experts * n, k});
    for (int64_t i = 0; i < dense.elements(); ++i) dense.set(i, dense.get(i) * std::ldexp(1.0, static_cast<int>(i / 32 * 7 % 21) - 10));
    codes = Tensor(DType::e2m1x2, {experts * n, k / 2});
    scales = Tensor(DType::ue8m0, {experts * n, k / 32});
    quantize(cpu, {codes, scales, 1, 32}, dense, 0);
    upload();
  }
  void upload() {
    const int64_t m = x.view().dim(0);
    gx = gpu.put(x), gw = gpu.put(codes), gscales = gpu.put(scales);
    x_codes = gpu.make(DType::e4m3, {m, k}), x_scales = gpu.make(DType::f32, {m, k / 128});
    gpu::quantize_rows(gpu, x_codes, x_scales, gx);
    if (!gpu::fp4_takes_bf16_rows()) return;
    x_rows = gpu.make(DType::bf16, {m, k});
    gpu::fp4_rows(gpu, x_rows, x_codes, x_scales);
  }
  // Rows [first, first + m) by experts from `expert` on; `offsets` is null for one.
  Tensor product(int64_t first, int64_t m, DType dtype, int64_t expert, const std::vector<int32_t>& offsets) {
    const TensorView y = gpu.make(dtype, {m, n});
    const TensorView part = (gpu::fp4_takes_bf16_rows() ? x_rows : x_codes).slice(first, m), part_scales = x_scales.slice(first, m);
    gpu::Fp8Problem p = {.codes = {.m = m, .n = n, .k = k, .x = part.data, .w = gw.ptr<e2m1x2>() + expert * n * k / 2, .y = y.data, .x_stride = k, .w_stride = k / 2, .y_stride = n,
                                   .y_is_f32 = dtype == DType::f32},
                         .x_scale = part_scales.ptr<float>(), .w_scale = static_cast<const uint8_t*>(gscales.data) + expert * n * k / 32, .x_scale_stride = k / 128,
                         .w_scale_stride = k / 32};
    TensorView at;
    if (!offsets.empty()) {
      at = gpu.put(int_tensor(offsets));
      p.codes.offsets = at.ptr<int32_t>();
      p.codes.experts = static_cast<int64_t>(offsets.size()) - 1;
    }
    gpu::matmul_fp4(p, gpu.context().stream);
    return gpu.get(y);
  }

  int64_t n, k;
  CpuContext cpu;
  testing::Gpu gpu;
  Tensor x, codes, scales;
  TensorView gx, gw, gscales, x_codes, x_scales, x_rows;
};

const std::vector<int32_t> kOffsets = {0, 0, 5, 73, 73, 140, 141};

void expect_values(Operands& o, ConstTensorView got, const std::vector<int32_t>& offsets) {
  const Tensor cx = o.gpu.get(o.x_codes), sx = o.gpu.get(o.x_scales);
  const double addition = device_info().emulated ? 0x1p-24 : 0x1p-23;  // units cut instead of rounding
  double worst = 0;
  for (int64_t i = 0; i < got.dim(0); ++i)
    for (int64_t j = 0; j < o.n; ++j) {
      const int64_t e = offsets.empty() ? 0 : std::upper_bound(offsets.begin(), offsets.end(), i) - offsets.begin() - 1, row = e * o.n + j;
      double sum = 0, size = 0;
      for (int64_t l = 0; l < o.k; ++l) {
        const e2m1x2 pair = o.codes.view().row<e2m1x2>(row)[l / 2];
        const double term = static_cast<double>(to_f32(cx.view().row<e4m3>(i)[l])) * static_cast<double>(sx.view().row<float>(i)[l / 128]) *
                            static_cast<double>(l % 2 == 0 ? low_to_f32(pair) : high_to_f32(pair)) * static_cast<double>(to_f32(o.scales.view().row<ue8m0>(row)[l / 32]));
        sum += term;
        size += std::fabs(term);
      }
      const double bound = size * static_cast<double>(o.k + 2) * addition;
      const double difference = std::fabs(static_cast<double>(got.row<float>(i)[j]) - sum);
      if (difference > 0) worst = std::isnan(difference) ? INFINITY : std::max(worst, difference / bound);
    }
  EXPECT_LE(worst, 1) << got.shape.str() << " k " << o.k;
}

TEST(MatmulFp4, ValuesAreSums) {
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 1, 128}, {5, 70, 256}, {66, 130, 384}, {150, 40, 128}}) {
    Operands o(m, n, k, 1);
    expect_values(o, o.product(0, m, DType::f32, 0, {}), {});
  }
}

TEST(MatmulFp4, ExpertsHaveTheirOwnRows) {
  const auto check = [](const std::vector<int32_t>& offsets) {
    Operands o(offsets.back(), 136, 256, 6);
    const Tensor all = o.product(0, offsets.back(), DType::f32, 0, offsets);
    expect_values(o, all, offsets);
    for (const int64_t e : {1, 2, 5}) {
      const int64_t first = offsets[static_cast<size_t>(e)], rows = offsets[static_cast<size_t>(e) + 1] - first;
      EXPECT_EQ(count_bit_differences(o.product(first, rows, DType::f32, e, {}), all.view().slice(first, rows)), 0);
    }
  };
  check(kOffsets);
  if (!device_info().emulated) check({0, 0, 300, 501, 700, 700, 1500});
}

// Every code times every scale that is exact on both. Row i of x has one number, 2^30 at column i.
TEST(MatmulFp4, CodesTimesScales) {
  const int64_t k = 128, least = 27, n = 160 - least + 1;
  Operands o(k, n, k, 1);
  o.x = Tensor(DType::bf16, {k, k});
  for (int64_t i = 0; i < k; ++i) o.x.set(i * k + i, 0x1p30);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t l = 0; l < k / 2; ++l) o.codes.view().row<e2m1x2>(j)[l] = {static_cast<uint8_t>(l * 37 + j)};
    for (int64_t b = 0; b < k / 32; ++b) o.scales.view().row<ue8m0>(j)[b] = {static_cast<uint8_t>(least + (j + 5 * b) % n)};
  }
  o.upload();
  const Tensor y = o.product(0, k, DType::f32, 0, {});
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < n; ++j) {
      const e2m1x2 pair = o.codes.view().row<e2m1x2>(j)[i / 2];
      const float value = (i % 2 == 0 ? low_to_f32(pair) : high_to_f32(pair)) * to_f32(o.scales.view().row<ue8m0>(j)[i / 32]) * 0x1p30f;
      ASSERT_EQ(y.view().row<float>(i)[j], value) << i << ' ' << j;
    }
}

// Hopper's order: the chain of the product in bf16 of the same numbers, whose columns lie as fp4_rows has them.
TEST(MatmulFp4, BitsAreThoseOfBf16InOrder) {
  if (!gpu::fp4_takes_bf16_rows()) GTEST_SKIP() << "another order";
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{150, 200, 512}, {7, 130, 1024}}) {
    Operands o(m, n, k, 1);
    const Tensor numbers(DType::bf16, {n, k}), in_order(DType::bf16, {n, k});
    dequantize(o.cpu, numbers, {o.codes, o.scales, 1, 32});
    for (int64_t j = 0; j < n; ++j)
      for (int64_t i = 0; i < k; ++i)
        in_order.view().row<bf16>(j)[i / 128 * 128 + 32 * (i / 8 % 4) + 8 * (i % 4) + 2 * (i / 32 % 4) + i / 4 % 2] = numbers.view().row<bf16>(j)[i];
    const TensorView y = o.gpu.make(DType::f32, {m, n});
    gpu::matmul_bf16({.m = m, .n = n, .k = k, .x = o.x_rows.data, .w = o.gpu.put(in_order).data, .y = y.data, .x_stride = k, .w_stride = k, .y_stride = n, .y_is_f32 = true},
                     o.gpu.context().stream);
    EXPECT_EQ(count_bit_differences(o.product(0, m, DType::f32, 0, {}), o.gpu.get(y)), 0) << m;
  }
}

// Tiles of every size, which the number of rows decides.
TEST(MatmulFp4, RowsAreThoseOfAnyM) {
  const bool emulated = device_info().emulated;
  const int64_t most = emulated ? 130 : 2048, n = emulated ? 128 * 130 : 4096, k = emulated ? 128 : 2048;
  Operands o(most, n, k, 1);
  const Tensor whole = o.product(0, most, DType::bf16, 0, {});
  for (const int64_t m : {1, 3, 8, 64, 257})
    if (m < most && (!emulated || m < 8)) {
      EXPECT_EQ(count_bit_differences(o.product(101 % (most - m), m, DType::bf16, 0, {}), whole.view().slice(101 % (most - m), m)), 0) << m;
    }
}

// A scale that is not a number makes its row of w's results so, and no others.
TEST(MatmulFp4, NanScales) {
  Operands o(20, 40, 256, 1);
  o.scales.view().row<ue8m0>(33)[5] = kUe8m0Nan;
  o.upload();
  const Tensor y = o.product(0, 20, DType::f32, 0, {});
  for (int64_t i = 0; i < 20; ++i)
    for (int64_t j = 0; j < 40; ++j) EXPECT_EQ(std::isnan(y.get(i * 40 + j)), j == 33);
}

// The op takes this kernel where there are matrix units; elsewhere the portable one, whose blocks are summed in another order.
TEST(MatmulFp4, TheOpsValues) {
  Operands o(kOffsets.back(), 72, 256, 6);
  const WeightView w = {.rows = o.gw.reshape({6, 72, 128}), .panels = {}, .scales = o.gscales.reshape({6, 72, 8}), .row_grid = {1, 72}, .col_grid = {32, 0}};
  const TensorView y = o.gpu.make(DType::f32, {kOffsets.back(), 72});
  grouped_matmul(o.gpu, y, o.gx, w, o.gpu.put(int_tensor(kOffsets)));
  expect_values(o, o.gpu.get(y), kOffsets);
}

}  // namespace
}  // namespace lockstep
