#pragma once
// A model whose widths no layout divides evenly, for tests of weight updates.

#include "model/config.h"

namespace lockstep::testing {

inline ModelConfig small_config() {
  return parse_model_config(R"({"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8,
      "qk_rope_head_dim": 4, "q_lora_rank": 8, "o_groups": 4, "o_lora_rank": 4, "sliding_window": 4, "compress_ratios": [0, 4, 8, 4],
      "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "n_routed_experts": 5, "num_experts_per_tok": 2, "num_hash_layers": 1,
      "moe_intermediate_size": 8, "max_position_embeddings": 64})", "test").value();
}

}  // namespace lockstep::testing
