#pragma once
// The tensors of a checkpoint's files, found by their headers and read from the mapping row by row: plain (F32, BF16, F64; I32 or I64 hash
// tables), E4M3 in 128x128 blocks, or E2M1 (I8, two a byte) in 1x32 blocks, each with a scale tensor F8_E8M0 or F32 beside it. A box of a
// quantised tensor reads the codes and the scales of that box alone. Any accepted name may be used (model/checkpoint_io.h).
//
// Read only; for any number of threads.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "model/checkpoint_io.h"
#include "model/checkpoint_layout.h"

namespace lockstep {

// A tensor, or one expert of a stack, as it lies in a file. Bytes need not be aligned.
struct StoredTensor {
  const SafetensorsFile* file = nullptr;
  const SafetensorsEntry* entry = nullptr;
  DType dtype = DType::f32;   // f32 | bf16 | f64 | i32 | i64 | e4m3 | e2m1x2
  int64_t gate_up_half = -1;  // of every expert of a stacked gate_up_proj; -1: the tensor has the entry to itself
  const SafetensorsFile* scale_file = nullptr;
  const SafetensorsEntry* scale = nullptr;  // nullptr: not quantised
  DType scale_dtype = DType::ue8m0;         // ue8m0 | f32

  bool quantised() const { return dtype == DType::e4m3 || dtype == DType::e2m1x2; }
  Storage storage() const { return dtype == DType::e4m3 ? Storage::fp8 : Storage::fp4; }  // REQUIRES: quantised()
  const uint8_t* bytes() const { return file->bytes(*entry).data(); }
  const uint8_t* scale_bytes() const { return scale_file->bytes(*scale).data(); }
};

class CheckpointTensors {
 public:
  // Of every tensor whose file name starts with `prefix` (which is cut off). Error: one that is of another shape or dtype than the config
  // asks for, a second time, of an expert that does not exist, or whose scales do not fit it.
  static Result<std::shared_ptr<const CheckpointTensors>> scan(std::deque<SafetensorsFile> files, std::string_view prefix, const ModelConfig& config);

  // Names of the model's tensors, and of scales, that no file holds ("NAME (expert E)" for one of a stack).
  const std::vector<std::string>& missing() const { return missing_; }
  // Of tensors in the files that the config has no use for, scales without a tensor among them.
  const std::vector<std::string>& unexpected() const { return unexpected_; }
  // Of tensors of draft blocks: the config's, and those in the files that are not the config's.
  const std::vector<std::string>& draft_missing() const { return draft_missing_; }
  const std::vector<std::string>& draft_unknown() const { return draft_unknown_; }
  int64_t num_draft_tensors() const { return num_draft_tensors_; }  // in the files, scales too
  bool has_draft() const { return config_.num_drafts > 0 && draft_missing_.empty(); }
  // Ok if nothing is missing or unexpected. `path` is what the error calls the files together. Draft blocks are passed over.
  Status check(const std::string& path) const;

  const ModelConfig& config() const { return config_; }
  const std::vector<TensorSpec>& table() const { return table_; }  // checkpoint_table(config)
  const std::deque<SafetensorsFile>& files() const { return files_; }

  // As ReadBox (model/shard.h), of any tensor that is not missing; draft tensors too. Numbers are checked as they are read.
  Status read(const TensorSpec& spec, const Box& box, TensorView out) const;
  // Expert -1 for what is no stack. nullptr: not in the files, or not in this form.
  const StoredTensor* stored(int id, int64_t expert) const;

 private:
  explicit CheckpointTensors(const ModelConfig& config);
  Status place(const SafetensorsFile& file, const SafetensorsEntry& e, const TensorPiece& piece);
  Status attach_scales();
  void list_missing();

  static constexpr int64_t kWhole = -1;
  struct Scale {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };
  const ModelConfig config_;
  const std::vector<TensorSpec> table_;
  const size_t num_model_tensors_;  // of the table; the rest are the draft's
  std::deque<SafetensorsFile> files_;
  std::vector<std::map<int64_t, StoredTensor>> places_;  // [table] by expert, or kWhole
  std::map<std::pair<int, int64_t>, Scale> scales_;      // by id and expert, until they are attached
  std::vector<std::string> missing_, unexpected_, draft_missing_, draft_unknown_;
  int64_t num_draft_tensors_ = 0;
};

// Numbers that a training run cannot use, in a box of a tensor with `columns` columns: Inf, NaN, ids of experts that the config lacks.
Status check_values(const ModelConfig& config, const std::string& file, const std::string& name, int64_t columns, const Box& box, TensorView out);

}  // namespace lockstep
