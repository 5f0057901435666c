#include "ops/fma_peak.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/fma_peak.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

// 12 independent chains; `sink` [16] holds unlike starts, or equal chains would be computed once.
double FmaChains(int64_t steps, float* sink) {
  const F32Tag d;
  constexpr int kChains = 12;
  hn::Vec<F32Tag> acc[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) acc[i] = hn::Set(d, sink[4 + i]);
  const auto a = hn::Set(d, sink[0]), b = hn::Set(d, sink[1]);
  for (int64_t s = 0; s < steps; ++s)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = hn::MulAdd(acc[i], a, b);
  auto sum = acc[0];
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) sum = hn::Add(sum, acc[i]);
  sink[2] = hn::GetLane(hn::SumOfLanes(d, sum));
  return 2.0 * kChains * static_cast<double>(kF32Lanes) * static_cast<double>(steps);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(FmaChains);

double fma_chains(Context& c) {
  constexpr int64_t kSteps = 200000;
  const int threads = c.num_threads();
  ArenaScope scope(*c.workspace);
  const TensorView sink = c.workspace->tensor(DType::f32, {threads, 64}, "fma_chains");
  const TensorView done = c.workspace->tensor(DType::f64, {threads}, "fma_chains.done");
  parallel_for(c, threads, 1'000'000, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      float* s = sink.row<float>(i);
      for (int k = 0; k < 16; ++k) s[k] = 0.5f + static_cast<float>(k) * 0x1p-8f;
      done.ptr<double>()[i] = HWY_DYNAMIC_DISPATCH(FmaChains)(kSteps, s);
    }
  });
  double total = 0;
  for (int i = 0; i < threads; ++i) total += done.ptr<double>()[i];
  return total;
}

}  // namespace lockstep
#endif  // HWY_ONCE
