#include "ops/moe_permute/moe_permute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;
using testing::random_tensor;

constexpr size_t kSmallWorkspace = 1 << 20;

struct Plan {
  Tensor offsets, row_token, slot_row;
  Plan(Context& c, ConstTensorView ids, int64_t experts)
      : offsets(DType::i32, {experts + 1}), row_token(DType::i32, {ids.shape.elements()}), slot_row(DType::i32, ids.shape) {
    moe_plan(c, offsets, row_token, slot_row, ids);
  }
};

TEST(MoePermute, PlanIsTheSortByExpertTokenSlot) {
  CpuContext c(1, kSmallWorkspace);
  for (const int64_t rows : {0, 1, 7, 300}) {
    const int64_t experts = 9, k = 3;
    const Tensor ids = testing::random_ints(17, {rows, k}, 8);  // expert 8 gets nothing; tokens may repeat an expert
    const Plan plan(c, ids, experts);
    std::vector<std::tuple<int32_t, int32_t, int32_t>> want;
    for (int32_t t = 0; t < rows; ++t)
      for (int32_t i = 0; i < k; ++i) want.emplace_back(ids.ptr<int32_t>()[t * k + i], t, i);
    std::sort(want.begin(), want.end());
    for (int32_t e = 0; e <= experts; ++e) {
      const auto first = std::lower_bound(want.begin(), want.end(), std::make_tuple(e, 0, 0));
      EXPECT_EQ(plan.offsets.ptr<int32_t>()[e], first - want.begin());
    }
    for (size_t r = 0; r < want.size(); ++r) {
      const auto [e, t, i] = want[r];
      EXPECT_EQ(plan.row_token.ptr<int32_t>()[r], t);
      EXPECT_EQ(plan.slot_row.ptr<int32_t>()[t * k + i], static_cast<int32_t>(r));
    }
  }
}

// The sum of K + 1 terms in the stated order, written a second time: f32 additions have one answer, so bits must agree.
TEST(MoePermute, CombineAddsInSlotOrderThenShared) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t rows : {0, 1, 5, 130})
      for (const int64_t width : {1, 63, 64, 200}) {
        const int64_t experts = 8, k = 4;
        const Tensor ids = testing::random_ints(5, {rows, k}, experts);
        const Tensor wide = random_tensor(6, dtype, {rows * k, width + 3});
        const ConstTensorView expert_rows = ConstTensorView(wide).cols(2, width);
        const Tensor shared = random_tensor(7, dtype, {rows, width});
        for (int threads = 1; threads <= 4; ++threads) {
          CpuContext c(threads, kSmallWorkspace);
          const Plan plan(c, ids, experts);
          Tensor y(dtype, {rows, width});
          moe_combine(c, y, expert_rows, plan.slot_row, shared);
          Tensor want(dtype, {rows, width});
          for (int64_t t = 0; t < rows; ++t)
            for (int64_t d = 0; d < width; ++d) {
              float sum = 0;
              for (int64_t i = 0; i < k; ++i) sum += wide.get(plan.slot_row.ptr<int32_t>()[t * k + i] * (width + 3) + 2 + d);
              want.set(t * width + d, sum + shared.get(t * width + d));
            }
          ASSERT_EQ(testing::count_bit_differences(y, want), 0) << rows << " x " << width << " threads " << threads;
        }
      }
}

TEST(MoePermute, CombineRoundsEverySpecialValueAsStorageDoes) {
  CpuContext c(1, kSmallWorkspace);
  const float inf = std::numeric_limits<float>::infinity();
  Tensor rows(DType::bf16, {1, 5}), shared(DType::bf16, {1, 5}), y(DType::bf16, {1, 5}), slot(DType::i32, {1, 1});
  const float a[] = {inf, -inf, std::numeric_limits<float>::quiet_NaN(), 0x1.fep127f, 1.0f},
              b[] = {1.0f, inf, 1.0f, 0x1.fep127f, 0x1p-8f};
  for (int i = 0; i < 5; ++i) {
    rows.set(i, a[i]);
    shared.set(i, b[i]);
  }
  moe_combine(c, y, rows, slot, shared);
  EXPECT_EQ(y.get(0), inf);
  EXPECT_TRUE(std::isnan(y.get(1)));
  EXPECT_TRUE(std::isnan(y.get(2)));
  EXPECT_EQ(y.get(3), inf);
  EXPECT_EQ(y.get(4), 1.0f);  // 1 + 2^-8 lies midway and goes to the even 1
}

// A token's output is the same in a call of its own: its rows then stand elsewhere.
TEST(MoePermute, RowContract) {
  const int64_t rows = 400, width = 96, experts = 6, k = 3;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CpuContext c(3, kSmallWorkspace);
    const Tensor ids = testing::random_ints(8, {rows, k}, experts);
    const Tensor x = random_tensor(9, dtype, {rows, width}), shared = random_tensor(10, dtype, {rows, width});
    const auto forward = [&](int64_t begin, int64_t count) {
      const ConstTensorView part = ConstTensorView(ids).slice(begin, count);
      const Plan plan(c, part, experts);
      Tensor gathered(dtype, {count * k, width}), y(dtype, {count, width});
      moe_gather(c, gathered, ConstTensorView(x).slice(begin, count), plan.row_token);
      // An expert that is its id plus one times the row, exact in both dtypes' f32 sums.
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t r = plan.offsets.ptr<int32_t>()[e]; r < plan.offsets.ptr<int32_t>()[e + 1]; ++r)
          for (int64_t d = 0; d < width; ++d) gathered.set(r * width + d, (e + 1) * gathered.get(r * width + d));
      moe_combine(c, y, gathered, plan.slot_row, ConstTensorView(shared).slice(begin, count));
      return y;
    };
    const Tensor all = forward(0, rows);
    Philox rng(2, RngPurpose::test);
    for (int i = 0; i < 40; ++i) {
      const int64_t begin = rng.below(rows), count = 1 + rng.below(static_cast<uint32_t>(std::min<int64_t>(5, rows - begin)));
      EXPECT_EQ(testing::count_bit_differences(forward(begin, count), all.view().slice(begin, count)), 0);
    }
  }
}

// Gathering is linear, so its backward is fixed by <gather(x), drows> = <x, dx> for the f64 inner products of exact (small
// integer) data.
TEST(MoePermute, GatherBackwardIsTheTransposeAndAccumulates) {
  const int64_t rows = 90, width = 70, experts = 5, k = 4;
  const Tensor ids = testing::random_ints(12, {rows, k}, experts);
  Tensor x(DType::f32, {rows, width}), drows(DType::f32, {rows * k, width});
  Philox rng(3, RngPurpose::test);
  for (int64_t i = 0; i < x.elements(); ++i) x.set(i, rng.below(9) - 4.0);
  for (int64_t i = 0; i < drows.elements(); ++i) drows.set(i, rng.below(9) - 4.0);
  Tensor first;
  for (int threads = 1; threads <= 4; ++threads) {
    CpuContext c(threads, kSmallWorkspace);
    const Plan plan(c, ids, experts);
    Tensor gathered(DType::f32, {rows * k, width}), dx(DType::f32, {rows, width});
    moe_gather(c, gathered, x, plan.row_token);
    moe_gather_backward(c, dx, drows, plan.slot_row);
    double left = 0, right = 0;
    for (int64_t i = 0; i < gathered.elements(); ++i) left += gathered.get(i) * drows.get(i);
    for (int64_t i = 0; i < dx.elements(); ++i) right += dx.get(i) * x.get(i);
    EXPECT_EQ(left, right);
    EXPECT_NE(left, 0);
    const Tensor once = testing::to_dtype(dx, DType::f32);
    moe_gather_backward(c, dx, drows, plan.slot_row);
    for (int64_t i = 0; i < dx.elements(); ++i) ASSERT_EQ(dx.get(i), 2 * once.get(i));
  }
  // Rounding order on data that is not exact: the sum over slots first, then the accumulator.
  CpuContext c(2, kSmallWorkspace);
  const Plan plan(c, ids, experts);
  const Tensor random_rows = random_tensor(4, DType::f32, {rows * k, width});
  Tensor dx = random_tensor(5, DType::f32, {rows, width});
  const Tensor before = testing::to_dtype(dx, DType::f32);
  moe_gather_backward(c, dx, random_rows, plan.slot_row);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t d = 0; d < width; ++d) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += random_rows.get(plan.slot_row.ptr<int32_t>()[t * k + i] * width + d);
      ASSERT_EQ(dx.get(t * width + d), before.get(t * width + d) + sum);
    }
}

TEST(MoePermute, SpreadAndCollectAreInverse) {
  const int64_t rows = 1200, k = 6;
  CpuContext c(3, kSmallWorkspace);
  const Tensor ids = testing::random_ints(14, {rows, k}, 16);
  const Plan plan(c, ids, 16);
  const Tensor value = random_tensor(15, DType::f32, {rows, k});
  Tensor by_row(DType::f32, {rows * k}), back(DType::f32, {rows, k});
  moe_spread(c, by_row, value, plan.slot_row);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < k; ++i) ASSERT_EQ(by_row.get(plan.slot_row.ptr<int32_t>()[t * k + i]), value.get(t * k + i));
  moe_collect(c, back, by_row, plan.slot_row);
  EXPECT_EQ(testing::count_bit_differences(back, value), 0);
}

TEST(MoePermuteDeathTest, NamesWhatIsWrong) {
  CpuContext c(1, kSmallWorkspace);
  Tensor ids(DType::i32, {2, 2}), offsets(DType::i32, {4}), row_token(DType::i32, {4}), slot_row(DType::i32, {2, 2});
  ids.set(3, 3);
  EXPECT_DEATH(moe_plan(c, offsets, row_token, slot_row, ids), "expert 3 of token 1, there are 3");
  Tensor rows(DType::f32, {4, 8}), y(DType::bf16, {2, 8}), y32(DType::f32, {2, 8}), x(DType::f32, {2, 7}),
      value(DType::f32, {2, 3});
  EXPECT_DEATH(moe_combine(c, y, rows, slot_row, y32), "y is bf16 \\[2, 8\\], wanted f32 \\[2, 8\\]");
  EXPECT_DEATH(moe_gather(c, rows, x, row_token), "rows is f32 \\[4, 8\\], wanted f32 \\[4, 7\\]");
  EXPECT_DEATH(moe_gather_backward(c, x, rows, slot_row), "dx_accum is f32 \\[2, 7\\], wanted f32 \\[2, 8\\]");
  EXPECT_DEATH(moe_spread(c, y32, value, slot_row), "value is f32 \\[2, 3\\], wanted f32 \\[2, 2\\]");
}

}  // namespace
}  // namespace lockstep
