#pragma once
// mark_nonfinite: *mark (i32, one element) = 1 where an element of x is NaN or infinite; otherwise it stays as it is, so that one mark may serve several tensors.
//   x  contiguous, any shape, at any address: f32, bf16, e4m3, ue8m0. Other dtypes have no such numbers.
// Cost: reads x once. Scratch: none.

#include "core/context.h"

namespace lockstep {

void mark_nonfinite(Context& c, TensorView mark, ConstTensorView x);

namespace device {
void mark_nonfinite(Context& c, TensorView mark, ConstTensorView x);
}  // namespace device

}  // namespace lockstep
