#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sample/sample_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fixed_math-inl.h"
#include "ops/sample/sample_cpu.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

void ExpRowKernel(float* HWY_RESTRICT e, const float* HWY_RESTRICT logits, int64_t n, float temperature, float max) {
  const F32Tag d;
  const auto t = hn::Set(d, temperature), m = hn::Set(d, max);
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kF32Lanes) <= n; i += static_cast<int64_t>(kF32Lanes))
    hn::StoreU(ExpF32(d, hn::Sub(hn::Div(hn::LoadU(d, logits + i), t), m)), d, e + i);
  reference::exp_row(e + i, logits + i, n - i, temperature, max);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(ExpRowKernel);

namespace simd {
void exp_row(float* e, const float* logits, int64_t n, float temperature, float max) {
  HWY_DYNAMIC_DISPATCH(ExpRowKernel)(e, logits, n, temperature, max);
}
}  // namespace simd

}  // namespace lockstep
#endif  // HWY_ONCE
