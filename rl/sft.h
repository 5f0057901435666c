#pragma once
// Supervised training on {"prompt", "completion"} rows: the same actor, with the loss -log-prob over the completion and its end
// token.

#include <cstdint>
#include <string>
#include <vector>

#include "rl/hooks.h"
#include "rl/loop.h"
#include "rl/policy.h"

namespace lockstep {

struct SftOptions {
  std::string file;
  int64_t steps = 200;
  int64_t batch_size = 32;
  float lr = 1e-3f;
  ScheduleKind schedule = ScheduleKind::cosine;
  int64_t warmup_steps = 20;
};

struct SftConfig {
  RunOptions run;
  PolicyOptions model;
  SftOptions sft;
  PromptStyle style = {};
  OptimizerConfig optimizer;  // lr, schedule, warm-up and total steps come from `sft`
  ActorOptions actor;
  std::string resolved;  // the settings, for the run directory
};

struct SftReport {
  int64_t steps = 0, num_tokens = 0;  // of this process
  double first_loss = 0, last_loss = 0;
  double seconds = 0;
  std::string checkpoint;  // the newest complete one
};

Result<SftReport> run_sft(const SftConfig& config, bool resume, const Hooks& hooks);

}  // namespace lockstep
