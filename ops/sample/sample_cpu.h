#pragma once
// The CPU side of sample. Only the exponentials of a row are worth vectors. device: on the GPU, sample_gpu.cu. Same tokens and bits.

#include "core/host_device.h"
#include "core/rng.h"
#include "ops/sample/sample.h"

namespace lockstep {

// Of an id with e = exp_f32(y - max), 0 where that is NaN.
HOST_DEVICE inline uint64_t sample_weight(float e) { return e > 0.0f ? static_cast<uint64_t>(e * 0x1p40f) : 0; }

inline bool is_greedy(const SampleParams& p) { return p.temperature == 0.0f; }
inline float temperature_of(const SampleParams& p) { return is_greedy(p) ? 1.0f : p.temperature; }
inline bool truncates(const SampleParams& p, int64_t vocab) {
  return !is_greedy(p) && ((p.top_k > 0 && p.top_k < vocab) || p.top_p < 1.0f || p.min_p > 0.0f);
}
inline float uniform_of(const SampleParams& p) { return uniform_open(philox(p.seed, RngPurpose::sample, p.prompt_id, p.sample_idx, p.position)[0]); }

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

namespace device {
SampleFilters pack_sample_params(TensorView packed, const SampleParams* params, int64_t vocab);
void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, ConstTensorView packed, SampleFilters filters);
}  // namespace device

}  // namespace lockstep
