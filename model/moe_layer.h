#pragma once
// The expert sublayer of one layer: router, dispatch, routed experts, shared expert, combine; forward and backward beside each other.
// Input u and output y are [T, D] in storage dtype; V4 spec 2.8 and 6.4. With Model::ep the routed experts are spread over the group
// (model/expert_exchange.h); router, shared expert and sum run at the token's home rank.

#include "model/saved.h"
#include "model/stack.h"

namespace lockstep {

// `keep` gives what `saved` holds; if it is c's workspace, nothing is kept beyond the call.
void moe_layer_forward(Context& c, const Model& model, int layer, const SequenceBatch& batch, TensorView y, ConstTensorView u, SavedMoe& saved, Arena& keep);
// du [T, D] f32 written from dy [T, D] f32; parameter gradients added to.
void moe_layer_backward(Context& c, const Model& model, int layer, const SequenceBatch& batch, TensorView du, ConstTensorView dy, ConstTensorView u,
                        const SavedMoe& saved, LayerTensors<TensorView>& grad);

}  // namespace lockstep
