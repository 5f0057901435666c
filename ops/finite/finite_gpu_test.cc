// One number in any place, at any address, on either device.

#include "ops/finite/finite.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

TEST(FiniteGpu, OneNumberShows) {
  CpuContext cpu;
  testing::Gpu gpu;
  struct Format {
    DType dtype;
    uint32_t finite, not_finite;  // the largest exponent but one, and the last
  };
  for (const Format& f : {Format{DType::f32, 0xff7fffff, 0xff800000}, {DType::f32, 0x7f7fffff, 0x7fc00001}, {DType::bf16, 0x7f7f, 0x7f80}, {DType::bf16, 0xff7f, 0xffc0},
                          {DType::e4m3, 0xfe, 0xff}, {DType::ue8m0, 0xfe, 0xff}, {DType::e2m1x2, 0xff, 0}, {DType::i32, 0xffffffff, 0}})
    for (const int64_t n : {1, 7, 5000})
      for (const int64_t offset : {0, 1, 2})
        for (const int64_t place : {int64_t{-1}, int64_t{0}, n / 2, n - 1}) {
          if (f.not_finite == 0 && place >= 0) continue;
          const size_t bytes = dtype_bytes(f.dtype);
          const Tensor memory(DType::u8, {n * static_cast<int64_t>(bytes) + offset});
          for (int64_t i = 0; i < n; ++i)
            std::memcpy(memory.view().ptr<uint8_t>() + offset + static_cast<size_t>(i) * bytes, i == place ? &f.not_finite : &f.finite, bytes);
          int32_t mark = 0;
          mark_nonfinite(cpu, TensorView(&mark, DType::i32, {1}), ConstTensorView(memory.view().ptr<uint8_t>() + offset, f.dtype, {n}));
          EXPECT_EQ(mark, place >= 0) << dtype_name(f.dtype) << ' ' << n << " at " << place;
          const TensorView there = gpu.put(testing::int_tensor({0}));
          mark_nonfinite(gpu, there, ConstTensorView(gpu.put(memory).ptr<uint8_t>() + offset, f.dtype, {n}));
          EXPECT_EQ(*gpu.get(there).view().ptr<int32_t>(), mark) << dtype_name(f.dtype) << ' ' << n << " at " << place << " offset " << offset;
        }
  // A mark stays.
  const TensorView there = gpu.put(testing::int_tensor({1}));
  mark_nonfinite(gpu, there, gpu.put(Tensor(DType::f32, {3})));
  EXPECT_EQ(*gpu.get(there).view().ptr<int32_t>(), 1);
}

}  // namespace
}  // namespace lockstep
