#pragma once
// What a model costs: parameters, operations and bytes, counted from the same table and shapes that the program allocates by. Pure
// arithmetic, for stage balance, `lockstep plan` and memory checks. A multiply-add counts as two operations. Source: V4 spec 9.

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/weights.h"

namespace lockstep {

// Numbers of the tensors that `table` holds; hash tables are not parameters.
int64_t count_parameters(const std::vector<TensorSpec>& table);
// One draft (MTP) block, which checkpoints carry and this program does not run: V4 spec 2.10.
int64_t draft_block_parameters(const ModelConfig& config);
// Parameters that work on one token: everything but the embedding table, with K of the E experts of each layer.
int64_t active_parameters(const ModelConfig& config);

// Operations of the forward of one sequence of `length` tokens from position 0, in `layers` of the model, without embedding and head.
double layers_forward_flops(const ModelConfig& config, const Range& layers, int64_t length);
// The same of the final site and the head, per row whose log-probability is wanted.
double head_forward_flops(const ModelConfig& config);
// Operations of decoding one token with n positions visible, whole model.
double decode_flops(const ModelConfig& config, int64_t n);

// Bytes of the weights that forward reads (rows; panels are the CPU's own copy of them).
int64_t weight_bytes(const std::vector<TensorSpec>& table, Numerics numerics);
int64_t panel_bytes(const std::vector<TensorSpec>& table, Numerics numerics);

// Of them (`panels`: of the CPU's copy), what decoding one token each of `batch` sequences reads: each matrix once, as many experts as chance has the tokens choose,
// of tables a row a token, which is left out.
double decode_weight_bytes(const ModelConfig& config, const std::vector<TensorSpec>& table, Numerics numerics, int64_t batch, bool panels);

// Bytes that forward keeps for backward: what the arena reaches, whose pieces are rounded up to its alignment.
struct KeptCall {
  std::vector<int64_t> sequences;    // tokens of each, from position 0
  int64_t wanted = -1;               // rows of a list; -1: all rows, without one
  int ep = 1;                        // ranks that experts are spread over
  std::vector<int64_t> expert_rows;  // by layer of the model: rows that come to this rank's experts; unused for ep 1, where they are the tokens' own
  bool recompute = false;
};
int64_t kept_activation_bytes(const ModelConfig& config, Numerics numerics, const Shard& shard, const KeptCall& call);
// Of them, what grows with the rows that a rank's experts meet, for n rows of one layer.
int64_t kept_expert_row_bytes(const ModelConfig& config, Numerics numerics, int ep, int64_t n);

// Forward operations of what a rank holds, for its own `tokens` in sequences of `length`, `wanted` rows of them in the head, and `expert_rows` a
// layer in its experts. Of tensors that tp cuts its part; the indexer's choice by its share of the rows.
double shard_forward_flops(const ModelConfig& config, const Shard& shard, int64_t tokens, int64_t length, int64_t wanted, double expert_rows);
// Bytes of sequence state that decoding one token with n positions visible reads, all layers.
double decode_state_bytes(const ModelConfig& config, Numerics numerics, int64_t n);

// For balance_layers: forward operations per token at `length`.
StageCosts stage_costs(const ModelConfig& config, int64_t length);

}  // namespace lockstep
