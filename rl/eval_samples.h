#pragma once
// Answers to problems, wherever they came from, and the log that keeps them while an evaluation runs, so that one that is killed samples none of
// them again.
//
//   EVAL_DIR/samples_3.jsonl      what rank 3 sampled; lines are only appended
//
//   {"key":"5d0c...","row":4,"id":"aime2024-I-05","sample":2,"status":"completed","num_tokens":812,"response":"..","sum":".."}   (io/checked_line.h)
//
// `key` is a checksum of all that a problem's answers depend on besides their number: weights or server, prompt, sampling options, seed. A line is
// taken only for the same key, so that lines of other weights or settings are harmless. Nothing is synced: a power cut costs samples, never their
// correctness.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "io/file.h"
#include "rl/records.h"

namespace lockstep {

enum class AnswerStatus : uint8_t { completed, truncated, unknown };  // unknown: from elsewhere, which does not say
const char* answer_status_name(AnswerStatus status);

// Example: problem 4, sample 2, response "so \boxed{34}", status completed, num_tokens 812.
struct EvalSample {
  int64_t problem = 0;  // place among the problems asked, from 0
  int64_t sample = 0;
  std::string response;
  AnswerStatus status = AnswerStatus::unknown;
  int64_t num_tokens = -1;  // end token included; -1: unknown
};

bool by_problem_and_sample(const EvalSample& a, const EvalSample& b);

struct LoggedSamples {
  std::vector<EvalSample> samples;  // wanted ones, by (problem, sample), each once
  int64_t damaged_lines = 0;
  int64_t foreign_lines = 0;  // of other weights, settings or problems
};
// keys[i] is that of problem i; samples with an index of num_samples or more are passed over.
LoggedSamples parse_sample_log(std::string_view text, std::span<const uint64_t> keys, int64_t num_samples);

class SampleLog {
 public:
  SampleLog(std::string directory, int rank) : directory_(std::move(directory)), path_(fmt::format("{}/samples_{}.jsonl", directory_, rank)) {}
  // The lines of all ranks, of this or an earlier start. Empty if there is no directory.
  Result<std::string> read() const;
  // Takes the file for this process; an error if another one writes it. append() does so too.
  Status open();
  // Adds lines with one write: `row_id` and `row` are the problem's. After an error nothing of the batch stays behind. One thread at a time.
  Status append(std::span<const EvalSample> samples, std::span<const Prompt> problems, std::span<const uint64_t> keys);
  const std::string& directory() const { return directory_; }
  int64_t num_reused = 0;  // set by who sampled: samples that an earlier start had left

 private:
  std::string directory_, path_;
  FileDescriptor file_;
};

// What an earlier start left, as a line for the log; empty if nothing. An error if it left lines and none of them are of this evaluation.
Result<std::string> describe_log(const LoggedSamples& found, const std::string& directory);

}  // namespace lockstep
