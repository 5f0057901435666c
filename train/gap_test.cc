// Gap metrics against the numbers of rl spec 22.7 and against hand-made cases that each metric must react to.

#include "train/gap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/rng.h"

namespace lockstep {
namespace {

// The vectors' inputs are decimal fractions; stored as f32 they are off by up to 2^-24 of their size, which moves every result by
// less than this.
constexpr double kTol = 1e-6;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Owned {
  std::vector<float> rollout, old;
  std::vector<uint8_t> mask;
  int64_t index = 0;
  GapSample view() const { return {index, rollout, old, mask}; }
};

Owned vector7() { return {{-1.2f, -0.4f, -3.0f}, {-1.0f, -0.5f, -2.0f}, {1, 1, 1}, 0}; }

TEST(Gap, VectorSeven) {
  const Owned o = vector7();
  const GapSample s = o.view();
  EXPECT_NEAR(importance_weight(s.old[0], s.rollout[0]), 1.2214027582, kTol);
  EXPECT_NEAR(importance_weight(s.old[1], s.rollout[1]), 0.9048374180, kTol);
  EXPECT_NEAR(importance_weight(s.old[2], s.rollout[2]), 2.7182818285, kTol);
  EXPECT_NEAR(sequence_weight(s), 3.0041660239, kTol);
  EXPECT_NEAR(geometric_weight(s), 1.4429168667, kTol);
  const GapMetrics g = gap_metrics(std::span(&s, 1));
  EXPECT_EQ(g.tokens, 3);
  EXPECT_NEAR(*g.logprob_abs_diff, 0.4333333333, kTol);
  EXPECT_NEAR(*g.logprob_abs_diff_tok, 0.4333333333, kTol);
  EXPECT_NEAR(*g.logprob_abs_diff_max, 1.0, kTol);
  EXPECT_NEAR(*g.gap_k1, -0.3666666667, kTol);
  EXPECT_NEAR(*g.gap_k3, 0.2481740016, kTol);
  EXPECT_NEAR(*g.prob_diff_mean, 0.0720076102, kTol);
  EXPECT_NEAR(*g.prob_diff_max, 0.0855482149, kTol);
  EXPECT_NEAR(*g.prob_diff_std, 0.0118155600, kTol);
  EXPECT_NEAR(*g.pearson, 0.9948422382, kTol);
  EXPECT_NEAR(*g.chi2_token, 2.2332038499, kTol);
  EXPECT_NEAR(*g.chi2_seq, 3.0041660239 * 3.0041660239 - 1, 10 * kTol);
  EXPECT_NEAR(*g.mult_prob_error, 1.6816185016, kTol);
  EXPECT_NEAR(*g.ess, 0.8065406652, kTol);
  EXPECT_NEAR(*g.log_ppl_diff, -0.3666666667, kTol);
  EXPECT_NEAR(*g.ppl_ratio, std::exp(-0.3666666667), kTol);
  EXPECT_NEAR(*g.tis_clipfrac, 1.0 / 3, 1e-15);  // only the last weight is over the cap of 2
  EXPECT_NEAR(*g.is_ratio_min, 0.9048374180, kTol);
  EXPECT_NEAR(*g.is_ratio_mean, (1.2214027582 + 0.9048374180 + 2.7182818285) / 3, kTol);
  EXPECT_NEAR(*g.is_ratio_max, 2.7182818285, kTol);
  EXPECT_EQ(g.exact_mismatch, 3);
  EXPECT_EQ(g.nonfinite, 0);
}

TEST(Gap, EqualBitsGiveExactZerosAndOnes) {
  Owned o{{}, {}, {}, 3};
  Philox rng(1, RngPurpose::test);
  for (int i = 0; i < 1000; ++i) o.old.push_back(-10.0f * rng.uniform());
  o.rollout = o.old;
  o.mask.assign(1000, 1);
  const GapSample s = o.view();
  const GapMetrics g = gap_metrics(std::span(&s, 1));
  EXPECT_EQ(g.exact_mismatch, 0);
  EXPECT_FALSE(g.first_mismatch.has_value());
  for (double zero :
       {*g.logprob_abs_diff, *g.logprob_abs_diff_tok, *g.logprob_abs_diff_max, *g.logprob_abs_diff_p99, *g.gap_k1, *g.gap_k3,
        *g.prob_diff_mean, *g.prob_diff_max, *g.prob_diff_std, *g.chi2_token, *g.chi2_seq, *g.log_ppl_diff, *g.tis_clipfrac})
    EXPECT_EQ(zero, 0.0);
  for (double one : {*g.ppl_ratio, *g.mult_prob_error, *g.ess, *g.is_ratio_min, *g.is_ratio_mean, *g.is_ratio_max})
    EXPECT_EQ(one, 1.0);
  EXPECT_NEAR(*g.pearson, 1.0, 1e-14);
}

TEST(Gap, OneFlippedBitIsFoundAtItsPlace) {
  std::vector<Owned> owned(3);
  for (size_t i = 0; i < owned.size(); ++i) {
    owned[i] = {{-1, -2, -3, -4}, {-1, -2, -3, -4}, {1, 1, 0, 1}, static_cast<int64_t>(10 * i)};
    owned[i].old[2] = -99;  // masked: must not count
  }
  owned[1].old[3] = std::nextafterf(-4.0f, 0.0f);
  owned[2].old[0] = -0.5f;
  std::vector<GapSample> samples;
  for (const Owned& o : owned) samples.push_back(o.view());
  const GapMetrics g = gap_metrics(samples);
  EXPECT_EQ(g.tokens, 9);
  EXPECT_EQ(g.exact_mismatch, 2);
  EXPECT_EQ(g.first_mismatch, (GapLocation{10, 3}));
}

TEST(Gap, ZeroesOfBothSignsDifferInBits) {
  const Owned o{{0.0f}, {-0.0f}, {1}, 0};
  const GapSample s = o.view();
  EXPECT_EQ(gap_metrics(std::span(&s, 1)).exact_mismatch, 1);
}

TEST(Gap, SampleMeanAndTokenMeanDiffer) {
  const Owned a{{-1, -1, -1, -1}, {-2, -2, -2, -2}, {1, 1, 1, 1}, 0}, b{{-1, -1}, {-4, -9}, {1, 0}, 1};
  const std::vector<GapSample> samples = {a.view(), b.view()};
  const GapMetrics g = gap_metrics(samples);
  EXPECT_DOUBLE_EQ(*g.logprob_abs_diff, (1.0 + 3.0) / 2);
  EXPECT_DOUBLE_EQ(*g.logprob_abs_diff_tok, (4 * 1.0 + 3.0) / 5);
  EXPECT_DOUBLE_EQ(*g.log_ppl_diff, (1.0 + 3.0) / 2);
  EXPECT_DOUBLE_EQ(*g.ppl_ratio, (std::exp(1.0) + std::exp(3.0)) / 2);
}

TEST(Gap, NonFiniteIsCountedAndPropagates) {
  const Owned o{{-1, kNan, -3}, {-1, -2, -std::numeric_limits<float>::infinity()}, {1, 1, 1}, 0};
  const GapSample s = o.view();
  const GapMetrics g = gap_metrics(std::span(&s, 1));
  EXPECT_EQ(g.nonfinite, 2);
  EXPECT_EQ(g.exact_mismatch, 2);
  for (double x : {*g.logprob_abs_diff, *g.logprob_abs_diff_max, *g.logprob_abs_diff_p99, *g.gap_k3, *g.prob_diff_max,
                   *g.is_ratio_max, *g.ess})
    EXPECT_TRUE(std::isnan(x));
}

TEST(Gap, NothingTrainedMeansNoMetric) {
  const Owned o{{-1, kNan}, {-1, -2}, {0, 0}, 0};
  const GapSample s = o.view();
  const GapMetrics g = gap_metrics(std::span(&s, 1));
  EXPECT_EQ(g.tokens, 0);
  EXPECT_EQ(g.nonfinite, 0);
  EXPECT_TRUE(g.values().empty());
  // One token has a mean but no spread.
  const Owned one{{-1}, {-2}, {1}, 0};
  const GapSample s1 = one.view();
  const GapMetrics g1 = gap_metrics(std::span(&s1, 1));
  EXPECT_TRUE(g1.logprob_abs_diff.has_value());
  EXPECT_FALSE(g1.prob_diff_std.has_value());
  EXPECT_FALSE(g1.pearson.has_value());
  EXPECT_EQ(g1.values().size(), 21u);
}

TEST(Gap, PartsSplitTheFirstResponseToken) {
  const Owned a{{-1, -1, -1}, {-3, -1, -1}, {1, 1, 1}, 0}, b{{-1, -1}, {-9, -2}, {0, 1}, 1};  // b's first token is masked
  const std::vector<GapSample> samples = {a.view(), b.view()};
  const GapMetrics first = gap_metrics(samples, {.part = GapPart::first_token}),
                   rest = gap_metrics(samples, {.part = GapPart::rest});
  EXPECT_EQ(first.tokens, 1);
  EXPECT_DOUBLE_EQ(*first.logprob_abs_diff_tok, 2.0);
  EXPECT_EQ(rest.tokens, 3);
  EXPECT_DOUBLE_EQ(*rest.logprob_abs_diff_tok, 1.0 / 3);
  EXPECT_EQ(first.exact_mismatch + rest.exact_mismatch, gap_metrics(samples).exact_mismatch);
}

TEST(Gap, DecilesFollowThePosition) {
  Owned o{std::vector<float>(20, -1.0f), {}, std::vector<uint8_t>(20, 1), 0};
  for (int t = 0; t < 20; ++t) o.old.push_back(-1.0f - static_cast<float>(t / 2));
  o.mask[6] = o.mask[7] = 0;
  const GapSample s = o.view();
  const auto deciles = abs_diff_by_decile(std::span(&s, 1));
  for (size_t i = 0; i < 10; ++i) {
    if (i == 3) {
      EXPECT_FALSE(deciles[i].has_value());
    } else {
      EXPECT_EQ(*deciles[i], static_cast<double>(i));
    }
  }
}

TEST(Gap, OrderStatisticsAndClamp) {
  Owned o{{}, {}, std::vector<uint8_t>(1000, 1), 0};
  for (int t = 0; t < 1000; ++t) {
    o.rollout.push_back(-1.0f);
    o.old.push_back(-1.0f - static_cast<float>((t * 7) % 1000 + 1));  // |d| is each of 1 .. 1000 once
  }
  const GapSample s = o.view();
  const GapMetrics g = gap_metrics(std::span(&s, 1));
  EXPECT_EQ(*g.logprob_abs_diff_p99, 990.0);
  EXPECT_EQ(*g.logprob_abs_diff_p999, 999.0);
  EXPECT_EQ(*g.logprob_abs_diff_max, 1000.0);
  EXPECT_EQ(*g.is_ratio_min, std::exp(-20.0));
}

TEST(GapDeath, LengthsMustAgree) {
  const Owned o{{-1, -2}, {-1}, {1, 1}, 42};
  const GapSample s = o.view();
  EXPECT_DEATH((void)gap_metrics(std::span(&s, 1)), "sample 42: 2 rollout log-probs, 1 of the trainer");
}

}  // namespace
}  // namespace lockstep
