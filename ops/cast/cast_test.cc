#include "ops/cast/cast.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "ops/cast/cast_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

const std::vector<Shape> kShapes = {{0}, {1}, {7}, {100003}, {0, 5}, {5, 3}, {600, 37}, {3, 2, 9}};

std::vector<std::unique_ptr<CpuContext>> contexts() {
  std::vector<std::unique_ptr<CpuContext>> out;
  for (int threads = 1; threads <= 4; ++threads) out.push_back(std::make_unique<CpuContext>(threads));
  return out;
}

// A view of `shape` whose rows lie inside rows that are three elements longer; `storage` holds it.
TensorView strided(const Tensor& storage, const Shape& shape) {
  const int64_t row = shape.row_elements();
  char* data = static_cast<char*>(storage.view().data) + dtype_bytes(storage.view().dtype);
  return TensorView(data, storage.view().dtype, shape, row + 3);
}

TEST(Cast, EveryTypeEveryTargetEveryLayout) {
  const auto all = contexts();
  for (const DType from : {DType::f32, DType::bf16})
    for (const DType to : {DType::f32, DType::bf16})
      for (const Shape& shape : kShapes) {
        const Shape wide = {shape[0] + 1, shape.row_elements() + 3};
        const Tensor src = testing::random_tensor(1, from, wide, 100.0f);
        Tensor want = testing::random_tensor(2, to, wide);
        reference::cast(*all[0], strided(want, shape), strided(src, shape));
        const Tensor dense_src = testing::random_tensor(3, from, shape, 100.0f), dense_want = testing::to_dtype(dense_src, to);
        testing::for_each_simd_target([&](const std::string& target) {
          for (const auto& c : all) {
            Tensor got = testing::random_tensor(2, to, wide), dense(to, shape);
            cast(*c, strided(got, shape), strided(src, shape));
            EXPECT_EQ(testing::count_bit_differences(got, want), 0) << target << shape.str();
            cast(*c, dense, dense_src);
            EXPECT_EQ(testing::count_bit_differences(dense, dense_want), 0) << target << shape.str();
          }
        });
      }
}

TEST(Cast, KeepsAndRoundsSpecialValues) {
  CpuContext c;
  Tensor x(DType::f32, {8}), narrow(DType::bf16, {8}), wide(DType::f32, {8});
  const uint32_t bits[8] = {0x7f800001u, 0xffc00123u, 0x7f800000u, 0xff800000u,
                            0x7f7fffffu, 0x80000000u, 0x00000001u, 0x3f808000u};
  const uint16_t want[8] = {0x7fc0, 0xffc0, 0x7f80, 0xff80, 0x7f80, 0x8000, 0x0000, 0x3f80};
  std::memcpy(x.ptr<float>(), bits, sizeof(bits));
  cast(c, narrow, x);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(narrow.ptr<bf16>()[i].bits, want[i]) << i;
  cast(c, wide, narrow);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(std::bit_cast<uint32_t>(wide.ptr<float>()[i]), uint32_t{want[i]} << 16) << i;
  // A copy keeps a signalling NaN.
  cast(c, wide, x);
  EXPECT_EQ(std::memcmp(wide.ptr<float>(), bits, sizeof(bits)), 0);
}

TEST(Cast, AddAndScale) {
  const auto all = contexts();
  for (const Shape& shape : kShapes) {
    const Shape wide = {shape[0] + 1, shape.row_elements() + 3};
    const Tensor src = testing::random_tensor(1, DType::f32, wide), start = testing::random_tensor(2, DType::f32, wide);
    Tensor want = testing::to_dtype(start, DType::f32);
    reference::add(*all[0], strided(want, shape), strided(src, shape));
    reference::scale(*all[0], strided(want, shape), 0.3f);
    testing::for_each_simd_target([&](const std::string& target) {
      for (const auto& c : all) {
        Tensor got = testing::to_dtype(start, DType::f32);
        add(*c, strided(got, shape), strided(src, shape));
        scale(*c, strided(got, shape), 0.3f);
        EXPECT_EQ(testing::count_bit_differences(got, want), 0) << target << shape.str();
      }
    });
  }
  Tensor a(DType::f32, {3});
  a.set(1, 2);
  add(*all[0], a, a);
  scale(*all[0], a, 0.5f);
  add(*all[0], a, a);
  EXPECT_EQ(a.get(1), 4.0f);
}

TEST(CastDeath, ChecksShapesAndTypes) {
  CpuContext c;
  Tensor x(DType::f32, {2, 4}), y(DType::f32, {4, 2}), ids(DType::i32, {2, 4}), half(DType::bf16, {2, 4});
  EXPECT_DEATH(cast(c, x, y), "dst \\[2, 4\\], src \\[4, 2\\]");
  EXPECT_DEATH(cast(c, x, ids), "i32 to f32");
  EXPECT_DEATH(add(c, x, y), "dst \\[2, 4\\], src \\[4, 2\\]");
  EXPECT_DEATH(add(c, x, half), "bf16 to f32");
  EXPECT_DEATH(scale(c, half, 2.0f), "bf16");
}

}  // namespace
}  // namespace lockstep
