// The kernels have the CPU's bits for every width, strided.

#include "ops/hadamard/hadamard.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

TEST(HadamardGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t n : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024})
      for (const int64_t rows : {0, 1, 5, 37})
        for (const int64_t beside : {0, 1, 8}) {
          const Tensor x = testing::random_tensor(1, dtype, {rows, n + 2 * beside}, 3.0f);
          const TensorView gx = gpu.put(x);
          hadamard(gpu, gx.cols(beside, n));
          hadamard(cpu, x.view().cols(beside, n));
          EXPECT_EQ(testing::count_bit_differences(gpu.get(gx), x), 0) << dtype_name(dtype) << " " << rows << " x " << n << " beside " << beside;
        }
}

}  // namespace
}  // namespace lockstep
