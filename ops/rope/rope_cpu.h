#pragma once
// Internal to ops/rope: the implementations of the rotation, without argument checks. Same bits. device: on the GPU, rope_gpu.cu.

#include "ops/rope/rope.h"

namespace lockstep {

namespace reference {
void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse);
}  // namespace reference

namespace simd {
void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse);
}  // namespace simd

namespace device {
void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse);
}  // namespace device

}  // namespace lockstep
