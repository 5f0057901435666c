// One row a group of 16 threads (ops/row_gpu.h); the gain's gradient one column a thread, over the rows in order.

#include "ops/rmsnorm/rmsnorm_cpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

template <typename T>
GPU_KERNEL rmsnorm_kernel(T* y, int64_t y_stride, float* inv, const T* x, int64_t x_stride, const float* w, float eps, int64_t rows, int64_t n) {
  const int64_t t = row_of_thread();
  const bool mine = t < rows;
  const T* const from = x + t * x_stride;
  const auto element = [&](int64_t i) { return to_f32(from[i]); };
  const float squares = row_dot(mine ? n : 0, element, element);
  if (!mine) return;
  const float scale = 1.0f / ieee::sqrt(squares / static_cast<float>(n) + eps);
  if (inv != nullptr && row_lane() == 0) inv[t] = scale;
  T* const to = y + t * y_stride;
#pragma unroll 4
  for (int64_t i = row_lane(); i < n; i += kTreeLanes) {
    const float v = element(i) * scale;
    to[i] = from_f32<T>(w == nullptr ? v : v * w[i]);
  }
}

template <typename T>
GPU_KERNEL rmsnorm_backward_kernel(float* dx, int64_t dx_stride, const float* dy, int64_t dy_stride, const T* x, int64_t x_stride, const float* w,
                                   const float* inv, bool accumulate, int64_t rows, int64_t n) {
  const int64_t t = row_of_thread();
  const bool mine = t < rows;
  const T* const from = x + t * x_stride;
  const float* const g = dy + t * dy_stride;
  const float scale = mine ? inv[t] : 0.0f;
  const auto normed = [&](int64_t i) { return to_f32(from[i]) * scale; };
  const auto gained = [&](int64_t i) { return w == nullptr ? g[i] : w[i] * g[i]; };
  const float mean = row_dot(mine ? n : 0, normed, gained) / static_cast<float>(n);
  if (!mine) return;
  float* const to = dx + t * dx_stride;
#pragma unroll 4
  for (int64_t i = row_lane(); i < n; i += kTreeLanes) {
    const float v = scale * fma(-normed(i), mean, gained(i));
    to[i] = accumulate ? to[i] + v : v;
  }
}

template <typename T>
GPU_KERNEL rmsnorm_gain_kernel(float* dw, const float* dy, int64_t dy_stride, const T* x, int64_t x_stride, const float* inv, int64_t rows, int64_t n) {
  const int64_t i = static_cast<int64_t>(block_x()) * block_dim() + thread_x();
  if (i >= n) return;
  float sum = dw[i];
#pragma unroll 8
  for (int64_t t = 0; t < rows; ++t) sum = fma(dy[t * dy_stride + i], to_f32(x[t * x_stride + i]) * inv[t], sum);
  dw[i] = sum;
}

template <typename T>
void forward(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  launch(c, "rmsnorm", {.blocks = blocks_for(x.rows(), kRowsABlock), .threads = kRowThreads}, rmsnorm_kernel<T>, y.ptr<T>(), y.row_stride,
         inv.empty() ? nullptr : inv.ptr<float>(), x.ptr<T>(), x.row_stride, w.empty() ? nullptr : w.ptr<float>(), eps, x.rows(), x.dim(1));
}

template <typename T>
void backward(Context& c, TensorView dx, TensorView dw, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv, bool accumulate) {
  const int64_t rows = x.rows(), n = x.dim(1);
  constexpr int kThreads = 128;
  if (!dw.empty())
    launch(c, "rmsnorm_gain", {.blocks = blocks_for(n, kThreads), .threads = kThreads}, rmsnorm_gain_kernel<T>, dw.ptr<float>(), dy.ptr<float>(), dy.row_stride,
           x.ptr<T>(), x.row_stride, inv.ptr<float>(), rows, n);
  launch(c, "rmsnorm_backward", {.blocks = blocks_for(rows, kRowsABlock), .threads = kRowThreads}, rmsnorm_backward_kernel<T>, dx.ptr<float>(), dx.row_stride,
         dy.ptr<float>(), dy.row_stride, x.ptr<T>(), x.row_stride, w.empty() ? nullptr : w.ptr<float>(), inv.ptr<float>(), accumulate, rows, n);
}

}  // namespace

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  x.dtype == DType::f32 ? forward<float>(c, y, inv, x, w, eps) : forward<bf16>(c, y, inv, x, w, eps);
}
void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv,
                      bool accumulate) {
  x.dtype == DType::f32 ? backward<float>(c, dx, dw_accum, dy, x, w, inv, accumulate) : backward<bf16>(c, dx, dw_accum, dy, x, w, inv, accumulate);
}

}  // namespace lockstep::device
