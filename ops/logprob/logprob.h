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
//
// A vocabulary that ranks share. Each holds whole chunks, `part`, and does these steps on its own logits, whose results go to
// everyone in between; what comes out has select_logprob's bits, whose arithmetic this is.
//   logprob_partials: partials [R, 3 C] f32 of logits [R, n] f32: for each of the part's C chunks max, sum, and y of the target
//     if the chunk has it, else 0
//   logprob_merge:    logprob, lse (may be empty) from the partials [R, 3 C] of all chunks, in order
//   entropy_partials: means [R, C] f32, E[y] of each of the part's chunks
//   entropy_merge:    entropy from the means [R, C] of all chunks
// select_logprob_backward takes a part too: head and dhead_accum are its rows, dhidden its share of the sum over the vocabulary.
//
// Row contract holds for all forward outputs. Scratch: min(R, kLogprobRowBlock, on the GPU kLogprobRowBlockGpu) * V f32 and matmul's.
// On the GPU vectors are contiguous, and ids and temperatures are not checked.
// Source: rl spec 3.5, 11; design "log-softmax" row.

#include "core/context.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

inline constexpr int64_t kVocabChunks = 64;
inline constexpr int64_t vocab_chunk(int64_t vocab) { return (vocab + kVocabChunks - 1) / kVocabChunks; }  // ids a chunk
inline constexpr int64_t vocab_chunks(int64_t vocab) {  // that have ids
  return vocab == 0 ? 0 : (vocab + vocab_chunk(vocab) - 1) / vocab_chunk(vocab);
}
inline constexpr int64_t kLogprobRowBlock = 256, kLogprobRowBlockGpu = 1024;
inline constexpr int64_t kChunkPartials = 3;  // max, sum, y of the target

// The ids from `first` on, as many as there are logits or head rows, of `vocab`. vocab == 0: those are all.
struct VocabPart {
  int64_t first = 0;
  int64_t vocab = 0;
};

struct RowStats {
  float max = 0;  // of y
  float lse = 0;  // of y
};
// Statistics of one row of logits; the sampler calls exactly this. logits [V] f32.
RowStats row_stats(const float* logits, int64_t vocab, float temperature);
namespace device {
// Of every row, on the GPU: max, lse [R] f32 of logits [R, V] f32 with temperature [R] f32.
void row_stats(Context& c, TensorView max, TensorView lse, ConstTensorView logits, ConstTensorView temperature);
}  // namespace device

void select_logprob(Context& c, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                    const WeightView& head, ConstTensorView target, ConstTensorView temperature);
void select_logprob_backward(Context& c, TensorView dhidden, TensorView dhead_accum, ConstTensorView dlogprob,
                             ConstTensorView dentropy, ConstTensorView hidden, const WeightView& head,
                             ConstTensorView target, ConstTensorView temperature, ConstTensorView lse,
                             ConstTensorView entropy, VocabPart part = {});

void logprob_partials(Context& c, TensorView partials, ConstTensorView logits, ConstTensorView target,
                      ConstTensorView temperature, VocabPart part);
void logprob_merge(Context& c, TensorView logprob, TensorView lse, ConstTensorView partials, ConstTensorView target,
                   int64_t vocab);
void entropy_partials(Context& c, TensorView means, ConstTensorView logits, ConstTensorView temperature, ConstTensorView lse,
                      VocabPart part);
void entropy_merge(Context& c, TensorView entropy, ConstTensorView means, ConstTensorView lse);

}  // namespace lockstep
