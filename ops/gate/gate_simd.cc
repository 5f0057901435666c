#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gate/gate_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

void ScoreRowKernel(float* s, const float* z, int64_t n) {
  const F32Tag d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(kF32Lanes)) {
    const auto in_row = hn::FirstN(d, static_cast<size_t>(n - i));
    hn::BlendedStore(hn::Sqrt(SoftplusF32(d, hn::MaskedLoad(in_row, d, z + i))), in_row, d, s + i);
  }
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "ops/gate/gate_cpu.h"

namespace lockstep {
HWY_EXPORT(ScoreRowKernel);

namespace simd {
void score_row(float* s, const float* z, int64_t n) { HWY_DYNAMIC_DISPATCH(ScoreRowKernel)(s, z, n); }
}  // namespace simd

}  // namespace lockstep
#endif  // HWY_ONCE
