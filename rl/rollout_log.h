#pragma once
// Finished completions of the step whose rollout is running, on disk as they finish, so that a run that dies in it samples none of them
// again (rl spec 20.6).
//
//   RUN/rollout_log/step_000012/rank_3.jsonl      what rank 3 finished of step 12
//
//   {"step":12,"seed":7,"weights":"5d0c...","sampling":"91fe...","sum":"..."}                     one each time a rank begins to write
//   {"key":"...","prompt_id":96,"sample_idx":2,"reason":"stop","tokens":[12,9,1],"logprob_bits":[...],"versions":[11,11,11],"sum":"..."}
//
// `sum` is XXH64 of the line without it: a line that a crash cut off or a disk damaged is passed over, and so is whatever stands around it.
// Recorded choices of the sampler (model/choices.h) are "experts" and "entries", in hexadecimal, 4 and 8 digits each.
// `key` is XXH64 of all that the sample's words depend on: step, weights, seed, prompt id and tokens, sampling options. A line is taken for
// a request only if the request gives the same key, so logs of other weights or settings are harmless wherever they come from, and the
// header is for people. Log-probs are kept as the bits of their f32. Nothing is synced: a power cut costs samples, never their correctness.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "rollout/types.h"

namespace lockstep {

struct LoggedRollout {
  std::vector<Completion> completions;  // wanted ones, by (prompt id, sample index), each once
  int64_t damaged_lines = 0;
  int64_t foreign_lines = 0;            // of other weights, settings or prompts
};

class RolloutLog {
 public:
  // The log of one step in `directory`, which need not exist yet. `weights` identifies the weights that sample: their checksum, their
  // numerics and version. `requests` are all of the step, whoever samples them; one a prompt.
  RolloutLog(std::string directory, int64_t step, uint64_t weights, std::span<const Request> requests, int rank);

  // What any ranks of this or an earlier start finished of the requests. Call it before any rank appends. None if there is no directory.
  Result<LoggedRollout> read() const;

  // The same of a text of such lines, and what append() writes of completions. With `unfinished` aborted ones, too, that have a token.
  LoggedRollout read_text(std::string_view text, bool unfinished = false) const;
  std::string text(std::span<const Completion> finished, bool unfinished = false) const;

  // Adds lines to this rank's file with one write; aborted completions are left out. After an error nothing of the batch stays behind.
  Status append(std::span<const Completion> finished);

 private:
  void take(std::string_view text, bool unfinished, LoggedRollout& found) const;

  std::string directory_, path_;
  std::string header_;
  struct Wanted {
    uint64_t key;
    int32_t first_sample, num_samples;
  };
  std::map<uint64_t, Wanted> requests_;  // by prompt id
  FileDescriptor file_;
};

// The requests for what `have` (by prompt id and sample index) lacks: in order, several for a prompt whose samples are there in part.
std::vector<Request> missing_requests(std::span<const Request> requests, std::span<const Completion> have);

}  // namespace lockstep
