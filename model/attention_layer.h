#pragma once
// The attention sublayer of one layer: queries, keys, compression, index selection, attention, grouped output; forward and backward beside
// each other. Input u and output y are [T, D] in storage dtype; V4 spec 2.3 to 2.7 and 6.4.

#include "model/saved.h"
#include "model/stack.h"

namespace lockstep {

// Allocates what it fills of `saved` from `keep`. Reads and extends the layer's state.
void attention_layer_forward(Context& c, const Model& model, int layer, const SequenceBatch& batch, const StatePool& state, TensorView y,
                             ConstTensorView u, SavedAttention& saved, Arena& keep);
// du [T, D] f32 written from dy [T, D] f32; parameter gradients added to.
void attention_layer_backward(Context& c, const Model& model, int layer, const SequenceBatch& batch, const StatePool& state, TensorView du,
                              ConstTensorView dy, ConstTensorView u, const SavedAttention& saved, LayerTensors<TensorView>& grad);

}  // namespace lockstep
