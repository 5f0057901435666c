#include "model/checkpoint_writer.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>

#include <nlohmann/json.hpp>

#include "io/file.h"
#include "model/checkpoint_boxes.h"
#include "model/checkpoint_index.h"

namespace lockstep {

namespace {

namespace fs = std::filesystem;

// Rows are read and encoded in strips of about this many numbers; whole blocks of 128 rows.
constexpr int64_t kStripElements = 4 << 20, kStripRows = 128;

// What a tokenizer or a program that generates may need from beside the weights.
constexpr const char* kSideFiles[] = {"tokenizer.json",    "tokenizer_config.json",  "tokenizer_lockstep.json", "special_tokens_map.json",
                                      "added_tokens.json", "generation_config.json", "chat_template.jinja"};

struct ShardPlan {
  std::vector<FileTensor> tensors;  // in file order
};
std::vector<ShardPlan> plan_shards(std::span<const TensorSpec> table, const WriteOptions& options) {
  std::vector<ShardPlan> shards;
  uint64_t bytes = 0;
  for (FileTensor& t : file_tensors(table, options.layout)) {
    const uint64_t more = t.bytes();
    if (shards.empty() || bytes + more > options.shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += more;
    shards.back().tensors.push_back(std::move(t));
  }
  // Wide elements first: each tensor is aligned for its dtype. Scales are bytes, as all codes are, and follow theirs.
  const auto width = [](const FileTensor& t) { return safetensors_dtype_bytes(t.entries().front().dtype); };
  for (ShardPlan& s : shards)
    std::stable_sort(s.tensors.begin(), s.tensors.end(), [&](const FileTensor& a, const FileTensor& b) { return width(a) > width(b); });
  return shards;
}

std::string shard_name(size_t shard, size_t shards) {
  return shards == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards);
}

// The table that the layout writes.
std::vector<TensorSpec> written_table(const ModelConfig& config, CheckpointLayout layout) {
  return layout == CheckpointLayout::transformers_bf16 ? tensor_table(config) : checkpoint_table(config);
}

std::string written_config(const WriteSource& source, CheckpointLayout layout) {
  using Json = nlohmann::ordered_json;
  if (layout == CheckpointLayout::f32) return model_config_json(source.config);
  if (layout == CheckpointLayout::transformers_bf16) {
    ModelConfig without_draft = source.config;
    without_draft.num_drafts = 0;
    Json o = Json::parse(model_config_json(without_draft));
    o["dtype"] = "bfloat16";
    return o.dump(2) + "\n";
  }
  Json o = Json::parse(source.config_json, nullptr, /*allow_exceptions=*/false);
  if (!o.is_object() || !o.contains("compress_ratios")) o = Json::parse(model_config_json(source.config, ConfigSpelling::released));
  for (const char* key : {"quantization_config", "expert_dtype", "dtype"}) o.erase(key);
  o["torch_dtype"] = "bfloat16";
  o["num_nextn_predict_layers"] = source.config.num_drafts;
  if (layout != CheckpointLayout::bf16) {
    o["expert_dtype"] = layout == CheckpointLayout::released_fp4 ? "fp4" : "fp8";
    o["quantization_config"] = {{"quant_method", "fp8"},
                                {"fmt", "e4m3"},
                                {"activation_scheme", "dynamic"},
                                {"weight_block_size", {128, 128}},
                                {"scale_fmt", "ue8m0"}};
  }
  return o.dump(2) + "\n";
}

Status copy_side_files(const std::string& from, const std::string& to) {
  for (const char* name : kSideFiles) {
    std::error_code error;
    if (!fs::is_regular_file(from + "/" + name, error)) continue;
    Result<std::string> text = read_file(from + "/" + name);
    if (!text) return text.status();
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(to + "/" + name, text.value()));
  }
  return Status::ok();
}

// Elements that differ in their bits, and blocks with one of them.
struct Difference {
  int64_t elements = 0, blocks = 0;
};
Difference count_differences(ConstTensorView x, ConstTensorView y, int64_t block_rows, int64_t block_cols) {
  Difference all;
  for (int64_t r0 = 0; r0 < x.rows(); r0 += block_rows) {
    for (int64_t c0 = 0; c0 < x.dim(1); c0 += block_cols) {
      int64_t differing = 0;
      const int64_t columns = std::min(block_cols, x.dim(1) - c0);
      for (int64_t r = r0; r < std::min(r0 + block_rows, x.rows()); ++r) {
        const float *a = x.row<float>(r) + c0, *b = y.row<float>(r) + c0;
        for (int64_t i = 0; i < columns; ++i) differing += std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]);
      }
      all.elements += differing;
      all.blocks += differing != 0;
    }
  }
  return all;
}

// Passes tensors of a source to a file, strip by strip.
class TensorCopier {
 public:
  TensorCopier(Context& c, const WriteSource& source, std::span<const TensorSpec> table, WriteReport& report)
      : c_(c), source_(source), table_(table), report_(report) {}

  Status copy(const FileTensor& t, SafetensorsStream& out) {
    StorageReport& r = report_.by_storage[static_cast<size_t>(t.storage)];
    const StorageReport before = r;
    const StoredTensor* file = source_.tensors == nullptr ? nullptr : source_.tensors->stored(t.id, t.expert);
    const StoredTensor* stored = file != nullptr && file->quantised() ? file : nullptr;
    const int64_t rows = t.box.rows.size(), columns = t.box.columns.size();
    ++r.tensors;
    r.elements += rows * columns;
    r.blocks += is_quantised(t.storage) ? scale_shape(quant_format(t.storage), rows, columns).elements() : 1;
    scales_.clear();
    same_codes_ = stored != nullptr && is_quantised(t.storage) && stored->storage() == t.storage && take_scales(*stored);
    recoded_ = !same_codes_ && stored != nullptr && t.storage == Storage::fp8 && stored->dtype == DType::e2m1x2 &&
               stored->scale_dtype == DType::ue8m0 && columns % 2 == 0;
    r.copied += same_codes_;

    const int64_t strip = std::max(kStripRows, kStripElements / columns / kStripRows * kStripRows);
    for (int64_t begin = 0; begin < rows; begin += strip) {
      const ArenaScope scope(*c_.workspace);
      const Range part = {begin, std::min(rows, begin + strip)};
      const TensorView x = c_.workspace->tensor(t.storage == Storage::i64 ? DType::i32 : DType::f32, {part.size(), columns}, "checkpoint strip");
      LOCKSTEP_RETURN_IF_ERROR(read(t, part, x));
      switch (t.storage) {
        case Storage::f32: LOCKSTEP_RETURN_IF_ERROR(write(out, x)); break;
        case Storage::i64: LOCKSTEP_RETURN_IF_ERROR(write_ids(out, x)); break;
        case Storage::bf16: LOCKSTEP_RETURN_IF_ERROR(write_bf16(out, x, r)); break;
        default: LOCKSTEP_RETURN_IF_ERROR(write_codes(out, x, t, part, stored, r));
      }
    }
    if (!is_quantised(t.storage) && r.inexact_elements > before.inexact_elements) ++r.inexact_blocks;
    r.inexact_tensors += r.inexact_elements > before.inexact_elements;
    if (file != nullptr) file->file->release(*file->entry);
    return out.write(scales_);
  }

 private:
  // Rows of the tensor, by as many threads as there are.
  Status read(const FileTensor& t, const Range& part, TensorView x) {
    std::mutex mutex;
    Status failed;
    parallel_for(c_, x.rows(), x.dim(1), [&](int64_t begin, int64_t end, int) {
      const Box box = {{t.box.rows.begin + part.begin + begin, t.box.rows.begin + part.begin + end}, t.box.columns};
      if (Status s = source_.read(table_[static_cast<size_t>(t.id)], box, x.slice(begin, end - begin)); !s) {
        const std::lock_guard lock(mutex);
        failed = std::move(s);
      }
    });
    return failed;
  }

  static Status write(SafetensorsStream& out, ConstTensorView v) { return out.write({static_cast<const uint8_t*>(v.data), v.bytes()}); }

  Status write_ids(SafetensorsStream& out, ConstTensorView x) {
    const TensorView ids = c_.workspace->tensor(DType::i64, x.shape, "checkpoint ids");
    std::copy_n(x.ptr<int32_t>(), x.shape.elements(), ids.ptr<int64_t>());
    return write(out, ids);
  }

  Status write_bf16(SafetensorsStream& out, ConstTensorView x, StorageReport& r) {
    const TensorView rounded = c_.workspace->tensor(DType::bf16, x.shape, "checkpoint bf16");
    for (int64_t i = 0; i < x.shape.elements(); ++i) {
      const float value = x.ptr<float>()[i];
      const bf16 b = to_bf16(value);
      rounded.ptr<bf16>()[i] = b;
      r.inexact_elements += std::bit_cast<uint32_t>(to_f32(b)) != std::bit_cast<uint32_t>(value);
    }
    return write(out, rounded);
  }

  // Of a tensor whose codes can stay: its scales, if UE8M0 can hold them all.
  bool take_scales(const StoredTensor& t) {
    const uint64_t bytes = t.scale->bytes();
    if (t.scale_dtype == DType::ue8m0) {
      scales_.assign(t.scale_bytes(), t.scale_bytes() + bytes);
      return true;
    }
    for (uint64_t i = 0; i < bytes; i += sizeof(float)) {
      float scale;
      std::memcpy(&scale, t.scale_bytes() + i, sizeof(scale));
      if (!is_ue8m0(scale)) {
        scales_.clear();
        return false;
      }
      scales_.push_back(to_ue8m0_up(scale).bits);
    }
    return true;
  }

  // x are the numbers of rows `part`, which begin with a block.
  Status write_codes(SafetensorsStream& out, ConstTensorView x, const FileTensor& t, const Range& part, const StoredTensor* stored, StorageReport& r) {
    const QuantFormat& f = quant_format(t.storage);
    const int64_t columns = t.box.columns.size();
    const Shape codes = code_shape(f, part.size(), columns), scales = scale_shape(f, part.size(), columns);
    if (same_codes_) return out.write({stored->bytes() + part.begin * codes[1], static_cast<size_t>(codes.elements())});
    const QuantView q(c_.workspace->tensor(f.codes, codes, "checkpoint codes"), c_.workspace->tensor(f.scales, scales, "checkpoint scales"), f.block_rows,
                      f.block_cols);
    if (recoded_) {
      const int64_t row_scales = num_blocks(columns, kFp4.block_cols);
      const ConstQuantView from(ConstTensorView(stored->bytes() + part.begin * columns / 2, DType::e2m1x2, {part.size(), columns / 2}),
                                ConstTensorView(stored->scale_bytes() + part.begin * row_scales, DType::ue8m0, {part.size(), row_scales}),
                                kFp4.block_rows, kFp4.block_cols);
      recode_fp4(c_, q, TensorView(), from);
    } else {
      quantize(c_, q, x, f.amax_floor);
    }
    const TensorView back = c_.workspace->tensor(DType::f32, x.shape, "checkpoint numbers");
    dequantize(c_, back, q);
    const Difference lost = count_differences(x, back, f.block_rows, f.block_cols);
    r.inexact_elements += lost.elements;
    r.inexact_blocks += lost.blocks;
    const uint8_t* bytes = static_cast<const uint8_t*>(q.scales.data);
    scales_.insert(scales_.end(), bytes, bytes + scales.elements());
    return write(out, q.codes);
  }

  Context& c_;
  const WriteSource& source_;
  const std::span<const TensorSpec> table_;
  WriteReport& report_;
  // Of the tensor being copied.
  std::vector<uint8_t> scales_;
  bool same_codes_ = false, recoded_ = false;
};

Status write_files(Context& c, const std::string& directory, const WriteSource& source, const WriteOptions& options, WriteReport& report) {
  const std::vector<TensorSpec> table = written_table(source.config, options.layout);
  const std::vector<ShardPlan> shards = plan_shards(table, options);
  TensorCopier copier(c, source, table, report);
  CheckpointIndex index;
  index.total_bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    std::vector<SafetensorsEntry> entries;
    for (const FileTensor& t : shards[i].tensors) {
      for (SafetensorsEntry& e : t.entries()) {
        index.files[e.name] = name;
        entries.push_back(std::move(e));
      }
      report.bytes += t.bytes();
    }
    report.tensors += static_cast<int64_t>(entries.size());
    Result<SafetensorsStream> out = SafetensorsStream::create(directory + "/" + name, std::move(entries), {{"format", "pt"}});
    if (!out) return out.status();
    for (const FileTensor& t : shards[i].tensors) LOCKSTEP_RETURN_IF_ERROR(copier.copy(t, out.value()));
    LOCKSTEP_RETURN_IF_ERROR(out.value().commit());
    ++report.shards;
    if (options.on_shard) options.on_shard(report.shards, static_cast<int64_t>(shards.size()));
  }
  index.total_bytes = static_cast<int64_t>(report.bytes);
  if (shards.size() > 1) LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kIndexFile, checkpoint_index_json(index)));
  if (!source.directory.empty()) LOCKSTEP_RETURN_IF_ERROR(copy_side_files(source.directory, directory));
  return atomic_write(directory + "/config.json", written_config(source, options.layout));
}

}  // namespace

Result<WriteSource> open_write_source(const std::string& directory) {
  WriteSource source;
  source.directory = directory;
  Result<std::string> json = read_file(directory + "/config.json");
  if (!json) return json.status();
  source.config_json = json.take();
  Result<ModelConfig> config = parse_model_config(source.config_json, directory + "/config.json");
  if (!config) return config.status();
  source.config = config.take();
  if (has_box_files(directory, kMastersStem)) {  // a run's, which have no draft blocks
    source.config.num_drafts = 0;
    Result<ReadBox> read = checkpoint_source(directory, source.config);
    if (!read) return read.status();
    source.read = read.take();
    return source;
  }
  Result<std::deque<SafetensorsFile>> files = open_checkpoint_files(directory);
  if (!files) return files.status();
  Result<std::shared_ptr<const CheckpointTensors>> scanned = CheckpointTensors::scan(files.take(), "", source.config);
  if (!scanned) return scanned.status();
  source.tensors = scanned.take();
  const CheckpointTensors& tensors = *source.tensors;
  LOCKSTEP_RETURN_IF_ERROR(tensors.check(directory));
  if (!tensors.draft_unknown().empty())
    return errorf("{}: {} tensors are of draft blocks that the config (num_nextn_predict_layers {}) does not describe, {} for one", directory,
                  tensors.draft_unknown().size(), source.config.num_drafts, tensors.draft_unknown().front());
  if (tensors.num_draft_tensors() == 0) {
    source.config.num_drafts = 0;
  } else if (!tensors.has_draft()) {
    return errorf("{}: {} tensors of the draft blocks are missing, {} for one; their others are there", directory, tensors.draft_missing().size(),
                  tensors.draft_missing().front());
  }
  source.read = [all = source.tensors](const TensorSpec& spec, const Box& box, TensorView out) { return all->read(spec, box, out); };
  return source;
}

Result<WriteSource> random_write_source(const std::string& config_path, uint64_t seed) {
  WriteSource source;
  source.directory = parent_directory(config_path);
  Result<std::string> json = read_file(config_path);
  if (!json) return json.status();
  source.config_json = json.take();
  Result<ModelConfig> config = parse_model_config(source.config_json, config_path);
  if (!config) return config.status();
  source.config = config.take();
  source.read = random_boxes(source.config, seed);
  return source;
}

WriteReport plan_checkpoint(const ModelConfig& config, const WriteOptions& options) {
  WriteReport report;
  const std::vector<TensorSpec> table = written_table(config, options.layout);
  for (const ShardPlan& shard : plan_shards(table, options)) {
    ++report.shards;
    for (const FileTensor& t : shard.tensors) {
      report.tensors += is_quantised(t.storage) ? 2 : 1;
      report.bytes += t.bytes();
      StorageReport& r = report.by_storage[static_cast<size_t>(t.storage)];
      ++r.tensors;
      r.elements += t.box.elements();
    }
  }
  return report;
}

Status check_new_directory(const std::string& directory) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(directory, error))) return Status::ok();
  if (!fs::is_directory(directory, error)) return errorf("{} exists and is no directory; name another", directory);
  return fs::is_empty(directory, error) ? Status::ok() : errorf("{} exists and is not empty; name another directory", directory);
}

Result<WriteReport> write_checkpoint(Context& c, const std::string& directory, const WriteSource& source, const WriteOptions& options) {
  LOCKSTEP_RETURN_IF_ERROR(check_new_directory(directory));
  std::string target = directory;
  while (target.size() > 1 && target.ends_with('/')) target.pop_back();
  const std::string temporary = fmt::format("{}.tmp-{}-0", target, ::getpid());
  LOCKSTEP_RETURN_IF_ERROR(make_directories(temporary));
  WriteReport report;
  Status status = write_files(c, temporary, source, options, report);
  if (status) status = sync_directory(temporary);
  if (status && ::rename(temporary.c_str(), target.c_str()) != 0) status = errno_status("cannot create", directory, errno);
  if (!status) {
    std::error_code error;  // what went wrong first is what is told
    fs::remove_all(temporary, error);
    return status;
  }
  LOCKSTEP_RETURN_IF_ERROR(sync_directory(parent_directory(target)));
  return report;
}

}  // namespace lockstep
