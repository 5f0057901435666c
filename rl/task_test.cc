// Prompts in order: a permutation an epoch, a pure function of (seed, epoch), resumable at any point.

#include "rl/task.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "io/chat.h"
#include "rl/evaluate.h"

namespace lockstep {
namespace {

std::vector<Prompt> numbered(int64_t count) {
  std::vector<Prompt> prompts;
  for (int64_t i = 0; i < count; ++i)
    prompts.push_back({.id = 0, .row = i, .text = std::to_string(i), .tokens = {0, static_cast<int32_t>(i)}, .label = ""});
  return prompts;
}

TEST(Order, IsAPermutation) {
  for (const int64_t count : {0, 1, 2, 7, 1000}) {
    const std::vector<uint32_t> order = shuffled_order(count, 5, 3);
    const std::set<uint32_t> seen(order.begin(), order.end());
    EXPECT_EQ(static_cast<int64_t>(seen.size()), count);
    if (count > 0) {
      EXPECT_EQ(*seen.begin(), 0u);
      EXPECT_EQ(*seen.rbegin(), count - 1);
    }
  }
}

TEST(Order, DependsOnSeedAndEpochAlone) {
  EXPECT_EQ(shuffled_order(100, 1, 2), shuffled_order(100, 1, 2));
  EXPECT_NE(shuffled_order(100, 1, 2), shuffled_order(100, 1, 3));
  EXPECT_NE(shuffled_order(100, 1, 2), shuffled_order(100, 2, 2));
}

// Each of 6 permutations of 3 rows over 6000 epochs: 1000 expected, standard deviation sqrt(6000 * 1/6 * 5/6) = 29; 6 of them is
// 174.
TEST(Order, IsUniform) {
  std::map<std::vector<uint32_t>, int> counts;
  for (int epoch = 0; epoch < 6000; ++epoch) ++counts[shuffled_order(3, 9, epoch)];
  ASSERT_EQ(counts.size(), 6u);
  for (const auto& [order, n] : counts) EXPECT_NEAR(n, 1000, 174);
}

TEST(Task, EveryEpochUsesEveryRowOnce) {
  Task task(numbered(7), 3);
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::set<int64_t> rows;
    for (int i = 0; i < 7; ++i) rows.insert(task.next().row);
    EXPECT_EQ(rows.size(), 7u);
  }
}

TEST(Task, IdsCountUpAndAreNeverUsedTwice) {
  Task task(numbered(3), 3);
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(task.next().id, i);
}

TEST(Task, ResumesAtTheNextPromptFromEveryPosition) {
  constexpr int kTotal = 25;
  Task straight(numbered(7), 11);
  std::vector<int64_t> rows, ids;
  for (int i = 0; i < kTotal; ++i) {
    const Prompt p = straight.next();
    rows.push_back(p.row);
    ids.push_back(p.id);
  }
  for (int stop = 0; stop <= kTotal; ++stop) {
    Task first(numbered(7), 11);
    for (int i = 0; i < stop; ++i) first.next();
    Task second(numbered(7), 11);
    second.restore(first.cursor());
    for (int i = stop; i < kTotal; ++i) {
      const Prompt p = second.next();
      ASSERT_EQ(p.row, rows[static_cast<size_t>(i)]) << "stopped after " << stop;
      ASSERT_EQ(p.id, ids[static_cast<size_t>(i)]) << "stopped after " << stop;
    }
    EXPECT_EQ(second.cursor(), straight.cursor());
  }
}

class TaskFile : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() /
            fmt::format("task_test_{}.jsonl", ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove(path_); }
  Result<std::vector<Prompt>> load(const std::string& text, const TaskOptions& options, TaskCounts* counts) {
    std::ofstream(path_) << text;
    return load_prompts(path_, tokenizer_, options, counts);
  }
  std::filesystem::path path_;
  ByteTokenizer tokenizer_;
};

TEST_F(TaskFile, CountsWhatItDrops) {
  TaskCounts counts;
  TaskOptions options;
  options.max_prompt_tokens = 4;  // the begin token and three bytes
  const Result<std::vector<Prompt>> prompts = load(
      "{\"prompt\":\"1+1\",\"label\":\"2\"}\n"
      "{\"prompt\":\"12+12\",\"label\":\"24\"}\n"
      "{\"prompt\":\"1+1\",\"label\":\"2\"}\n",
      options, &counts);
  ASSERT_TRUE(prompts.is_ok()) << prompts.message();
  ASSERT_EQ(prompts.value().size(), 2u);
  EXPECT_EQ(prompts.value()[0].tokens, (std::vector<int32_t>{0, 3 + '1', 3 + '+', 3 + '1'}));
  EXPECT_EQ(prompts.value()[1].row, 1);
  EXPECT_EQ(counts.rows, 2);
  EXPECT_EQ(counts.overlong_prompts, 1);
  EXPECT_EQ(counts.duplicate_prompts, 1);
}

TEST_F(TaskFile, BadRowsStopTheRunUnlessTolerated) {
  const std::string text = "{\"prompt\":\"1+1\",\"label\":\"2\"}\nnot json\n";
  TaskCounts counts;
  TaskOptions options;
  EXPECT_FALSE(load(text, options, &counts).is_ok());
  options.max_bad_rows = 0.4f;
  EXPECT_FALSE(load(text, options, &counts).is_ok());
  options.max_bad_rows = 0.5f;
  ASSERT_TRUE(load(text, options, &counts).is_ok());
  EXPECT_EQ(counts.bad_rows, 1);
}

TEST_F(TaskFile, WhatTheTokenizerCannotEncodeIsABadRow) {
  const std::string text =
      "{\"prompt\":\"1?\",\"label\":\"2\"}\n"
      "not json\n"
      "{\"prompt\":\"1+1\",\"label\":\"2\"}\n"
      "{\"prompt\":\"\u00e9\",\"label\":\"2\"}\n";
  std::ofstream(path_) << text;
  const ByteTokenizer digits("+0123456789");
  TaskCounts counts;
  TaskOptions options;
  const Result<std::vector<Prompt>> refused = load_prompts(path_, digits, options, &counts);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_NE(refused.message().find(": 3 of 4 rows cannot be used\n"), std::string::npos) << refused.message();
  for (const char* where : {":1: byte 0x3f", ":2: invalid JSON", ":4: byte 0xc3"})
    EXPECT_NE(refused.message().find(path_.string() + where), std::string::npos) << refused.message();

  options.max_bad_rows = 0.75f;
  const Result<std::vector<Prompt>> prompts = load_prompts(path_, digits, options, &counts);
  ASSERT_TRUE(prompts.is_ok()) << prompts.message();
  ASSERT_EQ(prompts.value().size(), 1u);
  EXPECT_EQ(prompts.value()[0].text, "1+1");
  EXPECT_EQ(counts.str(), "1 prompts (prompt, label); 3 bad rows, 0 overlong and dropped, 0 duplicates" + counts.bad_row_list);
  EXPECT_TRUE(counts.bad_row_list.starts_with("\n" + path_.string() + ":1: byte 0x3f")) << counts.bad_row_list;
}

// Rendered prompts become the ids that the release's encoder gives; a tokenizer that lacks the format's tokens is refused.
TEST_F(TaskFile, ChatPromptsNeedTheirTokenizer) {
  const std::string text = "{\"prompt\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"label\":\"2\",\"id\":\"q7\"}\n";
  TaskOptions options;
  options.style.chat = PromptChat::thinking;
  const Result<std::vector<Prompt>> refused = load(text, options, nullptr);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_NE(refused.message().find(path_.string() + ":1: <｜begin▁of▁sentence｜> is 29 tokens for this tokenizer and not one token"), std::string::npos)
      << refused.message();

  const std::unique_ptr<Tokenizer> v4 = load_tokenizer(LOCKSTEP_TOKENIZERS).take();
  const Result<std::vector<Prompt>> prompts = load_prompts(path_, *v4, options, nullptr);
  ASSERT_TRUE(prompts.is_ok()) << prompts.message();
  std::vector<int32_t> wanted = {v4->bos_id()};
  for (const std::string_view piece : {kUserToken, std::string_view("Hi"), kAssistantToken, kThinkToken}) {
    ASSERT_EQ(v4->encode(piece).value().size(), 1u) << piece;
    wanted.push_back(v4->encode(piece).value()[0]);
  }
  EXPECT_EQ(prompts.value()[0].tokens, wanted);
  EXPECT_EQ(prompts.value()[0].row_id, "q7");

  const Result<std::vector<Prompt>> problems = load_problems(path_, options, nullptr);
  ASSERT_TRUE(problems.is_ok()) << problems.message();
  EXPECT_EQ(problems.value()[0].text, prompts.value()[0].text);
  EXPECT_EQ(problems.value()[0].messages, R"([{"role":"user","content":"Hi"}])");
}

// AIME 2024, whose texts are not ours to ship: the protocol from the file to the report.
TEST(Aime2024, PromptsAndVerdicts) {
  const std::string file = LOCKSTEP_SOURCE_DIR "/../shared/data/aime2024.jsonl";
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there";
  const std::unique_ptr<Tokenizer> v4 = load_tokenizer(LOCKSTEP_TOKENIZERS).take();
  TaskOptions options;
  options.style.chat = PromptChat::thinking;
  options.style.prompt_template = "boxed";
  options.max_prompt_tokens = 1024;
  TaskCounts counts;
  const Result<std::vector<Prompt>> problems = load_prompts(file, *v4, options, &counts);
  ASSERT_TRUE(problems.is_ok()) << problems.message();
  ASSERT_EQ(problems.value().size(), 30u);
  EXPECT_EQ(counts.bad_rows + counts.overlong_prompts + counts.duplicate_prompts, 0);
  std::vector<EvalSample> samples;
  for (const Prompt& p : problems.value()) {
    EXPECT_EQ(p.tokens.front(), v4->bos_id());
    EXPECT_TRUE(p.text.ends_with("\nPlease reason step by step, and put your final answer within \\boxed{}.<｜Assistant｜><think>"));
    EXPECT_EQ(v4->decode(p.tokens, SpecialTokens::show), p.text);
    const std::string digits = fmt::format("{:03}", std::stoi(p.label));  // as they are printed in places
    for (const std::string& answer : {"so</think>It is \\boxed{" + digits + "}.", std::string("\\boxed{1000}")})
      samples.push_back({.problem = p.row, .sample = answer.starts_with("so") ? 0 : 1, .response = answer, .status = AnswerStatus::completed});
  }
  const Result<std::vector<RewardResult>> verdicts = judge_answers(problems.value(), samples, {.thinking = true});
  ASSERT_TRUE(verdicts.is_ok()) << verdicts.message();
  const EvalReport report = make_eval_report(problems.value(), samples, verdicts.value());
  EXPECT_EQ(report.pass(1), 0.5);
  EXPECT_EQ(report.pass(2), 1);
  EXPECT_EQ(report.majority.value, 1) << "an unfinished thought has no answer and no vote";
}

TEST_F(TaskFile, FingerprintsTellOrderTokensAndLabelsApart) {
  std::vector<Prompt> a = numbered(3), b = numbered(3);
  EXPECT_EQ(fingerprint(a), fingerprint(b));
  std::swap(b[0], b[1]);
  EXPECT_NE(fingerprint(a), fingerprint(b));
  b = numbered(3);
  b[2].label = "x";
  EXPECT_NE(fingerprint(a), fingerprint(b));
  b = numbered(3);
  b[2].tokens.push_back(0);
  EXPECT_NE(fingerprint(a), fingerprint(b));
  EXPECT_NE(fingerprint(a), fingerprint(std::span(a).first(2)));
}

TEST_F(TaskFile, NothingUsableIsAnError) {
  TaskOptions options;
  options.max_prompt_tokens = 1;
  EXPECT_FALSE(load("{\"prompt\":\"1+1\",\"label\":\"2\"}\n", options, nullptr).is_ok());
  EXPECT_FALSE(load("", options, nullptr).is_ok());
}

}  // namespace
}  // namespace lockstep
