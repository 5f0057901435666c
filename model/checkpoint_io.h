#pragma once
// Checkpoint files <-> master tensors. Accepts safetensors, quantised or not (model/checkpoint_tensors.h), in the released names, transformers'
// internal names (experts stacked as gate_up_proj and down_proj), what its save_pretrained writes, and the spellings of V4 spec 4.3.

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
// Of which tensor a tensor of this name holds the scales: "layers.0.attn.wq_a.weight" for "layers.0.attn.wq_a.scale", or for what SGLang and
// transformers call "model.layers.0.self_attn.q_a_proj.weight_scale_inv" (a factor as well, whatever it is called). "": it holds no scales.
std::string scaled_tensor_name(std::string_view name);

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

// Where a model's boxes are read from. Files stay mapped for as long as the source lives, and only what is asked for is read; what headers
// can tell is checked at once, for the whole model: tensors missing, not of the model or twice, shapes, dtypes, expert ids. Numbers are
// converted to f32, table ids to i32, and checked as they are read: all finite, ids of experts that exist. Sources may be shared by threads.
//
// Of every tensor whose file name starts with `prefix` (which is cut off). `path` is what errors call the files together.
Result<ReadBox> released_source(const std::string& path, const std::vector<std::string>& files, std::string_view prefix, const ModelConfig& config);
// Of a directory with a run's masters, written by any number of ranks (model/checkpoint_boxes.h), or of the files of model/checkpoint_index.h.
Result<ReadBox> checkpoint_source(const std::string& path, const ModelConfig& config);
// masters.views of every held spec, from checkpoint_source.
Status load_checkpoint(const std::string& path, const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters);

// Calls f(file name, view) for every tensor in released spelling, experts one by one.
void for_each_released(const std::vector<TensorSpec>& table, const TensorSet& masters, const std::function<void(std::string, ConstTensorView)>& f);

// DIRECTORY/config.json and DIRECTORY/model.safetensors in f32, each written atomically.
Status save_checkpoint(const std::string& directory, const ModelConfig& config, const std::vector<TensorSpec>& table, const TensorSet& masters);

}  // namespace lockstep
