#pragma once
// Internal to ops/rmsnorm: the implementations, without argument checks. Same bits. device: on the GPU, rmsnorm_gpu.cu.

#include "ops/rmsnorm/rmsnorm.h"

namespace lockstep {

namespace reference {
void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps);
void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                      ConstTensorView w, ConstTensorView inv, bool accumulate);
}  // namespace reference

namespace simd {
void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps);
void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                      ConstTensorView w, ConstTensorView inv, bool accumulate);
}  // namespace simd

namespace device {
void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps);
// D - r is a multiple of 8.
void rmsnorm_rope(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps, ConstTensorView pos, ConstTensorView table,
                  int64_t heads);
void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv,
                      bool accumulate);
}  // namespace device

}  // namespace lockstep
