#pragma once
// Internal to ops/embed: the implementation, without argument checks.

#include "ops/embed/embed.h"

namespace lockstep::reference {

void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens);
void embed_backward(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens);

}  // namespace lockstep::reference
