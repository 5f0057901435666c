#pragma once
// What the launches of hyper-connections share. Internal to ops/hyperconn.

#include <type_traits>

#include "ops/elements_gpu.h"
#include "ops/hyperconn/hyperconn.h"

namespace lockstep::device::hyper {

// Streams that a kernel is made for: 4, or all that are allowed. Loops over fewer are unrolled to these, so that matrices stay in registers.
template <typename F>
void for_streams(int64_t n, const F& f) {
  if (n <= 4) f(std::integral_constant<int, 4>());
  else f(std::integral_constant<int, static_cast<int>(kHyperMaxStreams)>());
}

// Of the scales, that of logit i.
GPU_INLINE int scale_index(int i, int n) { return i < n ? 0 : i < 2 * n ? 1 : 2; }

inline float* data_of(TensorView v) { return v.empty() ? nullptr : v.ptr<float>(); }
inline const float* data_of(ConstTensorView v) { return v.empty() ? nullptr : v.ptr<float>(); }

// Every stream of x, and every row of the others, begins at a multiple of 16 bytes.
template <typename... Views>
bool streams_aligned(ConstTensorView x, const Views&... v) {
  return x.dim(2) * static_cast<int64_t>(dtype_bytes(x.dtype)) % 16 == 0 && gpu::all_aligned(x, v...);
}

template <typename F>
void with_dtype(DType t, const F& f) {
  if (t == DType::f32) f(float());
  else f(bf16());
}

}  // namespace lockstep::device::hyper
