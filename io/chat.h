#pragma once
// DeepSeek-V4's chat format: messages to the text of a prompt, and the text of a completion back to a message. The prompt text holds
// its own begin token and is tokenised as a whole. Byte for byte what the release's encoder writes; what that encoder would silently
// drop, or fails on, is refused with the reason. Source: deepseek-ai/DeepSeek-V4-Flash, encoding folder.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "io/json.h"

namespace lockstep {

inline constexpr std::string_view kBeginOfSentence = "<｜begin▁of▁sentence｜>";
inline constexpr std::string_view kEndOfSentence = "<｜end▁of▁sentence｜>";
inline constexpr std::string_view kUserToken = "<｜User｜>";
inline constexpr std::string_view kAssistantToken = "<｜Assistant｜>";
inline constexpr std::string_view kThinkToken = "<think>";
inline constexpr std::string_view kEndThinkToken = "</think>";

enum class ChatMode : uint8_t { chat, thinking };

struct ChatOptions {
  ChatMode mode = ChatMode::thinking;
  bool drop_thinking = true;  // leave out the reasoning of turns before the last user message; never when tools are declared
  bool begin = true;          // write the begin token
  bool max_effort = false;    // in thinking mode, the paragraph that asks for it
};

// The options in a row: "thinking_mode" ("chat" or "thinking"; missing: `fallback`, an error if that is null), "drop_thinking",
// "add_default_bos_token" (true or false), "reasoning_effort" (null, "high", which writes nothing, or "max").
Result<ChatOptions> read_chat_options(const JsonValue& row, const ChatMode* fallback);

// `messages` is a list of objects:
//   {"role":"system","content":"...","tools":[{"type":"function","function":{...}}],"response_format":{...}}
//   {"role":"user","content":"...","task":"title"}       also developer, which may have tools, and latest_reminder
//   {"role":"assistant","content":"...","reasoning_content":"...","tool_calls":[{"id":"c1","function":{"name":"f","arguments":"{}"}}],
//    "wo_eos":true}
//   {"role":"tool","tool_call_id":"c1","content":"..."}
// Consecutive user and tool messages are one turn. Other members ("name", "mask") are passed over. Errors name the message by its
// place, from 0.
Result<std::string> encode_chat(const JsonValue& messages, const ChatOptions& options);

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON text of an object, as far as the model wrote JSON
};

struct AssistantMessage {
  std::string content, reasoning;
  std::vector<ToolCall> tool_calls;
};

// What the model wrote after the prompt, end token included. An error is the model's failure to keep the format.
Result<AssistantMessage> parse_completion(std::string_view text, ChatMode mode);

// {"role":"assistant","content":...,"reasoning_content":...,"tool_calls":[{"type":"function","function":{"name":...,"arguments":...}}]}
std::string message_json(const AssistantMessage& message);

}  // namespace lockstep
