#include "ops/swiglu/swiglu_cpu.h"

#include <cmath>

#include "ops/fixed_math.h"

namespace lockstep::reference {

namespace {

float clamp_gate(float g, float limit) { return limit > 0 && g > limit ? limit : g; }
float clamp_up(float u, float limit) {
  if (!(limit > 0)) return u;
  return u > limit ? limit : u < -limit ? -limit : u;
}

template <typename T>
void forward(TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  for (int64_t r = 0; r < g.rows(); ++r)
    for (int64_t i = 0; i < g.dim(1); ++i) {
      const float gate = clamp_gate(to_f32(g.row<T>(r)[i]), limit), up = clamp_up(to_f32(u.row<T>(r)[i]), limit);
      const float product = gate * sigmoid_f32(gate) * up;
      a.row<T>(r)[i] = from_f32<T>(rho.empty() ? product : product * rho.ptr<float>()[r]);
    }
}

template <typename T>
void backward(TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u,
              ConstTensorView rho, float limit) {
  for (int64_t r = 0; r < g.rows(); ++r) {
    const T* gate_in = g.row<T>(r);
    const T* up_in = u.row<T>(r);
    const float* grad = da.row<float>(r);
    if (!drho.empty())
      drho.ptr<float>()[r] = tree_dot(
          g.dim(1), [&](int64_t i) { return grad[i]; },
          [&](int64_t i) {
            const float gate = clamp_gate(to_f32(gate_in[i]), limit);
            return gate * sigmoid_f32(gate) * clamp_up(to_f32(up_in[i]), limit);
          });
    for (int64_t i = 0; i < g.dim(1); ++i) {
      const float g_raw = to_f32(gate_in[i]), u_raw = to_f32(up_in[i]);
      const float gate = clamp_gate(g_raw, limit), up = clamp_up(u_raw, limit);
      const float s = sigmoid_f32(gate);
      const float scaled = rho.empty() ? grad[i] : grad[i] * rho.ptr<float>()[r];
      const float slope = s * std::fmaf(gate, 1.0f - s, 1.0f);  // silu'
      dg.row<float>(r)[i] = limit > 0 && g_raw > limit ? 0.0f : scaled * up * slope;
      du.row<float>(r)[i] = limit > 0 && std::abs(u_raw) > limit ? 0.0f : scaled * (gate * s);
    }
  }
}

}  // namespace

void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? forward<float>(a, g, u, rho, limit) : forward<bf16>(a, g, u, rho, limit);
}

void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? backward<float>(dg, du, drho, da, g, u, rho, limit)
                        : backward<bf16>(dg, du, drho, da, g, u, rho, limit);
}

}  // namespace lockstep::reference
