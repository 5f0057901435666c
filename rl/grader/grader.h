#pragma once
// Graders: a response's text and the true answer to a score. Pure functions of their arguments: total (any bytes are taken),
// deterministic, bounded in time and memory, safe to call from any thread. What they decide is in rl spec 5; what they cost is
// linear in the length of the response, apart from the answer itself, whose comparison has a fixed budget.
//
//   default      ours: last non-empty \boxed{}, read as mathematics, equal if its value is             1 or 0
//   math         spec 5.3: last \boxed{}, normalised text, then a narrow symbolic step                 1 or 0
//   math_miles   the same, as the public grader does it today: for runs that are compared with its own 1 or 0
//   deepscaler   spec 5.5: math on what follows </think> or ###Response                                1 or 0
//   dapo         spec 5.4: the last "Answer:" line, else the last box, of the last 300 characters      1 or -1
//   dapo_miles, dapo_verl   the public graders, text against text                                      1 or -1
//   exact        the whole response, blanks around it aside                                            1 or 0

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

enum class RewardReason : uint8_t {
  correct,
  wrong,
  no_answer,            // nothing where the grader looks, or a blank response (exact)
  unbalanced_box,       // the last \boxed has no brace that closes it: mostly a response cut off
  empty_box,            // \boxed{}
  unfinished_thinking,  // thinking is on and no </think> was written
  no_think_marker,      // deepscaler, with thinking on: neither </think> nor ###Response
  timeout,              // comparing the answer would have cost more than its budget; scored as wrong, and counted
  error,                // not judged, so there is no score: RewardResult::error says why
};
const char* reward_reason_name(RewardReason reason);

struct RewardResult {
  float score = 0;       // what training uses; meaningless if reason is error
  bool correct = false;  // what accuracy and pass@k use
  std::string pred;      // the answer that was graded, normalised; empty if there was none. Equal answers mostly have equal text
  RewardReason reason = RewardReason::no_answer;
  std::string error;  // only with reason error
  bool scored() const { return reason != RewardReason::error; }
};
RewardResult reward_error(std::string why);

// In the order of kGraderNames. The last two are judged by others (judge.h).
enum class GraderKind : uint8_t { standard, math, math_miles, deepscaler, dapo, dapo_miles, dapo_verl, exact, command, http };
inline constexpr std::string_view kGraderNames[] = {"default",    "math",      "math_miles", "deepscaler", "dapo",
                                                    "dapo_miles", "dapo_verl", "exact",      "command",    "http"};

struct GradeOptions {
  bool thinking = false;  // responses begin inside a thinking block: grade only what follows the last </think>
};

inline constexpr size_t kMaxAnswerBytes = 1024;  // of `math`; a longer answer equals nothing
inline constexpr size_t kMaxPredBytes = 4096;

// REQUIRES a kind that is judged here. A blank label is an error, except that it makes `exact` compare with nothing.
RewardResult grade(GraderKind kind, std::string_view response, std::string_view label, GradeOptions options = {});

}  // namespace lockstep
