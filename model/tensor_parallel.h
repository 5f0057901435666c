#pragma once
// What the ranks of a tp group do together inside the model, and how much they move. Used by embedding.cc, attention_layer.cc, head.cc.
//
// Held by one rank each: query heads, by output group, with their sinks, output projections and their gradients; vocabulary rows of
// embedding and head. Everything else (hyper-connections, norms, wq_a, wkv, compressors, indexer, router, experts) is replicated:
// all ranks compute it from the same bits to the same bits, its gradient included, which is therefore counted once, not summed over tp.
//
//   name                      where                  what moves
//   tp embedding              forward, first stage   rows of own tokens to everyone
//   tp entries                forward, csa layer     chosen entries of a share of the tokens to everyone; each rank chooses for its share
//   tp attention output       forward, every layer   f32 partial sums of own output groups to the row's owner; rounded rows to everyone
//   tp attention gradient     backward, every layer  sums over heads: gradients of qr, kv and entries, one all_reduce
//   tp logits                 sampler                logits of own vocabulary to everyone
//   tp logprob                forward, head          (max, sum, y of the target), then E[y], of own chunks to everyone
//   tp logprob gradient       backward, head         sums over the vocabulary: gradient of the hidden rows, one all_reduce
//
// Forward results are those of one rank alone, bit for bit: rows are copied, and sums are formed in the order of groups and chunks.
// Backward sums are formed in rank order: equal bits on all ranks and in every run, within f32 rounding of another tp.

#include <span>

#include "model/stack.h"

namespace lockstep {

inline constexpr const char* kTpEmbedding = "tp embedding";
inline constexpr const char* kTpEntries = "tp entries";
inline constexpr const char* kTpAttentionOutput = "tp attention output";
inline constexpr const char* kTpAttentionGradient = "tp attention gradient";
inline constexpr const char* kTpLogits = "tp logits";
inline constexpr const char* kTpLogprob = "tp logprob";
inline constexpr const char* kTpLogprobGradient = "tp logprob gradient";

// The group that shares the model's heads and vocabulary; null where this rank holds all of them.
RankGroup* tp_group(const Model& model);
// Ids of the vocabulary that rank `index` of `size` holds, and their chunks.
Range tp_vocabulary(const ModelConfig& m, int size, int index);
Range tp_chunks(const ModelConfig& m, int size, int index);

// y [T, D] f32 | bf16 = round(((0 + P_0) + P_1) + ...), P_i = (columns of group i of a) . (those of wo_b)^T, over the groups of all ranks in
// order: matmul with k_segment over the whole a and wo_b, of which this rank has the columns of its groups, [T, G * o_rank] and
// [D, G * o_rank]. Scratch: two blocks of at most kTpOutputScratchBytes (or one row a rank), and matmul's.
inline constexpr int64_t kTpOutputScratchBytes = int64_t{16} << 20;
void tp_output_projection(Context& c, RankGroup& tp, TensorView y, ConstTensorView a, const WeightView& wo_b, int64_t o_rank);

// y [R, W] f32 from everyone's x [R, columns of that rank], side by side in rank order; columns add up to W. Scratch: R * W.
void tp_gather_columns(Context& c, RankGroup& tp, TensorView y, ConstTensorView x, std::span<const int64_t> columns, Purpose p);

// Bytes that rank `rank` of a tp group of `size` ranks moves in one call of the model with T tokens (R wanted rows): what
// RankWorld::traffic() counts under the names above. Zero for size 1.
CommBytes tp_embedding_bytes(const ModelConfig& m, DType dtype, std::span<const int64_t> tokens, int rank);  // tokens that each rank holds
CommBytes tp_entries_bytes(const ModelConfig& m, int64_t ratio, int64_t T, int size, int rank);             // a csa layer
CommBytes tp_attention_output_bytes(const ModelConfig& m, DType dtype, int64_t T, int size, int rank);      // a layer
int64_t tp_attention_output_calls(const ModelConfig& m, int64_t T, int size);                                // of the group, in that layer
CommBytes tp_attention_gradient_bytes(const ModelConfig& m, int64_t T, int64_t entries, int size, int rank);  // a layer that completes `entries`
CommBytes tp_logits_bytes(const ModelConfig& m, int64_t R, int size, int rank);
CommBytes tp_logprob_bytes(const ModelConfig& m, int64_t R, bool entropy, int size, int rank);
CommBytes tp_logprob_gradient_bytes(const ModelConfig& m, int64_t R, int size, int rank);

}  // namespace lockstep
