#pragma once
// The GPU's side of matmul.h. Pointers are device memory; calls are enqueued on the stream and do not wait.

#include <cstdint>

namespace lockstep::gpu {

struct MatmulProblem {
  int64_t m = 0, n = 0, k = 0;
  const void* x = nullptr;  // [m, k] bf16
  const void* w = nullptr;  // [n, k] bf16
  void* y = nullptr;        // [m, n] bf16 or f32
  int64_t x_stride = 0, w_stride = 0, y_stride = 0;  // elements between rows; those of x and w multiples of 8
  bool y_is_f32 = false;
};
void matmul_bf16(const MatmulProblem& p, void* stream);

// E4M3 codes x [m, k] and w [n, k] with f32 scales of their blocks: x by [1, 128], w by [128, 128]. Strides of x and w are multiples of 16.
struct Fp8Problem {
  MatmulProblem codes;
  const float* x_scale = nullptr;  // [m, ceil(k / 128)]
  const float* w_scale = nullptr;  // [ceil(n / 128), ceil(k / 128)]
  int64_t x_scale_stride = 0, w_scale_stride = 0;
};
void matmul_fp8(const Fp8Problem& p, void* stream);

}  // namespace lockstep::gpu
