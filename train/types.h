#pragma once
// What the actor takes and gives. Belongs to this room alone; rl/ converts.

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "model/choices.h"

namespace lockstep {

// One trained sequence. Response arrays have length R = tokens.size() - prompt_length; response token t is tokens[prompt_length + t], and its
// log-probability is read at row prompt_length + t - 1.
struct TrainSample {
  int64_t index = 0;             // global sample index: the canonical order of sums
  std::vector<int32_t> tokens;   // prompt then response
  int64_t prompt_length = 0;     // >= 1
  std::vector<uint8_t> mask;     // [R] 1: trained
  std::vector<float> advantage;  // [R]
  std::vector<float> old_logprob, rollout_logprob, ref_logprob;  // [R]; empty where not used
  float temperature = 1.0f;
  ChoiceLog choices;  // ActorOptions::replay: the sampler's, of all rows but the last token's
  int64_t response_length() const { return static_cast<int64_t>(tokens.size()) - prompt_length; }
};

struct TokenLogprobs {
  std::vector<float> logprob, entropy;  // [R] of one sample
};

enum class LossKind : uint8_t { policy, sft };
enum class Aggregation : uint8_t { token_mean, seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm, token_sum };
enum class KlKind : uint8_t { none, k1, k2, k3 };
enum class TisKind : uint8_t { none, token, sequence };  // whose importance weight

struct LossConfig {
  LossKind kind = LossKind::policy;
  Aggregation aggregation = Aggregation::token_mean;
  float clip_low = 0.2f, clip_high = 0.28f;
  float dual_clip = 0.0f;        // 0: off, else > 1
  KlKind kl = KlKind::none;      // against ref_logprob
  float kl_coef = 0.0f;
  float entropy_coef = 0.0f;
  float norm_length = 0.0f;      // H of seq_mean_token_sum_norm
  bool count_empty_sequences = true;
  // Truncated importance sampling (rl spec 10): the policy term times w = exp(old - rollout), of the token or the product over the sample's trained tokens,
  // clipped to [low, high]; and 0 where w is outside the mask's bounds. Denominators do not change. Needs rollout_logprob.
  TisKind tis = TisKind::none;
  float tis_low = 0.0f, tis_high = 2.0f;
  float tis_mask_low = 0.0f, tis_mask_high = 0.0f;  // of the mask; high 0: no mask
  // Likewise without any policy term: a sample one of whose tokens has w below veto; and, of a sample that the policy has left, mean(old - now) > opsm over its
  // trained tokens, those with a negative advantage. 0: off.
  float tis_veto = 0.0f, opsm = 0.0f;
};

enum class ScheduleKind : uint8_t { constant, cosine };
struct OptimizerConfig {
  float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.98f, eps = 1e-8f, weight_decay = 0.0f;
  float clip_norm = 1.0f;        // 0: off
  ScheduleKind schedule = ScheduleKind::constant;
  int64_t warmup_steps = 0, total_steps = 0;  // total_steps: end of the cosine
  float min_lr_ratio = 0.0f;     // of the cosine's end
  int64_t max_skipped = 5;       // non-finite gradients in a row before the run stops
  bool freeze_router = true, freeze_indexer = true;
};

struct ActorOptions {
  int64_t max_tokens_per_microbatch = 4096;
  bool recompute = false;
  CacheRounding cache = {};  // as the sampler's
  ReplayKind replay = ReplayKind::none;  // which of the sampler's choices every forward repeats (TrainSample::choices)
};

}  // namespace lockstep
