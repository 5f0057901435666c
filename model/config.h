#pragma once
// The shape of a DeepSeek-V4 model, read from a Hugging Face config.json and checked once, so that everything after may stay simple.
//
// Two spellings are accepted: the released one (compress_ratios: 0 window only, 4 overlapping with indexer, other plain compression;
// num_hash_layers; rope_scaling) and the one transformers writes (layer_types, compress_rates, mlp_layer_types, rope_parameters).
// Letters are the legend of docs/architecture.md. Source: V4 spec section 1.

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "ops/rope/rope.h"

namespace lockstep {

enum class AttentionKind : uint8_t { swa, csa, hca };  // window only | overlapping compression + indexer | plain compression
const char* attention_kind_name(AttentionKind kind);

struct LayerConfig {
  AttentionKind attention = AttentionKind::swa;
  int64_t ratio = 0;          // m: positions an entry covers; 0 for swa
  bool hash_routed = false;   // experts by token id instead of by score
  bool compressed() const { return ratio > 0; }
  bool overlap() const { return attention == AttentionKind::csa; }
  bool operator==(const LayerConfig&) const = default;
};

struct ModelConfig {
  int64_t vocab_size = 0;        // V
  int64_t hidden_size = 0;       // D
  int64_t num_heads = 0;         // H
  int64_t head_dim = 0;          // d
  int64_t rope_dim = 0;          // r, the rotated trailing channels of a head
  int64_t q_rank = 0;            // Rq
  int64_t o_groups = 0;          // g
  int64_t o_rank = 0;            // Ro, per group
  int64_t window = 0;            // w, the query's own position counts
  int64_t index_heads = 0;       // Hi
  int64_t index_head_dim = 0;    // di
  int64_t index_topk = 0;        // k
  int64_t num_experts = 0;       // E
  int64_t experts_per_token = 0; // K
  int64_t expert_dim = 0;        // I
  float routed_scale = 1.0f;
  float swiglu_limit = 0.0f;     // 0: no clamp
  int64_t hc_mult = 4;           // n
  int sinkhorn_iters = 20;
  float hc_eps = 1e-6f;
  float norm_eps = 1e-6f;
  double rope_theta = 10000.0;             // swa layers
  double compress_rope_theta = 160000.0;   // csa and hca layers
  RopeScaling compress_rope_scaling;       // YaRN, csa and hca layers only
  int64_t max_positions = 0;
  float initializer_range = 0.02f;
  int32_t bos_id = 0;
  int32_t eos_id = 1;
  int64_t num_drafts = 0;        // multi-token prediction blocks behind the last layer: carried between checkpoints, not run
  std::vector<LayerConfig> layers;

  bool operator==(const ModelConfig&) const = default;
  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  int64_t mix_rows() const { return (2 + hc_mult) * hc_mult; }
  // Columns of a csa layer's list of chosen entries: no row sees more.
  int64_t selected_columns(int64_t ratio) const { return std::min(index_topk, max_positions / ratio + 1); }
  // The smallest number of positions a state page may cover: the least common multiple of all ratios (1 without compression).
  int64_t page_unit() const;
};

// `origin` (a file name) opens every message. Unknown keys are ignored, as in every config.json reader; missing or impossible values are errors
// that name the key, the value and what would be right.
Result<ModelConfig> parse_model_config(std::string_view json, std::string_view origin);
Result<ModelConfig> load_model_config(const std::string& path);
// Everything that must hold between the fields; parse_model_config ends with it.
Status check_model_config(const ModelConfig& config, std::string_view origin);
// JSON that parse_model_config reads back to the same config. transformers reads both spellings; other engines know the released one, which
// has no words for a csa ratio other than 4, an hca ratio of 4 and hash-routed layers behind others: such a config comes in transformers'.
enum class ConfigSpelling : uint8_t { transformers, released };
std::string model_config_json(const ModelConfig& config, ConfigSpelling spelling = ConfigSpelling::transformers);

}  // namespace lockstep
