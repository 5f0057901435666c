#pragma once
// JSON in and out. Reading gives a small tree whose objects keep the order of the text; writing gives one line at a time.
// The parser behind it is a library that only json.cc sees.

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace lockstep {

struct JsonMember;

struct JsonValue {
  enum class Kind : uint8_t { null, boolean, number, string, array, object };
  Kind kind = Kind::null;
  bool boolean = false;
  std::string text;                 // a string's contents, or a number as it was written (integers up to 64 bits canonical)
  std::vector<JsonValue> items;     // of an array
  std::vector<JsonMember> members;  // of an object, in the order of the text

  bool is(Kind k) const { return kind == k; }
  const JsonValue* find(std::string_view key) const;  // nullptr if this has no such member
  // The number as an integer. False for what is no number, has a fraction or exponent, or does not fit.
  bool as_int64(int64_t* out) const;
};

struct JsonMember {
  std::string name;
  JsonValue value;
};

// "a number", "an object", ...: for messages.
const char* json_kind_name(JsonValue::Kind kind);

// The whole of `text` as one value. Refused: anything after it, invalid UTF-8, NUL bytes, numbers beyond the range of
// a double, a key twice in one object, more than 64 levels. Errors say "line L, column C: ..." with the byte
// that was read last (columns count bytes).
Result<JsonValue> parse_json(std::string_view text);

// A number as plain decimal text: 34.0 is "34", 1e3 "1000", 0.50 "0.5", -0 "0". Exact; an error beyond 400 digits.
Result<std::string> canonical_decimal(std::string_view number);

// Appends `s` as a JSON string, quotes included. Invalid UTF-8 becomes U+FFFD: a record is never unreadable.
void append_json_string(std::string* out, std::string_view s);

// Appends `value`, members in their order. `compact`: no spaces, numbers as they were written. `python`: the bytes of Python's
// json.dumps(value, ensure_ascii=False), which prompts contain: ", " and ": ", floats as repr() gives them.
enum class JsonStyle : uint8_t { compact, python };
void append_json(std::string* out, const JsonValue& value, JsonStyle style = JsonStyle::compact);

// The 16 hexadecimal digits of x: how sums and keys are written, which a number of JSON may round.
std::string hex_digits(uint64_t x);

// One JSON object on one line, members in the order they were added:
//   JsonLine().add("step", 3).add("loss", 0.25f).str()   ->   {"step":3,"loss":0.25}
// Floats are the shortest text that reads back as the same float (or double); NaN and infinities, which JSON lacks, are
// the strings "nan", "inf" and "-inf". Keys are the caller's to keep distinct.
class JsonLine {
 public:
  JsonLine& add(std::string_view key, std::string_view value);
  JsonLine& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  JsonLine& add(std::string_view key, bool value);
  JsonLine& add(std::string_view key, float value);
  JsonLine& add(std::string_view key, double value);
  template <std::integral T>
  JsonLine& add(std::string_view key, T value) {
    if constexpr (std::is_signed_v<T>) return add_signed(key, value);
    return add_unsigned(key, value);
  }
  JsonLine& add(std::string_view key, std::span<const float> values);
  JsonLine& add(std::string_view key, std::span<const int32_t> values);
  JsonLine& add(std::string_view key, std::span<const int64_t> values);
  JsonLine& add(std::string_view key, std::span<const std::string> values);
  JsonLine& add(std::string_view key, const JsonLine& object);

  std::string str() const { return "{" + body_ + "}"; }  // without a newline

 private:
  JsonLine& add_signed(std::string_view key, int64_t value);
  JsonLine& add_unsigned(std::string_view key, uint64_t value);
  template <typename T, typename Append>
  JsonLine& add_array(std::string_view key, std::span<const T> values, Append append);
  void begin(std::string_view key);

  std::string body_;
};

}  // namespace lockstep
