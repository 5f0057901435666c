#pragma once
// swiglu: a[r, i] = rho[r] * silu(min(g, limit)) * clamp(u, -limit, limit);  limit <= 0: no clamp
//   g, u [R, I] f32 | bf16;  rho [R] f32, empty view: 1 (the shared expert);  a [R, I] dtype of g
// swiglu_backward: dg, du [R, I] f32, distinct, one of which may be da; drho [R] f32 (empty with an empty rho); da [R, I] f32.
//   The gradient is zero where g > limit, and where |u| > limit; at equality it passes (V4 spec 6.4).
// Numerics: s = sigmoid_f32(g); (g * s) * u, then * rho, in f32, one rounding at the end. drho by the 16-lane tree over I of
//   da * (silu(g) * u), fused; silu' = s * fma(g, 1 - s, 1). Row contract holds.
// Scratch: none. Source: V4 spec 2.8.

#include "ops/matmul/matmul.h"

namespace lockstep {

void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit);
void swiglu(Context& c, const MatmulInput& a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit);  // as the next product reads it
void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit);

}  // namespace lockstep
