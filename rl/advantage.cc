#include "rl/advantage.h"

#include <cmath>

namespace lockstep {

namespace {

constexpr double kWhitenEpsilon = 1e-8;

// Offsets that rise from 0 to `total`.
void check_offsets(std::span<const int64_t> offsets, size_t total, const char* what) {
  CHECK(!offsets.empty() && offsets.front() == 0, "{} must begin with 0", what);
  for (size_t i = 0; i + 1 < offsets.size(); ++i)
    CHECK(offsets[i] <= offsets[i + 1], "{}[{}] is {} and {}[{}] is {}", what, i, offsets[i], what, i + 1, offsets[i + 1]);
  CHECK(offsets.back() == static_cast<int64_t>(total), "{} end at {}, there are {}", what, offsets.back(), total);
}

void check_tokens(std::span<const int64_t> token_offsets, size_t samples, std::span<const int32_t> mask, size_t out) {
  CHECK(token_offsets.size() == samples + 1, "{} token offsets for {} samples", token_offsets.size(), samples);
  check_offsets(token_offsets, mask.size(), "token_offsets");
  CHECK_EQ(mask.size(), out);
}

Status check_finite(std::span<const float> values, const char* what) {
  for (size_t i = 0; i < values.size(); ++i)
    if (!std::isfinite(values[i])) return errorf("{} {} is {}, a finite number is wanted", what, i, values[i]);
  return Status::ok();
}

// kl may be left out where nothing reads it.
Status check_kl(std::span<const float> kl, std::span<const int32_t> mask, double beta) {
  CHECK(kl.size() == mask.size() || (kl.empty() && beta == 0), "{} KL estimates for {} tokens, beta {}", kl.size(), mask.size(),
        beta);
  for (size_t t = 0; t < kl.size(); ++t)
    if (mask[t] && !std::isfinite(kl[t])) return errorf("the KL estimate of token {} is {}, a finite number is wanted", t, kl[t]);
  return Status::ok();
}

double mean_of(std::span<const float> x) {
  double sum = 0;
  for (const float v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

// Standard deviation over n - 1; exactly 0 where all values are equal, which rounding of the mean would not give.
double std_of(std::span<const float> x) {
  bool equal = true;
  for (const float v : x) equal = equal && v == x[0];
  if (equal) return 0;
  const double mean = mean_of(x);
  double squares = 0;
  for (const float v : x) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(x.size() - 1));
}

Status check_groups(std::span<const float> rewards, std::span<const int64_t> group_offsets) {
  check_offsets(group_offsets, rewards.size(), "group_offsets");
  for (size_t g = 0; g + 1 < group_offsets.size(); ++g) {
    const int64_t n = group_offsets[g + 1] - group_offsets[g];
    if (n < 2) return errorf("group {} has {} samples, at least 2 are wanted to compare", g, n);
  }
  return check_finite(rewards, "reward");
}

int64_t last_trained(std::span<const int32_t> mask, int64_t begin, int64_t end) {
  while (end > begin && mask[static_cast<size_t>(end - 1)] == 0) --end;
  return end - 1;  // begin - 1 if there is none
}

}  // namespace

const char* group_estimator_name(GroupEstimator estimator) {
  switch (estimator) {
    case GroupEstimator::grpo: return "grpo";
    case GroupEstimator::dr_grpo: return "dr_grpo";
    case GroupEstimator::rloo: return "rloo";
    case GroupEstimator::batch_std: return "batch_std";
  }
  return "?";
}

Status group_advantages(GroupEstimator estimator, std::span<const float> rewards, std::span<const int64_t> group_offsets,
                        std::span<float> advantages, double epsilon) {
  CHECK_EQ(rewards.size(), advantages.size());
  LOCKSTEP_RETURN_IF_ERROR(check_groups(rewards, group_offsets));
  const double batch_std = estimator == GroupEstimator::batch_std && !rewards.empty() ? std_of(rewards) : 0;
  for (size_t g = 0; g + 1 < group_offsets.size(); ++g) {
    const size_t begin = static_cast<size_t>(group_offsets[g]);
    const std::span<const float> r = rewards.subspan(begin, static_cast<size_t>(group_offsets[g + 1]) - begin);
    const double n = static_cast<double>(r.size());
    const double spread = std_of(r);
    const double mean = spread == 0 ? r[0] : mean_of(r);  // equal rewards have advantage 0, not a rounding error
    double scale = 1;
    switch (estimator) {
      case GroupEstimator::grpo: scale = spread == 0 ? 0 : 1 / (spread + epsilon); break;
      case GroupEstimator::dr_grpo: break;
      case GroupEstimator::rloo: scale = n / (n - 1); break;
      case GroupEstimator::batch_std: scale = batch_std == 0 ? 0 : 1 / (batch_std + epsilon); break;
    }
    for (size_t i = 0; i < r.size(); ++i) advantages[begin + i] = static_cast<float>((r[i] - mean) * scale);
  }
  return Status::ok();
}

void broadcast_to_tokens(std::span<const float> sample_advantages, std::span<const int64_t> token_offsets,
                         std::span<const int32_t> mask, std::span<float> advantages) {
  check_tokens(token_offsets, sample_advantages.size(), mask, advantages.size());
  for (size_t i = 0; i < sample_advantages.size(); ++i)
    for (size_t t = static_cast<size_t>(token_offsets[i]); t < static_cast<size_t>(token_offsets[i + 1]); ++t)
      advantages[t] = mask[t] ? sample_advantages[i] : 0.0f;
}

WhitenSums whiten_sums(std::span<const float> x, std::span<const int32_t> mask) {
  CHECK_EQ(x.size(), mask.size());
  WhitenSums s;
  for (size_t t = 0; t < x.size(); ++t) {
    if (!mask[t]) continue;
    s.count += 1;
    s.sum += x[t];
    s.squares += static_cast<double>(x[t]) * x[t];
  }
  return s;
}

Status whiten(const WhitenSums& sums, std::span<const float> x, std::span<const int32_t> mask, std::span<float> y) {
  CHECK_EQ(x.size(), mask.size());
  CHECK_EQ(x.size(), y.size());
  if (sums.count < 2) return errorf("whitening over {} trained tokens, at least 2 are wanted", sums.count);
  if (!std::isfinite(sums.squares)) return errorf("whitening: the values' squares sum to {}", sums.squares);
  const double mean = sums.sum / sums.count;
  // Rounding can take the difference a little below 0 where all values are equal.
  const double variance = std::fmax(0.0, (sums.squares - sums.sum * mean) / (sums.count - 1));
  const double scale = 1 / std::sqrt(variance + kWhitenEpsilon);
  for (size_t t = 0; t < x.size(); ++t) y[t] = mask[t] ? static_cast<float>((x[t] - mean) * scale) : 0.0f;
  return Status::ok();
}

Status whiten(std::span<const float> x, std::span<const int32_t> mask, std::span<float> y) {
  return whiten(whiten_sums(x, mask), x, mask, y);
}

Status token_rewards(std::span<const float> rewards, std::span<const int64_t> token_offsets, std::span<const int32_t> mask,
                     std::span<const float> kl, double beta, std::span<float> out) {
  check_tokens(token_offsets, rewards.size(), mask, out.size());
  LOCKSTEP_RETURN_IF_ERROR(check_finite(rewards, "reward"));
  LOCKSTEP_RETURN_IF_ERROR(check_kl(kl, mask, beta));
  for (size_t t = 0; t < mask.size(); ++t) out[t] = mask[t] && !kl.empty() ? static_cast<float>(-beta * kl[t]) : 0.0f;
  for (size_t i = 0; i < rewards.size(); ++i) {
    const int64_t last = last_trained(mask, token_offsets[i], token_offsets[i + 1]);
    if (last >= token_offsets[i]) out[static_cast<size_t>(last)] += rewards[i];
  }
  return Status::ok();
}

Status reinforce_pp_returns(std::span<const float> rewards, std::span<const int64_t> token_offsets,
                            std::span<const int32_t> mask, std::span<const float> kl, double beta, double gamma,
                            std::span<float> returns) {
  LOCKSTEP_RETURN_IF_ERROR(token_rewards(rewards, token_offsets, mask, kl, beta, returns));
  for (size_t i = 0; i < rewards.size(); ++i) {
    double next = 0;
    for (int64_t t = token_offsets[i + 1] - 1; t >= token_offsets[i]; --t) {
      next = returns[static_cast<size_t>(t)] + gamma * next;
      returns[static_cast<size_t>(t)] = mask[static_cast<size_t>(t)] ? static_cast<float>(next) : 0.0f;
    }
  }
  return Status::ok();
}

Status reinforce_pp_baseline(std::span<const float> rewards, std::span<const int64_t> group_offsets,
                             std::span<const int64_t> token_offsets, std::span<const int32_t> mask,
                             std::span<const float> kl, double beta, std::span<float> advantages) {
  check_tokens(token_offsets, rewards.size(), mask, advantages.size());
  LOCKSTEP_RETURN_IF_ERROR(check_groups(rewards, group_offsets));
  LOCKSTEP_RETURN_IF_ERROR(check_kl(kl, mask, beta));
  for (size_t g = 0; g + 1 < group_offsets.size(); ++g) {
    const size_t begin = static_cast<size_t>(group_offsets[g]), end = static_cast<size_t>(group_offsets[g + 1]);
    const double mean = mean_of(rewards.subspan(begin, end - begin));
    for (size_t t = static_cast<size_t>(token_offsets[begin]), i = begin; i < end; ++i)
      for (; t < static_cast<size_t>(token_offsets[i + 1]); ++t)
        advantages[t] = mask[t] ? static_cast<float>(rewards[i] - mean - (kl.empty() ? 0 : beta * kl[t])) : 0.0f;
  }
  return Status::ok();
}

void gae(std::span<const float> token_rewards, std::span<const float> values, std::span<const int64_t> token_offsets,
         std::span<const int32_t> mask, double gamma, double lambda, std::span<float> advantages, std::span<float> returns) {
  CHECK(!token_offsets.empty(), "no token offsets");
  check_tokens(token_offsets, token_offsets.size() - 1, mask, advantages.size());
  CHECK_EQ(token_rewards.size(), mask.size());
  CHECK_EQ(values.size(), mask.size());
  CHECK_EQ(returns.size(), mask.size());
  for (size_t i = 0; i + 1 < token_offsets.size(); ++i) {
    double next_value = 0, next_advantage = 0;
    for (int64_t at = token_offsets[i + 1] - 1; at >= token_offsets[i]; --at) {
      const size_t t = static_cast<size_t>(at);
      advantages[t] = returns[t] = 0;
      if (!mask[t]) continue;
      const double delta = token_rewards[t] + gamma * next_value - values[t];
      next_advantage = delta + gamma * lambda * next_advantage;
      next_value = values[t];
      advantages[t] = static_cast<float>(next_advantage);
      returns[t] = static_cast<float>(next_advantage + values[t]);
    }
  }
}

float length_penalty(int64_t response_tokens, int64_t limit, int64_t buffer, double factor) {
  CHECK(buffer >= 0 && limit >= buffer, "a length limit of {} with a buffer of {}", limit, buffer);
  const int64_t over = response_tokens - (limit - buffer);
  if (over <= 0) return 0.0f;
  if (over >= buffer) return static_cast<float>(-factor);
  return static_cast<float>(-factor * static_cast<double>(over) / static_cast<double>(buffer));
}

}  // namespace lockstep
