#include "model/cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

namespace lockstep {

namespace {

// Parameters of one layer that every token meets, and those of it that carry no matrix product are few: all count as one multiply-add.
int64_t active_layer_parameters(const ModelConfig& m, const std::vector<TensorSpec>& table, int64_t layer) {
  int64_t n = 0;
  for (const TensorSpec& t : table) {
    if (t.layer != layer || t.role == TensorRole::hash_table) continue;
    n += t.role == TensorRole::expert ? t.whole.elements() / m.num_experts * m.experts_per_token : t.whole.elements();
  }
  return n;
}

// Of one query with n visible positions: rows that its attention reads, and index entries that it scores.
struct Reads {
  int64_t rows = 0, scores = 0;
};
Reads reads(const ModelConfig& m, const LayerConfig& l, int64_t n) {
  Reads r{.rows = std::min(n, m.window)};
  if (!l.compressed()) return r;
  const int64_t entries = n / l.ratio;
  const bool selects = l.attention == AttentionKind::csa;
  r.rows += selects ? std::min(entries, m.index_topk) : entries;
  r.scores = selects ? entries : 0;
  return r;
}

double attention_flops(const ModelConfig& m, const Reads& r) {
  return 4.0 * static_cast<double>(m.num_heads * m.head_dim) * static_cast<double>(r.rows) +
         2.0 * static_cast<double>(m.index_heads * (m.index_head_dim + 1)) * static_cast<double>(r.scores);
}

// Reads of all queries of one sequence of `length`.
Reads sum_reads(const ModelConfig& m, const LayerConfig& l, int64_t length) {
  Reads sum;
  for (int64_t n = 1; n <= length; ++n) {
    const Reads r = reads(m, l, n);
    sum.rows += r.rows;
    sum.scores += r.scores;
  }
  return sum;
}

// Adds up pieces as an arena hands them out.
class ArenaBytes {
 public:
  explicit ArenaBytes(Numerics numerics) : storage_(static_cast<int64_t>(dtype_bytes(storage_dtype(numerics)))) {}
  void f32(int64_t elements) { add(elements * 4); }  // i32 likewise
  void stored(int64_t elements) { add(elements * storage_); }
  int64_t total() const { return total_; }

 private:
  void add(int64_t bytes) { total_ += static_cast<int64_t>(Arena::footprint(static_cast<size_t>(bytes))); }
  int64_t storage_;
  int64_t total_ = 0;
};

// Rows as this rank's experts met them: SavedMoe::rho, g, u, and x where they came from elsewhere.
void add_expert_rows(ArenaBytes& a, const ModelConfig& m, int ep, int64_t n) {
  if (ep > 1) a.stored(n * m.hidden_size);
  a.f32(n), a.stored(n * m.expert_dim), a.stored(n * m.expert_dim);
}

// SavedSite, SavedAttention, SavedMoe and x_mid of one layer, in the shapes of model/saved.h.
void add_saved_layer(ArenaBytes& a, const ModelConfig& m, const Shard& shard, int64_t layer, const KeptCall& call) {
  const LayerConfig& l = m.layers[static_cast<size_t>(layer)];
  const int64_t T = std::accumulate(call.sequences.begin(), call.sequences.end(), int64_t{0});
  const int64_t n = m.hc_mult, D = m.hidden_size, H = shard.heads(m).size(), d = m.head_dim, K = m.experts_per_token, I = m.expert_dim;
  a.stored(T * n * D);  // x_mid
  for (int site = 0; site < 2; ++site) {
    a.f32(T * n), a.f32(T * n), a.f32(T * n * n), a.f32(T * m.mix_rows()), a.f32(T);
    a.stored(T * D), a.f32(T), a.stored(T * D), a.stored(T * D);
  }
  a.stored(T * m.q_rank), a.f32(T), a.stored(T * m.q_rank);
  a.stored(T * H * d), a.f32(T * H), a.stored(T * H * d);
  a.stored(T * d), a.f32(T), a.stored(T * d);
  if (l.compressed()) {
    int64_t entries = 0;
    for (const int64_t rows : call.sequences) entries += rows / l.ratio;
    a.f32(T * 2 * (l.overlap() ? 2 : 1) * d), a.stored(entries * d), a.f32(entries);
  }
  if (l.attention == AttentionKind::csa) a.f32(T * m.selected_columns(l.ratio));
  a.stored(T * H * d), a.f32(T * H), a.stored(T * shard.groups(m).size() * m.o_rank);
  a.f32(T * m.num_experts), a.f32(T * K), a.f32(T * K);
  a.f32(m.num_experts + 1), a.f32(T * K), a.f32(T * K);
  if (call.ep > 1) a.f32(2 * call.ep * m.num_experts);  // counts, i64
  add_expert_rows(a, m, call.ep, call.ep > 1 ? call.expert_rows[static_cast<size_t>(layer)] : T * K);
  a.stored(T * I), a.stored(T * I);
}

}  // namespace

int64_t count_parameters(const std::vector<TensorSpec>& table) {
  int64_t n = 0;
  for (const TensorSpec& t : table)
    if (t.role != TensorRole::hash_table) n += t.shape.elements();
  return n;
}

int64_t draft_block_parameters(const ModelConfig& config) {
  ModelConfig one = config;
  one.layers = {LayerConfig{.attention = AttentionKind::swa, .ratio = 0, .hash_routed = false}};
  int64_t layer = 0;
  for (const TensorSpec& t : tensor_table(one))
    if (t.layer == 0) layer += t.shape.elements();
  const int64_t n = config.hc_mult, D = config.hidden_size;
  return layer + 2 * D * D + 3 * D + n * n * D + n + 1;  // e_proj, h_proj; enorm, hnorm, norm; hc_head
}

int64_t active_parameters(const ModelConfig& config) {
  const std::vector<TensorSpec> table = tensor_table(config);
  int64_t n = 0;
  for (int64_t i = 0; i < config.num_layers(); ++i) n += active_layer_parameters(config, table, i);
  for (const TensorSpec& t : table)
    if (t.layer < 0 && t.role != TensorRole::embedding) n += t.whole.elements();
  return n;
}

double layers_forward_flops(const ModelConfig& config, const Range& layers, int64_t length) {
  const std::vector<TensorSpec> table = tensor_table(config);
  double flops = 0;
  std::map<std::pair<AttentionKind, int64_t>, Reads> known;  // the layers of a model are of two or three kinds
  for (int64_t i = layers.begin; i < layers.end; ++i) {
    const LayerConfig& l = config.layers[static_cast<size_t>(i)];
    const auto [reads, is_new] = known.try_emplace({l.attention, l.ratio});
    if (is_new) reads->second = sum_reads(config, l, length);
    flops += 2.0 * static_cast<double>(active_layer_parameters(config, table, i)) * static_cast<double>(length) + attention_flops(config, reads->second);
  }
  return flops;
}

double head_forward_flops(const ModelConfig& config) {
  double n = 0;
  for (const TensorSpec& t : tensor_table(config))
    if (t.layer < 0 && t.role != TensorRole::embedding) n += static_cast<double>(t.whole.elements());
  return 2 * n;
}

double decode_flops(const ModelConfig& config, int64_t n) {
  double flops = 2.0 * static_cast<double>(active_parameters(config));
  for (const LayerConfig& l : config.layers) flops += attention_flops(config, reads(config, l, n));
  return flops;
}

int64_t weight_bytes(const std::vector<TensorSpec>& table, Numerics numerics) {
  int64_t bytes = 0;
  for (const TensorSpec& t : table)
    if (t.held()) bytes += t.stored_shape(numerics).elements() * static_cast<int64_t>(dtype_bytes(t.weight_dtype(numerics))) + t.scale_shape(numerics).elements();
  return bytes;
}

int64_t panel_bytes(const std::vector<TensorSpec>& table, Numerics numerics) {
  int64_t bytes = 0;
  for (const TensorSpec& t : table) {
    if (!t.held() || !t.has_panels()) continue;
    const Shape panels = panel_shape(t.stored_shape(numerics));
    bytes += panels.elements() * static_cast<int64_t>(dtype_bytes(t.weight_dtype(numerics)));
    // Scales: one f32 a row of each panel and block of columns.
    if (t.quant_format(numerics))
      bytes += panels.elements() / panels[panels.rank - 2] * t.col_grid(numerics).blocks_in(t.shape[t.shape.rank - 1]) * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

double decode_weight_bytes(const ModelConfig& m, const std::vector<TensorSpec>& table, Numerics numerics, int64_t batch, bool panels) {
  const double experts = 1 - std::pow(1 - static_cast<double>(m.experts_per_token) / static_cast<double>(m.num_experts), static_cast<double>(batch));
  double bytes = 0;
  for (const TensorSpec& t : table) {
    if (t.role == TensorRole::embedding || t.role == TensorRole::hash_table) continue;
    const double all = static_cast<double>(panels && t.has_panels() ? panel_bytes({t}, numerics) : weight_bytes({t}, numerics));
    bytes += t.role == TensorRole::expert ? experts * all : all;
  }
  return bytes;
}

int64_t kept_activation_bytes(const ModelConfig& m, Numerics numerics, const Shard& shard, const KeptCall& call) {
  const int64_t T = std::accumulate(call.sequences.begin(), call.sequences.end(), int64_t{0}), n = m.hc_mult, D = m.hidden_size;
  ArenaBytes kept(numerics), largest(numerics);
  if (shard.embedding) kept.stored(T * n * D);
  for (int64_t i = shard.layers.begin; i < shard.layers.end; ++i) {
    kept.stored(T * n * D);  // the next layer's input
    if (!call.recompute) {
      add_saved_layer(kept, m, shard, i, call);
      continue;
    }
    ArenaBytes again(numerics);  // in backward, one layer at a time: its output and all that it saves
    again.stored(T * n * D);
    add_saved_layer(again, m, shard, i, call);
    if (again.total() > largest.total()) largest = again;
  }
  if (shard.head) {
    const int64_t R = call.wanted < 0 ? T : call.wanted;
    if (call.wanted > 0) kept.stored(R * n * D);
    kept.f32(R * n), kept.f32(R * n), kept.f32(R), kept.stored(R * D), kept.f32(R);
  }
  return kept.total() + largest.total();
}

int64_t kept_expert_row_bytes(const ModelConfig& m, Numerics numerics, int ep, int64_t n) {
  ArenaBytes rows(numerics);
  add_expert_rows(rows, m, ep, n);
  return rows.total();
}

double shard_forward_flops(const ModelConfig& m, const Shard& shard, int64_t tokens, int64_t length, int64_t wanted, double expert_rows) {
  double flops = 0;
  for (const TensorSpec& t : tensor_table(m, shard)) {
    if (!t.held() || t.role == TensorRole::hash_table || t.role == TensorRole::embedding) continue;
    const auto numbers = static_cast<double>(t.shape.elements());
    if (t.role == TensorRole::expert) {
      flops += 2 * numbers / static_cast<double>(shard.experts.size()) * expert_rows;
    } else {
      flops += 2 * numbers * static_cast<double>(t.layer < 0 ? wanted : tokens);
    }
  }
  if (tokens == 0) return flops;
  const double sequences = static_cast<double>(tokens) / static_cast<double>(length), share = 1.0 / shard.tp;
  std::map<std::pair<AttentionKind, int64_t>, Reads> known;
  for (int64_t i = shard.layers.begin; i < shard.layers.end; ++i) {
    const LayerConfig& l = m.layers[static_cast<size_t>(i)];
    const auto [reads, is_new] = known.try_emplace({l.attention, l.ratio});
    if (is_new) reads->second = sum_reads(m, l, length);
    flops += attention_flops(m, reads->second) * sequences * share;  // heads, and the indexer's rows, are shared out
  }
  return flops;
}

double decode_state_bytes(const ModelConfig& m, Numerics numerics, int64_t n) {
  double rows = 0;
  for (const LayerConfig& l : m.layers) {
    const Reads r = reads(m, l, n);
    rows += static_cast<double>(r.rows * m.head_dim + r.scores * m.index_head_dim);
  }
  return rows * static_cast<double>(dtype_bytes(storage_dtype(numerics)));
}

StageCosts stage_costs(const ModelConfig& config, int64_t length) {
  StageCosts costs;
  for (int64_t i = 0; i < config.num_layers(); ++i)
    costs.layers.push_back(layers_forward_flops(config, {i, i + 1}, length) / static_cast<double>(length));
  costs.head = head_forward_flops(config);
  return costs;
}

}  // namespace lockstep
