#include "rl/records.h"

#include <gtest/gtest.h>

#include <limits>

#include "rl/sampling.h"

namespace lockstep {
namespace {

Trajectory valid() {
  Trajectory t;
  t.tokens = {0, 5, 6, 7, 1};
  t.prompt_length = 2;
  t.mask = {1, 1, 1};
  t.logprobs = {-0.5f, 0.0f, -2.0f};  // exactly 0 is probability 1, not "missing"
  t.versions = {3, 3, 3};
  return t;
}

TEST(Records, AValidOnePasses) {
  const Status s = check_trajectory(valid(), 8);
  EXPECT_TRUE(s.is_ok()) << s.message();
}

TEST(Records, EveryRuleCanFail) {
  const auto breaks = [](auto&& change) {
    Trajectory t = valid();
    change(t);
    return !check_trajectory(t, 8).is_ok();
  };
  EXPECT_TRUE(breaks([](Trajectory& t) { t.mask.pop_back(); }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.logprobs.push_back(-1); }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.versions.clear(); }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.tokens[3] = 8; }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.tokens[0] = -1; }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.logprobs[1] = 1e-6f; }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.logprobs[1] = -std::numeric_limits<float>::infinity(); }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.logprobs[1] = std::numeric_limits<float>::quiet_NaN(); }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.mask[0] = 2; }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.versions[2] = -1; }));
  EXPECT_TRUE(breaks([](Trajectory& t) { t.prompt_length = 0; }));
  EXPECT_TRUE(breaks([](Trajectory& t) {
    t.prompt_length = 5;
    t.mask.clear();
    t.logprobs.clear();
    t.versions.clear();
  }));
  // Where nothing was sampled, a missing log-prob is no fault.
  EXPECT_FALSE(breaks([](Trajectory& t) {
    t.mask[1] = 0;
    t.logprobs[1] = std::numeric_limits<float>::quiet_NaN();
  }));
}

TEST(Records, CompletionsBecomeTrajectories) {
  const ByteTokenizer tokenizer("ab");  // ids 3 and 4
  const Prompt prompt{.id = 7, .row = 0, .text = "a", .tokens = {0, 3}, .label = "b"};
  Completion completion{.prompt_id = 7,
                        .sample_idx = 2,
                        .tokens = {4, 1},
                        .logprobs = {-0.1f, -0.2f},
                        .versions = {5, 5},
                        .reason = FinishReason::stop};
  Trajectory t = make_trajectory(prompt, completion, 4, tokenizer, 5);
  EXPECT_EQ(t.index, 30);
  EXPECT_EQ(t.tokens, (std::vector<int32_t>{0, 3, 4, 1}));
  EXPECT_EQ(t.prompt_length, 2);
  EXPECT_EQ(t.mask, (std::vector<uint8_t>{1, 1}));
  EXPECT_EQ(t.text, "b");  // the end token is trained but is no text
  EXPECT_EQ(t.status, TrajectoryStatus::completed);

  completion.reason = FinishReason::length;
  EXPECT_EQ(make_trajectory(prompt, completion, 4, tokenizer, 5).status, TrajectoryStatus::truncated);
  completion.logprobs[0] = 0.5f;
  t = make_trajectory(prompt, completion, 4, tokenizer, 5);
  EXPECT_EQ(t.status, TrajectoryStatus::failed);
  EXPECT_FALSE(t.failure.empty());
  completion.reason = FinishReason::abort;
  EXPECT_EQ(make_trajectory(prompt, completion, 4, tokenizer, 5).status, TrajectoryStatus::aborted);
}

}  // namespace
}  // namespace lockstep
