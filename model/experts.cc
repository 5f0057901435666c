#include "model/experts.h"

#include "ops/swiglu/swiglu.h"

namespace lockstep {

namespace {

// dw_accum (unless it is empty) and dx from one dy. dx may not be dy.
void expert_gradients(Context& c, TensorView dx, bool accumulate, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, const WeightView& w,
                      ConstTensorView offsets) {
  const ArenaScope scope(*c.workspace);
  if (!dw_accum.empty()) {
    dy = matmul_backward_rows(c, dy, dw_accum, x, w);
    grouped_matmul_backward_weight(c, dw_accum, dy, x, offsets);
  }
  grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate);
}

}  // namespace

void experts_forward(Context& c, const Model& model, int layer, TensorView y, TensorView g, TensorView u, ConstTensorView x, ConstTensorView rho,
                     ConstTensorView offsets, ConstTensorView row_of) {
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  const MatmulCall of_input[] = {{g, x, w.w1}, {u, x, w.w3}};
  grouped_matmul_many(c, of_input, offsets, {row_of, /*scratch=*/y});
  const ArenaScope scope(*c.workspace);
  const MatmulInput a = matmul_input(c, g.dtype, g.rows(), g.dim(1), w.w2);
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
  expert_gradients(c, da, /*accumulate=*/false, grad.w2, drows, a, w.w2, rows.offsets);
  swiglu_backward(c, dg, du, drho, da, rows.g, rows.u, rows.rho, limit);
  expert_gradients(c, drows, /*accumulate=*/false, grad.w1, dg, rows.x, w.w1, rows.offsets);
  expert_gradients(c, drows, /*accumulate=*/true, grad.w3, du, rows.x, w.w3, rows.offsets);
}

}  // namespace lockstep
