#include "ops/checksum/checksum.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

// Items of every alignment in one call, some of several blocks, some of none.
TEST(ChecksumGpu, HasTheCpusSums) {
  CpuContext cpu;
  testing::Gpu gpu;
  const Tensor f = random_tensor(1, DType::f32, {40, 700}), b = random_tensor(2, DType::bf16, {33, 129}), bytes = random_tensor(3, DType::bf16, {7, 64});
  const TensorView gf = gpu.put(f), gb = gpu.put(b), gbytes = gpu.put(bytes);
  const auto items = [](ConstTensorView f, ConstTensorView b, ConstTensorView bytes) {
    return std::vector<ChecksumItem>{{f, 1, 0, 0},
                                     {f.slice(0, 0), 2, 0, 0},
                                     {f.cols(3, 5), 3, 1, 12},
                                     {f.cols(2, 600), 4, 0, 8},
                                     {b, 5, 7, 0},
                                     {b.cols(1, 128), 6, 7, 2},
                                     {b.cols(0, 0), 7, 7, 2},
                                     {bytes, 8, 100, 6},
                                     {bytes.cols(4, 60), 9, 0, 16}};
  };
  const std::vector<ChecksumItem> on_cpu = items(f, b, bytes), on_gpu = items(gf, gb, gbytes);
  const Tensor out(DType::i64, {static_cast<int64_t>(on_cpu.size())});
  const TensorView gout = gpu.make(DType::i64, out.view().shape);
  checksum(cpu, out, on_cpu);
  checksum(gpu, gout, on_gpu);
  EXPECT_EQ(count_bit_differences(gpu.get(gout), out), 0);
}

}  // namespace
}  // namespace lockstep
