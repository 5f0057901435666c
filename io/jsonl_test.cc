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
  EXPECT_EQ(reason(R"({"prompt":7,"label":"1"})"), "\"prompt\" is a number, a string or a list of messages is wanted");
  EXPECT_EQ(reason(R"({"prompt":null,"label":"1"})"), "\"prompt\" is null, a string or a list of messages is wanted");
  EXPECT_EQ(reason(R"({"text":false,"label":"1"})"), "\"text\" is a boolean, a string or a list of messages is wanted");
}

const std::string kMessages = R"([{"role":"user","content":"hi"}])";

PromptStyle chat_style(PromptChat chat) {
  PromptStyle s;
  s.chat = chat;
  return s;
}

TEST(Jsonl, MessageListsNeedAWayToBeWritten) {
  EXPECT_EQ(reason("{\"prompt\":" + kMessages + ",\"label\":\"1\"}"),
            "\"prompt\" is a list of messages; say how to write them, with task.chat = \"chat\" or \"thinking\", or \"thinking_mode\" in the row");
  EXPECT_EQ(reason(R"({"messages":"x","label":"1"})"), "\"messages\" is a string, a list is wanted");
  const PromptRow r = row("{\"messages\":" + kMessages + ",\"label\":\"1\",\"thinking_mode\":\"thinking\"}");
  EXPECT_EQ(r.prompt, "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><think>");
  EXPECT_EQ(r.messages, kMessages);
}

TEST(Jsonl, ChatFormat) {
  const auto prompt = [](std::string_view text, const PromptStyle& style) {
    const PromptFile f = parse_prompts(text, "p", {.style = style});
    return f.rows.empty() ? f.bad_rows[0].reason : f.rows[0].prompt;
  };
  const std::string list = "{\"prompt\":" + kMessages + ",\"label\":\"1\"", text = R"({"prompt":"hi","label":"1"})";
  const std::string chat = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>", thinking = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><think>";
  EXPECT_EQ(prompt(list + "}", chat_style(PromptChat::chat)), chat);
  EXPECT_EQ(prompt(list + "}", chat_style(PromptChat::thinking)), thinking);
  EXPECT_EQ(prompt(text, chat_style(PromptChat::chat)), chat);
  EXPECT_EQ(prompt(list + R"(,"thinking_mode":"chat"})", chat_style(PromptChat::thinking)), chat) << "the row's own comes first";
  PromptStyle max = chat_style(PromptChat::thinking);
  max.reasoning_effort = ReasoningEffort::max;
  EXPECT_TRUE(prompt(text, max).starts_with("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum"));
  EXPECT_EQ(prompt(list + R"(,"reasoning_effort":"high"})", max), thinking);
  max.reasoning_effort = ReasoningEffort::high;
  EXPECT_EQ(prompt(text, max), thinking);

  const std::string turns = R"({"label":"1","prompt":[{"role":"user","content":"a"},{"role":"assistant","reasoning_content":"r","content":"b"},{"role":"user","content":"c"}])";
  PromptStyle keep = chat_style(PromptChat::thinking);
  EXPECT_EQ(prompt(turns + "}", keep).find("r</think>"), std::string::npos);
  EXPECT_NE(prompt(turns + R"(,"drop_thinking":false})", keep).find("r</think>"), std::string::npos);
  keep.drop_thinking = false;
  EXPECT_NE(prompt(turns + "}", keep).find("r</think>"), std::string::npos);
  EXPECT_EQ(prompt(turns + R"(,"drop_thinking":true})", keep).find("r</think>"), std::string::npos);
}

TEST(Jsonl, Templates) {
  PromptStyle style;
  style.prompt_template = "Q: {}!";
  EXPECT_EQ(parse_prompts(R"({"prompt":"a {} b","label":"1"})", "p", {.style = style}).rows[0].prompt, "Q: a {} b!");
  style.prompt_template = "dapo";
  EXPECT_EQ(parse_prompts(R"({"prompt":"P","label":"1"})", "p", {.style = style}).rows[0].prompt,
            "Solve the following math problem step by step. The last line of your response should be of the form Answer: \\boxed{$Answer} where $Answer is the "
            "answer to the problem.\n\nP\n\nRemember to put your answer on its own line after \"Answer:\".");
  style.chat = PromptChat::chat;
  style.prompt_template = "boxed";
  const PromptFile f = parse_prompts("{\"prompt\":\"P\",\"label\":\"1\"}\n{\"prompt\":" + kMessages + ",\"label\":\"1\"}", "p", {.style = style});
  EXPECT_EQ(f.rows[0].messages, R"([{"role":"user","content":"P\nPlease reason step by step, and put your final answer within \\boxed{}."}])");
  EXPECT_EQ(f.rows[1].messages, kMessages) << "lists have wording of their own";
  for (const char* bad : {"dapo2", "no place", "{} and {}"}) EXPECT_FALSE(find_prompt_template(bad).is_ok()) << bad;
  style.prompt_template = "dapo2";
  EXPECT_TRUE(fails_with(read_prompts("/dev/null", {.style = style}), "is no template; write dapo, "));
}

// tests/data/prompts: {prompt, label, id} of every row.
std::vector<std::vector<std::string>> sample(const std::string& name, PromptStyle style, std::string* fields = nullptr) {
  Result<PromptFile> f = read_prompts(LOCKSTEP_SOURCE_DIR "/tests/data/prompts/" + name, {.style = style});
  EXPECT_TRUE(succeeds(f));
  if (!f) return {};
  EXPECT_TRUE(succeeds(bad_rows_status(f.value())));
  if (fields != nullptr) *fields = f.value().fields;
  std::vector<std::vector<std::string>> rows;
  for (const PromptRow& r : f.value().rows) rows.push_back({r.prompt, r.label, r.id});
  return rows;
}

std::string chat_text(const std::string& user) { return "<｜begin▁of▁sentence｜><｜User｜>" + user + "<｜Assistant｜></think>"; }

TEST(Jsonl, FilesOfOtherFrameworks) {
  using Rows = std::vector<std::vector<std::string>>;
  const struct {
    const char* name;
    DataFormat format;
    const char* fields;
    Rows rows;
  } cases[] = {
      {"miles.jsonl", DataFormat::miles, "prompt, label",
       {{chat_text("What is 3+4?"), "7", ""},
        {chat_text("What is 30/4?"), "7.5", ""},
        {"<｜begin▁of▁sentence｜>Answer briefly.<｜User｜>Name the prime after 31.<｜Assistant｜></think>", "37", ""}}},
      {"verl.jsonl", DataFormat::verl, "prompt, reward_model.ground_truth", {{chat_text("What is 3+4?"), "7", "0"}, {chat_text("What is 5-8?"), "-3", "1"}}},
      {"trl.jsonl", DataFormat::trl, "prompt, answer | prompt, solution",
       {{chat_text("What is 3+4?"), "7", ""}, {chat_text("What is 1/2 as a decimal?"), "0.5", ""}}},
      {"slime.jsonl", DataFormat::slime, "prompt, label",
       {{"What is 3+4?", "7", ""}, {"A line\u2028broken, another\u0085too: what is 2+2?", "4", ""}, {"What is 10^3?", "1000", ""}}},
      {"openrlhf.jsonl", DataFormat::openrlhf, "input, label", {{"What is 3+4?", "7", ""}, {"What is 6*7?", "42", ""}}},
      {"windows.jsonl", DataFormat::miles, "prompt, label", {{"What is 3+4?", "7", ""}, {"What is 2+2?", "4", ""}}}};
  for (const auto& c : cases) {
    const bool lists = c.rows[0][0].starts_with("<");
    for (const DataFormat format : {c.format, DataFormat::automatic}) {
      PromptStyle style = chat_style(lists ? PromptChat::chat : PromptChat::none);
      style.format = format;
      std::string fields;
      EXPECT_EQ(sample(c.name, style, &fields), c.rows) << c.name;
      EXPECT_EQ(fields, c.fields) << c.name;
    }
  }
}

TEST(Jsonl, NamedFormatsAndKeysLookNowhereElse) {
  const auto why = [](std::string_view text, PromptStyle style) { return reason(text, {.style = style}); };
  PromptStyle style;
  style.format = DataFormat::verl;
  EXPECT_EQ(why(R"({"prompt":"p","label":"1"})", style), "there is no \"reward_model.ground_truth\"");
  EXPECT_EQ(why(R"({"prompt":"p","reward_model.ground_truth":"1"})", style), "") << "a column that was flattened";
  style.format = DataFormat::openrlhf;
  EXPECT_EQ(why(R"({"prompt":"p","label":"1"})", style), "there is no \"input\"");
  style.prompt_key = "a.b";
  style.label_key = "solution";
  const PromptFile f = parse_prompts(R"({"a":{"b":"p"},"solution":"line 1\nline 2","label":"x"})", "p", {.style = style});
  ASSERT_EQ(f.rows.size(), 1u);
  EXPECT_EQ(f.rows[0].prompt, "p");
  EXPECT_EQ(f.rows[0].label, "line 1\nline 2") << "named, so it is what was meant";
  EXPECT_EQ(why(R"({"a":{"c":"p"},"solution":"1"})", style), "there is no \"a.b\"");
  EXPECT_EQ(why(R"({"a":"p","solution":"1"})", style), "there is no \"a.b\"");
}

TEST(Jsonl, HostileRows) {
  PromptStyle style = chat_style(PromptChat::none);
  Result<PromptFile> f = read_prompts(LOCKSTEP_SOURCE_DIR "/tests/data/prompts/hostile.jsonl", {.style = style});
  ASSERT_TRUE(succeeds(f));
  ASSERT_EQ(f.value().rows.size(), 2u);
  EXPECT_EQ(f.value().rows[0].prompt, "good");
  EXPECT_EQ(f.value().rows[1].line, 25);
  EXPECT_EQ(f.value().num_bad_rows, 23);
  EXPECT_EQ(f.value().bad_rows.size(), PromptFile::kListedRows);
  style.chat = PromptChat::chat;
  f = read_prompts(LOCKSTEP_SOURCE_DIR "/tests/data/prompts/hostile.jsonl", {.style = style});
  ASSERT_TRUE(succeeds(f));
  const std::pair<int, const char*> wanted[] = {
      {2, "invalid JSON, column 28: "}, {3, "invalid UTF-8, byte 0xff at column 22"}, {4, "there is no \"label\""}, {5, "\"label\" is null"},
      {6, "\"label\" is an array"}, {7, "\"prompt\" is empty"}, {8, "\"prompt\" is a number, a string or a list of messages is wanted"},
      {9, "\"messages\" is empty"}, {10, ""}, {11, "prompt[0]: "}, {12, "the last message of \"prompt\" is the assistant's"}, {13, "\"tools\" stands beside \"prompt\""},
      {14, "prompt[0]: "}, {15, "\"thinking_mode\" is \"deep\""}, {16, "\"solution\" has several lines"}, {17, "the row is an array"},
      {18, "the key \"prompt\" stands twice"}, {19, "invalid JSON"}, {20, "number overflow"}, {21, "\"prompt\" is an object"}};
  size_t i = 0;
  for (const auto& [line, what] : wanted) {
    if (*what == '\0') continue;  // a message without content is an empty one
    ASSERT_LT(i, f.value().bad_rows.size());
    EXPECT_EQ(f.value().bad_rows[i].line, line);
    EXPECT_NE(f.value().bad_rows[i].reason.find(what), std::string::npos) << line << ": " << f.value().bad_rows[i].reason;
    ++i;
  }
}

TEST(Jsonl, Slices) {
  testing::TemporaryDirectory d;
  testing::put(d.file("a"), "{\"prompt\":\"0\",\"label\":\"1\"}\n\n{\"prompt\":\"1\",\"label\":\"1\"}\n{}\n{\"prompt\":\"3\",\"label\":\"1\"}\n");
  const auto rows = [&](const std::string& slice) {
    Result<PromptFile> f = read_prompts(d.file("a") + slice);
    if (!f) return f.message();
    std::string out;
    for (const PromptRow& r : f.value().rows) out += r.prompt;
    return fmt::format("{} {}", out, f.value().num_bad_rows);
  };
  EXPECT_EQ(rows(""), "013 1");
  EXPECT_EQ(rows("@[1:3]"), "1 1");
  EXPECT_EQ(rows("@[3:]"), "3 0");
  EXPECT_EQ(rows("@[:1]"), "0 0");
  EXPECT_EQ(rows("@[9:]"), " 0");
  for (const char* bad : {"@[1]", "@[-1:2]", "@[a:b]", "@[1:2:3]"}) EXPECT_NE(rows(bad).find("is no slice of rows"), std::string::npos) << rows(bad);
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

TEST(Jsonl, CompletionsAsMessages) {
  PromptReaderOptions options{.label_required = false, .completion_required = true, .style = chat_style(PromptChat::chat)};
  const auto completions = [&] {
    Result<PromptFile> f = read_prompts(LOCKSTEP_SOURCE_DIR "/tests/data/prompts/trl_sft.jsonl", options);
    std::vector<std::string> out;
    for (const PromptRow& r : f.value().rows) out.push_back(r.completion);
    return out;
  };
  EXPECT_EQ(completions(), (std::vector<std::string>{"7", "4", "8"}));
  options.style.chat = PromptChat::thinking;
  EXPECT_EQ(completions(), (std::vector<std::string>{"3+4=7</think>7", "</think>4", "8"}));
  const auto why = [&](std::string_view text) { return reason(text, options); };
  const std::string prompt = "{\"prompt\":" + kMessages;
  EXPECT_EQ(why(prompt + "}"), "there is no \"completion\", and the last message of \"prompt\" is not the assistant's");
  EXPECT_EQ(why(prompt + R"(,"completion":[]})"), "\"completion\" is empty");
  EXPECT_EQ(why(prompt + R"(,"completion":[{"role":"user","content":"x"}]})"), "\"completion\" is not one answer of the assistant to the prompt");
  EXPECT_EQ(why(prompt + R"(,"completion":7})"), "\"completion\" is a number, a string or a list of messages is wanted");
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
