#include "train/loss.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/status.h"
#include "ops/fixed_math.h"

namespace lockstep {

namespace {

constexpr float kLogRatioMax = 20.0f;  // |log-ratio| before exp
constexpr float kKlMax = 10.0f;        // k3 after it

// Sum of a stream by the pair tree over its positions, padded with zeros to a power of two: level l holds the finished sum of 2^l
// neighbours.
class PairTreeSum {
 public:
  void add(double x) {
    size_t l = 0;
    for (; (count_ >> l) & 1; ++l) x = level_[l] + x;
    level_[l] = x;
    ++count_;
  }
  double sum() const {
    double x = 0;
    for (size_t l = 0; (count_ >> l) != 0; ++l)
      if ((count_ >> l) & 1) x = level_[l] + x;
    return x;
  }

 private:
  std::array<double, 48> level_{};
  uint64_t count_ = 0;
};

int64_t count_trained(const TrainSample& sample) {
  return std::count_if(sample.mask.begin(), sample.mask.end(), [](uint8_t m) { return m != 0; });
}

}  // namespace

Denominators count_denominators(std::span<const TrainSample> samples, const LossConfig& config) {
  Denominators d;
  for (const TrainSample& s : samples) {
    const int64_t trained = count_trained(s);
    d.num_tokens += trained;
    if (config.count_empty_sequences || trained > 0) ++d.num_sequences;
  }
  return d;
}

double token_weight(const Denominators& d, int64_t sample_tokens, const LossConfig& config) {
  if (sample_tokens == 0) return 0;
  const double sequences = static_cast<double>(d.num_sequences);
  switch (config.aggregation) {
    case Aggregation::token_mean: return 1.0 / static_cast<double>(d.num_tokens);
    case Aggregation::seq_mean_token_mean: return 1.0 / (sequences * static_cast<double>(sample_tokens));
    case Aggregation::seq_mean_token_sum: return 1.0 / sequences;
    case Aggregation::seq_mean_token_sum_norm:
      CHECK(config.norm_length > 0, "seq_mean_token_sum_norm needs norm_length over 0, it is {}", config.norm_length);
      return 1.0 / (sequences * static_cast<double>(config.norm_length));
    case Aggregation::token_sum: return 1.0;
  }
  return 0;
}

PolicyTerm policy_term(float logprob, float old_logprob, float advantage, const LossConfig& config) {
  const float d = logprob - old_logprob;
  const float clamped_d = std::clamp(d, -kLogRatioMax, kLogRatioMax);
  PolicyTerm r;
  r.ratio = exp_f32(clamped_d);
  const float plain = -r.ratio * advantage;
  const float bounded = -std::clamp(r.ratio, 1.0f - config.clip_low, 1.0f + config.clip_high) * advantage;
  r.clipped = bounded > plain;
  r.loss = r.clipped ? bounded : plain;
  // Where a bound is active the term is a constant of the log-prob.
  r.dlogprob = r.clipped || std::abs(d) > kLogRatioMax ? 0.0f : plain;
  if (config.dual_clip > 0 && advantage < 0) {
    const float limit = -config.dual_clip * advantage;
    r.clipped_lower = r.loss > limit;
    if (r.clipped_lower) {
      r.loss = limit;
      r.dlogprob = 0;
    }
  }
  return r;
}

TruncatedWeight truncated_weight(float log_ratio, const LossConfig& config) {
  TruncatedWeight r;
  r.weight = exp_f32(std::clamp(log_ratio, -kLogRatioMax, kLogRatioMax));
  r.applied = std::clamp(r.weight, config.tis_low, config.tis_high);
  r.clipped = r.applied != r.weight;
  r.masked = config.tis_mask_high > 0 && !(r.weight >= config.tis_mask_low && r.weight <= config.tis_mask_high);
  if (r.masked) r.applied = 0;
  return r;
}

KlTerm kl_term(float logprob, float ref_logprob, KlKind kind) {
  const float e = logprob - ref_logprob;
  switch (kind) {
    case KlKind::none: return {};
    case KlKind::k1: return {e, 1.0f};
    case KlKind::k2: return {0.5f * e * e, e};
    case KlKind::k3: break;
  }
  // k3 = exp(-e) - 1 + e. Near 0 its terms cancel, so their series is summed instead; the first term left out is below 2^-25 of
  // the value.
  if (std::abs(e) < 0.25f) {
    float p = -1.0f / 5040.0f;
    for (const float c : {1.0f / 720.0f, -1.0f / 120.0f, 1.0f / 24.0f, -1.0f / 6.0f, 0.5f}) p = std::fmaf(p, e, c);
    float q = 1.0f / 5040.0f;
    for (const float c : {-1.0f / 720.0f, 1.0f / 120.0f, -1.0f / 24.0f, 1.0f / 6.0f, -0.5f, 1.0f}) q = std::fmaf(q, e, c);
    return {p * e * e, q * e};
  }
  const float clamped_e = std::clamp(e, -kLogRatioMax, kLogRatioMax);
  const float x = exp_f32(-clamped_e);
  const float value = x - 1.0f + clamped_e;
  if (value > kKlMax) return {kKlMax, 0.0f};
  return {value, 1.0f - x};
}

void LossSums::add(const LossSums& o) {
  loss += o.loss;
  pg_loss += o.pg_loss;
  kl_loss += o.kl_loss;
  entropy += o.entropy;
  clipped += o.clipped;
  clipped_lower += o.clipped_lower;
  ppo_kl += o.ppo_kl;
  tokens += o.tokens;
  tis += o.tis;
  tis_abs += o.tis_abs;
  tis_clipped += o.tis_clipped;
  tis_masked += o.tis_masked;
  vetoed += o.vetoed;
  opsm += o.opsm;
}

LossSums sample_loss(const TrainSample& sample, std::span<const float> logprob, std::span<const float> entropy,
                     const Denominators& d, const LossConfig& config, std::span<float> dlogprob, std::span<float> dentropy) {
  const size_t n = static_cast<size_t>(sample.response_length());
  const bool policy = config.kind == LossKind::policy, kl = config.kl != KlKind::none;
  const auto check = [&](const char* what, size_t size) {
    CHECK(size == n, "sample {}: {} {} for {} response tokens", sample.index, size, what, n);
  };
  check("log-probs", logprob.size());
  check("entropies", entropy.size());
  check("log-prob gradients", dlogprob.size());
  check("entropy gradients", dentropy.size());
  check("mask entries", sample.mask.size());
  if (policy) check("advantages", sample.advantage.size());
  if (policy && !sample.old_logprob.empty()) check("old log-probs", sample.old_logprob.size());
  if (kl) check("reference log-probs", sample.ref_logprob.size());

  const bool tis = policy && config.tis != TisKind::none, veto = policy && config.tis_veto > 0;
  if (tis || veto) check("rollout log-probs", sample.rollout_logprob.size());
  const auto log_ratio = [&](size_t t) { return (sample.old_logprob.empty() ? logprob[t] : sample.old_logprob[t]) - sample.rollout_logprob[t]; };
  TruncatedWeight of_sequence;
  if (tis && config.tis == TisKind::sequence) {
    PairTreeSum sum;
    for (size_t t = 0; t < n; ++t) sum.add(sample.mask[t] == 0 ? 0.0 : static_cast<double>(log_ratio(t)));
    of_sequence = truncated_weight(static_cast<float>(sum.sum()), config);
  }

  const int64_t trained = count_trained(sample);
  bool vetoed = false, off_policy = false;
  if (veto)
    for (size_t t = 0; t < n; ++t) vetoed = vetoed || (sample.mask[t] != 0 && truncated_weight(log_ratio(t), config).weight < config.tis_veto);
  if (policy && config.opsm > 0 && !sample.old_logprob.empty()) {
    PairTreeSum left;
    for (size_t t = 0; t < n; ++t) left.add(sample.mask[t] == 0 ? 0.0 : static_cast<double>(sample.old_logprob[t]) - static_cast<double>(logprob[t]));
    off_policy = left.sum() > static_cast<double>(config.opsm) * static_cast<double>(trained);
  }
  const double weight = token_weight(d, trained, config);
  PairTreeSum pg_sum, kl_sum, entropy_sum, ppo_kl_sum;
  LossSums sums;
  for (size_t t = 0; t < n; ++t) {
    dlogprob[t] = 0;
    dentropy[t] = 0;
    if (sample.mask[t] == 0) {
      for (PairTreeSum* s : {&pg_sum, &kl_sum, &entropy_sum, &ppo_kl_sum}) s->add(0);
      continue;
    }
    PolicyTerm term{.loss = -logprob[t], .dlogprob = -1.0f};
    if (policy) {
      const float old_logprob = sample.old_logprob.empty() ? logprob[t] : sample.old_logprob[t];
      term = policy_term(logprob[t], old_logprob, sample.advantage[t], config);
      ppo_kl_sum.add(static_cast<double>(old_logprob) - static_cast<double>(logprob[t]));
    }
    if (tis) {
      const TruncatedWeight w = config.tis == TisKind::sequence ? of_sequence : truncated_weight(log_ratio(t), config);
      term.loss *= w.applied;
      term.dlogprob *= w.applied;
      sums.tis += static_cast<double>(w.weight);
      sums.tis_abs += std::abs(static_cast<double>(w.weight) - 1);
      sums.tis_clipped += w.clipped;
      sums.tis_masked += w.masked;
    }
    const bool left = off_policy && sample.advantage[t] < 0;
    if (vetoed || left) term.loss = term.dlogprob = 0;
    sums.vetoed += vetoed;
    sums.opsm += left;
    const KlTerm k = kl ? kl_term(logprob[t], sample.ref_logprob[t], config.kl) : KlTerm{};
    pg_sum.add(term.loss);
    kl_sum.add(k.value);
    entropy_sum.add(entropy[t]);
    sums.clipped += term.clipped;
    sums.clipped_lower += term.clipped_lower;
    dlogprob[t] =
        static_cast<float>(weight * (static_cast<double>(term.dlogprob) + static_cast<double>(config.kl_coef) * k.dlogprob));
    dentropy[t] = static_cast<float>(-weight * static_cast<double>(config.entropy_coef));
  }
  sums.pg_loss = weight * pg_sum.sum();
  sums.kl_loss = weight * kl_sum.sum();
  sums.entropy = weight * entropy_sum.sum();
  sums.loss =
      sums.pg_loss + static_cast<double>(config.kl_coef) * sums.kl_loss - static_cast<double>(config.entropy_coef) * sums.entropy;
  sums.ppo_kl = ppo_kl_sum.sum();
  sums.tokens = static_cast<double>(trained);
  return sums;
}

}  // namespace lockstep
