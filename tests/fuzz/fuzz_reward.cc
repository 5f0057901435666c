// Any response against any label, by every grader: a verdict that is consistent and the same when asked again, and an answer that
// equals itself.
// Input: the response, a NUL byte, the label. Its box, boxed whole, is tried as well.

#include <cmath>
#include <cstdint>

#include "core/status.h"
#include "rl/grader/answer.h"
#include "rl/grader/grader.h"
#include "rl/grader/standard.h"
#include "rl/grader/text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t nul = input.find('\0');
  const std::string_view response = input.substr(0, nul);
  const std::string_view label = nul == std::string_view::npos ? std::string_view() : input.substr(nul + 1);
  const std::string boxed = "\\boxed{" + std::string(response) + "}";
  for (const std::string_view text : {response, std::string_view(boxed)}) {
    for (int kind = 0; kind < static_cast<int>(GraderKind::command); ++kind) {
      for (const bool thinking : {false, true}) {
        const RewardResult r = grade(static_cast<GraderKind>(kind), text, label, {.thinking = thinking});
        CHECK_EQ(r.correct, r.reason == RewardReason::correct);
        CHECK_EQ(r.scored(), r.error.empty());
        CHECK(!r.scored() || std::abs(r.score) == 1.0f || r.score == 0.0f);
        CHECK(!r.correct || r.score == 1.0f);
        CHECK_LE(r.pred.size(), kMaxPredBytes);
        const RewardResult again = grade(static_cast<GraderKind>(kind), text, label, {.thinking = thinking});
        CHECK(again.reason == r.reason && again.pred == r.pred, "another verdict");
      }
    }
  }
  RewardReason reason;
  last_nonempty_boxed(response, &reason);
  const std::string_view answer = last_boxed(response, &reason);
  if (!answer.empty() && answer.size() <= kMaxAnswerBytes && !normalize_math_answer(answer).empty() && answer.find("\\fbox") == std::string_view::npos)
    CHECK(grade(GraderKind::math, response, answer).correct, "an answer differs from itself");
  return 0;
}
