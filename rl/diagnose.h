#pragma once
// Where two runs of the forward over one sequence first differ. An exact run calls this when a log-prob that training computed is
// not, bit for bit, the one that the sampler recorded.

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/stack.h"
#include "train/actor.h"

namespace lockstep {

// Everything the model's probe saw, one row a token, in the order of the forward pass; then the log-prob of each next token.
struct Trace {
  struct Point {
    int layer = -1;
    std::string name;
    DType dtype = DType::f32;
    size_t row_bytes = 0;
    std::vector<std::byte> rows;
  };
  std::vector<Point> points;
  std::vector<float> logprobs;  // [T - 1]
};

// Runs tokens[0 .. T-1) in pieces of `chunk` tokens through sequence state, as a sampler does; chunk 0: in one packed call
// without state kept, as training does. Allocates; not for the steady state.
Trace trace_sequence(Context& c, const Model& model, std::span<const int32_t> tokens, int64_t chunk, float temperature);

struct Difference {
  bool found = false;
  int layer = -1;
  std::string point;    // "logprob" when all hidden rows agree
  int64_t row = 0;      // position in the sequence
  int64_t element = 0;  // within the row
  double a = 0, b = 0;
  std::string str() const;
};
// The first point in the order of the forward pass with a differing row, and there the first row. Rows depend only on earlier
// points and rows, so this is where the difference was born.
Difference first_difference(const Trace& a, const Trace& b);

// A sampled token whose two log-probs differ.
struct Mismatch {
  int64_t sample_index = 0;
  std::span<const int32_t> tokens;  // prompt, then response
  int64_t prompt_length = 0;
  int64_t response_token = 0;  // first that differs
  float temperature = 1;
  float rollout_logprob = 0, train_logprob = 0;
};

// Every trained token's log-prob as the sampler recorded it against the one that the trainer's forward gave, bit for bit. seen[i]
// belongs to samples[i]; a token with mask 0 is not compared.
struct Comparison {
  int64_t num_tokens = 0;         // compared
  int64_t different = 0;          // of them
  double max_gap = 0;             // largest |trainer - sampler|; NaN if one of them is
  std::optional<Mismatch> first;  // in order of samples, then tokens; its spans borrow from `samples`
};
Comparison compare_logprobs(std::span<const TrainSample> samples, std::span<const TokenLogprobs> seen);

// The sentence that stops the run.
std::string diagnose_difference(Context& c, const Model& model, const Mismatch& mismatch);

}  // namespace lockstep
