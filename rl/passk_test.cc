#include "rl/passk.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

namespace lockstep {
namespace {

TEST(PassAtK, PublishedVector) {
  EXPECT_NEAR(pass_at_k(8, 3, 1), 0.375, 1e-10);
  EXPECT_NEAR(pass_at_k(8, 3, 2), 0.6428571429, 1e-10);
  EXPECT_NEAR(pass_at_k(8, 3, 4), 0.9285714286, 1e-10);
  EXPECT_EQ(pass_at_k(8, 3, 8), 1.0);
}

TEST(PassAtK, EqualsCountingTheSubsets) {
  for (int n = 1; n <= 12; ++n)
    for (int c = 0; c <= n; ++c)
      for (int k = 1; k <= n; ++k) {
        int subsets = 0, hits = 0;
        for (uint32_t set = 0; set < (1u << n); ++set) {  // samples 0..c-1 are the correct ones
          if (std::popcount(set) != k) continue;
          ++subsets;
          hits += (set & ((1u << c) - 1)) != 0;
        }
        EXPECT_NEAR(pass_at_k(n, c, k), static_cast<double>(hits) / subsets, 1e-13) << n << " " << c << " " << k;
      }
}

TEST(PassAtK, LargeNumbersDoNotOverflow) {
  EXPECT_EQ(pass_at_k(100000, 0, 50000), 0.0);
  EXPECT_NEAR(pass_at_k(100000, 1, 50000), 0.5, 1e-12);
  EXPECT_EQ(pass_at_k(100000, 60000, 50000), 1.0);
}

TEST(PassAtK, MeanOverProblems) {
  const std::vector<int64_t> correct = {0, 8, 3};
  EXPECT_NEAR(mean_pass_at_k(correct, 8, 2), (0 + 1 + 0.6428571429) / 3, 1e-10);
  EXPECT_EQ(mean_pass_at_k({}, 8, 2), 0.0);
}

TEST(PassAtKDeath, ImpossibleCounts) {
  EXPECT_DEATH((void)pass_at_k(8, 9, 1), "pass@1 of 9 correct among 8");
  EXPECT_DEATH((void)pass_at_k(8, 3, 9), "pass@9 of 3 correct among 8");
  EXPECT_DEATH((void)pass_at_k(8, 3, 0), "pass@0");
}

TEST(MajorityVote, MostFrequentThenEarliest) {
  const auto vote = [](std::vector<std::string> answers) { return majority_vote(answers); };
  EXPECT_EQ(vote({"1", "2", "2"}), 1);
  EXPECT_EQ(vote({"1", "2", "2", "1"}), 0);
  EXPECT_EQ(vote({"3", "2", "1", "1", "2"}), 1);
  EXPECT_EQ(vote({"", "", "7"}), 2);
  EXPECT_EQ(vote({"", ""}), -1);
  EXPECT_EQ(vote({}), -1);
}

TEST(StandardError, BoundOfTheAimeProtocol) {
  // 30 problems at p = 1/2 with 8 samples: sqrt(30 * (1/4) / 8) / 30 = 0.0323.
  const std::vector<int64_t> half(30, 4);
  EXPECT_NEAR(sampling_standard_error(half, 8), std::sqrt(30 * 0.25 / 8) / 30, 1e-12);
  EXPECT_EQ(sampling_standard_error(std::vector<int64_t>{0, 8, 8}, 8), 0.0);
  EXPECT_EQ(sampling_standard_error({}, 8), 0.0);
}

}  // namespace
}  // namespace lockstep
