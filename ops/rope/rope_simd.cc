#include <cmath>

#include "ops/rope/rope_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rope/rope_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

// Rotates all heads of every row. A vector holds pairs as stored; with the table's (cos, sin) as it is and once more swapped to
// (-sin, cos), both halves of a pair come from one product and one fused multiply-add.
template <class D, typename T>
void RotateRows(D d, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = x.dim(1) / heads, rotary = table.dim(1);
  const int32_t* p = pos.ptr<int32_t>();
  const auto minus_even = hn::OddEven(hn::Zero(d), hn::Set(d, -0.0f));
  const auto sin_sign = inverse ? hn::OddEven(hn::Set(d, -0.0f), hn::Zero(d)) : hn::Zero(d);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float* turn = table.ptr<float>() + p[t] * table.row_stride;
    T* first = x.ptr<T>() + t * x.row_stride + width - rotary;
    int64_t i = 0;
    for (; i + step <= rotary; i += step) {
      const auto cos_sin = hn::Xor(hn::LoadU(d, turn + i), sin_sign);
      const auto minus_sin_cos = hn::Xor(hn::Reverse2(d, cos_sin), minus_even);
      T* channel = first + i;
      for (int64_t h = 0; h < heads; ++h, channel += width) {
        const auto v = LoadF32(d, channel);
        StoreF32(d, hn::MulAdd(hn::DupEven(v), cos_sin, hn::Mul(hn::DupOdd(v), minus_sin_cos)), channel);
      }
    }
    for (; i < rotary; i += 2) {
      const float cos = turn[i], sin = inverse ? -turn[i + 1] : turn[i + 1];
      T* channel = first + i;
      for (int64_t h = 0; h < heads; ++h, channel += width) {
        const float even = to_f32(channel[0]), odd = to_f32(channel[1]);
        channel[0] = from_f32<T>(std::fmaf(even, cos, -(odd * sin)));
        channel[1] = from_f32<T>(std::fmaf(even, sin, odd * cos));
      }
    }
  }
}

// The widest vector that the rotary width fills.
template <typename T>
void RotateWidth(TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  const int64_t rotary = table.dim(1);
  if (rotary % 16 == 0) return RotateRows<hn::CappedTag<float, 16>, T>({}, x, pos, table, heads, inverse);
  if (rotary % 8 == 0) return RotateRows<hn::CappedTag<float, 8>, T>({}, x, pos, table, heads, inverse);
  RotateRows<hn::CappedTag<float, 4>, T>({}, x, pos, table, heads, inverse);
}

void Rotate(TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  x.dtype == DType::f32 ? RotateWidth<float>(x, pos, table, heads, inverse)
                        : RotateWidth<bf16>(x, pos, table, heads, inverse);
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(Rotate);

namespace simd {

void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  parallel_for(c, x.rows(), 10 + heads * table.dim(1) / 3, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(Rotate)(x.slice(begin, end - begin), pos.slice(begin, end - begin), table, heads, inverse);
  });
}

}  // namespace simd
}  // namespace lockstep
#endif  // HWY_ONCE
