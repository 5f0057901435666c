#include "model/moe_layer.h"

#include "model/expert_exchange.h"
#include "model/experts.h"
#include "model/linear.h"
#include "ops/gate/gate.h"
#include "ops/moe_permute/moe_permute.h"
#include "ops/rows/rows.h"
#include "ops/swiglu/swiglu.h"

namespace lockstep {

void moe_layer_forward(Context& c, const Model& model, int layer, const SequenceBatch& batch, TensorView y, ConstTensorView u, SavedMoe& saved, Arena& keep) {
  const ModelConfig& m = model.weights->config();
  const LayerConfig& l = m.layers[static_cast<size_t>(layer)];
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  const int64_t T = batch.seq.num_tokens, K = m.experts_per_token, R = T * K, I = m.expert_dim, D = m.hidden_size;
  const DType dtype = u.dtype;

  // The router, and the shared expert's products of the same rows.
  saved.z = keep.tensor(DType::f32, {T, m.num_experts}, "moe.z");
  saved.ids = keep.tensor(DType::i32, {T, K}, "moe.ids");
  saved.weight = keep.tensor(DType::f32, {T, K}, "moe.weight");
  saved.shared_g = keep.tensor(dtype, {T, I}, "moe.shared_g");
  saved.shared_u = keep.tensor(dtype, {T, I}, "moe.shared_u");
  const MatmulCall of_input[] = {{saved.z, u, w.gate}, {saved.shared_g, u, w.shared_w1}, {saved.shared_u, u, w.shared_w3}};
  matmul_many(c, of_input);
  if (model.replay != nullptr) {  // row t of the choices, as if they were a table
    const ArenaScope scope(*c.workspace);
    const TensorView row = c.workspace->tensor(DType::i32, {T}, "moe.row");
    number_rows(c, row);
    route_hashed(c, saved.ids, saved.weight, saved.z, row, model.replay->experts[static_cast<size_t>(layer)], m.routed_scale);
  } else if (l.hash_routed) {
    route_hashed(c, saved.ids, saved.weight, saved.z, batch.tokens, w.tid2eid.rows, m.routed_scale);
  } else {
    route_scored(c, saved.ids, saved.weight, saved.z, w.gate_bias.rows, m.routed_scale);
  }
  if (model.probe) (*model.probe)(layer, "ffn.ids", saved.ids);

  // Every (token, slot) becomes a row of its expert.
  saved.offsets = keep.tensor(DType::i32, {m.num_experts + 1}, "moe.offsets");
  saved.row_token = keep.tensor(DType::i32, {R}, "moe.row_token");
  saved.slot_row = keep.tensor(DType::i32, {T, K}, "moe.slot_row");
  moe_plan(c, saved.offsets, saved.row_token, saved.slot_row, saved.ids);

  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;
  TensorView rows = ws.tensor(dtype, {R, D}, "moe.rows");
  if (experts_are_spread(model)) {
    TensorView rho = ws.tensor(DType::f32, {R}, "moe.home_rho");
    moe_spread(c, rho, saved.weight, saved.slot_row);
    exchange_forward(c, model, layer, rows, u, rho, saved, keep);
  } else {
    saved.rho = keep.tensor(DType::f32, {R}, "moe.rho");
    saved.g = keep.tensor(dtype, {R, I}, "moe.g");
    saved.u = keep.tensor(dtype, {R, I}, "moe.u");
    moe_spread(c, saved.rho, saved.weight, saved.slot_row);
    experts_forward(c, model, layer, rows, saved.g, saved.u, u, saved.rho, saved.offsets, saved.row_token);
  }

  const MatmulInput shared_a = matmul_input(c, dtype, T, I, w.shared_w2);
  swiglu(c, shared_a, saved.shared_g, saved.shared_u, ConstTensorView(), m.swiglu_limit);
  TensorView shared_y = ws.tensor(dtype, {T, D}, "moe.shared_y");
  matmul(c, shared_y, shared_a, w.shared_w2);
  moe_combine(c, y, rows, saved.slot_row, shared_y);
  if (model.probe) (*model.probe)(layer, "ffn.y", y);
}

void moe_layer_backward(Context& c, const Model& model, int layer, const SequenceBatch& batch, TensorView du, ConstTensorView dy, ConstTensorView u,
                        const SavedMoe& saved, LayerTensors<TensorView>& grad) {
  const ModelConfig& m = model.weights->config();
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  const int64_t T = batch.seq.num_tokens, K = m.experts_per_token, R = T * K, I = m.expert_dim, D = m.hidden_size;
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;

  {  // Shared expert; it writes du, everything else adds.
    ArenaScope shared_scope(ws);
    TensorView a = ws.tensor(u.dtype, {T, I}, "moe.shared_a");
    swiglu(c, a, saved.shared_g, saved.shared_u, ConstTensorView(), m.swiglu_limit);
    TensorView da = ws.tensor(DType::f32, {T, I}, "moe.shared_da");
    TensorView dg = ws.tensor(DType::f32, {T, I}, "moe.shared_dg"), dup = ws.tensor(DType::f32, {T, I}, "moe.shared_du");
    linear_backward(c, da, Into::write, grad.shared_w2, dy, a, w.shared_w2);
    swiglu_backward(c, dg, dup, TensorView(), da, saved.shared_g, saved.shared_u, ConstTensorView(), m.swiglu_limit);
    linear_backward(c, du, Into::write, grad.shared_w1, dg, u, w.shared_w1);
    linear_backward(c, du, Into::add, grad.shared_w3, dup, u, w.shared_w3);
  }

  // Routed experts: rows of dy, back through w2, SwiGLU, w1 and w3, summed at the token.
  TensorView drows = ws.tensor(DType::f32, {R, D}, "moe.drows"), drho = ws.tensor(DType::f32, {R}, "moe.drho");
  if (experts_are_spread(model)) {
    exchange_backward(c, model, layer, drows, drho, dy, saved, grad);
  } else {
    ArenaScope experts_scope(ws);
    TensorView x = ws.tensor(u.dtype, {R, D}, "moe.x"), a = ws.tensor(u.dtype, {R, I}, "moe.a");
    TensorView dg = ws.tensor(DType::f32, {R, I}, "moe.dg"), dup = ws.tensor(DType::f32, {R, I}, "moe.du");
    moe_gather(c, x, u, saved.row_token);
    moe_gather(c, drows, dy, saved.row_token);
    experts_backward(c, model, layer, drows, drho, {x, saved.rho, saved.g, saved.u, saved.offsets}, {a, dg, dup}, grad);
  }
  moe_gather_backward(c, du, drows, saved.slot_row);

  // Router: through the weights, never through the choice.
  TensorView dweight = ws.tensor(DType::f32, {T, K}, "moe.dweight"), dz = ws.tensor(DType::f32, {T, m.num_experts}, "moe.dz");
  moe_collect(c, dweight, drho, saved.slot_row);
  route_backward(c, dz, dweight, saved.ids, saved.z, m.routed_scale);
  linear_backward(c, du, Into::add, grad.gate, dz, u, w.gate);
}

}  // namespace lockstep
