#include "ops/cast/cast.h"

#include "ops/cast/cast_cpu.h"

namespace lockstep {

void cast(Context& c, TensorView dst, ConstTensorView src) {
  const auto is_float = [](DType t) { return t == DType::f32 || t == DType::bf16; };
  CHECK(dst.shape == src.shape, "cast: dst {}, src {}", dst.shape.str(), src.shape.str());
  CHECK(is_float(dst.dtype) && is_float(src.dtype), "cast: {} to {}", dtype_name(src.dtype), dtype_name(dst.dtype));
  if (dst.empty()) return;
  c.on_gpu() ? device::cast(c, dst, src) : simd::cast(c, dst, src);
}

void add(Context& c, TensorView dst_accum, ConstTensorView src) {
  CHECK(dst_accum.shape == src.shape, "add: dst {}, src {}", dst_accum.shape.str(), src.shape.str());
  CHECK(dst_accum.dtype == DType::f32 && src.dtype == DType::f32, "add: {} to {}", dtype_name(src.dtype),
        dtype_name(dst_accum.dtype));
  if (dst_accum.empty()) return;
  c.on_gpu() ? device::add(c, dst_accum, src) : simd::add(c, dst_accum, src);
}

void scale(Context& c, TensorView dst, float factor) {
  CHECK(dst.dtype == DType::f32, "scale: {}", dtype_name(dst.dtype));
  if (dst.empty()) return;
  c.on_gpu() ? device::scale(c, dst, factor) : simd::scale(c, dst, factor);
}

}  // namespace lockstep
