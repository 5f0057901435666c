#include "ops/embed/embed.h"

#include <gtest/gtest.h>

#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

TEST(Embed, CopiesTheTokensRowIntoEveryStream) {
  CpuContext c(3);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Shape shape : {Shape{0, 4, 8}, Shape{1, 1, 1}, Shape{7, 3, 5}, Shape{900, 4, 64}}) {
      const Tensor table = testing::random_tensor(1, dtype, {50, shape[2] + 3});
      const ConstTensorView rows = ConstTensorView(table).cols(1, shape[2]);
      const Tensor tokens = testing::random_ints(2, {shape[0]}, 50);
      Tensor x(dtype, shape);
      embed(c, x, rows, tokens);
      int64_t different = 0;
      for (int64_t t = 0; t < shape[0]; ++t)
        for (int64_t j = 0; j < shape[1]; ++j)
          different += testing::count_bit_differences(x.view().at(t).slice(j, 1), rows.slice(tokens.ptr<int32_t>()[t], 1));
      EXPECT_EQ(different, 0) << shape.str();
    }
  }
}

TEST(Embed, WritesOnlyItsRowsOfAStridedView) {
  CpuContext c;
  const Tensor table = testing::random_tensor(1, DType::f32, {5, 3});
  Tensor wide = testing::random_tensor(2, DType::f32, {4, 10});
  const Tensor before = testing::to_dtype(wide, DType::f32);
  embed(c, TensorView(wide.ptr<float>() + 2, DType::f32, {4, 2, 3}, 10), table, testing::int_tensor({4, 0, 3, 3}));
  EXPECT_EQ(testing::count_bit_differences(wide.view().cols(0, 2), before.view().cols(0, 2)), 0);
  EXPECT_EQ(testing::count_bit_differences(wide.view().cols(8, 2), before.view().cols(8, 2)), 0);
  EXPECT_EQ(wide.get(2 * 10 + 2 + 4), table.get(3 * 3 + 1));
}

// The gradient of sum(dx * x) with respect to a table entry is the sum of the dx it was copied to. Errors: a token seen m times
// adds m * n numbers below 1 in m * n - 1 + 1 roundings of partial sums below m * n.
TEST(Embed, BackwardAddsTheGradientsOfEveryCopy) {
  for (const Shape shape : {Shape{0, 4, 8}, Shape{1, 1, 1}, Shape{60, 3, 37}, Shape{400, 4, 64}}) {
    const int64_t vocabulary = 11, n = shape[1], width = shape[2];
    const Tensor dx = testing::random_tensor(3, DType::f32, shape);
    const Tensor tokens = testing::random_ints(4, {shape[0]}, vocabulary);
    const Tensor start = testing::random_tensor(5, DType::f32, {vocabulary, width});
    std::vector<double> want(vocabulary * width);
    std::vector<int64_t> seen(vocabulary);
    for (int64_t i = 0; i < start.elements(); ++i) want[i] = start.get(i);
    for (int64_t t = 0; t < shape[0]; ++t) {
      const int32_t id = tokens.ptr<int32_t>()[t];
      ++seen[id];
      for (int64_t j = 0; j < n * width; ++j) want[id * width + j % width] += dx.get(t * n * width + j);
    }
    Tensor first;
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads);
      Tensor accum = testing::to_dtype(start, DType::f32);
      embed_backward(c, accum, dx, tokens);
      for (int64_t i = 0; i < accum.elements(); ++i) {
        const double terms = static_cast<double>(seen[i / width] * n + 1);
        EXPECT_NEAR(accum.get(i), want[i], terms * terms * 0x1p-24) << i;
      }
      if (threads == 1) first = std::move(accum);
      else EXPECT_EQ(testing::count_bit_differences(accum, first), 0) << threads;
    }
  }
}

TEST(Embed, PartsOfTheTableGetTheRowsOfTheWhole) {
  CpuContext c(2);
  const Tensor dx = testing::random_tensor(6, DType::f32, {30, 2, 5}), tokens = testing::random_ints(7, {30}, 11);
  Tensor whole = testing::random_tensor(8, DType::f32, {11, 5}), parts = testing::to_dtype(whole, DType::f32);
  embed_backward(c, whole, dx, tokens);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 4}, {4, 0}, {4, 6}, {10, 1}})
    embed_backward_part(c, parts.view().slice(first, count), first, dx, tokens);
  EXPECT_EQ(testing::count_bit_differences(whole, parts), 0);
}

TEST(EmbedDeath, NamesTheTokenOutsideTheVocabulary) {
  CpuContext c;
  const Tensor table(DType::f32, {5, 3});
  Tensor x(DType::f32, {2, 4, 3}), narrow(DType::f32, {2, 4, 2}), rounded(DType::bf16, {2, 4, 3});
  EXPECT_DEATH(embed(c, x, table, testing::int_tensor({1, 5})), "token 5 at 1 of a vocabulary of 5");
  EXPECT_DEATH(embed(c, x, table, testing::int_tensor({-1, 2})), "token -1 at 0");
  EXPECT_DEATH(embed(c, narrow, table, testing::int_tensor({1, 2})), "streams");
  EXPECT_DEATH(embed(c, rounded, table, testing::int_tensor({1, 2})), "streams bf16");
  Tensor dtable(DType::f32, {5, 3});
  EXPECT_DEATH(embed_backward(c, dtable, rounded, testing::int_tensor({1, 2})), "dx bf16");
  EXPECT_DEATH(embed_backward(c, dtable, x, testing::int_tensor({1, 9})), "token 9");
}

}  // namespace
}  // namespace lockstep
