// The kernel has the CPU's bits and leaves the channels beside the rotary ones alone.

#include "ops/rope/rope.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::Tensor;

TEST(RopeGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  struct Case {
    int64_t rows, heads, width, rotary, beside;
  };
  for (const Case& k : {Case{0, 1, 8, 8, 0}, Case{1, 1, 2, 2, 0}, Case{7, 3, 16, 8, 0}, Case{7, 3, 16, 8, 8}, Case{5, 2, 9, 6, 1}, Case{4, 5, 32, 20, 0},
                        Case{9, 2, 24, 24, 3}, Case{3, 4, 96, 64, 0}, Case{3, 1, 8, 0, 0}})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool inverse : {false, true}) {
        const int64_t n = k.heads * k.width, positions = 50;
        const Tensor x = testing::random_tensor(1, dtype, {k.rows, n + 2 * k.beside}, 3.0f), pos = testing::random_ints(2, {k.rows}, positions);
        const Tensor table(DType::f32, {positions, k.rotary});
        rope_table(table, 10000.0, {});
        const TensorView gx = gpu.put(x);
        rope(gpu, gx.cols(k.beside, n), gpu.put(pos), gpu.put(table), k.heads, inverse);
        rope(cpu, x.view().cols(k.beside, n), pos, table, k.heads, inverse);
        EXPECT_EQ(count_bit_differences(gpu.get(gx), x), 0) << dtype_name(dtype) << " " << k.rows << " rows, width " << k.width << ", rotary " << k.rotary;
      }
}

}  // namespace
}  // namespace lockstep
