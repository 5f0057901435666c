#include "ops/rows/rows.h"

#include <gtest/gtest.h>

#include "ops/testing.h"

namespace lockstep {
namespace {

TEST(Rows, GoWhereTheIndexSays) {
  CpuContext c(2);
  const testing::Tensor x = testing::random_tensor(1, DType::f32, {3, 5}), wide(DType::f32, {6, 7});
  const testing::Tensor index = testing::int_tensor({4, 0, 5});
  const TensorView out = wide.view().cols(1, 5);
  scatter_rows(c, out, x, index);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(out.row<float>(index.ptr<int32_t>()[r])[i], x.get(r * 5 + i));
  for (const int64_t r : {1, 2, 3})
    for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(wide.view().row<float>(r)[i], 0.0f);
  const testing::Tensor numbers(DType::i32, {9});
  number_rows(c, numbers);
  for (int32_t i = 0; i < 9; ++i) EXPECT_EQ(numbers.ptr<int32_t>()[i], i);
}

TEST(RowsDeath, ChecksIndices) {
  CpuContext c;
  const testing::Tensor x(DType::f32, {1, 2}), out(DType::f32, {3, 2});
  EXPECT_DEATH(scatter_rows(c, out, x, testing::int_tensor({3})), "index 3 of 3 rows");
}

}  // namespace
}  // namespace lockstep
