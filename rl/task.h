#pragma once
// What is asked: data files to prompts, and prompts in the order of a run.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "io/jsonl.h"
#include "io/tokenizer.h"
#include "rl/order.h"
#include "rl/records.h"
#include "rl/grader/judge.h"

namespace lockstep {

struct TaskOptions {
  std::string train_file, eval_file;
  RewardOptions reward;
  PromptStyle style = {};
  int64_t max_prompt_tokens = 256;  // the begin token counts
  float max_bad_rows = 0;           // share of unreadable rows that is tolerated
};

struct TaskCounts {
  int64_t rows = 0;  // usable
  int64_t bad_rows = 0;
  int64_t overlong_prompts = 0;   // dropped
  int64_t duplicate_prompts = 0;  // kept
  std::string fields;             // where prompts and labels were found
  std::string bad_row_list;       // the first of them, a line each
  std::string str() const;
};

// The usable rows of `path` as prompts, in the file's order; `row` counts them, ids are 0. Errors: too many bad rows, none left.
Result<std::vector<Prompt>> load_prompts(const std::string& path, const Tokenizer& tokenizer, const TaskOptions& options,
                                         TaskCounts* counts);

// The same where nothing is encoded, because someone else's tokenizer does: no tokens, no limit on them, but the messages.
Result<std::vector<Prompt>> load_problems(const std::string& path, const TaskOptions& options, TaskCounts* counts);

struct EncodedRow {
  std::vector<int32_t> prompt;      // the begin token, then the ids of the text
  std::vector<int32_t> completion;  // without an end token
};
// The ids of every good row, in order. A row that the tokenizer cannot encode becomes a bad one. An error: the prompts are in the chat
// format, whose tokens the tokenizer lacks.
Result<std::vector<EncodedRow>> encode_rows(PromptFile& file, const Tokenizer& tokenizer);

// Bad rows up to the tolerated share are counted; more are an error that lists them.
Status check_bad_rows(const PromptFile& file, float max_bad_rows);

// Tokens and labels.
std::string fingerprint(std::span<const Prompt> prompts);

// Hands out prompts, in a fresh permutation every epoch; each gets the next id of the run.
class Task {
 public:
  Task(std::vector<Prompt> prompts, uint64_t seed);
  Prompt next();
  Prompt again(int64_t row, int64_t id) const;  // that next() gave
  const OrderCursor& cursor() const { return order_.cursor(); }
  void restore(const OrderCursor& cursor) { order_.restore(cursor); }
  int64_t num_prompts() const { return order_.count(); }

 private:
  std::vector<Prompt> prompts_;
  EpochOrder order_;
};

}  // namespace lockstep
