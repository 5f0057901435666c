// SGLang's /generate. docs/serve.md lists what differs.

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "serve/api.h"

namespace lockstep {

using Kind = JsonValue::Kind;

namespace {

class GenerateReply : public Reply {
 public:
  GenerateReply(std::string name, std::string weight_version, bool logprobs, bool list)
      : name_(std::move(name)), weight_version_(std::move(weight_version)), logprobs_(logprobs), list_(list) {}

  std::string whole(const Job& job) override {
    std::string out;
    job.look([&](size_t i, const Job::Sample& s) { out.append(i > 0 ? "," : "").append(answer(job, i, s, false)); });
    return list_ ? fmt::format("[{}]", out) : out;
  }
  // Every event has all that was said so far.
  std::string events(const Job& job) override {
    std::string out;
    bool all = true;
    job.look([&](size_t i, const Job::Sample& s) {
      if (written_.size() <= i) written_.resize(i + 1);
      all = all && s.ended;
      const std::pair<size_t, bool> now{s.log.tokens.size(), s.ended};
      if (written_[i] == now) return;
      written_[i] = now;
      out += sse(answer(job, i, s, list_));
    });
    if (all) out += kSseEnd;
    return out;
  }

 private:
  std::string answer(const Job& job, size_t i, const Job::Sample& s, bool index) const {
    const Request& r = job.requests()[i / static_cast<size_t>(job.requests()[0].num_samples)];
    std::string reason = "null";
    if (s.ended && s.reason == FinishReason::stop)
      reason = fmt::format("{{\"type\":\"stop\",\"matched\":{}}}", s.matched.empty() ? std::to_string(s.log.tokens.back()) : json_string(s.matched));
    if (s.ended && s.reason == FinishReason::length) reason = fmt::format("{{\"type\":\"length\",\"length\":{}}}", s.log.tokens.size());
    if (s.ended && s.reason == FinishReason::abort) reason = "{\"type\":\"abort\",\"message\":\"aborted\"}";
    std::string logprobs;
    if (logprobs_) {
      for (size_t t = 0; t < s.log.tokens.size(); ++t)
        logprobs += fmt::format("{}[{},{},null]", t > 0 ? "," : "", json_number(s.log.logprobs[t]), s.log.tokens[t]);
      logprobs = fmt::format(",\"input_token_logprobs\":[],\"output_token_logprobs\":[{}]", logprobs);
    }
    const std::string meta =
        fmt::format("{{\"id\":{},\"finish_reason\":{},\"prompt_tokens\":{},\"completion_tokens\":{},\"weight_version\":{},\"output_token_versions\":[{}],\"e2e_latency\":{:.6f}{}}}",
                    json_string(name_), reason, r.prompt.size(), s.log.tokens.size(), json_string(weight_version_), fmt::join(s.log.versions, ","),
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count(), logprobs);
    return fmt::format("{{{}\"text\":{},\"output_ids\":[{}],\"meta_info\":{}}}", index ? fmt::format("\"index\":{},", i) : "", json_string(s.text),
                       fmt::join(s.log.tokens, ","), meta);
  }

  const std::string name_, weight_version_;
  const bool logprobs_, list_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::vector<std::pair<size_t, bool>> written_;
};

}  // namespace

bool read_generate(const JsonValue& body, const ServedModel& model, const std::string& weight_version, Call* call, ApiError* error) {
  Fields f(body);
  const JsonValue* text = f.find("text");
  const JsonValue* input_ids = f.find("input_ids");
  const JsonValue* prompts = text != nullptr ? text : input_ids;
  if ((text == nullptr) == (input_ids == nullptr)) {
    f.fail("text", "wanted: either text or input_ids");
  } else {
    add_prompts(f, text != nullptr ? "text" : "input_ids", *prompts, *model.tokenizer, text != nullptr, text == nullptr, &call->requests);
  }

  const JsonValue none{.kind = Kind::object, .text = {}, .items = {}, .members = {}};
  const JsonValue* given = f.find("sampling_params");
  Fields p(given == nullptr ? none : *given);
  SamplingOptions s;
  s.max_new_tokens = p.integer("max_new_tokens", 128, 1, INT32_MAX);
  s.min_new_tokens = p.integer("min_new_tokens", 0, 0, INT32_MAX);
  s.temperature = p.number("temperature", 1, 0, 100);
  s.top_p = p.number("top_p", 1, 0, 1);
  s.min_p = p.number("min_p", 0, 0, 1);
  s.top_k = static_cast<int32_t>(p.integer("top_k", -1, -1, INT32_MAX));
  if (model.tokenizer->eos_id() >= 0 && !p.boolean("ignore_eos", false)) s.stop_ids.push_back(model.tokenizer->eos_id());
  if (const JsonValue* ids = p.find("stop_token_ids"))
    for (const int32_t id : p.ids(*ids, "stop_token_ids")) s.stop_ids.push_back(id);
  call->options.stops = p.texts("stop");
  call->options.special = p.boolean("skip_special_tokens", true) ? SpecialTokens::hide : SpecialTokens::show;
  const int32_t n = static_cast<int32_t>(p.integer("n", 1, 1, 1024));
  const uint64_t seed = p.find("sampling_seed") == nullptr ? random_seed() : static_cast<uint64_t>(p.integer("sampling_seed", 0, INT64_MIN, INT64_MAX));
  for (const char* name : {"frequency_penalty", "presence_penalty", "logit_bias"}) p.refuse(name, "it would not be the distribution that is trained");
  for (const char* name : {"regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "no_stop_trim"}) p.refuse(name, "it is not built");
  if (p.number("repetition_penalty", 1, 0, 100) != 1) p.fail("repetition_penalty", "repetition_penalty is not supported: it would not be the distribution that is trained");
  for (Request& r : call->requests) {
    r.num_samples = n;
    r.seed = seed;
    r.sampling = s;
  }

  call->options.stream = f.boolean("stream", false);
  call->options.name = f.text("rid", "");
  if (call->options.name.empty()) call->options.name = random_name("");
  const bool logprobs = f.boolean("return_logprob", false);
  if (f.integer("logprob_start_len", -1, -1, INT32_MAX) >= 0) f.fail("logprob_start_len", "logprob_start_len is not supported: a prompt's log-probabilities are not computed");
  f.refuse("top_logprobs_num", "only the drawn token's log-probability is kept");
  for (const char* name : {"image_data", "input_embeds", "lora_path", "return_hidden_states", "token_ids_logprob"}) f.refuse(name, "it is not built");
  const bool list = n > 1 || prompts == nullptr || (prompts->is(Kind::array) && !prompts->items.empty() && !prompts->items[0].is(Kind::number));
  call->reply = std::make_unique<GenerateReply>(call->options.name, weight_version, logprobs, list);
  if (f.failed() || p.failed()) *error = f.failed() ? f.error() : p.error();
  return !f.failed() && !p.failed();
}

}  // namespace lockstep
