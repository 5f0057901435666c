// Deltas of rows against what they were made from: the same bytes, of the length that was counted, whatever changed; and damaged ones, which may say
// anything but must not be read past their end.

#include "sync/delta.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lockstep {
namespace {

// Rows with a gap behind each, which nothing may touch.
struct Rows {
  Rows(int64_t rows, int64_t row_bytes, int64_t gap) : bytes(static_cast<size_t>(rows * (row_bytes + gap)), '#'), view{bytes.data(), rows, row_bytes, row_bytes + gap} {}
  char& at(int64_t r, int64_t i) { return view.data[r * view.stride + i]; }
  std::vector<char> bytes;
  ByteRows view;
};

class DeltaTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, double>> {
 protected:
  // `now` differs from `before` in about `share` of its bytes.
  void fill(Rows& now, Rows& before, double share) {
    for (int64_t r = 0; r < now.view.rows; ++r)
      for (int64_t i = 0; i < now.view.row_bytes; ++i) {
        before.at(r, i) = static_cast<char>(random_());
        now.at(r, i) = static_cast<char>(before.at(r, i) ^ (std::bernoulli_distribution(share)(random_) ? 1 + random_() % 255 : 0));
      }
  }
  std::mt19937 random_{7};
};

TEST_P(DeltaTest, AppliesToTheBytesThatItWasMadeFrom) {
  const auto& [rows, row_bytes, share] = GetParam();
  Rows now(rows, row_bytes, 0), before(rows, row_bytes, 3), local(rows, row_bytes, 5);
  fill(now, before, share);
  int64_t changed = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < row_bytes; ++i) {
      local.at(r, i) = before.at(r, i);
      if (i % kDeltaBlock != 0) continue;
      const int64_t n = std::min(kDeltaBlock, row_bytes - i);
      if (!std::equal(&now.at(r, i), &now.at(r, i) + n, &before.at(r, i))) changed += n;
    }
  Rows other = local;
  other.view.data = other.bytes.data();
  std::vector<char> delta(static_cast<size_t>(delta_bytes_max(rows, row_bytes)) + 1);
  const int64_t length = make_delta(delta.data(), now.view, before.view);
  EXPECT_EQ(length, delta_bitmap_bytes(rows, row_bytes) + changed);
  EXPECT_EQ(overwrite_changed(now.view, local.view), changed);
  const Result<int64_t> applied = apply_delta(other.view, delta);  // what comes behind it does not matter
  ASSERT_TRUE(applied.is_ok()) << applied.message();
  EXPECT_EQ(applied.value(), length);
  EXPECT_EQ(other.bytes, local.bytes);
  for (Rows* r : {&before, &local}) {
    for (int64_t i = 0; i < rows; ++i) {
      EXPECT_TRUE(std::equal(&now.at(i, 0), &now.at(i, 0) + row_bytes, &r->at(i, 0)));
      for (int64_t k = row_bytes; k < r->view.stride; ++k) EXPECT_EQ(r->at(i, k), '#');
    }
  }
  // Applied once more it changes nothing; of equal rows there is only a bitmap.
  ASSERT_TRUE(apply_delta(other.view, delta).is_ok());
  EXPECT_EQ(other.bytes, local.bytes);
  EXPECT_EQ(make_delta(delta.data(), now.view, before.view), delta_bitmap_bytes(rows, row_bytes));
}

TEST_P(DeltaTest, DamageIsNotReadPastTheEnd) {
  const auto& [rows, row_bytes, share] = GetParam();
  Rows now(rows, row_bytes, 0), before(rows, row_bytes, 0);
  fill(now, before, share);
  std::vector<char> whole(static_cast<size_t>(delta_bytes_max(rows, row_bytes)));
  whole.resize(static_cast<size_t>(make_delta(whole.data(), now.view, before.view)));
  for (int turn = 0; turn < 50; ++turn) {
    std::vector<char> damaged(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(random_() % (whole.size() + 1)));
    damaged.shrink_to_fit();  // so that sanitizers see its end
    if (!damaged.empty() && turn % 2 == 0) damaged[random_() % damaged.size()] ^= static_cast<char>(1 << random_() % 8);
    const Result<int64_t> applied = apply_delta(before.view, damaged);
    if (applied) {
      EXPECT_LE(applied.value(), static_cast<int64_t>(damaged.size()));
    } else {
      EXPECT_NE(applied.message().find("a delta of"), std::string::npos);
    }
  }
  if (!whole.empty()) {
    EXPECT_FALSE(apply_delta(before.view, std::span(whole).first(whole.size() - 1)).is_ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, DeltaTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 9, 40), ::testing::Values(1, 4, 8, 13, 64, 257, 600),
                                            ::testing::Values(0.0, 0.01, 0.3, 1.0)));

}  // namespace
}  // namespace lockstep
