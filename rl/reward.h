#pragma once
// Verifiers: a response's text and the true answer to a score. Pure functions of their arguments: total (any bytes are
// taken), deterministic, and linear in the length of the response apart from the answer itself, which is cut at
// kMaxAnswerBytes. Threads may call them at will.

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

enum class RewardReason {
  correct,
  wrong,
  no_answer,            // no \boxed{} (math), or a blank response (exact match)
  unbalanced_box,       // the last \boxed has no brace that closes it: mostly a response cut off
  empty_box,            // \boxed{}
  unfinished_thinking,  // thinking is on and no </think> was written
};
const char* reward_reason_name(RewardReason reason);

struct RewardResult {
  float score = 0;       // what training uses
  bool correct = false;  // what accuracy and pass@k use
  std::string pred;      // the answer that was graded, normalised; empty if there was none. Equal answers have equal text
  RewardReason reason = RewardReason::no_answer;
};

inline constexpr size_t kMaxAnswerBytes = 1024;

// Score 1 if the texts are equal apart from blanks around them, else 0.
RewardResult exact_match_reward(std::string_view response, std::string_view label);

struct MathRewardOptions {
  bool thinking = false;  // grade only what follows the last </think>
};

// Score 1 if the content of the last \boxed{} equals the label (or the label's own box), else 0.
//
// Both are normalised: LaTeX dressing (\left, \!, \text{}, $, units, degree and percent signs, dfrac), blanks, "x=" in
// front, .5 as 0.5, \frac12, \sqrt3 and a/b in their long forms. Numbers lose a plus sign, leading zeros, thousands commas
// and zeros behind the point, so an integer label takes any spelling of that integer and nothing else. Everything else is
// equal if the normalised texts are; there is no algebra (1024 is not \boxed{2^{10}}, 1/2 is not \boxed{\frac{2}{4}}).
RewardResult math_reward(std::string_view response, std::string_view label, MathRewardOptions options = {});

// The content of the last \boxed{} (\fbox{} if there is no \boxed). Blanks may stand before the brace; braces nest.
// On failure `reason` says why and the result is empty.
std::string_view last_boxed(std::string_view text, RewardReason* reason);

// The common form that math_reward compares.
std::string normalize_math_answer(std::string_view answer);

}  // namespace lockstep
