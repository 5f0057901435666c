#pragma once
// How kernels of logprob and sample read a chunk of a row's logits, 16 threads a chunk.

#include "ops/row_gpu.h"

namespace lockstep::gpu {

// y = x / t. Most rows have temperature 1, which changes no bit.
struct Cooled {
  float t;
  GPU_INLINE float operator()(float x) const { return t == 1.0f ? x : x / t; }
};

// visit(x[i], i) for the lane's i < n in order, kAhead loads on their way at once.
template <typename Visit>
GPU_INLINE void each_logit(const float* x, int64_t n, const Visit& visit) {
  constexpr int kAhead = 16;
  int64_t i = row_lane();
  for (; i + (kAhead - 1) * kTreeLanes < n; i += kAhead * kTreeLanes) {
    float v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) v[k] = x[i + k * kTreeLanes];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) visit(v[k], i + k * kTreeLanes);
  }
  for (; i < n; i += kTreeLanes) visit(x[i], i);
}

}  // namespace lockstep::gpu
