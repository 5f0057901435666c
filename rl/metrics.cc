#include "rl/metrics.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <set>

#include "io/json.h"
#include "rl/passk.h"

namespace lockstep {

namespace {

// Actor's names to those of the specification, where they differ.
std::string train_name(const std::string& name) {
  if (name == "entropy") return "train/entropy_loss";
  if (name == "lr") return "train/lr-pg_0";
  return "train/" + name;
}

void add_mean(Metrics& metrics, const std::string& name, double sum, double count) {
  if (count > 0) metrics.emplace_back(name, sum / count);
}

}  // namespace

void add_train_metrics(Metrics& metrics, std::span<const StepMetrics> steps) {
  std::vector<std::string> names;  // in the order of their first appearance
  std::map<std::string, std::pair<double, double>> sums;
  for (const StepMetrics& s : steps) {
    for (const auto& [name, value] : s.values) {
      const auto [at, fresh] = sums.try_emplace(name, 0.0, 0.0);
      if (fresh) names.push_back(name);
      at->second.first += value;
      at->second.second += 1;
    }
  }
  for (const std::string& name : names) {
    const auto& [sum, count] = sums[name];
    const bool summed = name == "tokens" || name == "microbatches" || name == "skipped";
    metrics.emplace_back(train_name(name), summed ? sum : sum / count);
  }
}

void add_rollout_metrics(Metrics& metrics, std::span<const Group> groups) {
  double num = 0, score = 0, reward = 0, correct = 0, truncated = 0, failed = 0, mixed = 0, num_tokens = 0, logprob = 0,
         advantage = 0;
  double timeouts = 0;  // of graders
  double uniform = 0, uniform_zero = 0, uniform_one = 0, num_groups = 0;
  std::vector<int64_t> lengths;
  std::vector<int32_t> versions;
  std::map<int64_t, std::pair<double, double>> pass;  // k to sum and count of groups
  for (const Group& g : groups) {
    std::set<float> rewards;
    int64_t n = 0, c = 0;
    for (const Trajectory& t : g.trajectories) {
      if (!t.usable()) {
        ++failed;
        continue;
      }
      ++n;
      c += t.correct ? 1 : 0;
      ++num;
      score += t.score;
      reward += t.reward;
      rewards.insert(t.reward);
      timeouts += t.reason == "timeout" ? 1 : 0;
      truncated += t.status == TrajectoryStatus::truncated ? 1 : 0;
      lengths.push_back(t.response_length());
      const auto [low, high] = std::minmax_element(t.versions.begin(), t.versions.end());
      versions.push_back(*low);
      mixed += *low != *high ? 1 : 0;
      for (const float l : t.logprobs) logprob += l;
      for (const float a : t.advantage) advantage += a;
      num_tokens += static_cast<double>(t.response_length());
    }
    if (n == 0) continue;
    correct += static_cast<double>(c);
    ++num_groups;
    if (rewards.size() == 1) {
      ++uniform;
      uniform_zero += *rewards.begin() == 0 ? 1 : 0;
      uniform_one += *rewards.begin() == 1 ? 1 : 0;
    }
    for (int64_t k = 1; k <= n; k *= 2) {
      pass[k].first += pass_at_k(n, c, k);
      pass[k].second += 1;
    }
  }
  metrics.emplace_back("rollout/failed", failed);
  if (num == 0) return;
  add_mean(metrics, "rollout/raw_reward", score, num);
  add_mean(metrics, "rollout/rewards", reward, num);
  add_mean(metrics, "rollout/accuracy", correct, num);
  add_mean(metrics, "reward/timeout_frac", timeouts, num);
  for (const auto& [k, sum] : pass) add_mean(metrics, fmt::format("passrate/pass@{}", k), sum.first, sum.second);
  add_mean(metrics, "rollout/advantages", advantage, num_tokens);
  add_mean(metrics, "rollout/rollout_log_probs", logprob, num_tokens);
  std::sort(lengths.begin(), lengths.end());
  const size_t middle = lengths.size() / 2;
  add_mean(metrics, "rollout/response_len/mean", num_tokens, num);
  metrics.emplace_back("rollout/response_len/median", lengths.size() % 2 == 1
                                                          ? static_cast<double>(lengths[middle])
                                                          : 0.5 * static_cast<double>(lengths[middle - 1] + lengths[middle]));
  metrics.emplace_back("rollout/response_len/max", static_cast<double>(lengths.back()));
  metrics.emplace_back("rollout/response_len/min", static_cast<double>(lengths.front()));
  add_mean(metrics, "rollout/truncated_ratio", truncated, num);
  metrics.emplace_back("rollout/zero_std/count", uniform);
  add_mean(metrics, "rollout/zero_std/all_zero_percentage", 100 * uniform_zero, num_groups);
  add_mean(metrics, "rollout/zero_std/all_one_percentage", 100 * uniform_one, num_groups);
  double version_sum = 0;
  for (const int32_t v : versions) version_sum += v;
  add_mean(metrics, "rollout/weight_version/mean", version_sum, num);
  metrics.emplace_back("rollout/weight_version/max", *std::max_element(versions.begin(), versions.end()));
  metrics.emplace_back("rollout/weight_version/min", *std::min_element(versions.begin(), versions.end()));
  add_mean(metrics, "rollout/weight_version/mixed_version_ratio", mixed, num);
}

void add_gap_metrics(Metrics& metrics, std::span<const GapSample> samples) {
  const GapMetrics all = gap_metrics(samples);
  if (all.logprob_abs_diff) metrics.emplace_back("train/train_rollout_logprob_abs_diff", *all.logprob_abs_diff);
  if (all.gap_k3) metrics.emplace_back("train/train_rollout_kl", *all.gap_k3);
  for (const auto& [name, value] : all.values())
    metrics.emplace_back("gap/" + (name.starts_with("gap_") ? name.substr(4) : name), value);
  const std::pair<const char*, GapPart> parts[] = {{"first_token", GapPart::first_token}, {"rest", GapPart::rest}};
  for (const auto& [name, part] : parts) {
    const GapMetrics m = gap_metrics(samples, {.part = part});
    if (m.logprob_abs_diff_tok) metrics.emplace_back(fmt::format("gap/{}/logprob_abs_diff_tok", name), *m.logprob_abs_diff_tok);
  }
}

void add_gap_deciles(Metrics& metrics, std::span<const GapSample> samples) {
  const std::array<std::optional<double>, 10> deciles = abs_diff_by_decile(samples);
  for (size_t i = 0; i < deciles.size(); ++i)
    if (deciles[i]) metrics.emplace_back(fmt::format("gap/decile_{}/logprob_abs_diff_tok", i), *deciles[i]);
}

void add_staleness_metrics(Metrics& metrics, std::span<const GapSample> samples, std::span<const std::span<const int32_t>> versions, int64_t now) {
  std::map<int64_t, std::vector<GapSample>> by_lag;
  std::deque<std::vector<uint8_t>> masks;  // of samples that several versions drew
  double sum = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::set<int32_t> of_sample(versions[i].begin(), versions[i].end());
    sum += static_cast<double>(now - *of_sample.begin());
    for (const int32_t version : of_sample) {
      GapSample part = samples[i];
      if (of_sample.size() > 1) {
        std::vector<uint8_t>& mask = masks.emplace_back(part.mask.begin(), part.mask.end());
        for (size_t t = 0; t < mask.size(); ++t)
          if (versions[i][t] != version) mask[t] = 0;
        part.mask = mask;
      }
      by_lag[now - version].push_back(part);
    }
  }
  if (by_lag.empty()) return;
  metrics.emplace_back("staleness/lag/mean", sum / static_cast<double>(samples.size()));
  metrics.emplace_back("staleness/lag/max", static_cast<double>(by_lag.rbegin()->first));
  for (const auto& [lag, of_lag] : by_lag) {
    const GapMetrics m = gap_metrics(of_lag);
    const std::pair<const char*, std::optional<double>> values[] = {
        {"logprob_abs_diff_tok", m.logprob_abs_diff_tok}, {"k1", m.gap_k1}, {"k3", m.gap_k3}, {"ess", m.ess}};
    metrics.emplace_back(fmt::format("staleness/lag_{}/tokens", lag), static_cast<double>(m.tokens));
    for (const auto& [name, value] : values)
      if (value) metrics.emplace_back(fmt::format("staleness/lag_{}/{}", lag, name), *value);
  }
}

double find_metric(const Metrics& metrics, const std::string& name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

std::string metrics_line(int64_t step, const Metrics& metrics) {
  JsonLine line;
  line.add("step", step);
  for (const auto& [name, value] : metrics) line.add(name, value);
  return line.str();
}

}  // namespace lockstep
