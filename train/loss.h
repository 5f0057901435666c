#pragma once
// Losses as pure functions on numbers: per-token terms, denominators, and d(loss)/d(logprob). rl spec 8, 9, 11.
//
// L = policy + kl_coef * KL - entropy_coef * entropy (or the SFT loss -logprob), every term aggregated with the same mode and denominators.
// Denominators are integers counted over all samples of the optimizer step before the first backward, so micro-batches add up to the whole.
// Sums: within a sample by position in a fixed pair tree, across samples by ascending index, in f64.
// Log-ratios are clamped to +-20 before exp, k3 to 10 after it; where a clamp or a clip is active the gradient is 0.

#include <span>
#include <vector>

#include "train/types.h"

namespace lockstep {

struct Denominators {
  int64_t num_tokens = 0;     // trained tokens of the step
  int64_t num_sequences = 0;  // samples, or samples with a trained token
};
Denominators count_denominators(std::span<const TrainSample> samples, const LossConfig& config);
// Factor of token t of a sample with `sample_tokens` trained tokens in the aggregated loss.
// 0 for a sample without any.
double token_weight(const Denominators& d, int64_t sample_tokens, const LossConfig& config);

struct PolicyTerm {
  float loss = 0;       // PPO term of one token, before aggregation
  float dlogprob = 0;   // its derivative with respect to the current log-prob
  float ratio = 1;
  bool clipped = false, clipped_lower = false;
};
PolicyTerm policy_term(float logprob, float old_logprob, float advantage, const LossConfig& config);

struct TruncatedWeight {
  float weight = 1;   // exp(log_ratio)
  float applied = 1;  // what the policy term is multiplied by; exactly 1 for a ratio of 1
  bool clipped = false, masked = false;
};
TruncatedWeight truncated_weight(float log_ratio, const LossConfig& config);

struct KlTerm {
  float value = 0, dlogprob = 0;
};
KlTerm kl_term(float logprob, float ref_logprob, KlKind kind);  // k1 | k2 | k3 with e = logprob - ref

// Sums over tokens, to be added over samples and micro-batches in ascending sample index; divide nothing further.
struct LossSums {
  double loss = 0, pg_loss = 0, kl_loss = 0, entropy = 0;          // aggregated (weights applied)
  double clipped = 0, clipped_lower = 0, ppo_kl = 0, tokens = 0;    // counts and plain sums over trained tokens
  double tis = 0, tis_abs = 0, tis_clipped = 0, tis_masked = 0;     // likewise: w, |w - 1|, where w was clipped, masked
  double vetoed = 0, opsm = 0;                                      // likewise: where veto, opsm took the policy term
  void add(const LossSums& o);
};
// Fills dlogprob and dentropy [R] of one sample (0 where the mask is 0). A policy sample without old_logprob is on-policy: its
// ratio is 1, and its importance weight is that of its log-probs now. SFT reads neither advantages nor old_logprob.
LossSums sample_loss(const TrainSample& sample, std::span<const float> logprob, std::span<const float> entropy, const Denominators& d,
                     const LossConfig& config, std::span<float> dlogprob, std::span<float> dentropy);

}  // namespace lockstep
