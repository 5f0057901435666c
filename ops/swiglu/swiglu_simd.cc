#include <limits>

#include "ops/swiglu/swiglu_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/swiglu/swiglu_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

// Comparisons and selections rather than Min and Max: those treat NaN as each instruction set likes.
struct Clamp {
  F32Vec limit;  // infinity: no clamp

  explicit Clamp(float l) : limit(hn::Set(F32Tag(), l > 0 ? l : std::numeric_limits<float>::infinity())) {}
  HWY_INLINE auto GateOver(F32Vec g) const { return hn::Gt(g, limit); }
  HWY_INLINE auto UpOver(F32Vec u) const { return hn::Gt(hn::Abs(u), limit); }
  HWY_INLINE F32Vec Gate(F32Vec g) const { return hn::IfThenElse(GateOver(g), limit, g); }
  HWY_INLINE F32Vec Up(F32Vec u) const { return hn::IfThenElse(UpOver(u), hn::CopySign(limit, u), u); }
};

template <typename T>
void Forward(TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  const F32Tag d;
  const Clamp clamp(limit);
  for (int64_t r = 0; r < g.rows(); ++r) {
    const T* gate_in = g.ptr<T>() + r * g.row_stride;
    const T* up_in = u.ptr<T>() + r * u.row_stride;
    T* out = a.ptr<T>() + r * a.row_stride;
    const F32Vec weight = hn::Set(d, rho.empty() ? 1.0f : rho.ptr<float>()[r]);  // a product with 1 changes no bit
    ForRow(g.dim(1), [&](auto io, int64_t i) HWY_ATTR {
      const F32Vec gate = clamp.Gate(io.Load(gate_in + i)), up = clamp.Up(io.Load(up_in + i));
      io.Store(hn::Mul(hn::Mul(hn::Mul(gate, SigmoidF32(d, gate)), up), weight), out + i);
    });
  }
}

template <typename T>
void Backward(TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u,
              ConstTensorView rho, float limit) {
  const F32Tag d;
  const Clamp clamp(limit);
  const F32Vec one = hn::Set(d, 1.0f);
  for (int64_t r = 0; r < g.rows(); ++r) {
    const T* gate_in = g.ptr<T>() + r * g.row_stride;
    const T* up_in = u.ptr<T>() + r * u.row_stride;
    const float* grad_in = da.ptr<float>() + r * da.row_stride;
    float* dg_out = dg.ptr<float>() + r * dg.row_stride;
    float* du_out = du.ptr<float>() + r * du.row_stride;
    const F32Vec weight = hn::Set(d, rho.empty() ? 1.0f : rho.ptr<float>()[r]);
    F32Vec acc[kLaneVectors];
    for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = hn::Zero(d);
    ForRowLanes(g.dim(1), [&](auto io, int64_t i, size_t v) HWY_ATTR {
      const F32Vec g_raw = io.Load(gate_in + i), u_raw = io.Load(up_in + i), grad = io.Load(grad_in + i);
      const F32Vec gate = clamp.Gate(g_raw), up = clamp.Up(u_raw);
      const F32Vec s = SigmoidF32(d, gate);
      const F32Vec silu = hn::Mul(gate, s);
      const F32Vec slope = hn::Mul(s, hn::MulAdd(gate, hn::Sub(one, s), one));
      const F32Vec scaled = hn::Mul(grad, weight);
      acc[v] = io.MulAdd(grad, hn::Mul(silu, up), acc[v]);
      io.Store(hn::IfThenZeroElse(clamp.GateOver(g_raw), hn::Mul(hn::Mul(scaled, up), slope)), dg_out + i);
      io.Store(hn::IfThenZeroElse(clamp.UpOver(u_raw), hn::Mul(scaled, silu)), du_out + i);
    });
    if (!drho.empty()) drho.ptr<float>()[r] = FoldLanes(d, acc);
  }
}

void ForwardAny(TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? Forward<float>(a, g, u, rho, limit) : Forward<bf16>(a, g, u, rho, limit);
}
void BackwardAny(TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u,
                 ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? Backward<float>(dg, du, drho, da, g, u, rho, limit)
                        : Backward<bf16>(dg, du, drho, da, g, u, rho, limit);
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(ForwardAny);
HWY_EXPORT(BackwardAny);

namespace simd {

void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  parallel_for(c, g.rows(), 10 + g.dim(1) * 2, [&](int64_t begin, int64_t end, int) {
    const int64_t count = end - begin;
    HWY_DYNAMIC_DISPATCH(ForwardAny)(a.slice(begin, count), g.slice(begin, count), u.slice(begin, count),
                                     rho.empty() ? rho : rho.slice(begin, count), limit);
  });
}

void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit) {
  parallel_for(c, g.rows(), 10 + g.dim(1) * 3, [&](int64_t begin, int64_t end, int) {
    const int64_t count = end - begin;
    HWY_DYNAMIC_DISPATCH(BackwardAny)(dg.slice(begin, count), du.slice(begin, count),
                                      drho.empty() ? drho : drho.slice(begin, count), da.slice(begin, count),
                                      g.slice(begin, count), u.slice(begin, count), rho.empty() ? rho : rho.slice(begin, count),
                                      limit);
  });
}

}  // namespace simd
}  // namespace lockstep
#endif  // HWY_ONCE
