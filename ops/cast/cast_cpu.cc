#include <cstring>

#include "ops/cast/cast_cpu.h"

namespace lockstep::reference {

void cast(Context& c, TensorView dst, ConstTensorView src) {
  const int64_t n = dst.shape.row_elements();
  for (int64_t r = 0; r < dst.rows(); ++r) {
    if (dst.dtype == src.dtype) {
      const size_t element = dtype_bytes(dst.dtype);
      std::memcpy(static_cast<char*>(dst.data) + static_cast<size_t>(r * dst.row_stride) * element,
                  static_cast<const char*>(src.data) + static_cast<size_t>(r * src.row_stride) * element,
                  static_cast<size_t>(n) * element);
    } else if (dst.dtype == DType::bf16) {
      for (int64_t i = 0; i < n; ++i) dst.row<bf16>(r)[i] = to_bf16(src.row<float>(r)[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) dst.row<float>(r)[i] = to_f32(src.row<bf16>(r)[i]);
    }
  }
}

void add(Context& c, TensorView dst_accum, ConstTensorView src) {
  for (int64_t r = 0; r < dst_accum.rows(); ++r)
    for (int64_t i = 0; i < dst_accum.shape.row_elements(); ++i) dst_accum.row<float>(r)[i] += src.row<float>(r)[i];
}

void scale(Context& c, TensorView dst, float factor) {
  for (int64_t r = 0; r < dst.rows(); ++r)
    for (int64_t i = 0; i < dst.shape.row_elements(); ++i) dst.row<float>(r)[i] *= factor;
}

}  // namespace lockstep::reference
