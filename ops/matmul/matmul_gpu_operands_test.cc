// What the tensor cores are fed has the CPU's bits: codes, scales, roundings, for every shape and alignment, with NaN, Inf and zeros in rows of their own.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/formats.h"
#include "ops/cast/cast.h"
#include "ops/gpu_testing.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/quantize/quantize.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;
using testing::to_dtype;

Tensor with_extremes(DType dtype, Shape shape) {
  Tensor x = random_tensor(1, DType::f32, shape, 50.0f);
  const float special[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(), 0.0f, -0.0f, 1e-42f, 3e38f, 447.9f, -1e-5f};
  const int64_t n = shape[1];
  for (int64_t i = 0; i < shape[0]; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float& v = x.view().row<float>(i)[j];
      if (i % 3 == 1) v *= std::ldexp(1.0f, static_cast<int>((i * 7 + j) % 40) - 30);
      if (i % 3 == 2 && j % 11 == i % 11) v = special[(i + j) % 10];
    }
  return dtype == DType::f32 ? std::move(x) : to_dtype(x, dtype);
}

TEST(MatmulGpuOperands, CodesAreThoseOfQuantize) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{34, 128}, Shape{5, 136}, Shape{7, 300}, Shape{2, 1024}, Shape{0, 64}})
      for (const int64_t wider : {0, 16, 3}) {
        const int64_t rows = shape[0], k = shape[1], blocks = (k + 127) / 128;
        const Tensor x = with_extremes(dtype, {rows, k + wider}), codes(DType::e4m3, {rows, k + wider}), exponents(DType::ue8m0, {rows, blocks}),
                     scales(DType::f32, {rows, blocks + 1});
        const TensorView gcodes = gpu.put(codes), gscales = gpu.put(scales);
        gpu::quantize_rows(gpu, gcodes.cols(wider, k), gscales.cols(0, blocks), gpu.put(x).cols(wider, k));
        quantize(cpu, {codes.view().cols(wider, k), exponents, 1, 128}, x.view().cols(wider, k), kFp8Activation.amax_floor);
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t b = 0; b < blocks; ++b) scales.view().row<float>(i)[b] = to_f32(exponents.view().row<ue8m0>(i)[b]);
        EXPECT_EQ(count_bit_differences(gpu.get(gcodes), codes), 0) << dtype_name(dtype) << shape.str() << wider;
        EXPECT_EQ(count_bit_differences(gpu.get(gscales), scales), 0) << dtype_name(dtype) << shape.str() << wider;
      }
}

// Rows from anywhere: those of the rows themselves.
TEST(MatmulGpuOperands, GatheredRows) {
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t k : {7, 128, 300}) {
      const Tensor row_of = testing::int_tensor({4, 0, 4, 2, 3, 3, 1});
      const int64_t rows = row_of.view().dim(0), blocks = (k + 127) / 128;
      const ConstTensorView x = gpu.put(with_extremes(dtype, {5, k}));
      const auto codes = [&](int64_t n) { return gpu.put(Tensor(DType::e4m3, {n, k})); };
      const auto scales = [&](int64_t n) { return gpu.put(Tensor(DType::f32, {n, blocks})); };
      const TensorView all = codes(5), all_scales = scales(5), some = codes(rows), some_scales = scales(rows);
      gpu::quantize_rows(gpu, all, all_scales, x);
      gpu::quantize_rows(gpu, some, some_scales, x, gpu.put(row_of));
      const Tensor expected = gpu.get(all), expected_scales = gpu.get(all_scales), got = gpu.get(some), got_scales = gpu.get(some_scales);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t from = row_of.view().ptr<int32_t>()[r];
        EXPECT_EQ(count_bit_differences(got.view().slice(r, 1), expected.view().slice(from, 1)), 0) << dtype_name(dtype) << k << " row " << r;
        EXPECT_EQ(count_bit_differences(got_scales.view().slice(r, 1), expected_scales.view().slice(from, 1)), 0) << dtype_name(dtype) << k << " row " << r;
      }
    }
}

void expect_codes_of_quantize(const Tensor& x) {
  CpuContext cpu;
  testing::Gpu gpu;
  const int64_t rows = x.view().rows(), k = x.view().dim(1);
  const Tensor codes(DType::e4m3, {rows, k}), exponents(DType::ue8m0, {rows, k / 128});
  const TensorView gcodes = gpu.put(codes), gscales = gpu.put(Tensor(DType::f32, {rows, k / 128}));
  gpu::quantize_rows(gpu, gcodes, gscales, gpu.put(x));
  quantize(cpu, {codes, exponents, 1, 128}, x, kFp8Activation.amax_floor);
  EXPECT_EQ(count_bit_differences(gpu.get(gcodes), codes), 0);
}

// The codes' numbers, every code among them, in the order of Hopper's products.
TEST(MatmulGpuOperands, Fp4Rows) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const Shape& shape : {Shape{1, 128}, Shape{35, 128}, Shape{5, 384}, Shape{3, 1024}, Shape{0, 128}})
    for (const int64_t wider : {0, 8}) {
      const int64_t rows = shape[0], k = shape[1];
      const Tensor codes(DType::e4m3, {rows, k + wider}), scales = random_tensor(1, DType::f32, {rows, k / 128 + wider}), numbers(DType::bf16, {rows, k}),
                   wanted = random_tensor(2, DType::bf16, {rows, k + wider});
      for (int64_t i = 0; i < codes.elements(); ++i) codes.view().ptr<e4m3>()[i] = {static_cast<uint8_t>(i % 257)};
      for (int64_t i = 0; i < scales.elements(); ++i) scales.view().ptr<float>()[i] = std::ldexp(1.0f, static_cast<int>(i * 29 % 141) - 22);
      dequantize(cpu, numbers, {codes.view().cols(wider, k), scales.view().cols(wider, k / 128), 1, 128});
      const TensorView to = gpu.put(wanted);
      gpu::fp4_rows(gpu, to.cols(wider, k), gpu.put(codes).cols(wider, k), gpu.put(scales).cols(wider, k / 128));
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < k; ++i) {
          const int64_t q = i / 32 % 4, v = i / 8 % 4, h = i / 4 % 2;
          wanted.view().row<bf16>(r)[wider + i / 128 * 128 + 32 * v + 8 * (i % 4) + 2 * q + h] = numbers.view().row<bf16>(r)[i];
        }
      const Tensor got = gpu.get(to);
      for (int64_t i = 0; i < got.elements(); ++i)
        if (std::isnan(wanted.get(i)) && std::isnan(got.get(i))) got.view().ptr<bf16>()[i] = wanted.view().ptr<bf16>()[i];  // any NaN is one
      EXPECT_EQ(count_bit_differences(got, wanted), 0) << shape.str() << wider;
    }
}

// Every bf16 beside its neighbours, and beside values of all sizes.
TEST(MatmulGpuOperands, EveryBf16) {
  const Tensor x(DType::bf16, {1024, 128});
  for (uint32_t i = 0; i < 65536; ++i) {
    x.view().ptr<bf16>()[i] = {static_cast<uint16_t>(i)};
    x.view().ptr<bf16>()[65536 + i] = {static_cast<uint16_t>(i * 40503u)};
  }
  expect_codes_of_quantize(x);
}

// f32 where rounding turns: half way between neighbouring codes and just beside, in blocks whose scale is a known power of two.
TEST(MatmulGpuOperands, WhereRoundingTurns) {
  std::vector<float> turns;
  for (int code = 0; code < 126; ++code)
    for (const float sign : {1.0f, -1.0f}) {
      const float half = sign * 0.5f * (to_f32(e4m3{static_cast<uint8_t>(code)}) + to_f32(e4m3{static_cast<uint8_t>(code + 1)}));
      turns.insert(turns.end(), {half, std::nextafter(half, 1e9f), std::nextafter(half, -1e9f)});
    }
  const int64_t blocks = static_cast<int64_t>(turns.size() + 126) / 127;
  const Tensor x(DType::f32, {3 * blocks, 128});
  for (int64_t i = 0; i < x.elements(); ++i) {
    const float scale = std::ldexp(1.0f, static_cast<int>(i / (128 * blocks)) * 55 - 12);  // 2^-12, 2^43, 2^98
    const size_t at = static_cast<size_t>(i / 128 % blocks * 127 + i % 128 - 1);
    x.view().ptr<float>()[i] = scale * (i % 128 == 0 ? 448.0f : at < turns.size() ? turns[at] : 0.0f);
  }
  expect_codes_of_quantize(x);
}

TEST(MatmulGpuOperands, RoundingIsThatOfCast) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const Shape& shape : {Shape{1, 1}, Shape{5, 7}, Shape{33, 64}, Shape{3, 1000}, Shape{0, 8}})
    for (const int64_t wider : {0, 8, 3}) {
      const int64_t rows = shape[0], n = shape[1];
      const Tensor x = with_extremes(DType::f32, {rows, n + wider}), y(DType::bf16, {rows, n + wider});
      const TensorView gy = gpu.put(y);
      gpu::round_rows(gpu, gy.cols(wider, n), gpu.put(x).cols(wider, n));
      cast(cpu, y.view().cols(wider, n), x.view().cols(wider, n));
      EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << shape.str() << wider;
    }
}

}  // namespace
}  // namespace lockstep
