#pragma once
// Internal to ops/hadamard: without argument checks.

#include "ops/hadamard/hadamard.h"

namespace lockstep::reference {

void hadamard(Context& c, TensorView x);

}  // namespace lockstep::reference
