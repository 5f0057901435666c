#pragma once
// A policy's answers to a list of problems, and what they are worth (rl spec 17). Draws are keyed by (eval seed, problem, sample), so the
// same weights asked again answer the same, whatever training did in between.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rl/eval_report.h"
#include "rl/eval_samples.h"
#include "rl/hooks.h"
#include "rl/peers.h"
#include "rl/policy.h"
#include "rl/records.h"
#include "rl/task.h"

namespace lockstep {

struct EvalOptions {
  int64_t samples = 8;
  int64_t problems = 0;  // first so many; 0: all
  float temperature = 1;
  int64_t top_k = 0;
  float top_p = 1;
  int64_t max_new_tokens = 64;
  int64_t seed = 0;
};

// A checksum of what decides a policy's words besides its prompts and settings: numerics and weights. Those of a checkpoint are known by its
// checksums or, where it has none, by names, sizes and times of its files.
Result<uint64_t> weights_key(const PolicyOptions& options, uint64_t seed);

// All samples of all `problems`, by (problem, sample). With a log those that it holds are not sampled again, and new ones go there as they
// finish; `weights` is weights_key(). Peers share the samples and all get all.
Result<std::vector<EvalSample>> sample_answers(Policy& policy, std::span<const Prompt> problems, const EvalOptions& options, const Hooks& hooks,
                                               const std::string& label, const Peers& peers = {}, SampleLog* log = nullptr, uint64_t weights = 0);

// The judge's verdicts, in the order of the samples. A response that could not be judged is an error: there is no accuracy without it.
Result<std::vector<RewardResult>> judge_answers(std::span<const Prompt> problems, std::span<const EvalSample> samples, const RewardOptions& reward,
                                                const Peers& peers = {});

// Both, and the report. `records`, unless null, receives every sample as JSON lines.
Result<EvalReport> evaluate(Policy& policy, std::span<const Prompt> problems, const RewardOptions& reward, const EvalOptions& options,
                            const Hooks& hooks, const std::string& label, std::string* records, const Peers& peers = {});

// The first so many of `problems` that the options ask for.
std::span<const Prompt> problems_asked(std::span<const Prompt> problems, const EvalOptions& options);

}  // namespace lockstep
