// lockstep chat-encode: rows with messages become rows with the prompt, or, with --parse, rows with a completion become messages.

#include <algorithm>
#include <optional>

#include "cli/console.h"
#include "cli/rows.h"
#include "io/chat.h"
#include "io/tokenizer.h"

namespace lockstep {

namespace {

// `row` without what went into the line, then `extra`, members as JSON text without braces.
std::string rest_and(const JsonValue& row, std::initializer_list<std::string_view> used, const std::string& extra) {
  std::string line = "{";
  for (const auto& [name, value] : row.members) {
    if (std::find(used.begin(), used.end(), name) != used.end()) continue;
    append_json_string(&line, name);
    line += ':';
    append_json(&line, value);
    line += ',';
  }
  return line + extra + "}";
}

std::string inner(const JsonLine& line) {
  const std::string s = line.str();
  return s.substr(1, s.size() - 2);
}

Result<std::string> encode_row(const JsonValue& row, const ChatMode* fallback, const Tokenizer* tokenizer) {
  const JsonValue* messages = row.find("messages");
  if (messages == nullptr) return Status::error("there is no \"messages\"");
  Result<ChatOptions> options = read_chat_options(row, fallback);
  if (!options) return options.status();
  Result<std::string> prompt = encode_chat(*messages, options.value());
  if (!prompt) return prompt.status();
  JsonLine out;
  out.add("prompt", prompt.value());
  if (tokenizer != nullptr) {
    Result<std::vector<int32_t>> ids = tokenizer->encode(prompt.value());
    if (!ids) return ids.status();
    out.add("ids", std::span<const int32_t>(ids.value()));
  }
  return rest_and(row, {"messages", "thinking_mode", "drop_thinking", "add_default_bos_token", "reasoning_effort", "prompt", "ids"}, inner(out));
}

Result<std::string> parse_row(const JsonValue& row, const ChatMode* fallback) {
  const JsonValue* completion = row.find("completion");
  if (completion == nullptr || !completion->is(JsonValue::Kind::string))
    return errorf("\"completion\" is {}, a string is wanted", completion == nullptr ? "missing" : json_kind_name(completion->kind));
  Result<ChatOptions> options = read_chat_options(row, fallback);
  if (!options) return options.status();
  // A completion that breaks the format is the model's failure, not the file's: the row says so.
  Result<AssistantMessage> message = parse_completion(completion->text, options.value().mode);
  const std::string extra = message ? "\"message\":" + message_json(message.value())
                                    : "\"message\":null," + inner(JsonLine().add("reason", message.message()));
  return rest_and(row, {"completion", "thinking_mode", "message", "reason"}, extra);
}

}  // namespace

int chat_encode_command(const ChatEncodeArgs& args) {
  std::optional<ChatMode> mode;
  if (!args.thinking_mode.empty()) mode = args.thinking_mode == "chat" ? ChatMode::chat : ChatMode::thinking;
  const ChatMode* fallback = mode ? &*mode : nullptr;
  std::unique_ptr<Tokenizer> tokenizer;
  if (!args.tokenizer.empty()) {
    Result<std::unique_ptr<Tokenizer>> loaded = load_tokenizer(args.tokenizer);
    if (!loaded) return fail(kExitBadInput, loaded.status());
    tokenizer = loaded.take();
  }
  return map_rows([&](JsonValue& row) { return args.parse ? parse_row(row, fallback) : encode_row(row, fallback, tokenizer.get()); });
}

}  // namespace lockstep
