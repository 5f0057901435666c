#pragma once
// What the engine takes and gives. Belongs to this room alone; rl/ converts.

#include <cstdint>
#include <utility>
#include <vector>

#include "model/choices.h"

namespace lockstep {

struct SamplingOptions {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  int32_t top_k = 0;         // <= 0: off
  int64_t max_new_tokens = 64;
  int64_t min_new_tokens = 0;      // stop ids are not drawn before this many tokens (needs at most one stop id)
  std::vector<int32_t> stop_ids;   // usually the eos id; the stop token is part of the response
};

// What a sample has said so far.
struct TokenLog {
  std::vector<int32_t> tokens;    // the stop token included
  std::vector<float> logprobs;    // log of the probability each token was drawn with
  std::vector<int32_t> versions;  // policy version of each token
};

// n samples of one prompt. They share the prompt's prefill.
struct Request {
  uint64_t tag = 0;                  // the caller's name for it, in completions too; says nothing about what is drawn
  uint64_t prompt_id = 0;            // names the prompt in the run: keys the random numbers
  std::vector<int32_t> prompt;       // token ids, at least one
  int32_t num_samples = 1;
  int32_t first_sample = 0;          // sample indices first_sample .. first_sample + num_samples - 1
  uint64_t seed = 0;
  SamplingOptions sampling;
  // What the sample said before it was interrupted, by which it continues as if it had not been (one sample only; max_new_tokens counts from
  // the prompt, and no token of it ends the sample).
  TokenLog log = {};
  ReplayKind record = ReplayKind::none;  // choices that completions tell
  // How long a response is thought to become. Of the requests that wait the longest goes first, among equals the first in; says nothing about what is drawn.
  int64_t expected_tokens = 0;
};

enum class FinishReason : uint8_t { stop, length, abort };
const char* finish_reason_name(FinishReason reason);

// Example: prompt_id 7, sample_idx 3, tokens {12, 9, 1}, logprobs {-0.2, -1.1, -0.01}, versions {4, 4, 4}, reason stop.
struct Completion {
  uint64_t tag = 0;
  uint64_t prompt_id = 0;
  int32_t sample_idx = 0;
  std::vector<int32_t> tokens;    // response, the stop token included
  std::vector<float> logprobs;    // log of the probability each token was drawn with
  std::vector<int32_t> versions;  // policy version of each token
  FinishReason reason = FinishReason::length;
  ChoiceLog choices = {};  // Request::record: of the rows that were run, which are prompt and response but its last token
};

// Where a completion stands among those of a run.
inline std::pair<uint64_t, int32_t> place_of(const Completion& c) { return {c.prompt_id, c.sample_idx}; }
inline bool by_prompt_and_sample(const Completion& a, const Completion& b) { return place_of(a) < place_of(b); }

// One token as it is drawn.
struct Drawn {
  uint64_t tag = 0;
  int32_t sample_idx = 0;
  int32_t token = 0;
  float logprob = 0;
  int32_t version = 0;
};

}  // namespace lockstep
