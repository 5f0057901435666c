#pragma once
// The train/rollout gap: how far the log-probs of the trainer's forward lie from those that the engine recorded (rl spec 13).
// Pure functions over arrays.
//
// d = old - rollout (trainer minus engine), w = exp(d) with d clamped to +-20. All over tokens with mask 1. Sums in f64, by
// sample, then position. NaN is counted and propagates; nothing is replaced.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Response tokens of one sample; the three arrays have one length.
struct GapSample {
  int64_t index = 0;
  std::span<const float> rollout;  // recorded by the engine
  std::span<const float> old;      // by the trainer's forward
  std::span<const uint8_t> mask;
};

enum class GapPart : uint8_t { all, first_token, rest };  // of the response: errors tend to sit on its first token

struct GapLocation {
  int64_t sample_index = 0, token = 0;
  bool operator==(const GapLocation&) const = default;
};

struct GapOptions {
  GapPart part = GapPart::all;
  double weight_low = 0, weight_high = 2;  // bounds whose crossing tis_clipfrac counts
};

// Fields without data (no token; one token or no spread where a spread is needed) are unset.
struct GapMetrics {
  int64_t tokens = 0;
  int64_t exact_mismatch = 0;                 // tokens whose two log-probs differ in any bit
  std::optional<GapLocation> first_mismatch;  // by the order of the list, then position
  int64_t nonfinite = 0;                      // tokens where either is NaN or infinite
  std::optional<double> logprob_abs_diff;     // mean over samples of their token mean
  std::optional<double> logprob_abs_diff_tok, logprob_abs_diff_max, logprob_abs_diff_p99, logprob_abs_diff_p999;
  std::optional<double> gap_k1, gap_k3;                                         // mean of -d; of w - 1 - d
  std::optional<double> prob_diff_mean, prob_diff_max, prob_diff_std, pearson;  // of exp(old), exp(rollout)
  std::optional<double> chi2_token, chi2_seq;
  std::optional<double> log_ppl_diff, ppl_ratio;
  std::optional<double> mult_prob_error;
  std::optional<double> ess;
  std::optional<double> tis_clipfrac, is_ratio_min, is_ratio_mean, is_ratio_max;

  // The set ones with their names.
  std::vector<std::pair<std::string, double>> values() const;
};

GapMetrics gap_metrics(std::span<const GapSample> samples, const GapOptions& options = {});

// Mean |d| of the tokens in each tenth of their response (token t of R lies in tenth 10 t / R).
std::array<std::optional<double>, 10> abs_diff_by_decile(std::span<const GapSample> samples);

// Importance weights (rl spec 10): of one token, and of a sequence as the product of its tokens' weights or their geometric mean.
double importance_weight(float old_logprob, float rollout_logprob);
double sequence_weight(const GapSample& sample);
double geometric_weight(const GapSample& sample);

}  // namespace lockstep
