// The kernels have the CPU's bits: contiguous and strided, aligned to 16 bytes or not, every kind of number.

#include "ops/cast/cast.h"

#include <gtest/gtest.h>

#include <bit>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(CastGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const Shape& shape : {Shape{0, 8}, Shape{1, 1}, Shape{5, 7}, Shape{3, 64}, Shape{33, 40}})
    for (const int64_t beside : {0, 1, 8})  // columns left of the view
      for (const DType to : {DType::f32, DType::bf16})
        for (const DType from : {DType::f32, DType::bf16}) {
          const int64_t n = shape[1], wide = n + beside + (beside == 1 ? 2 : 8 * (beside != 0));
          const Tensor x = random_tensor(1, from, {shape[0], wide}, 3.0f), y = random_tensor(2, to, {shape[0], wide});
          const auto run = [&](Context& c, TensorView y, ConstTensorView x) { cast(c, y.cols(beside, n), x.cols(beside, n)); };
          const TensorView gy = gpu.put(y);
          run(gpu, gy, gpu.put(x));
          run(cpu, y, x);
          EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << dtype_name(from) << " to " << dtype_name(to) << shape.str() << beside;
          if (to == DType::bf16 || from == DType::bf16) continue;
          const auto sums = [&](Context& c, TensorView y, ConstTensorView x) {
            add(c, y.cols(beside, n), x.cols(beside, n));
            scale(c, y.cols(beside, n), 1.7f);
          };
          sums(gpu, gy, gpu.put(x));
          sums(cpu, y, x);
          EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << shape.str() << beside;
        }
}

// Halfway points, overflow, infinities and NaNs; a copy keeps a signalling NaN's bits.
TEST(CastGpu, TreatsSpecialNumbersAsTheCpuDoes) {
  CpuContext cpu;
  testing::Gpu gpu;
  std::vector<uint32_t> bits;
  for (uint32_t high : {0x0000u, 0x0001u, 0x3f80u, 0x3f81u, 0x7f7fu, 0x7f80u, 0x7f81u, 0x7fc1u})
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      for (uint32_t sign : {0u, 0x80000000u}) bits.push_back(sign | high << 16 | low);
  const int64_t n = static_cast<int64_t>(bits.size());
  const ConstTensorView x(bits.data(), DType::f32, {n});
  for (const DType to : {DType::f32, DType::bf16}) {
    const Tensor y(to, {n}), back(to, {n});
    const TensorView gy = gpu.put(y), gback = gpu.put(back);
    cast(cpu, y, x), cast(gpu, gy, gpu.put(x));
    cast(cpu, back, y), cast(gpu, gback, gy);
    EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << dtype_name(to);
    EXPECT_EQ(count_bit_differences(gpu.get(gback), back), 0) << dtype_name(to);
  }
}

}  // namespace
}  // namespace lockstep
