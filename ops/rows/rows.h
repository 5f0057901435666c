#pragma once
// Rows moved, where no arithmetic happens. (moe_gather of ops/moe_permute takes rows by index.)
//   scatter_rows: out[index[r], :] = x[r, :]   x [R, W], out [T, W], one dtype, f32 | bf16; index [R] i32, distinct, each in [0, T); other rows stay
//   copy_rows:    out[r, :] = x[r, :]          x, out [R, W] of one dtype, any one, at any addresses and strides
//   number_rows:  v[i] = i                     v [N] i32
// Cost: reads and writes R*W elements. Scratch: none.

#include "core/context.h"

namespace lockstep {

void scatter_rows(Context& c, TensorView out, ConstTensorView x, ConstTensorView index);
void copy_rows(Context& c, TensorView out, ConstTensorView x);
void number_rows(Context& c, TensorView v);

namespace device {
void scatter_rows(Context& c, TensorView out, ConstTensorView x, ConstTensorView index);
void copy_rows(Context& c, TensorView out, ConstTensorView x);
void number_rows(Context& c, TensorView v);
}  // namespace device

}  // namespace lockstep
