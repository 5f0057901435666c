// Against the release's encoder: tests/data/chat.

#include "io/chat.h"

#include <algorithm>
#include <map>

#include "io/testing.h"
#include "io/tokenizer.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::succeeds;

const std::string kChats = LOCKSTEP_SOURCE_DIR "/tests/data/chat";

JsonValue json(std::string_view text) {
  Result<JsonValue> r = parse_json(text);
  CHECK(r.is_ok(), "{}: {}", text, r.message());
  return r.take();
}

Result<std::string> encode_row(const JsonValue& row) {
  Result<ChatOptions> options = read_chat_options(row, nullptr);
  if (!options) return options.status();
  return encode_chat(*row.find("messages"), options.value());
}

// All pairs of a directory whose names begin with `prefix`, with their ids.
void expect_pairs(const std::string& directory, const std::string& prefix, size_t count) {
  Result<std::unique_ptr<Tokenizer>> tokenizer = load_tokenizer(LOCKSTEP_TOKENIZERS);
  ASSERT_TRUE(succeeds(tokenizer));
  const std::string text = get(directory + "/ids.jsonl");
  size_t pairs = 0;
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(std::min(rest.find('\n'), rest.size() - 1) + 1)) {
    const JsonValue row = json(rest.substr(0, rest.find('\n')));
    const std::string& name = row.find("name")->text;
    if (!name.starts_with(prefix)) continue;
    ++pairs;
    Result<std::string> prompt = encode_row(json(get(directory + "/" + name + ".json")));
    ASSERT_TRUE(succeeds(prompt)) << name;
    EXPECT_EQ(prompt.value(), get(directory + "/" + name + ".txt")) << name;
    std::vector<int32_t> ids;
    for (const JsonValue& id : row.find("ids")->items) ids.push_back(std::stoi(id.text));
    EXPECT_EQ(tokenizer.value()->encode(prompt.value()).value(), ids) << name;
  }
  EXPECT_EQ(pairs, count);
}

TEST(Chat, EveryPair) { expect_pairs(kChats, "", 26); }

TEST(Chat, PairsOfCompetitionProblems) {
  const std::string shared = LOCKSTEP_SOURCE_DIR "/../shared/data/chat";
  if (!std::filesystem::exists(shared)) GTEST_SKIP() << shared << " is not there";
  expect_pairs(shared, "aime_", 2);
}

TEST(Chat, ParseCases) {
  const std::string text = get(kChats + "/parse_cases.jsonl");
  size_t cases = 0;
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(std::min(rest.find('\n'), rest.size() - 1) + 1)) {
    const JsonValue row = json(rest.substr(0, rest.find('\n')));
    ++cases;
    const std::string& why = row.find("why")->text;
    const Result<AssistantMessage> message =
        parse_completion(row.find("completion")->text, row.find("thinking_mode")->text == "chat" ? ChatMode::chat : ChatMode::thinking);
    const JsonValue* expected = row.find("expected");
    ASSERT_EQ(message.is_ok(), !expected->is(JsonValue::Kind::null)) << why;
    if (!message) continue;
    std::string wanted;
    append_json(&wanted, *expected);
    EXPECT_EQ(message_json(message.value()), wanted) << why;
  }
  EXPECT_EQ(cases, 12u);
}

TEST(Chat, ACompletionIsWhatEncodingWrites) {
  // Encoding a parsed message gives the completion back.
  const std::string completion =
      "think</think>text\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">x\ny</｜DSML｜parameter>\n"
      "<｜DSML｜parameter name=\"b\" string=\"false\">[1, 2.5, {\"c\": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>";
  Result<AssistantMessage> message = parse_completion(completion, ChatMode::thinking);
  ASSERT_TRUE(succeeds(message));
  const JsonValue messages = json("[{\"role\":\"user\",\"content\":\"q\"}," + message_json(message.value()) + "]");
  EXPECT_EQ(encode_chat(messages, {.mode = ChatMode::thinking}).value(),
            "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>" + completion);
}

TEST(Chat, ResultsStandInTheOrderOfTheCalls) {
  const JsonValue messages = json(R"([{"role":"user","content":"q"},
    {"role":"assistant","tool_calls":[{"id":"x","function":{"name":"f","arguments":{}}},{"id":"y","function":{"name":"g","arguments":{}}}]},
    {"role":"tool","tool_call_id":"y","content":"second"},{"role":"tool","tool_call_id":"x","content":"first"},{"role":"user","content":"more"}])");
  const std::string prompt = encode_chat(messages, {.mode = ChatMode::chat}).value();
  EXPECT_TRUE(prompt.ends_with("<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\nmore<｜Assistant｜></think>")) << prompt;
}

TEST(Chat, DevelopersBeforeTheLastQuestionAreLeftOut) {
  const JsonValue messages = json(R"([{"role":"developer","content":"old"},{"role":"assistant","content":"a","reasoning_content":"r"},{"role":"user","content":"q"}])");
  EXPECT_EQ(encode_chat(messages, {.mode = ChatMode::thinking, .begin = false}).value(), "a<｜end▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>");
  EXPECT_EQ(encode_chat(messages, {.mode = ChatMode::thinking, .drop_thinking = false, .begin = false}).value(),
            "<｜User｜>old<｜Assistant｜><think>r</think>a<｜end▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>");
}

TEST(Chat, WhatIsRefused) {
  const auto refuses = [](const char* messages, const char* part) {
    EXPECT_TRUE(fails_with(encode_chat(json(messages), {.mode = ChatMode::thinking}), part)) << messages;
  };
  refuses("{}", "\"messages\" is an object, a list is wanted");
  refuses("[]", "\"messages\" is empty");
  refuses("[5]", "messages[0]: it is a number, an object is wanted");
  refuses("[{}]", "messages[0]: \"role\" is missing");
  refuses(R"([{"role":"bot"}])", "\"role\" is \"bot\", one of system,");
  refuses(R"([{"role":"user","content":[{"type":"text"}]}])", "\"content\" is an array, a string is wanted");
  refuses(R"([{"role":"user","content":"q"},{"role":"user","content":"q","task":"title"}])", "messages[1]: its \"task\" would be lost");
  refuses(R"([{"role":"user","content":"q","task":"sing"}])", "\"task\" is \"sing\", one of action,");
  refuses(R"([{"role":"user","content":"q","tools":[{}]}])", "\"tools\" has no place in this role");
  refuses(R"([{"role":"assistant","content":"q","reasoning":"r"}])", "the reasoning of an assistant is \"reasoning_content\"");
  refuses(R"([{"role":"developer","content":""}])", "\"content\" is missing or empty");
  refuses(R"([{"role":"system","tools":[{"name":"f"}]}])", "\"tools\"[0] has no \"function\" object");
  refuses(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[1]"}}]}])", "\"tool_calls\"[0]: \"arguments\" is an array");
  refuses(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}])", "\"arguments\" is missing");
  const auto options = [](const char* row) { return read_chat_options(json(row), nullptr); };
  EXPECT_TRUE(fails_with(options("{}"), "\"thinking_mode\" is missing, \"chat\" or \"thinking\" is wanted"));
  EXPECT_TRUE(fails_with(options(R"({"thinking_mode":"deep"})"), "\"thinking_mode\" is \"deep\""));
  EXPECT_TRUE(fails_with(options(R"({"thinking_mode":"chat","drop_thinking":1})"), "\"drop_thinking\" is a number"));
  EXPECT_TRUE(fails_with(options(R"({"thinking_mode":"chat","reasoning_effort":"low"})"), "\"reasoning_effort\" is \"low\""));
  const ChatMode mode = ChatMode::chat;
  EXPECT_EQ(read_chat_options(json("{}"), &mode).value().mode, ChatMode::chat);
}

TEST(Chat, BrokenCompletions) {
  const auto refuses = [](const std::string& text, const char* part) {
    EXPECT_TRUE(fails_with(parse_completion(text, ChatMode::chat), part)) << text;
  };
  const std::string open = "\n\n<｜DSML｜tool_calls";
  refuses("a", "does not end with <｜end▁of▁sentence｜>");
  refuses("a<｜end▁of▁sentence｜>b", "text follows <｜end▁of▁sentence｜>");
  refuses("a<think>b<｜end▁of▁sentence｜>", "<think> stands in the content");
  refuses(open, "the block of tool calls is not closed");
  refuses(open + ">\n<｜DSML｜invoke name=\"f\">\n", "the call of \"f\" is not closed");
  refuses(open + ">\n<｜DSML｜invoke nam=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "is no name of a tool");
  refuses(open + ">\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\">1</｜DSML｜parameter>\n", "is not name, string flag and value");
  refuses(open + ">\nx<｜DSML｜invoke name=\"f\">\n", "stands between tool calls");
  refuses(open + ">\n</｜DSML｜tool_calls>x<｜end▁of▁sentence｜>", "text follows the tool calls");
}

}  // namespace
}  // namespace lockstep
