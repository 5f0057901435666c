// Loops over one row of any length for the Highway target being compiled: whole vectors, then one partial vector whose missing
// lanes read as zero, are not stored and do not touch an accumulator. Nothing is read or written past the row.
// Bodies are generic lambdas, marked HWY_ATTR, that load and store through the `io` they are given.
// Include after hwy/foreach_target.h, inside no namespace.

#if defined(LOCKSTEP_OPS_ROW_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_OPS_ROW_LOOP_INL_H_
#undef LOCKSTEP_OPS_ROW_LOOP_INL_H_
#else
#define LOCKSTEP_OPS_ROW_LOOP_INL_H_
#endif

#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

using F32Vec = hn::Vec<F32Tag>;
constexpr int64_t kRowStep = static_cast<int64_t>(kF32Lanes);

struct WholeIo {
  template <typename T>
  HWY_INLINE F32Vec Load(const T* p) const {
    return LoadF32(F32Tag(), p);
  }
  template <typename T>
  HWY_INLINE void Store(F32Vec v, T* p) const {
    StoreF32(F32Tag(), v, p);
  }
  HWY_INLINE F32Vec MulAdd(F32Vec a, F32Vec b, F32Vec acc) const { return hn::MulAdd(a, b, acc); }
};

struct PartIo {
  int64_t count;  // 1..kRowStep lanes exist

  HWY_INLINE F32Vec Load(const float* p) const { return hn::MaskedLoad(Mask(), F32Tag(), p); }
  HWY_INLINE F32Vec Load(const bf16* p) const {
    bf16 whole[kF32Lanes] = {};
    for (int64_t i = 0; i < count; ++i) whole[i] = p[i];
    return LoadF32(F32Tag(), whole);
  }
  HWY_INLINE void Store(F32Vec v, float* p) const { hn::BlendedStore(v, Mask(), F32Tag(), p); }
  HWY_INLINE void Store(F32Vec v, bf16* p) const {
    bf16 whole[kF32Lanes];
    StoreF32(F32Tag(), v, whole);
    for (int64_t i = 0; i < count; ++i) p[i] = whole[i];
  }
  HWY_INLINE F32Vec MulAdd(F32Vec a, F32Vec b, F32Vec acc) const {
    return hn::IfThenElse(Mask(), hn::MulAdd(a, b, acc), acc);
  }

 private:
  HWY_INLINE hn::Mask<F32Tag> Mask() const { return hn::FirstN(F32Tag(), static_cast<size_t>(count)); }
};

// body(io, i) for every vector of a row of n elements, i being its first element.
template <class Body>
HWY_INLINE void ForRow(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kRowStep <= n; i += kRowStep) body(WholeIo(), i);
  if (i < n) body(PartIo{n - i}, i);
}

// body(io, i, v): as ForRow, for reductions by the tree of fixed_math.h. Element i is virtual lane v * kF32Lanes; v counts the
// kLaneVectors accumulators that FoldLanes folds.
template <class Body>
HWY_INLINE void ForRowLanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kTreeLanes <= n; i += kTreeLanes)
    for (size_t v = 0; v < kLaneVectors; ++v) body(WholeIo(), i + static_cast<int64_t>(v) * kRowStep, v);
  for (size_t v = 0; v < kLaneVectors; ++v) {
    const int64_t at = i + static_cast<int64_t>(v) * kRowStep;
    if (at < n) body(PartIo{n - at < kRowStep ? n - at : kRowStep}, at, v);
  }
}

// fold_lanes as far as four lanes: whole vectors and halves of vectors add, which is cheap. (V is F32Vec.)
using F32x4 = hn::CappedTag<float, 4>;
template <class V>
HWY_INLINE hn::Vec<F32x4> FoldToFour(const V* acc) {
  using D = hn::DFromV<V>;
  if constexpr (hn::MaxLanes(D()) == 16) {
    const hn::Half<D> d8;
    const auto eight = hn::Add(hn::LowerHalf(d8, acc[0]), hn::UpperHalf(d8, acc[0]));
    return hn::Add(hn::LowerHalf(F32x4(), eight), hn::UpperHalf(F32x4(), eight));
  } else if constexpr (hn::MaxLanes(D()) == 8) {
    const V eight = hn::Add(acc[0], acc[1]);
    return hn::Add(hn::LowerHalf(F32x4(), eight), hn::UpperHalf(F32x4(), eight));
  } else {
    return hn::Add(hn::Add(acc[0], acc[2]), hn::Add(acc[1], acc[3]));
  }
}

// Turns a 4 x 4 block, one row a vector.
template <class V>
HWY_INLINE void Transpose4(V& a, V& b, V& c, V& e) {
  const F32x4 d4;
  const V ac_low = hn::InterleaveLower(d4, a, c), be_low = hn::InterleaveLower(d4, b, e);
  const V ac_high = hn::InterleaveUpper(d4, a, c), be_high = hn::InterleaveUpper(d4, b, e);
  a = hn::InterleaveLower(d4, ac_low, be_low);
  b = hn::InterleaveUpper(d4, ac_low, be_low);
  c = hn::InterleaveLower(d4, ac_high, be_high);
  e = hn::InterleaveUpper(d4, ac_high, be_high);
}

// Four times FoldLanes at once: acc holds four reductions of kLaneVectors vectors each, out[i] is the i-th sum.
HWY_INLINE void FoldLanesOfFour(const F32Vec* acc, float* out) {
  auto a = FoldToFour(acc), b = FoldToFour(acc + kLaneVectors);
  auto c = FoldToFour(acc + 2 * kLaneVectors), e = FoldToFour(acc + 3 * kLaneVectors);
  Transpose4(a, b, c, e);
  hn::StoreU(hn::Add(hn::Add(a, c), hn::Add(b, e)), F32x4(), out);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
