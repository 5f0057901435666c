#pragma once
// Checkpoint files <-> master tensors. Accepts unquantised safetensors in the released names, transformers' internal names (experts stacked as
// gate_up_proj and down_proj), what its save_pretrained writes, and the spellings of V4 spec 4.3; writes released names, experts one by one.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "model/weights.h"

namespace lockstep {

// The released spelling of any accepted name ("model.layers.0.self_attn.q_a_proj.weight" -> "layers.0.attn.wq_a.weight"). Names that are
// not of this model come back without their "model." prefix.
std::string released_name(std::string_view name);

// Which rows of which table tensor one file tensor is. A stacked gate_up_proj is two tensors' rows.
struct TensorPiece {
  int id = -1;                // in the table; -1: not a tensor of this model
  int64_t expert = -1;        // one expert of a stack; -1: the whole tensor
  int64_t gate_up_half = -1;  // 0: rows [0, I) of every expert, 1: rows [I, 2I); -1: not a gate_up stack
};
class TensorNames {
 public:
  explicit TensorNames(const std::vector<TensorSpec>& table);
  // One piece, or two for gate_up_proj, or none.
  std::vector<TensorPiece> pieces(std::string_view file_name) const;

 private:
  const std::vector<TensorSpec>& table_;
  std::vector<std::pair<std::string, int>> sorted_;
};

struct LoadReport {
  std::vector<std::string> missing;     // table tensors (or "NAME expert E") without data
  std::vector<std::string> unexpected;  // file tensors of no use; mtp.* is not listed, the draft block is not built
};

// Files of a checkpoint: the path itself when it is a file, the shards of model.safetensors.index.json, or every *.safetensors of a directory.
Result<std::vector<std::string>> checkpoint_files(const std::string& path);

// Reads every tensor whose file name starts with `prefix` (which is cut off) into the masters, converting f64 and bf16 to f32 and table ids to i32.
// Errors: unreadable file, shape or dtype that does not fit, a tensor twice, expert ids out of range, quantised data.
Result<LoadReport> load_masters(const std::vector<std::string>& files, std::string_view prefix, const ModelConfig& config,
                                const std::vector<TensorSpec>& table, TensorSet& masters);
// load_masters of a whole checkpoint, where anything missing or unexpected is an error that lists it.
Status load_checkpoint(const std::string& path, const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters);

// Calls f(file name, view) for every tensor in released spelling, experts one by one.
void for_each_released(const std::vector<TensorSpec>& table, const TensorSet& masters, const std::function<void(std::string, ConstTensorView)>& f);

// DIRECTORY/config.json and DIRECTORY/model.safetensors in f32, each written atomically.
Status save_checkpoint(const std::string& directory, const ModelConfig& config, const std::vector<TensorSpec>& table, const TensorSet& masters);

}  // namespace lockstep
