#include <algorithm>
#include <cstring>

#include "ops/cast/cast_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cast/cast_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

void Narrow(bf16* to, const float* from, int64_t n) {
  ForRow(n, [&](auto io, int64_t i) HWY_ATTR { io.Store(io.Load(from + i), to + i); });
}
void Widen(float* to, const bf16* from, int64_t n) {
  ForRow(n, [&](auto io, int64_t i) HWY_ATTR { io.Store(io.Load(from + i), to + i); });
}
void Add(float* to, const float* from, int64_t n) {
  ForRow(n, [&](auto io, int64_t i) HWY_ATTR { io.Store(hn::Add(io.Load(to + i), io.Load(from + i)), to + i); });
}
void Scale(float* to, float factor, int64_t n) {
  ForRow(n, [&](auto io, int64_t i) HWY_ATTR { io.Store(hn::Mul(io.Load(to + i), hn::Set(F32Tag(), factor)), to + i); });
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(Narrow);
HWY_EXPORT(Widen);
HWY_EXPORT(Add);
HWY_EXPORT(Scale);

namespace simd {

namespace {

// f(dst pointer, src pointer, count) over pieces of the tensors: runs of the whole when both are contiguous, else rows.
template <typename To, typename From, typename F>
void for_each_run(Context& c, TensorView dst, ConstTensorView src, const F& f) {
  constexpr int64_t kGrain = 16, kGrainCost = 4;
  To* to = dst.ptr<To>();
  const From* from = src.ptr<From>();
  if (dst.contiguous() && src.contiguous()) {
    const int64_t n = dst.shape.elements();
    parallel_for(c, (n + kGrain - 1) / kGrain, kGrainCost, [&](int64_t begin, int64_t end, int) {
      f(to + begin * kGrain, from + begin * kGrain, std::min(end * kGrain, n) - begin * kGrain);
    });
    return;
  }
  const int64_t n = dst.shape.row_elements();
  parallel_for(c, dst.rows(), (n + kGrain - 1) / kGrain * kGrainCost, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) f(to + r * dst.row_stride, from + r * src.row_stride, n);
  });
}

// Every bit is kept, those of a signalling NaN too.
template <typename T>
void copy(Context& c, TensorView dst, ConstTensorView src) {
  for_each_run<T, T>(c, dst, src,
                     [](T* to, const T* from, int64_t n) { std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T)); });
}

}  // namespace

void cast(Context& c, TensorView dst, ConstTensorView src) {
  if (dst.dtype == src.dtype) {
    dst.dtype == DType::f32 ? copy<float>(c, dst, src) : copy<bf16>(c, dst, src);
  } else if (dst.dtype == DType::bf16) {
    for_each_run<bf16, float>(c, dst, src, HWY_DYNAMIC_DISPATCH(Narrow));
  } else {
    for_each_run<float, bf16>(c, dst, src, HWY_DYNAMIC_DISPATCH(Widen));
  }
}

void add(Context& c, TensorView dst_accum, ConstTensorView src) {
  for_each_run<float, float>(c, dst_accum, src, HWY_DYNAMIC_DISPATCH(Add));
}

void scale(Context& c, TensorView dst, float factor) {
  for_each_run<float, float>(c, dst, dst, [&](float* to, const float*, int64_t n) {
    HWY_DYNAMIC_DISPATCH(Scale)(to, factor, n);
  });
}

}  // namespace simd
}  // namespace lockstep
#endif  // HWY_ONCE
