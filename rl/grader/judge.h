#pragma once
// Many responses to verdicts: by a named grader on threads of this process, by a pool of commands, or by a server. Results come in
// the order of the rows, whoever finishes first, and do not depend on the number of workers.
//
// What a command or a server is asked and what it answers is JSON (rl spec 5.1):
//
//   {"id":7,"prompt":"..","response":"..","label":".."}      prompt only where it is known
//   {"id":7,"score":1}        and, as it likes, "correct" (default: score > 0), "pred", "reason"; or {"id":7,"error":"why not"}
//
// A row that cannot be judged is an error and says why; it is never scored 0.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "io/json.h"
#include "rl/grader/grader.h"

namespace lockstep {

struct RewardOptions {
  GraderKind grader = GraderKind::standard;
  std::string command = {};  // of GraderKind::command, run by /bin/sh
  std::string url = {};      // of GraderKind::http, http://HOST[:PORT]/PATH or https://
  int64_t workers = 0;   // threads, commands or connections at once; 0: one a core
  float deadline_s = 10;  // of a command: each row; of a server: each attempt at up to kHttpRows rows
  bool thinking = false;
};

struct GradeRow {
  std::string_view prompt, response, label;
};

class Judge {
 public:
  virtual ~Judge() = default;
  // Errors: no command or a URL that cannot be read. The commands are started when rows come.
  static Result<std::unique_ptr<Judge>> make(const RewardOptions& options);
  // Not to be called by two threads at once.
  virtual std::vector<RewardResult> grade(std::span<const GradeRow> rows) = 0;
  // Whether the same rows always get the same verdicts, wherever they are asked for.
  virtual bool is_pure() const = 0;
};

Result<std::unique_ptr<Judge>> make_command_judge(const RewardOptions& options);
Result<std::unique_ptr<Judge>> make_http_judge(const RewardOptions& options);

// Calls work(i) for i in [0, count) on up to `workers` threads (0: one a core), each i once.
void for_each_row(size_t count, int64_t workers, const std::function<void(size_t)>& work);

std::string grade_row_json(size_t id, const GradeRow& row);
// The verdict in an answer to row `id`. A malformed answer is an error verdict; `*answers` then says whether it at least bears
// the id.
RewardResult verdict_from_json(const JsonValue& answer, size_t id, bool* answers);

// Verdicts as text and back, for ranks that are told what another one was.
std::string verdicts_text(std::span<const RewardResult> verdicts);
Result<std::vector<RewardResult>> verdicts_from_text(std::string_view text);

}  // namespace lockstep
