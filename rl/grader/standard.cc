#include "rl/grader/standard.h"

#include "core/status.h"
#include "rl/grader/answer.h"
#include "rl/grader/text.h"

namespace lockstep {

const char* reward_reason_name(RewardReason reason) {
  switch (reason) {
    case RewardReason::correct: return "correct";
    case RewardReason::wrong: return "wrong";
    case RewardReason::no_answer: return "no_answer";
    case RewardReason::unbalanced_box: return "unbalanced_box";
    case RewardReason::empty_box: return "empty_box";
    case RewardReason::unfinished_thinking: return "unfinished_thinking";
    case RewardReason::no_think_marker: return "no_think_marker";
    case RewardReason::timeout: return "timeout";
    case RewardReason::error: return "error";
  }
  return "?";
}

RewardResult reward_error(std::string why) { return {0.0f, false, "", RewardReason::error, std::move(why)}; }

RewardResult graded(std::string pred, bool correct) {
  if (pred.size() > kMaxPredBytes) pred.resize(kMaxPredBytes);
  return {correct ? 1.0f : 0.0f, correct, std::move(pred), correct ? RewardReason::correct : RewardReason::wrong, ""};
}

RewardResult ungraded(RewardReason reason) { return {0.0f, false, "", reason, ""}; }

namespace {

RewardResult exact_reward(std::string_view response, std::string_view label) {
  const std::string_view pred = trim(response);
  if (pred.empty()) return ungraded(RewardReason::no_answer);
  return graded(std::string(pred.substr(0, kMaxPredBytes)), pred == trim(label));
}

}  // namespace

RewardResult standard_reward(std::string_view response, std::string_view label, GradeOptions options) {
  if (!after_thinking(&response, options)) return ungraded(RewardReason::unfinished_thinking);
  RewardReason reason;
  const std::string_view answer = last_nonempty_boxed(response, &reason);
  if (answer.empty()) return ungraded(reason);
  RewardReason label_reason;
  const std::string_view boxed = last_nonempty_boxed(label, &label_reason);
  Algebra algebra;
  const ParsedAnswer pred = parse_answer(answer, algebra);
  std::string text = pred.ok ? answer_text(pred.whole, algebra) : pred.plain;
  // 1/0 is no answer, but the label is still one.
  algebra.clear_undefined();
  const ParsedAnswer truth = parse_answer(boxed.empty() ? label : boxed, algebra);
  algebra.clear_undefined();
  const bool equal = answers_equal(pred, truth, algebra);
  RewardResult result = graded(std::move(text), equal);
  if (!equal && algebra.exceeded()) result.reason = RewardReason::timeout;
  return result;
}

RewardResult grade(GraderKind kind, std::string_view response, std::string_view label, GradeOptions options) {
  if (kind == GraderKind::exact) return exact_reward(response, label);
  if (trim(label).empty()) return reward_error("the label is blank");
  switch (kind) {
    case GraderKind::standard: return standard_reward(response, label, options);
    case GraderKind::math: return math_reward(response, label, options);
    case GraderKind::math_miles: return math_reward(response, label, options, {.miles = true});
    case GraderKind::deepscaler: return deepscaler_reward(response, label, options);
    case GraderKind::dapo: return dapo_reward(response, label, options, DapoRules::ours);
    case GraderKind::dapo_miles: return dapo_reward(response, label, options, DapoRules::miles);
    case GraderKind::dapo_verl: return dapo_reward(response, label, options, DapoRules::verl);
    case GraderKind::exact: case GraderKind::command: case GraderKind::http: break;
  }
  CHECK(false, "grader {} judges elsewhere", kGraderNames[static_cast<size_t>(kind)]);
  return {};
}

}  // namespace lockstep
