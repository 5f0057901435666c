#pragma once
// What a model costs: parameters, operations and bytes, counted from the same table and shapes that the program allocates by. Pure
// arithmetic, for stage balance, `lockstep plan` and memory checks. A multiply-add counts as two operations. Source: V4 spec 9.

#include <cstdint>

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

// Bytes that forward keeps for backward, of T packed tokens in `sequences` equal sequences with all rows wanted; what the arena reaches
// (pieces are rounded up to its alignment). One rank without tp and ep.
int64_t kept_activation_bytes(const ModelConfig& config, Numerics numerics, const Shard& shard, int64_t T, int64_t sequences, bool recompute);

// For balance_layers: forward operations per token at `length`.
StageCosts stage_costs(const ModelConfig& config, int64_t length);

}  // namespace lockstep
