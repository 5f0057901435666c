#pragma once
// pass@k of a policy on a list of problems (rl spec 17). Draws are keyed by (eval seed, problem, sample), so the same weights
// asked again answer the same, whatever training did in between.

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

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

struct EvalReport {
  int64_t num_problems = 0, num_samples = 0;          // samples of each problem
  std::vector<std::pair<int64_t, double>> pass_at_k;  // k = 1, 2, 4 .. num_samples, unbiased
  double majority = 0;                                // problems whose most frequent answer is right
  double standard_error = 0;                          // of pass@1, from sampling alone
  double truncated_ratio = 0, unanswered_ratio = 0, mean_length = 0;
  int64_t num_tokens = 0;
  double seconds = 0;
  double pass(int64_t k) const;  // CHECK: k is among them
  // Metrics by name, for the problem set `set`: everything but the time.
  std::vector<std::pair<std::string, double>> values(const std::string& set) const;
  std::string str() const;
};

// `records`, unless null, receives every sample as JSON lines. Peers share the problems and all get the whole report. A response
// that could not be judged is an error: there is no accuracy without it.
Result<EvalReport> evaluate(Policy& policy, std::span<const Prompt> problems, const RewardOptions& reward, const EvalOptions& options,
                            const Hooks& hooks, const std::string& label, std::string* records, const Peers& peers = {});

}  // namespace lockstep
