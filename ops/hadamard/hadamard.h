#pragma once
// hadamard: x[t, :] <- N^(-1/2) * Hd x[t, :], Hd[a, b] = (-1)^popcount(a & b). Orthonormal and symmetric, so it is its own inverse, and inner products of
// rotated rows are those of the rows. It spreads a row's few large channels over all of them, which is what 4 bits need.
//   x  [T, N]  f32 | bf16   in place; N a power of two; row_stride may exceed N
// Numerics: log2(N) stages of a + b, a - b in f32, from the nearest channels to the farthest, then one product with N^(-1/2), one rounding to x's dtype.
// The row contract holds. Cost: reads and writes x once. Scratch: N f32 a worker of the CPU. On the GPU N is at most what shared
// memory holds, 32768.
// Source: V4 spec 2.6 (V4 release, inference/model.py, rotate_activation).

#include "core/context.h"

namespace lockstep {

void hadamard(Context& c, TensorView x);

}  // namespace lockstep
