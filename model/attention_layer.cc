#include "model/attention_layer.h"

#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "model/linear.h"
#include "model/tensor_parallel.h"
#include "ops/attention/attention.h"
#include "ops/cast/cast.h"
#include "ops/compressor/compressor.h"
#include "ops/hadamard/hadamard.h"
#include "ops/indexer/indexer.h"
#include "ops/quantize/quantize.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace lockstep {

namespace {

// What one layer's code reads, under short names.
struct LayerParts {
  const ModelConfig& m;
  const LayerConfig& l;
  const LayerTensors<WeightView>& w;
  const LayerState& s;
  const EntryView& entries;
  const SequenceView& seq;
  ConstTensorView rope_table;
  int64_t H, groups;  // held by this rank
  RankGroup* tp;      // null: alone
};
LayerParts layer_parts(const Model& model, int layer, const SequenceBatch& batch, const StatePool& state) {
  const ModelConfig& m = model.weights->config();
  const Shard& shard = model.weights->shard();
  const size_t i = static_cast<size_t>(layer);
  return {m,
          m.layers[i],
          model.weights->tensors().layers[i],
          state.layer(layer),
          batch.entries[i],
          batch.seq,
          m.layers[i].compressed() ? model.rope.compressed : model.rope.window,
          shard.heads(m).size(),
          shard.groups(m).size(),
          tp_group(model)};
}

// Group i of a grouped output: columns of o and of a, and the group's own matrix.
WeightView group_weight(const WeightView& wo_a, int64_t i) { return wo_a.at(i); }

CompressorShape compressor_shape(const LayerConfig& l, int64_t width) { return {l.ratio, l.overlap(), width}; }

AttentionShape attention_shape(const ModelConfig& m, const LayerConfig& l, const LayerState& s) {
  return {m.window, l.ratio, s.per_page, 1.0f / std::sqrt(static_cast<float>(m.head_dim))};
}

// [kv | gate] rows of one compressor, f32.
void add_projection(MatmulCalls& products, TensorView proj, ConstTensorView u, const CompressorTensors<WeightView>& w) {
  const int64_t half = proj.dim(1) / 2;
  products.push_back({proj.cols(0, half), u, w.wkv});
  products.push_back({proj.cols(half, half), u, w.wgate});
}

// What kv_fp8 does to finished keys [rows, d]: their channels that are not rotated. The gradient passes as if it did nothing.
void round_keys(Context& c, TensorView keys, int64_t rope_dim) {
  if (keys.rows() > 0 && keys.dim(1) > rope_dim) round_through(c, keys.cols(0, keys.dim(1) - rope_dim), kFp8Kv);
}
// What index_fp4 does to indexer queries and keys, each a row. Blocks end at the row, whatever its width.
void round_index(Context& c, TensorView rows) {
  if (rows.rows() == 0) return;
  hadamard(c, rows);
  round_through(c, rows, kFp4);
}

struct KeyRounding {
  bool keys = false, index = false;
  int64_t rope_dim = 0;
};

// Pools, norms and rotates the entries that complete in this call, rounds them as `round` says, and stores them in their pages; then keeps the last
// rows for later calls.
// pooled and inv may be views to keep (main compressor) or scratch (indexer).
void compress_and_store(Context& c, const CompressorShape& shape, const CompressorTensors<WeightView>& w, ConstTensorView proj, TensorView pooled,
                        TensorView inv, TensorView ring, TensorView store, int64_t per_page, ConstTensorView rope_table, float eps,
                        const EntryView& entries, const SequenceView& seq, const KeyRounding& round) {
  ArenaScope scope(*c.workspace);
  if (entries.num_entries > 0) {
    compress(c, pooled, proj, w.ape.rows, ring, entries, seq, shape);
    TensorView normed = c.workspace->tensor(pooled.dtype, pooled.shape, "compressor.entries");
    rmsnorm_rope(c, normed, inv, pooled, w.norm.rows, eps, entries.pos, rope_table, 1);
    if (round.keys) round_keys(c, normed, round.rope_dim);
    if (round.index) round_index(c, normed);
    entries_scatter(c, store, normed, entries, seq, per_page);
  }
  ring_update(c, ring, proj, seq);
}

// What the csa layer's indexer makes of u and qr: rows of its compressor, queries, and the weights of their heads. All ranks of a tp group keep all keys; each
// chooses for its own share of the rows, with all heads.
struct IndexerRows {
  Range own;
  TensorView proj, q, head_weight;
};
IndexerRows indexer_rows(const ModelConfig& m, const LayerConfig& l, const SequenceView& seq, DType dtype, RankGroup* tp, Arena& ws) {
  const Range own = tp == nullptr ? Range{0, seq.num_tokens} : part_of(seq.num_tokens, tp->size(), tp->rank());
  return {own, ws.tensor(DType::f32, {seq.num_tokens, compressor_shape(l, m.index_head_dim).proj_width()}, "indexer.proj"),
          ws.tensor(dtype, {own.size(), m.index_heads * m.index_head_dim}, "indexer.q"), ws.tensor(DType::f32, {own.size(), m.index_heads}, "indexer.head_weight")};
}

// The csa layer's choice of entries for every query, and the lists of all ranks gathered; no gradient passes here.
void select_entries(Context& c, const ModelConfig& m, const LayerConfig& l, const IndexerTensors<WeightView>& w, const LayerState& s,
                    ConstTensorView rope_table, const EntryView& entries, const SequenceView& seq, const IndexerRows& in, TensorView selected, RankGroup* tp,
                    bool fp4) {
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;
  const auto& [own, proj, q, head_weight] = in;
  const CompressorShape shape = compressor_shape(l, m.index_head_dim);
  TensorView pooled = ws.tensor(q.dtype, {entries.num_entries, m.index_head_dim}, "indexer.pooled");
  compress_and_store(c, shape, w.compressor, proj, pooled, TensorView(), s.index_ring, s.index_entries, s.per_page, rope_table, m.norm_eps, entries, seq,
                     {.index = fp4});

  if (const int64_t n = own.size(); n > 0) {
    const SequenceView rows = tp == nullptr ? seq : slice_rows(c, seq, own.begin, n, ws);
    rope(c, q, rows.token_pos, rope_table, m.index_heads, /*inverse=*/false);
    if (fp4) round_index(c, q.reshape({n * m.index_heads, m.index_head_dim}));
    scale(c, head_weight, 1.0f / std::sqrt(static_cast<float>(m.index_head_dim)) / std::sqrt(static_cast<float>(m.index_heads)));
    index_select(c, selected.slice(own.begin, n), q.reshape({n, m.index_heads, m.index_head_dim}), head_weight, s.index_entries, rows,
                 {l.ratio, s.per_page});
  }
  if (tp == nullptr) return;
  std::vector<int64_t> shares;
  for (int r = 0; r < tp->size(); ++r) shares.push_back(part_of(seq.num_tokens, tp->size(), r).size());
  tp->all_gather(c, selected, selected.slice(own.begin, own.size()), shares, kTpEntries);
}

}  // namespace

void attention_layer_forward(Context& c, const Model& model, int layer, const SequenceBatch& batch, const StatePool& state, TensorView y,
                             ConstTensorView u, SavedAttention& saved, Arena& keep) {
  const auto [m, l, w, s, entries, seq, rope_table, H, groups, tp] = layer_parts(model, layer, batch, state);
  const int64_t T = seq.num_tokens, d = m.head_dim;
  const DType dtype = u.dtype;
  const auto probe = [&](std::string_view point, ConstTensorView rows) {
    if (model.probe) (*model.probe)(layer, point, rows);
  };

  // Everything that is made of the layer's input: low-rank queries, the key/value row of each token, the compressor's rows and the indexer's.
  saved.qr_in = keep.tensor(dtype, {T, m.q_rank}, "attn.qr_in");
  saved.kv_in = keep.tensor(dtype, {T, d}, "attn.kv_in");
  MatmulCalls of_input;
  of_input.push_back({saved.qr_in, u, w.wq_a});
  of_input.push_back({saved.kv_in, u, w.wkv});
  if (l.compressed()) {
    saved.proj = keep.tensor(DType::f32, {T, compressor_shape(l, d).proj_width()}, "attn.proj");
    add_projection(of_input, saved.proj, u, *w.compressor);
  }
  const ArenaScope indexer_scope(*c.workspace);
  const bool replayed = model.replay != nullptr && !model.replay->entries.empty(), indexes = l.attention == AttentionKind::csa && !replayed;
  IndexerRows index;
  if (indexes) {
    index = indexer_rows(m, l, seq, dtype, tp, *c.workspace);
    add_projection(of_input, index.proj, u, w.indexer->compressor);
    if (index.own.size() > 0) of_input.push_back({index.head_weight, u.slice(index.own.begin, index.own.size()), w.indexer->weights_proj});
  }
  matmul_many(c, of_input);

  // Queries: normed, raised, per head normed, rotated.
  saved.qr_inv = keep.tensor(DType::f32, {T}, "attn.qr_inv");
  saved.qr = keep.tensor(dtype, {T, m.q_rank}, "attn.qr");
  saved.q_in = keep.tensor(dtype, {T, H * d}, "attn.q_in");
  saved.q_inv = keep.tensor(DType::f32, {T * H}, "attn.q_inv");
  saved.q = keep.tensor(dtype, {T, H * d}, "attn.q");
  rmsnorm(c, saved.qr, saved.qr_inv, saved.qr_in, w.q_norm.rows, m.norm_eps);
  MatmulCalls of_qr;
  of_qr.push_back({saved.q_in, saved.qr, w.wq_b});
  if (indexes && index.own.size() > 0) of_qr.push_back({index.q, saved.qr.slice(index.own.begin, index.own.size()), w.indexer->wq_b});
  matmul_many(c, of_qr);
  rmsnorm_rope(c, saved.q.reshape({T * H, d}), saved.q_inv, saved.q_in.reshape({T * H, d}), ConstTensorView(), m.norm_eps, seq.token_pos, rope_table, H);
  probe("attn.q", saved.q);

  // The one key/value row of each token.
  saved.kv_inv = keep.tensor(DType::f32, {T}, "attn.kv_inv");
  saved.kv = keep.tensor(dtype, {T, d}, "attn.kv");
  rmsnorm_rope(c, saved.kv, saved.kv_inv, saved.kv_in, w.kv_norm.rows, m.norm_eps, seq.token_pos, rope_table, 1);
  if (model.cache.kv_fp8) round_keys(c, saved.kv, m.rope_dim);
  probe("attn.kv", saved.kv);

  if (l.compressed()) {
    const CompressorShape shape = compressor_shape(l, d);
    saved.pooled = keep.tensor(dtype, {entries.num_entries, d}, "attn.pooled");
    saved.pooled_inv = keep.tensor(DType::f32, {entries.num_entries}, "attn.pooled_inv");
    probe("attn.proj", saved.proj);
    compress_and_store(c, shape, *w.compressor, saved.proj, saved.pooled, saved.pooled_inv, s.compressor_ring, s.entries, s.per_page, rope_table,
                       m.norm_eps, entries, seq, {.keys = model.cache.kv_fp8, .rope_dim = m.rope_dim});
  }
  if (l.attention == AttentionKind::csa) {
    saved.selected = keep.tensor(DType::i32, {T, m.selected_columns(l.ratio)}, "attn.selected");
    if (replayed) {
      const ConstTensorView& chosen = model.replay->entries[static_cast<size_t>(layer)];
      CHECK(chosen.shape == saved.selected.shape, "entries chosen for {}, there are {}", chosen.shape.str(), saved.selected.shape.str());
      copy(c, saved.selected, chosen);
    } else {
      select_entries(c, m, l, *w.indexer, s, rope_table, entries, seq, index, saved.selected, tp, model.cache.index_fp4);
    }
    probe("attn.selected", saved.selected);
  }

  saved.o = keep.tensor(dtype, {T, H * d}, "attn.o");
  saved.lse = keep.tensor(DType::f32, {T, H}, "attn.lse");
  attention(c, saved.o.reshape({T, H, d}), saved.lse, saved.q.reshape({T, H, d}), {saved.kv, s.window, s.entries, saved.selected}, w.sink.rows, seq,
            attention_shape(m, l, s));
  ring_update(c, s.window, saved.kv, seq);
  rope(c, saved.o, seq.token_pos, rope_table, H, /*inverse=*/true);
  probe("attn.o", saved.o);

  // Grouped low-rank output; the second product sums its groups one by one, in order, in every layout.
  const int64_t group_in = H / groups * d;
  saved.a = keep.tensor(dtype, {T, groups * m.o_rank}, "attn.a");
  MatmulCalls of_groups;
  for (int64_t i = 0; i < groups; ++i)
    of_groups.push_back({saved.a.cols(i * m.o_rank, m.o_rank), saved.o.cols(i * group_in, group_in), group_weight(w.wo_a, i)});
  matmul_many(c, of_groups);
  if (tp == nullptr) {
    matmul(c, y, saved.a, w.wo_b, /*k_segment=*/m.o_rank);
  } else {
    tp_output_projection(c, *tp, y, saved.a, w.wo_b, m.o_rank);
  }
  probe("attn.y", y);
}

void attention_layer_backward(Context& c, const Model& model, int layer, const SequenceBatch& batch, const StatePool& state, TensorView du,
                              ConstTensorView dy, ConstTensorView u, const SavedAttention& saved, LayerTensors<TensorView>& grad) {
  const auto [m, l, w, s, entries, seq, rope_table, H, groups, tp] = layer_parts(model, layer, batch, state);
  const int64_t T = seq.num_tokens, d = m.head_dim;
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;

  // Output projections, group by group, and the un-rotation in reverse. o is needed as attention returned it: rotated back.
  TensorView da = ws.tensor(DType::f32, {T, groups * m.o_rank}, "attn.da");
  linear_backward(c, da, Into::write, grad.wo_b, dy, saved.a, w.wo_b);
  TensorView d_o = ws.tensor(DType::f32, {T, H * d}, "attn.do");
  const int64_t group_in = H / groups * d;
  for (int64_t i = 0; i < groups; ++i) {
    const TensorView dw = grad.wo_a.empty() ? TensorView() : grad.wo_a.slice(i * m.o_rank, m.o_rank);
    linear_backward(c, d_o.cols(i * group_in, group_in), Into::write, dw, da.cols(i * m.o_rank, m.o_rank), saved.o.cols(i * group_in, group_in),
                    group_weight(w.wo_a, i));
  }
  rope(c, d_o, seq.token_pos, rope_table, H, /*inverse=*/false);
  TensorView o = ws.tensor(saved.o.dtype, saved.o.shape, "attn.o_rotated");
  cast(c, o, saved.o);
  rope(c, o, seq.token_pos, rope_table, H, /*inverse=*/false);

  // Sums over heads lie one behind the other: gradients of qr, of the window keys and of the entries that completed in this call.
  const int64_t E = entries.num_entries;
  TensorView sums = ws.tensor(DType::f32, {T * (m.q_rank + d) + E * d}, "attn.head_sums");
  TensorView dqr = sums.slice(0, T * m.q_rank).reshape({T, m.q_rank});
  TensorView dkv = sums.slice(T * m.q_rank, T * d).reshape({T, d});
  TensorView dpooled = sums.slice(T * (m.q_rank + d), E * d).reshape({E, d});

  // Attention.
  TensorView dq = ws.tensor(DType::f32, {T, H * d}, "attn.dq");
  TensorView dstore = l.compressed() ? zeros(c, DType::f32, s.entries.shape, "attn.dentries") : TensorView();
  TensorView dsink = grad.sink.empty() ? zeros(c, DType::f32, {H}, "attn.dsink") : grad.sink;
  attention_backward(c, dq.reshape({T, H, d}), dkv, dstore, dsink, d_o.reshape({T, H, d}), o.reshape({T, H, d}), saved.lse, saved.q.reshape({T, H, d}),
                     {saved.kv, ConstTensorView(), s.entries, saved.selected}, w.sink.rows, seq, attention_shape(m, l, s));
  if (E > 0) entries_gather(c, dpooled, dstore, entries, seq, s.per_page);

  // Queries, down to what all heads share.
  rope(c, dq, seq.token_pos, rope_table, H, /*inverse=*/true);
  rmsnorm_backward(c, dq.reshape({T * H, d}), TensorView(), dq.reshape({T * H, d}), saved.q_in.reshape({T * H, d}), ConstTensorView(), saved.q_inv);
  linear_backward(c, dqr, Into::write, grad.wq_b, dq, saved.qr, w.wq_b);
  if (tp != nullptr) tp->all_reduce(c, sums, kTpAttentionGradient);
  rmsnorm_backward(c, dqr, grad.q_norm, dqr, saved.qr_in, w.q_norm.rows, saved.qr_inv);
  linear_backward(c, du, Into::write, grad.wq_a, dqr, u, w.wq_a);

  // Window keys.
  rope(c, dkv, seq.token_pos, rope_table, 1, /*inverse=*/true);
  rmsnorm_backward(c, dkv, grad.kv_norm, dkv, saved.kv_in, w.kv_norm.rows, saved.kv_inv);
  linear_backward(c, du, Into::add, grad.wkv, dkv, u, w.wkv);

  // Compressed entries.
  if (E == 0) return;
  const CompressorShape shape = compressor_shape(l, d);
  rope(c, dpooled, entries.pos, rope_table, 1, /*inverse=*/true);
  rmsnorm_backward(c, dpooled, grad.compressor->norm, dpooled, saved.pooled, w.compressor->norm.rows, saved.pooled_inv);
  TensorView dproj = ws.tensor(DType::f32, {T, shape.proj_width()}, "attn.dproj");
  TensorView dape = grad.compressor->ape.empty() ? zeros(c, DType::f32, w.compressor->ape.rows.shape, "attn.dape") : grad.compressor->ape;
  compress_backward(c, dproj, dape, dpooled, saved.proj, w.compressor->ape.rows, entries, seq, shape);
  const int64_t half = shape.proj_width() / 2;
  linear_backward(c, du, Into::add, grad.compressor->wkv, dproj.cols(0, half), u, w.compressor->wkv);
  linear_backward(c, du, Into::add, grad.compressor->wgate, dproj.cols(half, half), u, w.compressor->wgate);
}

}  // namespace lockstep
