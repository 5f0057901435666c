#include "rl/advantage.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"

namespace lockstep {
namespace {

using Floats = std::vector<float>;
using Offsets = std::vector<int64_t>;
using Mask = std::vector<int32_t>;

Floats group(GroupEstimator e, const Floats& rewards, const Offsets& offsets) {
  Floats a(rewards.size());
  const Status s = group_advantages(e, rewards, offsets, a);
  EXPECT_TRUE(s.is_ok()) << s.message();
  return a;
}

// Values computed in double precision elsewhere and rounded to float here: half a unit in the last place of numbers
// below 2, plus the ten decimals that were kept.
constexpr double kTolerance = 1.2e-7;

TEST(GroupAdvantages, PublishedVectors) {
  const Floats rewards = {1, 0, 0, 1, 1, 0, 0, 0};
  const auto check = [&](GroupEstimator e, double right, double wrong) {
    const Floats a = group(e, rewards, {0, 8});
    for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(a[i], rewards[i] == 1 ? right : wrong, kTolerance);
  };
  check(GroupEstimator::grpo, 1.2076123955, -0.7245674373);
  check(GroupEstimator::rloo, 0.7142857143, -0.4285714286);
  check(GroupEstimator::dr_grpo, 0.625, -0.375);
}

TEST(GroupAdvantages, RlooIsTheRewardLessTheMeanOfTheOthers) {
  const Floats rewards = {0.5f, -1.0f, 2.0f, 0.25f, 3.0f};
  const Floats a = group(GroupEstimator::rloo, rewards, {0, 5});
  for (size_t i = 0; i < rewards.size(); ++i) {
    double others = 0;
    for (size_t j = 0; j < rewards.size(); ++j) others += j == i ? 0.0 : rewards[j];
    EXPECT_NEAR(a[i], rewards[i] - others / 4, 3e-7);
  }
}

TEST(GroupAdvantages, GroupsOfDifferentSizesDoNotMix) {
  const Floats rewards = {1, 0, 5, 7, 9, 2, 2};
  const Floats a = group(GroupEstimator::dr_grpo, rewards, {0, 2, 5, 7});
  EXPECT_EQ(a, (Floats{0.5f, -0.5f, -2, 0, 2, 0, 0}));
  const Floats g = group(GroupEstimator::grpo, rewards, {0, 2, 5, 7});
  EXPECT_NEAR(g[2], -1.0 / (1 + 1e-6 / 2), 1e-6);  // std of {5, 7, 9} is 2
  EXPECT_EQ(g[5], 0.0f);
}

TEST(GroupAdvantages, BatchStdDividesByTheSpreadOfAllSamples) {
  const Floats rewards = {1, 0, 0, 0};
  const Floats a = group(GroupEstimator::batch_std, rewards, {0, 2, 4});
  EXPECT_NEAR(a[0], 0.5 / (0.5 + 1e-6), kTolerance);  // mean 1/4, squares sum to 3/4, over 3: 1/4
  EXPECT_EQ(a[2], 0.0f);
}

TEST(GroupAdvantages, EqualRewardsGiveExactlyZero) {
  for (const float r : {0.0f, 1.0f, 0.1f, -0.3f, 1e-20f})
    for (GroupEstimator e : {GroupEstimator::grpo, GroupEstimator::dr_grpo, GroupEstimator::rloo, GroupEstimator::batch_std})
      for (const float a : group(e, Floats(7, r), {0, 3, 7})) EXPECT_EQ(a, 0.0f) << group_estimator_name(e) << " " << r;
}

TEST(GroupAdvantages, FollowAPermutationOfTheGroup) {
  const Floats rewards = {1, 0, 0, 1}, permuted = {0, 1, 1, 0};
  const Floats a = group(GroupEstimator::grpo, rewards, {0, 4}), b = group(GroupEstimator::grpo, permuted, {0, 4});
  EXPECT_EQ(b, (Floats{a[1], a[0], a[3], a[2]}));
}

TEST(GroupAdvantages, AGroupOfOneIsRefused) {
  Floats a(3);
  for (GroupEstimator e : {GroupEstimator::grpo, GroupEstimator::dr_grpo, GroupEstimator::rloo, GroupEstimator::batch_std}) {
    const Status s = group_advantages(e, Floats{1, 0, 1}, Offsets{0, 2, 3}, a);
    EXPECT_EQ(s.message(), "group 1 has 1 samples, at least 2 are wanted to compare");
  }
  EXPECT_EQ(group_advantages(GroupEstimator::grpo, Floats{1, 0, 1}, Offsets{0, 0, 3}, a).message(),
            "group 0 has 0 samples, at least 2 are wanted to compare");
  EXPECT_TRUE(group_advantages(GroupEstimator::batch_std, {}, Offsets{0}, {}).is_ok());
}

TEST(GroupAdvantages, RewardsThatAreNotFiniteAreNamed) {
  Floats a(2);
  EXPECT_EQ(group_advantages(GroupEstimator::grpo, Floats{1, std::nanf("")}, Offsets{0, 2}, a).message(),
            "reward 1 is nan, a finite number is wanted");
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(group_advantages(GroupEstimator::grpo, Floats{-infinity, 1}, Offsets{0, 2}, a).message(),
            "reward 0 is -inf, a finite number is wanted");
}

TEST(GroupAdvantagesDeath, OffsetsMustFit) {
  Floats a(2);
  const Floats r = {1, 0};
  EXPECT_DEATH((void)group_advantages(GroupEstimator::grpo, r, Offsets{0, 3}, a), "group_offsets end at 3, there are 2");
  EXPECT_DEATH((void)group_advantages(GroupEstimator::grpo, r, Offsets{0, 2, 1, 2}, a), "group_offsets\\[1\\] is 2");
  EXPECT_DEATH((void)group_advantages(GroupEstimator::grpo, r, Offsets{1, 2}, a), "must begin with 0");
}

TEST(Tokens, BroadcastSkipsMaskedOnes) {
  Floats out(5, 99);
  broadcast_to_tokens(Floats{2, 7, -1}, Offsets{0, 2, 2, 5}, Mask{1, 0, 1, 1, 0}, out);
  EXPECT_EQ(out, (Floats{2, 0, -1, -1, 0}));
}

TEST(Whiten, PublishedVector) {
  Floats y(4);
  ASSERT_TRUE(whiten(Floats{1, 2, 3, 4}, Mask{1, 1, 1, 1}, y).is_ok());
  const double expected[] = {-1.1618950004, -0.3872983335, 0.3872983335, 1.1618950004};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(y[i], expected[i], kTolerance);
}

TEST(Whiten, MaskedTokensTakeNoPartAndGiveZero) {
  Floats y(6, 99);
  ASSERT_TRUE(whiten(Floats{1, 1000, 2, 3, -1000, 4}, Mask{1, 0, 1, 1, 0, 1}, y).is_ok());
  EXPECT_NEAR(y[0], -1.1618950004, kTolerance);
  EXPECT_EQ(y[1], 0.0f);
  EXPECT_EQ(y[4], 0.0f);
  EXPECT_NEAR(y[5], 1.1618950004, kTolerance);
}

TEST(Whiten, SumsOfTwoRanksAddUp) {
  const Floats x = {1, 2}, y = {3, 4};
  const Mask mask = {1, 1};
  const WhitenSums a = whiten_sums(x, mask), b = whiten_sums(y, mask);
  Floats out(2);
  ASSERT_TRUE(whiten({a.count + b.count, a.sum + b.sum, a.squares + b.squares}, y, mask, out).is_ok());
  EXPECT_NEAR(out[1], 1.1618950004, kTolerance);
}

TEST(Whiten, ConstantsGiveZeroAndOneTokenIsRefused) {
  Floats y(3);
  ASSERT_TRUE(whiten(Floats{0.1f, 0.1f, 0.1f}, Mask{1, 1, 1}, y).is_ok());
  // 0.1f's square sums round in the 53rd bit, so the mean is off by about 1e-17, and the scale is at most 1e4.
  for (const float v : y) EXPECT_NEAR(v, 0.0, 1e-12);
  EXPECT_EQ(whiten(Floats{1, 2, 3}, Mask{0, 1, 0}, y).message(), "whitening over 1 trained tokens, at least 2 are wanted");
  EXPECT_FALSE(whiten(Floats{1, std::nanf(""), 3}, Mask{1, 1, 1}, y).is_ok());
  EXPECT_TRUE(whiten(Floats{1, std::nanf(""), 3}, Mask{1, 0, 1}, y).is_ok());
}

TEST(ReinforcePp, ReturnsByHand) {
  // Sample 0: three tokens, the last one masked, so the reward stands at token 1. Sample 1: nothing trained.
  Floats g(4, 99);
  const Floats kl = {0.1f, 0.2f, 9, 9};
  ASSERT_TRUE(reinforce_pp_returns(Floats{2, 5}, Offsets{0, 3, 4}, Mask{1, 1, 0, 0}, kl, 0.5, 0.9, g).is_ok());
  EXPECT_NEAR(g[1], 2 - 0.1, 5e-7);
  EXPECT_NEAR(g[0], -0.05 + 0.9 * 1.9, 5e-7);
  EXPECT_EQ(g[2], 0.0f);
  EXPECT_EQ(g[3], 0.0f);
}

TEST(ReinforcePp, MaskedPositionsStillDiscount) {
  Floats g(3);
  ASSERT_TRUE(reinforce_pp_returns(Floats{1}, Offsets{0, 3}, Mask{1, 0, 1}, {}, 0, 0.5, g).is_ok());
  EXPECT_EQ(g, (Floats{0.25f, 0, 1}));
}

TEST(ReinforcePp, WithoutDiscountEveryTokenHasTheReward) {
  Floats g(5), y(5);
  const Mask mask = {1, 1, 1, 1, 1};
  ASSERT_TRUE(reinforce_pp_returns(Floats{1, 0}, Offsets{0, 2, 5}, mask, {}, 0, 1, g).is_ok());
  EXPECT_EQ(g, (Floats{1, 1, 0, 0, 0}));
  ASSERT_TRUE(whiten(g, mask, y).is_ok());
  EXPECT_NEAR(y[0], 0.6 / std::sqrt(0.3), 1e-6);  // mean 2/5, variance (2 * 0.36 + 3 * 0.16) / 4 = 0.3
  EXPECT_NEAR(y[4], -0.4 / std::sqrt(0.3), 1e-6);
}

TEST(ReinforcePp, BaselineSubtractsTheGroupMeanAndTheKl) {
  Floats a(4, 99);
  const Floats kl = {1, 9, 0, 2};
  ASSERT_TRUE(reinforce_pp_baseline(Floats{1, 0}, Offsets{0, 2}, Offsets{0, 2, 4}, Mask{1, 0, 1, 1}, kl, 0.25, a).is_ok());
  EXPECT_EQ(a, (Floats{0.25f, 0, -0.5f, -1.0f}));
  EXPECT_EQ(reinforce_pp_baseline(Floats{1, 0}, Offsets{0, 1, 2}, Offsets{0, 2, 4}, Mask{1, 0, 1, 1}, {}, 0, a).message(),
            "group 0 has 1 samples, at least 2 are wanted to compare");
}

TEST(ReinforcePp, BadKlIsNamedWhereItCounts) {
  Floats a(2);
  const float nan = std::nanf("");
  EXPECT_TRUE(token_rewards(Floats{1}, Offsets{0, 2}, Mask{1, 0}, Floats{0, nan}, 1, a).is_ok());
  EXPECT_EQ(token_rewards(Floats{1}, Offsets{0, 2}, Mask{1, 1}, Floats{0, nan}, 1, a).message(),
            "the KL estimate of token 1 is nan, a finite number is wanted");
}

TEST(Gae, PublishedVector) {
  Floats a(3), g(3);
  gae(Floats{0, 0, 1}, Floats{0.5f, 0.6f, 0.4f}, Offsets{0, 3}, Mask{1, 1, 1}, 0.99, 0.95, a, g);
  const double advantages[] = {0.43286215, 0.3603, 0.6}, returns[] = {0.93286215, 0.9603, 1.0};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(a[i], advantages[i], kTolerance);  // the values are floats: 0.6f is 2e-8 off
    EXPECT_NEAR(g[i], returns[i], kTolerance);
  }
}

TEST(Gae, SkipsMaskedTokensAsIfTheyWereNotThere) {
  Floats a(3), g(3), b(6), h(6);
  gae(Floats{0, 0, 1}, Floats{0.5f, 0.6f, 0.4f}, Offsets{0, 3}, Mask{1, 1, 1}, 0.99, 0.95, a, g);
  gae(Floats{7, 0, 7, 0, 1, 7}, Floats{8, 0.5f, 8, 0.6f, 0.4f, 8}, Offsets{0, 6}, Mask{0, 1, 0, 1, 1, 0}, 0.99, 0.95, b, h);
  EXPECT_EQ(b, (Floats{0, a[0], 0, a[1], a[2], 0}));
  EXPECT_EQ(h, (Floats{0, g[0], 0, g[1], g[2], 0}));
}

TEST(Gae, MatchesTheSumOfDeltasOnRandomInput) {
  // A_t = sum over k of (gamma lambda)^k delta_{t+k}, written as a double loop in double.
  Philox rng(11, RngPurpose::test);
  const size_t n = 40;
  Floats r(n), v(n), a(n), g(n);
  for (float& x : r) x = rng.normal();
  for (float& x : v) x = rng.normal();
  const Offsets offsets = {0, 1, 1, 17, 40};
  gae(r, v, offsets, Mask(n, 1), 0.9, 0.8, a, g);
  for (size_t s = 0; s + 1 < offsets.size(); ++s)
    for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
      double expected = 0, weight = 1, size = 0;
      for (int64_t k = t; k < offsets[s + 1]; ++k, weight *= 0.9 * 0.8) {
        const double next = k + 1 < offsets[s + 1] ? v[static_cast<size_t>(k + 1)] : 0.0;
        const double delta = r[static_cast<size_t>(k)] + 0.9 * next - v[static_cast<size_t>(k)];
        expected += weight * delta;
        size += std::abs(weight * delta);
      }
      EXPECT_NEAR(a[static_cast<size_t>(t)], expected, size * 0x1p-24);  // one rounding to float
      EXPECT_NEAR(g[static_cast<size_t>(t)], expected + v[static_cast<size_t>(t)], (size + 4) * 0x1p-24);
    }
}

TEST(LengthPenalty, PublishedVector) {
  const int64_t limit = 20480, buffer = 4096;
  EXPECT_EQ(length_penalty(0, limit, buffer), 0.0f);
  EXPECT_EQ(length_penalty(16384, limit, buffer), 0.0f);
  EXPECT_EQ(length_penalty(18432, limit, buffer), -0.5f);
  EXPECT_EQ(length_penalty(20480, limit, buffer), -1.0f);
  EXPECT_EQ(length_penalty(30000, limit, buffer), -1.0f);
  EXPECT_EQ(length_penalty(18432, limit, buffer, 2.0), -1.0f);
  EXPECT_EQ(length_penalty(10, 10, 0), 0.0f);
  EXPECT_EQ(length_penalty(11, 10, 0), -1.0f);
}

}  // namespace
}  // namespace lockstep
