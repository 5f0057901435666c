#include "io/jsonl.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <unordered_set>

#include "io/chat.h"
#include "io/file.h"
#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

constexpr std::pair<std::string_view, std::string_view> kTemplates[] = {
    {"dapo",
     "Solve the following math problem step by step. The last line of your response should be of the form Answer: \\boxed{$Answer} where $Answer is "
     "the answer to the problem.\n\n{}\n\nRemember to put your answer on its own line after \"Answer:\"."},
    {"dapo_plain",
     "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) where "
     "$Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its own line after \"Answer:\"."},
    {"boxed", "{}\nPlease reason step by step, and put your final answer within \\boxed{}."}};

bool is_blank(std::string_view s) { return s.find_first_not_of(" \t\r\n") == std::string_view::npos; }

// Where a format has its members. The names from `guessed` on may be other things than labels.
struct Fields {
  std::vector<std::string_view> prompts, labels, ids;
  size_t guessed = std::numeric_limits<size_t>::max();
};

Fields fields_of(const PromptStyle& style) {
  Fields f;
  switch (style.format) {
    case DataFormat::automatic:
      f = {{"prompt", "messages", "text", "input", "question", "problem"},
           {"label", "reward_model.ground_truth", "answer", "solution", "ground_truth"},
           {"id", "extra_info.index"},
           2};
      break;
    case DataFormat::miles:
    case DataFormat::slime: f = {{"prompt"}, {"label"}, {"id"}}; break;
    case DataFormat::verl: f = {{"prompt"}, {"reward_model.ground_truth"}, {"extra_info.index"}}; break;
    case DataFormat::openrlhf: f = {{"input"}, {"label"}, {"id"}}; break;
    case DataFormat::trl: f = {{"prompt"}, {"answer", "solution", "ground_truth", "label"}, {"id"}, 0}; break;
  }
  if (!style.prompt_key.empty()) f.prompts = {style.prompt_key};
  if (!style.label_key.empty()) {
    f.labels = {style.label_key};
    f.guessed = 1;
  }
  return f;
}

const JsonValue* find_path(const JsonValue& object, std::string_view path) {
  if (const JsonValue* whole = object.find(path)) return whole;
  const size_t dot = path.find('.');
  if (dot == std::string_view::npos) return nullptr;
  const JsonValue* inner = object.find(path.substr(0, dot));
  return inner == nullptr ? nullptr : find_path(*inner, path.substr(dot + 1));
}

// The first of `names` that the row has; nullptr: none.
const JsonValue* find_first(const JsonValue& row, std::span<const std::string_view> names, size_t* which) {
  for (*which = 0; *which < names.size(); ++*which)
    if (const JsonValue* value = find_path(row, names[*which])) return value;
  return nullptr;
}

// A string that must say something.
Status read_text(const JsonValue& value, std::string_view name, const char* wanted, std::string* out) {
  if (!value.is(Kind::string)) return errorf("\"{}\" is {}, {} is wanted", name, json_kind_name(value.kind), wanted);
  if (is_blank(value.text)) return errorf("\"{}\" is empty", name);
  *out = value.text;
  return Status::ok();
}

std::string json_text(const JsonValue& value) {
  std::string out;
  append_json(&out, value);
  return out;
}

JsonValue text_value(std::string text) {
  JsonValue v;
  v.kind = Kind::string;
  v.text = std::move(text);
  return v;
}

JsonValue user_message(std::string content) {
  JsonValue message, list;
  message.kind = Kind::object;
  message.members = {{"role", text_value("user")}, {"content", text_value(std::move(content))}};
  list.kind = Kind::array;
  list.items = {std::move(message)};
  return list;
}

bool is_assistants(const JsonValue& message) {
  const JsonValue* role = message.find("role");
  return role != nullptr && role->text == "assistant";
}

class RowReader {
 public:
  explicit RowReader(const PromptReaderOptions& options) : options_(options), style_(options.style), fields_(fields_of(style_)) {
    if (!style_.prompt_template.empty()) template_ = find_prompt_template(style_.prompt_template).take();
  }

  Status read(std::string_view line, PromptRow* out, std::string* fields) const {
    if (const size_t at = find_invalid_utf8(line); at != std::string_view::npos)
      return errorf("invalid UTF-8, byte 0x{:02x} at column {}", static_cast<uint8_t>(line[at]), at + 1);
    Result<JsonValue> parsed = parse_json(line);
    if (!parsed) {
      // A row is one line; its number is the file's, which the caller adds.
      const std::string& what = parsed.message();
      constexpr std::string_view kLine = "line 1, ";
      return errorf("invalid JSON, {}", what.starts_with(kLine) ? what.substr(kLine.size()) : what);
    }
    const JsonValue& row = parsed.value();
    if (!row.is(Kind::object)) return errorf("the row is {}, an object is wanted", json_kind_name(row.kind));
    LOCKSTEP_RETURN_IF_ERROR(read_id(row, &out->id));
    LOCKSTEP_RETURN_IF_ERROR(read_prompt(row, out, fields));
    return read_label(row, &out->label, fields);
  }

 private:
  Status read_id(const JsonValue& row, std::string* id) const {
    size_t which = 0;
    const JsonValue* value = find_first(row, fields_.ids, &which);
    if (value == nullptr) return Status::ok();
    int64_t number = 0;
    if (!value->is(Kind::string) && !value->as_int64(&number))
      return errorf("\"{}\" is {}, a string or an integer is wanted", fields_.ids[which],
                    value->is(Kind::number) ? value->text : json_kind_name(value->kind));
    *id = value->text;
    return Status::ok();
  }

  Status read_prompt(const JsonValue& row, PromptRow* out, std::string* fields) const {
    size_t which = 0;
    const JsonValue* value = find_first(row, fields_.prompts, &which);
    if (value == nullptr) return errorf("there is no \"{}\"", fields_.prompts[0]);
    const std::string_view name = fields_.prompts[which];
    *fields = name;
    const JsonValue* completion = options_.completion_required ? row.find("completion") : nullptr;
    if (value->is(Kind::array)) return render(row, *value, completion, name, out);
    if (name == "messages") return errorf("\"messages\" is {}, a list is wanted", json_kind_name(value->kind));
    LOCKSTEP_RETURN_IF_ERROR(read_text(*value, name, "a string or a list of messages", &out->prompt));
    if (!template_.empty()) {
      const size_t at = template_.find("{}");
      out->prompt = template_.substr(0, at) + out->prompt + template_.substr(at + 2);
    }
    if (style_.chat != PromptChat::none) return render(row, user_message(out->prompt), completion, name, out);
    if (!options_.completion_required) return Status::ok();
    if (completion == nullptr) return Status::error("there is no \"completion\"");
    return read_text(*completion, "completion", "a string", &out->completion);
  }

  Result<ChatOptions> chat_options(const JsonValue& row, std::string_view name) const {
    if (style_.chat == PromptChat::none && row.find("thinking_mode") == nullptr)
      return errorf("\"{}\" is a list of messages; say how to write them, with task.chat = \"chat\" or \"thinking\", or \"thinking_mode\" in the row", name);
    const ChatMode fallback = style_.chat == PromptChat::thinking ? ChatMode::thinking : ChatMode::chat;
    Result<ChatOptions> o = read_chat_options(row, &fallback);
    if (!o) return o;
    if (row.find("drop_thinking") == nullptr) o.value().drop_thinking = style_.drop_thinking;
    if (row.find("reasoning_effort") == nullptr) o.value().max_effort = style_.reasoning_effort == ReasoningEffort::max;
    if (const JsonValue* tools = row.find("tools"); tools != nullptr && !(tools->is(Kind::null) || (tools->is(Kind::array) && tools->items.empty())))
      return errorf("\"tools\" stands beside \"{}\"; the format has them in the first message, as its member \"tools\"", name);
    return o;
  }

  Status render(const JsonValue& row, JsonValue messages, const JsonValue* completion, std::string_view name, PromptRow* out) const {
    const Result<ChatOptions> chat = chat_options(row, name);
    if (!chat) return chat.status();
    JsonValue answer;
    answer.kind = Kind::array;
    if (completion != nullptr && completion->is(Kind::array)) {
      answer = *completion;
    } else if (completion == nullptr && options_.completion_required) {
      if (messages.items.empty() || !is_assistants(messages.items.back()))
        return errorf("there is no \"completion\", and the last message of \"{}\" is not the assistant's", name);
      answer.items.push_back(std::move(messages.items.back()));
      messages.items.pop_back();
    }
    const auto named = [&](const Status& s) {  // encode_chat() calls the list "messages"
      return name == "messages" || !s.message().starts_with("messages[") ? s : errorf("{}{}", name, s.message().substr(std::string_view("messages").size()));
    };
    if (!messages.items.empty() && is_assistants(messages.items.back())) {
      const JsonValue* open = messages.items.back().find("wo_eos");
      if (open == nullptr || !open->boolean) return errorf("the last message of \"{}\" is the assistant's, so there is nothing to answer", name);
    }
    Result<std::string> prompt = encode_chat(messages, chat.value());
    if (!prompt) return named(prompt.status());
    out->messages = json_text(messages);
    out->prompt = prompt.take();
    if (completion != nullptr && !completion->is(Kind::array)) return read_text(*completion, "completion", "a string or a list of messages", &out->completion);
    if (answer.items.empty()) return completion == nullptr ? Status::ok() : Status::error("\"completion\" is empty");

    // The completion is what the conversation has more than the prompt.
    for (JsonValue& m : answer.items) messages.items.push_back(std::move(m));
    Result<std::string> whole = encode_chat(messages, chat.value());
    if (!whole) return named(whole.status());
    if (!whole.value().starts_with(out->prompt) || !whole.value().ends_with(kEndOfSentence))
      return Status::error("\"completion\" is not one answer of the assistant to the prompt");
    out->completion = whole.value().substr(out->prompt.size(), whole.value().size() - out->prompt.size() - kEndOfSentence.size());
    return is_blank(out->completion) ? Status::error("\"completion\" is empty") : Status::ok();
  }

  Status read_label(const JsonValue& row, std::string* label, std::string* fields) const {
    const bool required = options_.label_required;
    size_t which = 0;
    const JsonValue* value = find_first(row, fields_.labels, &which);
    if (value == nullptr) return required ? errorf("there is no \"{}\"", fields_.labels[0]) : Status::ok();
    const std::string_view name = fields_.labels[which];
    if (!required && which >= fields_.guessed) return Status::ok();
    fields->append(", ").append(name);
    if (value->is(Kind::number)) {
      Result<std::string> text = canonical_decimal(value->text);
      if (!text) return errorf("\"{}\": {}", name, text.message());
      *label = text.take();
      return Status::ok();
    }
    if (!value->is(Kind::string)) return errorf("\"{}\" is {}, a string or a number is wanted", name, json_kind_name(value->kind));
    if (required && is_blank(value->text)) return errorf("\"{}\" is empty", name);
    if (which >= fields_.guessed && value->text.find('\n') != std::string::npos)
      return errorf("\"{}\" has several lines, which is a worked solution and no answer; name the member with the answer in task.label_key", name);
    *label = value->text;
    return Status::ok();
  }

  const PromptReaderOptions& options_;
  const PromptStyle& style_;
  Fields fields_;
  std::string template_;
};

struct Slice {
  std::string path;
  int64_t first = 0, end = std::numeric_limits<int64_t>::max();
};

Result<Slice> read_slice(const std::string& path) {
  const size_t at = path.rfind("@[");
  if (at == std::string::npos || !path.ends_with(']')) return Slice{path};
  Slice s{path.substr(0, at)};
  const std::string_view text = std::string_view(path).substr(at + 2, path.size() - at - 3);
  const size_t colon = text.find(':');
  const auto read = [](std::string_view t, int64_t* out) {
    if (t.empty()) return true;
    const auto [end, error] = std::from_chars(t.data(), t.data() + t.size(), *out);
    return error == std::errc() && end == t.data() + t.size() && *out >= 0;
  };
  if (colon == std::string_view::npos || !read(text.substr(0, colon), &s.first) || !read(text.substr(colon + 1), &s.end))
    return errorf("{}: {} is no slice of rows; @[FIRST:END] with numbers from 0 is wanted", path, in_quotes(path.substr(at)));
  return s;
}

PromptFile parse_rows(std::string_view text, std::string path, const PromptReaderOptions& options, int64_t first, int64_t end_row) {
  PromptFile file;
  file.path = std::move(path);
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  const RowReader reader(options);
  std::unordered_set<std::string> seen;
  std::vector<std::string> fields;
  int64_t row_idx = 0;
  for (int64_t number = 1; !text.empty() && row_idx < end_row; ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (is_blank(line) || row_idx++ < first) continue;
    PromptRow row;
    std::string found;
    row.line = number;
    if (Status s = reader.read(line, &row, &found); !s) {
      file.add_bad_row(number, s.message());
      continue;
    }
    if (std::find(fields.begin(), fields.end(), found) == fields.end()) fields.push_back(found);
    if (!seen.insert(row.prompt).second) ++file.duplicate_prompts;
    file.rows.push_back(std::move(row));
  }
  for (const std::string& f : fields) file.fields += (file.fields.empty() ? "" : " | ") + f;
  return file;
}

}  // namespace

std::span<const std::pair<std::string_view, std::string_view>> prompt_templates() { return kTemplates; }

Result<std::string> find_prompt_template(const std::string& name) {
  for (const auto& [known, text] : kTemplates)
    if (known == name) return std::string(text);
  const size_t at = name.find("{}");
  if (at != std::string::npos && name.find("{}", at + 2) == std::string::npos) return name;
  return errorf("{} is no template; write dapo, dapo_plain, boxed, or a text with {{}} once, where the prompt goes", in_quotes(name));
}

void PromptFile::add_bad_row(int64_t line, std::string reason) {
  ++num_bad_rows;
  const auto behind = std::find_if(bad_rows.begin(), bad_rows.end(), [&](const BadRow& b) { return b.line > line; });
  bad_rows.insert(behind, {line, std::move(reason)});
  if (bad_rows.size() > kListedRows) bad_rows.pop_back();
}

PromptFile parse_prompts(std::string_view text, std::string path, const PromptReaderOptions& options) {
  return parse_rows(text, std::move(path), options, 0, std::numeric_limits<int64_t>::max());
}

Result<PromptFile> read_prompts(const std::string& path, const PromptReaderOptions& options) {
  if (!options.style.prompt_template.empty())
    if (const Result<std::string> found = find_prompt_template(options.style.prompt_template); !found) return found.status();
  const Result<Slice> slice = read_slice(path);
  if (!slice) return slice.status();
  Result<std::string> text = read_file(slice.value().path);
  if (!text) return text.status();
  return parse_rows(text.value(), slice.value().path, options, slice.value().first, slice.value().end);
}

std::string bad_rows_list(const PromptFile& file) {
  std::string list;
  for (const BadRow& b : file.bad_rows) list += fmt::format("\n{}:{}: {}", file.path, b.line, b.reason);
  if (file.num_bad_rows > static_cast<int64_t>(file.bad_rows.size()))
    list += fmt::format("\nand {} more", file.num_bad_rows - static_cast<int64_t>(file.bad_rows.size()));
  return list;
}

Status bad_rows_status(const PromptFile& file) {
  if (file.num_bad_rows == 0) return Status::ok();
  return errorf("{}: {} of {} rows cannot be used{}", file.path, file.num_bad_rows, file.num_rows(), bad_rows_list(file));
}

}  // namespace lockstep
