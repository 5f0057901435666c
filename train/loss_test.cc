// Losses against the numbers of rl spec 22, and their gradients against finite differences of the whole aggregated loss written
// again in f64.

#include "train/loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/rng.h"

namespace lockstep {
namespace {

constexpr double kTol = 1e-6;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Results of f32 terms: inputs are decimal fractions rounded to f32, exp is good to 2 ulp, so a few units of 2^-24 relative.
void expect_close(double got, double want) { EXPECT_NEAR(got, want, kTol * std::max(1.0, std::abs(want))); }

TEST(Loss, PpoVectors) {
  LossConfig c;
  c.clip_low = 0.2f;
  c.clip_high = 0.28f;
  PolicyTerm t = policy_term(0.3f, 0.0f, 1.0f, c);
  expect_close(t.ratio, 1.3498588076);
  expect_close(t.loss, -1.28);
  EXPECT_TRUE(t.clipped);
  EXPECT_EQ(t.dlogprob, 0.0f);
  t = policy_term(0.3f, 0.0f, -1.0f, c);
  expect_close(t.loss, 1.3498588076);
  EXPECT_FALSE(t.clipped);
  expect_close(t.dlogprob, 1.3498588076);
  t = policy_term(-0.3f, 0.0f, 1.0f, c);
  expect_close(t.loss, -0.7408182207);
  EXPECT_FALSE(t.clipped);
  expect_close(t.dlogprob, -0.7408182207);
  t = policy_term(-0.3f, 0.0f, -1.0f, c);
  expect_close(t.loss, 0.8);
  EXPECT_TRUE(t.clipped);
  EXPECT_EQ(t.dlogprob, 0.0f);
  t = policy_term(2.0f, 0.0f, -1.0f, c);
  expect_close(t.loss, 7.3890560989);
  EXPECT_FALSE(t.clipped_lower);
  c.dual_clip = 3.0f;
  t = policy_term(2.0f, 0.0f, -1.0f, c);
  expect_close(t.loss, 3.0);
  EXPECT_TRUE(t.clipped_lower);
  EXPECT_EQ(t.dlogprob, 0.0f);
  t = policy_term(2.0f, 0.0f, 1.0f, c);  // dual clip is for negative advantages only
  EXPECT_FALSE(t.clipped_lower);
}

TEST(Loss, KlVectors) {
  expect_close(kl_term(0.1f, 0.0f, KlKind::k1).value, 0.1);
  expect_close(kl_term(0.1f, 0.0f, KlKind::k2).value, 0.005);
  expect_close(kl_term(0.1f, 0.0f, KlKind::k3).value, 0.0048374180);
  expect_close(kl_term(-0.1f, 0.0f, KlKind::k3).value, 0.0051709181);
  EXPECT_EQ(kl_term(-0.1f, 0.0f, KlKind::none).value, 0.0f);
}

// Over the whole range k3 and its slope agree with f64 to f32 precision, and k3 is never negative. Error: below |e| = 1/4 the
// series costs a few roundings; above, exp is good to 2 ulp, at worst 2^-22 at e = -1/4, where k3 is 0.0340 and the slope 0.284:
// 118 and 15 times 2^-24 relative.
TEST(Loss, K3KeepsItsPrecisionNearZero) {
  for (int i = -4000; i <= 4000; ++i) {
    for (const float scale : {1e-6f, 1e-3f, 0.005f}) {
      const double e = static_cast<double>(static_cast<float>(i) * scale);
      // For tiny e even f64's expm1(-e) + e cancels; e^2/2 - e^3/6 is then exact enough.
      const double want = std::abs(e) < 1e-4 ? e * e * (0.5 - e / 6) : std::expm1(-e) + e;
      const KlTerm k = kl_term(static_cast<float>(e), 0.0f, KlKind::k3);
      EXPECT_GE(k.value, 0.0f);
      if (want >= 10) {
        EXPECT_EQ(k.value, 10.0f);
        EXPECT_EQ(k.dlogprob, 0.0f);
        continue;
      }
      EXPECT_NEAR(k.value, want, want * 118 * 0x1p-24) << e;
      EXPECT_NEAR(k.dlogprob, -std::expm1(-e), std::abs(std::expm1(-e)) * 15 * 0x1p-24) << e;
    }
  }
}

TEST(Loss, ClampedLogRatioHasNoGradient) {
  const LossConfig c;
  const PolicyTerm t = policy_term(25.0f, 0.0f, -1.0f, c);
  EXPECT_NEAR(t.loss, std::exp(20.0), std::exp(20.0) * 1e-6);
  EXPECT_EQ(t.dlogprob, 0.0f);
  EXPECT_TRUE(std::isnan(policy_term(kNan, 0.0f, 1.0f, c).loss));
}

TEST(Loss, OnPolicyRatioIsExactlyOne) {
  LossConfig c;
  c.dual_clip = 3.0f;
  Philox rng(1, RngPurpose::test);
  for (int i = 0; i < 1000; ++i) {
    const float lp = -20.0f * rng.uniform(), a = 4.0f * rng.uniform() - 2.0f;
    const PolicyTerm t = policy_term(lp, lp, a, c);
    EXPECT_EQ(t.ratio, 1.0f);
    EXPECT_EQ(t.loss, -a);
    EXPECT_EQ(t.dlogprob, -a);
    EXPECT_FALSE(t.clipped || t.clipped_lower);
  }
}

// Samples whose SFT losses are the given numbers.
TrainSample sft_sample(int64_t index, std::vector<float> losses) {
  TrainSample s;
  s.index = index;
  s.prompt_length = 2;
  s.tokens.assign(2 + losses.size(), 0);
  s.mask.assign(losses.size(), 1);
  s.advantage = losses;  // kept here for logprobs_of
  return s;
}

LossSums total_loss(const std::vector<TrainSample>& samples, const std::vector<std::vector<float>>& logprobs,
                    const std::vector<std::vector<float>>& entropies, const LossConfig& c,
                    std::vector<std::vector<float>>* dlogprobs = nullptr, std::vector<std::vector<float>>* dentropies = nullptr) {
  const Denominators d = count_denominators(samples, c);
  LossSums total;
  for (size_t i = 0; i < samples.size(); ++i) {
    std::vector<float> dl(logprobs[i].size(), kNan), de(logprobs[i].size(), kNan);
    total.add(sample_loss(samples[i], logprobs[i], entropies[i], d, c, dl, de));
    if (dlogprobs != nullptr) dlogprobs->push_back(dl);
    if (dentropies != nullptr) dentropies->push_back(de);
  }
  return total;
}

TEST(Loss, AggregationVectors) {
  const std::vector<std::vector<float>> losses = {{1, 2, 3, 4}, {2, 2}, {5}};
  std::vector<TrainSample> samples;
  std::vector<std::vector<float>> logprobs, entropies;
  for (size_t i = 0; i < losses.size(); ++i) {
    samples.push_back(sft_sample(static_cast<int64_t>(i), losses[i]));
    logprobs.emplace_back();
    for (float x : losses[i]) logprobs[i].push_back(-x);
    entropies.emplace_back(losses[i].size(), 0.0f);
  }
  LossConfig c;
  c.kind = LossKind::sft;
  c.norm_length = 8;
  const auto loss_of = [&](Aggregation a) {
    c.aggregation = a;
    return total_loss(samples, logprobs, entropies, c).loss;
  };
  EXPECT_NEAR(loss_of(Aggregation::token_mean), 2.7142857143, 1e-10);
  EXPECT_NEAR(loss_of(Aggregation::seq_mean_token_mean), 3.1666666667, 1e-10);
  EXPECT_NEAR(loss_of(Aggregation::seq_mean_token_sum), 6.3333333333, 1e-10);
  EXPECT_NEAR(loss_of(Aggregation::seq_mean_token_sum_norm), 0.7916666667, 1e-10);
  EXPECT_NEAR(loss_of(Aggregation::token_sum), 19.0, 1e-10);

  // Denominators of the whole step make micro-batches {0} and {1, 2} add up to 2.714; averaging their own means gives 2.75.
  c.aggregation = Aggregation::token_mean;
  const Denominators d = count_denominators(samples, c);
  EXPECT_EQ(d.num_tokens, 7);
  EXPECT_EQ(d.num_sequences, 3);
  double parts = 0, wrong = 0;
  for (const std::vector<size_t>& micro : {std::vector<size_t>{0}, {1, 2}}) {
    std::vector<TrainSample> part;
    LossSums own;
    for (size_t i : micro) part.push_back(samples[i]);
    const Denominators own_d = count_denominators(part, c);
    for (size_t i : micro) {
      std::vector<float> dl(logprobs[i].size()), de(logprobs[i].size());
      parts += sample_loss(samples[i], logprobs[i], entropies[i], d, c, dl, de).loss;
      own.add(sample_loss(samples[i], logprobs[i], entropies[i], own_d, c, dl, de));
    }
    wrong += own.loss / 2;
  }
  EXPECT_NEAR(parts, 2.7142857143, 1e-10);
  EXPECT_NEAR(wrong, 2.75, 1e-10);
}

TEST(Loss, EmptySequencesCountOnlyIfAsked) {
  std::vector<TrainSample> samples = {sft_sample(0, {1, 3}), sft_sample(1, {9})};
  samples[1].mask = {0};
  LossConfig c;
  c.kind = LossKind::sft;
  c.aggregation = Aggregation::seq_mean_token_mean;
  const std::vector<std::vector<float>> logprobs = {{-1, -3}, {-9}}, entropies = {{0, 0}, {0}};
  EXPECT_EQ(total_loss(samples, logprobs, entropies, c).loss, 1.0);
  c.count_empty_sequences = false;
  EXPECT_EQ(total_loss(samples, logprobs, entropies, c).loss, 2.0);
  EXPECT_EQ(token_weight({0, 0}, 0, c), 0.0);
}

// A step of several random samples with masked tokens (NaN there, as in the records), log-ratios on both sides of every bound.
struct Case {
  std::vector<TrainSample> samples;
  std::vector<std::vector<float>> logprobs, entropies;
};

Case random_case(uint64_t seed) {
  Case k;
  Philox rng(seed, RngPurpose::test);
  for (const size_t n : {1u, 5u, 8u, 13u, 2u}) {
    TrainSample s;
    s.index = static_cast<int64_t>(k.samples.size());
    s.prompt_length = 3;
    s.tokens.assign(3 + n, 1);
    k.logprobs.emplace_back();
    k.entropies.emplace_back();
    for (size_t t = 0; t < n; ++t) {
      const bool trained = n == 1 || (n != 2 && rng.below(4) != 0);  // the last sample has no trained token
      const float lp = -4.0f * rng.uniform();
      k.logprobs.back().push_back(lp);
      k.entropies.back().push_back(3.0f * rng.uniform());
      s.mask.push_back(trained);
      s.advantage.push_back(trained ? 4.0f * rng.uniform() - 2.0f : kNan);
      s.old_logprob.push_back(trained ? lp + 3.2f * rng.uniform() - 1.6f : kNan);
      s.ref_logprob.push_back(trained ? lp + 2.0f * rng.uniform() - 1.0f : kNan);
    }
    k.samples.push_back(std::move(s));
  }
  return k;
}

// The aggregated loss of rl spec 8, 9 and 11, straight from the formulas, with one log-prob or entropy moved.
double formula(const Case& k, const LossConfig& c, size_t move_i, size_t move_t, double dl, double dh) {
  double n_tok = 0, n_seq = 0, loss = 0;
  for (const TrainSample& s : k.samples) {
    const auto m = std::count(s.mask.begin(), s.mask.end(), 1);
    n_tok += static_cast<double>(m);
    n_seq += c.count_empty_sequences || m > 0;
  }
  for (size_t i = 0; i < k.samples.size(); ++i) {
    const TrainSample& s = k.samples[i];
    double sum = 0, m = 0;
    for (size_t t = 0; t < s.mask.size(); ++t) {
      if (!s.mask[t]) continue;
      m += 1;
      const bool moved = i == move_i && t == move_t;
      const double l = k.logprobs[i][t] + (moved ? dl : 0), h = k.entropies[i][t] + (moved ? dh : 0);
      double x = -l;
      if (c.kind == LossKind::policy) {
        const double a = s.advantage[t], rho = std::exp(l - s.old_logprob[t]);
        x = std::max(-rho * a, -std::min(std::max(rho, 1.0 - c.clip_low), 1.0 + c.clip_high) * a);
        if (c.dual_clip > 0 && a < 0) x = std::min(x, -c.dual_clip * a);
      }
      const double e = l - s.ref_logprob[t];
      if (c.kl == KlKind::k1) x += c.kl_coef * e;
      if (c.kl == KlKind::k2) x += c.kl_coef * e * e / 2;
      if (c.kl == KlKind::k3) x += c.kl_coef * (std::exp(-e) - 1 + e);
      sum += x - c.entropy_coef * h;
    }
    switch (c.aggregation) {
      case Aggregation::token_mean: loss += sum / n_tok; break;
      case Aggregation::seq_mean_token_mean: loss += m == 0 ? 0 : sum / m / n_seq; break;
      case Aggregation::seq_mean_token_sum: loss += sum / n_seq; break;
      case Aggregation::seq_mean_token_sum_norm: loss += sum / n_seq / c.norm_length; break;
      case Aggregation::token_sum: loss += sum; break;
    }
  }
  return loss;
}

// Checks value and both gradients of every token. Central difference with h = 1e-5: third derivatives are below 10 e^1.6, so its
// own error is below 1e-8 of the weight; f32 terms of size up to 10 bring a few 2^-24 of that. A bound of 2e-6 of the largest
// gradient holds both; a wrong term is of order 1.
void check_gradients(const Case& k, const LossConfig& c) {
  std::vector<std::vector<float>> dl, de;
  const double loss = total_loss(k.samples, k.logprobs, k.entropies, c, &dl, &de).loss;
  const double want = formula(k, c, 99, 0, 0, 0);
  EXPECT_NEAR(loss, want, 2e-6 * std::max(1.0, std::abs(want)));
  double largest = 0;
  for (const auto& g : dl)
    for (float x : g) largest = std::max(largest, static_cast<double>(std::abs(x)));
  const double h = 1e-5;
  for (size_t i = 0; i < k.samples.size(); ++i)
    for (size_t t = 0; t < k.samples[i].mask.size(); ++t) {
      if (!k.samples[i].mask[t]) {
        EXPECT_EQ(dl[i][t], 0.0f);
        EXPECT_EQ(de[i][t], 0.0f);
        continue;
      }
      EXPECT_NEAR(dl[i][t], (formula(k, c, i, t, h, 0) - formula(k, c, i, t, -h, 0)) / (2 * h), 2e-6 * largest) << i << " " << t;
      EXPECT_NEAR(de[i][t], (formula(k, c, i, t, 0, h) - formula(k, c, i, t, 0, -h)) / (2 * h), 2e-6 * std::max(largest, 1e-3))
          << i << " " << t;
    }
}

TEST(Loss, GradientsMatchFiniteDifferencesForEveryVariant) {
  int variants = 0;
  for (const LossKind kind : {LossKind::policy, LossKind::sft})
    for (const Aggregation aggregation :
         {Aggregation::token_mean, Aggregation::seq_mean_token_mean, Aggregation::seq_mean_token_sum,
          Aggregation::seq_mean_token_sum_norm, Aggregation::token_sum})
      for (const KlKind kl : {KlKind::none, KlKind::k1, KlKind::k2, KlKind::k3})
        for (const float entropy_coef : {0.0f, 0.05f})
          for (const float dual_clip : {0.0f, 1.5f}) {
            LossConfig c;
            c.kind = kind;
            c.aggregation = aggregation;
            c.kl = kl;
            c.kl_coef = 0.3f;
            c.entropy_coef = entropy_coef;
            c.dual_clip = dual_clip;
            c.norm_length = 16;
            c.count_empty_sequences = variants % 2 == 0;
            SCOPED_TRACE(variants);
            check_gradients(random_case(static_cast<uint64_t>(100 + variants)), c);
            ++variants;
          }
  EXPECT_EQ(variants, 160);
}

TEST(Loss, CountsClippedTokensOfEverySide) {
  const Case k = random_case(3);
  LossConfig c;
  c.dual_clip = 1.5f;
  const LossSums sums = total_loss(k.samples, k.logprobs, k.entropies, c);
  double clipped = 0, lower = 0, kl = 0, tokens = 0;
  for (size_t i = 0; i < k.samples.size(); ++i)
    for (size_t t = 0; t < k.samples[i].mask.size(); ++t) {
      if (!k.samples[i].mask[t]) continue;
      const double d = static_cast<double>(k.logprobs[i][t]) - k.samples[i].old_logprob[t], rho = std::exp(d),
                   a = k.samples[i].advantage[t];
      clipped += (a > 0 && rho > 1.28) || (a < 0 && rho < 0.8);
      lower += a < 0 && rho > 1.5;
      kl -= d;
      tokens += 1;
    }
  EXPECT_GT(clipped, 0);
  EXPECT_GT(lower, 0);
  EXPECT_EQ(sums.clipped, clipped);
  EXPECT_EQ(sums.clipped_lower, lower);
  EXPECT_EQ(sums.tokens, tokens);
  EXPECT_NEAR(sums.ppo_kl, kl, 1e-12);
}

TEST(Loss, MissingOldLogprobMeansOnPolicy) {
  Case k = random_case(4);
  for (size_t i = 0; i < k.samples.size(); ++i) k.samples[i].old_logprob = k.logprobs[i];
  std::vector<std::vector<float>> with, without;
  const LossConfig c;
  const LossSums a = total_loss(k.samples, k.logprobs, k.entropies, c, &with);
  for (TrainSample& s : k.samples) s.old_logprob.clear();
  const LossSums b = total_loss(k.samples, k.logprobs, k.entropies, c, &without);
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(with, without);
  EXPECT_EQ(b.ppo_kl, 0.0);
  EXPECT_EQ(b.clipped, 0.0);
}

TEST(Loss, ImportanceWeightsAreThoseOfTheSpec) {
  // rl spec 22, vector 7: w = [1.2214, 0.9048, 2.7183], their product 3.0042; a masked token before them counts for nothing.
  TrainSample s = sft_sample(3, {0, 1, 1, 1});
  s.mask[0] = 0;
  s.advantage = {1, 1, -2, 0.5f};
  s.old_logprob = {-3, -1, -0.5f, -2};
  s.rollout_logprob = {-9, -1.2f, -0.4f, -3};
  const std::vector<float> now = {-3, -0.9f, -0.6f, -2.05f}, zero(4, 0.0f);
  const double w[] = {0, 1.2214027582, 0.9048374180, 2.7182818285};
  LossConfig plain;
  plain.aggregation = Aggregation::token_sum;
  std::vector<float> unweighted(4), dl(4), de(4);
  (void)sample_loss(s, now, zero, {3, 1}, plain, unweighted, de);
  const auto expect = [&](const LossConfig& c, const std::vector<double>& applied, double tis, double clipped, double masked) {
    const LossSums sums = sample_loss(s, now, zero, {3, 1}, c, dl, de);
    double loss = 0;
    for (size_t t = 1; t < 4; ++t) {
      EXPECT_NEAR(dl[t], static_cast<double>(unweighted[t]) * applied[t - 1], 1e-6) << t;
      loss += applied[t - 1] * static_cast<double>(policy_term(now[t], s.old_logprob[t], s.advantage[t], c).loss);
    }
    EXPECT_EQ(dl[0], 0.0f);
    EXPECT_NEAR(sums.pg_loss, loss, 2e-6);
    EXPECT_NEAR(sums.tis, tis, 3e-6);
    EXPECT_EQ(sums.tis_clipped, clipped);
    EXPECT_EQ(sums.tis_masked, masked);
  };
  LossConfig c = plain;
  c.tis = TisKind::token;
  expect(c, {w[1], w[2], 2.0}, w[1] + w[2] + w[3], 1, 0);
  c.tis_low = 1.0f;
  c.tis_mask_low = 0.5f;
  c.tis_mask_high = 2.5f;
  expect(c, {w[1], 1.0, 0.0}, w[1] + w[2] + w[3], 2, 1);
  c = plain;
  c.tis = TisKind::sequence;
  expect(c, {2.0, 2.0, 2.0}, 3 * 3.0041660239, 3, 0);
  c.tis_mask_high = 3.0f;
  expect(c, {0, 0, 0}, 3 * 3.0041660239, 3, 3);
  // On-policy the weight is that of the log-probs now.
  c = plain;
  c.tis = TisKind::token;
  const std::vector<float> same_as_old = {-3, -1, -0.5f, -2};
  std::vector<float> given(4), absent(4);
  (void)sample_loss(s, same_as_old, zero, {3, 1}, c, given, de);
  s.old_logprob.clear();
  (void)sample_loss(s, same_as_old, zero, {3, 1}, c, absent, de);
  EXPECT_EQ(given, absent);
}

// Either takes the policy term alone, of a sample as a whole (veto) or of its tokens with a negative advantage (opsm).
TEST(Loss, VetoAndOffPolicyMaskTakeThePolicyTerm) {
  TrainSample s = sft_sample(3, {0, 1, 1, 1});
  s.mask[0] = 0;
  s.advantage = {-1, 1, -2, 0.5f};
  s.old_logprob = {-3, -1, -0.5f, -2};
  s.rollout_logprob = {5, -1.2f, -0.4f, -0.5f};  // w = [e^-8, 1.2214, 0.9048, 0.2231]; the first is of a masked token
  s.ref_logprob = {-1, -1, -1, -1};
  const std::vector<float> now = {-9, -0.9f, -0.8f, -2.05f}, zero(4, 0.0f);  // old - now = -0.1, 0.3, 0.05: mean 0.0833
  LossConfig plain;
  plain.aggregation = Aggregation::token_sum;
  plain.kl = KlKind::k2;
  plain.kl_coef = 0.5f;
  std::vector<float> whole(4), dl(4), de(4), dkl(4);
  const LossSums all = sample_loss(s, now, zero, {3, 1}, plain, whole, de);
  TrainSample without = s;
  without.advantage = {0, 0, 0, 0};
  const LossSums kl = sample_loss(without, now, zero, {3, 1}, plain, dkl, de);

  const auto run = [&](float veto, float opsm) {
    LossConfig c = plain;
    c.tis_veto = veto;
    c.opsm = opsm;
    return sample_loss(s, now, zero, {3, 1}, c, dl, de);
  };
  LossSums sums = run(0.2f, 0.09f);  // neither
  EXPECT_EQ(dl, whole);
  EXPECT_EQ(sums.loss, all.loss);
  EXPECT_EQ(sums.vetoed + sums.opsm, 0.0);
  sums = run(0.23f, 0);
  EXPECT_EQ(dl, dkl);
  EXPECT_EQ(sums.pg_loss, 0.0);
  EXPECT_EQ(sums.kl_loss, kl.kl_loss);
  EXPECT_EQ(sums.vetoed, 3.0);
  sums = run(0, 0.08f);
  EXPECT_EQ(dl, (std::vector<float>{0, whole[1], dkl[2], whole[3]}));
  EXPECT_EQ(sums.opsm, 1.0);
  // On-policy there is nothing to leave, and equal log-probs are not vetoed even at 1.
  s.old_logprob.clear();
  s.rollout_logprob = now;
  sums = run(1, 1e-6f);
  EXPECT_EQ(sums.vetoed + sums.opsm, 0.0);
  EXPECT_NE(sums.pg_loss, 0.0);
}

TEST(Loss, ImportanceSamplingChangesNoBitWhereBothAgree) {
  Case k = random_case(6);
  for (size_t i = 0; i < k.samples.size(); ++i) k.samples[i].rollout_logprob = k.samples[i].old_logprob;
  for (const TisKind kind : {TisKind::token, TisKind::sequence}) {
    LossConfig c;
    std::vector<std::vector<float>> with, without;
    const LossSums a = total_loss(k.samples, k.logprobs, k.entropies, c, &without);
    c.tis = kind;
    c.tis_mask_low = 0.5f;
    c.tis_mask_high = 1.0f;
    const LossSums b = total_loss(k.samples, k.logprobs, k.entropies, c, &with);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(with, without);
    EXPECT_EQ(b.tis, b.tokens);
    EXPECT_EQ(b.tis_masked, 0.0);
  }
}

double tree(const std::vector<double>& x, size_t begin, size_t width) {
  if (width == 1) return begin < x.size() ? x[begin] : 0.0;
  return tree(x, begin, width / 2) + tree(x, begin + width / 2, width / 2);
}

TEST(Loss, SumsWithinASampleFollowThePaddedPairTree) {
  Philox rng(5, RngPurpose::test);
  LossConfig c;
  c.kind = LossKind::sft;
  c.aggregation = Aggregation::token_sum;
  for (const size_t n : {1u, 2u, 3u, 7u, 8u, 9u, 100u, 1023u}) {
    std::vector<float> losses;
    std::vector<double> terms;
    for (size_t t = 0; t < n; ++t) losses.push_back(std::ldexp(rng.uniform(), static_cast<int>(rng.below(80)) - 40));
    TrainSample s = sft_sample(0, losses);
    std::vector<float> logprob, zero(n, 0.0f), dl(n), de(n);
    for (size_t t = 0; t < n; ++t) {
      s.mask[t] = t % 5 != 3;
      logprob.push_back(-losses[t]);
      terms.push_back(s.mask[t] ? losses[t] : 0.0);
    }
    const LossSums sums = sample_loss(s, logprob, zero, {1, 1}, c, dl, de);
    EXPECT_EQ(sums.pg_loss, tree(terms, 0, 1024)) << n;
  }
}

TEST(LossDeath, MessagesNameTheSample) {
  TrainSample s = sft_sample(17, {1, 2});
  std::vector<float> two(2), one(1);
  LossConfig c;
  EXPECT_DEATH((void)sample_loss(s, one, two, {2, 1}, c, two, two), "sample 17: 1 log-probs for 2 response tokens");
  s.old_logprob = {0};
  EXPECT_DEATH((void)sample_loss(s, two, two, {2, 1}, c, two, two), "sample 17: 1 old log-probs for 2");
  c.kl = KlKind::k2;
  s.old_logprob.clear();
  EXPECT_DEATH((void)sample_loss(s, two, two, {2, 1}, c, two, two), "sample 17: 0 reference log-probs for 2");
  c.aggregation = Aggregation::seq_mean_token_sum_norm;
  EXPECT_DEATH((void)token_weight({2, 1}, 2, c), "needs norm_length over 0");
}

}  // namespace
}  // namespace lockstep
