#pragma once
// The routed experts' own arithmetic, on n rows that stand by expert: offsets [E + 1] i32 of the experts that the weights hold.
//
//   g = w1 x, u = w3 x, a = swiglu(g, u, rho), y = w2 a         x, y [n, D]; g, u, a [n, I]; rho [n] f32
//
// Rows may have come from anywhere: from the tokens here, or from other ranks (model/expert_exchange.h). n may be 0.

#include "model/stack.h"

namespace lockstep {

// Writes y, g and u. y may be x; scratch: a. With row_of [n] i32 row r of x is x[row_of[r]].
void experts_forward(Context& c, const Model& model, int layer, TensorView y, TensorView g, TensorView u, ConstTensorView x, ConstTensorView rho,
                     ConstTensorView offsets, ConstTensorView row_of = {});

// What experts_forward read and wrote.
struct ExpertRows {
  ConstTensorView x, rho, g, u, offsets;
};
struct ExpertScratch {
  TensorView a, dg, du;  // [n, I]: storage dtype, f32, f32
};
// drows [n, D] f32: the gradient of y on entry, of x on return. drho [n] f32 is written; weight gradients that are wanted are added to, rows in order.
void experts_backward(Context& c, const Model& model, int layer, TensorView drows, TensorView drho, const ExpertRows& rows, const ExpertScratch& scratch,
                      LayerTensors<TensorView>& grad);

}  // namespace lockstep
