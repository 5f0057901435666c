// The kernels have the CPU's bits, in every shape, strided, in place and accumulating.

#include "ops/rmsnorm/rmsnorm.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(RmsNormGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{33, 16}, Shape{5, 64}, Shape{70, 100}, Shape{3, 4096}})
      for (const bool gain : {true, false})
        for (const bool accumulate : {true, false}) {
          const int64_t rows = shape[0], n = shape[1];
          // Everything lies inside wider tensors, compared whole: what is outside must stay untouched.
          const Tensor x = random_tensor(1, dtype, {rows, n + 5}, 3.0f), w = random_tensor(2, DType::f32, {n}), dy = random_tensor(3, DType::f32, {rows, n + 3});
          const Tensor y = random_tensor(4, dtype, {rows, n + 5}), inv(DType::f32, {rows}), dx = random_tensor(5, DType::f32, {rows, n + 2}),
                       dw = random_tensor(6, DType::f32, {n});
          const TensorView gy = gpu.put(y), ginv = gpu.put(inv), gdx = gpu.put(dx), gdw = gpu.put(dw);
          const auto run = [&](Context& c, TensorView y, TensorView inv, TensorView dx, TensorView dw, ConstTensorView x, ConstTensorView w, ConstTensorView dy) {
            if (!gain) w = {}, dw = {};
            rmsnorm(c, y.cols(2, n), inv, x.cols(2, n), w, 0.01f);
            rmsnorm_backward(c, dx.cols(1, n), dw, dy.cols(1, n), x.cols(2, n), w, inv, accumulate);
          };
          run(gpu, gy, ginv, gdx, gdw, gpu.put(x), gpu.put(w), gpu.put(dy));
          run(cpu, y, inv, dx, dw, x, w, dy);
          EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << dtype_name(dtype) << shape.str();
          EXPECT_EQ(count_bit_differences(gpu.get(ginv), inv), 0) << dtype_name(dtype) << shape.str();
          EXPECT_EQ(count_bit_differences(gpu.get(gdx), dx), 0) << dtype_name(dtype) << shape.str();
          EXPECT_EQ(count_bit_differences(gpu.get(gdw), dw), 0) << dtype_name(dtype) << shape.str();
        }
}

// Whole vectors, rows longer than a block holds at once, and more rows than a tile of the gain's.
TEST(RmsNormGpu, HasTheCpusBitsInLongRowsAndMany) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{5, 512}, Shape{3, 2048}, Shape{2, 7168}, Shape{2, 20008}, Shape{600, 24}}) {
      const int64_t rows = shape[0], n = shape[1];
      const Tensor x = random_tensor(1, dtype, shape, 3.0f), w = random_tensor(2, DType::f32, {n}), dy = random_tensor(3, DType::f32, shape), y(dtype, shape),
                   inv(DType::f32, {rows}), dx = random_tensor(5, DType::f32, shape), dw = random_tensor(6, DType::f32, {n});
      const TensorView gx = gpu.put(x), gw = gpu.put(w), gdy = gpu.put(dy), gy = gpu.put(y), ginv = gpu.put(inv), gdx = gpu.put(dx), gdw = gpu.put(dw);
      rmsnorm(gpu, gy, ginv, gx, gw, 0.01f);
      rmsnorm_backward(gpu, gdx, gdw, gdy, gx, gw, ginv, true);
      rmsnorm(cpu, y, inv, x, w, 0.01f);
      rmsnorm_backward(cpu, dx, dw, dy, x, w, inv, true);
      EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << dtype_name(dtype) << shape.str();
      EXPECT_EQ(count_bit_differences(gpu.get(ginv), inv), 0) << dtype_name(dtype) << shape.str();
      EXPECT_EQ(count_bit_differences(gpu.get(gdx), dx), 0) << dtype_name(dtype) << shape.str();
      EXPECT_EQ(count_bit_differences(gpu.get(gdw), dw), 0) << dtype_name(dtype) << shape.str();
    }
}

TEST(RmsNormGpu, RotatesAsRopeDoes) {
  CpuContext cpu;
  testing::Gpu gpu;
  const Tensor pos = testing::int_tensor({4, 0, 8, 3, 3});
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{2, 2}, Shape{24, 6}, Shape{15, 4}, Shape{26, 10}, Shape{128, 64}, Shape{512, 64}, Shape{600, 72}, Shape{2200, 8},
                               Shape{64, 0}})
      for (const int64_t heads : {1, 4}) {
        const int64_t n = shape[0], rotary = shape[1], rows = 5 * heads;
        const Tensor x = random_tensor(1, dtype, {rows, n}, 3.0f), w = random_tensor(2, DType::f32, {n}), table = random_tensor(3, DType::f32, {9, rotary}),
                     y(dtype, {rows, n}), inv(DType::f32, {rows});
        const TensorView gy = gpu.make(dtype, {rows, n}), ginv = gpu.make(DType::f32, {rows});
        const bool gain = heads == 1;
        rmsnorm_rope(gpu, gy, ginv, gpu.put(x), gain ? gpu.put(w) : TensorView(), 0.01f, gpu.put(pos), gpu.put(table), heads);
        rmsnorm_rope(cpu, y, inv, x, gain ? w.view() : TensorView(), 0.01f, pos, table, heads);
        EXPECT_EQ(count_bit_differences(gpu.get(gy), y), 0) << dtype_name(dtype) << shape.str() << heads;
        EXPECT_EQ(count_bit_differences(gpu.get(ginv), inv), 0) << dtype_name(dtype) << shape.str() << heads;
      }
}

TEST(RmsNormGpu, WorksInPlace) {
  CpuContext cpu;
  testing::Gpu gpu;
  const Tensor x = random_tensor(1, DType::f32, {9, 33}), dy = random_tensor(3, DType::f32, {9, 33});
  const TensorView gx = gpu.put(x), gdy = gpu.put(dy), ginv = gpu.make(DType::f32, {9});
  Tensor y(DType::f32, {9, 33}), inv(DType::f32, {9}), dx(DType::f32, {9, 33});
  rmsnorm(cpu, y, inv, x, {}, 0.01f);
  rmsnorm_backward(cpu, dx, {}, dy, x, {}, inv);
  const TensorView in_place = gpu.put(x);
  rmsnorm(gpu, in_place, ginv, in_place, {}, 0.01f);
  rmsnorm_backward(gpu, gdy, {}, gdy, gx, {}, ginv);
  EXPECT_EQ(count_bit_differences(gpu.get(in_place), y), 0);
  EXPECT_EQ(count_bit_differences(gpu.get(gdy), dx), 0);
}

}  // namespace
}  // namespace lockstep
