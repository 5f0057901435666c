#include "model/checkpoint_io.h"

#include <algorithm>
#include <charconv>
#include <deque>
#include <memory>

#include "io/file.h"
#include "model/checkpoint_boxes.h"
#include "model/checkpoint_index.h"
#include "model/checkpoint_tensors.h"

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
  const bool draft = name.starts_with("mtp.");
  const size_t dot = draft || name.starts_with("layers.") ? s.find('.', s.find('.') + 1) : std::string::npos;
  if (dot == std::string::npos) {
    for (const Rename& r : kTopRenames) rename_pieces(s, r);
    return s;
  }
  std::string rest = s.substr(dot + 1);
  for (const Rename& r : kLayerRenames) rename_pieces(rest, r);
  if (draft)
    for (const Rename& r : kTopRenames) rename_pieces(rest, r);  // a head of its own
  return s.substr(0, dot + 1) + rest;
}

std::string scaled_tensor_name(std::string_view name) {
  const std::string released = released_name(name);
  for (const std::string_view suffix : {".scale", ".weight_scale_inv"})
    if (released.ends_with(suffix)) return released.substr(0, released.size() - suffix.size()) + ".weight";
  return "";
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

namespace {

Result<ReadBox> tensors_source(const std::string& path, std::deque<SafetensorsFile> files, std::string_view prefix, const ModelConfig& config) {
  Result<std::shared_ptr<const CheckpointTensors>> scanned = CheckpointTensors::scan(std::move(files), prefix, config);
  if (!scanned) return scanned.status();
  const auto tensors = scanned.take();
  LOCKSTEP_RETURN_IF_ERROR(tensors->check(path));
  return ReadBox([tensors](const TensorSpec& spec, const Box& box, TensorView out) { return tensors->read(spec, box, out); });
}

}  // namespace

Result<ReadBox> released_source(const std::string& path, const std::vector<std::string>& files, std::string_view prefix, const ModelConfig& config) {
  std::deque<SafetensorsFile> opened;
  for (const std::string& name : files) {
    Result<SafetensorsFile> file = SafetensorsFile::open(name);
    if (!file) return file.status();
    opened.push_back(file.take());
  }
  return tensors_source(path, std::move(opened), prefix, config);
}

Result<ReadBox> checkpoint_source(const std::string& path, const ModelConfig& config) {
  if (has_box_files(path, kMastersStem)) return masters_source(path, config);
  Result<std::deque<SafetensorsFile>> files = open_checkpoint_files(path);
  return files ? tensors_source(path, files.take(), "", config) : files.status();
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
