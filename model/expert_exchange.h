#pragma once
// Routed experts that are spread over an ep group: rows travel to the rank that holds their expert, and their results travel home.
//
// Rank d of the group holds experts part_of(E, ep, d). At a token's home rank the router has run over all E experts, and moe_plan has sorted its
// R = T * K rows by expert, so what goes to rank d is one piece of them. The ranks tell each other how many rows they have for every expert; then rows
// move in rounds, in each of which a rank sends at most B = Model::exchange_rows rows to each rank:
//
//   home    gather the round's rows of u, each with its routing weight behind it   ──dispatch──>  owner  put them by expert, then source, then row
//                                                                                                       experts_forward
//   home    put the results where the rows stood                                  <──combine────        put them back in the order they came
//
// So buffers hold at most C = ep * B rows whatever the routing, and every row meets the arithmetic of one rank alone: after the last round home has the
// results of all its rows, sorted by expert as there, and adds them in the same order. The bits are those of one rank.
//
// Backward sends rows of dy the same way and gets dx rows back, each with its drho behind it. The owner kept what the rows that came were and made (x,
// rho, g, u), and adds to its experts' gradients round after round: within a round by source, then row. That order is fixed by the routing, the group
// and B. With one round it is the order of the ranks' batches one behind the other.
//
// All ranks of the group call together, layer by layer, each with any number of tokens, none too. The number of rounds is that of the fullest pair of
// ranks, and all know it.
//
// Bytes of a rank, own rows not counted (s = bytes of the storage dtype): a row dispatched D s + 4, combined D s; backward 4 D, and 4 D + 4;
// 8 E (ep - 1) sent and received for the counts, once a forward.

#include <span>

#include "model/saved.h"
#include "model/stack.h"

namespace lockstep {

// Are this model's experts spread over several ranks?
inline bool experts_are_spread(const Model& model) { return model.ep != nullptr && model.ep->size() > 1; }

// rows [R, D] of the experts' results for the tokens' rows, from u [T, D], the routing weight rho [R] f32 of each row, and saved.offsets and
// saved.row_token. Fills the rest of saved that backward needs, from `keep`, sized by what arrives here; if `keep` is c's workspace, nothing is kept.
void exchange_forward(Context& c, const Model& model, int layer, TensorView rows, ConstTensorView u, ConstTensorView rho, SavedMoe& saved, Arena& keep);
// drows [R, D] and drho [R] f32 written from dy [T, D] f32; gradients of this rank's experts added to.
void exchange_backward(Context& c, const Model& model, int layer, TensorView drows, TensorView drho, ConstTensorView dy, const SavedMoe& saved,
                       LayerTensors<TensorView>& grad);

enum class ExchangePass : uint8_t { forward, backward };

// What a call takes of the workspace, beside the ops' own scratch: about
//   forward   C (3 D s + 3 I s + 16)
//   backward  C (12 D + I s + 8 I + 20)
// A forward that keeps takes x, rho, g and u from `keep` instead.
size_t exchange_workspace(const ModelConfig& config, DType dtype, int ep, int64_t exchange_rows, ExchangePass pass);

// What one layer moves, by the name that Traffic counts it under: "expert counts", "expert dispatch" and "expert combine" of the forward,
// "expert gradient dispatch" and "expert gradient combine" of the backward.
struct ExchangeBytes {
  CommBytes counts, dispatch, combine;
};
// counts [ep, E]: rows that each rank has for each expert (SavedMoe::counts).
ExchangeBytes expert_exchange_bytes(std::span<const int64_t> counts, int ep, int rank, int64_t hidden_size, DType dtype, ExchangePass pass);
// Rounds of that layer in either direction: each is one dispatch and one combine.
int64_t expert_exchange_rounds(std::span<const int64_t> counts, int ep, int64_t exchange_rows);

}  // namespace lockstep
