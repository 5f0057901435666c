#pragma once
// Internal to ops/swiglu: the implementations, without argument checks. Same bits. device: on the GPU, swiglu_gpu.cu.

#include "ops/swiglu/swiglu.h"

namespace lockstep {

namespace reference {
void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit);
void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit);
}  // namespace reference

namespace simd {
void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit);
void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit);
}  // namespace simd

namespace device {
void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit);
void swiglu(Context& c, TensorView codes, TensorView scales, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit);
void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit);
}  // namespace device

}  // namespace lockstep
