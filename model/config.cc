#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <numeric>

#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/json.h"
#include "ops/gate/gate.h"
#include "ops/hyperconn/hyperconn.h"

namespace lockstep {

namespace {

using Json = nlohmann::json;

constexpr std::string_view kSwaName = "sliding_attention";
constexpr std::string_view kCsaName = "compressed_sparse_attention";
constexpr std::string_view kHcaName = "heavily_compressed_attention";
constexpr int64_t kMaxHeadDim = 65536;
constexpr int64_t kMaxPageUnit = int64_t{1} << 20;
constexpr int64_t kReleasedOverlapRatio = 4;  // in compress_ratios, 4 and only 4 means overlapping compression with an indexer

// A value for a message. What has levels is not written out: writing recurses, and a file may hold any number of levels.
std::string shown(const Json& v) { return v.is_array() ? "a list" : v.is_object() ? "an object" : v.dump(); }

// Reads typed values of one JSON object; the first problem is kept in `status` and everything after it is a no-op.
class Reader {
 public:
  Reader(const Json& object, std::string origin, Status& status) : object_(object), origin_(std::move(origin)), status_(status) {}
  // A member that is an object, with messages that name it.
  Reader nested(const char* key) const { return Reader(object_.at(key), fmt::format("{}: {}", origin_, key), status_); }

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  // False when it is missing; anything but an object is a failure.
  bool has_object(const char* key) {
    if (!has(key)) return false;
    if (!object_.at(key).is_object()) fail(fmt::format("{} is {}, expected an object", key, shown(object_.at(key))));
    return object_.at(key).is_object();
  }
  const Json* find(const char* key) const { return has(key) ? &object_.at(key) : nullptr; }
  void fail(std::string message) {
    if (status_) status_ = errorf("{}: {}", origin_, message);
  }
  template <std::signed_integral T>
  void integer(const char* key, T& out, bool required = true) {
    number(key, required, [&](const Json& v) {
      const auto too_large = [&] { return v.is_number_unsigned() && v.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}; };
      if (!v.is_number_integer() || too_large() || v.get<int64_t>() != static_cast<T>(v.get<int64_t>()))
        return fail(fmt::format("{} is {}, expected an integer of at most {} bits", key, shown(v), 8 * sizeof(T)));
      out = static_cast<T>(v.get<int64_t>());
    });
  }
  template <std::floating_point T>
  void real(const char* key, T& out, bool required = true) {
    number(key, required, [&](const Json& v) {
      const double x = v.get<double>();
      if (!(std::abs(x) <= static_cast<double>(std::numeric_limits<T>::max())))
        return fail(fmt::format("{} is {}, expected a number of magnitude up to {}", key, shown(v), std::numeric_limits<T>::max()));
      out = static_cast<T>(x);
    });
  }

 private:
  template <typename F>
  void number(const char* key, bool required, F set) {
    if (!has(key)) {
      if (required) fail(fmt::format("{} is missing", key));
      return;
    }
    const Json& v = object_.at(key);
    if (!v.is_number()) return fail(fmt::format("{} is {}, expected a number", key, shown(v)));
    set(v);
  }

  const Json& object_;
  std::string origin_;
  Status& status_;
};

void read_rope_scaling(Reader r, RopeScaling& scaling) {
  const Json* type = r.has("rope_type") ? r.find("rope_type") : r.find("type");
  if (type == nullptr || *type == "default") return;
  if (*type != "yarn") return r.fail(fmt::format("rope scaling type is {}, only \"yarn\" and \"default\" exist in this model", shown(*type)));
  r.real("factor", scaling.factor, false);
  r.integer("original_max_position_embeddings", scaling.original_positions);
  if (scaling.original_positions < 1) r.fail(fmt::format("original_max_position_embeddings is {}, expected a positive integer", scaling.original_positions));
  r.real("beta_fast", scaling.beta_fast, false);
  r.real("beta_slow", scaling.beta_slow, false);
}

// rope_parameters (transformers: {main, compress}, or one flat block for the compressed layers) or rope_scaling (released).
void read_rope(Reader& r, ModelConfig& m) {
  r.real("rope_theta", m.rope_theta, false);
  r.real("compress_rope_theta", m.compress_rope_theta, false);
  if (r.has_object("rope_parameters")) {
    Reader p = r.nested("rope_parameters");
    if (p.has_object("main")) p.nested("main").real("rope_theta", m.rope_theta, false);
    if (p.has_object("compress")) {
      p.nested("compress").real("rope_theta", m.compress_rope_theta, false);
      read_rope_scaling(p.nested("compress"), m.compress_rope_scaling);
    } else if (!p.has("main")) {
      read_rope_scaling(p, m.compress_rope_scaling);
    }
  } else if (r.has_object("rope_scaling")) {
    read_rope_scaling(r.nested("rope_scaling"), m.compress_rope_scaling);
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
      return r.fail(fmt::format("compress_ratios[{}] is {}, expected 0 or an integer of at least 2", i, shown(v)));
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
  if (r.has_object("compress_rates")) {
    Reader rates = r.nested("compress_rates");
    rates.integer(kCsaName.data(), csa_rate, false);
    rates.integer(kHcaName.data(), hca_rate, false);
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
      return r.fail(fmt::format("layer_types[{}] is {}, expected {}, {} or {}", i, shown(t), kSwaName, kCsaName, kHcaName));
    }
    m.layers.push_back(layer);
  }
  if (const Json* mlp = r.find("mlp_layer_types")) {
    if (!mlp->is_array() || static_cast<int64_t>(mlp->size()) != num_layers)
      return r.fail(fmt::format("mlp_layer_types must list {} layers (num_hidden_layers)", num_layers));
    for (int64_t i = 0; i < num_layers; ++i) {
      const Json& t = (*mlp)[static_cast<size_t>(i)];
      if (t != "moe" && t != "hash_moe") return r.fail(fmt::format("mlp_layer_types[{}] is {}, expected \"moe\" or \"hash_moe\"", i, shown(t)));
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
    r.fail(fmt::format("model_type is {}, this program runs \"deepseek_v4\" only", shown(*v)));
  if (const Json* v = r.find("scoring_func"); v != nullptr && *v != "sqrtsoftplus")
    r.fail(fmt::format("scoring_func is {}, only \"sqrtsoftplus\" is defined for this model", shown(*v)));
  if (const Json* v = r.find("hidden_act"); v != nullptr && *v != "silu") r.fail(fmt::format("hidden_act is {}, only \"silu\" is defined for this model", shown(*v)));
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
    if (l.compressed() && unit <= kMaxPageUnit) unit = std::lcm(unit, l.ratio);  // beyond that the config is refused
  return unit;
}

Result<ModelConfig> parse_model_config(std::string_view json, std::string_view origin) {
  // Stricter than the parser below: it names the place, and refuses a key that stands twice.
  if (const Result<JsonValue> strict = parse_json(json); !strict) return errorf("{}: not valid JSON: {}", origin, strict.message());
  const Json object = Json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return errorf("{}: not valid JSON", origin);
  if (!object.is_object()) return errorf("{}: expected a JSON object", origin);
  ModelConfig m;
  Status status;
  Reader r(object, std::string(origin), status);
  try {
    check_fixed_choices(r);
    int64_t num_layers = 0;
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
      if (factor < 0 || factor > 1) r.fail(fmt::format("partial_rotary_factor is {}, expected 0 to 1", factor));
      m.rope_dim = static_cast<int64_t>(static_cast<double>(std::clamp<int64_t>(m.head_dim, 0, kMaxHeadDim)) * std::clamp(factor, 0.0, 1.0));
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
    r.integer("hc_sinkhorn_iters", m.sinkhorn_iters, false);
    r.real("hc_eps", m.hc_eps, false);
    r.real("rms_norm_eps", m.norm_eps, false);
    r.integer("max_position_embeddings", m.max_positions);
    r.real("initializer_range", m.initializer_range, false);
    r.integer("bos_token_id", m.bos_id, false);
    r.integer("eos_token_id", m.eos_id, false);
    r.integer("num_nextn_predict_layers", m.num_drafts, false);
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
  LOCKSTEP_RETURN_IF_ERROR(status);
  LOCKSTEP_RETURN_IF_ERROR(check_model_config(m, origin));
  return m;
}

Result<ModelConfig> load_model_config(const std::string& path) {
  Result<std::string> text = read_file(path);
  if (!text) return errorf("the model config: {}", text.message());
  return parse_model_config(text.value(), path);
}

Status check_model_config(const ModelConfig& m, std::string_view origin) {
  constexpr int64_t kMaxDim = int64_t{1} << 24;       // keeps every product of two sizes within 64 bits and every id within 32
  constexpr int64_t kMaxElements = int64_t{1} << 40;  // of one tensor: keeps the bytes of all tensors within 64 bits
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
      {"head_dim", m.head_dim, 2, kMaxHeadDim},
      {"qk_rope_head_dim", m.rope_dim, 2, std::min(m.head_dim, kMaxRopeDim)},
      {"q_lora_rank", m.q_rank, 1, kMaxDim},
      {"o_groups", m.o_groups, 1, m.num_heads},
      {"o_lora_rank", m.o_rank, 1, kMaxDim},
      {"sliding_window", m.window, 1, kMaxDim},
      {"n_routed_experts", m.num_experts, 1, kMaxExperts},
      {"num_experts_per_tok", m.experts_per_token, 1, std::min(m.num_experts, kMaxExpertsPerToken)},
      {"moe_intermediate_size", m.expert_dim, 1, kMaxDim},
      {"hc_mult", m.hc_mult, 1, kHyperMaxStreams},
      {"hc_sinkhorn_iters", m.sinkhorn_iters, 1, 64},
      {"max_position_embeddings", m.max_positions, 1, kMaxDim},
      {"index_n_heads", m.index_heads, has_csa ? 1 : 0, 65536},
      {"index_head_dim", m.index_head_dim, has_csa ? m.rope_dim : 0, 65536},
      {"index_topk", m.index_topk, has_csa ? 1 : 0, kMaxDim},
      {"bos_token_id", m.bos_id, 0, m.vocab_size - 1},
      {"eos_token_id", m.eos_id, 0, m.vocab_size - 1},
      {"num_nextn_predict_layers", m.num_drafts, 0, 64},
  };
  for (const Range& r : ranges)
    if (r.value < r.low || r.value > r.high) return errorf("{}: {} is {}, expected {} to {}", origin, r.name, r.value, r.low, r.high);
  if (m.rope_dim % 2 != 0) return errorf("{}: qk_rope_head_dim is {}, rotation works on pairs: it must be even", origin, m.rope_dim);
  if (m.num_heads % m.o_groups != 0)
    return errorf("{}: num_attention_heads {} is not divisible by o_groups {}", origin, m.num_heads, m.o_groups);
  const double D = static_cast<double>(m.hidden_size), d = static_cast<double>(m.head_dim), rank = static_cast<double>(m.q_rank);
  const double groups_rank = static_cast<double>(m.o_groups) * static_cast<double>(m.o_rank);
  for (const auto& [names, elements] : {
           std::pair{"vocab_size x hidden_size", static_cast<double>(m.vocab_size) * D},
           {"n_routed_experts x moe_intermediate_size x hidden_size", static_cast<double>(m.num_experts * m.expert_dim) * D},
           {"num_attention_heads x head_dim x q_lora_rank", static_cast<double>(m.num_heads) * d * rank},
           {"num_attention_heads x head_dim x o_lora_rank", static_cast<double>(m.num_heads) * d * static_cast<double>(m.o_rank)},
           {"o_groups x o_lora_rank x hidden_size", groups_rank * D},
           {"q_lora_rank x hidden_size", rank * D},
           {"2 x head_dim x hidden_size", 2 * d * D},
           {"index_n_heads x index_head_dim x q_lora_rank", static_cast<double>(m.index_heads * m.index_head_dim) * rank},
           {"2 x index_head_dim x hidden_size", 2 * static_cast<double>(m.index_head_dim) * D},
       })
    if (elements > static_cast<double>(kMaxElements))
      return errorf("{}: {} is {:.0f}, more than the 2^40 numbers that a tensor may hold", origin, names, elements);
  for (const auto& [name, value] : {std::pair{"rms_norm_eps", m.norm_eps}, {"hc_eps", m.hc_eps}, {"routed_scaling_factor", m.routed_scale}})
    if (!(value > 0.0f) || !std::isfinite(value)) return errorf("{}: {} is {}, expected a positive number", origin, name, value);
  if (!(m.swiglu_limit >= 0.0f) || !std::isfinite(m.swiglu_limit))
    return errorf("{}: swiglu_limit is {}, expected a positive number, or 0 for no limit", origin, m.swiglu_limit);
  if (!(m.initializer_range >= 0.0f) || !std::isfinite(m.initializer_range))
    return errorf("{}: initializer_range is {}, expected a number of at least 0", origin, m.initializer_range);
  for (const auto& [name, value] : {std::pair{"rope_theta", m.rope_theta}, {"compress_rope_theta", m.compress_rope_theta}})
    if (!(value > 1.0) || !std::isfinite(value)) return errorf("{}: {} is {}, expected more than 1", origin, name, value);
  const RopeScaling& scaling = m.compress_rope_scaling;
  if (!(scaling.factor >= 1.0f) || !std::isfinite(scaling.factor))
    return errorf("{}: rope scaling factor is {}, expected at least 1", origin, scaling.factor);
  if (scaling.original_positions < (scaling.factor > 1.0f ? 1 : 0))
    return errorf("{}: original_max_position_embeddings of the rope scaling is {}, expected a positive integer", origin, scaling.original_positions);
  for (const auto& [name, value] : {std::pair{"beta_fast", scaling.beta_fast}, {"beta_slow", scaling.beta_slow}})
    if (!(value > 0.0f) || !std::isfinite(value)) return errorf("{}: {} of the rope scaling is {}, expected a positive number", origin, name, value);
  if (m.layers.empty()) return errorf("{}: the model has no layers", origin);
  for (int64_t i = 0; i < m.num_layers(); ++i) {
    const LayerConfig& l = m.layers[static_cast<size_t>(i)];
    const bool window_only = l.attention == AttentionKind::swa;
    if (window_only != (l.ratio == 0) || l.ratio < 0 || l.ratio == 1 || l.ratio > 65536)
      return errorf("{}: layer {} is {} with compression ratio {}; {}", origin, i, attention_kind_name(l.attention), l.ratio,
                    window_only ? "a window-only layer has ratio 0" : "a compressed layer needs a ratio from 2 to 65536");
  }
  if (m.page_unit() > kMaxPageUnit)
    return errorf("{}: the compression ratios' least common multiple is {} or more, over 2^20; state pages would be too large", origin, m.page_unit());
  return Status::ok();
}

namespace {

bool has_released_spelling(const ModelConfig& m) {
  bool score_routed = false;
  for (const LayerConfig& l : m.layers) {
    if (l.compressed() && l.overlap() != (l.ratio == kReleasedOverlapRatio)) return false;
    if (l.hash_routed && score_routed) return false;
    score_routed |= !l.hash_routed;
  }
  return true;
}

}  // namespace

std::string model_config_json(const ModelConfig& m, ConfigSpelling spelling) {
  const bool released = spelling == ConfigSpelling::released && has_released_spelling(m);
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
  const bool scaled = s.factor != 1.0f || s.original_positions != 0;
  if (scaled)
    compress = {{"rope_type", "yarn"},           {"rope_theta", m.compress_rope_theta},
                {"factor", s.factor},            {"original_max_position_embeddings", s.original_positions},
                {"beta_fast", s.beta_fast},      {"beta_slow", s.beta_slow},
                {"attention_factor", 1.0}};
  if (released) {
    if (scaled)
      o["rope_scaling"] = {{"type", "yarn"},
                           {"factor", s.factor},
                           {"original_max_position_embeddings", s.original_positions},
                           {"beta_fast", s.beta_fast},
                           {"beta_slow", s.beta_slow}};
    o["topk_method"] = "noaux_tc";
    o["norm_topk_prob"] = true;
  } else {
    // transformers takes the rotated share of a head from here, not from qk_rope_head_dim.
    const double rotated = static_cast<double>(m.rope_dim) / static_cast<double>(m.head_dim);
    Json main = {{"rope_type", "default"}, {"rope_theta", m.rope_theta}, {"partial_rotary_factor", rotated}};
    compress["partial_rotary_factor"] = rotated;
    o["partial_rotary_factor"] = rotated;
    o["rope_parameters"] = {{"main", main}, {"compress", compress}};
  }
  o["max_position_embeddings"] = m.max_positions;
  o["initializer_range"] = m.initializer_range;
  o["bos_token_id"] = m.bos_id;
  o["eos_token_id"] = m.eos_id;
  o["tie_word_embeddings"] = false;
  if (m.num_drafts > 0) o["num_nextn_predict_layers"] = m.num_drafts;
  // In transformers' spelling all layers of one kind share a rate; a config with more rates came from the released spelling and goes back to it.
  bool one_rate = true;
  int64_t hca_rate = 0, num_hash = 0;
  for (const LayerConfig& l : m.layers) {
    num_hash += l.hash_routed;
    if (l.attention != AttentionKind::hca) continue;
    one_rate &= hca_rate == 0 || hca_rate == l.ratio;
    hca_rate = l.ratio;
  }
  if (one_rate && !released) {
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
    for (int64_t i = 0; i < m.num_drafts; ++i) ratios.push_back(0);
    o["compress_ratios"] = ratios;
    o["num_hash_layers"] = num_hash;
  }
  return o.dump(2) + "\n";
}

}  // namespace lockstep
