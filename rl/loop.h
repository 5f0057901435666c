#pragma once
// The reinforcement learning loop: task -> rollout -> reward -> advantage -> train -> new version -> rollout.
//
// Of one process, or of many ranks, which share each step's prompts and samples; trainer and sampler each have a layout, over the same ranks or each over
// its own (rl/layouts.h). Rank 0 writes the run directory. The samples drawn from given weights are the same for any number of ranks; gradients differ by the order in
// which they are added, so a run repeats to the bit with as many ranks, and may be resumed with another number.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/collective.h"
#include "rl/evaluate.h"
#include "rl/hooks.h"
#include "rl/long_tail.h"
#include "rl/policy.h"
#include "rl/task.h"
#include "train/types.h"

namespace lockstep {

struct RunOptions {
  std::string dir;
  int64_t seed = 0;
  int64_t threads = 0;  // 0: one a core
  int64_t steps = 0;
  int64_t checkpoint_every = 0;
  int64_t keep_checkpoints = 2;
  int64_t eval_every = 0;
  bool save_rollouts = true;
};

struct RolloutOptions {
  int64_t prompts_per_step = 16;
  int64_t samples_per_prompt = 8;
  float temperature = 1;
  int64_t top_k = 0;  // off: see check_train_config
  float top_p = 1;
  float min_p = 0;
  int64_t max_new_tokens = 64;
  int64_t max_running = 64;
  int64_t max_batch_tokens = 1024;
  bool graphs = true;
  int64_t ahead = 0;  // steps that the sampler is ahead of the trainer: 0 or 1
  float over_sample = 1;
  PartialKind partial = PartialKind::keep;
  RolloutOrder order = RolloutOrder::given;
};

// rl spec 7.
enum class AdvantageKind : uint8_t { grpo, dr_grpo, rloo, batch_std, reinforce_pp, reinforce_pp_baseline };

struct TrainOptions {
  LossConfig loss;
  AdvantageKind advantage = AdvantageKind::grpo;
  bool mask_truncated = false;
  int64_t overlong_buffer = 0;  // 0: no penalty
  float overlong_factor = 1;
  int64_t steps_per_rollout = 1;
  int64_t microbatch_tokens = 4096;
  bool recompute = false;
  ReplayKind replay = ReplayKind::none;
};

struct LoopConfig {
  RunOptions run;
  PolicyOptions model;
  TaskOptions task;
  RolloutOptions rollout;
  TrainOptions train;
  OptimizerConfig optimizer;
  EvalOptions eval;
  ParallelOptions parallel;
  SyncOptions sync;
  std::string resolved;  // the settings, for the run directory
};

// Sums over the steps of this process.
struct LoopReport {
  int64_t first_step = 0, last_step = 0;  // steps done: (first_step, last_step]
  int64_t compared_tokens = 0;            // whose two log-probs were compared
  double max_gap = 0;                     // largest |trainer - sampler| over all of them: in an exact pair a run that ends well has 0
  int64_t rollout_tokens = 0, train_tokens = 0;
  int64_t samples_drawn = 0;   // by any rank, those of evaluations not counted
  int64_t samples_logged = 0;  // taken from an earlier start's log or checkpoint instead
  double rollout_seconds = 0, reward_seconds = 0, train_seconds = 0, eval_seconds = 0, save_seconds = 0;
  std::string checkpoint;  // the newest complete one
};

// `world` is null for one process alone; otherwise all its ranks call this with the same arguments, hooks aside, and errors are the
// same on all. Flight records go to the run directory.
Result<LoopReport> run_loop(const LoopConfig& config, bool resume, const Hooks& hooks, RankWorld* world = nullptr);

}  // namespace lockstep
