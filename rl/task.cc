#include "rl/task.h"

#include <algorithm>
#include <utility>

#include "io/chat.h"
#include "rl/fingerprint.h"
#include "rl/policy.h"

namespace lockstep {

namespace {

// Where a marker is spelled out in several tokens, the model never saw it.
Status check_chat_tokenizer(const Tokenizer& tokenizer) {
  for (const std::string_view token : {kBeginOfSentence, kUserToken, kAssistantToken, kThinkToken, kEndThinkToken}) {
    const Result<std::vector<int32_t>> ids = tokenizer.encode(token);
    if (ids && ids.value().size() == 1) continue;
    return errorf("{} is {} for this tokenizer and not one token: prompts in DeepSeek-V4's chat format need its tokenizer.json in model.tokenizer; for "
                  "another model write prompts as text, with task.chat = \"none\"",
                  token, ids ? fmt::format("{} tokens", ids.value().size()) : "nothing");
  }
  return Status::ok();
}

TaskCounts count_rows(const PromptFile& file) {
  TaskCounts n;
  n.bad_rows = file.num_bad_rows;
  n.duplicate_prompts = file.duplicate_prompts;
  n.fields = file.fields;
  n.bad_row_list = bad_rows_list(file);
  return n;
}

}  // namespace

std::string TaskCounts::str() const {
  return fmt::format("{} prompts ({}); {} bad rows, {} overlong and dropped, {} duplicates{}", rows, fields, bad_rows, overlong_prompts, duplicate_prompts,
                     bad_row_list);
}

Result<std::vector<EncodedRow>> encode_rows(PromptFile& file, const Tokenizer& tokenizer) {
  const auto is_chat = [](const PromptRow& r) { return !r.messages.empty(); };
  if (const auto first = std::find_if(file.rows.begin(), file.rows.end(), is_chat); first != file.rows.end())
    if (const Status s = check_chat_tokenizer(tokenizer); !s) return errorf("{}:{}: {}", file.path, first->line, s.message());
  std::vector<PromptRow> rows = std::exchange(file.rows, {});
  std::vector<EncodedRow> encoded;
  for (PromptRow& row : rows) {
    Result<std::vector<int32_t>> prompt = prompt_tokens(tokenizer, row.prompt), completion = tokenizer.encode(row.completion);
    if (prompt && completion) {
      encoded.push_back({prompt.take(), completion.take()});
      file.rows.push_back(std::move(row));
    } else {
      file.add_bad_row(row.line, prompt ? completion.message() : prompt.message());
    }
  }
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
  if (static_cast<double>(file.num_bad_rows) <= static_cast<double>(max_bad_rows) * static_cast<double>(file.num_rows())) return Status::ok();
  return bad_rows_status(file);
}

Result<std::vector<Prompt>> load_prompts(const std::string& path, const Tokenizer& tokenizer, const TaskOptions& options,
                                         TaskCounts* counts) {
  Result<PromptFile> read = read_prompts(path, {.style = options.style});
  if (!read) return read.status();
  PromptFile& file = read.value();
  Result<std::vector<EncodedRow>> encoded = encode_rows(file, tokenizer);
  if (!encoded) return encoded.status();
  LOCKSTEP_RETURN_IF_ERROR(check_bad_rows(file, options.max_bad_rows));
  TaskCounts n = count_rows(file);
  std::vector<Prompt> prompts;
  for (size_t i = 0; i < file.rows.size(); ++i) {
    std::vector<int32_t>& tokens = encoded.value()[i].prompt;
    if (static_cast<int64_t>(tokens.size()) > options.max_prompt_tokens) {
      ++n.overlong_prompts;
      continue;
    }
    PromptRow& row = file.rows[i];
    prompts.push_back({.id = 0,
                       .row = n.rows++,
                       .text = std::move(row.prompt),
                       .tokens = std::move(tokens),
                       .label = std::move(row.label),
                       .row_id = std::move(row.id)});
  }
  if (prompts.empty()) {
    return errorf("{}: no usable prompt; of {} rows {} are bad and {} longer than task.max_prompt_tokens = {}", path, file.num_rows(), n.bad_rows,
                  n.overlong_prompts, options.max_prompt_tokens);
  }
  if (counts != nullptr) *counts = n;
  return prompts;
}

Result<std::vector<Prompt>> load_problems(const std::string& path, const TaskOptions& options, TaskCounts* counts) {
  Result<PromptFile> read = read_prompts(path, {.style = options.style});
  if (!read) return read.status();
  LOCKSTEP_RETURN_IF_ERROR(check_bad_rows(read.value(), options.max_bad_rows));
  TaskCounts n = count_rows(read.value());
  std::vector<Prompt> problems;
  for (PromptRow& row : read.value().rows) {
    problems.push_back({.id = 0,
                        .row = n.rows++,
                        .text = std::move(row.prompt),
                        .tokens = {},
                        .label = std::move(row.label),
                        .row_id = std::move(row.id),
                        .messages = std::move(row.messages)});
  }
  if (problems.empty()) return errorf("{}: no usable prompt; {} rows are bad", path, n.bad_rows);
  if (counts != nullptr) *counts = n;
  return problems;
}

Task::Task(std::vector<Prompt> prompts, uint64_t seed)
    : prompts_(std::move(prompts)), order_(static_cast<int64_t>(prompts_.size()), seed) {}

Prompt Task::next() {
  const int64_t id = order_.cursor().issued;
  return again(order_.next(), id);
}

Prompt Task::again(int64_t row, int64_t id) const {
  Prompt p = prompts_[static_cast<size_t>(row)];
  p.id = id;
  return p;
}

}  // namespace lockstep
