// /v1/completions and /v1/chat/completions. docs/serve.md lists what differs from OpenAI's.

#include <algorithm>
#include <ctime>

#include "io/chat.h"
#include "serve/api.h"

namespace lockstep {

using Kind = JsonValue::Kind;

namespace {

constexpr int64_t kMaxSamples = 1024;
constexpr std::string_view kEndThink = "</think>";

// What both interfaces read alike. max_tokens < 0: as many as fit.
void read_sampling(Fields& f, const ServedModel& model, int64_t max_tokens, Call* call) {
  SamplingOptions s;
  s.temperature = f.number("temperature", 1, 0, 100);
  s.top_p = f.number("top_p", 1, 0, 1);
  s.min_p = f.number("min_p", 0, 0, 1);
  s.top_k = static_cast<int32_t>(f.integer("top_k", 0, -1, INT32_MAX));
  const bool ignore_eos = f.boolean("ignore_eos", false);
  if (model.tokenizer->eos_id() >= 0 && !ignore_eos) s.stop_ids.push_back(model.tokenizer->eos_id());
  const int32_t n = static_cast<int32_t>(f.integer("n", 1, 1, kMaxSamples));
  const uint64_t seed = f.find("seed") == nullptr ? random_seed() : static_cast<uint64_t>(f.integer("seed", 0, INT64_MIN, INT64_MAX));
  call->options.stops = f.texts("stop");
  call->options.stream = f.boolean("stream", false);
  f.refuse("frequency_penalty", "penalties would not be the distribution that is trained");
  f.refuse("presence_penalty", "penalties would not be the distribution that is trained");
  f.refuse("logit_bias", "a bias would not be the distribution that is trained");
  f.refuse("suffix", "the model does not insert");
  if (f.integer("best_of", n, 1, kMaxSamples) != n) f.fail("best_of", "best_of is not supported: all samples are returned");
  for (Request& r : call->requests) {
    r.num_samples = n;
    r.seed = seed;
    r.sampling = s;
    r.sampling.max_new_tokens = max_tokens >= 0 ? max_tokens : std::max<int64_t>(1, model.max_context - static_cast<int64_t>(r.prompt.size()));
  }
}

bool read_model(Fields& f, const ServedModel& model, ApiError* error) {
  const std::string name = f.text("model", model.name);
  if (name == model.name) return true;
  *error = {.status = 404, .message = fmt::format("the model {} does not exist; {} is served", json_string(name), json_string(model.name)), .param = "model"};
  return false;
}

const char* finish_name(const Job::Sample& s) { return finish_reason_name(s.reason); }

// What the two kinds of reply have in common.
class OpenAiReply : public Reply {
 public:
  OpenAiReply(const ServedModel& model, std::string_view id_prefix, std::string_view whole_object, std::string_view part_object, bool logprobs, bool include_usage)
      : tokenizer_(*model.tokenizer), logprobs_(logprobs), include_usage_(include_usage) {
    const std::string id = json_string(random_name(id_prefix)), name = json_string(model.name);
    const auto head = [&, created = std::time(nullptr)](std::string_view object) {
      return fmt::format("{{\"id\":{},\"object\":\"{}\",\"created\":{},\"model\":{},\"choices\":[", id, object, created, name);
    };
    whole_head_ = head(whole_object);
    part_head_ = head(part_object);
  }

  std::string whole(const Job& job) override {
    std::string choices;
    job.look([&](size_t i, const Job::Sample& s) {
      if (i > 0) choices += ',';
      choices += whole_choice(job, i, s);
    });
    return fmt::format("{}{}],\"usage\":{}}}", whole_head_, choices, usage(job));
  }

  std::string events(const Job& job) override {
    std::string out;
    size_t ended = 0, count = 0;
    job.look([&](size_t i, const Job::Sample& s) {
      if (written_.size() <= i) written_.resize(i + 1);
      ++count;
      ended += s.ended;
      Written& w = written_[i];
      if (w.ended) return;
      for (const std::string& choice : new_choices(job, i, s, w)) out += sse(fmt::format("{}{}]{}}}", part_head_, choice, include_usage_ ? ",\"usage\":null" : ""));
      w.ended = s.ended;
    });
    if (ended < count) return out;
    if (include_usage_) out += sse(fmt::format("{}],\"usage\":{}}}", part_head_, usage(job)));
    return out.append(kSseEnd);
  }

 protected:
  struct Written {
    size_t text = 0, tokens = 0, offset = 0;
    bool begun = false, ended = false;
  };
  virtual std::string whole_choice(const Job& job, size_t i, const Job::Sample& s) = 0;
  virtual std::vector<std::string> new_choices(const Job& job, size_t i, const Job::Sample& s, Written& w) = 0;

  static std::string usage(const Job& job) {
    size_t prompt = 0, completion = 0;
    for (const Request& r : job.requests()) prompt += r.prompt.size();
    job.look([&](size_t, const Job::Sample& s) { completion += s.log.tokens.size(); });
    return fmt::format("{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{}}}", prompt, completion, prompt + completion);
  }

  const Tokenizer& tokenizer_;
  const bool logprobs_, include_usage_;
  std::string whole_head_, part_head_;  // of an answer and of an event, up to their choices
  std::vector<Written> written_;
};

class CompletionReply : public OpenAiReply {
 public:
  CompletionReply(const ServedModel& model, bool logprobs, bool include_usage, std::vector<std::string> echo)
      : OpenAiReply(model, "cmpl-", "text_completion", "text_completion", logprobs, include_usage), echo_(std::move(echo)) {}

 protected:
  std::string whole_choice(const Job& job, size_t i, const Job::Sample& s) override {
    size_t offset = 0;
    return choice(i, echo(job, i) + s.text, logprobs(s, 0, offset), s);
  }
  std::vector<std::string> new_choices(const Job& job, size_t i, const Job::Sample& s, Written& w) override {
    const std::string text = (w.begun ? "" : echo(job, i)) + s.text.substr(w.text);
    if (text.empty() && !s.ended && (!logprobs_ || w.tokens == s.log.tokens.size())) return {};
    const std::string part = choice(i, text, logprobs(s, w.tokens, w.offset), s);
    w.begun = true;
    w.text = s.text.size();
    w.tokens = s.log.tokens.size();
    return {part};
  }

 private:
  std::string echo(const Job& job, size_t i) const { return echo_.empty() ? "" : echo_[i / static_cast<size_t>(job.requests()[0].num_samples)]; }
  static std::string choice(size_t i, std::string_view text, std::string_view logprobs, const Job::Sample& s) {
    return fmt::format("{{\"index\":{},\"text\":{},\"logprobs\":{},\"finish_reason\":{}}}", i, json_string(text), logprobs, s.ended ? json_string(finish_name(s)) : "null");
  }
  std::string logprobs(const Job::Sample& s, size_t first, size_t& offset) const {
    if (!logprobs_) return "null";
    std::string tokens, values, offsets;
    for (size_t t = first; t < s.log.tokens.size(); ++t) {
      const char* comma = t > first ? "," : "";
      const std::string_view text = tokenizer_.token_bytes(s.log.tokens[t], SpecialTokens::show);
      append_json_string(&tokens.append(comma), text);
      values.append(comma).append(json_number(s.log.logprobs[t]));
      offsets.append(comma).append(std::to_string(offset));
      offset += text.size();
    }
    return fmt::format("{{\"tokens\":[{}],\"token_logprobs\":[{}],\"top_logprobs\":null,\"text_offset\":[{}]}}", tokens, values, offsets);
  }

  const std::vector<std::string> echo_;  // by request; empty: no echo
};

class ChatReply : public OpenAiReply {
 public:
  ChatReply(const ServedModel& model, bool logprobs, bool include_usage, ChatMode mode)
      : OpenAiReply(model, "chatcmpl-", "chat.completion", "chat.completion.chunk", logprobs, include_usage), mode_(mode) {}

 protected:
  std::string whole_choice(const Job& job, size_t i, const Job::Sample& s) override {
    AssistantMessage message;
    const bool by_end_token = s.reason == FinishReason::stop && s.matched.empty();
    Result<AssistantMessage> parsed = parse_completion(s.text + std::string(by_end_token ? kEndOfSentence : ""), mode_);
    if (parsed) {
      message = parsed.take();
    } else {  // cut short, or not in the format: as it is
      split(s.text, true, &message.reasoning, &message.content);
    }
    std::string calls;
    for (const ToolCall& c : message.tool_calls) {
      calls += fmt::format("{}{{\"id\":{},\"type\":\"function\",\"function\":{{\"name\":{},\"arguments\":{}}}}}", calls.empty() ? "" : ",",
                           json_string(random_name("call_")), json_string(c.name), json_string(c.arguments));
    }
    const std::string extra = (mode_ == ChatMode::thinking ? fmt::format(",\"reasoning_content\":{}", json_string(message.reasoning)) : "") +
                              (calls.empty() ? "" : fmt::format(",\"tool_calls\":[{}]", calls));
    return fmt::format("{{\"index\":{},\"message\":{{\"role\":\"assistant\",\"content\":{},\"refusal\":null{}}},\"logprobs\":{},\"finish_reason\":{}}}", i,
                       json_string(message.content), extra, logprobs(s, 0), json_string(calls.empty() ? finish_name(s) : "tool_calls"));
  }

  std::vector<std::string> new_choices(const Job&, size_t i, const Job::Sample& s, Written& w) override {
    std::vector<std::string> out;
    const auto part = [&](const std::string& delta, std::string_view logprobs, const std::string& reason) {
      out.push_back(fmt::format("{{\"index\":{},\"delta\":{{{}}},\"logprobs\":{},\"finish_reason\":{}}}", i, delta, logprobs, reason));
    };
    if (!w.begun) part("\"role\":\"assistant\",\"content\":\"\"", "null", "null");
    w.begun = true;
    // w.text counts reasoning, w.offset content that was written.
    std::string reasoning, content, delta;
    split(s.text, s.ended, &reasoning, &content);
    if (reasoning.size() > w.text) delta = fmt::format("\"reasoning_content\":{}", json_string(std::string_view(reasoning).substr(w.text)));
    if (content.size() > w.offset) delta += fmt::format("{}\"content\":{}", delta.empty() ? "" : ",", json_string(std::string_view(content).substr(w.offset)));
    if (!delta.empty() || (logprobs_ && s.log.tokens.size() > w.tokens)) part(delta, logprobs(s, w.tokens), "null");
    w.text = reasoning.size();
    w.offset = content.size();
    w.tokens = s.log.tokens.size();
    if (s.ended) part("", "null", json_string(finish_name(s)));
    return out;
  }

 private:
  // Of a text that may go on: what may be the beginning of the end mark is in neither part yet.
  void split(const std::string& text, bool ended, std::string* reasoning, std::string* content) const {
    if (mode_ == ChatMode::chat) {
      *content = text;
      return;
    }
    const size_t at = text.find(kEndThink);
    if (at != std::string::npos) {
      *reasoning = text.substr(0, at);
      *content = text.substr(at + kEndThink.size());
      return;
    }
    size_t held = 0;
    for (size_t n = std::min(kEndThink.size() - 1, text.size()); !ended && n > 0 && held == 0; --n)
      if (text.ends_with(kEndThink.substr(0, n))) held = n;
    *reasoning = text.substr(0, text.size() - held);
  }
  std::string logprobs(const Job::Sample& s, size_t first) const {
    if (!logprobs_) return "null";
    std::string out;
    for (size_t t = first; t < s.log.tokens.size(); ++t) {
      const std::string text = token_text(tokenizer_, s.log.tokens[t]);
      std::string bytes;
      for (const char c : text) bytes += fmt::format("{}{}", bytes.empty() ? "" : ",", static_cast<unsigned char>(c));
      out += fmt::format("{}{{\"token\":{},\"logprob\":{},\"bytes\":[{}],\"top_logprobs\":[]}}", t > first ? "," : "", json_string(text), json_number(s.log.logprobs[t]), bytes);
    }
    return fmt::format("{{\"content\":[{}],\"refusal\":null}}", out);
  }

  const ChatMode mode_;
};

bool include_usage(Fields& f) {
  const JsonValue* options = f.find("stream_options");
  return options != nullptr && Fields(*options).boolean("include_usage", false);
}

// OpenAI's content parts to the text that they are.
void join_text_parts(JsonValue& messages) {
  for (JsonValue& message : messages.items) {
    for (JsonMember& m : message.members) {
      if (m.name != "content" || !m.value.is(Kind::array)) continue;
      JsonValue joined;
      joined.kind = Kind::string;
      bool texts = true;
      for (const JsonValue& part : m.value.items) {
        const JsonValue* text = part.is(Kind::object) ? part.find("text") : nullptr;
        texts = texts && text != nullptr && text->is(Kind::string);
        if (texts) joined.text += text->text;
      }
      if (texts) m.value = joined;  // otherwise encode_chat says what is wrong
    }
  }
}

// The request's tools belong to the first system message, which is made if there is none.
void place_tools(JsonValue& messages, const JsonValue& tools) {
  const bool has_system = !messages.items.empty() && messages.items[0].find("role") != nullptr && messages.items[0].find("role")->text == "system";
  if (!has_system) {
    JsonValue system, role, content;
    role.kind = content.kind = Kind::string;
    role.text = "system";
    system.kind = Kind::object;
    system.members = {{"role", role}, {"content", content}};
    messages.items.insert(messages.items.begin(), system);
  }
  messages.items[0].members.push_back({"tools", tools});
}

}  // namespace

bool read_completions(const JsonValue& body, const ServedModel& model, Call* call, ApiError* error) {
  Fields f(body);
  if (!f.failed() && !read_model(f, model, error)) return false;
  const JsonValue* prompt = f.find("prompt");
  if (prompt == nullptr) {
    f.fail("prompt", "prompt is missing");
  } else {
    add_prompts(f, "prompt", *prompt, *model.tokenizer, true, true, &call->requests);
  }
  read_sampling(f, model, f.integer("max_tokens", 16, 1, INT32_MAX), call);
  const int64_t logprobs = f.find("logprobs") == nullptr ? -1 : f.integer("logprobs", 0, 0, 1);
  std::vector<std::string> echo;
  if (f.boolean("echo", false)) {
    if (logprobs >= 0) f.fail("echo", "echo with logprobs is not supported: a prompt's log-probabilities are not computed");
    for (const Request& r : call->requests) echo.push_back(model.tokenizer->decode(r.prompt));
  }
  call->reply = std::make_unique<CompletionReply>(model, logprobs >= 0, include_usage(f), std::move(echo));
  if (f.failed()) *error = f.error();
  return !f.failed();
}

bool read_chat_completions(const JsonValue& body, const ServedModel& model, Call* call, ApiError* error) {
  Fields f(body);
  if (!f.failed() && !read_model(f, model, error)) return false;
  constexpr ChatMode kFallback = ChatMode::chat;
  ChatMode mode = kFallback;
  const JsonValue* given = f.find("messages");
  const JsonValue* tools = f.find("tools");
  if (given == nullptr) {
    f.fail("messages", "messages is missing");
  } else if (const Result<ChatOptions> options = read_chat_options(body, &kFallback); !options) {
    f.fail("thinking_mode", options.message());
  } else {
    mode = options.value().mode;
    JsonValue messages = *given;
    join_text_parts(messages);
    if (tools != nullptr && messages.is(Kind::array)) place_tools(messages, *tools);
    const Result<std::string> text = encode_chat(messages, options.value());
    JsonValue prompt;
    prompt.kind = Kind::string;
    if (text) prompt.text = text.value();
    if (!text) {
      f.fail("messages", text.message());
    } else {
      add_prompts(f, "messages", prompt, *model.tokenizer, true, false, &call->requests);
    }
  }
  read_sampling(f, model, f.integer("max_completion_tokens", f.integer("max_tokens", -1, 1, INT32_MAX), 1, INT32_MAX), call);
  call->options.special = SpecialTokens::show;  // the format's own marks are read back
  const bool logprobs = f.boolean("logprobs", false);
  f.refuse("top_logprobs", "only the drawn token's log-probability is kept");
  f.refuse("functions", "it was replaced by tools");
  if (tools != nullptr && call->options.stream) f.fail("tools", "tools with stream are not supported: calls are read from the whole answer");
  if (const JsonValue* format = f.find("response_format"); format != nullptr && Fields(*format).text("type", "text") != "text")
    f.fail("response_format", "response_format is not supported: the answer's form is not constrained");
  call->reply = std::make_unique<ChatReply>(model, logprobs, include_usage(f), mode);
  if (f.failed()) *error = f.error();
  return !f.failed();
}

}  // namespace lockstep
