#include "model/checkpoint_tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/formats.h"

namespace lockstep {

namespace {

// Numbers of all codes: of E4M3, and of the nibbles of E2M1.
template <typename T, size_t kCodes>
constexpr std::array<float, kCodes> decode_table() {
  std::array<float, kCodes> values{};
  for (size_t i = 0; i < kCodes; ++i) values[i] = decode<T>(static_cast<uint8_t>(i));
  return values;
}
constexpr std::array<float, 256> kE4m3 = decode_table<e4m3, 256>();
constexpr std::array<float, 16> kE2m1 = decode_table<e2m1x2, 16>();

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

Status convert_ids(const StoredTensor& at, const uint8_t* from, TensorView to) {
  int32_t* ids = to.ptr<int32_t>();
  for (int64_t i = 0; i < to.dim(1); ++i) {
    int64_t id = 0;
    if (at.dtype == DType::i32) {
      std::memcpy(&ids[i], from + i * 4, 4);
      continue;
    }
    std::memcpy(&id, from + i * 8, 8);
    ids[i] = static_cast<int32_t>(id);
    if (ids[i] != id) return errorf("{}: tensor {} names expert {}", at.file->path(), at.entry->name, id);
  }
  return Status::ok();
}

// Columns [columns.begin, columns.end) of row `row` of a quantised tensor with `width` columns: code times scale, one f32 product.
void dequantize_row(float* to, const StoredTensor& t, int64_t width, int64_t row, const Range& columns) {
  const QuantFormat& f = quant_format(t.storage());
  const int64_t row_codes = code_shape(f, 1, width)[1], row_scales = num_blocks(width, f.block_cols);
  const uint8_t* codes = t.bytes() + row * row_codes;
  const uint8_t* scales = t.scale_bytes() + row / f.block_rows * row_scales * static_cast<int64_t>(dtype_bytes(t.scale_dtype));
  for (int64_t c = columns.begin; c < columns.end;) {
    const int64_t block = c / f.block_cols, end = std::min(columns.end, (block + 1) * f.block_cols);
    float scale;
    if (t.scale_dtype == DType::ue8m0) {
      scale = to_f32(ue8m0{scales[block]});
    } else {
      std::memcpy(&scale, scales + block * 4, 4);
    }
    if (t.dtype == DType::e4m3) {
      for (; c < end; ++c) to[c - columns.begin] = kE4m3[codes[c]] * scale;
    } else {
      for (; c < end; ++c) to[c - columns.begin] = kE2m1[codes[c / 2] >> (c % 2 * 4) & 15] * scale;
    }
  }
}

std::string list_names(const std::vector<std::string>& names) {
  std::string s;
  for (size_t i = 0; i < names.size() && i < 8; ++i) s += (i ? ", " : "") + names[i];
  if (names.size() > 8) s += fmt::format(" and {} more", names.size() - 8);
  return s;
}

bool is_draft_name(std::string_view released) { return released.starts_with("mtp."); }

bool has_shape(const SafetensorsEntry& e, const Shape& s) {
  return e.shape.size() == static_cast<size_t>(s.rank) && std::equal(e.shape.begin(), e.shape.end(), s.dims.begin());
}

}  // namespace

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

CheckpointTensors::CheckpointTensors(const ModelConfig& config)
    : config_(config), table_(checkpoint_table(config)), num_model_tensors_(tensor_table(config).size()), places_(table_.size()) {}

Result<std::shared_ptr<const CheckpointTensors>> CheckpointTensors::scan(std::deque<SafetensorsFile> files, std::string_view prefix,
                                                                         const ModelConfig& config) {
  const std::shared_ptr<CheckpointTensors> all(new CheckpointTensors(config));
  all->files_ = std::move(files);
  const TensorNames names(all->table_);
  for (const SafetensorsFile& file : all->files_) {
    for (const SafetensorsEntry& e : file.tensors()) {
      if (!std::string_view(e.name).starts_with(prefix)) continue;
      const std::string_view name = std::string_view(e.name).substr(prefix.size());
      const bool draft = is_draft_name(released_name(name));
      all->num_draft_tensors_ += draft;
      const std::string scaled = scaled_tensor_name(name);
      const std::vector<TensorPiece> pieces = names.pieces(scaled.empty() ? name : std::string_view(scaled));
      if (pieces.empty() || (!scaled.empty() && pieces.size() > 1)) {
        (draft ? all->draft_unknown_ : all->unexpected_).push_back(e.name);
      } else if (!scaled.empty()) {
        if (!all->scales_.emplace(std::pair(pieces.front().id, pieces.front().expert), Scale{&file, &e}).second)
          return errorf("{}: tensor {} gives the scales of {} a second time", file.path(), e.name, all->table_[static_cast<size_t>(pieces.front().id)].name);
      } else {
        for (const TensorPiece& piece : pieces) LOCKSTEP_RETURN_IF_ERROR(all->place(file, e, piece));
      }
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(all->attach_scales());
  all->list_missing();
  return std::shared_ptr<const CheckpointTensors>(all);
}

Status CheckpointTensors::place(const SafetensorsFile& file, const SafetensorsEntry& e, const TensorPiece& piece) {
  const TensorSpec& spec = table_[static_cast<size_t>(piece.id)];
  Shape want = spec.whole;
  if (piece.expert >= 0) {
    if (piece.expert >= spec.whole[0])
      return errorf("{}: tensor {} is of expert {}, the config has n_routed_experts {}", file.path(), e.name, piece.expert, spec.whole[0]);
    want = {spec.whole[1], spec.whole[2]};
  }
  if (piece.gate_up_half >= 0) want.dims[1] *= 2;
  StoredTensor at = {.file = &file, .entry = &e, .gate_up_half = piece.gate_up_half};
  if (spec.role == TensorRole::hash_table) {
    if (e.dtype != "I64" && e.dtype != "I32") return errorf("{}: tensor {} is {}, expected I64 or I32", file.path(), e.name, e.dtype);
    at.dtype = e.dtype == "I64" ? DType::i64 : DType::i32;
  } else if (e.dtype == "BF16") {
    at.dtype = DType::bf16;
  } else if (e.dtype == "F64") {
    at.dtype = DType::f64;
  } else if (e.dtype == "F8_E4M3" || e.dtype == "I8") {
    if ((spec.role != TensorRole::matrix && spec.role != TensorRole::expert) || want.rank != 2)
      return errorf("{}: tensor {} is {}; only the matrix of a linear layer or of one expert may be quantised", file.path(), e.name, e.dtype);
    at.dtype = e.dtype == "I8" ? DType::e2m1x2 : DType::e4m3;
    want = code_shape(quant_format(at.storage()), want[0], want[1]);
  } else if (e.dtype != "F32") {
    return errorf("{}: tensor {} is {}, expected F32, BF16, F64, F8_E4M3 or I8 (two E2M1 numbers a byte)", file.path(), e.name, e.dtype);
  }
  if (!has_shape(e, want)) return errorf("{}: tensor {} has shape {}, the config asks for {}", file.path(), e.name, e.shape_str(), want.str());
  std::map<int64_t, StoredTensor>& places = places_[static_cast<size_t>(piece.id)];
  const bool beside_other_form = !places.empty() && (piece.expert == kWhole || places.contains(kWhole));
  if (beside_other_form || !places.emplace(piece.expert, at).second)
    return errorf("{}: tensor {} gives {} a second time", file.path(), e.name, spec.name);
  return Status::ok();
}

Status CheckpointTensors::attach_scales() {
  for (size_t id = 0; id < table_.size(); ++id) {
    for (auto& [expert, t] : places_[id]) {
      const auto found = scales_.find({static_cast<int>(id), expert});
      if (!t.quantised() || found == scales_.end()) continue;  // what is left over or missing is listed below
      const auto [file, e] = found->second;
      if (e->dtype != "F8_E8M0" && e->dtype != "F32")
        return errorf("{}: tensor {} is {}, scales are F8_E8M0 or F32", file->path(), e->name, e->dtype);
      const QuantFormat& f = quant_format(t.storage());
      const Shape& whole = table_[id].whole;
      const Shape want = scale_shape(f, whole[whole.rank - 2], whole[whole.rank - 1]);
      if (!has_shape(*e, want))
        return errorf("{}: tensor {} has shape {}, {} of {} in blocks of {}x{} has scales {}", file->path(), e->name, e->shape_str(), t.entry->name,
                      t.entry->dtype, f.block_rows, f.block_cols, want.str());
      t.scale_file = file;
      t.scale = e;
      t.scale_dtype = e->dtype == "F32" ? DType::f32 : DType::ue8m0;
      scales_.erase(found);
    }
  }
  return Status::ok();
}

void CheckpointTensors::list_missing() {
  for (const auto& [key, scale] : scales_)
    (static_cast<size_t>(key.first) < num_model_tensors_ ? unexpected_ : draft_unknown_).push_back(scale.entry->name);
  scales_.clear();
  for (size_t i = 0; i < table_.size(); ++i) {
    std::vector<std::string>& list = i < num_model_tensors_ ? missing_ : draft_missing_;
    for (const auto& [expert, t] : places_[i])
      if (t.quantised() && t.scale == nullptr) list.push_back("the scales of " + t.entry->name);
    if (places_[i].contains(kWhole)) continue;
    if (table_[i].role != TensorRole::expert || places_[i].empty()) {
      list.push_back(table_[i].name);
      continue;
    }
    for (int64_t x = 0; x < table_[i].whole[0]; ++x)
      if (!places_[i].contains(x)) list.push_back(fmt::format("{} (expert {})", table_[i].name, x));
  }
}

Status CheckpointTensors::check(const std::string& path) const {
  if (!missing_.empty()) return errorf("{}: {} tensors of the config are missing: {}", path, missing_.size(), list_names(missing_));
  if (!unexpected_.empty()) return errorf("{}: {} tensors do not belong to the config: {}", path, unexpected_.size(), list_names(unexpected_));
  return Status::ok();
}

const StoredTensor* CheckpointTensors::stored(int id, int64_t expert) const {
  const auto& places = places_[static_cast<size_t>(id)];
  const auto it = places.find(expert);
  return it == places.end() ? nullptr : &it->second;
}

Status CheckpointTensors::read(const TensorSpec& spec, const Box& box, TensorView out) const {
  const std::map<int64_t, StoredTensor>& places = places_[static_cast<size_t>(spec.id)];
  const Box whole = whole_box(spec.whole);
  const bool expert_stack = spec.role == TensorRole::expert;
  const int64_t columns = whole.columns.size(), expert_rows = expert_stack ? whole.rows.size() / spec.whole[0] : whole.rows.size();
  for (int64_t r = box.rows.begin; r < box.rows.end; ++r) {
    const int64_t expert = r / expert_rows;
    const auto own = places.find(expert_stack ? expert : kWhole);
    const StoredTensor& at = own != places.end() ? own->second : places.at(kWhole);
    int64_t row = r;  // of the file's tensor
    if (own != places.end() && expert_stack) row = r - expert * expert_rows;
    if (at.gate_up_half >= 0) row = r + (expert + at.gate_up_half) * expert_rows;
    const TensorView to = out.slice(r - box.rows.begin, 1);
    if (at.quantised()) {
      dequantize_row(to.ptr<float>(), at, columns, row, box.columns);
    } else {
      const uint8_t* from = at.bytes() + static_cast<size_t>(row * columns + box.columns.begin) * dtype_bytes(at.dtype);
      if (spec.role == TensorRole::hash_table) {
        LOCKSTEP_RETURN_IF_ERROR(convert_ids(at, from, to));
      } else {
        convert_numbers(to.ptr<float>(), from, at.dtype, to.dim(1));
      }
    }
    LOCKSTEP_RETURN_IF_ERROR(check_values(config_, at.file->path(), at.entry->name, columns, {{row, row + 1}, box.columns}, to));
  }
  return Status::ok();
}

}  // namespace lockstep
