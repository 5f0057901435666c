#include "io/jsonl.h"

#include <unordered_set>

#include "io/file.h"
#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

bool is_blank(std::string_view s) { return s.find_first_not_of(" \t\r\n") == std::string_view::npos; }

// A string that must say something.
Status read_text(const JsonValue& value, const char* name, std::string* out) {
  if (!value.is(Kind::string)) return errorf("\"{}\" is {}, a string is wanted", name, json_kind_name(value.kind));
  if (is_blank(value.text)) return errorf("\"{}\" is empty", name);
  *out = value.text;
  return Status::ok();
}

Status read_prompt(const JsonValue& row, std::string* prompt) {
  for (const char* name : {"prompt", "text", "messages"}) {
    const JsonValue* value = row.find(name);
    if (value == nullptr) continue;
    if (value->is(Kind::array)) return errorf("\"{}\" is a list of messages, which is not supported yet", name);
    if (name == std::string_view("messages")) break;
    return read_text(*value, name, prompt);
  }
  return Status::error("there is no \"prompt\"");
}

Status read_label(const JsonValue& row, bool required, std::string* label) {
  const char* name = "label";
  const JsonValue* value = row.find(name);
  if (const JsonValue* model = row.find("reward_model"); value == nullptr && model != nullptr) {
    name = "reward_model.ground_truth";
    value = model->find("ground_truth");
  }
  if (value == nullptr) return required ? Status::error("there is no \"label\"") : Status::ok();
  if (value->is(Kind::number)) {
    Result<std::string> text = canonical_decimal(value->text);
    if (!text) return errorf("\"{}\": {}", name, text.message());
    *label = text.take();
    return Status::ok();
  }
  if (!value->is(Kind::string))
    return errorf("\"{}\" is {}, a string or a number is wanted", name, json_kind_name(value->kind));
  if (required && is_blank(value->text)) return errorf("\"{}\" is empty", name);
  *label = value->text;
  return Status::ok();
}

Status read_id(const JsonValue& row, std::string* id) {
  const JsonValue* value = row.find("id");
  if (value == nullptr) return Status::ok();
  int64_t number = 0;
  if (!value->is(Kind::string) && !value->as_int64(&number))
    return errorf("\"id\" is {}, a string or an integer is wanted",
                  value->is(Kind::number) ? value->text : json_kind_name(value->kind));
  *id = value->text;
  return Status::ok();
}

Status read_row(std::string_view line, PromptReaderOptions options, PromptRow* out) {
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
  LOCKSTEP_RETURN_IF_ERROR(read_prompt(row, &out->prompt));
  LOCKSTEP_RETURN_IF_ERROR(read_label(row, options.label_required, &out->label));
  if (options.completion_required) {
    const JsonValue* completion = row.find("completion");
    if (completion == nullptr) return Status::error("there is no \"completion\"");
    LOCKSTEP_RETURN_IF_ERROR(read_text(*completion, "completion", &out->completion));
  }
  return Status::ok();
}

}  // namespace

PromptFile parse_prompts(std::string_view text, std::string path, PromptReaderOptions options) {
  PromptFile file;
  file.path = std::move(path);
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  std::unordered_set<std::string> seen;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (is_blank(line)) continue;
    PromptRow row;
    row.line = number;
    if (Status s = read_row(line, options, &row); !s) {
      file.bad_rows.push_back({number, s.message()});
      continue;
    }
    if (!seen.insert(row.prompt).second) ++file.duplicate_prompts;
    file.rows.push_back(std::move(row));
  }
  return file;
}

Result<PromptFile> read_prompts(const std::string& path, PromptReaderOptions options) {
  Result<std::string> text = read_file(path);
  if (!text) return text.status();
  return parse_prompts(text.value(), path, options);
}

Status bad_rows_status(const PromptFile& file) {
  if (file.bad_rows.empty()) return Status::ok();
  constexpr size_t kListed = 20;
  std::string message = fmt::format("{}: {} of {} rows cannot be used", file.path, file.bad_rows.size(),
                                    file.bad_rows.size() + file.rows.size());
  for (size_t i = 0; i < file.bad_rows.size() && i < kListed; ++i)
    message += fmt::format("\n{}:{}: {}", file.path, file.bad_rows[i].line, file.bad_rows[i].reason);
  if (file.bad_rows.size() > kListed) message += fmt::format("\nand {} more", file.bad_rows.size() - kListed);
  return Status::error(message);
}

}  // namespace lockstep
