// The gradient of the input of weights in E4M3, read as they are, has the bits of that with weights de-quantised to bf16 first: tiles of every size, edges, experts with
// and without rows, accumulation, and every code and scale, NaN among them.

#include <gtest/gtest.h>

#include <vector>

#include "ops/gpu_testing.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/quantize/quantize.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::int_tensor;
using testing::random_tensor;
using testing::Tensor;

struct Case {
  int64_t experts, n, k;
  std::vector<int32_t> offsets;  // of rows
};

// every: all codes and scales, otherwise finite ones of about one size.
Tensor random_bytes(uint64_t seed, DType dtype, Shape shape, bool every) {
  Tensor t(dtype, shape);
  Philox rng(seed, RngPurpose::test);
  for (int64_t i = 0; i < t.elements(); ++i) {
    auto byte = static_cast<uint8_t>(rng.below(256));
    if (!every) byte = dtype == DType::ue8m0 ? static_cast<uint8_t>(110 + byte % 16) : (byte & 0x7f) == 0x7f ? uint8_t{0x33} : byte;
    static_cast<uint8_t*>(t.view().data)[i] = byte;
  }
  return t;
}

void expect_same(const Case& t, bool every, bool accumulate) {
  testing::Gpu gpu;
  const auto [experts, n, k, rows] = t;
  const int64_t m = rows.back(), blocks_n = num_blocks(n, 128), blocks_k = num_blocks(k, 128);
  const Tensor dy = random_tensor(1, DType::bf16, {m, n}), there = random_tensor(2, DType::f32, {m, k});
  const TensorView gdy = gpu.put(dy), codes = gpu.put(random_bytes(3, DType::e4m3, {experts * n, k}, every)),
                   scales = gpu.put(random_bytes(4, DType::ue8m0, {experts * blocks_n, blocks_k}, every)), w = gpu.make(DType::bf16, {experts * n, k}), want = gpu.put(there),
                   got = gpu.put(there), offsets = gpu.put(int_tensor(rows));
  for (int64_t e = 0; e < experts; ++e) dequantize(gpu, w.slice(e * n, n), {codes.slice(e * n, n), scales.slice(e * blocks_n, blocks_n), 128, 128});
  gpu::MatmulBackwardProblem p = {.m = m, .n = n, .k = k, .dy = gdy.data, .other = w.data, .grad = want.ptr<float>(), .dy_stride = n, .other_stride = k, .grad_stride = k,
                                  .accumulate = accumulate, .offsets = experts == 1 ? nullptr : offsets.ptr<int32_t>(), .experts = experts};
  gpu::matmul_backward_input_bf16(p, gpu.context().stream);
  p.other = codes.data;
  p.grad = got.ptr<float>();
  gpu::matmul_backward_input_fp8({.codes = p, .w_scale = static_cast<const uint8_t*>(scales.data), .w_scale_stride = blocks_k}, gpu.context().stream);
  EXPECT_EQ(count_bit_differences(gpu.get(got), gpu.get(want)), 0) << experts << " of " << m << " x " << n << " x " << k << (every ? ", every code" : "") << (accumulate ? ", added" : "");
}

TEST(MatmulUnitsOfADevice, GradientOfE4m3IsThatOfBf16) {
  const std::vector<Case> cases = {
      {1, 8, 16, {0, 1}},
      {1, 200, 272, {0, 40}},
      {1, 136, 528, {0, 300}},
      {1, 1024, 2048, {0, 1000}},
      {1, 640, 8192, {0, 2048}},
      {6, 200, 144, {0, 0, 5, 73, 73, 140, 141}},
      {4, 256, 400, {0, 0, 600, 600, 1200}},
      {8, 512, 2048, {0, 700, 701, 1500, 1500, 2100, 2900, 3000, 4096}},
  };
  for (const Case& t : cases)
    for (const bool every : {false, true})
      for (const bool accumulate : {false, true}) expect_same(t, every, accumulate);
  // As many rows an expert as V4-Flash's have of 8192 tokens.
  Case flash = {16, 2048, 2048, {}};
  for (int32_t e = 0; e <= 16; ++e) flash.offsets.push_back(192 * e);
  expect_same(flash, false, false);
}

}  // namespace
}  // namespace lockstep
