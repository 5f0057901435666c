#pragma once
// Internal to ops/gate: the implementations, without argument checks. device: on the GPU, gate_gpu.cu. On the CPU only the scores of a whole row are worth
// vectors; everything else touches K of E experts.

#include "core/context.h"

namespace lockstep {

// s[i] = sqrtsoftplus_f32(z[i]) for i in [0, n).
using ScoreRow = void (*)(float* s, const float* z, int64_t n);

namespace simd {
void score_row(float* s, const float* z, int64_t n);
}  // namespace simd

namespace reference {
void score_row(float* s, const float* z, int64_t n);
void route_scored(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView bias, float factor,
                  ScoreRow score = score_row);
void route_hashed(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView tokens,
                  ConstTensorView table, float factor);
void route_backward(Context& c, TensorView dz, ConstTensorView dweight, ConstTensorView ids, ConstTensorView z, float factor);
}  // namespace reference

namespace device {
void route_scored(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView bias, float factor);
void route_hashed(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView tokens, ConstTensorView table, float factor);
void route_backward(Context& c, TensorView dz, ConstTensorView dweight, ConstTensorView ids, ConstTensorView z, float factor);
}  // namespace device

}  // namespace lockstep
