#include "rl/records.h"

#include <cmath>

namespace lockstep {

const char* trajectory_status_name(TrajectoryStatus status) {
  switch (status) {
    case TrajectoryStatus::completed: return "completed";
    case TrajectoryStatus::truncated: return "truncated";
    case TrajectoryStatus::aborted: return "aborted";
    case TrajectoryStatus::failed: return "failed";
  }
  return "?";
}

Status check_trajectory(const Trajectory& t, int64_t vocab_size) {
  const int64_t length = t.response_length();
  if (t.prompt_length < 1) return errorf("the prompt has {} tokens", t.prompt_length);
  if (length < 1) return errorf("the response is empty");
  const auto has_length = [&](size_t n) { return static_cast<int64_t>(n) == length; };
  if (!has_length(t.mask.size()) || !has_length(t.logprobs.size()) || !has_length(t.versions.size())) {
    return errorf("{} response tokens with {} mask entries, {} log-probs and {} versions", length, t.mask.size(),
                  t.logprobs.size(), t.versions.size());
  }
  for (size_t i = 0; i < t.tokens.size(); ++i) {
    if (t.tokens[i] < 0 || t.tokens[i] >= vocab_size) {
      return errorf("token {} at position {} lies outside the vocabulary of {}", t.tokens[i], i, vocab_size);
    }
  }
  for (size_t i = 0; i < t.logprobs.size(); ++i) {
    if (t.mask[i] > 1) return errorf("mask entry {} is {}", i, t.mask[i]);
    // Exactly 0 is a legal log-prob (probability 1); missing values would be NaN.
    if (t.mask[i] == 1 && !(std::isfinite(t.logprobs[i]) && t.logprobs[i] <= 0)) {
      return errorf("log-prob {} of response token {} is not a finite number at most 0", t.logprobs[i], i);
    }
    if (t.versions[i] < 0) return errorf("response token {} has policy version {}", i, t.versions[i]);
  }
  return Status::ok();
}

}  // namespace lockstep
