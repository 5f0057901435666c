// The log of samples: what was written whole is read again, whatever happens to the rest.

#include "rl/eval_samples.h"

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::succeeds;

std::vector<Prompt> problems(size_t count) {
  std::vector<Prompt> out;
  for (size_t i = 0; i < count; ++i) out.push_back({.row = static_cast<int64_t>(i), .text = "p", .tokens = {}, .label = "1"});
  return out;
}

EvalSample sample(int64_t problem, int64_t sample, std::string response = "r") {
  return {.problem = problem, .sample = sample, .response = std::move(response), .status = AnswerStatus::truncated, .num_tokens = 3};
}

const std::vector<uint64_t> kKeys = {11, 22, 33};

TEST(SampleLog, ReadsWhatItWrote) {
  testing::TemporaryDirectory d;
  std::string all_bytes;
  for (int c = 0; c < 0x80; ++c) all_bytes += static_cast<char>(c);
  SampleLog log(d.file("out"), 0);
  EXPECT_EQ(log.read().value(), "");
  const std::vector<EvalSample> batch = {sample(2, 1, all_bytes + "\u2028é\U0001F600"), sample(0, 0, "")};
  ASSERT_TRUE(succeeds(log.append(batch, problems(3), kKeys)));
  const LoggedSamples found = parse_sample_log(log.read().value(), kKeys, 2);
  ASSERT_EQ(found.samples.size(), 2u);
  EXPECT_EQ(found.damaged_lines + found.foreign_lines, 0);
  EXPECT_EQ(found.samples[0].problem, 0);
  EXPECT_EQ(found.samples[1].response, batch[0].response);
  EXPECT_EQ(found.samples[1].sample, 1);
  EXPECT_EQ(found.samples[1].num_tokens, 3);
  EXPECT_EQ(found.samples[1].status, AnswerStatus::truncated);
}

TEST(SampleLog, CutAnywhere) {
  testing::TemporaryDirectory d;
  {
    SampleLog log(d.path(), 0);
    const std::vector<EvalSample> batch = {sample(0, 0), sample(1, 0)};
    ASSERT_TRUE(succeeds(log.append(batch, problems(3), kKeys)));
  }
  const std::string whole = testing::get(d.file("samples_0.jsonl"));
  const size_t first = whole.find('\n');
  for (size_t size = 0; size <= whole.size(); ++size) {
    testing::put(d.file("samples_0.jsonl"), whole.substr(0, size));
    SampleLog again(d.path(), 0);
    const LoggedSamples before = parse_sample_log(again.read().value(), kKeys, 1);
    const size_t kept = size < first ? 0u : size + 1 < whole.size() ? 1u : 2u;
    ASSERT_EQ(before.samples.size(), kept) << size;
    // What is written next is on lines of its own.
    const EvalSample next = sample(2, 0);
    ASSERT_TRUE(succeeds(again.append(std::span(&next, 1), problems(3), kKeys)));
    const LoggedSamples after = parse_sample_log(again.read().value(), kKeys, 1);
    ASSERT_EQ(after.samples.size(), kept + 1) << size;
    EXPECT_EQ(after.damaged_lines, before.damaged_lines);
  }
}

TEST(SampleLog, EveryDamagedByteIsFound) {
  testing::TemporaryDirectory d;
  SampleLog log(d.path(), 0);
  const EvalSample s = sample(0, 0, "text");
  ASSERT_TRUE(succeeds(log.append(std::span(&s, 1), problems(3), kKeys)));
  const std::string whole = testing::get(d.file("samples_0.jsonl"));
  for (size_t i = 0; i + 1 < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_TRUE(parse_sample_log(damaged, kKeys, 1).samples.empty()) << i;
  }
}

TEST(SampleLog, OnlyWhatIsWantedOnce) {
  testing::TemporaryDirectory d;
  SampleLog one(d.path(), 0), two(d.path(), 1);
  const std::vector<EvalSample> batch = {sample(0, 0, "first"), sample(1, 5), sample(0, 0, "second")};
  ASSERT_TRUE(succeeds(one.append(batch, problems(3), kKeys)));
  ASSERT_TRUE(succeeds(two.append(batch, problems(3), kKeys)));
  const std::string text = one.read().value();
  LoggedSamples found = parse_sample_log(text, kKeys, 5);  // sample 5 is one too many
  ASSERT_EQ(found.samples.size(), 1u);
  EXPECT_EQ(found.samples[0].response, "first");
  EXPECT_EQ(parse_sample_log(text, kKeys, 6).samples.size(), 2u);
  found = parse_sample_log(text, std::vector<uint64_t>{1, 2, 3}, 6);
  EXPECT_TRUE(found.samples.empty());
  EXPECT_EQ(found.foreign_lines, 6);
  EXPECT_TRUE(fails_with(describe_log(found, "DIR"), "DIR holds 6 samples of other weights, settings or problems and none of these; name another directory"));
}

TEST(SampleLog, OneWriter) {
  testing::TemporaryDirectory d;
  SampleLog one(d.path(), 0), other(d.path(), 0);
  ASSERT_TRUE(succeeds(one.open()));
  EXPECT_TRUE(fails_with(other.open(), "another evaluation writes there"));
}

}  // namespace
}  // namespace lockstep
