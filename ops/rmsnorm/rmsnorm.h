#pragma once
// rmsnorm: y[t, :] = x[t, :] * inv[t] * w,  inv[t] = 1 / sqrt(mean_d(x[t, d]^2) + eps)
//   x    [T, D]  f32 | bf16   row_stride may exceed D; T >= 0
//   w    [D]     f32          learned gain; empty view: no gain (the per-head query norm, with T = tokens * heads)
//   y    [T, D]  dtype of x   may be x itself
//   inv  [T]     f32          kept for backward; empty view if not wanted
// rmsnorm_backward: with xh = x * inv: dx = inv * (w*dy - xh * mean(xh * w*dy)); dw_accum += sum_t dy * xh
//   dy [T, D] f32; dx [T, D] f32, written (may be dy) or, with accumulate, added to; dw_accum [D] f32, empty with an empty w or
//   when not wanted
// Numerics: squares by the 16-lane tree (fixed_math.h) over D; (x * inv) * w in f32, one rounding at the end. dw_accum
//   continues one fma chain over ascending rows, so a batch in parts gives the bits of the whole. The row contract holds for y,
//   inv and dx.
// rmsnorm_rope: rmsnorm, then rope (ops/rope/rope.h) of the result, rounded in between as the two are: rows are heads, T = tokens * heads.
//   pos [tokens] i32, table [P, r] f32 with r <= D. y is contiguous. One pass on the GPU where D - r is a multiple of 8.
// Cost: memory-bound, reads T*D, writes T*D. Scratch: none.
// Source: Zhang and Sennrich 2019; V4 spec 2.0 and 2.3.

#include "core/context.h"

namespace lockstep {

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps);
void rmsnorm_rope(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps, ConstTensorView pos,
                  ConstTensorView table, int64_t heads);
void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                      ConstTensorView w, ConstTensorView inv, bool accumulate = false);

}  // namespace lockstep
