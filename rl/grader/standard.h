#pragma once
// The graders behind grade(), one function each; label is not blank.

#include <string_view>

#include "rl/grader/grader.h"

namespace lockstep {

// `miles`: as the public grader has it. It scans unfinished thoughts too, wants the brace right behind \boxed, reads 1e3 as an
// integer, and takes the commas out of (1,234) before its brackets.
struct MathRules {
  bool miles = false;
};
RewardResult standard_reward(std::string_view response, std::string_view label, GradeOptions options);
RewardResult math_reward(std::string_view response, std::string_view label, GradeOptions options, MathRules rules = {});
RewardResult deepscaler_reward(std::string_view response, std::string_view label, GradeOptions options);
enum class DapoRules : uint8_t { ours, miles, verl };
RewardResult dapo_reward(std::string_view response, std::string_view label, GradeOptions options, DapoRules rules);

// The common form that `math` compares first, and whether two answers are equal by either of its steps.
std::string normalize_math_answer(std::string_view answer);
bool math_equal(std::string_view answer, std::string_view label, MathRules rules, bool* timeout);
// The common form that `dapo` compares.
std::string normalize_dapo_answer(std::string_view answer);

RewardResult graded(std::string pred, bool correct);
RewardResult ungraded(RewardReason reason);

}  // namespace lockstep
