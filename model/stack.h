#pragma once
// The one forward and its backward. Rollout and training call the same function with different batches; nothing in it knows who calls.

#include <functional>
#include <string_view>
#include <vector>

#include "model/batch.h"
#include "model/state.h"
#include "model/weights.h"

namespace lockstep {

// Rotation tables of the two bases for positions below config.max_positions (or fewer): [P, r] f32.
struct RopeTables {
  TensorView window;      // swa layers
  TensorView compressed;  // csa, hca layers
};
RopeTables make_rope_tables(const ModelConfig& config, int64_t positions, Arena& arena);

// Called after named points of the forward with f32 or storage-dtype rows [T, ...]: how a first difference is located and hidden states are checked.
// Points: "embed", then for layer i "attn.u", "attn.q", "attn.kv", "attn.o", "attn.y", "attn.x", "ffn.u", "ffn.ids", "ffn.y", "ffn.x", then "final" (layer -1).
using Probe = std::function<void(int layer, std::string_view point, ConstTensorView rows)>;

struct Model {
  const Weights* weights = nullptr;
  RopeTables rope;
  const Probe* probe = nullptr;  // usually null
};

struct SavedLayer;  // what a layer's backward needs; model/saved.h
enum class Recompute : uint8_t { none, layer };  // layer: keep each layer's input only and run it again in backward

// Activations kept by forward for backward, in `arena`; release the arena's mark after backward.
struct Saved {
  Arena* arena = nullptr;
  Recompute recompute = Recompute::none;
  std::vector<ConstTensorView> layer_inputs;  // [T, n, D] each, then the last layer's output
  std::vector<SavedLayer> layers;
  TensorView final_x, final_pre, final_raw, final_inv_rms;  // final site, wanted rows: [R, n, D], [R, n], [R, n], [R]
  TensorView final_h, final_norm_inv;                       // [R, D] before the norm, [R]
  Saved();
  ~Saved();
};

// Runs the stack over `batch`, reading and extending its sequences' state. Returns the final normed hidden rows [R, D] of the wanted rows, in storage
// dtype, allocated from c.workspace (the caller holds a scope around the call). saved == nullptr: nothing is kept.
TensorView forward(Context& c, const Model& model, const SequenceBatch& batch, const StatePool& state, Saved* saved);

// dhidden [R, D] f32: gradient of the returned rows. Adds to `gradients`. Every sequence of the batch must have started at position 0, and the pages of
// `state` must still hold the entries that forward wrote.
void backward(Context& c, const Model& model, const SequenceBatch& batch, const StatePool& state, Saved& saved,
              ConstTensorView dhidden, Gradients& gradients);

}  // namespace lockstep
