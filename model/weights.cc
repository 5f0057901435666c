#include "model/weights.h"

#include <cmath>
#include <cstring>

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

DType TensorSpec::weight_dtype(Numerics n) const {
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
  Visitor(const ModelConfig& m, const std::function<void(const TensorSpec&, T&)>& f) : m_(m), f_(f) {}

  void model(ModelTensors<T>& t) {
    emit(t.embed, "embed.weight", {m_.vocab_size, m_.hidden_size}, TensorRole::embedding);
    for (int i = 0; i < static_cast<int>(m_.num_layers()); ++i) layer(i, t.layers[static_cast<size_t>(i)]);
    layer_ = -1;
    const int64_t n = m_.hc_mult;
    hyper(t.hc_head, "hc_head", n, 1);
    emit(t.norm, "norm.weight", {m_.hidden_size}, TensorRole::norm);
    emit(t.head, "head.weight", {m_.vocab_size, m_.hidden_size}, TensorRole::head);
  }

 private:
  void emit(T& tensor, std::string name, Shape shape, TensorRole role, bool indexer = false, int64_t groups = 0) {
    TensorSpec spec;
    spec.groups = groups;
    spec.name = std::move(name);
    spec.shape = shape;
    spec.role = role;
    spec.layer = layer_;
    spec.indexer = indexer;
    spec.id = next_id_++;
    f_(spec, tensor);
  }

  void hyper(HyperTensors<T>& h, const std::string& prefix, int64_t rows, int64_t scales) {
    emit(h.fn, prefix + "_fn", {rows, m_.hc_mult * m_.hidden_size}, TensorRole::hyper);
    emit(h.base, prefix + "_base", {rows}, TensorRole::hyper);
    emit(h.scale, prefix + "_scale", {scales}, TensorRole::hyper);
  }

  void compressor(CompressorTensors<T>& c, const std::string& p, const LayerConfig& l, int64_t width, bool indexer) {
    const int64_t channels = (l.overlap() ? 2 : 1) * width;
    emit(c.wkv, p + "wkv.weight", {channels, m_.hidden_size}, TensorRole::matrix, indexer);
    emit(c.wgate, p + "wgate.weight", {channels, m_.hidden_size}, TensorRole::matrix, indexer);
    emit(c.ape, p + "ape", {l.ratio, channels}, TensorRole::ape, indexer);
    emit(c.norm, p + "norm.weight", {width}, TensorRole::norm, indexer);
  }

  void layer(int i, LayerTensors<T>& t) {
    layer_ = i;
    const LayerConfig& l = m_.layers[static_cast<size_t>(i)];
    const int64_t D = m_.hidden_size, H = m_.num_heads, d = m_.head_dim, g = m_.o_groups, E = m_.num_experts, I = m_.expert_dim;
    const std::string p = "layers." + std::to_string(i) + ".", a = p + "attn.", f = p + "ffn.";
    hyper(t.hc_attn, p + "hc_attn", m_.mix_rows(), 3);
    emit(t.attn_norm, p + "attn_norm.weight", {D}, TensorRole::norm);
    emit(t.wq_a, a + "wq_a.weight", {m_.q_rank, D}, TensorRole::matrix);
    emit(t.q_norm, a + "q_norm.weight", {m_.q_rank}, TensorRole::norm);
    emit(t.wq_b, a + "wq_b.weight", {H * d, m_.q_rank}, TensorRole::matrix);
    emit(t.wkv, a + "wkv.weight", {d, D}, TensorRole::matrix);
    emit(t.kv_norm, a + "kv_norm.weight", {d}, TensorRole::norm);
    emit(t.sink, a + "attn_sink", {H}, TensorRole::sink);
    if (t.compressor) compressor(*t.compressor, a + "compressor.", l, d, false);
    if (t.indexer) {
      emit(t.indexer->wq_b, a + "indexer.wq_b.weight", {m_.index_heads * m_.index_head_dim, m_.q_rank}, TensorRole::matrix, true);
      emit(t.indexer->weights_proj, a + "indexer.weights_proj.weight", {m_.index_heads, D}, TensorRole::matrix, true);
      compressor(t.indexer->compressor, a + "indexer.compressor.", l, m_.index_head_dim, true);
    }
    emit(t.wo_a, a + "wo_a.weight", {g * m_.o_rank, H / g * d}, TensorRole::matrix, false, g);
    emit(t.wo_b, a + "wo_b.weight", {D, g * m_.o_rank}, TensorRole::matrix);
    hyper(t.hc_ffn, p + "hc_ffn", m_.mix_rows(), 3);
    emit(t.ffn_norm, p + "ffn_norm.weight", {D}, TensorRole::norm);
    emit(t.gate, f + "gate.weight", {E, D}, TensorRole::router);
    if (l.hash_routed) {
      emit(t.tid2eid, f + "gate.tid2eid", {m_.vocab_size, m_.experts_per_token}, TensorRole::hash_table);
    } else {
      emit(t.gate_bias, f + "gate.bias", {E}, TensorRole::router_bias);
    }
    emit(t.w1, f + "experts.*.w1.weight", {E, I, D}, TensorRole::expert);
    emit(t.w3, f + "experts.*.w3.weight", {E, I, D}, TensorRole::expert);
    emit(t.w2, f + "experts.*.w2.weight", {E, D, I}, TensorRole::expert);
    emit(t.shared_w1, f + "shared_experts.w1.weight", {I, D}, TensorRole::matrix);
    emit(t.shared_w3, f + "shared_experts.w3.weight", {I, D}, TensorRole::matrix);
    emit(t.shared_w2, f + "shared_experts.w2.weight", {D, I}, TensorRole::matrix);
  }

  const ModelConfig& m_;
  const std::function<void(const TensorSpec&, T&)>& f_;
  int layer_ = -1;
  int next_id_ = 0;
};

}  // namespace

template <typename T>
void visit(const ModelConfig& config, ModelTensors<T>& tensors, const std::function<void(const TensorSpec&, T&)>& f) {
  tensors.layers.resize(static_cast<size_t>(config.num_layers()));
  for (size_t i = 0; i < tensors.layers.size(); ++i) {
    LayerTensors<T>& t = tensors.layers[i];
    if (config.layers[i].compressed() && !t.compressor) t.compressor.emplace();
    if (config.layers[i].attention == AttentionKind::csa && !t.indexer) t.indexer.emplace();
  }
  Visitor<T>(config, f).model(tensors);
}
template void visit(const ModelConfig&, ModelTensors<WeightView>&, const std::function<void(const TensorSpec&, WeightView&)>&);
template void visit(const ModelConfig&, ModelTensors<TensorView>&, const std::function<void(const TensorSpec&, TensorView&)>&);

std::vector<TensorSpec> tensor_table(const ModelConfig& config) {
  std::vector<TensorSpec> table;
  ModelTensors<TensorView> unused;
  visit<TensorView>(config, unused, [&](const TensorSpec& spec, TensorView&) { table.push_back(spec); });
  return table;
}

TensorSet make_tensor_set(const std::vector<TensorSpec>& table, Arena& arena, const std::function<bool(const TensorSpec&)>& wanted) {
  TensorSet set;
  for (const TensorSpec& spec : table)
    set.views.push_back(wanted(spec) ? arena.zeros(spec.role == TensorRole::hash_table ? DType::i32 : DType::f32, spec.shape, spec.name)
                                     : TensorView());
  return set;
}

Weights::Weights(const ModelConfig& config, Numerics numerics, Arena& arena) : config_(config), numerics_(numerics), table_(tensor_table(config)) {
  visit<WeightView>(config_, tensors_, [&](const TensorSpec& spec, WeightView& w) {
    const DType dtype = spec.weight_dtype(numerics);
    rows_.push_back(arena.zeros(dtype, spec.weight_shape(), spec.name));
    panels_.push_back(spec.has_panels() ? arena.zeros(dtype, panel_shape(spec.weight_shape()), spec.name) : TensorView());
    w.rows = rows_.back();
    w.panels = panels_.back();
    by_id_.push_back(&w);
  });
}

void Weights::load(Context& c, const TensorSet& masters, int64_t version) {
  CHECK_EQ(masters.views.size(), table_.size());
  for (size_t i = 0; i < table_.size(); ++i) {
    const TensorView& from = masters.views[i];
    CHECK(from.shape == table_[i].shape, "{}: master {} for weight {}", table_[i].name, from.shape.str(), table_[i].shape.str());
    if (from.dtype == DType::i32) {
      std::memcpy(rows_[i].data, from.data, from.bytes());
    } else {
      cast(c, rows_[i], from.reshape(rows_[i].shape));
    }
    if (!panels_[i].empty()) pack_panels(c, panels_[i], rows_[i]);
  }
  version_ = version;
}

Gradients make_gradients(const ModelConfig& config, Arena& arena, const std::function<bool(const TensorSpec&)>& trained) {
  Gradients g;
  visit<TensorView>(config, g.tensors, [&](const TensorSpec& spec, TensorView& view) {
    // No gradient reaches buffers, and none the indexer: its top-k choice has no derivative (V4 spec 6.1).
    if (!spec.is_buffer() && !spec.indexer && trained(spec)) view = arena.zeros(DType::f32, spec.shape, spec.name);
    g.table.push_back(spec);
    g.set.views.push_back(view);
  });
  return g;
}

void zero_gradients(Context& c, Gradients& g) {
  for (const TensorView& v : g.set.views) {
    if (v.empty()) continue;
    char* p = static_cast<char*>(v.data);
    parallel_for(c, static_cast<int64_t>(v.bytes()), 1, [&](int64_t b, int64_t e, int) { std::memset(p + b, 0, static_cast<size_t>(e - b)); });
  }
}

void initialize_masters(const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters, uint64_t seed) {
  for (const TensorSpec& spec : table) {
    const TensorView& v = masters.views[static_cast<size_t>(spec.id)];
    Philox rng(seed, RngPurpose::init, static_cast<uint64_t>(spec.id));
    const int64_t n = spec.shape.elements();
    switch (spec.role) {
      case TensorRole::matrix:
      case TensorRole::expert:
      case TensorRole::embedding:
      case TensorRole::head:
      case TensorRole::router:
        for (int64_t i = 0; i < n; ++i) v.ptr<float>()[i] = config.initializer_range * rng.normal();
        break;
      case TensorRole::hyper: {
        const bool is_scale = spec.name.ends_with("_scale");
        for (int64_t i = 0; i < n; ++i)
          v.ptr<float>()[i] = spec.shape.rank == 2 ? config.initializer_range * rng.normal() : is_scale ? 1.0f : 0.0f;
        break;
      }
      case TensorRole::norm:
        for (int64_t i = 0; i < n; ++i) v.ptr<float>()[i] = 1.0f;
        break;
      case TensorRole::router_bias:
      case TensorRole::sink:
      case TensorRole::ape: break;  // zero
      case TensorRole::hash_table: {
        // K distinct experts a token: the first K of a partial shuffle.
        std::vector<int32_t> experts(static_cast<size_t>(config.num_experts));
        for (int64_t t = 0; t < spec.shape[0]; ++t) {
          for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
          for (int64_t k = 0; k < spec.shape[1]; ++k) {
            const uint32_t pick = static_cast<uint32_t>(k) + rng.below(static_cast<uint32_t>(config.num_experts - k));
            std::swap(experts[static_cast<size_t>(k)], experts[pick]);
            v.row<int32_t>(t)[k] = experts[static_cast<size_t>(k)];
          }
        }
        break;
      }
    }
  }
}

}  // namespace lockstep
