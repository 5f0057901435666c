#include "ops/sum/sum.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::random_tensor;
using testing::Tensor;

TEST(SumGpu, AddsInOrder) {
  CpuContext cpu(2);
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::f64})
    for (const int64_t n : {1, 700})
      for (const int64_t ranks : {1, 2, 5})
        for (int64_t own = 0; own < ranks; ++own) {
          const Tensor parts = random_tensor(1, dtype, {ranks, n + 3}, 1000.0f), mine = random_tensor(2, dtype, {n});
          const Tensor y(dtype, {n});
          const TensorView g = gpu.put(mine);
          sum_in_order(gpu, g, g, gpu.put(parts), own);
          sum_in_order(cpu, y, mine, parts, own);
          EXPECT_EQ(testing::count_bit_differences(gpu.get(g), y), 0);
          // Against the definition.
          for (int64_t i = 0; i < n; i += 13) {
            const auto term = [&](int64_t r) { return r == own ? mine.get(i) : parts.get(r * (n + 3) + i); };
            if (dtype != DType::f32) continue;
            float sum = term(0);
            for (int64_t r = 1; r < ranks; ++r) sum += term(r);
            EXPECT_EQ(y.get(i), sum);
          }
        }
}

}  // namespace
}  // namespace lockstep
