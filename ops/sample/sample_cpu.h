#pragma once
// The CPU side of sample. Only the exponentials of a row are worth vectors.

#include "ops/sample/sample.h"

namespace lockstep {

// e[i] = exp_f32(logits[i] / temperature - max) for i in [0, n).
using ExpRow = void (*)(float* e, const float* logits, int64_t n, float temperature, float max);

namespace simd {
void exp_row(float* e, const float* logits, int64_t n, float temperature, float max);
}  // namespace simd

namespace reference {
void exp_row(float* e, const float* logits, int64_t n, float temperature, float max);
void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, const SampleParams* params,
            ExpRow exponentials = exp_row);
}  // namespace reference

}  // namespace lockstep
