#pragma once
// What the machine's cores can do at best: independent chains of fused multiply-adds in registers, on every thread of a context. For benchmarks.

#include "core/context.h"

namespace lockstep {

// Runs a few milliseconds of it and returns the floating-point operations done (a multiply-add is two).
double fma_chains(Context& c);

}  // namespace lockstep
