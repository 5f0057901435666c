// The vector forms of fixed_math.h for the Highway target being compiled: same operations, same bits.
// Include after hwy/foreach_target.h, inside no namespace.

#if defined(LOCKSTEP_OPS_FIXED_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_OPS_FIXED_MATH_INL_H_
#undef LOCKSTEP_OPS_FIXED_MATH_INL_H_
#else
#define LOCKSTEP_OPS_FIXED_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include "core/dtype.h"
#include "ops/fixed_math.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that a tree of 16 virtual lanes is kLaneVectors whole vectors.
using F32Tag = hn::CappedTag<float, kTreeLanes>;
constexpr size_t kF32Lanes = hn::MaxLanes(F32Tag());
constexpr size_t kLaneVectors = kTreeLanes / kF32Lanes;

// Loads from f32 or bf16 storage as f32.
template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const bf16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}
// Stores f32 to f32 or, rounded as to_bf16 does, to bf16 storage.
template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> v, bf16* p) {
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<uint16_t, D> d16;
  const auto u = hn::BitCast(d32, v);
  const auto lsb = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(hn::Set(d32, 0x7fffu), lsb)));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(d32, 0x40u));
  const auto is_nan = hn::Gt(hn::And(u, hn::Set(d32, 0x7fffffffu)), hn::Set(d32, 0x7f800000u));
  hn::StoreU(hn::TruncateTo(d16, hn::IfThenElse(is_nan, quiet, rounded)), d16, reinterpret_cast<uint16_t*>(p));
}

template <class D, class V>
HWY_INLINE V ExpF32(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
  V r = hn::MulAdd(n, hn::Set(d, -0.693359375f), x);
  r = hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), r);
  V p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  const V y = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto k = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(k);
  const auto bias = hn::Set(di, 127);
  const V s1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V s2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(k, half), bias)));
  V out = hn::Mul(hn::Mul(y, s1), s2);
  out = hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.33654f)), hn::Zero(d), out);
  out = hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.72283f)), hn::Set(d, std::numeric_limits<float>::infinity()), out);
  return hn::IfThenElse(hn::Eq(x, x), out, x);
}

template <class D, class V>
HWY_INLINE V LogF32(D d, V x0) {
  const hn::RebindToSigned<D> di;
  const V inf = hn::Set(d, std::numeric_limits<float>::infinity());
  const V x = hn::Max(x0, hn::Set(d, 1.17549435e-38f));
  const auto u = hn::BitCast(di, x);
  auto e = hn::Sub(hn::ShiftRight<23>(u), hn::Set(di, 126));
  V m = hn::BitCast(d, hn::Or(hn::And(u, hn::Set(di, 0x007fffff)), hn::Set(di, 0x3f000000)));
  const auto low = hn::Lt(m, hn::Set(d, 0.707106781186547524f));
  e = hn::Add(e, hn::BitCast(di, hn::VecFromMask(d, low)));  // an all-ones mask is -1
  m = hn::IfThenElse(low, hn::Add(m, m), m);
  m = hn::Sub(m, hn::Set(d, 1.0f));
  const V z = hn::Mul(m, m);
  V p = hn::Set(d, 7.0376836292e-2f);
  p = hn::MulAdd(p, m, hn::Set(d, -1.1514610310e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, 1.1676998740e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, -1.2420140846e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, 1.4249322787e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, -1.6668057665e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, 2.0000714765e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, -2.4999993993e-1f));
  p = hn::MulAdd(p, m, hn::Set(d, 3.3333331174e-1f));
  const V fe = hn::ConvertTo(d, e);
  V y = hn::Mul(hn::Mul(p, m), z);
  y = hn::MulAdd(fe, hn::Set(d, -2.12194440e-4f), y);
  y = hn::MulAdd(hn::Set(d, -0.5f), z, y);
  V out = hn::MulAdd(fe, hn::Set(d, 0.693359375f), hn::Add(m, y));
  out = hn::IfThenElse(hn::Eq(x0, hn::Zero(d)), hn::Neg(inf), out);
  out = hn::IfThenElse(hn::Eq(x0, inf), inf, out);
  return hn::IfThenElse(hn::Ge(x0, hn::Zero(d)), out, hn::Set(d, std::numeric_limits<float>::quiet_NaN()));
}

template <class D, class V>
HWY_INLINE V Log1pF32(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V inf = hn::Set(d, std::numeric_limits<float>::infinity());
  const V u = hn::Add(one, x);
  const V full = hn::Mul(LogF32(d, u), hn::Div(x, hn::Sub(u, one)));
  return hn::IfThenElse(hn::Eq(u, one), x, hn::IfThenElse(hn::Eq(u, inf), u, full));
}

template <class D, class V>
HWY_INLINE V SigmoidF32(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, ExpF32(d, hn::Neg(x))));
}

template <class D, class V>
HWY_INLINE V SoftplusF32(D d, V x) {
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 20.0f)), x, Log1pF32(d, ExpF32(d, x)));
}

// Folds kLaneVectors accumulators (virtual lanes 0..15) as fold_lanes does.
template <class D, class V>
HWY_INLINE float FoldLanes(D d, const V* acc) {
  HWY_ALIGN float lane[kTreeLanes];
  for (size_t v = 0; v < kLaneVectors; ++v) hn::Store(acc[v], d, lane + v * kF32Lanes);
  return fold_lanes(lane);
}

// tree_sum of x[i]^2 over f32 or bf16 storage, with fused multiply-adds (tree_dot of x with itself).
template <typename T>
HWY_INLINE float TreeSumSquares(const T* HWY_RESTRICT x, int64_t n) {
  const F32Tag d;
  hn::Vec<F32Tag> acc[kLaneVectors];
  for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kTreeLanes <= n; i += kTreeLanes)
    for (size_t v = 0; v < kLaneVectors; ++v) {
      const auto e = LoadF32(d, x + i + v * kF32Lanes);
      acc[v] = hn::MulAdd(e, e, acc[v]);
    }
  HWY_ALIGN float lane[kTreeLanes];
  for (size_t v = 0; v < kLaneVectors; ++v) hn::Store(acc[v], d, lane + v * kF32Lanes);
  for (int k = 0; i < n; ++i, ++k) lane[k] = std::fmaf(to_f32(x[i]), to_f32(x[i]), lane[k]);
  return fold_lanes(lane);
}

// tree_dot of two rows in f32 or bf16 storage.
template <typename A, typename B>
HWY_INLINE float TreeDot(const A* HWY_RESTRICT a, const B* HWY_RESTRICT b, int64_t n) {
  const F32Tag d;
  hn::Vec<F32Tag> acc[kLaneVectors];
  for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kTreeLanes <= n; i += kTreeLanes)
    for (size_t v = 0; v < kLaneVectors; ++v)
      acc[v] = hn::MulAdd(LoadF32(d, a + i + v * kF32Lanes), LoadF32(d, b + i + v * kF32Lanes), acc[v]);
  HWY_ALIGN float lane[kTreeLanes];
  for (size_t v = 0; v < kLaneVectors; ++v) hn::Store(acc[v], d, lane + v * kF32Lanes);
  for (int k = 0; i < n; ++i, ++k) lane[k] = std::fmaf(to_f32(a[i]), to_f32(b[i]), lane[k]);
  return fold_lanes(lane);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
