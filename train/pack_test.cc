// Every sample is packed once, no micro-batch goes over the budget unless one sample alone does, and the packing is a function of
// the lengths.

#include "train/pack.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"

namespace lockstep {
namespace {

TEST(Pack, LongestFirstIntoTheFirstBatchWithRoom) {
  const std::vector<int64_t> rows = {3, 9, 4, 6, 1};
  const auto batches = pack(rows, 10);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0].samples, (std::vector<int32_t>{1, 4}));  // 9, then 1 fills it
  EXPECT_EQ(batches[1].samples, (std::vector<int32_t>{2, 3}));  // 6 + 4
  EXPECT_EQ(batches[2].samples, (std::vector<int32_t>{0}));
  EXPECT_EQ(batches[0].rows, 10);
  EXPECT_EQ(batches[1].rows, 10);
  EXPECT_EQ(batches[2].rows, 3);
}

TEST(Pack, OverlongSampleFormsItsOwn) {
  const std::vector<int64_t> rows = {2, 50, 2};
  const auto batches = pack(rows, 10);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].samples, (std::vector<int32_t>{1}));
  EXPECT_EQ(batches[0].rows, 50);
  EXPECT_EQ(batches[1].samples, (std::vector<int32_t>{0, 2}));
}

TEST(Pack, NothingGivesNothing) { EXPECT_TRUE(pack({}, 10).empty()); }

TEST(Pack, KeepsEveryTokenExactlyOnceWithinTheBudget) {
  Philox rng(7, RngPurpose::test);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int64_t> rows(rng.below(60));
    for (int64_t& r : rows) r = 1 + rng.below(40);
    const int64_t budget = 1 + rng.below(100);
    const auto batches = pack(rows, budget);
    std::vector<int> seen(rows.size(), 0);
    for (const MicroBatch& b : batches) {
      ASSERT_FALSE(b.samples.empty());
      EXPECT_TRUE(std::is_sorted(b.samples.begin(), b.samples.end()));
      int64_t sum = 0;
      for (int32_t i : b.samples) {
        ++seen[static_cast<size_t>(i)];
        sum += rows[static_cast<size_t>(i)];
      }
      EXPECT_EQ(sum, b.rows);
      EXPECT_TRUE(sum <= budget || b.samples.size() == 1) << sum << " rows of " << budget;
    }
    EXPECT_EQ(seen, std::vector<int>(rows.size(), 1));
    // No two micro-batches could have been one.
    for (size_t a = 0; a < batches.size(); ++a)
      for (size_t b = a + 1; b < batches.size(); ++b) EXPECT_GT(batches[a].rows + batches[b].rows, budget);
  }
}

TEST(Pack, SharesHoldEverySampleOnceAndAreEven) {
  EXPECT_EQ(share_out(std::vector<int64_t>{5, 3, 3, 9, 1}, 2), (std::vector<std::vector<int32_t>>{{3, 4}, {0, 1, 2}}));
  EXPECT_EQ(share_out(std::vector<int64_t>{5}, 3), (std::vector<std::vector<int32_t>>{{0}, {}, {}}));
  Philox rng(8, RngPurpose::test);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int64_t> rows(rng.below(60));
    for (int64_t& r : rows) r = 1 + rng.below(40);
    const int parts = 1 + static_cast<int>(rng.below(8));
    const auto shares = share_out(rows, parts);
    ASSERT_EQ(shares.size(), static_cast<size_t>(parts));
    std::vector<int> seen(rows.size(), 0);
    std::vector<int64_t> load;
    for (const auto& share : shares) {
      EXPECT_TRUE(std::is_sorted(share.begin(), share.end()));
      load.push_back(0);
      for (const int32_t i : share) {
        ++seen[static_cast<size_t>(i)];
        load.back() += rows[static_cast<size_t>(i)];
      }
    }
    EXPECT_EQ(seen, std::vector<int>(rows.size(), 1));
    // Before it took its last sample the fullest part was no fuller than any other.
    const auto [low, high] = std::minmax_element(load.begin(), load.end());
    EXPECT_LE(*high - *low, rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end()));
  }
}

TEST(Pack, LastTokenOfASequenceIsNotRun) {
  TrainSample s;
  s.tokens = {5, 6, 7, 8};
  s.prompt_length = 1;
  EXPECT_EQ(trained_rows(s), 3);
}

TEST(Pack, CanonicalOrderIsByIndexThenPlace) {
  std::vector<TrainSample> samples(4);
  samples[0].index = 7;
  samples[1].index = 2;
  samples[2].index = 7;
  samples[3].index = -1;
  EXPECT_EQ(canonical_order(samples), (std::vector<int32_t>{3, 1, 0, 2}));
}

// Every part sees the same shares and as many micro-batches; together they hold each chosen sample once.
TEST(PlanWork, PartsAgreeAndCoverWhatWasChosen) {
  std::vector<TrainSample> samples(9);
  for (size_t i = 0; i < samples.size(); ++i) samples[i].tokens.resize(2 + (i * 7) % 13);
  for (const std::vector<int32_t>& chosen : {std::vector<int32_t>{}, {3}, {8, 1, 5}, {0, 1, 2, 4, 5, 6, 7, 8}}) {
    for (int parts = 1; parts <= 5; ++parts) {
      std::vector<int32_t> seen;
      int64_t total = 0;
      const Work first = plan_work(samples, chosen, parts, 0, 12);
      for (int p = 0; p < parts; ++p) {
        const Work work = plan_work(samples, chosen, parts, p, 12);
        EXPECT_EQ(work.shares, first.shares);
        EXPECT_EQ(work.micro_batches.size(), first.micro_batches.size());
        std::vector<int32_t> own;
        for (const MicroBatch& m : work.micro_batches) {
          own.insert(own.end(), m.samples.begin(), m.samples.end());
          total += !m.samples.empty();
          int64_t rows = 0;
          for (const int32_t i : m.samples) rows += trained_rows(samples[static_cast<size_t>(i)]);
          EXPECT_EQ(m.rows, rows);
        }
        std::vector<int32_t> share = work.shares[static_cast<size_t>(p)];
        std::sort(own.begin(), own.end());
        std::sort(share.begin(), share.end());
        EXPECT_EQ(own, share);
        seen.insert(seen.end(), own.begin(), own.end());
      }
      EXPECT_EQ(first.total, total);
      std::sort(seen.begin(), seen.end());
      std::vector<int32_t> wanted = chosen;
      std::sort(wanted.begin(), wanted.end());
      EXPECT_EQ(seen, wanted);
    }
  }
}

}  // namespace
}  // namespace lockstep
