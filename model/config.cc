#include "model/config.h"

#include <cmath>
#include <fstream>
#include <numeric>
#include <sstream>

#include <nlohmann/json.hpp>

#include "ops/hyperconn/hyperconn.h"

namespace lockstep {

namespace {

using Json = nlohmann::json;

constexpr std::string_view kSwaName = "sliding_attention";
constexpr std::string_view kCsaName = "compressed_sparse_attention";
constexpr std::string_view kHcaName = "heavily_compressed_attention";
constexpr int64_t kReleasedOverlapRatio = 4;  // in compress_ratios, 4 and only 4 means overlapping compression with an indexer

// Reads typed values of one JSON object; the first problem is kept and everything after it is a no-op.
class Reader {
 public:
  Reader(const Json& object, std::string origin) : object_(object), origin_(std::move(origin)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  void fail(std::string message) {
    if (status_) status_ = errorf("{}: {}", origin_, message);
  }
  void integer(const char* key, int64_t& out, bool required = true) {
    number(key, required, [&](const Json& v) {
      if (!v.is_number_integer()) return fail(fmt::format("{} is {}, expected an integer", key, v.dump()));
      out = v.get<int64_t>();
    });
  }
  template <typename F>
  void real(const char* key, F& out, bool required = true) {
    number(key, required, [&](const Json& v) { out = v.get<F>(); });
  }
  const Json* find(const char* key) const { return has(key) ? &object_.at(key) : nullptr; }
  const Status& status() const { return status_; }
  const std::string& origin() const { return origin_; }

 private:
  template <typename F>
  void number(const char* key, bool required, F set) {
    if (!has(key)) {
      if (required) fail(fmt::format("{} is missing", key));
      return;
    }
    const Json& v = object_.at(key);
    if (!v.is_number() || (v.is_number_float() && !std::isfinite(v.get<double>())))
      return fail(fmt::format("{} is {}, expected a number", key, v.dump()));
    set(v);
  }

  const Json& object_;
  std::string origin_;
  Status status_;
};

void read_rope_scaling(const Json& object, Reader& r, RopeScaling& scaling) {
  const std::string type = object.value("rope_type", object.value("type", std::string("default")));
  if (type == "default") return;
  if (type != "yarn") return r.fail(fmt::format("rope scaling type is \"{}\", only \"yarn\" and \"default\" exist in this model", type));
  scaling.factor = object.value("factor", 1.0f);
  scaling.original_positions = object.value("original_max_position_embeddings", int64_t{0});
  scaling.beta_fast = object.value("beta_fast", 32.0f);
  scaling.beta_slow = object.value("beta_slow", 1.0f);
  if (!(scaling.factor >= 1.0f)) r.fail(fmt::format("rope scaling factor is {}, expected at least 1", scaling.factor));
  if (scaling.original_positions < 1)
    r.fail(fmt::format("original_max_position_embeddings of the rope scaling is {}, expected a positive integer", scaling.original_positions));
}

// rope_parameters (transformers: {main, compress}, or one flat block for the compressed layers) or rope_scaling (released).
void read_rope(Reader& r, ModelConfig& m) {
  r.real("rope_theta", m.rope_theta, false);
  r.real("compress_rope_theta", m.compress_rope_theta, false);
  if (const Json* p = r.find("rope_parameters"); p != nullptr && p->is_object()) {
    const bool split = p->contains("compress") || p->contains("main");
    if (split && p->contains("main")) m.rope_theta = p->at("main").value("rope_theta", m.rope_theta);
    const Json& compress = split ? p->value("compress", Json::object()) : *p;
    m.compress_rope_theta = split ? compress.value("rope_theta", m.compress_rope_theta) : m.compress_rope_theta;
    read_rope_scaling(compress, r, m.compress_rope_scaling);
  } else if (const Json* s = r.find("rope_scaling"); s != nullptr && s->is_object()) {
    read_rope_scaling(*s, r, m.compress_rope_scaling);
  }
}

void read_released_layers(Reader& r, int64_t num_layers, ModelConfig& m) {
  const Json& ratios = *r.find("compress_ratios");
  if (!ratios.is_array()) return r.fail("compress_ratios must be a list of integers");
  // One more entry than layers describes the draft (MTP) block, which is not built.
  if (static_cast<int64_t>(ratios.size()) < num_layers)
    return r.fail(fmt::format("compress_ratios has {} entries for {} layers", ratios.size(), num_layers));
  for (int64_t i = 0; i < num_layers; ++i) {
    const Json& v = ratios[static_cast<size_t>(i)];
    if (!v.is_number_integer() || v.get<int64_t>() < 0 || v.get<int64_t>() == 1)
      return r.fail(fmt::format("compress_ratios[{}] is {}, expected 0 or an integer of at least 2", i, v.dump()));
    LayerConfig layer;
    layer.ratio = v.get<int64_t>();
    layer.attention = layer.ratio == 0                       ? AttentionKind::swa
                      : layer.ratio == kReleasedOverlapRatio ? AttentionKind::csa
                                                             : AttentionKind::hca;
    m.layers.push_back(layer);
  }
  int64_t num_hash = 0;
  r.integer("num_hash_layers", num_hash, false);
  if (num_hash < 0 || num_hash > num_layers)
    return r.fail(fmt::format("num_hash_layers is {}, expected 0 to {} (num_hidden_layers)", num_hash, num_layers));
  for (int64_t i = 0; i < num_hash; ++i) m.layers[static_cast<size_t>(i)].hash_routed = true;
}

void read_named_layers(Reader& r, int64_t num_layers, ModelConfig& m) {
  int64_t csa_rate = 4, hca_rate = 128;
  if (const Json* rates = r.find("compress_rates"); rates != nullptr && rates->is_object()) {
    csa_rate = rates->value(kCsaName, csa_rate);
    hca_rate = rates->value(kHcaName, hca_rate);
  }
  r.integer("compress_rate_csa", csa_rate, false);
  r.integer("compress_rate_hca", hca_rate, false);
  const Json& types = *r.find("layer_types");
  if (!types.is_array() || static_cast<int64_t>(types.size()) != num_layers)
    return r.fail(fmt::format("layer_types must list {} layers (num_hidden_layers), it has {}", num_layers, types.is_array() ? types.size() : 0));
  for (int64_t i = 0; i < num_layers; ++i) {
    const Json& t = types[static_cast<size_t>(i)];
    LayerConfig layer;
    if (t == kSwaName) {
      layer.attention = AttentionKind::swa;
    } else if (t == kCsaName) {
      layer.attention = AttentionKind::csa;
      layer.ratio = csa_rate;
    } else if (t == kHcaName) {
      layer.attention = AttentionKind::hca;
      layer.ratio = hca_rate;
    } else {
      return r.fail(fmt::format("layer_types[{}] is {}, expected {}, {} or {}", i, t.dump(), kSwaName, kCsaName, kHcaName));
    }
    m.layers.push_back(layer);
  }
  if (const Json* mlp = r.find("mlp_layer_types")) {
    if (!mlp->is_array() || static_cast<int64_t>(mlp->size()) != num_layers)
      return r.fail(fmt::format("mlp_layer_types must list {} layers (num_hidden_layers)", num_layers));
    for (int64_t i = 0; i < num_layers; ++i) {
      const Json& t = (*mlp)[static_cast<size_t>(i)];
      if (t != "moe" && t != "hash_moe") return r.fail(fmt::format("mlp_layer_types[{}] is {}, expected \"moe\" or \"hash_moe\"", i, t.dump()));
      m.layers[static_cast<size_t>(i)].hash_routed = t == "hash_moe";
    }
  } else {
    int64_t num_hash = std::min<int64_t>(3, num_layers);
    r.integer("num_hash_layers", num_hash, false);
    for (int64_t i = 0; i < std::min(num_hash, num_layers); ++i) m.layers[static_cast<size_t>(i)].hash_routed = true;
  }
}

void check_fixed_choices(Reader& r) {
  if (const Json* v = r.find("model_type"); v != nullptr && *v != "deepseek_v4")
    r.fail(fmt::format("model_type is {}, this program runs \"deepseek_v4\" only", v->dump()));
  if (const Json* v = r.find("scoring_func"); v != nullptr && *v != "sqrtsoftplus")
    r.fail(fmt::format("scoring_func is {}, only \"sqrtsoftplus\" is defined for this model", v->dump()));
  if (const Json* v = r.find("hidden_act"); v != nullptr && *v != "silu") r.fail(fmt::format("hidden_act is {}, only \"silu\" is defined for this model", v->dump()));
  if (const Json* v = r.find("tie_word_embeddings"); v != nullptr && *v == true)
    r.fail("tie_word_embeddings is true; this model has a head of its own, set it to false");
  int64_t shared = 1, kv_heads = 1;
  r.integer("n_shared_experts", shared, false);
  r.integer("num_key_value_heads", kv_heads, false);
  if (shared != 1) r.fail(fmt::format("n_shared_experts is {}, the model has exactly 1", shared));
  if (kv_heads != 1) r.fail(fmt::format("num_key_value_heads is {}, the model has exactly 1", kv_heads));
}

}  // namespace

const char* attention_kind_name(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::swa: return "swa";
    case AttentionKind::csa: return "csa";
    case AttentionKind::hca: return "hca";
  }
  return "?";
}

int64_t ModelConfig::page_unit() const {
  int64_t unit = 1;
  for (const LayerConfig& l : layers)
    if (l.compressed()) unit = std::lcm(unit, l.ratio);
  return unit;
}

Result<ModelConfig> parse_model_config(std::string_view json, std::string_view origin) {
  const Json object = Json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return errorf("{}: not valid JSON", origin);
  if (!object.is_object()) return errorf("{}: expected a JSON object", origin);
  ModelConfig m;
  Reader r(object, std::string(origin));
  try {
    check_fixed_choices(r);
    int64_t num_layers = 0, iters = 20, bos = 0, eos = 1;
    r.integer("vocab_size", m.vocab_size);
    r.integer("hidden_size", m.hidden_size);
    r.integer("num_hidden_layers", num_layers);
    r.integer("num_attention_heads", m.num_heads);
    r.integer("head_dim", m.head_dim);
    if (r.has("qk_rope_head_dim")) {
      r.integer("qk_rope_head_dim", m.rope_dim);
    } else {
      double factor = 0;
      r.real("partial_rotary_factor", factor);
      m.rope_dim = static_cast<int64_t>(static_cast<double>(m.head_dim) * factor);
    }
    r.integer("q_lora_rank", m.q_rank);
    r.integer("o_groups", m.o_groups);
    r.integer("o_lora_rank", m.o_rank);
    r.integer("sliding_window", m.window);
    r.integer("index_n_heads", m.index_heads, false);
    r.integer("index_head_dim", m.index_head_dim, false);
    r.integer("index_topk", m.index_topk, false);
    r.integer(r.has("n_routed_experts") ? "n_routed_experts" : "num_local_experts", m.num_experts);
    r.integer("num_experts_per_tok", m.experts_per_token);
    r.integer(r.has("moe_intermediate_size") ? "moe_intermediate_size" : "intermediate_size", m.expert_dim);
    r.real("routed_scaling_factor", m.routed_scale, false);
    r.real("swiglu_limit", m.swiglu_limit, false);
    r.integer("hc_mult", m.hc_mult, false);
    r.integer("hc_sinkhorn_iters", iters, false);
    r.real("hc_eps", m.hc_eps, false);
    r.real("rms_norm_eps", m.norm_eps, false);
    r.integer("max_position_embeddings", m.max_positions);
    r.real("initializer_range", m.initializer_range, false);
    r.integer("bos_token_id", bos, false);
    r.integer("eos_token_id", eos, false);
    m.sinkhorn_iters = static_cast<int>(std::clamp<int64_t>(iters, 0, 1000));
    m.bos_id = static_cast<int32_t>(bos);
    m.eos_id = static_cast<int32_t>(eos);
    read_rope(r, m);
    if (num_layers < 1 || num_layers > 4096) {
      r.fail(fmt::format("num_hidden_layers is {}, expected 1 to 4096", num_layers));
    } else if (r.has("layer_types")) {
      read_named_layers(r, num_layers, m);
    } else if (r.has("compress_ratios")) {
      read_released_layers(r, num_layers, m);
    } else {
      r.fail("neither compress_ratios nor layer_types is given; the attention kind of each layer must be listed");
    }
  } catch (const Json::exception& e) {
    r.fail(fmt::format("a value has the wrong type: {}", e.what()));
  }
  LOCKSTEP_RETURN_IF_ERROR(r.status());
  LOCKSTEP_RETURN_IF_ERROR(check_model_config(m, origin));
  return m;
}

Result<ModelConfig> load_model_config(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return errorf("{}: cannot open the model config", path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) return errorf("{}: cannot read the model config", path);
  return parse_model_config(text.str(), path);
}

Status check_model_config(const ModelConfig& m, std::string_view origin) {
  constexpr int64_t kMaxDim = int64_t{1} << 24;  // keeps every product of three sizes within 64 bits and every id within 32
  struct Range {
    const char* name;
    int64_t value, low, high;
  };
  bool has_csa = false;
  for (const LayerConfig& l : m.layers) has_csa |= l.attention == AttentionKind::csa;
  const Range ranges[] = {
      {"vocab_size", m.vocab_size, 1, kMaxDim},
      {"hidden_size", m.hidden_size, 1, kMaxDim},
      {"num_attention_heads", m.num_heads, 1, 65536},
      {"head_dim", m.head_dim, 2, 65536},
      {"qk_rope_head_dim", m.rope_dim, 2, m.head_dim},
      {"q_lora_rank", m.q_rank, 1, kMaxDim},
      {"o_groups", m.o_groups, 1, m.num_heads},
      {"o_lora_rank", m.o_rank, 1, kMaxDim},
      {"sliding_window", m.window, 1, kMaxDim},
      {"n_routed_experts", m.num_experts, 1, 65536},
      {"num_experts_per_tok", m.experts_per_token, 1, std::min<int64_t>(m.num_experts, 16)},
      {"moe_intermediate_size", m.expert_dim, 1, kMaxDim},
      {"hc_mult", m.hc_mult, 1, kHyperMaxStreams},
      {"hc_sinkhorn_iters", m.sinkhorn_iters, 1, 64},
      {"max_position_embeddings", m.max_positions, 1, kMaxDim},
      {"index_n_heads", m.index_heads, has_csa ? 1 : 0, 65536},
      {"index_head_dim", m.index_head_dim, has_csa ? m.rope_dim : 0, 65536},
      {"index_topk", m.index_topk, has_csa ? 1 : 0, kMaxDim},
      {"bos_token_id", m.bos_id, 0, m.vocab_size - 1},
      {"eos_token_id", m.eos_id, 0, m.vocab_size - 1},
  };
  for (const Range& r : ranges)
    if (r.value < r.low || r.value > r.high) return errorf("{}: {} is {}, expected {} to {}", origin, r.name, r.value, r.low, r.high);
  if (m.rope_dim % 2 != 0) return errorf("{}: qk_rope_head_dim is {}, rotation works on pairs: it must be even", origin, m.rope_dim);
  if (m.num_heads % m.o_groups != 0)
    return errorf("{}: num_attention_heads {} is not divisible by o_groups {}", origin, m.num_heads, m.o_groups);
  for (const auto& [name, value] : {std::pair{"rms_norm_eps", m.norm_eps}, {"hc_eps", m.hc_eps}, {"routed_scaling_factor", m.routed_scale}})
    if (!(value > 0.0f) || !std::isfinite(value)) return errorf("{}: {} is {}, expected a positive number", origin, name, value);
  if (!std::isfinite(m.swiglu_limit)) return errorf("{}: swiglu_limit is {}", origin, m.swiglu_limit);
  for (const auto& [name, value] : {std::pair{"rope_theta", m.rope_theta}, {"compress_rope_theta", m.compress_rope_theta}})
    if (!(value > 1.0) || !std::isfinite(value)) return errorf("{}: {} is {}, expected more than 1", origin, name, value);
  if (m.layers.empty()) return errorf("{}: the model has no layers", origin);
  for (int64_t i = 0; i < m.num_layers(); ++i) {
    const LayerConfig& l = m.layers[static_cast<size_t>(i)];
    const bool window_only = l.attention == AttentionKind::swa;
    if (window_only != (l.ratio == 0) || l.ratio < 0 || l.ratio == 1 || l.ratio > 65536)
      return errorf("{}: layer {} is {} with compression ratio {}; {}", origin, i, attention_kind_name(l.attention), l.ratio,
                    window_only ? "a window-only layer has ratio 0" : "a compressed layer needs a ratio from 2 to 65536");
  }
  if (m.page_unit() > (int64_t{1} << 20))
    return errorf("{}: the compression ratios' least common multiple is {}, over 2^20; state pages would be too large", origin, m.page_unit());
  return Status::ok();
}

std::string model_config_json(const ModelConfig& m) {
  Json o;
  o["model_type"] = "deepseek_v4";
  o["architectures"] = {"DeepseekV4ForCausalLM"};
  o["vocab_size"] = m.vocab_size;
  o["hidden_size"] = m.hidden_size;
  o["num_hidden_layers"] = m.num_layers();
  o["num_attention_heads"] = m.num_heads;
  o["num_key_value_heads"] = 1;
  o["head_dim"] = m.head_dim;
  o["qk_rope_head_dim"] = m.rope_dim;
  o["q_lora_rank"] = m.q_rank;
  o["o_groups"] = m.o_groups;
  o["o_lora_rank"] = m.o_rank;
  o["sliding_window"] = m.window;
  o["index_n_heads"] = m.index_heads;
  o["index_head_dim"] = m.index_head_dim;
  o["index_topk"] = m.index_topk;
  o["n_routed_experts"] = m.num_experts;
  o["n_shared_experts"] = 1;
  o["num_experts_per_tok"] = m.experts_per_token;
  o["moe_intermediate_size"] = m.expert_dim;
  o["scoring_func"] = "sqrtsoftplus";
  o["routed_scaling_factor"] = m.routed_scale;
  o["swiglu_limit"] = m.swiglu_limit;
  o["hidden_act"] = "silu";
  o["hc_mult"] = m.hc_mult;
  o["hc_sinkhorn_iters"] = m.sinkhorn_iters;
  o["hc_eps"] = m.hc_eps;
  o["rms_norm_eps"] = m.norm_eps;
  o["rope_theta"] = m.rope_theta;
  o["compress_rope_theta"] = m.compress_rope_theta;
  Json compress = {{"rope_type", "default"}, {"rope_theta", m.compress_rope_theta}};
  const RopeScaling& s = m.compress_rope_scaling;
  if (s.factor != 1.0f || s.original_positions != 0)
    compress = {{"rope_type", "yarn"},           {"rope_theta", m.compress_rope_theta},
                {"factor", s.factor},            {"original_max_position_embeddings", s.original_positions},
                {"beta_fast", s.beta_fast},      {"beta_slow", s.beta_slow},
                {"attention_factor", 1.0}};
  o["rope_parameters"] = {{"main", {{"rope_type", "default"}, {"rope_theta", m.rope_theta}}}, {"compress", compress}};
  o["max_position_embeddings"] = m.max_positions;
  o["initializer_range"] = m.initializer_range;
  o["bos_token_id"] = m.bos_id;
  o["eos_token_id"] = m.eos_id;
  o["tie_word_embeddings"] = false;
  // In transformers' spelling all layers of one kind share a rate; a config with more rates came from the released spelling and goes back to it.
  bool one_rate = true;
  int64_t hca_rate = 0, num_hash = 0;
  for (const LayerConfig& l : m.layers) {
    num_hash += l.hash_routed;
    if (l.attention != AttentionKind::hca) continue;
    one_rate &= hca_rate == 0 || hca_rate == l.ratio;
    hca_rate = l.ratio;
  }
  if (one_rate) {
    Json types = Json::array(), mlp = Json::array();
    Json rates = {{kCsaName, kReleasedOverlapRatio}, {kHcaName, 128}};
    for (const LayerConfig& l : m.layers) {
      types.push_back(l.attention == AttentionKind::swa ? kSwaName : l.attention == AttentionKind::csa ? kCsaName : kHcaName);
      mlp.push_back(l.hash_routed ? "hash_moe" : "moe");
      if (l.compressed()) rates[std::string(l.attention == AttentionKind::csa ? kCsaName : kHcaName)] = l.ratio;
    }
    o["layer_types"] = types;
    o["mlp_layer_types"] = mlp;
    o["compress_rates"] = rates;
  } else {
    Json ratios = Json::array();
    for (const LayerConfig& l : m.layers) ratios.push_back(l.ratio);
    o["compress_ratios"] = ratios;
    o["num_hash_layers"] = num_hash;
  }
  return o.dump(2) + "\n";
}

}  // namespace lockstep
