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
  // Everything at multiples of 16, 4, 2 and 1 bytes, in one piece and in rows.
  for (const int64_t width : {1, 6, 12, 48, 4112})
    for (const int64_t beside : {0, 1, 2, 4, 16})
      for (const int64_t offset : {0, 1, 2, 4, 16}) {
        Tensor x(DType::u8, {3 * (width + beside) + offset}), out(DType::u8, {3 * (width + 2 * beside) + offset});
        for (int64_t i = 0; i < x.elements(); ++i) x.view().ptr<uint8_t>()[i] = static_cast<uint8_t>(i * 7 + 1);
        const auto rows = [&](const TensorView& memory, int64_t pitch) {
          const TensorView whole(memory.ptr<uint8_t>() + offset, DType::u8, {3, pitch});
          return pitch == width ? whole : whole.cols(0, width);
        };
        const TensorView g = gpu.put(out);
        copy_rows(gpu, rows(g, width + 2 * beside), rows(gpu.put(x), width + beside));
        copy_rows(cpu, rows(out, width + 2 * beside), rows(x, width + beside));
        EXPECT_EQ(count_bit_differences(gpu.get(g), out), 0) << width << " beside " << beside << " from " << offset;
        EXPECT_EQ(out.view().ptr<uint8_t>()[offset + 2 * (width + 2 * beside)], x.view().ptr<uint8_t>()[offset + 2 * (width + beside)]);
      }
  const Tensor numbers(DType::i32, {300});
  number_rows(cpu, numbers);
  const TensorView g = gpu.make(DType::i32, {300});
  number_rows(gpu, g);
  EXPECT_EQ(count_bit_differences(gpu.get(g), numbers), 0);
}

}  // namespace
}  // namespace lockstep
