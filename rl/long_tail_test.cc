#include "rl/long_tail.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(LongTail, SubmittedPromptsAreRoundedUpAsDecimalsAre) {
  EXPECT_EQ(submitted_prompts(16, 1.0f), 16);
  EXPECT_EQ(submitted_prompts(10, 1.1f), 11);  // the float is above 1.1
  EXPECT_EQ(submitted_prompts(10, 1.11f), 12);
  EXPECT_EQ(submitted_prompts(3, 1.5f), 5);
  EXPECT_EQ(submitted_prompts(1000000, 1.0f), 1000000);
}

Completion said(int32_t sample, FinishReason reason, std::vector<int32_t> tokens) {
  Completion c;
  c.prompt_id = 8;
  c.sample_idx = sample;
  c.reason = reason;
  c.logprobs.assign(tokens.size(), -0.3f);
  c.versions.assign(tokens.size(), 5);
  c.tokens = std::move(tokens);
  return c;
}

Request whole() {
  Request r;
  r.prompt_id = 8;
  r.prompt = {3, 4};
  r.num_samples = 6;
  r.seed = 7;
  r.sampling.stop_ids = {1};
  return r;
}

TEST(LongTail, SamplesGoOnFromTheirTokensAndTheOthersTogether) {
  const std::vector<Completion> samples = {said(0, FinishReason::abort, {}), said(1, FinishReason::stop, {9, 1}), said(2, FinishReason::abort, {7, 8})};
  const std::vector<Request> rest = continued_requests(whole(), samples);
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_TRUE(rest[0].first_sample == 0 && rest[0].num_samples == 1 && rest[0].log.tokens.empty());
  EXPECT_TRUE(rest[1].first_sample == 2 && rest[1].num_samples == 1);
  EXPECT_EQ(rest[1].log.tokens, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(rest[1].log.versions, (std::vector<int32_t>{5, 5}));
  EXPECT_TRUE(rest[2].first_sample == 3 && rest[2].num_samples == 3 && rest[2].log.tokens.empty());
}

TEST(LongTail, WhatWaitsComesBackFromACheckpointForEqualRequestsOnly) {
  LongTail tail;
  tail.waiting.push_back({.prompt = {.id = 8, .row = 2, .text = "", .tokens = {3, 4}, .label = ""},
                          .samples = {said(1, FinishReason::stop, {9, 1}), said(2, FinishReason::abort, {7, 8})}});
  tail.longest = {{2, 17}, {5, 3}};
  std::vector<Request> requests = {whole()};
  const std::string text = long_tail_text(tail, requests, 77);
  const Result<LongTailRows> rows = read_long_tail_rows(text);
  ASSERT_TRUE(rows.is_ok()) << rows.message();
  EXPECT_EQ(rows.value().waiting, (std::vector<std::pair<int64_t, int64_t>>{{8, 2}}));
  EXPECT_EQ(rows.value().longest, tail.longest);
  const std::vector<Completion> samples = read_long_tail_samples(text, requests, 77);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_TRUE(samples[0].reason == FinishReason::stop && samples[1].reason == FinishReason::abort);
  EXPECT_EQ(samples[1].tokens, (std::vector<int32_t>{7, 8}));

  EXPECT_TRUE(read_long_tail_samples(text, requests, 78).empty()) << "other numerics";
  requests[0].sampling.temperature = 0.9f;
  EXPECT_TRUE(read_long_tail_samples(text, requests, 77).empty());
  std::string damaged = text;
  damaged[damaged.find("17")] = '2';
  EXPECT_FALSE(read_long_tail_rows(damaged).is_ok());
}

}  // namespace
}  // namespace lockstep
