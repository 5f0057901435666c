// Any response against any label: a verdict that is consistent, and a box of the label itself is always correct.
// Input: the response, a NUL byte, the label.

#include <cstdint>

#include "core/status.h"
#include "rl/reward.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t nul = input.find('\0');
  const std::string_view response = input.substr(0, nul);
  const std::string_view label = nul == std::string_view::npos ? std::string_view() : input.substr(nul + 1);
  for (const bool thinking : {false, true}) {
    const RewardResult r = math_reward(response, label, {.thinking = thinking});
    CHECK_EQ(r.correct, r.reason == RewardReason::correct);
    CHECK_EQ(r.score, r.correct ? 1.0f : 0.0f);
    CHECK_LE(r.pred.size(), 4 * kMaxAnswerBytes);
  }
  RewardReason reason;
  const std::string_view answer = last_boxed(response, &reason);
  if (!answer.empty() && answer.size() <= kMaxAnswerBytes && !normalize_math_answer(answer).empty() &&
      answer.find("\\fbox") == std::string_view::npos)
    CHECK(math_reward(response, answer).correct, "an answer differs from itself");
  return 0;
}
