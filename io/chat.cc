#include "io/chat.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "io/utf8.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

constexpr std::string_view kLatestReminder = "<｜latest_reminder｜>";
constexpr std::string_view kMarker = "｜DSML｜";

constexpr std::string_view kMaxEffort =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously "
    "stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected "
    "hypothesis to ensure absolutely no assumption is left unchecked.\n\n";

// Around the declarations of functions, one JSON object a line.
constexpr std::string_view kToolsBefore =
    R"(## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

)";
constexpr std::string_view kToolsAfter =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

constexpr std::string_view kResponseFormat =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

enum class Role : uint8_t { system, user, developer, assistant, latest_reminder, tool };

constexpr std::pair<std::string_view, Role> kRoles[] = {
    {"system", Role::system},       {"user", Role::user},
    {"developer", Role::developer}, {"assistant", Role::assistant},
    {"tool", Role::tool},           {"latest_reminder", Role::latest_reminder}};

constexpr std::pair<std::string_view, std::string_view> kTasks[] = {
    {"action", "<｜action｜>"}, {"query", "<｜query｜>"}, {"authority", "<｜authority｜>"},
    {"domain", "<｜domain｜>"}, {"title", "<｜title｜>"}, {"read_url", "<｜read_url｜>"}};

// Part of a user's turn: the user's own text, or a tool's answer.
struct Block {
  std::string text = {};
  bool is_result = false;
  std::string call_id = {};
};

struct Call {
  std::string id, name;
  std::string parameters;  // as the prompt has them
};

struct Turn {
  Role role = Role::user;
  std::string content = {};
  std::vector<Block> blocks = {};  // of a user's turn
  std::string reasoning = {};
  std::vector<Call> calls = {};
  std::string tools = {};            // declarations, one a line; empty: none
  std::string response_format = {};  // its JSON; empty: none
  std::string_view task = {};        // its token; empty: none
  bool ends = true;                  // the end token follows
};

std::string python_json(const JsonValue& value) {
  std::string out;
  append_json(&out, value, JsonStyle::python);
  return out;
}

// What Python takes for true: an empty list or object declares nothing.
bool is_set(const JsonValue* v) {
  if (v == nullptr) return false;
  switch (v->kind) {
    case Kind::null: return false;
    case Kind::boolean: return v->boolean;
    case Kind::number: return true;
    case Kind::string: return !v->text.empty();
    case Kind::array: return !v->items.empty();
    case Kind::object: return !v->members.empty();
  }
  return false;
}

bool is_null(const JsonValue* v) { return v == nullptr || v->is(Kind::null); }

// A string, or nothing for null and missing.
Status read_text(const JsonValue& message, const char* name, std::string* out) {
  const JsonValue* v = message.find(name);
  if (is_null(v)) return Status::ok();
  if (!v->is(Kind::string)) return errorf("\"{}\" is {}, a string is wanted", name, json_kind_name(v->kind));
  *out = v->text;
  return Status::ok();
}

Status read_bool(const JsonValue& object, const char* name, bool* out) {
  const JsonValue* v = object.find(name);
  if (v == nullptr) return Status::ok();
  if (!v->is(Kind::boolean)) return errorf("\"{}\" is {}, true or false is wanted", name, json_kind_name(v->kind));
  *out = v->boolean;
  return Status::ok();
}

Status read_tools(const JsonValue& message, std::string* out) {
  const JsonValue* tools = message.find("tools");
  if (!is_set(tools)) return Status::ok();
  if (!tools->is(Kind::array)) return errorf("\"tools\" is {}, a list is wanted", json_kind_name(tools->kind));
  for (size_t i = 0; i < tools->items.size(); ++i) {
    const JsonValue* function = tools->items[i].find("function");
    if (function == nullptr || !function->is(Kind::object))
      return errorf("\"tools\"[{}] has no \"function\" object; write {{\"type\":\"function\",\"function\":{{...}}}}", i);
    if (i) *out += '\n';
    *out += python_json(*function);
  }
  return Status::ok();
}

// One line a parameter. Arguments that are no JSON become one string parameter called "arguments".
Result<std::string> call_parameters(const JsonValue* arguments) {
  JsonValue parsed;
  if (arguments != nullptr && arguments->is(Kind::string)) {
    if (Result<JsonValue> r = parse_json(arguments->text)) {
      parsed = r.take();
    } else {
      parsed.kind = Kind::object;
      parsed.members.push_back({"arguments", *arguments});
    }
    arguments = &parsed;
  }
  if (arguments == nullptr || !arguments->is(Kind::object))
    return errorf("\"arguments\" is {}, a JSON object or its text is wanted",
                  arguments == nullptr ? "missing" : json_kind_name(arguments->kind));
  std::string out;
  for (const auto& [name, value] : arguments->members) {
    if (!out.empty()) out += '\n';
    const bool is_text = value.is(Kind::string);
    out += fmt::format("<{}parameter name=\"{}\" string=\"{}\">{}</{}parameter>", kMarker, name, is_text,
                       is_text ? value.text : python_json(value), kMarker);
  }
  return out;
}

Status read_calls(const JsonValue& message, std::vector<Call>* out) {
  const JsonValue* calls = message.find("tool_calls");
  if (!is_set(calls)) return Status::ok();
  if (!calls->is(Kind::array)) return errorf("\"tool_calls\" is {}, a list is wanted", json_kind_name(calls->kind));
  for (size_t i = 0; i < calls->items.size(); ++i) {
    const JsonValue& c = calls->items[i];
    const JsonValue* function = c.find("function");
    const JsonValue* name = function == nullptr ? nullptr : function->find("name");
    if (name == nullptr || !name->is(Kind::string)) return errorf("\"tool_calls\"[{}] has no \"function\" with a \"name\"", i);
    Call call;
    call.name = name->text;
    for (const JsonValue* id : {c.find("id"), function->find("id")})
      if (call.id.empty() && id != nullptr && id->is(Kind::string)) call.id = id->text;
    Result<std::string> parameters = call_parameters(function->find("arguments"));
    if (!parameters) return errorf("\"tool_calls\"[{}]: {}", i, parameters.message());
    call.parameters = parameters.take();
    out->push_back(std::move(call));
  }
  return Status::ok();
}

// The content of a tool message: text, or a list of blocks of which text alone is shown.
Status read_result(const JsonValue& message, std::string* out) {
  const JsonValue* content = message.find("content");
  if (content == nullptr || !content->is(Kind::array)) return read_text(message, "content", out);
  for (size_t i = 0; i < content->items.size(); ++i) {
    const JsonValue& block = content->items[i];
    const JsonValue* type = block.find("type");
    if (type == nullptr || !type->is(Kind::string)) return errorf("\"content\"[{}] has no \"type\"", i);
    if (i) *out += "\n\n";
    if (type->text != "text") {
      *out += "[Unsupported " + type->text + "]";
      continue;
    }
    std::string text;
    if (Status s = read_text(block, "text", &text); !s) return errorf("\"content\"[{}]: {}", i, s.message());
    *out += text;
  }
  return Status::ok();
}

Status read_task(const JsonValue& message, std::string_view* out) {
  const JsonValue* task = message.find("task");
  if (is_null(task)) return Status::ok();
  for (const auto& [name, token] : kTasks) {
    if (task->is(Kind::string) && task->text == name) {
      *out = token;
      return Status::ok();
    }
  }
  return errorf("\"task\" is {}, one of action, query, authority, domain, title and read_url is wanted",
                task->is(Kind::string) ? in_quotes(task->text) : json_kind_name(task->kind));
}

// What a role does not render must not be there, or it would be lost.
Status check_members(const JsonValue& message, Role role) {
  const bool declares = role == Role::system || role == Role::developer;
  const bool answers = role == Role::assistant;
  for (const auto& [name, allowed] : {std::pair<const char*, bool>{"tools", declares},
                                      {"response_format", declares},
                                      {"reasoning_content", answers},
                                      {"tool_calls", answers},
                                      {"wo_eos", answers},
                                      {"task", role != Role::tool},
                                      {"content_blocks", false},
                                      {"reasoning", false}}) {
    if (!allowed && is_set(message.find(name))) {
      const bool renamed = std::string_view(name) == "reasoning";
      return errorf("\"{}\" has no place in this role{}", name, renamed ? "; the reasoning of an assistant is \"reasoning_content\"" : "");
    }
  }
  return Status::ok();
}

// One message into `turns`; user and tool messages may join the turn before.
Status read_message(const JsonValue& message, std::vector<Turn>* turns) {
  if (!message.is(Kind::object)) return errorf("it is {}, an object is wanted", json_kind_name(message.kind));
  const JsonValue* role_name = message.find("role");
  const auto* role = std::find_if(std::begin(kRoles), std::end(kRoles), [&](const auto& r) {
    return role_name != nullptr && role_name->is(Kind::string) && role_name->text == r.first;
  });
  if (role == std::end(kRoles)) {
    return errorf("\"role\" is {}, one of system, user, developer, assistant, tool and latest_reminder is wanted",
                  role_name == nullptr ? "missing" : role_name->is(Kind::string) ? in_quotes(role_name->text) : json_kind_name(role_name->kind));
  }
  LOCKSTEP_RETURN_IF_ERROR(check_members(message, role->second));
  Turn turn;
  turn.role = role->second;
  LOCKSTEP_RETURN_IF_ERROR(read_task(message, &turn.task));
  const bool joins = !turns->empty() && turns->back().role == Role::user;

  if (turn.role == Role::tool) {
    Block block{.is_result = true};
    LOCKSTEP_RETURN_IF_ERROR(read_text(message, "tool_call_id", &block.call_id));
    LOCKSTEP_RETURN_IF_ERROR(read_result(message, &block.text));
    if (!joins) turns->push_back({.role = Role::user});
    turns->back().blocks.push_back(std::move(block));
    return Status::ok();
  }
  LOCKSTEP_RETURN_IF_ERROR(read_text(message, "content", &turn.content));
  if (turn.role == Role::user) {
    if (joins && turns->back().task.empty()) {
      if (!turn.task.empty()) return Status::error("its \"task\" would be lost, as it joins the user's turn before it");
      turns->back().blocks.push_back({.text = std::move(turn.content)});
      return Status::ok();
    }
    turn.blocks.push_back({.text = std::move(turn.content)});
  }
  if (turn.content.empty() && (turn.role == Role::developer || turn.role == Role::latest_reminder))
    return Status::error("\"content\" is missing or empty");
  LOCKSTEP_RETURN_IF_ERROR(read_tools(message, &turn.tools));
  if (const JsonValue* format = message.find("response_format"); is_set(format)) turn.response_format = python_json(*format);
  LOCKSTEP_RETURN_IF_ERROR(read_text(message, "reasoning_content", &turn.reasoning));
  LOCKSTEP_RETURN_IF_ERROR(read_calls(message, &turn.calls));
  bool without_end = false;
  LOCKSTEP_RETURN_IF_ERROR(read_bool(message, "wo_eos", &without_end));
  turn.ends = !without_end;
  turns->push_back(std::move(turn));
  return Status::ok();
}

// Results stand in the order in which the last assistant message with calls made them; unknown ids count as the first call.
void sort_results(std::vector<Turn>& turns) {
  std::map<std::string, size_t> order;
  for (Turn& turn : turns) {
    if (!turn.calls.empty()) {
      order.clear();
      for (size_t i = 0; i < turn.calls.size(); ++i)
        if (!turn.calls[i].id.empty()) order[turn.calls[i].id] = i;
    }
    std::vector<Block> results;
    for (const Block& b : turn.blocks)
      if (b.is_result) results.push_back(b);
    const auto place = [&](const Block& b) {
      const auto found = order.find(b.call_id);
      return found == order.end() ? 0 : found->second;
    };
    std::stable_sort(results.begin(), results.end(), [&](const Block& a, const Block& b) { return place(a) < place(b); });
    size_t next = 0;
    for (Block& b : turn.blocks)
      if (b.is_result) b = std::move(results[next++]);
  }
}

bool asks(const Turn& turn) { return turn.role == Role::user || turn.role == Role::developer; }

size_t last_question(const std::vector<Turn>& turns) {
  for (size_t i = turns.size(); i > 0; --i)
    if (asks(turns[i - 1])) return i - 1;
  return std::string::npos;
}

void append_turn(std::string* out, const Turn& turn, bool shows_reasoning) {
  switch (turn.role) {
    case Role::user:
      *out += kUserToken;
      for (size_t i = 0; i < turn.blocks.size(); ++i) {
        if (i) *out += "\n\n";
        const Block& b = turn.blocks[i];
        *out += b.is_result ? "<tool_result>" + b.text + "</tool_result>" : b.text;
      }
      return;
    case Role::latest_reminder: *out += kLatestReminder; break;
    case Role::developer: *out += kUserToken; break;
    case Role::assistant:
      if (shows_reasoning) out->append(turn.reasoning).append(kEndThinkToken);
      break;
    case Role::system:
    case Role::tool: break;
  }
  *out += turn.content;
  if (!turn.tools.empty()) out->append("\n\n").append(kToolsBefore).append(turn.tools).append(kToolsAfter);
  if (!turn.response_format.empty()) out->append("\n\n").append(kResponseFormat).append(turn.response_format);
  if (turn.role != Role::assistant) return;
  if (!turn.calls.empty()) {
    *out += fmt::format("\n\n<{}tool_calls>\n", kMarker);
    for (const Call& c : turn.calls)
      *out += fmt::format("<{}invoke name=\"{}\">\n{}\n</{}invoke>\n", kMarker, c.name, c.parameters, kMarker);
    *out += fmt::format("</{}tool_calls>", kMarker);
  }
  if (turn.ends) *out += kEndOfSentence;
}

}  // namespace

Result<ChatOptions> read_chat_options(const JsonValue& row, const ChatMode* fallback) {
  ChatOptions o;
  const JsonValue* mode = row.find("thinking_mode");
  if (mode == nullptr && fallback != nullptr) {
    o.mode = *fallback;
  } else if (mode != nullptr && mode->is(Kind::string) && (mode->text == "chat" || mode->text == "thinking")) {
    o.mode = mode->text == "chat" ? ChatMode::chat : ChatMode::thinking;
  } else {
    return errorf("\"thinking_mode\" is {}, \"chat\" or \"thinking\" is wanted",
                  mode == nullptr ? "missing" : mode->is(Kind::string) ? in_quotes(mode->text) : json_kind_name(mode->kind));
  }
  LOCKSTEP_RETURN_IF_ERROR(read_bool(row, "drop_thinking", &o.drop_thinking));
  LOCKSTEP_RETURN_IF_ERROR(read_bool(row, "add_default_bos_token", &o.begin));
  if (const JsonValue* effort = row.find("reasoning_effort"); !is_null(effort)) {
    if (!effort->is(Kind::string) || (effort->text != "high" && effort->text != "max"))
      return errorf("\"reasoning_effort\" is {}, null, \"high\" or \"max\" is wanted",
                    effort->is(Kind::string) ? in_quotes(effort->text) : json_kind_name(effort->kind));
    o.max_effort = effort->text == "max";
  }
  return o;
}

Result<std::string> encode_chat(const JsonValue& messages, const ChatOptions& options) {
  if (!messages.is(Kind::array)) return errorf("\"messages\" is {}, a list is wanted", json_kind_name(messages.kind));
  if (messages.items.empty()) return Status::error("\"messages\" is empty");
  std::vector<Turn> turns;
  for (size_t i = 0; i < messages.items.size(); ++i)
    if (Status s = read_message(messages.items[i], &turns); !s) return errorf("messages[{}]: {}", i, s.message());
  sort_results(turns);

  const bool thinking = options.mode == ChatMode::thinking;
  const bool drop = options.drop_thinking && std::all_of(turns.begin(), turns.end(), [](const Turn& t) { return t.tools.empty(); });
  if (thinking && drop) {
    // Instructions of developers are for the turn they stand before.
    const size_t last = last_question(turns);
    size_t i = 0;
    std::erase_if(turns, [&](const Turn& t) { return i++ < last && t.role == Role::developer; });
  }
  const size_t last = last_question(turns);

  std::string out;
  if (options.begin) out += kBeginOfSentence;
  if (thinking && options.max_effort) out += kMaxEffort;
  for (size_t i = 0; i < turns.size(); ++i) {
    const Turn& turn = turns[i];
    const bool answers_task = i > 0 && !turns[i - 1].task.empty();
    const bool behind_last = last == std::string::npos || i > last;
    append_turn(&out, turn, thinking && !answers_task && (!drop || behind_last));
    const bool before_answer = i + 1 == turns.size() || turns[i + 1].role == Role::assistant || turns[i + 1].role == Role::latest_reminder;
    if (!before_answer) continue;
    if (!turn.task.empty()) {
      if (turn.task == kTasks[0].second) out.append(kAssistantToken).append(thinking ? kThinkToken : kEndThinkToken);  // action
      out += turn.task;
    } else if (asks(turn)) {
      out += kAssistantToken;
      out += thinking && (!drop || i == last) ? kThinkToken : kEndThinkToken;
    }
  }
  return out;
}

namespace {

// Text up to whichever of `stops` comes first, which is taken off too; `stop` is its index, -1 if none is there.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : rest_(text) {}
  std::string_view until(std::initializer_list<std::string_view> stops, int* stop) {
    size_t begin = rest_.size(), length = 0;
    *stop = -1;
    int index = 0;
    for (const std::string_view s : stops) {
      if (const size_t at = rest_.find(s); at < begin) {
        begin = at;
        length = s.size();
        *stop = index;
      }
      ++index;
    }
    const std::string_view before = rest_.substr(0, begin);
    rest_.remove_prefix(begin + length);
    return before;
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

// ` name="NAME" string="true">VALUE<` of one parameter, into `arguments`.
Status read_parameter(std::string_view text, std::set<std::string>* names, std::string* arguments) {
  constexpr std::string_view kName = " name=\"", kTrue = "\" string=\"true\">", kFalse = "\" string=\"false\">";
  const size_t is_true = text.find(kTrue, kName.size()), is_false = text.find(kFalse, kName.size());
  const size_t middle = std::min(is_true, is_false);
  if (!text.starts_with(kName) || middle == std::string_view::npos || !text.ends_with('<'))
    return errorf("the parameter {} is not name, string flag and value", in_quotes(text));
  const bool is_text = is_true < is_false;
  const std::string name(text.substr(kName.size(), middle - kName.size()));
  const size_t begin = middle + (is_text ? kTrue : kFalse).size();
  const std::string_view value = text.substr(begin, text.size() - 1 - begin);
  if (!names->insert(name).second) return errorf("the parameter {} stands twice", in_quotes(name));
  if (!arguments->empty()) *arguments += ", ";
  append_json_string(arguments, name);
  *arguments += ": ";
  if (is_text) {
    append_json_string(arguments, value);
  } else {
    *arguments += value;
  }
  return Status::ok();
}

// `\s*name="NAME">` and a newline.
Status read_name(std::string_view text, std::string* name) {
  constexpr std::string_view kBefore = "name=\"", kAfter = "\">\n";
  const std::string_view whole = text;
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n\v\f"), text.size()));
  if (!text.starts_with(kBefore) || !text.ends_with(kAfter) || text.size() < kBefore.size() + kAfter.size())
    return errorf("{} is no name of a tool", in_quotes(whole));
  *name = text.substr(kBefore.size(), text.size() - kBefore.size() - kAfter.size());
  return Status::ok();
}

// The calls of a block whose opening has been read up to its ">".
Status read_block(Cursor& cursor, std::vector<ToolCall>* calls) {
  const std::string invoke = fmt::format("<{}invoke", kMarker), end_invoke = fmt::format("</{}invoke", kMarker);
  const std::string parameter = fmt::format("<{}parameter", kMarker), end_parameter = fmt::format("/{}parameter", kMarker);
  const std::string end = fmt::format("</{}tool_calls>", kMarker);
  for (;;) {
    int stop = 0;
    const std::string_view before = cursor.until({invoke, end}, &stop);
    if (stop < 0) return Status::error("the block of tool calls is not closed");
    if (before != ">\n") return errorf("{} stands between tool calls", in_quotes(before));
    if (stop == 1) return Status::ok();
    ToolCall call;
    LOCKSTEP_RETURN_IF_ERROR(read_name(cursor.until({parameter, end_invoke}, &stop), &call.name));
    std::set<std::string> names;
    std::string arguments;
    while (stop == 0) {
      LOCKSTEP_RETURN_IF_ERROR(read_parameter(cursor.until({end_parameter}, &stop), &names, &arguments));
      const std::string_view between = cursor.until({parameter, end_invoke}, &stop);
      if (between != ">\n") return errorf("{} stands between parameters", in_quotes(between));
    }
    if (stop < 0) return errorf("the call of {} is not closed", in_quotes(call.name));
    call.arguments = "{" + arguments + "}";
    calls->push_back(std::move(call));
  }
}

}  // namespace

Result<AssistantMessage> parse_completion(std::string_view text, ChatMode mode) {
  const std::string block = fmt::format("\n\n<{}tool_calls", kMarker);
  AssistantMessage message;
  Cursor cursor(text);
  int stop = 0;
  if (mode == ChatMode::thinking) {
    message.reasoning = cursor.until({kEndThinkToken, block}, &stop);
    if (stop != 0) return errorf("the reasoning does not end with {}", kEndThinkToken);
  }
  message.content = cursor.until({kEndOfSentence, block}, &stop);
  if (stop < 0) return errorf("the completion does not end with {}", kEndOfSentence);
  if (stop == 1) {
    LOCKSTEP_RETURN_IF_ERROR(read_block(cursor, &message.tool_calls));
    // The release's parser takes a closed block without an end token.
    if (!cursor.until({kEndOfSentence}, &stop).empty()) return Status::error("text follows the tool calls");
  }
  if (!cursor.at_end()) return errorf("text follows {}", kEndOfSentence);
  for (const std::string_view token : {kBeginOfSentence, kEndOfSentence, kThinkToken, kEndThinkToken, kMarker}) {
    for (const std::string* part : {&message.content, &message.reasoning})
      if (part->find(token) != std::string::npos) return errorf("{} stands in the {}", token, part == &message.content ? "content" : "reasoning");
  }
  return message;
}

std::string message_json(const AssistantMessage& message) {
  std::string calls;
  for (const ToolCall& c : message.tool_calls) {
    if (!calls.empty()) calls += ',';
    calls += JsonLine().add("type", "function").add("function", JsonLine().add("name", c.name).add("arguments", c.arguments)).str();
  }
  std::string line =
      JsonLine().add("role", "assistant").add("content", message.content).add("reasoning_content", message.reasoning).str();
  line.pop_back();
  return line + ",\"tool_calls\":[" + calls + "]}";
}

}  // namespace lockstep
