#pragma once
// Internal to ops/cast: the two implementations, without argument checks. Same bits.

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

}  // namespace lockstep
