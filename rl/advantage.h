#pragma once
// Rewards to advantages: pure arithmetic over plain arrays, in double inside and in one fixed order, so the same rewards
// give the same bits whatever else is in the batch. Samples stand group after group; tokens stand sample after sample:
//
//   group_offsets  [P + 1]  group g owns samples [group_offsets[g], group_offsets[g + 1])
//   token_offsets  [N + 1]  sample i owns response tokens [token_offsets[i], token_offsets[i + 1])
//   mask           [tokens] 1 where a token is trained, 0 where it is not (an environment's text)
//   kl             [tokens] KL estimate a token, empty if beta is 0
//
// Masked tokens get 0 in every output. Layouts that do not fit together are a CHECK; what data can bring about (a group
// of one, a reward that is not finite, nothing to train) is a Status that says where.

#include <cstdint>
#include <span>

#include "core/status.h"

namespace lockstep {

enum class GroupEstimator {
  grpo,       // (r - mean) / (std + epsilon); all 0 where a group's rewards are equal   Shao et al. 2024
  dr_grpo,    // r - mean                                                               Liu et al. 2025
  rloo,       // r - mean of the others                                                 Ahmadian et al. 2024
  batch_std,  // (r - mean of the group) / (std of the whole batch + epsilon)
};
const char* group_estimator_name(GroupEstimator estimator);

inline constexpr double kGroupEpsilon = 1e-6;

// One advantage a sample. Standard deviations divide by n - 1. Fails on a group of fewer than 2 samples: alone, a sample
// has nothing to be compared with.
Status group_advantages(GroupEstimator estimator, std::span<const float> rewards, std::span<const int64_t> group_offsets,
                        std::span<float> advantages, double epsilon = kGroupEpsilon);

// The sample's advantage at each of its trained tokens.
void broadcast_to_tokens(std::span<const float> sample_advantages, std::span<const int64_t> token_offsets,
                         std::span<const int32_t> mask, std::span<float> advantages);

// Sums that whitening needs. With data parallelism each rank adds up its own and the sums are all-reduced.
struct WhitenSums {
  double count = 0, sum = 0, squares = 0;
};
WhitenSums whiten_sums(std::span<const float> x, std::span<const int32_t> mask);

// y = (x - mean) / sqrt(var + 1e-8) over the trained tokens, var dividing by count - 1. Fails with fewer than 2 of them.
// y may be x.
Status whiten(const WhitenSums& sums, std::span<const float> x, std::span<const int32_t> mask, std::span<float> y);
Status whiten(std::span<const float> x, std::span<const int32_t> mask, std::span<float> y);

// REINFORCE++ before whitening (Hu 2025): token reward -beta * kl, plus the sample's reward at its last trained token;
// returns G_t = reward_t + gamma * G_{t+1} over all positions of the sample.
Status reinforce_pp_returns(std::span<const float> rewards, std::span<const int64_t> token_offsets,
                            std::span<const int32_t> mask, std::span<const float> kl, double beta, double gamma,
                            std::span<float> returns);

// REINFORCE++ with a group baseline, before whitening: (r - group mean) - beta * kl at every trained token.
Status reinforce_pp_baseline(std::span<const float> rewards, std::span<const int64_t> group_offsets,
                             std::span<const int64_t> token_offsets, std::span<const int32_t> mask,
                             std::span<const float> kl, double beta, std::span<float> advantages);

// Generalized advantage estimation (Schulman et al. 2016). "Next" is the next trained token; the value behind the last one
// is 0, for cut-off responses too. token_rewards and values are one number a token; returns = advantages + values.
void gae(std::span<const float> token_rewards, std::span<const float> values, std::span<const int64_t> token_offsets,
         std::span<const int32_t> mask, double gamma, double lambda, std::span<float> advantages, std::span<float> returns);

// -beta * kl at every trained token, plus the sample's reward at its last one: what gae() takes.
Status token_rewards(std::span<const float> rewards, std::span<const int64_t> token_offsets, std::span<const int32_t> mask,
                     std::span<const float> kl, double beta, std::span<float> out);

// DAPO's penalty for long responses, added to the reward: 0 up to limit - buffer tokens, then falling in a line to
// -factor at the limit, -factor beyond. With buffer 0 there is only the step.
float length_penalty(int64_t response_tokens, int64_t limit, int64_t buffer, double factor = 1.0);

}  // namespace lockstep
