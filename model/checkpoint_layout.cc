#include "model/checkpoint_layout.h"

#include <algorithm>

namespace lockstep {

namespace {

constexpr std::string_view kWeight = ".weight", kScale = ".scale";

// The entry's dtype of a storage, codes for what is quantised.
const char* dtype_of(Storage s) {
  switch (s) {
    case Storage::f32: return "F32";
    case Storage::bf16: return "BF16";
    case Storage::i64: return "I64";
    case Storage::fp8: return "F8_E4M3";
    case Storage::fp4: return "I8";
  }
  return "?";
}

SafetensorsEntry entry(std::string name, const char* dtype, const Shape& shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = {shape.dims.begin(), shape.dims.begin() + shape.rank}};
}

}  // namespace

std::optional<CheckpointLayout> checkpoint_layout(std::string_view name) {
  const auto it = std::find(std::begin(kCheckpointLayouts), std::end(kCheckpointLayouts), name);
  if (it == std::end(kCheckpointLayouts)) return std::nullopt;
  return static_cast<CheckpointLayout>(it - std::begin(kCheckpointLayouts));
}

const char* storage_name(Storage s) {
  switch (s) {
    case Storage::f32: return "f32";
    case Storage::bf16: return "bf16";
    case Storage::i64: return "i64";
    case Storage::fp8: return "fp8";
    case Storage::fp4: return "fp4";
  }
  return "?";
}

std::vector<TensorSpec> draft_table(const ModelConfig& config) {
  if (config.num_drafts == 0) return {};
  ModelConfig drafts = config;
  drafts.layers.assign(static_cast<size_t>(config.num_drafts), LayerConfig());
  int id = static_cast<int>(tensor_table(config).size());
  std::vector<TensorSpec> table;
  const auto add = [&](TensorSpec spec, std::string name, int64_t block) {
    spec.name = std::move(name);
    spec.layer = static_cast<int>(config.num_layers() + block);
    spec.id = id++;
    table.push_back(std::move(spec));
  };
  const std::vector<TensorSpec> model = tensor_table(drafts);
  const auto like = [&](std::string_view name) -> const TensorSpec& {
    const auto it = std::find_if(model.begin(), model.end(), [&](const TensorSpec& t) { return t.name == name; });
    CHECK(it != model.end(), "no tensor {}", name);
    return *it;
  };
  for (int64_t block = 0; block < config.num_drafts; ++block) {
    const std::string p = "mtp." + std::to_string(block) + ".";
    for (const TensorSpec& t : model)
      if (t.layer == block) add(t, "mtp." + t.name.substr(std::string_view("layers.").size()), block);
    TensorSpec projection = like("layers.0.attn.wq_a.weight");
    projection.whole = projection.shape = {config.hidden_size, config.hidden_size};
    projection.box = whole_box(projection.whole);
    for (const char* name : {"e_proj.weight", "h_proj.weight"}) add(projection, p + name, block);
    for (const char* name : {"enorm.weight", "hnorm.weight", "norm.weight"}) add(like("norm.weight"), p + name, block);
    for (const char* name : {"hc_head_fn", "hc_head_base", "hc_head_scale"}) add(like(name), p + name, block);
  }
  return table;
}

std::vector<TensorSpec> checkpoint_table(const ModelConfig& config) {
  std::vector<TensorSpec> table = tensor_table(config);
  for (TensorSpec& t : draft_table(config)) table.push_back(std::move(t));
  return table;
}

Storage storage_of(const TensorSpec& spec, CheckpointLayout layout) {
  if (spec.role == TensorRole::hash_table) return Storage::i64;
  if (layout == CheckpointLayout::f32) return Storage::f32;
  const bool quantised = layout == CheckpointLayout::released_fp4 || layout == CheckpointLayout::released_fp8;
  switch (spec.role) {
    case TensorRole::hyper:
    case TensorRole::sink:
    case TensorRole::ape:
    case TensorRole::router_bias: return Storage::f32;
    case TensorRole::norm: return layout == CheckpointLayout::transformers_bf16 ? Storage::f32 : Storage::bf16;
    case TensorRole::expert:
      if (!quantised) return Storage::bf16;
      return layout == CheckpointLayout::released_fp4 ? Storage::fp4 : Storage::fp8;
    case TensorRole::matrix: {
      const bool kept = spec.name.find(".compressor.") != std::string::npos || spec.name.ends_with(".weights_proj.weight");
      return quantised && !kept ? Storage::fp8 : Storage::bf16;
    }
    default: return Storage::bf16;
  }
}

std::string FileTensor::scale_name() const { return name.substr(0, name.size() - kWeight.size()) + std::string(kScale); }

std::vector<SafetensorsEntry> FileTensor::entries() const {
  if (!is_quantised(storage)) return {entry(name, dtype_of(storage), shape)};
  const QuantFormat& f = quant_format(storage);
  return {entry(name, dtype_of(storage), code_shape(f, shape[0], shape[1])), entry(scale_name(), "F8_E8M0", scale_shape(f, shape[0], shape[1]))};
}

uint64_t FileTensor::bytes() const {
  uint64_t sum = 0;
  for (const SafetensorsEntry& e : entries()) {
    uint64_t bytes = safetensors_dtype_bytes(e.dtype);
    for (const int64_t d : e.shape) bytes *= static_cast<uint64_t>(d);
    sum += bytes;
  }
  return sum;
}

std::vector<FileTensor> file_tensors(std::span<const TensorSpec> table, CheckpointLayout layout) {
  std::vector<FileTensor> tensors;
  for (const TensorSpec& t : table) {
    FileTensor f = {.name = t.name, .id = t.id, .shape = t.whole, .storage = storage_of(t, layout), .box = whole_box(t.whole)};
    if (t.role != TensorRole::expert) {
      tensors.push_back(std::move(f));
      continue;
    }
    const size_t star = t.name.find('*');
    const int64_t rows = t.whole[1];
    f.shape = {rows, t.whole[2]};
    for (f.expert = 0; f.expert < t.whole[0]; ++f.expert) {
      f.name = t.name.substr(0, star) + std::to_string(f.expert) + t.name.substr(star + 1);
      f.box.rows = {f.expert * rows, (f.expert + 1) * rows};
      tensors.push_back(f);
    }
  }
  return tensors;
}

}  // namespace lockstep
