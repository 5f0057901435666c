// Answers of other programs, in the shapes they come in.

#include "rl/eval_completions.h"

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;

std::vector<Prompt> problems(bool ids) {
  std::vector<Prompt> out;
  for (int64_t i = 0; i < 2; ++i) out.push_back({.row = i, .text = "p", .tokens = {}, .label = "1", .row_id = ids ? fmt::format("q{}", i) : ""});
  return out;
}

// "problem.sample response" of every sample, joined by "; ".
std::string read(std::string_view text, bool ids = true) {
  const Result<std::vector<EvalSample>> samples = parse_completions(text, "f", problems(ids));
  if (!samples) return samples.message();
  std::string out;
  for (const EvalSample& s : samples.value()) out += fmt::format("{}{}.{} {}", out.empty() ? "" : "; ", s.problem, s.sample, s.response);
  return out;
}

TEST(Completions, Shapes) {
  const std::string wanted = "0.0 a; 0.1 b; 1.0 c";
  for (const char* text : {
           "{\"id\":\"q1\",\"response\":\"c\"}\n\n{\"id\":\"q0\",\"response\":\"a\"}\r\n{\"id\":\"q0\",\"response\":\"b\"}",
           "\xEF\xBB\xBF{\"index\":0,\"responses\":[\"a\",\"b\"]}\n{\"index\":1,\"response\":[\"c\"]}\n",
           "{\"row\":0,\"sample\":1,\"completion\":\"b\"}\n{\"row\":0,\"sample\":0,\"output\":\"a\"}\n{\"row\":1,\"text\":\"c\"}\n",
           "[\"a\",\"b\"]\n\"c\"\n",
           "[[\"a\",\"b\"],\n[\"c\"]]",
           "[{\"id\":\"q0\",\"response\":\"a\"},\n {\"id\":\"q0\",\"response\":\"b\"}, {\"id\":\"q1\",\"response\":\"c\"}]",
           "{\"q0\":[\"a\",\"b\"],\n\"q1\":\"c\"}",
           R"({"id":"q0","choices":[{"message":{"content":"a"}},{"text":"b"}]})"
           "\n"
           R"({"custom_id":"q1","response":{"status_code":200,"body":{"choices":[{"message":{"content":"c"}}]}}})",
           "{\"response\":[\"a\",\"b\"]}\n{\"response\":\"c\"}\n",
       })
    EXPECT_EQ(read(text), wanted) << text;
  EXPECT_EQ(read("{\"id\":0,\"response\":\"a\"}\n{\"id\":\"1\",\"response\":\"c\"}", false), "0.0 a; 1.0 c");
  EXPECT_EQ(read(R"({"q0":"a","q1":"c"})"), "0.0 a; 1.0 c");
}

TEST(Completions, EndsAndReasoning) {
  const Result<std::vector<EvalSample>> samples = parse_completions(
      R"({"id":"q0","choices":[{"message":{"reasoning_content":"why","content":"a"},"finish_reason":"stop"},{"message":{"reasoning_content":"cut","content":null},"finish_reason":"length"}]})"
      "\n"
      R"({"id":"q1","response":"c","status":"truncated","num_tokens":7})"
      "\n"
      R"({"id":"q1","response":"d"})",
      "f", problems(true));
  ASSERT_TRUE(samples.is_ok()) << samples.message();
  const std::vector<EvalSample>& s = samples.value();
  ASSERT_EQ(s.size(), 4u);
  EXPECT_EQ(s[0].response, "why</think>a");
  EXPECT_EQ(s[0].status, AnswerStatus::completed);
  EXPECT_EQ(s[1].response, "cut");
  EXPECT_EQ(s[1].status, AnswerStatus::truncated);
  EXPECT_EQ(s[2].status, AnswerStatus::truncated);
  EXPECT_EQ(s[2].num_tokens, 7);
  EXPECT_EQ(s[3].status, AnswerStatus::unknown);
  EXPECT_EQ(s[3].num_tokens, -1);
}

TEST(Completions, Refused) {
  EXPECT_EQ(read("{\"id\":\"q0\",\"response\":\"a\"}"), "f: 1 of 2 problems have no answer: q1");
  EXPECT_EQ(read("", false), "f: 2 of 2 problems have no answer: row 0, row 1");
  EXPECT_EQ(read("{\"id\":\"q9\",\"response\":\"a\"}"), "f:1: no problem has the id \"q9\"");
  EXPECT_EQ(read("\n{\"id\":0,\"response\":\"a\"}"), "f:2: no problem has the id \"0\"");
  EXPECT_EQ(read("{\"index\":2,\"response\":\"a\"}"), "f:1: there is no problem 2; they are counted from 0 to 1");
  EXPECT_EQ(read("{\"index\":1.5,\"response\":\"a\"}"), "f:1: \"index\" is 1.5, a place from 0 is wanted");
  EXPECT_EQ(read("{\"id\":\"q0\",\"response\":7}"), "f:1: \"response\" is a number, a string is wanted");
  EXPECT_EQ(read("{\"id\":\"q0\",\"response\":[]}"), "f:1: \"response\" is an empty list");
  EXPECT_EQ(read("{\"id\":\"q0\",\"respons\":\"a\"}"), "f:1: there is no \"response\"");
  EXPECT_EQ(read("{\"row\":0,\"sample\":0,\"response\":\"a\"}\n{\"row\":0,\"sample\":0,\"response\":\"b\"}"), "f:2: sample 0 of problem 0 stands twice");
  EXPECT_EQ(read("\"a\"\n\"b\"\n\"c\"\n"), "f:3: there is no problem 2; they are counted from 0 to 1");
  EXPECT_EQ(read("7"), "f:1: the row is a number, an object is wanted");
  EXPECT_NE(read("{\"id\":").find("f:1: invalid JSON"), std::string::npos);
  std::vector<Prompt> twins = problems(true);
  twins[1].row_id = "q0";
  EXPECT_TRUE(fails_with(parse_completions("{\"id\":\"q0\",\"response\":\"a\"}", "f", twins), "several problems have the id \"q0\""));
}

}  // namespace
}  // namespace lockstep
