// The kernels have the CPU's codes, scales, numbers and counts: every format, blocks of rows and tiles, edges, strides, and NaN, infinities and zeros among x.

#include "ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

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
      for (const Shape& shape : {Shape{0, 8}, Shape{1, 1}, Shape{5, 7}, Shape{2, 448}, Shape{3, 200}, Shape{131, 136}})
        for (const int64_t beside : {0, 2, 16}) {
          const int64_t rows = shape[0], n = shape[1];
          if (rows > 100 && f.block_rows < 100) continue;  // for the large blocks
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

constexpr DType kCodes[] = {DType::e4m3, DType::e5m2, DType::e2m1x2};

// The GPU's codes, and numbers, are the CPU's under scales of 1.
void expect_same_conversions(DType codes, const Tensor& x) {
  CpuContext cpu;
  testing::Gpu gpu;
  const Shape shape = {x.view().rows(), x.view().dim(1)};
  const QuantFormat f{codes, DType::ue8m0, 1, 128};
  const Tensor want(codes, code_shape(f, shape[0], shape[1])), scales(DType::ue8m0, scale_shape(f, shape[0], shape[1]));
  for (int64_t i = 0; i < scales.elements(); ++i) scales.ptr<ue8m0>()[i].bits = 127;
  const TensorView got = gpu.put(want);
  quantize_given_scales(cpu, {want, scales, 1, 128}, x);
  quantize_given_scales(gpu, {got, gpu.put(scales), 1, 128}, gpu.put(x));
  EXPECT_EQ(count_bit_differences(gpu.get(got), want), 0) << dtype_name(codes);
}

TEST(QuantizeGpu, EveryBf16) {
  const Tensor x(DType::bf16, {512, 128});
  for (uint32_t i = 0; i < 65536; ++i) x.ptr<bf16>()[i] = {static_cast<uint16_t>(i)};
  for (const DType codes : kCodes) expect_same_conversions(codes, x);
}

// f32 half way between neighbouring codes, and just beside.
TEST(QuantizeGpu, WhereRoundingTurns) {
  for (const DType codes : kCodes) {
    std::vector<float> values;
    for (int code = 0; code < (codes == DType::e2m1x2 ? 8 : 128); ++code) {
      const auto c = static_cast<uint8_t>(code);
      values.push_back(codes == DType::e4m3 ? decode<e4m3>(c) : codes == DType::e5m2 ? decode<e5m2>(c) : decode<e2m1x2>(c));
    }
    std::erase_if(values, [](float v) { return !std::isfinite(v); });
    values.push_back(values.back() + (values.back() - values[values.size() - 2]));  // beyond the largest
    Tensor x(DType::f32, {static_cast<int64_t>(values.size()), 128});
    for (int64_t i = 0; i < x.elements(); ++i) x.set(i, 0);
    for (size_t i = 0; i + 1 < values.size(); ++i) {
      const float half = 0.5f * (values[i] + values[i + 1]), turns[] = {half, std::nextafter(half, 1e9f), std::nextafter(half, 0.0f)};
      for (size_t k = 0; k < 6; ++k) x.view().row<float>(static_cast<int64_t>(i))[k] = k < 3 ? turns[k] : -turns[k - 3];
    }
    expect_same_conversions(codes, x);
  }
}

// Every code under every scale.
TEST(QuantizeGpu, EveryCode) {
  CpuContext cpu;
  testing::Gpu gpu;
  const Tensor scales(DType::ue8m0, {256, 1});
  for (int i = 0; i < 256; ++i) scales.ptr<ue8m0>()[i].bits = static_cast<uint8_t>(i);
  for (const DType codes : kCodes) {
    const int64_t n = codes == DType::e2m1x2 ? 512 : 256;
    const Tensor all(codes, {256, 256});
    for (int64_t i = 0; i < all.elements(); ++i) static_cast<uint8_t*>(all.view().data)[i] = static_cast<uint8_t>(i % 256);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor want(dtype, {256, n});
      const TensorView got = gpu.put(want);
      dequantize(cpu, want, {all, scales, 1, n});
      dequantize(gpu, got, {gpu.put(all), gpu.put(scales), 1, n});
      EXPECT_EQ(count_bit_differences(gpu.get(got), want), 0) << dtype_name(codes) << " " << dtype_name(dtype);
    }
  }
}

TEST(QuantizeGpu, RecodesFp4) {
  CpuContext cpu;
  testing::Gpu gpu;
  struct Case {
    int64_t block_rows, block_cols, sub, rows, n;
  };
  for (const DType scale_type : {DType::f32, DType::ue8m0})
    for (const Case& t : {Case{1, 96, 32, 6, 96}, Case{4, 64, 32, 6, 96}, Case{128, 128, 32, 131, 160}, Case{4, 64, 16, 7, 90}, Case{2, 96, 48, 3, 200}})
      for (const int spread : {3, 14, 40})
        for (const int least : {0, 110, 254 - spread}) {
          const Tensor codes(DType::e2m1x2, {t.rows, t.n / 2}), sub_scales(DType::ue8m0, {t.rows, num_blocks(t.n, t.sub)});
          Philox rng(static_cast<uint64_t>(spread), RngPurpose::test);
          for (int64_t i = 0; i < codes.elements(); ++i) codes.ptr<e2m1x2>()[i].bits = static_cast<uint8_t>(rng.next());
          for (int64_t i = 0; i < sub_scales.elements(); ++i)
            sub_scales.ptr<ue8m0>()[i].bits = static_cast<uint8_t>(spread == 40 && i == 4 ? 255u : static_cast<uint32_t>(least) + rng.below(static_cast<uint32_t>(spread) + 1));
          const QuantFormat f{DType::e4m3, scale_type, t.block_rows, t.block_cols};
          const Tensor to(DType::e4m3, {t.rows, t.n}), scales(scale_type, scale_shape(f, t.rows, t.n)), lossy(DType::u8, scale_shape(f, t.rows, t.n));
          const TensorView gto = gpu.put(to), gscales = gpu.put(scales), glossy = gpu.put(lossy);
          recode_fp4(cpu, {to, scales, t.block_rows, t.block_cols}, lossy, {codes, sub_scales, 1, t.sub});
          recode_fp4(gpu, {gto, gscales, t.block_rows, t.block_cols}, glossy, {gpu.put(codes), gpu.put(sub_scales), 1, t.sub});
          const auto label = ::testing::Message() << t.block_rows << "x" << t.block_cols << " from " << t.sub << ", " << least << " to " << least + spread;
          EXPECT_EQ(count_bit_differences(gpu.get(gto), to), 0) << label;
          EXPECT_EQ(count_bit_differences(gpu.get(gscales), scales), 0) << label;
          EXPECT_EQ(count_bit_differences(gpu.get(glossy), lossy), 0) << label;
        }
}

}  // namespace
}  // namespace lockstep
