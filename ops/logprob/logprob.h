#pragma once
// Log-probabilities over the vocabulary, for the loss and for the sampler: one arithmetic, one file.
//
// y_v = logits_v / temperature (IEEE division). The vocabulary is cut into kVocabChunks chunks of ceil(V / kVocabChunks) ids;
// each gives (max, sum of exp_f32(y - max) by the 16-lane tree over the chunk). Chunks merge left to right, trailing empty ones
// left out:
//   M = max(M, m);  S = S * exp_f32(M_old - M) + s * exp_f32(m - M).   lse = M + log_f32(S);  logprob_a = y_a - lse.
// entropy = lse - E[y]; E[y] = sum_v exp_f32(y_v - lse) * y_v, by the tree (fused in each lane) in each chunk, chunks added in
// order.
// Logits are finite; a NaN or +inf among them makes lse NaN.
//
// select_logprob: logits = hidden . head^T (matmul's chain, f32, never rounded), taken in row blocks; logits are not kept.
//   hidden [R, D] f32 | bf16;  head [V, D] f32 | bf16;  target [R] i32 in [0, V);  temperature [R] f32 > 0
//   logprob, lse, entropy [R] f32 (lse and entropy may be empty)
// select_logprob_backward: logits are recomputed. dlogprob [R] f32; dentropy [R] f32 or empty.
//   dy_v = dlogprob * (1[v = a] - p_v) - dentropy * p_v * (y_v - lse + entropy);  dlogits = dy / temperature
//   dhidden [R, D] f32 written; dhead_accum [V, D] f32 (row blocks in ascending order; empty: not wanted). lse, entropy as
//   returned. Every operation on a logit is rounded to f32, left to right.
// Row contract holds for all forward outputs. Scratch: min(R, kLogprobRowBlock) * V f32 and matmul's.
// Source: rl spec 3.5, 11; design "log-softmax" row.

#include "core/context.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

inline constexpr int64_t kVocabChunks = 64;
inline constexpr int64_t vocab_chunk(int64_t vocab) { return (vocab + kVocabChunks - 1) / kVocabChunks; }  // ids a chunk
inline constexpr int64_t kLogprobRowBlock = 256;

struct RowStats {
  float max = 0;  // of y
  float lse = 0;  // of y
};
// Statistics of one row of logits; the sampler calls exactly this. logits [V] f32.
RowStats row_stats(const float* logits, int64_t vocab, float temperature);

void select_logprob(Context& c, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                    const WeightView& head, ConstTensorView target, ConstTensorView temperature);
void select_logprob_backward(Context& c, TensorView dhidden, TensorView dhead_accum, ConstTensorView dlogprob,
                             ConstTensorView dentropy, ConstTensorView hidden, const WeightView& head,
                             ConstTensorView target, ConstTensorView temperature, ConstTensorView lse,
                             ConstTensorView entropy);

}  // namespace lockstep
