// The kernels have the CPU's bits: whole tables and parts, tokens that repeat more often than a wave is wide, strided views.

#include "ops/embed/embed.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

TEST(EmbedGpu, HasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{0, 4, 8}, Shape{1, 1, 1}, Shape{7, 3, 5}, Shape{150, 4, 24}, Shape{3, 1, 264}})
      for (const int32_t vocab : {1, 11, 500}) {
        const int64_t width = shape[2];
        const Tensor table = random_tensor(1, dtype, {vocab, width + 8}), tokens = testing::random_ints(2, {shape[0]}, vocab),
                     x = random_tensor(3, dtype, shape);
        const TensorView gx = gpu.put(x);
        for (const int64_t beside : {0, 3}) {
          embed(gpu, gx, gpu.put(table).cols(beside, width), gpu.put(tokens));
          embed(cpu, x, table.view().cols(beside, width), tokens);
          EXPECT_EQ(count_bit_differences(gpu.get(gx), x), 0) << dtype_name(dtype) << shape.str() << vocab;
        }
        if (dtype != DType::f32) continue;
        const Tensor dtable = random_tensor(4, DType::f32, {vocab, width + 4});
        const TensorView gdtable = gpu.put(dtable), gtokens = gpu.put(tokens), gdx = gpu.put(x);
        for (const int64_t beside : {0, 1}) {
          embed_backward(gpu, gdtable.cols(beside, width), gdx, gtokens);
          embed_backward(cpu, dtable.view().cols(beside, width), x, tokens);
          EXPECT_EQ(count_bit_differences(gpu.get(gdtable), dtable), 0) << shape.str() << vocab;
        }
        const int64_t first = vocab / 3;
        embed_backward_part(gpu, gdtable.cols(0, width).slice(0, vocab / 2), first, gdx, gtokens);
        embed_backward_part(cpu, dtable.view().cols(0, width).slice(0, vocab / 2), first, x, tokens);
        EXPECT_EQ(count_bit_differences(gpu.get(gdtable), dtable), 0) << shape.str() << vocab;
      }
}

// More tokens than a tile of the ranking holds.
TEST(EmbedGpu, OrdersManyTokens) {
  CpuContext cpu;
  testing::Gpu gpu;
  const int64_t rows = 2500;
  const Tensor dx = random_tensor(1, DType::f32, {rows, 1, 1}), tokens = testing::random_ints(2, {rows}, 40), dtable = random_tensor(3, DType::f32, {40, 1});
  const TensorView gdtable = gpu.put(dtable);
  embed_backward(gpu, gdtable, gpu.put(dx), gpu.put(tokens));
  embed_backward(cpu, dtable, dx, tokens);
  EXPECT_EQ(count_bit_differences(gpu.get(gdtable), dtable), 0);
}

}  // namespace
}  // namespace lockstep
