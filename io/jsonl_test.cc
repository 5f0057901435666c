#include "io/jsonl.h"

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::succeeds;

// The reason why a single row is refused, "" if it is taken.
std::string reason(std::string_view row, PromptReaderOptions options = {}) {
  const PromptFile f = parse_prompts(row, "p.jsonl", options);
  EXPECT_EQ(f.rows.size() + f.bad_rows.size(), 1u);
  return f.bad_rows.empty() ? "" : f.bad_rows[0].reason;
}

PromptRow row(std::string_view text) {
  const PromptFile f = parse_prompts(text, "p.jsonl");
  EXPECT_EQ(f.rows.size(), 1u) << (f.bad_rows.empty() ? "" : f.bad_rows[0].reason);
  return f.rows.empty() ? PromptRow{} : f.rows[0];
}

TEST(Jsonl, ReadsPromptLabelAndId) {
  const PromptRow r = row(R"({"id":"q1","prompt":"1+1","label":"2","extra":[{}]})");
  EXPECT_EQ(r.id, "q1");
  EXPECT_EQ(r.prompt, "1+1");
  EXPECT_EQ(r.label, "2");
  EXPECT_EQ(r.line, 1);
}

TEST(Jsonl, Aliases) {
  EXPECT_EQ(row(R"({"text":"p","label":"1"})").prompt, "p");
  EXPECT_EQ(row(R"({"text":"other","prompt":"p","label":"1"})").prompt, "p");
  EXPECT_EQ(row(R"({"prompt":"p","reward_model":{"style":"rule","ground_truth":"9"}})").label, "9");
  EXPECT_EQ(row(R"({"prompt":"p","label":"1","reward_model":{"ground_truth":"9"}})").label, "1");
  EXPECT_EQ(row(R"({"id":17,"prompt":"p","label":"1"})").id, "17");
}

TEST(Jsonl, NumbersBecomePlainDecimals) {
  EXPECT_EQ(row(R"({"prompt":"p","label":34})").label, "34");
  EXPECT_EQ(row(R"({"prompt":"p","label":34.0})").label, "34");
  EXPECT_EQ(row(R"({"prompt":"p","label":-2.50})").label, "-2.5");
  EXPECT_EQ(row(R"({"prompt":"p","label":1e3})").label, "1000");
  EXPECT_EQ(row(R"({"prompt":"p","label":"034"})").label, "034");  // text stays as it is
}

TEST(Jsonl, RowsEndAtLineFeedsAlone) {
  const PromptFile f = parse_prompts(
      "\xEF\xBB\xBF{\"prompt\":\"a\",\"label\":\"1\"}\r\n"
      "\n  \r\n"
      "{\"prompt\":\"b\u2028c\u0085d\",\"label\":\"2\"}\n"
      "{\"prompt\":\"last\",\"label\":\"3\"}",
      "p.jsonl");
  ASSERT_EQ(f.bad_rows.size(), 0u);
  ASSERT_EQ(f.rows.size(), 3u);
  EXPECT_EQ(f.rows[0].line, 1);
  EXPECT_EQ(f.rows[1].line, 4);
  EXPECT_EQ(f.rows[1].prompt, "b\u2028c\u0085d");
  EXPECT_EQ(f.rows[2].line, 5);
  EXPECT_EQ(f.rows[2].prompt, "last");
}

TEST(Jsonl, EmptyFiles) {
  for (const char* text : {"", "\n", "\n\n \n", "\xEF\xBB\xBF", "\xEF\xBB\xBF\n"}) {
    const PromptFile f = parse_prompts(text, "p.jsonl");
    EXPECT_TRUE(f.rows.empty() && f.bad_rows.empty()) << text;
  }
}

TEST(Jsonl, BadPrompts) {
  EXPECT_EQ(reason(R"({"label":"1"})"), "there is no \"prompt\"");
  EXPECT_EQ(reason(R"({"prompt":"","label":"1"})"), "\"prompt\" is empty");
  EXPECT_EQ(reason(R"({"prompt":" \n","label":"1"})"), "\"prompt\" is empty");
  EXPECT_EQ(reason(R"({"prompt":7,"label":"1"})"), "\"prompt\" is a number, a string is wanted");
  EXPECT_EQ(reason(R"({"prompt":null,"label":"1"})"), "\"prompt\" is null, a string is wanted");
  EXPECT_EQ(reason(R"({"text":false,"label":"1"})"), "\"text\" is a boolean, a string is wanted");
}

TEST(Jsonl, MessageListsAreNotSupportedYet) {
  const std::string messages = R"([{"role":"user","content":"hi"}])";
  EXPECT_EQ(reason("{\"prompt\":" + messages + ",\"label\":\"1\"}"),
            "\"prompt\" is a list of messages, which is not supported yet");
  EXPECT_EQ(reason("{\"messages\":" + messages + ",\"label\":\"1\"}"),
            "\"messages\" is a list of messages, which is not supported yet");
  EXPECT_EQ(reason(R"({"messages":"x","label":"1"})"), "there is no \"prompt\"");
}

TEST(Jsonl, BadLabels) {
  EXPECT_EQ(reason(R"({"prompt":"p"})"), "there is no \"label\"");
  EXPECT_EQ(reason(R"({"prompt":"p","reward_model":{"style":"rule"}})"), "there is no \"label\"");
  EXPECT_EQ(reason(R"({"prompt":"p","label":""})"), "\"label\" is empty");
  EXPECT_EQ(reason(R"({"prompt":"p","label":"  "})"), "\"label\" is empty");
  EXPECT_EQ(reason(R"({"prompt":"p","label":null})"), "\"label\" is null, a string or a number is wanted");
  EXPECT_EQ(reason(R"({"prompt":"p","label":["1"]})"), "\"label\" is an array, a string or a number is wanted");
  EXPECT_EQ(reason(R"({"prompt":"p","label":true})"), "\"label\" is a boolean, a string or a number is wanted");
  EXPECT_EQ(reason(R"({"prompt":"p","label":1e300})"), "");
  EXPECT_EQ(reason(R"({"prompt":"p","label":1e-500})"), "\"label\": the number \"1e-500\" is out of range");
  EXPECT_EQ(reason(R"({"prompt":"p","reward_model":{"ground_truth":{}}})"),
            "\"reward_model.ground_truth\" is an object, a string or a number is wanted");
}

TEST(Jsonl, LabelsMayBeMissingWhereNothingNeedsThem) {
  const PromptReaderOptions options{.label_required = false};
  EXPECT_EQ(reason(R"({"prompt":"p"})", options), "");
  EXPECT_EQ(reason(R"({"prompt":"p","label":""})", options), "");
  EXPECT_EQ(reason(R"({"prompt":"p","label":null})", options), "\"label\" is null, a string or a number is wanted");
}

TEST(Jsonl, Completions) {
  const PromptReaderOptions options{.label_required = false, .completion_required = true};
  const PromptFile f = parse_prompts(R"({"prompt":"1+1=","completion":"2"})", "p.jsonl", options);
  ASSERT_EQ(f.rows.size(), 1u);
  EXPECT_EQ(f.rows[0].completion, "2");
  EXPECT_EQ(reason(R"({"prompt":"p"})", options), "there is no \"completion\"");
  EXPECT_EQ(reason(R"({"prompt":"p","completion":5})", options), "\"completion\" is a number, a string is wanted");
  EXPECT_EQ(reason(R"({"prompt":"p","completion":""})", options), "\"completion\" is empty");
}

TEST(Jsonl, BadIds) {
  EXPECT_EQ(reason(R"({"id":1.5,"prompt":"p","label":"1"})"), "\"id\" is 1.5, a string or an integer is wanted");
  EXPECT_EQ(reason(R"({"id":[],"prompt":"p","label":"1"})"), "\"id\" is an array, a string or an integer is wanted");
}

TEST(Jsonl, BrokenRows) {
  EXPECT_EQ(reason("{\"prompt\":\"a\xff\",\"label\":\"1\"}"), "invalid UTF-8, byte 0xff at column 13");
  EXPECT_EQ(reason("[1,2]"), "the row is an array, an object is wanted");
  EXPECT_EQ(reason("7"), "the row is a number, an object is wanted");
  EXPECT_EQ(reason(R"({"prompt":"a","prompt":"b","label":"1"})").substr(0, 24), "invalid JSON, column 22:");
  EXPECT_NE(reason(R"({"prompt":"a","prompt":"b","label":"1"})").find("the key \"prompt\" stands twice"), std::string::npos);
  EXPECT_EQ(reason(R"({"prompt":"a","label":"1"} {})").substr(0, 24), "invalid JSON, column 28:");
  EXPECT_EQ(reason(R"({"prompt":"a","label":"1")").substr(0, 13), "invalid JSON,");
  EXPECT_EQ(reason(R"({'prompt':'a'})").substr(0, 23), "invalid JSON, column 2:");
  EXPECT_EQ(reason("\xEF\xBB\xBF\xEF\xBB\xBF{}").substr(0, 13), "invalid JSON,");  // the mark a second time
  EXPECT_NE(reason(std::string_view("{\"prompt\":\"a\",\"label\":\"1\"}\0", 27)).find("a NUL byte"), std::string::npos);
}

TEST(Jsonl, GoodRowsSurviveBadNeighbours) {
  const PromptFile f = parse_prompts(
      "{\"prompt\":\"a\",\"label\":\"1\"}\nnonsense\n{\"prompt\":\"b\",\"label\":\"1\"}\n\n{\"prompt\":\"\",\"label\":\"1\"}\n",
      "dir/p.jsonl");
  ASSERT_EQ(f.rows.size(), 2u);
  EXPECT_EQ(f.rows[1].line, 3);
  ASSERT_EQ(f.bad_rows.size(), 2u);
  EXPECT_TRUE(fails_with(bad_rows_status(f), "dir/p.jsonl: 2 of 4 rows cannot be used\ndir/p.jsonl:2: invalid JSON, column "));
  EXPECT_TRUE(fails_with(bad_rows_status(f), "\ndir/p.jsonl:5: \"prompt\" is empty"));
}

TEST(Jsonl, TheFirstTwentyBadRowsAreListed) {
  std::string text;
  for (int i = 0; i < 25; ++i) text += "{}\n";
  const Status s = bad_rows_status(parse_prompts(text, "p"));
  EXPECT_TRUE(fails_with(s, "p: 25 of 25 rows"));
  EXPECT_TRUE(fails_with(s, "\np:20: there is no \"prompt\"\nand 5 more"));
  EXPECT_EQ(s.message().find("p:21:"), std::string::npos);
  EXPECT_TRUE(succeeds(bad_rows_status(parse_prompts("", "p"))));
}

TEST(Jsonl, DuplicatePromptsAreCounted) {
  const PromptFile f = parse_prompts(
      "{\"prompt\":\"a\",\"label\":\"1\"}\n{\"prompt\":\"a\",\"label\":\"2\"}\n{\"prompt\":\"b\",\"label\":\"2\"}\n", "p");
  EXPECT_EQ(f.duplicate_prompts, 1);
}

TEST(Jsonl, FilesAreNamed) {
  testing::TemporaryDirectory d;
  EXPECT_TRUE(fails_with(read_prompts(d.file("none.jsonl")), "cannot open " + d.file("none.jsonl")));
  testing::put(d.file("a.jsonl"), "{}\n");
  Result<PromptFile> f = read_prompts(d.file("a.jsonl"));
  ASSERT_TRUE(succeeds(f));
  EXPECT_TRUE(fails_with(bad_rows_status(f.value()), d.file("a.jsonl") + ":1: there is no \"prompt\""));
}

}  // namespace
}  // namespace lockstep
