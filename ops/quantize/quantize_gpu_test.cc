// The kernels have the CPU's codes, scales, numbers and counts: every format, blocks of rows and tiles, edges, strides, and NaN, infinities and zeros among x.

#include "ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

// Rows of very different size, with what is not a number like others strewn in.
Tensor varied(DType dtype, Shape shape, bool special) {
  Tensor x = random_tensor(1, dtype, shape, 4.0f);
  Philox rng(7, RngPurpose::test);
  for (int64_t i = 0; i < x.elements(); ++i) {
    const int64_t row = i / shape[1];
    x.set(i, x.get(i) * std::exp2(static_cast<float>(row % 5 * 7 - 14)));
    if (!special || rng.below(40) != 0) continue;
    constexpr float kSpecial[] = {0.0f, -0.0f, 1e-42f, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()};
    x.set(i, kSpecial[rng.below(7)]);
  }
  return x;
}

struct Stored {
  Tensor codes, scales;
  Stored(const QuantFormat& f, int64_t rows, int64_t cols)
      : codes(wider(f.codes, code_shape(f, rows, cols))), scales(wider(f.scales, scale_shape(f, rows, cols))) {}
  static Tensor wider(DType dtype, Shape s) { return Tensor(dtype, {s[0], s[1] + 32}); }
};

TEST(QuantizeGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  std::vector<QuantFormat> formats = {kFp8Weight, kFp8Activation, kFp8Kv, kFp4};
  for (const DType codes : {DType::e4m3, DType::e5m2, DType::e2m1x2})
    for (const DType scales : {DType::f32, DType::ue8m0})
      for (const auto& [rows, cols] : {std::pair{1, 128}, {2, 10}}) formats.push_back({codes, scales, rows, cols});
  for (const QuantFormat& f : formats)
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const Shape& shape : {Shape{0, 8}, Shape{1, 1}, Shape{5, 7}, Shape{2, 448}, Shape{3, 200}})
        for (const int64_t beside : {0, 2, 16}) {
          const int64_t rows = shape[0], n = shape[1];
          const Tensor x = varied(dtype, {rows, n + 2 * beside}, beside != 0), y = random_tensor(2, dtype, {rows, n + 2 * beside});
          const Stored want(f, rows, n);
          const TensorView gx = gpu.put(x), gy = gpu.put(y), gcodes = gpu.put(want.codes), gscales = gpu.put(want.scales);
          const auto view = [&](TensorView codes, TensorView scales) {
            const Shape c = code_shape(f, rows, n), s = scale_shape(f, rows, n);
            return QuantView(codes.cols(beside, c[1]), scales.cols(beside, s[1]), f.block_rows, f.block_cols);
          };
          const auto label = ::testing::Message() << dtype_name(f.codes) << " " << dtype_name(f.scales) << " " << f.block_rows << "x" << f.block_cols << " of "
                                                  << dtype_name(dtype) << shape.str() << " beside " << beside;
          const QuantView q = view(want.codes, want.scales), gq = view(gcodes, gscales);
          const ConstTensorView from = x.view().cols(beside, n), gfrom = gx.cols(beside, n);
          const QuantStats stats = quantize(cpu, q, from, f.amax_floor);
          quantize(gpu, gq, gfrom, f.amax_floor);
          EXPECT_EQ(count_bit_differences(gpu.get(gcodes), want.codes), 0) << label;
          EXPECT_EQ(count_bit_differences(gpu.get(gscales), want.scales), 0) << label;
          EXPECT_EQ(quant_stats(cpu, q, from), stats) << label;
          EXPECT_EQ(quant_stats(gpu, gq, gfrom), stats) << label;
          dequantize(cpu, y.view().cols(beside, n), q);
          dequantize(gpu, gy.cols(beside, n), gq);
          EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << label;
          round_through(cpu, x.view().cols(beside, n), f);
          round_through(gpu, gx.cols(beside, n), f);
          EXPECT_EQ(count_bit_differences(gpu.get(gx), x), 0) << label;
        }
}

TEST(QuantizeGpu, TakesGivenScales) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType codes : {DType::e4m3, DType::e2m1x2})
    for (const int64_t block : {32, 10}) {
      const QuantFormat f{codes, DType::ue8m0, 1, block};
      const Tensor x = varied(DType::f32, {7, 90}, true), want(codes, code_shape(f, 7, 90)), scales(DType::ue8m0, scale_shape(f, 7, 90));
      for (int64_t i = 0; i < scales.elements(); ++i) scales.ptr<ue8m0>()[i].bits = static_cast<uint8_t>(115 + i % 20);
      const TensorView gcodes = gpu.put(want), gscales = gpu.put(scales), gx = gpu.put(x);
      const QuantStats stats = quantize_given_scales(cpu, {want, scales, 1, block}, x);
      quantize_given_scales(gpu, {gcodes, gscales, 1, block}, gx);
      EXPECT_GT(stats.saturated, 0);
      EXPECT_EQ(count_bit_differences(gpu.get(gcodes), want), 0);
      EXPECT_EQ(quant_stats(gpu, {gcodes, gscales, 1, block}, gx), stats);
    }
}

TEST(QuantizeGpu, RecodesFp4) {
  CpuContext cpu;
  testing::Gpu gpu;
  const int64_t rows = 6, n = 96;
  for (const DType scale_type : {DType::f32, DType::ue8m0})
    for (const auto& [block_rows, block_cols] : {std::pair{1, 96}, {4, 64}, {128, 128}})
      for (const int spread : {3, 14, 40}) {
        const Tensor codes(DType::e2m1x2, {rows, n / 2}), sub_scales(DType::ue8m0, {rows, n / 32});
        Philox rng(static_cast<uint64_t>(spread), RngPurpose::test);
        for (int64_t i = 0; i < codes.elements(); ++i) codes.ptr<e2m1x2>()[i].bits = static_cast<uint8_t>(rng.next());
        for (int64_t i = 0; i < sub_scales.elements(); ++i)
          sub_scales.ptr<ue8m0>()[i].bits = static_cast<uint8_t>(spread == 40 && i == 4 ? 255 : 110 + rng.below(static_cast<uint32_t>(spread) + 1));
        const QuantFormat f{DType::e4m3, scale_type, block_rows, block_cols};
        const Tensor to(DType::e4m3, {rows, n}), scales(scale_type, scale_shape(f, rows, n)), lossy(DType::u8, scale_shape(f, rows, n));
        const TensorView gto = gpu.put(to), gscales = gpu.put(scales), glossy = gpu.put(lossy);
        recode_fp4(cpu, {to, scales, block_rows, block_cols}, lossy, {codes, sub_scales, 1, 32});
        recode_fp4(gpu, {gto, gscales, block_rows, block_cols}, glossy, {gpu.put(codes), gpu.put(sub_scales), 1, 32});
        EXPECT_EQ(count_bit_differences(gpu.get(gto), to), 0) << spread;
        EXPECT_EQ(count_bit_differences(gpu.get(gscales), scales), 0) << spread;
        EXPECT_EQ(count_bit_differences(gpu.get(glossy), lossy), 0) << spread;
      }
}

}  // namespace
}  // namespace lockstep
