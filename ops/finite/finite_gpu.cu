// A look at every number: bound by memory, bytes / 4 TB/s.

#include "core/gpu.h"
#include "ops/finite/finite.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 256, kTurns = 16;

template <typename Bits>
GPU_KERNEL GPU_BOUNDS(kThreads) mark_kernel(int32_t* mark, const uint8_t* x, bool aligned, Bits exponent, int64_t n) {
  const int64_t begin = static_cast<int64_t>(block_x()) * kThreads * kTurns + thread_x();
  bool found = false;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = begin + turn * kThreads;
    if (i >= n) continue;
    Bits bits = 0;
    if (aligned) {
      bits = reinterpret_cast<const Bits*>(x)[i];
    } else {
#pragma unroll
      for (int b = 0; b < static_cast<int>(sizeof(Bits)); ++b)
        bits = static_cast<Bits>(bits | static_cast<uint32_t>(x[i * static_cast<int64_t>(sizeof(Bits)) + b]) << 8 * b);
    }
    found |= (bits & exponent) == exponent;
  }
  if (found) *mark = 1;
}

template <typename Bits>
void look(Context& c, TensorView mark, ConstTensorView x, Bits exponent) {
  const int64_t n = x.shape.elements();
  launch(c, "mark_nonfinite", {.blocks = blocks_for(n, kThreads * kTurns), .threads = kThreads}, mark_kernel<Bits>, mark.ptr<int32_t>(),
         static_cast<const uint8_t*>(x.data), reinterpret_cast<uintptr_t>(x.data) % sizeof(Bits) == 0, exponent, n);
}

}  // namespace

void mark_nonfinite(Context& c, TensorView mark, ConstTensorView x) {
  switch (x.dtype) {
    case DType::f32: return look<uint32_t>(c, mark, x, 0x7f800000u);
    case DType::bf16: return look<uint16_t>(c, mark, x, 0x7f80u);
    case DType::e4m3: return look<uint8_t>(c, mark, x, 0x7f);
    case DType::ue8m0: return look<uint8_t>(c, mark, x, 0xff);
    default: return;
  }
}

}  // namespace lockstep::device
