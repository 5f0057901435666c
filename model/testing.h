#pragma once
// The model that tests of the rooms above run: a layer of every kind, as small as its parts allow.

#include "model/config.h"
#include "model/shard.h"

namespace lockstep::testing {

inline ModelConfig tiny_config() {
  ModelConfig m;
  m.vocab_size = 40;
  m.hidden_size = 32;
  m.num_heads = 4;
  m.head_dim = 16;
  m.rope_dim = 8;
  m.q_rank = 16;
  m.o_groups = 2;
  m.o_rank = 16;
  m.window = 5;
  m.index_heads = 2;
  m.index_head_dim = 16;
  m.index_topk = 2;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_dim = 16;
  m.swiglu_limit = 10.0f;
  m.sinkhorn_iters = 4;
  m.max_positions = 64;
  m.initializer_range = 0.1f;
  m.layers = {{AttentionKind::swa, 0, true}, {AttentionKind::csa, 4, false}, {AttentionKind::hca, 8, false}};
  return m;
}

// What a rank holds when stages are cut evenly.
inline Shard shard_in(const ModelConfig& m, const Layout& layout, int rank) {
  StageCosts costs;
  costs.layers.assign(static_cast<size_t>(m.num_layers()), 1.0);
  return shard_of(m, Grid(layout), balance_layers(costs, layout.pp), rank);
}

}  // namespace lockstep::testing
