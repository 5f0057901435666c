#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/adamw/adamw_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/adamw/adamw_cpu.h"
#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

void AdamWRange(float* HWY_RESTRICT w, float* HWY_RESTRICT m, float* HWY_RESTRICT v, const float* HWY_RESTRICT grad, int64_t n,
                const AdamWStep& step) {
  const F32Tag d;
  const auto b1 = hn::Set(d, step.beta1), b2 = hn::Set(d, step.beta2);
  const auto c1 = hn::Set(d, 1.0f - step.beta1), c2 = hn::Set(d, 1.0f - step.beta2);
  const auto scale = hn::Set(d, step.grad_scale), lr = hn::Set(d, step.lr), decay = hn::Set(d, step.lr * step.weight_decay);
  const auto bias1 = hn::Set(d, step.bias1), bias2 = hn::Set(d, step.bias2), eps = hn::Set(d, step.eps);
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kF32Lanes) <= n; i += static_cast<int64_t>(kF32Lanes)) {
    const auto g = hn::Mul(hn::LoadU(d, grad + i), scale);
    const auto mi = hn::Add(hn::Mul(b1, hn::LoadU(d, m + i)), hn::Mul(c1, g));
    const auto vi = hn::Add(hn::Mul(b2, hn::LoadU(d, v + i)), hn::Mul(c2, hn::Mul(g, g)));
    hn::StoreU(mi, d, m + i);
    hn::StoreU(vi, d, v + i);
    const auto update = hn::Div(hn::Mul(lr, hn::Div(mi, bias1)), hn::Add(hn::Sqrt(hn::Div(vi, bias2)), eps));
    const auto wi = hn::LoadU(d, w + i);
    hn::StoreU(hn::Sub(hn::Sub(wi, hn::Mul(decay, wi)), update), d, w + i);
  }
  reference::adamw_range(w + i, m + i, v + i, grad + i, n - i, step);
}

double SumSquaresBlock(const float* HWY_RESTRICT grad, int64_t n) {
  const hn::CappedTag<double, kTreeLanes> d;
  const hn::Rebind<float, decltype(d)> df;
  constexpr int64_t kLanes = hn::MaxLanes(d), kVectors = kTreeLanes / kLanes;
  hn::Vec<decltype(d)> acc[kVectors];
  for (int64_t k = 0; k < kVectors; ++k) acc[k] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kTreeLanes <= n; i += kTreeLanes)
    for (int64_t k = 0; k < kVectors; ++k) {
      const auto g = hn::LoadU(df, grad + i + k * kLanes);
      acc[k] = hn::Add(acc[k], hn::PromoteTo(d, hn::Mul(g, g)));
    }
  HWY_ALIGN double lane[kTreeLanes];
  for (int64_t k = 0; k < kVectors; ++k) hn::Store(acc[k], d, lane + k * kLanes);
  for (int64_t k = 0; i < n; ++i, ++k) lane[k] += static_cast<double>(grad[i] * grad[i]);
  for (int width = kTreeLanes / 2; width >= 1; width /= 2)
    for (int k = 0; k < width; ++k) lane[k] = lane[k] + lane[k + width];
  return lane[0];
}

bool AllFiniteRange(const float* HWY_RESTRICT x, int64_t n) {
  const hn::RebindToUnsigned<F32Tag> d;
  const F32Tag df;
  const auto exponent = hn::Set(d, 0x7f800000u);
  auto largest = hn::Zero(d);
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kF32Lanes) <= n; i += static_cast<int64_t>(kF32Lanes))
    largest = hn::Max(largest, hn::And(hn::BitCast(d, hn::LoadU(df, x + i)), exponent));
  return hn::AllFalse(d, hn::Eq(largest, exponent)) && reference::all_finite_range(x + i, n - i);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(AdamWRange);
HWY_EXPORT(SumSquaresBlock);
HWY_EXPORT(AllFiniteRange);

namespace simd {
void adamw_range(float* w, float* m, float* v, const float* grad, int64_t n, const AdamWStep& step) {
  HWY_DYNAMIC_DISPATCH(AdamWRange)(w, m, v, grad, n, step);
}
double sum_squares_block(const float* grad, int64_t n) { return HWY_DYNAMIC_DISPATCH(SumSquaresBlock)(grad, n); }
bool all_finite_range(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(AllFiniteRange)(x, n); }
}  // namespace simd

}  // namespace lockstep
#endif  // HWY_ONCE
