#include "model/checkpoint_io.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "io/file.h"
#include "io/json.h"

namespace lockstep {

namespace {

struct Rename {
  std::string_view from, to;
};

// Applied in order to the part behind "layers.N."; each acts on whole dotted pieces.
constexpr Rename kLayerRenames[] = {
    {"input_layernorm", "attn_norm"},
    {"post_attention_layernorm", "ffn_norm"},
    {"attn_hc.fn", "hc_attn_fn"},
    {"attn_hc.base", "hc_attn_base"},
    {"attn_hc.scale", "hc_attn_scale"},
    {"ffn_hc.fn", "hc_ffn_fn"},
    {"ffn_hc.base", "hc_ffn_base"},
    {"ffn_hc.scale", "hc_ffn_scale"},
    {"self_attn", "attn"},
    {"mlp", "ffn"},
    {"ffn.topk.tid2eid", "ffn.gate.tid2eid"},
    {"ffn.gate.e_score_correction_bias", "ffn.gate.bias"},
    {"attn.compressor.indexer", "attn.indexer"},
    {"indexer.scorer.weights_proj", "indexer.weights_proj"},
    {"indexer.q_b_proj", "indexer.wq_b"},
    {"indexer.kv_proj", "indexer.compressor.wkv"},
    {"indexer.gate_proj", "indexer.compressor.wgate"},
    {"indexer.position_bias", "indexer.compressor.ape"},
    {"indexer.kv_norm", "indexer.compressor.norm"},
    {"compressor.kv_proj", "compressor.wkv"},
    {"compressor.gate_proj", "compressor.wgate"},
    {"compressor.position_bias", "compressor.ape"},
    {"compressor.kv_norm", "compressor.norm"},
    {"attn.q_a_proj", "attn.wq_a"},
    {"attn.q_a_norm", "attn.q_norm"},
    {"attn.q_b_proj", "attn.wq_b"},
    {"attn.kv_proj", "attn.wkv"},
    {"attn.norm", "attn.kv_norm"},  // a slip of transformers 5.17's save_pretrained
    {"attn.o_a_proj", "attn.wo_a"},
    {"attn.o_b_proj", "attn.wo_b"},
    {"attn.sinks", "attn.attn_sink"},
    {"gate_proj", "w1"},
    {"up_proj", "w3"},
    {"down_proj", "w2"},
};
constexpr Rename kTopRenames[] = {
    {"embed_tokens", "embed"},          {"lm_head", "head"},
    {"hc_head.hc_fn", "hc_head_fn"},    {"hc_head.hc_base", "hc_head_base"},
    {"hc_head.hc_scale", "hc_head_scale"},
};

// Replaces `from` by `to` where it stands between dots or ends.
void rename_pieces(std::string& name, const Rename& r) {
  size_t at = 0;
  while ((at = name.find(r.from, at)) != std::string::npos) {
    const size_t end = at + r.from.size();
    const bool whole = (at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.');
    if (whole) {
      name.replace(at, r.from.size(), r.to);
      return;  // no piece occurs twice in a name
    }
    at = end;
  }
}

void convert_rows(TensorView to, const char* from, DType dtype) {  // contiguous, same element count
  const int64_t n = to.shape.elements();
  float* p = to.ptr<float>();
  for (int64_t i = 0; i < n; ++i) {
    if (dtype == DType::f32) {
      std::memcpy(&p[i], from + i * 4, 4);
    } else if (dtype == DType::bf16) {
      bf16 b;
      std::memcpy(&b, from + i * 2, 2);
      p[i] = to_f32(b);
    } else {
      double v;
      std::memcpy(&v, from + i * 8, 8);
      p[i] = static_cast<float>(v);
    }
  }
}

std::string list_names(const std::vector<std::string>& names) {
  std::string s;
  for (size_t i = 0; i < names.size() && i < 8; ++i) s += (i ? ", " : "") + names[i];
  if (names.size() > 8) s += fmt::format(" and {} more", names.size() - 8);
  return s;
}

// One file tensor being copied to its place.
class Loader {
 public:
  Loader(const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters)
      : config_(config), table_(table), masters_(masters), filled_(table.size()) {}

  Status copy(const SafetensorsFile& file, const SafetensorsEntry& e, const TensorPiece& piece) {
    const TensorSpec& spec = table_[static_cast<size_t>(piece.id)];
    TensorView to = masters_.views[static_cast<size_t>(piece.id)];
    if (!filled_[static_cast<size_t>(piece.id)].insert(piece.expert).second)
      return errorf("{}: tensor {} gives {} a second time", file.path(), e.name, spec.name);
    Shape want = spec.shape;
    if (piece.expert >= 0) {
      if (piece.expert >= spec.shape[0])
        return errorf("{}: tensor {} is of expert {}, the config has n_routed_experts {}", file.path(), e.name, piece.expert, spec.shape[0]);
      to = to.at(piece.expert);
      want = to.shape;
    }
    if (piece.gate_up_half >= 0) want.dims[1] *= 2;
    if (e.shape.size() != static_cast<size_t>(want.rank) || !std::equal(e.shape.begin(), e.shape.end(), want.dims.begin()))
      return errorf("{}: tensor {} has shape {}, the config asks for {}", file.path(), e.name, e.shape_str(), want.str());
    const char* bytes = reinterpret_cast<const char*>(file.bytes(e).data());
    if (spec.role == TensorRole::hash_table) return copy_ids(file, e, bytes, to);
    DType dtype = DType::f32;
    if (e.dtype == "BF16") {
      dtype = DType::bf16;
    } else if (e.dtype == "F64") {
      dtype = DType::f64;
    } else if (e.dtype != "F32") {
      return errorf("{}: tensor {} is {}, expected F32, BF16 or F64; quantised checkpoints must be converted to bf16 first", file.path(), e.name, e.dtype);
    }
    if (piece.gate_up_half < 0) {
      convert_rows(to, bytes, dtype);
    } else {
      const size_t half = static_cast<size_t>(spec.shape[1] * spec.shape[2]) * dtype_bytes(dtype);
      for (int64_t x = 0; x < spec.shape[0]; ++x)
        convert_rows(to.at(x), bytes + (2 * static_cast<size_t>(x) + static_cast<size_t>(piece.gate_up_half)) * half, dtype);
    }
    const float *begin = to.ptr<float>(), *end = begin + to.shape.elements();
    if (const float* bad = std::find_if(begin, end, [](float v) { return !std::isfinite(v); }); bad != end)
      return errorf("{}: tensor {} holds {}, which no computation can recover from; the checkpoint is damaged or its training diverged", file.path(), e.name, *bad);
    return Status::ok();
  }

  std::vector<std::string> missing() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < table_.size(); ++i) {
      if (filled_[i].contains(-1)) continue;
      if (table_[i].role != TensorRole::expert || filled_[i].empty()) {
        names.push_back(table_[i].name);
        continue;
      }
      for (int64_t x = 0; x < table_[i].shape[0]; ++x)
        if (!filled_[i].contains(x)) names.push_back(fmt::format("{} (expert {})", table_[i].name, x));
    }
    return names;
  }

 private:
  Status copy_ids(const SafetensorsFile& file, const SafetensorsEntry& e, const char* bytes, TensorView to) {
    if (e.dtype != "I64" && e.dtype != "I32") return errorf("{}: tensor {} is {}, expected I64 or I32", file.path(), e.name, e.dtype);
    const int64_t n = to.shape.elements();
    for (int64_t i = 0; i < n; ++i) {
      int64_t id = 0;
      int32_t narrow = 0;
      if (e.dtype == "I64") {
        std::memcpy(&id, bytes + i * 8, 8);
      } else {
        std::memcpy(&narrow, bytes + i * 4, 4);
        id = narrow;
      }
      if (id < 0 || id >= config_.num_experts)
        return errorf("{}: tensor {} names expert {} at element {}, expected 0 to {}", file.path(), e.name, id, i, config_.num_experts - 1);
      to.ptr<int32_t>()[i] = static_cast<int32_t>(id);
    }
    return Status::ok();
  }

  const ModelConfig& config_;
  const std::vector<TensorSpec>& table_;
  TensorSet& masters_;
  std::vector<std::set<int64_t>> filled_;  // expert ids, or -1 for the whole tensor
};

}  // namespace

std::string released_name(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  std::string s(name);
  if (!s.starts_with("layers.")) {
    for (const Rename& r : kTopRenames) rename_pieces(s, r);
    return s;
  }
  const size_t dot = s.find('.', 7);
  if (dot == std::string::npos) return s;
  std::string rest = s.substr(dot + 1);
  for (const Rename& r : kLayerRenames) rename_pieces(rest, r);
  return s.substr(0, dot + 1) + rest;
}

TensorNames::TensorNames(const std::vector<TensorSpec>& table) : table_(table) {
  for (const TensorSpec& t : table) sorted_.emplace_back(t.name, t.id);
  std::sort(sorted_.begin(), sorted_.end());
}

std::vector<TensorPiece> TensorNames::pieces(std::string_view file_name) const {
  const auto find = [&](const std::string& name) {
    const auto it = std::lower_bound(sorted_.begin(), sorted_.end(), std::pair(name, -1));
    return it != sorted_.end() && it->first == name ? it->second : -1;
  };
  std::string name = released_name(file_name);
  if (const int id = find(name); id >= 0) return {TensorPiece{id, -1, -1}};
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = name.find(kExperts);
  if (at == std::string::npos) return {};
  const std::string head = name.substr(0, at + kExperts.size()), tail = name.substr(at + kExperts.size());
  if (tail == "gate_up_proj") {
    const int w1 = find(head + "*.w1.weight"), w3 = find(head + "*.w3.weight");
    if (w1 < 0 || w3 < 0) return {};
    return {TensorPiece{w1, -1, 0}, TensorPiece{w3, -1, 1}};
  }
  if (const int id = find(head + "*." + tail + ".weight"); id >= 0) return {TensorPiece{id, -1, -1}};  // a whole stack, w2 of down_proj
  int64_t expert = -1;
  const auto [end, error] = std::from_chars(tail.data(), tail.data() + tail.size(), expert);
  if (error != std::errc() || expert < 0 || end == tail.data() + tail.size() || *end != '.') return {};
  const int id = find(head + "*" + std::string(end, tail.data() + tail.size()));
  if (id < 0) return {};
  return {TensorPiece{id, expert, -1}};
}

Result<std::vector<std::string>> checkpoint_files(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::exists(path, error)) return errorf("{}: no such file or directory", path);
  if (!fs::is_directory(path, error)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  const std::string index = path + "/model.safetensors.index.json";
  if (fs::exists(index, error)) {
    Result<std::string> text = read_file(index);
    if (!text) return text.status();
    Result<JsonValue> json = parse_json(text.value());
    if (!json) return errorf("{}: {}", index, json.message());
    const JsonValue* map = json.value().find("weight_map");
    if (map == nullptr || !map->is(JsonValue::Kind::object)) return errorf("{}: weight_map is missing or no object", index);
    std::set<std::string> shards;
    for (const auto& [tensor, shard] : map->members) {
      if (!shard.is(JsonValue::Kind::string) || shard.text.find('/') != std::string::npos)
        return errorf("{}: weight_map.{} must be a file name in the same directory", index, tensor);
      shards.insert(shard.text);
    }
    for (const std::string& s : shards) files.push_back(path + "/" + s);
  } else {
    for (const auto& entry : fs::directory_iterator(path, error))
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
  }
  if (error) return errorf("{}: {}", path, error.message());
  if (files.empty()) return errorf("{}: the directory holds no .safetensors file", path);
  return files;
}

Result<LoadReport> load_masters(const std::vector<std::string>& files, std::string_view prefix, const ModelConfig& config,
                                const std::vector<TensorSpec>& table, TensorSet& masters) {
  const TensorNames names(table);
  Loader loader(config, table, masters);
  LoadReport report;
  for (const std::string& path : files) {
    Result<SafetensorsFile> file = SafetensorsFile::open(path);
    if (!file) return file.status();
    for (const SafetensorsEntry& e : file.value().tensors()) {
      if (!std::string_view(e.name).starts_with(prefix)) continue;
      const std::string_view name = std::string_view(e.name).substr(prefix.size());
      const std::vector<TensorPiece> pieces = names.pieces(name);
      if (pieces.empty() && !name.starts_with("mtp.") && !name.starts_with("model.mtp.")) report.unexpected.push_back(e.name);
      for (const TensorPiece& piece : pieces) LOCKSTEP_RETURN_IF_ERROR(loader.copy(file.value(), e, piece));
    }
  }
  report.missing = loader.missing();
  return report;
}

Status load_checkpoint(const std::string& path, const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters) {
  Result<std::vector<std::string>> files = checkpoint_files(path);
  if (!files) return files.status();
  Result<LoadReport> report = load_masters(files.value(), "", config, table, masters);
  if (!report) return report.status();
  if (!report.value().missing.empty())
    return errorf("{}: {} tensors of the config are missing: {}", path, report.value().missing.size(), list_names(report.value().missing));
  if (!report.value().unexpected.empty())
    return errorf("{}: {} tensors do not belong to the config: {}", path, report.value().unexpected.size(), list_names(report.value().unexpected));
  return Status::ok();
}

void for_each_released(const std::vector<TensorSpec>& table, const TensorSet& masters, const std::function<void(std::string, ConstTensorView)>& f) {
  for (const TensorSpec& t : table) {
    const TensorView& v = masters.views[static_cast<size_t>(t.id)];
    if (t.role != TensorRole::expert) {
      f(t.name, v);
      continue;
    }
    const size_t star = t.name.find('*');
    for (int64_t e = 0; e < t.shape[0]; ++e) f(t.name.substr(0, star) + std::to_string(e) + t.name.substr(star + 1), v.at(e));
  }
}

Status save_checkpoint(const std::string& directory, const ModelConfig& config, const std::vector<TensorSpec>& table, const TensorSet& masters) {
  LOCKSTEP_RETURN_IF_ERROR(make_directories(directory));
  SafetensorsWriter writer;
  for_each_released(table, masters, [&](std::string name, ConstTensorView v) { writer.add(std::move(name), v); });
  writer.add_metadata("format", "pt");
  LOCKSTEP_RETURN_IF_ERROR(writer.write(directory + "/model.safetensors"));
  return atomic_write(directory + "/config.json", model_config_json(config));
}

}  // namespace lockstep
