#pragma once
// What the HTTP interfaces share: a call is read from JSON into requests of the engine, and a reply writes what the job says in the interface's own
// words. Pure; the server (serve/server.h) moves the bytes.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json.h"
#include "serve/generator.h"

namespace lockstep {

struct ServedModel {
  const Tokenizer* tokenizer = nullptr;
  std::string name;  // that clients call it by
  int64_t max_context = 0;
};

// Writes one job. Not shared by threads.
class Reply {
 public:
  virtual ~Reply() = default;
  virtual std::string whole(const Job& job) = 0;  // REQUIRES: the job has ended
  // What was not written yet, as server-sent events; of a job that has ended, all the rest and the end mark.
  virtual std::string events(const Job& job) = 0;
};

struct Call {
  std::vector<Request> requests;
  JobOptions options;
  std::unique_ptr<Reply> reply;
};

struct ApiError {
  int status = 400;
  std::string message;
  std::string param = {};  // the field at fault
};
std::string openai_error_json(const ApiError& error);

// Reads members of a JSON object. The first that is wrong is kept; later reads give their fallbacks.
class Fields {
 public:
  explicit Fields(const JsonValue& object);
  const JsonValue* find(std::string_view name) const;  // null for a missing member and for null
  int64_t integer(std::string_view name, int64_t fallback, int64_t min, int64_t max);
  float number(std::string_view name, float fallback, float min, float max);
  bool boolean(std::string_view name, bool fallback);
  std::string text(std::string_view name, std::string_view fallback);
  std::vector<std::string> texts(std::string_view name);  // a string or a list of strings
  std::vector<int32_t> ids(const JsonValue& list, std::string_view name);
  // What is not built: anything but null, false, 0, "", an empty list or object is refused.
  void refuse(std::string_view name, std::string_view why);
  void fail(std::string_view name, std::string message);
  bool failed() const { return failed_; }
  const ApiError& error() const { return error_; }

 private:
  const JsonValue& object_;
  bool failed_ = false;
  ApiError error_;
};

// JSON pieces.
std::string json_string(std::string_view text);
std::string json_number(float x);  // NaN and infinities, which JSON lacks: null
std::string token_text(const Tokenizer& tokenizer, int32_t id);
std::string sse(std::string_view json);  // one event
inline constexpr std::string_view kSseEnd = "data: [DONE]\n\n";
std::string random_name(std::string_view prefix);
uint64_t random_seed();

// One request a prompt, numbered from 0: together with the seed and the sample's index that is what its random numbers are keyed by.
void add_prompts(Fields& fields, std::string_view name, const JsonValue& prompts, const Tokenizer& tokenizer, bool texts, bool ids, std::vector<Request>* requests);

// POST bodies of /v1/completions, /v1/chat/completions and SGLang's /generate. False: `error` says why.
bool read_completions(const JsonValue& body, const ServedModel& model, Call* call, ApiError* error);
bool read_chat_completions(const JsonValue& body, const ServedModel& model, Call* call, ApiError* error);
bool read_generate(const JsonValue& body, const ServedModel& model, const std::string& weight_version, Call* call, ApiError* error);

}  // namespace lockstep
