#include "io/checked_line.h"

#include <algorithm>

#include <xxhash.h>

namespace lockstep {

namespace {

constexpr std::string_view kSumMember = ",\"sum\":\"";
constexpr size_t kTail = kSumMember.size() + 16 + 2;  // the digits, the quote and the brace

std::string tail_of(std::string_view object) { return fmt::format("{}{:016x}\"}}", kSumMember, XXH64(object.data(), object.size(), 0)); }

}  // namespace

std::string checked_line(const JsonLine& line) {
  std::string text = line.str();
  const std::string tail = tail_of(text);
  text.pop_back();  // the brace
  return text + tail;
}

std::optional<std::string> uncheck_line(std::string_view line) {
  if (line.size() < kTail + 2) return std::nullopt;
  const std::string object = std::string(line.substr(0, line.size() - kTail)) + "}";
  if (line.substr(line.size() - kTail) != tail_of(object)) return std::nullopt;
  return object;
}

void for_each_checked_line(std::string_view text, const std::function<void(const JsonValue* object)>& f) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty()) continue;
    const std::optional<std::string> object = uncheck_line(line);
    const Result<JsonValue> json = object ? parse_json(*object) : Result<JsonValue>(Status::error("damaged"));
    f(json ? &json.value() : nullptr);
  }
}

}  // namespace lockstep
