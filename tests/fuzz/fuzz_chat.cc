// Any bytes as a row of messages: refused with a reason or a prompt in UTF-8. Any bytes as a completion: refused with a reason, or a
// message that encodes to the completion again.

#include <cstdint>

#include "io/chat.h"
#include "io/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const ChatMode chat = ChatMode::chat;
  if (const Result<JsonValue> row = parse_json(text); row && row.value().is(JsonValue::Kind::object)) {
    const Result<ChatOptions> options = read_chat_options(row.value(), &chat);
    const JsonValue* messages = row.value().find("messages");
    if (!options) CHECK(!options.message().empty());
    if (options && messages != nullptr) {
      const Result<std::string> prompt = encode_chat(*messages, options.value());
      if (prompt) CHECK(find_invalid_utf8(prompt.value()) == std::string::npos);
      if (!prompt) CHECK(!prompt.message().empty());
    }
  }
  if (find_invalid_utf8(text) != std::string::npos) return 0;
  for (const ChatMode mode : {ChatMode::chat, ChatMode::thinking}) {
    const Result<AssistantMessage> message = parse_completion(text, mode);
    if (!message) {
      CHECK(!message.message().empty() && message.message().size() < size + 2000);
      continue;
    }
    const std::string line = message_json(message.value());
    const Result<JsonValue> parsed = parse_json("[{\"role\":\"user\",\"content\":\"q\"}," + line + "]");
    CHECK(parsed.is_ok() || text.find('\0') != std::string::npos, "{}", line);
    if (!parsed || !message.value().tool_calls.empty()) continue;
    const std::string prompt = encode_chat(parsed.value(), {.mode = mode, .begin = false}).value();
    const std::string before = mode == ChatMode::chat ? "<｜User｜>q<｜Assistant｜></think>" : "<｜User｜>q<｜Assistant｜><think>";
    CHECK_EQ(prompt, before + std::string(text));
  }
  return 0;
}
