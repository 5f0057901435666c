#include "ops/finite/finite.h"

#include <atomic>
#include <cstring>

namespace lockstep {

namespace {

// Any of the numbers, which may lie unaligned, has all bits of `exponent` set.
template <typename Bits>
bool any_with(Context& c, ConstTensorView x, Bits exponent) {
  const char* at = static_cast<const char*>(x.data);
  std::atomic<bool> any = false;
  parallel_for(c, x.shape.elements(), 1, [&](int64_t begin, int64_t end, int) {
    Bits found = 0;
    for (int64_t i = begin; i < end; ++i) {
      Bits bits;
      std::memcpy(&bits, at + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
      found |= static_cast<Bits>((bits & exponent) == exponent);
    }
    if (found != 0) any = true;
  });
  return any;
}

bool finite(Context& c, ConstTensorView x) {
  switch (x.dtype) {
    case DType::f32: return !any_with<uint32_t>(c, x, 0x7f800000u);
    case DType::bf16: return !any_with<uint16_t>(c, x, 0x7f80u);
    case DType::e4m3: return !any_with<uint8_t>(c, x, 0x7f);
    case DType::ue8m0: return !any_with<uint8_t>(c, x, 0xff);
    default: return true;
  }
}

}  // namespace

void mark_nonfinite(Context& c, TensorView mark, ConstTensorView x) {
  CHECK(mark.dtype == DType::i32 && mark.shape.elements() == 1 && x.contiguous(), "mark_nonfinite: mark {} {}, x {} with row stride {}", dtype_name(mark.dtype),
        mark.shape.str(), x.shape.str(), x.row_stride);
  if (x.empty()) return;
  if (c.on_gpu()) return device::mark_nonfinite(c, mark, x);
  if (!finite(c, x)) *mark.ptr<int32_t>() = 1;
}

}  // namespace lockstep
