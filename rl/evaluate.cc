#include "rl/evaluate.h"

#include <algorithm>
#include <chrono>

#include "io/json.h"
#include "rl/passk.h"
#include "rl/sampling.h"

namespace lockstep {

namespace {

// Keeps the draws of evaluations apart from those of training prompts, whose ids count up from 0.
constexpr uint64_t kEvalPrompt = uint64_t{1} << 62;

}  // namespace

double EvalReport::pass(int64_t k) const {
  for (const auto& [at, value] : pass_at_k) {
    if (at == k) return value;
  }
  CHECK(false, "pass@{} of {} samples was not computed", k, num_samples);
  return 0;
}

std::vector<std::pair<std::string, double>> EvalReport::values(const std::string& set) const {
  std::vector<std::pair<std::string, double>> v = {{"eval/" + set, pass(1)}};
  for (const auto& [k, value] : pass_at_k) v.emplace_back(fmt::format("eval/{}-pass@{}", set, k), value);
  v.emplace_back(fmt::format("eval/{}-maj@{}", set, num_samples), majority);
  v.emplace_back(fmt::format("eval/{}-standard_error", set), standard_error);
  v.emplace_back(fmt::format("eval/{}-truncated_ratio", set), truncated_ratio);
  v.emplace_back(fmt::format("eval/{}-unanswered_ratio", set), unanswered_ratio);
  v.emplace_back(fmt::format("eval/{}/response_len/mean", set), mean_length);
  return v;
}

std::string EvalReport::str() const {
  std::string text;
  for (const auto& [k, value] : pass_at_k) text += fmt::format("pass@{} {:.3f}  ", k, value);
  return text + fmt::format("(se {:.3f})  truncated {:.1f}%  unanswered {:.1f}%  length {:.1f}  {} problems x {}", standard_error,
                            100 * truncated_ratio, 100 * unanswered_ratio, mean_length, num_problems, num_samples);
}

Result<EvalReport> evaluate(Policy& policy, std::span<const Prompt> problems, const RewardOptions& reward, const EvalOptions& options,
                            const Hooks& hooks, const std::string& label, std::string* records, const Peers& peers) {
  const auto start = std::chrono::steady_clock::now();
  if (options.problems > 0) problems = problems.first(std::min(problems.size(), static_cast<size_t>(options.problems)));

  std::vector<Request> requests;
  for (const Prompt& p : problems) {
    Request r;
    r.prompt_id = kEvalPrompt + static_cast<uint64_t>(p.row);
    r.prompt = p.tokens;
    r.num_samples = static_cast<int32_t>(options.samples);
    r.seed = static_cast<uint64_t>(options.seed);
    r.sampling.temperature = options.temperature;
    r.sampling.top_p = options.top_p;
    r.sampling.top_k = static_cast<int32_t>(std::min<int64_t>(options.top_k, policy.config().vocab_size));
    r.sampling.max_new_tokens = options.max_new_tokens;
    r.sampling.stop_ids = {policy.tokenizer().eos_id()};
    requests.push_back(std::move(r));
  }
  Result<std::vector<Completion>> completions = peers.run(policy.engine(), policy.context(), requests, hooks, label);
  if (!completions) return completions.status();
  std::vector<Trajectory> trajectories;
  for (size_t i = 0; i < completions.value().size(); ++i) {
    trajectories.push_back(make_trajectory(problems[i / static_cast<size_t>(options.samples)], completions.value()[i], options.samples,
                                           policy.tokenizer(), policy.config().vocab_size));
  }
  std::vector<GradeRow> rows;
  for (size_t i = 0; i < trajectories.size(); ++i) {
    const Prompt& problem = problems[i / static_cast<size_t>(options.samples)];
    rows.push_back({problem.text, trajectories[i].text, problem.label});
  }
  Result<std::unique_ptr<Judge>> judge = Judge::make(reward);
  if (!judge) return judge.status();
  const Result<std::vector<RewardResult>> verdicts = peers.grade(*judge.value(), rows);
  if (!verdicts) return verdicts.status();

  EvalReport report;
  report.num_problems = static_cast<int64_t>(problems.size());
  report.num_samples = options.samples;
  std::vector<int64_t> num_correct(problems.size(), 0);
  std::vector<std::string> answers;
  std::vector<bool> correct;
  int64_t truncated = 0, unanswered = 0;
  for (size_t i = 0; i < completions.value().size(); ++i) {
    const Prompt& problem = problems[i / static_cast<size_t>(options.samples)];
    const Trajectory& t = trajectories[i];
    const RewardResult& verdict = verdicts.value()[i];
    if (!verdict.scored()) return errorf("sample {} of row {} was not judged: {}", completions.value()[i].sample_idx, problem.row, verdict.error);
    num_correct[i / static_cast<size_t>(options.samples)] += verdict.correct ? 1 : 0;
    answers.push_back(verdict.pred);
    correct.push_back(verdict.correct);
    truncated += t.status == TrajectoryStatus::truncated ? 1 : 0;
    unanswered += verdict.pred.empty() ? 1 : 0;
    report.num_tokens += t.response_length();
    if (records != nullptr) {
      *records += JsonLine()
                      .add("row", problem.row)
                      .add("sample", completions.value()[i].sample_idx)
                      .add("prompt", problem.text)
                      .add("response", t.text)
                      .add("label", problem.label)
                      .add("answer", verdict.pred)
                      .add("correct", verdict.correct)
                      .add("reason", reward_reason_name(verdict.reason))
                      .add("status", trajectory_status_name(t.status))
                      .str();
      *records += '\n';
    }
  }

  for (size_t q = 0; q < problems.size(); ++q) {
    const size_t first = q * static_cast<size_t>(options.samples);
    const int64_t vote = majority_vote(std::span(answers).subspan(first, static_cast<size_t>(options.samples)));
    report.majority += vote >= 0 && correct[first + static_cast<size_t>(vote)] ? 1.0 / static_cast<double>(problems.size()) : 0.0;
  }
  for (int64_t k = 1; k <= options.samples; k *= 2)
    report.pass_at_k.emplace_back(k, mean_pass_at_k(num_correct, options.samples, k));
  report.standard_error = sampling_standard_error(num_correct, options.samples);
  const auto n = static_cast<double>(options.samples), num_problems = static_cast<double>(problems.size());
  report.truncated_ratio = static_cast<double>(truncated) / (n * num_problems);
  report.unanswered_ratio = static_cast<double>(unanswered) / (n * num_problems);
  report.mean_length = static_cast<double>(report.num_tokens) / (n * num_problems);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace lockstep
