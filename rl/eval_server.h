#pragma once
// Answers from a server that speaks the OpenAI protocol (vLLM, SGLang, llama.cpp, a hosted model): POST to .../chat/completions or
// .../completions, one sample a request, so that what finished is kept whatever happens next. What may pass (no connection, no answer in time, 408, 429, 5xx) is
// tried again with growing pauses; another refusal, or a request that stays unanswered, ends the work, and what was sampled is in the log.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rl/eval_samples.h"
#include "rl/evaluate.h"
#include "rl/hooks.h"

namespace lockstep {

struct ServerOptions {
  std::string url;          // http://HOST:PORT or with a path, to which /chat/completions is added; without a path: /v1
  std::string model;        // its name there
  std::string key = {};     // sent as a bearer token; empty: none
  bool chat = true;         // messages to chat/completions, else text to completions
  std::string thinking = {};  // "true" or "false": sent as chat_template_kwargs.thinking, which some servers refuse; empty: nothing
  int64_t concurrency = 16;
  int64_t retries = 5;
  float deadline_s = 600;   // of one whole answer
};

// An address that cannot be used, before anything is asked.
Status check_server(const ServerOptions& options);

// As sample_answers(). `problems` come from load_problems(). Each request has a seed of its own, a pure function of (eval seed, problem, sample);
// whether the same seed gives the same words is the server's affair.
Result<std::vector<EvalSample>> sample_server(const ServerOptions& server, std::span<const Prompt> problems, const EvalOptions& options, const Hooks& hooks,
                                              SampleLog* log);

}  // namespace lockstep
