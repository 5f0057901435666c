#pragma once
// cast: dst[i] = convert(src[i]) between f32 and bf16 (either way, or the same dtype: a copy).
// add:  dst[i] += src[i], both f32 (gradient sums). scale: dst[i] *= factor, f32.
//   dst, src: same shape; row_stride may exceed the row.
// Numerics: to_bf16 of core/dtype.h (nearest even). Source: IEEE 754.

#include "core/context.h"

namespace lockstep {

void cast(Context& c, TensorView dst, ConstTensorView src);
void add(Context& c, TensorView dst_accum, ConstTensorView src);
void scale(Context& c, TensorView dst, float factor);

}  // namespace lockstep
