// What a rollout log gives back, whatever happened to its files; and what is then left to sample.

#include "rl/rollout_log.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::succeeds;

Request request(uint64_t prompt_id, int32_t num_samples = 4) {
  Request r;
  r.prompt_id = prompt_id;
  r.prompt = {3, static_cast<int32_t>(prompt_id)};
  r.num_samples = num_samples;
  r.seed = 7;
  r.sampling.stop_ids = {1};
  return r;
}

Completion completion(uint64_t prompt_id, int32_t sample, int32_t length = 3) {
  Completion c;
  c.prompt_id = prompt_id;
  c.sample_idx = sample;
  for (int32_t t = 0; t < length; ++t) {
    c.tokens.push_back(100 * static_cast<int32_t>(prompt_id) + 10 * sample + t);
    c.logprobs.push_back(-0.1f * static_cast<float>(t + sample));
    c.versions.push_back(5);
  }
  c.reason = sample % 2 == 0 ? FinishReason::stop : FinishReason::length;
  return c;
}

bool same(const Completion& a, const Completion& b) {
  return a.prompt_id == b.prompt_id && a.sample_idx == b.sample_idx && a.tokens == b.tokens && a.versions == b.versions && a.reason == b.reason &&
         a.logprobs.size() == b.logprobs.size() && std::memcmp(a.logprobs.data(), b.logprobs.data(), a.logprobs.size() * sizeof(float)) == 0;
}

class TokenLogTest : public ::testing::Test {
 protected:
  static constexpr int64_t kStep = 12;
  static constexpr uint64_t kWeights = 0x1234;
  RolloutLog log(int rank = 0) const { return {directory(), kStep, kWeights, requests_, rank}; }
  std::string directory() const { return dir_.file("step_000012"); }
  std::string file(int rank) const { return directory() + fmt::format("/rank_{}.jsonl", rank); }
  LoggedRollout read() const { return read_with(log()); }
  void rewrite(const std::string& bytes) const { std::ofstream(file(0), std::ios::binary) << bytes; }  // unsynced: thousands of times
  static LoggedRollout read_with(const RolloutLog& log) {
    Result<LoggedRollout> r = log.read();
    EXPECT_TRUE(succeeds(r));
    return r ? r.take() : LoggedRollout();
  }
  static std::vector<Completion> some(std::initializer_list<std::pair<uint64_t, int32_t>> which) {
    std::vector<Completion> list;
    for (const auto& [prompt, sample] : which) list.push_back(completion(prompt, sample));
    return list;
  }
  static std::string names(const std::vector<Completion>& list) {
    std::string s;
    for (const Completion& c : list) s += fmt::format("{}.{} ", c.prompt_id, c.sample_idx);
    return s;
  }

  const testing::TemporaryDirectory dir_;
  std::vector<Request> requests_ = {request(8), request(9), request(10)};
};

TEST_F(TokenLogTest, NothingIsThereBeforeTheFirstOneFinishes) {
  EXPECT_TRUE(read().completions.empty());
  RolloutLog l = log();
  ASSERT_TRUE(succeeds(l.append({})));
  EXPECT_EQ(dir_.count(), 0u);
}

TEST_F(TokenLogTest, EveryRanksCompletionsComeBackToTheBit) {
  RolloutLog zero = log(0), eleven = log(11);
  std::vector<Completion> odd = some({{9, 3}});
  odd[0].logprobs = {-0.0f, std::numeric_limits<float>::denorm_min(), -std::numeric_limits<float>::infinity()};
  ASSERT_TRUE(succeeds(zero.append(some({{10, 0}, {8, 2}}))));
  ASSERT_TRUE(succeeds(eleven.append(odd)));
  ASSERT_TRUE(succeeds(zero.append(some({{8, 0}}))));
  const LoggedRollout found = read();
  EXPECT_EQ(names(found.completions), "8.0 8.2 9.3 10.0 ");
  for (const Completion& c : found.completions) EXPECT_TRUE(same(c, c.prompt_id == 9 ? odd[0] : completion(c.prompt_id, c.sample_idx)));
  EXPECT_EQ(found.damaged_lines + found.foreign_lines, 0);
}

// Also what the sampler chose; a line without is no use to a run that repeats it.
TEST_F(TokenLogTest, ChoicesComeBackToTheBit) {
  std::vector<Completion> list = some({{8, 0}, {8, 1}});
  list[0].choices = {.experts = {0, 65535, 7}, .entries = {-1, 2147483647, 0}};
  list[1].choices = {.experts = {1}, .entries = {}};
  std::vector<Request> recorded = requests_;
  for (Request& r : recorded) r.record = ReplayKind::routing_index;
  RolloutLog with(directory(), kStep, kWeights, recorded, 0);
  ASSERT_TRUE(succeeds(log(1).append(some({{8, 2}}))));
  ASSERT_TRUE(succeeds(with.append(list)));
  const LoggedRollout found = read_with(with);
  EXPECT_EQ(names(found.completions), "8.0 8.1 ");
  EXPECT_EQ(found.foreign_lines, 1);
  EXPECT_TRUE(found.completions[0].choices == list[0].choices);
  EXPECT_TRUE(found.completions[1].choices == list[1].choices);
  EXPECT_TRUE(read_with(with).completions[0].tokens == list[0].tokens);
}

TEST_F(TokenLogTest, AbortedOnesAreLeftOut) {
  std::vector<Completion> list = some({{8, 0}, {8, 1}});
  list[0].reason = FinishReason::abort;
  ASSERT_TRUE(succeeds(log().append(list)));
  EXPECT_EQ(names(read().completions), "8.1 ");
}

// Cut off after every possible number of bytes, and continued by a second start.
TEST_F(TokenLogTest, TornTailsCostOneLine) {
  ASSERT_TRUE(succeeds(log().append(some({{8, 0}, {8, 1}}))));
  const std::string whole = get(file(0));
  const size_t second = whole.rfind('\n', whole.size() - 2) + 1, first = whole.rfind('\n', second - 2) + 1;
  for (size_t n = 0; n < whole.size(); ++n) {
    rewrite(whole.substr(0, n));
    const std::string before = n + 1 >= whole.size() ? "8.0 8.1 " : n + 1 >= second ? "8.0 " : "";  // a line needs no newline
    ASSERT_EQ(names(read().completions), before) << n;
    ASSERT_LE(read().damaged_lines, 1) << n;
    ASSERT_TRUE(succeeds(log().append(some({{9, 0}}))));
    ASSERT_EQ(names(read().completions), before + "9.0 ") << n;
  }
  EXPECT_GT(first, 0u);
}

TEST_F(TokenLogTest, AnyDamagedByteCostsItsLineAlone) {
  ASSERT_TRUE(succeeds(log().append(some({{8, 0}, {8, 1}, {8, 2}}))));
  const std::string whole = get(file(0));
  const size_t third = whole.rfind('\n', whole.size() - 2) + 1, second = whole.rfind('\n', third - 2) + 1;
  for (size_t n = second; n < third; ++n) {
    for (const int flip : {1, 0x80}) {
      std::string damaged = whole;
      damaged[n] = static_cast<char>(damaged[n] ^ flip);
      rewrite(damaged);
      const LoggedRollout found = read();
      const std::string names_found = names(found.completions);
      // Of a damaged line end, the next line is part.
      ASSERT_EQ(names_found, n + 1 == third ? "8.0 " : "8.0 8.2 ") << n;
      ASSERT_GE(found.damaged_lines, 1) << n;
    }
  }
  rewrite(std::string("\0\xff{}\n[]\n,\"sum\":\"0000000000000000\"}\n", 36) + whole);
  EXPECT_EQ(names(read().completions), "8.0 8.1 8.2 ");
}

TEST_F(TokenLogTest, OtherWeightsStepsSettingsAndPromptsAreNotTaken) {
  ASSERT_TRUE(succeeds(log().append(some({{8, 0}}))));
  EXPECT_EQ(read().completions.size(), 1u);
  const auto expect_foreign = [&](int64_t step, uint64_t weights, const std::vector<Request>& requests, const char* what) {
    const LoggedRollout found = read_with(RolloutLog(directory(), step, weights, requests, 0));
    EXPECT_TRUE(found.completions.empty()) << what;
    EXPECT_EQ(found.foreign_lines, 1) << what;
  };
  expect_foreign(kStep, kWeights + 1, requests_, "weights");
  expect_foreign(kStep + 1, kWeights, requests_, "step");
  const auto with = [&](const std::function<void(Request&)>& change) {
    std::vector<Request> r = requests_;
    for (Request& one : r) change(one);
    return r;
  };
  expect_foreign(kStep, kWeights, with([](Request& r) { r.seed = 8; }), "seed");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.prompt.push_back(4); }), "prompt");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.prompt_id += 100; }), "prompt id");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.temperature = std::nextafter(1.0f, 2.0f); }), "temperature");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.top_p = 0.9f; }), "top_p");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.min_p = 0.1f; }), "min_p");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.top_k = 5; }), "top_k");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.max_new_tokens = 65; }), "max_new_tokens");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.min_new_tokens = 1; }), "min_new_tokens");
  expect_foreign(kStep, kWeights, with([](Request& r) { r.sampling.stop_ids = {1, 2}; }), "stop ids");
  // A file of several starts: each line speaks for itself.
  ASSERT_TRUE(succeeds(RolloutLog(directory(), kStep, 99, requests_, 0).append(some({{8, 1}}))));
  ASSERT_TRUE(succeeds(log().append(some({{8, 2}, {8, 0}}))));
  const LoggedRollout found = read();
  EXPECT_EQ(names(found.completions), "8.0 8.2 ");
  EXPECT_EQ(found.foreign_lines, 1);
}

TEST_F(TokenLogTest, WhatIsMissingIsAskedFor) {
  const auto asked = [&](const std::vector<Completion>& have) {
    std::string s;
    for (const Request& r : missing_requests(requests_, have)) {
      EXPECT_EQ(r.prompt, request(r.prompt_id).prompt);
      s += fmt::format("{}:{}+{} ", r.prompt_id, r.first_sample, r.num_samples);
    }
    return s;
  };
  EXPECT_EQ(asked({}), "8:0+4 9:0+4 10:0+4 ");
  EXPECT_EQ(asked(some({{8, 1}, {9, 0}, {9, 1}, {9, 2}, {9, 3}, {10, 3}})), "8:0+1 8:2+2 10:0+3 ");
  EXPECT_EQ(asked(some({{8, 0}, {8, 2}, {10, 1}, {10, 2}})), "8:1+1 8:3+1 9:0+4 10:0+1 10:3+1 ");
  requests_ = {request(8, 2)};
  requests_[0].first_sample = 5;
  EXPECT_EQ(asked(some({{8, 0}, {8, 6}})), "8:5+1 ");
  EXPECT_EQ(asked(some({{8, 5}, {8, 6}})), "");
  // Fewer samples a prompt than before the restart.
  ASSERT_TRUE(succeeds(log().append(some({{8, 4}, {8, 5}}))));
  EXPECT_EQ(names(read().completions), "8.5 ");
}

TEST_F(TokenLogTest, AFullDiskLeavesNoPartOfABatch) {
  RolloutLog l = log();
  ASSERT_TRUE(succeeds(l.append(some({{8, 0}}))));
  const std::string before = get(file(0));
  const pid_t child = fork();
  if (child == 0) {  // a limit of the process stands in for the disk
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {before.size() + 50, before.size() + 50};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    _exit(fails_with(l.append(some({{8, 1}})), "rank_0.jsonl") ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(get(file(0)), before);
  EXPECT_TRUE(fails_with(RolloutLog("/proc/none", kStep, kWeights, requests_, 0).append(some({{8, 0}})), "/proc/none"));
}

}  // namespace
}  // namespace lockstep
