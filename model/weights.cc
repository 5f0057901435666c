#include "model/weights.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/device.h"
#include "core/rng.h"
#include "ops/cast/cast.h"

namespace lockstep {

const char* tensor_role_name(TensorRole role) {
  switch (role) {
    case TensorRole::matrix: return "matrix";
    case TensorRole::expert: return "expert";
    case TensorRole::embedding: return "embedding";
    case TensorRole::head: return "head";
    case TensorRole::router: return "router";
    case TensorRole::router_bias: return "router_bias";
    case TensorRole::hash_table: return "hash_table";
    case TensorRole::norm: return "norm";
    case TensorRole::hyper: return "hyper";
    case TensorRole::sink: return "sink";
    case TensorRole::ape: return "ape";
  }
  return "?";
}

bool TensorSpec::has_panels() const {
  switch (role) {
    case TensorRole::matrix:
    case TensorRole::expert:
    case TensorRole::head:
    case TensorRole::router: return true;
    case TensorRole::hyper: return shape.rank == 2;  // fn
    default: return false;
  }
}

Shape TensorSpec::weight_shape() const { return groups == 0 ? shape : Shape{groups, shape[0] / groups, shape[1]}; }

std::optional<QuantFormat> TensorSpec::quant_format(Numerics n) const {
  if (!is_quantized(n) || !linear) return std::nullopt;
  return n == Numerics::fp4 && role == TensorRole::expert ? kFp4 : kFp8Weight;
}

BlockGrid TensorSpec::row_grid(Numerics n) const { return {quant_format(n)->block_rows, cut == Cut::group_columns ? 0 : period}; }
BlockGrid TensorSpec::col_grid(Numerics n) const { return {quant_format(n)->block_cols, cut == Cut::group_columns ? period : 0}; }

Shape TensorSpec::scale_shape(Numerics n) const {
  if (!held() || !quant_format(n)) return {};
  const int e = shape.rank - 2;
  const int64_t row_blocks = row_grid(n).blocks_in(shape[e]), col_blocks = col_grid(n).blocks_in(shape[e + 1]);
  return e == 0 ? Shape{row_blocks, col_blocks} : Shape{shape[0], row_blocks, col_blocks};
}

Shape TensorSpec::stored_shape(Numerics n) const {
  Shape s = weight_shape();
  if (weight_dtype(n) == DType::e2m1x2) {
    int64_t& columns = s.dims[static_cast<size_t>(s.rank - 1)];
    columns = num_blocks(columns, 2);
  }
  return s;
}

DType TensorSpec::weight_dtype(Numerics n) const {
  if (const std::optional<QuantFormat> format = quant_format(n)) return format->codes;
  switch (role) {
    case TensorRole::matrix:
    case TensorRole::expert:
    case TensorRole::embedding:
    case TensorRole::head:
    case TensorRole::router: return storage_dtype(n);
    case TensorRole::hash_table: return DType::i32;
    default: return DType::f32;
  }
}

namespace {

// Gives names and shapes to the fields of one model, in order.
template <typename T>
class Visitor {
 public:
  Visitor(const ModelConfig& m, const Shard& shard, const std::function<void(const TensorSpec&, T&)>& f) : m_(m), shard_(shard), f_(f) {}

  void model(ModelTensors<T>& t) {
    held_ = shard_.embedding;
    emit(t.embed, "embed.weight", {m_.vocab_size, m_.hidden_size}, TensorRole::embedding, Cut::vocabulary);
    for (int i = 0; i < static_cast<int>(m_.num_layers()); ++i) layer(i, t.layers[static_cast<size_t>(i)]);
    layer_ = -1;
    held_ = shard_.head;
    const int64_t n = m_.hc_mult;
    hyper(t.hc_head, "hc_head", n, 1);
    emit(t.norm, "norm.weight", {m_.hidden_size}, TensorRole::norm);
    emit(t.head, "head.weight", {m_.vocab_size, m_.hidden_size}, TensorRole::head, Cut::vocabulary);
  }

 private:
  void emit(T& tensor, std::string name, Shape shape, TensorRole role, Cut cut = Cut::none, bool indexer = false) {
    TensorSpec spec;
    spec.name = std::move(name);
    spec.whole = shape;
    spec.cut = cut;
    spec.role = role;
    spec.layer = layer_;
    spec.indexer = indexer;
    spec.linear = linear_;
    if (linear_) {
      if (role == TensorRole::expert) spec.period = shape[1];
      if (cut == Cut::group_rows) spec.period = shape[0] / m_.o_groups;
      if (cut == Cut::group_columns) spec.period = shape[1] / m_.o_groups;
    }
    spec.id = next_id_++;
    place(spec);
    f_(spec, tensor);
  }

  void emit_linear(T& tensor, std::string name, Shape shape, TensorRole role, Cut cut = Cut::none, bool indexer = false) {
    linear_ = true;
    emit(tensor, std::move(name), shape, role, cut, indexer);
    linear_ = false;
  }

  // The shard's part of spec.whole.
  void place(TensorSpec& spec) const {
    spec.shape = spec.whole;
    spec.box = whole_box(spec.whole);
    const Range groups = shard_.groups(m_);
    const auto take = [&](int dim, int64_t units, const Range& held) {  // `held` of `units` equal parts of one dimension
      const Range taken = Shard::scaled(held, spec.whole[dim] / units);
      spec.shape.dims[static_cast<size_t>(dim)] = taken.size();
      const bool columns = dim > 0 && dim == spec.whole.rank - 1;
      (columns ? spec.box.columns : spec.box.rows) = columns ? taken : Shard::scaled(held, spec.box.rows.end / units);
    };
    switch (spec.cut) {
      case Cut::none: break;
      case Cut::experts: take(0, m_.num_experts, shard_.experts); break;
      case Cut::group_rows: take(0, m_.o_groups, groups); break;
      case Cut::group_columns: take(1, m_.o_groups, groups); break;
      case Cut::vocabulary: take(0, m_.vocab_size, shard_.vocabulary(m_)); break;
    }
    if (!held_) {
      spec.shape.dims[0] = 0;
      spec.box = Box();
    }
    if (spec.name.ends_with("attn.wo_a.weight")) spec.groups = groups.size();
  }

  void hyper(HyperTensors<T>& h, const std::string& prefix, int64_t rows, int64_t scales) {
    emit(h.fn, prefix + "_fn", {rows, m_.hc_mult * m_.hidden_size}, TensorRole::hyper);
    emit(h.base, prefix + "_base", {rows}, TensorRole::hyper);
    emit(h.scale, prefix + "_scale", {scales}, TensorRole::hyper);
  }

  void compressor(CompressorTensors<T>& c, const std::string& p, const LayerConfig& l, int64_t width, bool indexer) {
    const int64_t channels = (l.overlap() ? 2 : 1) * width;
    emit(c.wkv, p + "wkv.weight", {channels, m_.hidden_size}, TensorRole::matrix, Cut::none, indexer);
    emit(c.wgate, p + "wgate.weight", {channels, m_.hidden_size}, TensorRole::matrix, Cut::none, indexer);
    emit(c.ape, p + "ape", {l.ratio, channels}, TensorRole::ape, Cut::none, indexer);
    emit(c.norm, p + "norm.weight", {width}, TensorRole::norm, Cut::none, indexer);
  }

  void layer(int i, LayerTensors<T>& t) {
    layer_ = i;
    held_ = shard_.layers.contains(i);
    const LayerConfig& l = m_.layers[static_cast<size_t>(i)];
    const int64_t D = m_.hidden_size, H = m_.num_heads, d = m_.head_dim, g = m_.o_groups, E = m_.num_experts, I = m_.expert_dim;
    const std::string p = "layers." + std::to_string(i) + ".", a = p + "attn.", f = p + "ffn.";
    hyper(t.hc_attn, p + "hc_attn", m_.mix_rows(), 3);
    emit(t.attn_norm, p + "attn_norm.weight", {D}, TensorRole::norm);
    emit_linear(t.wq_a, a + "wq_a.weight", {m_.q_rank, D}, TensorRole::matrix);
    emit(t.q_norm, a + "q_norm.weight", {m_.q_rank}, TensorRole::norm);
    emit_linear(t.wq_b, a + "wq_b.weight", {H * d, m_.q_rank}, TensorRole::matrix, Cut::group_rows);
    emit_linear(t.wkv, a + "wkv.weight", {d, D}, TensorRole::matrix);
    emit(t.kv_norm, a + "kv_norm.weight", {d}, TensorRole::norm);
    emit(t.sink, a + "attn_sink", {H}, TensorRole::sink, Cut::group_rows);
    if (t.compressor) compressor(*t.compressor, a + "compressor.", l, d, false);
    if (t.indexer) {
      emit_linear(t.indexer->wq_b, a + "indexer.wq_b.weight", {m_.index_heads * m_.index_head_dim, m_.q_rank}, TensorRole::matrix, Cut::none, true);
      emit(t.indexer->weights_proj, a + "indexer.weights_proj.weight", {m_.index_heads, D}, TensorRole::matrix, Cut::none, true);
      compressor(t.indexer->compressor, a + "indexer.compressor.", l, m_.index_head_dim, true);
    }
    emit(t.wo_a, a + "wo_a.weight", {g * m_.o_rank, H / g * d}, TensorRole::matrix, Cut::group_rows);
    emit_linear(t.wo_b, a + "wo_b.weight", {D, g * m_.o_rank}, TensorRole::matrix, Cut::group_columns);
    hyper(t.hc_ffn, p + "hc_ffn", m_.mix_rows(), 3);
    emit(t.ffn_norm, p + "ffn_norm.weight", {D}, TensorRole::norm);
    emit(t.gate, f + "gate.weight", {E, D}, TensorRole::router);
    if (l.hash_routed) {
      emit(t.tid2eid, f + "gate.tid2eid", {m_.vocab_size, m_.experts_per_token}, TensorRole::hash_table);
    } else {
      emit(t.gate_bias, f + "gate.bias", {E}, TensorRole::router_bias);
    }
    emit_linear(t.w1, f + "experts.*.w1.weight", {E, I, D}, TensorRole::expert, Cut::experts);
    emit_linear(t.w3, f + "experts.*.w3.weight", {E, I, D}, TensorRole::expert, Cut::experts);
    emit_linear(t.w2, f + "experts.*.w2.weight", {E, D, I}, TensorRole::expert, Cut::experts);
    emit_linear(t.shared_w1, f + "shared_experts.w1.weight", {I, D}, TensorRole::matrix);
    emit_linear(t.shared_w3, f + "shared_experts.w3.weight", {I, D}, TensorRole::matrix);
    emit_linear(t.shared_w2, f + "shared_experts.w2.weight", {D, I}, TensorRole::matrix);
  }

  const ModelConfig& m_;
  const Shard& shard_;
  const std::function<void(const TensorSpec&, T&)>& f_;
  bool held_ = true;
  bool linear_ = false;
  int layer_ = -1;
  int next_id_ = 0;
};

}  // namespace

template <typename T>
void visit(const ModelConfig& config, const Shard& shard, ModelTensors<T>& tensors, const std::function<void(const TensorSpec&, T&)>& f) {
  tensors.layers.resize(static_cast<size_t>(config.num_layers()));
  for (size_t i = 0; i < tensors.layers.size(); ++i) {
    LayerTensors<T>& t = tensors.layers[i];
    if (config.layers[i].compressed() && !t.compressor) t.compressor.emplace();
    if (config.layers[i].attention == AttentionKind::csa && !t.indexer) t.indexer.emplace();
  }
  Visitor<T>(config, shard, f).model(tensors);
}
template void visit(const ModelConfig&, const Shard&, ModelTensors<WeightView>&, const std::function<void(const TensorSpec&, WeightView&)>&);
template void visit(const ModelConfig&, const Shard&, ModelTensors<TensorView>&, const std::function<void(const TensorSpec&, TensorView&)>&);

std::vector<TensorSpec> tensor_table(const ModelConfig& config) { return tensor_table(config, whole_shard(config)); }

std::vector<TensorSpec> tensor_table(const ModelConfig& config, const Shard& shard) {
  std::vector<TensorSpec> table;
  ModelTensors<TensorView> unused;
  visit<TensorView>(config, shard, unused, [&](const TensorSpec& spec, TensorView&) { table.push_back(spec); });
  return table;
}

TensorSet make_tensor_set(const std::vector<TensorSpec>& table, Arena& arena, const std::function<bool(const TensorSpec&)>& wanted) {
  TensorSet set;
  for (const TensorSpec& spec : table)
    set.views.push_back(spec.held() && wanted(spec) ? arena.zeros(spec.master_dtype(), spec.shape, spec.name)
                                     : TensorView());
  return set;
}

Weights::Weights(const ModelConfig& config, Numerics numerics, const Shard& shard, Arena& arena)
    : config_(config), numerics_(numerics), shard_(shard), device_(arena.device()), table_(tensor_table(config, shard)) {
  const bool panels = arena.device() == Device::cpu;  // the GPU's kernels read rows and scales
  visit<WeightView>(config_, shard_, tensors_, [&](const TensorSpec& spec, WeightView& w) {
    const DType dtype = spec.weight_dtype(numerics);
    rows_.push_back(spec.held() ? arena.zeros(dtype, spec.stored_shape(numerics), spec.name) : TensorView());
    panels_.push_back(spec.held() && spec.has_panels() && panels ? arena.zeros(dtype, panel_shape(rows_.back().shape), spec.name) : TensorView());
    w.rows = rows_.back();
    w.panels = panels_.back();
    scales_.emplace_back();
    panel_scales_.emplace_back();
    if (const Shape scales = spec.scale_shape(numerics); scales.rank > 0) {
      w.row_grid = spec.row_grid(numerics);
      w.col_grid = spec.col_grid(numerics);
      w.scales = scales_.back() = arena.zeros(DType::ue8m0, scales, spec.name);
      if (panels) w.panel_scales = panel_scales_.back() = arena.zeros(DType::f32, panel_scale_shape(w), spec.name);
    }
    by_id_.push_back(&w);
  });
  quant_stats_.resize(table_.size());
}

void Weights::load(Context& c, const TensorSet& masters, int64_t version) {
  CHECK_EQ(masters.views.size(), table_.size());
  for (size_t i = 0; i < table_.size(); ++i) {
    if (!table_[i].held()) continue;
    const TensorView& from = masters.views[i];
    CHECK(from.shape == table_[i].shape, "{}: master {} for weight {}", table_[i].name, from.shape.str(), table_[i].shape.str());
    store(c, table_[i].id, from);
  }
  commit(c, version);
}

Status Weights::load(Context& c, const ReadBox& read, int64_t version) {
  for (size_t i = 0; i < table_.size(); ++i) {
    const TensorSpec& spec = table_[i];
    if (!spec.held()) continue;
    const ArenaScope scope(*c.workspace);
    const TensorView master = c.workspace->tensor(spec.master_dtype(), spec.shape, spec.name);
    LOCKSTEP_RETURN_IF_ERROR(fill_on_host(c, master, [&](TensorView v) { return read(spec, spec.box, matrix_view(v)); }));
    store(c, spec.id, master);
  }
  commit(c, version);
  return Status::ok();
}

void Weights::store(Context& c, int id, ConstTensorView master) {
  const auto i = static_cast<size_t>(id);
  if (master.dtype == DType::i32) {
    copy(c, rows_[i], master);
  } else if (!scales_[i].empty()) {
    quant_stats_[i] = quantize_by_grid(c, rows_[i], scales_[i], table_[i].row_grid(numerics_), table_[i].col_grid(numerics_), master);
  } else {
    cast(c, rows_[i], master.reshape(rows_[i].shape));
  }
}

void Weights::commit(Context& c, int64_t version) {
  for (size_t i = 0; i < table_.size(); ++i) {
    if (!panels_[i].empty()) pack_panels(c, panels_[i], rows_[i]);
    if (!panel_scales_[i].empty()) pack_panel_scales(c, panel_scales_[i], *by_id_[i]);
  }
  version_ = version;
}

void Weights::restore_rows(Context& c, int id) { unpack_panels(c, rows(id), panels_[static_cast<size_t>(id)]); }

void Weights::copy_across(Context& c, const Weights& other) {
  CHECK(device_ != other.device_ && numerics_ == other.numerics_ && shard_ == other.shard_, "weights of another shard, numerics or of the same memory");
  const auto move = [&](const TensorView& to, const TensorView& from) {
    if (to.empty()) return;
    device_ == Device::gpu ? upload(c, to, from) : download(c, to, from);
  };
  for (size_t i = 0; i < table_.size(); ++i) {
    move(rows_[i], other.rows_[i]);
    move(scales_[i], other.scales_[i]);
  }
  quant_stats_ = other.quant_stats_;
  Context own = device_ == Device::gpu ? c : c.on_host();
  commit(own, other.version_);
}

GradientPlaces gradient_places(const std::vector<TensorSpec>& table, const std::function<bool(const TensorSpec&)>& trained) {
  constexpr int64_t kLine = 16;  // floats: every tensor begins on a cache line
  GradientPlaces places;
  for (const TensorSpec& spec : table) {
    // No gradient reaches buffers, and none the indexer: its top-k choice has no derivative (V4 spec 6.1).
    const bool has_gradient = spec.held() && !spec.is_buffer() && !spec.indexer && trained(spec);
    int64_t& filled = spec.cut == Cut::experts ? places.experts : places.dense;
    places.begin.push_back(has_gradient ? filled : -1);
    if (has_gradient) filled += (spec.shape.elements() + kLine - 1) / kLine * kLine;
  }
  return places;
}

Gradients make_gradients(const ModelConfig& config, const Shard& shard, Arena& arena, const std::function<bool(const TensorSpec&)>& trained) {
  Gradients g;
  g.table = tensor_table(config, shard);
  const GradientPlaces places = gradient_places(g.table, trained);
  if (places.dense > 0) g.dense = arena.zeros(DType::f32, {places.dense}, "gradients.dense");
  if (places.experts > 0) g.experts = arena.zeros(DType::f32, {places.experts}, "gradients.experts");
  visit<TensorView>(config, shard, g.tensors, [&](const TensorSpec& spec, TensorView& view) {
    const int64_t begin = places.begin[static_cast<size_t>(spec.id)];
    if (begin >= 0) view = TensorView((spec.cut == Cut::experts ? g.experts : g.dense).ptr<float>() + begin, DType::f32, spec.shape);
    g.set.views.push_back(view);
  });
  return g;
}

void zero_gradients(Context& c, Gradients& g) {
  if (c.on_gpu()) {
    for (const TensorView& run : {g.dense, g.experts}) set_zero(c, run);
    return;
  }
  for (const TensorView& v : g.set.views) {
    if (v.empty()) continue;
    char* p = static_cast<char*>(v.data);
    parallel_for(c, static_cast<int64_t>(v.bytes()), 1, [&](int64_t b, int64_t e, int) { std::memset(p + b, 0, static_cast<size_t>(e - b)); });
  }
}

namespace {

// K distinct experts a token: the first K of a partial shuffle.
void draw_hash_table(const ModelConfig& config, const TensorSpec& spec, Philox rng, const Range& rows, TensorView out) {
  std::vector<int32_t> experts(static_cast<size_t>(config.num_experts));
  for (int64_t t = 0; t < rows.end; ++t) {
    for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
    for (int64_t k = 0; k < spec.whole[1]; ++k) {
      const uint32_t pick = static_cast<uint32_t>(k) + rng.below(static_cast<uint32_t>(config.num_experts - k));
      std::swap(experts[static_cast<size_t>(k)], experts[pick]);
      if (t >= rows.begin) out.row<int32_t>(t - rows.begin)[k] = experts[static_cast<size_t>(k)];
    }
  }
}

}  // namespace

ReadBox random_boxes(const ModelConfig& config, uint64_t seed) {
  return [config, seed](const TensorSpec& spec, const Box& box, TensorView out) {
    const Philox rng(seed, RngPurpose::init, static_cast<uint64_t>(spec.id));
    const auto fill = [&](float value) {
      for (int64_t r = 0; r < out.rows(); ++r) std::fill_n(out.row<float>(r), out.dim(1), value);
    };
    // Number i of the tensor is normal number i of its stream.
    const auto draw = [&] {
      const int64_t columns = whole_box(spec.whole).columns.size();
      const auto rows = [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          Philox row = rng;
          row.skip(2 * static_cast<uint64_t>((box.rows.begin + r) * columns + box.columns.begin));
          for (int64_t i = 0; i < out.dim(1); ++i) out.row<float>(r)[i] = config.initializer_range * row.normal();
        }
      };
      // About 50 ns a number: a thread for every 5 ms of work.
      constexpr int64_t kNumbersAThread = 100000;
      const auto cores = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
      const int parts = static_cast<int>(std::clamp<int64_t>(out.shape.elements() / kNumbersAThread, 1, cores));
      std::vector<std::thread> helpers;
      for (int t = 1; t < parts; ++t) helpers.emplace_back([&rows, own = part_of(out.rows(), parts, t)] { rows(own.begin, own.end); });
      rows(0, part_of(out.rows(), parts, 0).end);
      for (std::thread& t : helpers) t.join();
    };
    switch (spec.role) {
      case TensorRole::matrix:
      case TensorRole::expert:
      case TensorRole::embedding:
      case TensorRole::head:
      case TensorRole::router: draw(); break;
      case TensorRole::hyper:
        if (spec.whole.rank == 2) {
          draw();
        } else {
          fill(spec.name.ends_with("_scale") ? 1.0f : 0.0f);
        }
        break;
      case TensorRole::norm: fill(1.0f); break;
      case TensorRole::router_bias:
      case TensorRole::sink:
      case TensorRole::ape: fill(0.0f); break;
      case TensorRole::hash_table: draw_hash_table(config, spec, rng, box.rows, out); break;
    }
    return Status::ok();
  };
}

void initialize_masters(const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters, uint64_t seed) {
  const Status drawn = read_masters(table, random_boxes(config, seed), masters);
  CHECK(drawn.is_ok(), "{}", drawn.message());
}

Status read_masters(const std::vector<TensorSpec>& table, const ReadBox& read, TensorSet& masters) {
  for (const TensorSpec& spec : table)
    if (spec.held()) LOCKSTEP_RETURN_IF_ERROR(read(spec, spec.box, matrix_view(masters.views[static_cast<size_t>(spec.id)])));
  return Status::ok();
}

}  // namespace lockstep
