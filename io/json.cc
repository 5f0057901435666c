#include "io/json.h"

#include <charconv>
#include <cmath>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "io/utf8.h"

namespace lockstep {

namespace {

constexpr size_t kMaxDepth = 64;  // what any record of ours needs many times over; bounds the recursion of destructors

// Builds the tree from the parser's events. The library would let a repeated key overwrite the first one; here it is an
// error, since one of the two values is not what its author meant.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return put({}) != nullptr; }
  bool boolean(bool value) override {
    JsonValue v;
    v.kind = JsonValue::Kind::boolean;
    v.boolean = value;
    return put(std::move(v)) != nullptr;
  }
  bool number_integer(number_integer_t value) override { return number(fmt::format("{}", value)); }
  bool number_unsigned(number_unsigned_t value) override { return number(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) override { return number(text); }
  bool string(string_t& value) override {
    JsonValue v;
    v.kind = JsonValue::Kind::string;
    v.text = std::move(value);
    return put(std::move(v)) != nullptr;
  }
  bool binary(binary_t&) override { return fail("binary data"); }
  bool start_object(size_t) override { return open(JsonValue::Kind::object); }
  bool key(string_t& name) override {
    if (!levels_.back().keys.insert(name).second) {
      return fail(fmt::format("the key {} stands twice in one object", in_quotes(name)));
    }
    levels_.back().value->members.push_back({std::move(name), {}});
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(JsonValue::Kind::array); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: what". The place is told by our own means.
    std::string what = e.what();
    if (const size_t end = what.find("] "); end != std::string::npos) what.erase(0, end + 2);
    if (what.starts_with("parse error at ")) {
      if (const size_t end = what.find(": "); end != std::string::npos) what.erase(0, end + 2);
    }
    constexpr size_t kMaxMessage = 200;  // it quotes the token read last, which may be the whole file
    if (what.size() > kMaxMessage) what = replace_invalid_utf8(what.substr(0, kMaxMessage)) + "...";
    return fail(std::move(what));
  }

  const std::string& failure() const { return failure_; }
  JsonValue take() { return std::move(root_); }

 private:
  struct Level {
    JsonValue* value;
    std::unordered_set<std::string> keys;
  };

  bool fail(std::string what) {
    failure_ = std::move(what);
    return false;
  }
  bool number(std::string text) {
    JsonValue v;
    v.kind = JsonValue::Kind::number;
    v.text = std::move(text);
    return put(std::move(v)) != nullptr;
  }
  // Where the value went. It stays there while it is being filled: its parent grows only after it is closed.
  JsonValue* put(JsonValue v) {
    if (levels_.empty()) {
      root_ = std::move(v);
      return &root_;
    }
    JsonValue* parent = levels_.back().value;
    if (parent->kind == JsonValue::Kind::array) {
      parent->items.push_back(std::move(v));
      return &parent->items.back();
    }
    parent->members.back().value = std::move(v);
    return &parent->members.back().value;
  }
  bool open(JsonValue::Kind kind) {
    if (levels_.size() == kMaxDepth) return fail(fmt::format("more than {} levels", kMaxDepth));
    JsonValue v;
    v.kind = kind;
    levels_.push_back({put(std::move(v)), {}});
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }

  JsonValue root_;
  std::vector<Level> levels_;
  std::string failure_;
};

// Bytes handed to the parser so far, to tell where it stopped.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* p, const char** furthest) : p_(p), furthest_(furthest) {}
  reference operator*() const { return *p_; }
  CountingIterator& operator++() {
    ++p_;
    if (p_ > *furthest_) *furthest_ = p_;
    return *this;
  }
  bool operator==(const CountingIterator& o) const { return p_ == o.p_; }
  bool operator!=(const CountingIterator& o) const { return p_ != o.p_; }

 private:
  const char* p_;
  const char** furthest_;
};

std::string place(std::string_view text, size_t offset) {
  size_t line = 1, column = 1;
  for (size_t i = 0; i < offset && i < text.size(); ++i) {
    if (text[i] == '\n') {
      ++line;
      column = 1;
    } else {
      ++column;
    }
  }
  return fmt::format("line {}, column {}", line, column);
}

// Digits that read back exactly, or the name of what JSON cannot say.
template <typename F>
void append_float(std::string* out, F value) {
  if (std::isnan(value)) {
    *out += "\"nan\"";
  } else if (std::isinf(value)) {
    *out += value > 0 ? "\"inf\"" : "\"-inf\"";
  } else if (value == 0 && std::signbit(value)) {
    *out += "-0.0";  // "-0" is the integer 0 to many readers
  } else {
    *out += fmt::format("{}", value);
  }
}

// repr(float(text)): the shortest digits that read back, plain from 1e-4 up to below 1e16, with at least one decimal.
void append_python_float(std::string* out, const std::string& text) {
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  char buffer[32];
  const std::to_chars_result r = std::to_chars(std::begin(buffer), std::end(buffer), value, std::chars_format::scientific);
  std::string_view written(buffer, static_cast<size_t>(r.ptr - buffer));  // -d.ddde+XX
  if (written.starts_with('-')) {
    *out += '-';
    written.remove_prefix(1);
  }
  const size_t e = written.find('e');
  const bool negative = written[e + 1] == '-';
  int exponent = 0;
  std::from_chars(written.data() + e + 2, r.ptr, exponent);
  if (negative) exponent = -exponent;
  if (exponent < -4 || exponent >= 16) {
    *out += written;
    return;
  }
  std::string digits(written.substr(0, e));
  if (digits.size() > 1) digits.erase(1, 1);
  const auto point = static_cast<size_t>(std::max(exponent + 1, 1));
  if (exponent < 0) digits.insert(0, static_cast<size_t>(-exponent), '0');
  if (digits.size() <= point) digits.append(point + 1 - digits.size(), '0');
  *out += digits.insert(point, ".");
}

template <typename T>
void append_integer(std::string* out, T value) {
  const fmt::format_int digits(value);
  out->append(digits.data(), digits.size());
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const {
  for (const auto& [name, value] : members)
    if (name == key) return &value;
  return nullptr;
}

bool JsonValue::as_int64(int64_t* out) const {
  if (kind != Kind::number) return false;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *out);
  return error == std::errc() && stop == end;
}

const char* json_kind_name(JsonValue::Kind kind) {
  switch (kind) {
    case JsonValue::Kind::null: return "null";
    case JsonValue::Kind::boolean: return "a boolean";
    case JsonValue::Kind::number: return "a number";
    case JsonValue::Kind::string: return "a string";
    case JsonValue::Kind::array: return "an array";
    case JsonValue::Kind::object: return "an object";
  }
  return "?";
}

Result<JsonValue> parse_json(std::string_view text) {
  // The library takes a NUL for the end of its input and skips a byte order mark; neither is JSON.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    return errorf("{}: a NUL byte", place(text, nul));
  if (text.starts_with("\xEF\xBB\xBF")) return errorf("{}: a byte order mark", place(text, 0));
  const char* furthest = text.data();
  TreeBuilder builder;
  const CountingIterator begin(text.data(), &furthest), end(text.data() + text.size(), &furthest);
  if (!nlohmann::json::sax_parse(begin, end, &builder)) {
    // The byte read last: the one that was wrong, or the one behind a number that was, or the end of the text.
    const size_t read = static_cast<size_t>(furthest - text.data());
    return errorf("{}: {}", place(text, read == 0 ? 0 : read - 1), builder.failure());
  }
  return builder.take();
}

Result<std::string> canonical_decimal(std::string_view number) {
  constexpr int64_t kMaxDigits = 400;
  const bool negative = number.starts_with('-');
  std::string_view rest = number.substr(negative ? 1 : 0);
  // value = 0.DIGITS * 10^point
  std::string digits;
  int64_t point = 0;
  bool fraction = false;
  size_t i = 0;
  for (; i < rest.size() && (rest[i] == '.' || (rest[i] >= '0' && rest[i] <= '9')); ++i) {
    if (rest[i] == '.') {
      fraction = true;
    } else {
      digits += rest[i];
      if (!fraction) ++point;
    }
  }
  if (i < rest.size()) {  // e or E
    std::string_view exponent = rest.substr(i + 1);
    if (exponent.starts_with('+')) exponent.remove_prefix(1);
    int64_t e = 0;
    const auto [stop, error] = std::from_chars(exponent.data(), exponent.data() + exponent.size(), e);
    if (error != std::errc() || stop != exponent.data() + exponent.size() || e > 1'000'000 || e < -1'000'000)
      return errorf("the number {} is out of range", in_quotes(number));
    point += e;
  }
  const size_t first = digits.find_first_not_of('0');
  if (first == std::string::npos) return std::string("0");
  digits.erase(0, first);
  point -= static_cast<int64_t>(first);
  digits.erase(digits.find_last_not_of('0') + 1);
  const int64_t count = static_cast<int64_t>(digits.size());
  if (point > kMaxDigits || count - point > kMaxDigits) return errorf("the number {} is out of range", in_quotes(number));
  std::string out = negative ? "-" : "";
  if (point <= 0) {
    out += "0." + std::string(static_cast<size_t>(-point), '0') + digits;
  } else if (point >= count) {
    out += digits + std::string(static_cast<size_t>(point - count), '0');
  } else {
    out += digits.substr(0, static_cast<size_t>(point)) + "." + digits.substr(static_cast<size_t>(point));
  }
  return out;
}

void append_json_string(std::string* out, std::string_view s) {
  std::string repaired;
  if (find_invalid_utf8(s) != std::string_view::npos) {
    repaired = replace_invalid_utf8(s);
    s = repaired;
  }
  *out += '"';
  for (const char c : s) {
    switch (c) {
      case '"': *out += "\\\""; break;
      case '\\': *out += "\\\\"; break;
      case '\n': *out += "\\n"; break;
      case '\r': *out += "\\r"; break;
      case '\t': *out += "\\t"; break;
      case '\b': *out += "\\b"; break;
      case '\f': *out += "\\f"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          *out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          *out += c;
        }
    }
  }
  *out += '"';
}

void append_json(std::string* out, const JsonValue& value, JsonStyle style) {
  const std::string_view comma = style == JsonStyle::python ? ", " : ",", colon = style == JsonStyle::python ? ": " : ":";
  switch (value.kind) {
    case JsonValue::Kind::null: *out += "null"; break;
    case JsonValue::Kind::boolean: *out += value.boolean ? "true" : "false"; break;
    case JsonValue::Kind::string: append_json_string(out, value.text); break;
    case JsonValue::Kind::number:
      if (style == JsonStyle::python && value.text.find_first_of(".eE") != std::string::npos) {
        append_python_float(out, value.text);
      } else {
        *out += value.text;
      }
      break;
    case JsonValue::Kind::array:
      *out += '[';
      for (size_t i = 0; i < value.items.size(); ++i) {
        if (i) *out += comma;
        append_json(out, value.items[i], style);
      }
      *out += ']';
      break;
    case JsonValue::Kind::object:
      *out += '{';
      for (size_t i = 0; i < value.members.size(); ++i) {
        if (i) *out += comma;
        append_json_string(out, value.members[i].name);
        *out += colon;
        append_json(out, value.members[i].value, style);
      }
      *out += '}';
      break;
  }
}

void JsonLine::begin(std::string_view key) {
  if (!body_.empty()) body_ += ',';
  append_json_string(&body_, key);
  body_ += ':';
}

JsonLine& JsonLine::add(std::string_view key, std::string_view value) {
  begin(key);
  append_json_string(&body_, value);
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, bool value) {
  begin(key);
  body_ += value ? "true" : "false";
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, float value) {
  begin(key);
  append_float(&body_, value);
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, double value) {
  begin(key);
  append_float(&body_, value);
  return *this;
}

JsonLine& JsonLine::add_signed(std::string_view key, int64_t value) {
  begin(key);
  append_integer(&body_, value);
  return *this;
}

JsonLine& JsonLine::add_unsigned(std::string_view key, uint64_t value) {
  begin(key);
  append_integer(&body_, value);
  return *this;
}

template <typename T, typename Append>
JsonLine& JsonLine::add_array(std::string_view key, std::span<const T> values, Append append) {
  begin(key);
  body_ += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i) body_ += ',';
    append(&body_, values[i]);
  }
  body_ += ']';
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, std::span<const float> values) {
  return add_array(key, values, append_float<float>);
}

JsonLine& JsonLine::add(std::string_view key, std::span<const int32_t> values) {
  return add_array(key, values, append_integer<int32_t>);
}

JsonLine& JsonLine::add(std::string_view key, std::span<const int64_t> values) {
  return add_array(key, values, append_integer<int64_t>);
}

JsonLine& JsonLine::add(std::string_view key, std::span<const std::string> values) {
  return add_array(key, values, [](std::string* out, const std::string& s) { append_json_string(out, s); });
}

JsonLine& JsonLine::add(std::string_view key, const JsonLine& object) {
  begin(key);
  body_ += object.str();
  return *this;
}

std::string hex_digits(uint64_t x) { return fmt::format("{:016x}", x); }

}  // namespace lockstep
