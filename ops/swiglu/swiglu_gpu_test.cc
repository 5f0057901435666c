// The kernels have the CPU's bits, with and without weights and clamps, strided, and with a gradient written over da.

#include "ops/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/gpu_testing.h"
#include "ops/matmul/matmul_gpu.h"

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

// Codes are those of the result in its own dtype.
TEST(SwigluGpu, CodesAreThoseOfTheResultQuantised) {
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{0, 128}, Shape{1, 1}, Shape{3, 7}, Shape{5, 128}, Shape{2, 136}, Shape{3, 640}})
      for (const int64_t beside : {0, 3, 16})
        for (const bool weighted : {true, false}) {
          const int64_t rows = shape[0], n = shape[1], wide = n + beside, blocks = (n + 127) / 128;
          Tensor g = random_tensor(1, dtype, {rows, wide}, 5.0f);
          if (rows > 1) g.set(wide + beside, NAN), g.set(wide + wide - 1, INFINITY);
          const ConstTensorView gates = gpu.put(g).cols(beside, n), ups = gpu.put(random_tensor(2, dtype, {rows, wide}, 5.0f)).cols(beside, n);
          const ConstTensorView rho = weighted ? gpu.put(random_tensor(3, DType::f32, {rows})) : TensorView();
          const Tensor filler(DType::e4m3, {rows, wide}), scales(DType::f32, {rows, blocks});
          const TensorView codes = gpu.put(filler), two_steps = gpu.put(filler), got = gpu.put(scales), expected = gpu.put(scales), a = gpu.make(dtype, shape);
          swiglu(gpu, MatmulInput{{}, codes.cols(beside, n), got}, gates, ups, rho, 2.5f);
          swiglu(gpu, a, gates, ups, rho, 2.5f);
          gpu::quantize_rows(gpu, two_steps.cols(beside, n), expected, a);
          EXPECT_EQ(count_bit_differences(gpu.get(codes), gpu.get(two_steps)), 0) << dtype_name(dtype) << shape.str() << beside << weighted;
          EXPECT_EQ(count_bit_differences(gpu.get(got), gpu.get(expected)), 0) << dtype_name(dtype) << shape.str() << beside << weighted;
        }
}

}  // namespace
}  // namespace lockstep
