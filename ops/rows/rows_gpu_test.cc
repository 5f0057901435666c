#include "ops/rows/rows.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(RowsGpu, MoveAsOnTheCpu) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t width : {1, 7, 700}) {
      const Tensor x = random_tensor(1, dtype, {5, width}), out = random_tensor(2, dtype, {9, width + 2}), index = testing::int_tensor({8, 0, 3, 4, 1});
      const TensorView g = gpu.put(out);
      scatter_rows(gpu, g.cols(1, width), gpu.put(x), gpu.put(index));
      scatter_rows(cpu, out.view().cols(1, width), x, index);
      EXPECT_EQ(count_bit_differences(gpu.get(g), out), 0);
    }
  const Tensor numbers(DType::i32, {300});
  number_rows(cpu, numbers);
  const TensorView g = gpu.make(DType::i32, {300});
  number_rows(gpu, g);
  EXPECT_EQ(count_bit_differences(gpu.get(g), numbers), 0);
}

}  // namespace
}  // namespace lockstep
