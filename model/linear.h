#pragma once
// The backward of a linear layer as every sublayer uses it: input gradient always, weight gradient where it is wanted.

#include "ops/matmul/matmul.h"

namespace lockstep {

enum class Into : uint8_t { write, add };

inline void linear_backward(Context& c, TensorView dx, Into into, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, const WeightView& w) {
  const ArenaScope scope(*c.workspace);
  if (!dw_accum.empty() && !dx.empty()) dy = matmul_backward_rows(c, dy, dw_accum, x, w);
  if (!dw_accum.empty()) matmul_backward_weight(c, dw_accum, dy, x);
  if (!dx.empty()) matmul_backward_input(c, dx, dy, w, into == Into::add);
}

}  // namespace lockstep
