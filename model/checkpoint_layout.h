#pragma once
// What the files of a released checkpoint hold for a config: every tensor's name, how its numbers are stored, and the header entries of that.
// Shapes and bytes alone, no data. Source: V4 spec 4.1 (the released tensors), 3.1 (formats), 4.3 (what transformers reads).

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "model/weights.h"
#include "ops/quantize/quantize.h"

namespace lockstep {

// All layouts use the released names, experts one by one.
//   released_fp4       as V4-Flash: linear layers E4M3 in 128x128 blocks, routed experts E2M1 in 1x32 blocks, both with UE8M0 scales; embedding,
//                      head, norms, router, compressors and indexer weights_proj BF16; mHC, sinks, ape and router bias F32; hash tables I64
//   released_fp8       as V4-Flash-Base: likewise, routed experts E4M3 as well
//   bf16               likewise, what is quantised above BF16
//   transformers_bf16  likewise, norms F32 as transformers keeps them, and without the draft blocks, which it does not build
//   f32                everything F32 but the I64 tables: loses nothing
enum class CheckpointLayout : uint8_t { released_fp4, released_fp8, bf16, transformers_bf16, f32 };
inline constexpr std::string_view kCheckpointLayouts[] = {"released-fp4", "released-fp8", "bf16", "transformers-bf16", "f32"};  // by value
std::optional<CheckpointLayout> checkpoint_layout(std::string_view name);

enum class Storage : uint8_t { f32, bf16, i64, fp8, fp4 };
const char* storage_name(Storage s);
inline bool is_quantised(Storage s) { return s == Storage::fp8 || s == Storage::fp4; }
// REQUIRES: is_quantised(s).
inline const QuantFormat& quant_format(Storage s) { return s == Storage::fp8 ? kFp8Weight : kFp4; }

// The tensors of the draft (MTP) blocks, "mtp.0.attn.wq_a.weight", with ids that follow those of tensor_table(config). Each is a
// window-only, score-routed layer with two projections, three norms and an mHC head of its own; embedding and head are the model's.
std::vector<TensorSpec> draft_table(const ModelConfig& config);
// tensor_table, then draft_table: an id is a place in it.
std::vector<TensorSpec> checkpoint_table(const ModelConfig& config);

Storage storage_of(const TensorSpec& spec, CheckpointLayout layout);

// One tensor of a file, and the scales that go with it.
struct FileTensor {
  std::string name;     // "layers.0.ffn.experts.3.w1.weight"
  int id = 0;           // of the spec
  int64_t expert = -1;  // -1: not of a stack
  Shape shape;          // of the numbers, not of their codes
  Storage storage = Storage::f32;
  Box box;              // of the spec's whole tensor

  std::string scale_name() const;  // "layers.0.ffn.experts.3.w1.scale"
  // Header entries: the tensor, and its scales if it is quantised. Offsets are not set.
  std::vector<SafetensorsEntry> entries() const;
  uint64_t bytes() const;  // of all entries
};
// In the order of the table.
std::vector<FileTensor> file_tensors(std::span<const TensorSpec> table, CheckpointLayout layout);

}  // namespace lockstep
