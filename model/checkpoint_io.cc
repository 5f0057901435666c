#include "model/checkpoint_io.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "io/file.h"
#include "io/json.h"
#include "model/checkpoint_boxes.h"

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

// `count` numbers at `from`, which need not be aligned.
void convert_numbers(float* to, const uint8_t* from, DType dtype, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == DType::f32) {
      std::memcpy(&to[i], from + i * 4, 4);
    } else if (dtype == DType::bf16) {
      bf16 b;
      std::memcpy(&b, from + i * 2, 2);
      to[i] = to_f32(b);
    } else {
      double v;
      std::memcpy(&v, from + i * 8, 8);
      to[i] = static_cast<float>(v);
    }
  }
}

// What neither a forward nor a training step could recover from, in the box of a tensor with `columns` columns.
Status check_values(const ModelConfig& config, const std::string& file, const std::string& name, int64_t columns, const Box& box, TensorView out) {
  for (int64_t r = 0; r < out.rows(); ++r) {
    for (int64_t k = 0; k < out.dim(1); ++k) {
      if (out.dtype == DType::i32) {
        const int32_t id = out.row<int32_t>(r)[k];
        if (id < 0 || id >= config.num_experts)
          return errorf("{}: tensor {} names expert {} at element {}, expected 0 to {}", file, name, id,
                        (box.rows.begin + r) * columns + box.columns.begin + k, config.num_experts - 1);
      } else if (const float v = out.row<float>(r)[k]; !std::isfinite(v)) {
        return errorf("{}: tensor {} holds {}, which no computation can recover from; the checkpoint is damaged or its training diverged", file,
                      name, v);
      }
    }
  }
  return Status::ok();
}

std::string list_names(const std::vector<std::string>& names) {
  std::string s;
  for (size_t i = 0; i < names.size() && i < 8; ++i) s += (i ? ", " : "") + names[i];
  if (names.size() > 8) s += fmt::format(" and {} more", names.size() - 8);
  return s;
}

// Tensors of released files, found by their headers and read from the mapping row by row.
class ReleasedTensors {
 public:
  explicit ReleasedTensors(const ModelConfig& config) : config_(config), table_(tensor_table(config)), places_(table_.size()) {}

  // `path` is what errors call the whole of `files`.
  Status open(const std::string& path, const std::vector<std::string>& files, std::string_view prefix) {
    const TensorNames names(table_);
    std::vector<std::string> unexpected;
    for (const std::string& name : files) {
      Result<SafetensorsFile> opened = SafetensorsFile::open(name);
      if (!opened) return opened.status();
      files_.push_back(opened.take());
      const SafetensorsFile& file = files_.back();
      for (const SafetensorsEntry& e : file.tensors()) {
        if (!std::string_view(e.name).starts_with(prefix)) continue;
        const std::string_view name_in_model = std::string_view(e.name).substr(prefix.size());
        const std::vector<TensorPiece> pieces = names.pieces(name_in_model);
        const bool draft = name_in_model.starts_with("mtp.") || name_in_model.starts_with("model.mtp.");
        if (pieces.empty() && !draft) unexpected.push_back(e.name);
        for (const TensorPiece& piece : pieces) LOCKSTEP_RETURN_IF_ERROR(place(file, e, piece));
      }
    }
    if (const std::vector<std::string> names_missing = missing(); !names_missing.empty())
      return errorf("{}: {} tensors of the config are missing: {}", path, names_missing.size(), list_names(names_missing));
    if (!unexpected.empty()) return errorf("{}: {} tensors do not belong to the config: {}", path, unexpected.size(), list_names(unexpected));
    return Status::ok();
  }

  Status read(const TensorSpec& spec, const Box& box, TensorView out) const {
    const std::map<int64_t, Place>& places = places_[static_cast<size_t>(spec.id)];
    const Box whole = whole_box(spec.whole);
    const bool expert_stack = spec.role == TensorRole::expert;
    const int64_t columns = whole.columns.size(), expert_rows = expert_stack ? whole.rows.size() / spec.whole[0] : whole.rows.size();
    for (int64_t r = box.rows.begin; r < box.rows.end; ++r) {
      const int64_t expert = r / expert_rows;
      const auto own = places.find(expert_stack ? expert : kWhole);
      const Place& at = own != places.end() ? own->second : places.at(kWhole);
      int64_t row = r;  // of the file's tensor
      if (own != places.end() && expert_stack) row = r - expert * expert_rows;
      if (at.gate_up_half >= 0) row = r + (expert + at.gate_up_half) * expert_rows;
      const uint8_t* from = at.bytes + static_cast<size_t>(row * columns + box.columns.begin) * dtype_bytes(at.dtype);
      const TensorView to = out.slice(r - box.rows.begin, 1);
      if (spec.role == TensorRole::hash_table) {
        LOCKSTEP_RETURN_IF_ERROR(convert_ids(at, from, to));
      } else {
        convert_numbers(to.ptr<float>(), from, at.dtype, to.dim(1));
      }
      LOCKSTEP_RETURN_IF_ERROR(check_values(config_, at.file->path(), *at.name, columns, {{row, row + 1}, box.columns}, to));
    }
    return Status::ok();
  }

 private:
  static constexpr int64_t kWhole = -1;
  struct Place {
    const SafetensorsFile* file;
    const std::string* name;  // in the file
    const uint8_t* bytes;
    DType dtype;
    int64_t gate_up_half;
  };

  Status place(const SafetensorsFile& file, const SafetensorsEntry& e, const TensorPiece& piece) {
    const TensorSpec& spec = table_[static_cast<size_t>(piece.id)];
    Shape want = spec.whole;
    if (piece.expert >= 0) {
      if (piece.expert >= spec.whole[0])
        return errorf("{}: tensor {} is of expert {}, the config has n_routed_experts {}", file.path(), e.name, piece.expert, spec.whole[0]);
      want = {spec.whole[1], spec.whole[2]};
    }
    if (piece.gate_up_half >= 0) want.dims[1] *= 2;
    if (e.shape.size() != static_cast<size_t>(want.rank) || !std::equal(e.shape.begin(), e.shape.end(), want.dims.begin()))
      return errorf("{}: tensor {} has shape {}, the config asks for {}", file.path(), e.name, e.shape_str(), want.str());
    DType dtype = DType::f32;
    if (spec.role == TensorRole::hash_table) {
      if (e.dtype != "I64" && e.dtype != "I32") return errorf("{}: tensor {} is {}, expected I64 or I32", file.path(), e.name, e.dtype);
      dtype = e.dtype == "I64" ? DType::i64 : DType::i32;
    } else if (e.dtype == "BF16") {
      dtype = DType::bf16;
    } else if (e.dtype == "F64") {
      dtype = DType::f64;
    } else if (e.dtype != "F32") {
      return errorf("{}: tensor {} is {}, expected F32, BF16 or F64; quantised checkpoints must be converted to bf16 first", file.path(), e.name, e.dtype);
    }
    const Place at = {&file, &e.name, file.bytes(e).data(), dtype, piece.gate_up_half};
    std::map<int64_t, Place>& places = places_[static_cast<size_t>(piece.id)];
    const bool beside_other_form = !places.empty() && (piece.expert == kWhole || places.contains(kWhole));
    if (beside_other_form || !places.emplace(piece.expert, at).second)
      return errorf("{}: tensor {} gives {} a second time", file.path(), e.name, spec.name);
    return Status::ok();
  }

  // Table tensors, or "NAME (expert E)", without data.
  std::vector<std::string> missing() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < table_.size(); ++i) {
      if (places_[i].contains(kWhole)) continue;
      if (table_[i].role != TensorRole::expert || places_[i].empty()) {
        names.push_back(table_[i].name);
        continue;
      }
      for (int64_t x = 0; x < table_[i].whole[0]; ++x)
        if (!places_[i].contains(x)) names.push_back(fmt::format("{} (expert {})", table_[i].name, x));
    }
    return names;
  }

  static Status convert_ids(const Place& at, const uint8_t* from, TensorView to) {
    int32_t* ids = to.ptr<int32_t>();
    for (int64_t i = 0; i < to.dim(1); ++i) {
      int64_t id = 0;
      if (at.dtype == DType::i32) {
        std::memcpy(&ids[i], from + i * 4, 4);
        continue;
      }
      std::memcpy(&id, from + i * 8, 8);
      ids[i] = static_cast<int32_t>(id);
      if (ids[i] != id) return errorf("{}: tensor {} names expert {}", at.file->path(), *at.name, id);
    }
    return Status::ok();
  }

  const ModelConfig config_;
  const std::vector<TensorSpec> table_;
  std::deque<SafetensorsFile> files_;              // places point into them
  std::vector<std::map<int64_t, Place>> places_;  // [table] by expert, or kWhole
};

// The masters of a run: whole tensors by the table's names, in any number of files.
Result<ReadBox> masters_source(const std::string& directory, const ModelConfig& config) {
  Result<BoxFiles> opened = BoxFiles::open(directory, kMastersStem);
  if (!opened) return opened.status();
  const auto files = std::make_shared<const BoxFiles>(opened.take());
  std::vector<WholeTensor> wanted;
  for (const TensorSpec& t : tensor_table(config)) wanted.push_back({t.name, t.whole, t.master_dtype()});
  LOCKSTEP_RETURN_IF_ERROR(files->check(wanted));
  return ReadBox([files, config](const TensorSpec& spec, const Box& box, TensorView out) {
    LOCKSTEP_RETURN_IF_ERROR(files->read(spec.name, box, out));
    return check_values(config, files->directory(), spec.name, whole_box(spec.whole).columns.size(), box, out);
  });
}

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

Result<ReadBox> released_source(const std::string& path, const std::vector<std::string>& files, std::string_view prefix, const ModelConfig& config) {
  const auto tensors = std::make_shared<ReleasedTensors>(config);
  LOCKSTEP_RETURN_IF_ERROR(tensors->open(path, files, prefix));
  return ReadBox([tensors](const TensorSpec& spec, const Box& box, TensorView out) { return tensors->read(spec, box, out); });
}

Result<ReadBox> checkpoint_source(const std::string& path, const ModelConfig& config) {
  if (has_box_files(path, kMastersStem)) return masters_source(path, config);
  Result<std::vector<std::string>> files = checkpoint_files(path);
  if (!files) return files.status();
  return released_source(path, files.value(), "", config);
}

Status load_checkpoint(const std::string& path, const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters) {
  Result<ReadBox> source = checkpoint_source(path, config);
  return source ? read_masters(table, source.value(), masters) : source.status();
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
