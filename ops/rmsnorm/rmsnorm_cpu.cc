#include "ops/rmsnorm/rmsnorm_cpu.h"

#include <cmath>

#include "ops/fixed_math.h"

namespace lockstep::reference {

namespace {

template <typename T>
void forward(TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  const int64_t n = x.dim(1);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* from = x.row<T>(t);
    T* to = y.row<T>(t);
    const auto element = [&](int64_t i) { return to_f32(from[i]); };
    const float scale = 1.0f / std::sqrt(tree_dot(n, element, element) / static_cast<float>(n) + eps);
    if (!inv.empty()) inv.ptr<float>()[t] = scale;
    for (int64_t i = 0; i < n; ++i) {
      const float v = element(i) * scale;
      to[i] = from_f32<T>(w.empty() ? v : v * w.ptr<float>()[i]);
    }
  }
}

template <typename T>
void backward(TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView w,
              ConstTensorView inv, bool accumulate) {
  const int64_t n = x.dim(1);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* from = x.row<T>(t);
    const float* g = dy.row<float>(t);
    float* to = dx.row<float>(t);
    const float scale = inv.ptr<float>()[t];
    const auto normed = [&](int64_t i) { return to_f32(from[i]) * scale; };
    const auto gained = [&](int64_t i) { return w.empty() ? g[i] : w.ptr<float>()[i] * g[i]; };
    const float mean = tree_dot(n, normed, gained) / static_cast<float>(n);
    for (int64_t i = 0; i < n; ++i) {
      if (!dw_accum.empty()) dw_accum.ptr<float>()[i] = std::fmaf(g[i], normed(i), dw_accum.ptr<float>()[i]);
      const float v = scale * std::fmaf(-normed(i), mean, gained(i));
      to[i] = accumulate ? to[i] + v : v;
    }
  }
}

}  // namespace

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  x.dtype == DType::f32 ? forward<float>(y, inv, x, w, eps) : forward<bf16>(y, inv, x, w, eps);
}

void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                      ConstTensorView w, ConstTensorView inv, bool accumulate) {
  x.dtype == DType::f32 ? backward<float>(dx, dw_accum, dy, x, w, inv, accumulate)
                        : backward<bf16>(dx, dw_accum, dy, x, w, inv, accumulate);
}

}  // namespace lockstep::reference
