#pragma once
// Internal to ops/cast: the implementations, without argument checks. Same bits. device: on the GPU, cast_gpu.cu.

#include "ops/cast/cast.h"

namespace lockstep {

namespace reference {
void cast(Context& c, TensorView dst, ConstTensorView src);
void add(Context& c, TensorView dst_accum, ConstTensorView src);
void scale(Context& c, TensorView dst, float factor);
}  // namespace reference

namespace simd {
void cast(Context& c, TensorView dst, ConstTensorView src);
void add(Context& c, TensorView dst_accum, ConstTensorView src);
void scale(Context& c, TensorView dst, float factor);
}  // namespace simd

namespace device {
void cast(Context& c, TensorView dst, ConstTensorView src);
void add(Context& c, TensorView dst_accum, ConstTensorView src);
void scale(Context& c, TensorView dst, float factor);
}  // namespace device

}  // namespace lockstep
