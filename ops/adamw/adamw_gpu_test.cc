// The kernels have the CPU's bits over sizes around pieces, blocks and tiles.

#include "ops/adamw/adamw.h"

#include <gtest/gtest.h>

#include <limits>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(AdamWGpu, StepHasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  const AdamWStep step{.lr = 0.03f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .bias1 = 0.19f, .bias2 = 0.0975f, .grad_scale = 0.7f};
  for (const int64_t n : {0, 1, 8, 9, 300, 5001})
    for (const int64_t skipped : {0, 1}) {  // elements before the views, which decide the alignment
      const Tensor w = random_tensor(1, DType::f32, {n + skipped}), m = random_tensor(2, DType::f32, {n + skipped}),
                   grad = random_tensor(4, DType::f32, {n + skipped});
      const Tensor v = random_tensor(3, DType::f32, {n + skipped});
      for (int64_t i = 0; i < v.elements(); ++i) v.ptr<float>()[i] *= v.ptr<float>()[i];
      const TensorView gw = gpu.put(w), gm = gpu.put(m), gv = gpu.put(v);
      const auto run = [&](Context& c, TensorView w, TensorView m, TensorView v, ConstTensorView grad) {
        for (int i = 0; i < 3; ++i) adamw(c, w.slice(skipped, n), m.slice(skipped, n), v.slice(skipped, n), grad.slice(skipped, n), step);
      };
      run(gpu, gw, gm, gv, gpu.put(grad));
      run(cpu, w, m, v, grad);
      EXPECT_EQ(count_bit_differences(gpu.get(gw), w), 0) << n;
      EXPECT_EQ(count_bit_differences(gpu.get(gm), m), 0) << n;
      EXPECT_EQ(count_bit_differences(gpu.get(gv), v), 0) << n;
    }
}

TEST(AdamWGpu, SumsHaveTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const int64_t n : {0, 1, 15, 17, 4095, 4096, 4097, 70001, 4096 * 513 + 5}) {
    const Tensor grad = random_tensor(1, DType::f32, {n}, 3.0f), sum(DType::f64, {1}), finite(DType::i32, {1});
    const TensorView ggrad = gpu.put(grad), gsum = gpu.make(DType::f64, {1}), gfinite = gpu.make(DType::i32, {1});
    const ConstTensorView on_gpu[] = {ggrad}, on_cpu[] = {grad};
    sum_squares(gpu, gsum, on_gpu);
    sum_squares(cpu, sum, on_cpu);
    EXPECT_EQ(count_bit_differences(gpu.get(gsum), sum), 0) << n;
    if (n > 100000) continue;
    all_finite(gpu, gfinite, ggrad);
    EXPECT_EQ(gpu.get(gfinite).ptr<int32_t>()[0], 1) << n;
    for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
      if (n == 0) continue;
      const float kept = grad.get(at);
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        grad.ptr<float>()[at] = bad;
        all_finite(gpu, gfinite, gpu.put(grad));
        EXPECT_EQ(gpu.get(gfinite).ptr<int32_t>()[0], 0) << n << " " << at;
      }
      grad.ptr<float>()[at] = kept;
    }
  }
}

TEST(AdamWGpu, SumsOfManyTensorsHaveTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  const Tensor all = random_tensor(1, DType::f32, {200000}, 3.0f);
  const TensorView on_gpu = gpu.put(all);
  std::vector<ConstTensorView> parts, gpu_parts;
  int64_t at = 0;
  for (const int64_t n : {5, 0, 4096, 70001, 0, 65537, 1, 40000}) {
    parts.push_back(all.view().slice(at, n));
    gpu_parts.push_back(on_gpu.slice(at, n));
    at += n;
  }
  const Tensor sums(DType::f64, {static_cast<int64_t>(parts.size())});
  const TensorView gsums = gpu.make(DType::f64, sums.view().shape);
  sum_squares(gpu, gsums, gpu_parts);
  sum_squares(cpu, sums, parts);
  EXPECT_EQ(count_bit_differences(gpu.get(gsums), sums), 0);
}

}  // namespace
}  // namespace lockstep
