#include "train/gap.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/status.h"

namespace lockstep {

namespace {

constexpr double kLogRatioMax = 20.0;

double log_ratio(float old_logprob, float rollout_logprob) {
  return static_cast<double>(old_logprob) - static_cast<double>(rollout_logprob);
}
double weight_of(double log_ratio) { return std::exp(std::clamp(log_ratio, -kLogRatioMax, kLogRatioMax)); }

void check_lengths(const GapSample& s) {
  CHECK(s.old.size() == s.rollout.size() && s.mask.size() == s.rollout.size(),
        "sample {}: {} rollout log-probs, {} of the trainer, {} mask entries", s.index, s.rollout.size(), s.old.size(),
        s.mask.size());
}

// std::max drops a NaN on one side; these keep it.
double max_or_nan(double a, double b) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<double>::quiet_NaN() : std::max(a, b);
}
double min_or_nan(double a, double b) { return -max_or_nan(-a, -b); }

// The smallest value that at least a fraction q of all values do not exceed.
double order_statistic(std::vector<double>& values, double q) {
  const double n = static_cast<double>(values.size());
  const size_t k = static_cast<size_t>(std::clamp(std::ceil(q * n), 1.0, n)) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(k), values.end());
  return values[k];
}

struct SequenceRatio {
  double sum = 0;
  int64_t tokens = 0;
};
SequenceRatio sequence_ratio(const GapSample& s) {
  check_lengths(s);
  SequenceRatio r;
  for (size_t t = 0; t < s.mask.size(); ++t) {
    if (s.mask[t] == 0) continue;
    r.sum += log_ratio(s.old[t], s.rollout[t]);
    ++r.tokens;
  }
  return r;
}

}  // namespace

double importance_weight(float old_logprob, float rollout_logprob) { return weight_of(log_ratio(old_logprob, rollout_logprob)); }

double sequence_weight(const GapSample& sample) { return weight_of(sequence_ratio(sample).sum); }

double geometric_weight(const GapSample& sample) {
  const SequenceRatio r = sequence_ratio(sample);
  return r.tokens == 0 ? 1.0 : weight_of(r.sum / static_cast<double>(r.tokens));
}

GapMetrics gap_metrics(std::span<const GapSample> samples, const GapOptions& options) {
  GapMetrics g;
  std::vector<double> abs_diffs;
  int64_t sequences = 0, outside = 0;
  double sample_means = 0, abs_sum = 0, abs_max = 0, k1 = 0, k3 = 0, squares = 0, mult = 0, ess = 0, seq_squares = 0, log_ppl = 0,
         ppl = 0;
  double w_sum = 0, w_min = std::numeric_limits<double>::infinity(), w_max = 0;
  double p_old = 0, p_roll = 0, p_diff = 0, p_diff_max = 0;

  const auto counts = [&](const GapSample& s, size_t t) {
    return s.mask[t] != 0 && (options.part == GapPart::all || (options.part == GapPart::first_token) == (t == 0));
  };
  for (const GapSample& s : samples) {
    check_lengths(s);
    int64_t n = 0;
    double abs_here = 0, diff_here = 0, w_here = 0, w2_here = 0;
    for (size_t t = 0; t < s.mask.size(); ++t) {
      if (!counts(s, t)) continue;
      ++n;
      if (!std::isfinite(s.old[t]) || !std::isfinite(s.rollout[t])) ++g.nonfinite;
      if (std::bit_cast<uint32_t>(s.old[t]) != std::bit_cast<uint32_t>(s.rollout[t])) {
        ++g.exact_mismatch;
        if (!g.first_mismatch) g.first_mismatch = GapLocation{s.index, static_cast<int64_t>(t)};
      }
      const double d = log_ratio(s.old[t], s.rollout[t]), w = weight_of(d);
      abs_diffs.push_back(std::abs(d));
      abs_here += std::abs(d);
      abs_max = max_or_nan(abs_max, std::abs(d));
      diff_here += d;
      k1 -= d;
      const double clamped_d = std::clamp(d, -kLogRatioMax, kLogRatioMax);
      k3 += std::expm1(clamped_d) - clamped_d;  // w - 1 - log w without the cancellation
      mult += std::exp(std::min(std::abs(d), kLogRatioMax));
      w_here += w;
      w2_here += w * w;
      w_min = min_or_nan(w_min, w);
      w_max = max_or_nan(w_max, w);
      if (w < options.weight_low || w > options.weight_high) ++outside;
      const double a = std::exp(static_cast<double>(s.old[t])), b = std::exp(static_cast<double>(s.rollout[t]));
      p_old += a;
      p_roll += b;
      p_diff += std::abs(a - b);
      p_diff_max = max_or_nan(p_diff_max, std::abs(a - b));
    }
    if (n == 0) continue;
    const double count = static_cast<double>(n), seq_w = weight_of(diff_here);
    g.tokens += n;
    ++sequences;
    sample_means += abs_here / count;
    abs_sum += abs_here;
    squares += w2_here;
    w_sum += w_here;
    ess += w_here * w_here / (count * w2_here);
    seq_squares += seq_w * seq_w;
    log_ppl -= diff_here / count;
    ppl += weight_of(-diff_here / count);
  }
  if (g.tokens == 0) return g;

  const double tokens = static_cast<double>(g.tokens), seqs = static_cast<double>(sequences);
  const bool any_nan = std::isnan(abs_max);
  g.logprob_abs_diff = sample_means / seqs;
  g.logprob_abs_diff_tok = abs_sum / tokens;
  g.logprob_abs_diff_max = abs_max;
  g.logprob_abs_diff_p99 = any_nan ? abs_max : order_statistic(abs_diffs, 0.99);
  g.logprob_abs_diff_p999 = any_nan ? abs_max : order_statistic(abs_diffs, 0.999);
  g.gap_k1 = k1 / tokens;
  g.gap_k3 = k3 / tokens;
  g.prob_diff_mean = p_diff / tokens;
  g.prob_diff_max = p_diff_max;
  g.chi2_token = squares / tokens - 1;
  g.chi2_seq = seq_squares / seqs - 1;
  g.log_ppl_diff = log_ppl / seqs;
  g.ppl_ratio = ppl / seqs;
  g.mult_prob_error = mult / tokens;
  g.ess = ess / seqs;
  g.tis_clipfrac = static_cast<double>(outside) / tokens;
  g.is_ratio_min = w_min;
  g.is_ratio_mean = w_sum / tokens;
  g.is_ratio_max = w_max;

  // Second moments about the means, in a second pass: one pass would lose them for nearly equal probabilities.
  double old_var = 0, roll_var = 0, cov = 0, diff_var = 0;
  for (const GapSample& s : samples)
    for (size_t t = 0; t < s.mask.size(); ++t) {
      if (!counts(s, t)) continue;
      const double a = std::exp(static_cast<double>(s.old[t])), b = std::exp(static_cast<double>(s.rollout[t]));
      const double da = a - p_old / tokens, db = b - p_roll / tokens, dd = std::abs(a - b) - p_diff / tokens;
      old_var += da * da;
      roll_var += db * db;
      cov += da * db;
      diff_var += dd * dd;
    }
  if (g.tokens > 1) {
    g.prob_diff_std = std::sqrt(diff_var / (tokens - 1));
    if (old_var != 0 && roll_var != 0) g.pearson = cov / (std::sqrt(old_var) * std::sqrt(roll_var));
  }
  return g;
}

std::array<std::optional<double>, 10> abs_diff_by_decile(std::span<const GapSample> samples) {
  std::array<double, 10> sum{};
  std::array<int64_t, 10> count{};
  for (const GapSample& s : samples) {
    check_lengths(s);
    for (size_t t = 0; t < s.mask.size(); ++t) {
      if (s.mask[t] == 0) continue;
      const size_t decile = 10 * t / s.mask.size();
      sum[decile] += std::abs(log_ratio(s.old[t], s.rollout[t]));
      ++count[decile];
    }
  }
  std::array<std::optional<double>, 10> mean;
  for (size_t i = 0; i < mean.size(); ++i)
    if (count[i] > 0) mean[i] = sum[i] / static_cast<double>(count[i]);
  return mean;
}

std::vector<std::pair<std::string, double>> GapMetrics::values() const {
  if (tokens == 0) return {};
  std::vector<std::pair<std::string, double>> v = {{"exact_mismatch", static_cast<double>(exact_mismatch)},
                                                   {"nonfinite", static_cast<double>(nonfinite)}};
  const auto add = [&](const char* name, const std::optional<double>& x) {
    if (x) v.emplace_back(name, *x);
  };
  add("logprob_abs_diff", logprob_abs_diff);
  add("logprob_abs_diff_tok", logprob_abs_diff_tok);
  add("logprob_abs_diff_max", logprob_abs_diff_max);
  add("logprob_abs_diff_p99", logprob_abs_diff_p99);
  add("logprob_abs_diff_p999", logprob_abs_diff_p999);
  add("gap_k1", gap_k1);
  add("gap_k3", gap_k3);
  add("prob_diff_mean", prob_diff_mean);
  add("prob_diff_max", prob_diff_max);
  add("prob_diff_std", prob_diff_std);
  add("pearson", pearson);
  add("chi2_token", chi2_token);
  add("chi2_seq", chi2_seq);
  add("log_ppl_diff", log_ppl_diff);
  add("ppl_ratio", ppl_ratio);
  add("mult_prob_error", mult_prob_error);
  add("ess", ess);
  add("tis_clipfrac", tis_clipfrac);
  add("is_ratio_min", is_ratio_min);
  add("is_ratio_mean", is_ratio_mean);
  add("is_ratio_max", is_ratio_max);
  return v;
}

}  // namespace lockstep
