#pragma once
// The one forward and its backward. Rollout and training call the same function with different batches; nothing in it knows who calls.
//
// A rank runs the part of the model that its weights' shard holds. With stages, the streams [T, n, D] travel between them: what forward
// returns on one is the input of the next, and backward hands their gradient back. With tp or ep the ranks of these groups call
// together: tp ranks with the same batch, ep ranks each with its own (which may have no rows).

#include <functional>
#include <string_view>
#include <vector>

#include "model/batch.h"
#include "model/state.h"
#include "model/weights.h"
#include "ops/hyperconn/hyperconn.h"
#include "parallel/collective.h"

namespace lockstep {

// Rotation tables of the two bases for positions below config.max_positions (or fewer): [P, r] f32.
struct RopeTables {
  TensorView window;      // swa layers
  TensorView compressed;  // csa, hca layers
};
RopeTables make_rope_tables(const ModelConfig& config, int64_t positions, Arena& arena);
RopeTables make_rope_tables(Context& c, const ModelConfig& config, int64_t positions, Arena& arena);  // in an arena of c's device

// Called after named points of the forward with f32 or storage-dtype rows [T, ...]: how a first difference is located and hidden states are checked.
// Points: "embed", then for layer i "attn.u", "attn.q", "attn.kv", "attn.o", "attn.y", "attn.x", "ffn.u", "ffn.ids", "ffn.y", "ffn.x", then "final" (layer -1).
// "attn.q" and "attn.o" are of the rank's heads.
using Probe = std::function<void(int layer, std::string_view point, ConstTensorView rows)>;

// What a forward chose for the rows of one call, by layer of the whole model.
struct Choices {
  std::vector<ConstTensorView> experts;  // [T, K] i32, ascending
  std::vector<ConstTensorView> entries;  // [T, k] i32 as index_select gives them, csa layers; or no layers: not known
};

struct Model {
  const Weights* weights = nullptr;
  RopeTables rope;
  CacheRounding cache;  // what attention keeps rounded; index_fp4 REQUIRES: index_head_dim is a power of two
  const Probe* probe = nullptr;  // usually null
  const Choices* replay = nullptr;  // taken instead of choosing; weights of experts are still computed here. Null: none
  RankGroup* tp = nullptr;       // share heads and vocabulary; null: alone
  RankGroup* ep = nullptr;       // share experts; null: alone
  int64_t exchange_rows = 1024;  // rows that an ep rank sends to another at a time: bounds the buffers (model/expert_exchange.h)
};

struct SavedLayer;  // what a layer's backward needs; model/saved.h
enum class Recompute : uint8_t { none, layer };  // layer: keep each layer's input only and run it again in backward

// Activations kept by forward for backward, in `arena`; release the arena's mark after backward.
struct Saved {
  Arena* arena = nullptr;
  Recompute recompute = Recompute::none;
  std::vector<ConstTensorView> layer_inputs;  // [T, n, D] each, of the shard's layers in order, then the last one's output
  std::vector<SavedLayer> layers;             // of the shard's layers
  ConstTensorView final_x;  // of the final site, wanted rows: [R, n, D]
  HyperFeed final_feed;     // in the head's form
  Saved();
  ~Saved();
};

// Runs the shard's part of the stack over `batch`, reading and extending its sequences' state. The stage without the embedding takes `input`, the
// streams [T, n, D] in storage dtype. Returns, allocated from c.workspace (the caller holds a scope around the call), what the stage makes:
//   with the head     the final normed hidden rows [R, D] of the wanted rows, in storage dtype
//   otherwise         the streams [T, n, D]
// saved == nullptr: nothing is kept. `input` must outlive `saved`.
TensorView forward(Context& c, const Model& model, const SequenceBatch& batch, const StatePool& state, Saved* saved, ConstTensorView input = {});

// doutput: f32 gradient of what forward returned. Adds to `gradients`. A stage without the embedding writes dinput [T, n, D] f32.
// Every sequence of the batch must have started at position 0, and the pages of `state` must still hold the entries that forward wrote.
void backward(Context& c, const Model& model, const SequenceBatch& batch, const StatePool& state, Saved& saved,
              ConstTensorView doutput, Gradients& gradients, TensorView dinput = {});

}  // namespace lockstep
