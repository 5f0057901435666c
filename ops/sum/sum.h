#pragma once
// sum_in_order: y[i] = x_0[i] + x_1[i] + ... + x_{n-1}[i], from left to right: how ranks' numbers are added, with the same bits on every rank.
//   parts [n, stride]  f32 | f64: x_r is the first N elements of row r, but for row `own`, which is not read
//   mine  [N]          x_own
//   y     [N]          dtype of parts; may be mine
// Cost: memory-bound, reads n*N, writes N. Scratch: none.

#include "core/context.h"

namespace lockstep {

void sum_in_order(Context& c, TensorView y, ConstTensorView mine, ConstTensorView parts, int64_t own);

namespace device {
void sum_in_order(Context& c, TensorView y, ConstTensorView mine, ConstTensorView parts, int64_t own);
}  // namespace device

}  // namespace lockstep
