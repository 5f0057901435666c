#pragma once
// The CPU side of logprob: kernels over one row of logits; logprob.cc makes the logits and walks the rows.

#include "ops/logprob/logprob.h"

namespace lockstep {

namespace reference {
RowStats row_stats(const float* logits, int64_t vocab, float temperature);
float row_entropy(const float* logits, int64_t vocab, float temperature, float lse);

// The gradients and statistics of one row.
struct RowGradient {
  int32_t target = 0;
  float temperature = 1, lse = 0, entropy = 0, dlogprob = 0, dentropy = 0;
};
void row_backward(float* logits, int64_t vocab, const RowGradient& g);  // logits become dlogits
float dlogit(float logit, bool is_target, const RowGradient& g);        // one element of it
}  // namespace reference

namespace simd {
RowStats row_stats(const float* logits, int64_t vocab, float temperature);
float row_entropy(const float* logits, int64_t vocab, float temperature, float lse);
void row_backward(float* logits, int64_t vocab, const reference::RowGradient& g);
}  // namespace simd


}  // namespace lockstep
