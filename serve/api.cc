#include "serve/api.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <random>

namespace lockstep {

using Kind = JsonValue::Kind;

std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(&out, text);
  return out;
}

std::string json_number(float x) { return std::isfinite(x) ? fmt::format("{}", x) : "null"; }

std::string token_text(const Tokenizer& tokenizer, int32_t id) { return std::string(tokenizer.token_bytes(id, SpecialTokens::show)); }

std::string sse(std::string_view json) { return fmt::format("data: {}\n\n", json); }

uint64_t random_seed() {
  thread_local std::random_device device;
  return (uint64_t{device()} << 32 | device()) >> 1;
}

std::string random_name(std::string_view prefix) { return fmt::format("{}{:016x}", prefix, random_seed()); }

std::string openai_error_json(const ApiError& e) {
  const char* type = e.status == 401   ? "authentication_error"
                     : e.status == 404 ? "not_found_error"
                     : e.status == 429 ? "rate_limit_error"
                     : e.status >= 500 ? "server_error"
                                       : "invalid_request_error";
  const char* code = e.status == 401 ? "\"invalid_api_key\"" : e.status == 404 && e.param == "model" ? "\"model_not_found\"" : e.status == 429 ? "\"rate_limit_exceeded\"" : "null";
  return fmt::format("{{\"error\":{{\"message\":{},\"type\":\"{}\",\"param\":{},\"code\":{}}}}}", json_string(e.message), type,
                     e.param.empty() ? "null" : json_string(e.param), code);
}

Fields::Fields(const JsonValue& object) : object_(object) {
  if (!object.is(Kind::object)) fail("", fmt::format("the body is {}, an object is wanted", json_kind_name(object.kind)));
}

const JsonValue* Fields::find(std::string_view name) const {
  const JsonValue* v = object_.is(Kind::object) ? object_.find(name) : nullptr;
  return v == nullptr || v->is(Kind::null) ? nullptr : v;
}

void Fields::fail(std::string_view name, std::string message) {
  if (failed_) return;
  failed_ = true;
  error_ = {.status = 400, .message = std::move(message), .param = std::string(name)};
}

int64_t Fields::integer(std::string_view name, int64_t fallback, int64_t min, int64_t max) {
  const JsonValue* v = find(name);
  if (v == nullptr) return fallback;
  int64_t x = 0;
  if (v->as_int64(&x) && x >= min && x <= max) return x;
  fail(name, fmt::format("{} is {}, an integer from {} to {} is wanted", name, v->is(Kind::number) ? v->text : json_kind_name(v->kind), min, max));
  return fallback;
}

float Fields::number(std::string_view name, float fallback, float min, float max) {
  const JsonValue* v = find(name);
  if (v == nullptr) return fallback;
  float x = 0;
  if (v->is(Kind::number) && std::from_chars(v->text.data(), v->text.data() + v->text.size(), x).ec == std::errc() && x >= min && x <= max) return x;
  fail(name, fmt::format("{} is {}, a number from {} to {} is wanted", name, v->is(Kind::number) ? v->text : json_kind_name(v->kind), min, max));
  return fallback;
}

bool Fields::boolean(std::string_view name, bool fallback) {
  const JsonValue* v = find(name);
  if (v == nullptr) return fallback;
  if (!v->is(Kind::boolean)) fail(name, fmt::format("{} is {}, true or false is wanted", name, json_kind_name(v->kind)));
  return v->boolean;
}

std::string Fields::text(std::string_view name, std::string_view fallback) {
  const JsonValue* v = find(name);
  if (v == nullptr) return std::string(fallback);
  if (!v->is(Kind::string)) fail(name, fmt::format("{} is {}, a string is wanted", name, json_kind_name(v->kind)));
  return v->text;
}

std::vector<std::string> Fields::texts(std::string_view name) {
  const JsonValue* v = find(name);
  if (v == nullptr) return {};
  if (v->is(Kind::string)) return {v->text};
  std::vector<std::string> out;
  constexpr size_t kMost = 16, kLongest = 1024;
  bool fits = v->is(Kind::array) && v->items.size() <= kMost;
  for (const JsonValue& item : v->items) {
    fits = fits && item.is(Kind::string) && item.text.size() <= kLongest;
    out.push_back(item.text);
  }
  if (!fits) fail(name, fmt::format("{}: a string or at most {} strings of {} bytes are wanted", name, kMost, kLongest));
  return out;
}

std::vector<int32_t> Fields::ids(const JsonValue& list, std::string_view name) {
  std::vector<int32_t> out;
  if (!list.is(Kind::array)) fail(name, fmt::format("{} holds {}, a list of token ids is wanted", name, json_kind_name(list.kind)));
  for (const JsonValue& item : list.items) {
    int64_t x = 0;
    if (!item.as_int64(&x) || x < 0 || x > std::numeric_limits<int32_t>::max()) {
      fail(name, fmt::format("{}[{}] is {}, a token id is wanted", name, out.size(), item.is(Kind::number) ? item.text : json_kind_name(item.kind)));
      return out;
    }
    out.push_back(static_cast<int32_t>(x));
  }
  return out;
}

void Fields::refuse(std::string_view name, std::string_view why) {
  const JsonValue* v = find(name);
  if (v == nullptr) return;
  float x = 1;
  const bool empty = (v->is(Kind::boolean) && !v->boolean) || ((v->is(Kind::string) || v->is(Kind::array) || v->is(Kind::object)) && v->text.empty() && v->items.empty() && v->members.empty()) ||
                     (v->is(Kind::number) && std::from_chars(v->text.data(), v->text.data() + v->text.size(), x).ec == std::errc() && x == 0);
  if (!empty) fail(name, fmt::format("{} is not supported: {}", name, why));
}

void add_prompts(Fields& fields, std::string_view name, const JsonValue& prompts, const Tokenizer& tokenizer, bool texts, bool ids, std::vector<Request>* requests) {
  const auto add = [&](std::vector<int32_t> tokens) {
    Request r;
    r.prompt_id = requests->size();
    r.prompt = std::move(tokens);
    requests->push_back(std::move(r));
  };
  const auto add_text = [&](const std::string& text) {
    Result<std::vector<int32_t>> tokens = prompt_tokens(tokenizer, text);
    if (!tokens) return fields.fail(name, fmt::format("{}: {}", name, tokens.message()));
    add(tokens.take());
  };
  const bool list = prompts.is(Kind::array) && !prompts.items.empty();
  if (texts && prompts.is(Kind::string)) return add_text(prompts.text);
  if (ids && list && prompts.items[0].is(Kind::number)) return add(fields.ids(prompts, name));
  if (list && ((texts && prompts.items[0].is(Kind::string)) || (ids && prompts.items[0].is(Kind::array)))) {
    for (const JsonValue& item : prompts.items) {
      if (item.kind != prompts.items[0].kind) return fields.fail(name, fmt::format("{} mixes texts and token ids", name));
      if (item.is(Kind::string)) {
        add_text(item.text);
      } else {
        add(fields.ids(item, name));
      }
      if (fields.failed()) return;
    }
    return;
  }
  fields.fail(name, fmt::format("{} is {}; wanted: {}{}{}, or a list of such", name, list ? "a list of something else" : prompts.is(Kind::array) ? "an empty list" : json_kind_name(prompts.kind),
                                texts ? "a text" : "", texts && ids ? " or " : "", ids ? "a list of token ids" : ""));
}

}  // namespace lockstep
