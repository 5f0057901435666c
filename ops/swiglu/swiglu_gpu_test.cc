// The kernels have the CPU's bits, with and without weights and clamps, strided, and with a gradient written over da.

#include "ops/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(SwigluGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{0, 8}, Shape{1, 1}, Shape{3, 7}, Shape{19, 40}, Shape{2, 129}})
      for (const int64_t beside : {0, 1, 8})
        for (const float limit : {0.0f, 2.5f})
          for (const bool weighted : {true, false}) {
            const int64_t rows = shape[0], n = shape[1], wide = n + 2 * beside;
            const Tensor g = random_tensor(1, dtype, {rows, wide}, 5.0f), u = random_tensor(2, dtype, {rows, wide}, 5.0f);
            const Tensor rho = random_tensor(3, DType::f32, {rows}), drho = random_tensor(7, DType::f32, {rows}), a = random_tensor(4, dtype, {rows, wide});
            const Tensor da = random_tensor(5, DType::f32, {rows, wide}), dg = random_tensor(6, DType::f32, {rows, wide});
            const TensorView ga = gpu.put(a), gda = gpu.put(da), gdg = gpu.put(dg), gdrho = gpu.put(drho);
            const auto run = [&](Context& c, TensorView a, TensorView dg, TensorView da, TensorView drho, ConstTensorView g, ConstTensorView u,
                                 ConstTensorView rho) {
              if (!weighted) rho = {}, drho = {};
              swiglu(c, a.cols(beside, n), g.cols(beside, n), u.cols(beside, n), rho, limit);
              swiglu_backward(c, dg.cols(beside, n), da.cols(beside, n), drho, da.cols(beside, n), g.cols(beside, n), u.cols(beside, n), rho, limit);
            };
            run(gpu, ga, gdg, gda, gdrho, gpu.put(g), gpu.put(u), gpu.put(rho));
            run(cpu, a, dg, da, drho, g, u, rho);
            const auto label = ::testing::Message() << dtype_name(dtype) << shape.str() << " beside " << beside << " limit " << limit << " weighted "
                                                    << weighted;
            EXPECT_EQ(count_bit_differences(gpu.get(ga), a), 0) << label;
            EXPECT_EQ(count_bit_differences(gpu.get(gdg), dg), 0) << label;
            EXPECT_EQ(count_bit_differences(gpu.get(gda), da), 0) << label;
            EXPECT_EQ(count_bit_differences(gpu.get(gdrho), drho), 0) << label;
          }
}

}  // namespace
}  // namespace lockstep
