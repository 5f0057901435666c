#include "rl/task.h"

#include "rl/policy.h"

namespace lockstep {

Status check_bad_rows(const PromptFile& file, float max_bad_rows) {
  const double all = static_cast<double>(file.rows.size() + file.bad_rows.size());
  if (static_cast<double>(file.bad_rows.size()) <= static_cast<double>(max_bad_rows) * all) return Status::ok();
  return bad_rows_status(file);
}

Result<std::vector<Prompt>> load_prompts(const std::string& path, const Tokenizer& tokenizer, const TaskOptions& options,
                                         TaskCounts* counts) {
  Result<PromptFile> file = read_prompts(path);
  if (!file) return file.status();
  LOCKSTEP_RETURN_IF_ERROR(check_bad_rows(file.value(), options.max_bad_rows));
  TaskCounts n;
  n.bad_rows = static_cast<int64_t>(file.value().bad_rows.size());
  n.duplicate_prompts = file.value().duplicate_prompts;
  std::vector<Prompt> prompts;
  for (PromptRow& row : file.value().rows) {
    Result<std::vector<int32_t>> tokens = prompt_tokens(tokenizer, row.prompt);
    if (!tokens) return errorf("{}:{}: {}", path, row.line, tokens.message());
    if (static_cast<int64_t>(tokens.value().size()) > options.max_prompt_tokens) {
      ++n.overlong_prompts;
      continue;
    }
    prompts.push_back(
        {.id = 0, .row = n.rows++, .text = std::move(row.prompt), .tokens = tokens.take(), .label = std::move(row.label)});
  }
  if (prompts.empty()) {
    return errorf("{}: no usable prompt ({} are longer than task.max_prompt_tokens = {})", path, n.overlong_prompts,
                  options.max_prompt_tokens);
  }
  if (counts != nullptr) *counts = n;
  return prompts;
}

Task::Task(std::vector<Prompt> prompts, uint64_t seed)
    : prompts_(std::move(prompts)), order_(static_cast<int64_t>(prompts_.size()), seed) {}

Prompt Task::next() {
  const int64_t id = order_.cursor().issued;
  Prompt p = prompts_[static_cast<size_t>(order_.next())];
  p.id = id;
  return p;
}

RewardResult judge(RewardKind kind, const Prompt& prompt, const Trajectory& trajectory) {
  switch (kind) {
    case RewardKind::math: return math_reward(trajectory.text, prompt.label);
    case RewardKind::exact: return exact_match_reward(trajectory.text, prompt.label);
  }
  return {};
}

}  // namespace lockstep
