#pragma once
// The CPU side of logprob: kernels over one row of logits; logprob.cc makes the logits and walks the rows. device: kernels over rows of logits on the GPU,
// logprob_gpu.cu. Same bits.

#include "ops/logprob/logprob.h"

namespace lockstep {

// lse - (mean_0 + mean_1 + ...), in order from zero.
inline float merge_means(const float* mean, int64_t chunks, float lse) {
  float sum = 0.0f;
  for (int64_t k = 0; k < chunks; ++k) sum += mean[k];
  return lse - sum;
}

namespace reference {
// Of `count` logits, chunks of `chunk` ids: (max, sum) of each; of the whole row from all of them, in order; E[y] of each.
void chunk_stats(float* max, float* sum, const float* logits, int64_t count, int64_t chunk, float temperature);
RowStats merge_stats(const float* max, const float* sum, int64_t chunks);
void chunk_means(float* mean, const float* logits, int64_t count, int64_t chunk, float temperature, float lse);
RowStats row_stats(const float* logits, int64_t vocab, float temperature);
float row_entropy(const float* logits, int64_t vocab, float temperature, float lse);

// The gradients and statistics of one row.
struct RowGradient {
  int64_t target = 0;  // place among the row's logits; outside of them: another rank's
  float temperature = 1, lse = 0, entropy = 0, dlogprob = 0, dentropy = 0;
};
void row_backward(float* logits, int64_t count, const RowGradient& g);  // logits become dlogits
float dlogit(float logit, bool is_target, const RowGradient& g);        // one element of it
}  // namespace reference

namespace simd {
void chunk_stats(float* max, float* sum, const float* logits, int64_t count, int64_t chunk, float temperature);
RowStats merge_stats(const float* max, const float* sum, int64_t chunks);
void chunk_means(float* mean, const float* logits, int64_t count, int64_t chunk, float temperature, float lse);
RowStats row_stats(const float* logits, int64_t vocab, float temperature);
float row_entropy(const float* logits, int64_t vocab, float temperature, float lse);
void row_backward(float* logits, int64_t count, const reference::RowGradient& g);
}  // namespace simd

namespace device {
void select_logprob(Context& c, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView logits, ConstTensorView target,
                    ConstTensorView temperature);
// logits become dlogits; they begin at id `first`.
void row_backward(Context& c, TensorView logits, ConstTensorView dlogprob, ConstTensorView dentropy, ConstTensorView target, ConstTensorView temperature,
                  ConstTensorView lse, ConstTensorView entropy, int64_t first);
void logprob_partials(Context& c, TensorView partials, ConstTensorView logits, ConstTensorView target, ConstTensorView temperature, VocabPart part);
void logprob_merge(Context& c, TensorView logprob, TensorView lse, ConstTensorView partials, ConstTensorView target, int64_t vocab);
void entropy_partials(Context& c, TensorView means, ConstTensorView logits, ConstTensorView temperature, ConstTensorView lse, VocabPart part);
void entropy_merge(Context& c, TensorView entropy, ConstTensorView means, ConstTensorView lse);
}  // namespace device

}  // namespace lockstep
