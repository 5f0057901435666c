#include "rl/task.h"

#include <algorithm>
#include <utility>

#include "rl/fingerprint.h"
#include "rl/policy.h"

namespace lockstep {

std::string TaskCounts::str() const {
  return fmt::format("{} prompts; {} bad rows, {} overlong and dropped, {} duplicates", rows, bad_rows, overlong_prompts,
                     duplicate_prompts);
}

std::vector<EncodedRow> encode_rows(PromptFile& file, const Tokenizer& tokenizer) {
  std::vector<PromptRow> rows = std::exchange(file.rows, {});
  std::vector<EncodedRow> encoded;
  for (PromptRow& row : rows) {
    Result<std::vector<int32_t>> prompt = prompt_tokens(tokenizer, row.prompt), completion = tokenizer.encode(row.completion);
    if (prompt && completion) {
      encoded.push_back({prompt.take(), completion.take()});
      file.rows.push_back(std::move(row));
    } else {
      file.bad_rows.push_back({row.line, prompt ? completion.message() : prompt.message()});
    }
  }
  std::sort(file.bad_rows.begin(), file.bad_rows.end(), [](const BadRow& a, const BadRow& b) { return a.line < b.line; });
  return encoded;
}

std::string fingerprint(std::span<const Prompt> prompts) {
  Fingerprint f;
  for (const Prompt& p : prompts) {
    f.add(p.tokens);
    f.add(p.label);
  }
  return f.str();
}

Status check_bad_rows(const PromptFile& file, float max_bad_rows) {
  const double all = static_cast<double>(file.rows.size() + file.bad_rows.size());
  if (static_cast<double>(file.bad_rows.size()) <= static_cast<double>(max_bad_rows) * all) return Status::ok();
  return bad_rows_status(file);
}

Result<std::vector<Prompt>> load_prompts(const std::string& path, const Tokenizer& tokenizer, const TaskOptions& options,
                                         TaskCounts* counts) {
  Result<PromptFile> read = read_prompts(path);
  if (!read) return read.status();
  PromptFile& file = read.value();
  std::vector<EncodedRow> encoded = encode_rows(file, tokenizer);
  LOCKSTEP_RETURN_IF_ERROR(check_bad_rows(file, options.max_bad_rows));
  TaskCounts n;
  n.bad_rows = static_cast<int64_t>(file.bad_rows.size());
  n.duplicate_prompts = file.duplicate_prompts;
  std::vector<Prompt> prompts;
  for (size_t i = 0; i < file.rows.size(); ++i) {
    if (static_cast<int64_t>(encoded[i].prompt.size()) > options.max_prompt_tokens) {
      ++n.overlong_prompts;
      continue;
    }
    PromptRow& row = file.rows[i];
    prompts.push_back(
        {.id = 0, .row = n.rows++, .text = std::move(row.prompt), .tokens = std::move(encoded[i].prompt), .label = std::move(row.label)});
  }
  if (prompts.empty()) {
    return errorf("{}: no usable prompt; of {} rows {} are bad and {} longer than task.max_prompt_tokens = {}", path,
                  file.rows.size() + file.bad_rows.size(), n.bad_rows, n.overlong_prompts, options.max_prompt_tokens);
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

}  // namespace lockstep
