#include "model/experts.h"

#include "ops/swiglu/swiglu.h"

namespace lockstep {

void experts_forward(Context& c, const Model& model, int layer, TensorView y, TensorView g, TensorView u, TensorView a, ConstTensorView x,
                     ConstTensorView rho, ConstTensorView offsets) {
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  const MatmulCall of_input[] = {{g, x, w.w1}, {u, x, w.w3}};
  grouped_matmul_many(c, of_input, offsets);
  swiglu(c, a, g, u, rho, model.weights->config().swiglu_limit);
  grouped_matmul(c, y, a, w.w2, offsets);
}

void experts_backward(Context& c, const Model& model, int layer, TensorView drows, TensorView drho, const ExpertRows& rows, const ExpertScratch& scratch,
                      LayerTensors<TensorView>& grad) {
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  const float limit = model.weights->config().swiglu_limit;
  const auto& [a, dg, du] = scratch;
  swiglu(c, a, rows.g, rows.u, rows.rho, limit);
  const TensorView da = dg;  // which takes its place
  grouped_matmul_backward_input(c, da, drows, w.w2, rows.offsets);
  if (!grad.w2.empty()) grouped_matmul_backward_weight(c, grad.w2, drows, a, rows.offsets);
  swiglu_backward(c, dg, du, drho, da, rows.g, rows.u, rows.rho, limit);
  if (!grad.w1.empty()) grouped_matmul_backward_weight(c, grad.w1, dg, rows.x, rows.offsets);
  if (!grad.w3.empty()) grouped_matmul_backward_weight(c, grad.w3, du, rows.x, rows.offsets);
  grouped_matmul_backward_input(c, drows, dg, w.w1, rows.offsets);
  grouped_matmul_backward_input(c, drows, du, w.w3, rows.offsets, /*accumulate=*/true);
}

}  // namespace lockstep
