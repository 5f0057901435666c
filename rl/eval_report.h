#pragma once
// Judged answers to what they say: accuracy, pass@k, majority votes, how sure these are, and a table of the problems (rl spec 17). Pure.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rl/eval_samples.h"
#include "rl/grader/grader.h"
#include "rl/records.h"

namespace lockstep {

struct ProblemResult {
  int64_t row = 0;
  std::string id, label;
  int64_t num_samples = 0, num_correct = 0, num_unanswered = 0;
  int64_t num_truncated = 0;            // of those that say
  std::string majority;                 // the most frequent answer, normalised; empty: no sample has one
  int64_t votes = 0;                    // for it
  bool majority_correct = false;
  std::optional<double> mean_length;  // tokens
};

// `error`: standard error over problems, sqrt(sum (x - mean)^2 / (Q (Q - 1))) of the problems' values x: how far the value would move with
// other problems of the kind, sampling included. Nothing for one problem.
struct Estimate {
  double value = 0;
  std::optional<double> error;
};

struct PassAtK {
  int64_t k = 0;
  Estimate estimate;
};

struct EvalReport {
  int64_t num_problems = 0, num_samples = 0;  // samples of each problem; of answers from elsewhere, of the problem with fewest
  std::vector<PassAtK> pass_at_k;             // k = 1, 2, 4 .. num_samples, unbiased
  Estimate majority;                          // problems whose most frequent answer is right
  double standard_error = 0;                  // of pass@1, these problems given: from sampling alone, sqrt(sum p (1 - p) / n) / Q
  std::optional<double> truncated_ratio;      // over samples that say how they ended
  std::optional<double> mean_length;          // tokens
  double unanswered_ratio = 0;
  int64_t num_tokens = 0;
  double seconds = 0;
  std::vector<ProblemResult> problems;
  double pass(int64_t k) const;  // CHECK: k is among them
  // Metrics by name, for the problem set `set`: everything but the time.
  std::vector<std::pair<std::string, double>> values(const std::string& set) const;
  std::string str() const;
};

// `samples` by (problem, sample), at least one of each problem; verdicts[i] belongs to samples[i] and is scored.
EvalReport make_eval_report(std::span<const Prompt> problems, std::span<const EvalSample> samples, std::span<const RewardResult> verdicts);

// Every sample with its verdict, as JSON lines.
std::string eval_records(std::span<const Prompt> problems, std::span<const EvalSample> samples, std::span<const RewardResult> verdicts);

// What a reader needs to do it again, and how long it took.
struct EvalProtocol {
  std::string subject, set;
  std::vector<std::pair<std::string, std::string>> settings;  // in the order shown
  std::vector<std::pair<std::string, double>> seconds;        // by phase; empty in a report that is to be compared
};
std::string eval_report_markdown(const EvalReport& report, const EvalProtocol& protocol);
// One object: protocol, metrics, standard errors, problems, seconds.
std::string eval_report_json(const EvalReport& report, const EvalProtocol& protocol);

}  // namespace lockstep
