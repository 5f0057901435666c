// Elementwise, except drho, for which 16 threads take a row (ops/row_gpu.h) and fold its tree while they write the gradients. Bound by memory: forward 3
// elements of g's dtype, backward 2 of them and 3 f32. Floor: bytes / 4 TB/s.

#include "ops/elements_gpu.h"
#include "ops/row_gpu.h"
#include "ops/swiglu/swiglu_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

GPU_INLINE float clamp_gate(float g, float limit) { return limit > 0 && g > limit ? limit : g; }
GPU_INLINE float clamp_up(float u, float limit) {
  if (!(limit > 0)) return u;
  return u > limit ? limit : u < -limit ? -limit : u;
}

template <typename T>
GPU_KERNEL swiglu_kernel(T* a, int64_t a_stride, const T* g, int64_t g_stride, const T* u, int64_t u_stride, const float* rho, float limit, bool aligned,
                         int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  const Elements<T> gates = load(g + p.row * g_stride + p.at, p.count, aligned), ups = load(u + p.row * u_stride + p.at, p.count, aligned);
  const float weight = rho == nullptr ? 1.0f : rho[p.row];  // a product with 1 changes no bit
  Elements<T> out;
  for (int i = 0; i < kPiece; ++i) {
    const float gate = clamp_gate(to_f32(gates.v[i]), limit), up = clamp_up(to_f32(ups.v[i]), limit);
    out.v[i] = from_f32<T>(gate * sigmoid_f32(gate) * up * weight);
  }
  store(a + p.row * a_stride + p.at, out, p.count, aligned);
}

struct Gradient {
  float dg, du, drho;  // drho: what da multiplies
};
GPU_INLINE Gradient gradient(float da, float g, float u, float rho, float limit) {
  const float gate = clamp_gate(g, limit), up = clamp_up(u, limit);
  const float s = sigmoid_f32(gate), silu = gate * s, scaled = da * rho;
  const float slope = s * fma(gate, 1.0f - s, 1.0f);  // silu'
  return {limit > 0 && g > limit ? 0.0f : scaled * up * slope, limit > 0 && (u > limit || u < -limit) ? 0.0f : scaled * silu, silu * up};
}

template <typename T>
GPU_KERNEL swiglu_backward_kernel(float* dg, int64_t dg_stride, float* du, int64_t du_stride, const float* da, int64_t da_stride, const T* g, int64_t g_stride,
                                  const T* u, int64_t u_stride, float limit, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  const Elements<T> gates = load(g + p.row * g_stride + p.at, p.count, aligned), ups = load(u + p.row * u_stride + p.at, p.count, aligned);
  Elements<float> to_gate = load(da + p.row * da_stride + p.at, p.count, aligned), to_up;
  for (int i = 0; i < kPiece; ++i) {
    const Gradient d = gradient(to_gate.v[i], to_f32(gates.v[i]), to_f32(ups.v[i]), 1.0f, limit);
    to_gate.v[i] = d.dg;
    to_up.v[i] = d.du;
  }
  store(dg + p.row * dg_stride + p.at, to_gate, p.count, aligned);
  store(du + p.row * du_stride + p.at, to_up, p.count, aligned);
}

template <typename T>
GPU_KERNEL swiglu_backward_weighted_kernel(float* dg, int64_t dg_stride, float* du, int64_t du_stride, float* drho, const float* da, int64_t da_stride,
                                           const T* g, int64_t g_stride, const T* u, int64_t u_stride, const float* rho, float limit, int64_t rows, int64_t n) {
  const int64_t r = row_of_thread();
  const bool mine = r < rows;
  const float weight = mine ? rho[r] : 0.0f;
  float sum = 0;
#pragma unroll 4
  for (int64_t i = row_lane(); i < (mine ? n : 0); i += kTreeLanes) {
    const float grad = da[r * da_stride + i];
    const Gradient d = gradient(grad, to_f32(g[r * g_stride + i]), to_f32(u[r * u_stride + i]), weight, limit);
    sum = fma(grad, d.drho, sum);
    dg[r * dg_stride + i] = d.dg;
    du[r * du_stride + i] = d.du;
  }
  sum = fold_row(sum);
  if (mine && row_lane() == 0) drho[r] = sum;
}

template <typename T>
void forward(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  launch(c, "swiglu", grid_of_pieces(g.rows(), g.dim(1)), swiglu_kernel<T>, a.ptr<T>(), a.row_stride, g.ptr<T>(), g.row_stride, u.ptr<T>(), u.row_stride,
         rho.empty() ? nullptr : rho.ptr<float>(), limit, all_aligned(a, g, u), g.rows(), g.dim(1));
}

template <typename T>
void backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u, ConstTensorView rho,
              float limit) {
  const int64_t rows = g.rows(), n = g.dim(1);
  if (rho.empty())
    launch(c, "swiglu_backward", grid_of_pieces(rows, n), swiglu_backward_kernel<T>, dg.ptr<float>(), dg.row_stride, du.ptr<float>(), du.row_stride,
           da.ptr<float>(), da.row_stride, g.ptr<T>(), g.row_stride, u.ptr<T>(), u.row_stride, limit, all_aligned(dg, du, da, g, u), rows, n);
  else
    launch(c, "swiglu_backward_weighted", {.blocks = blocks_for(rows, kRowsABlock), .threads = kRowThreads}, swiglu_backward_weighted_kernel<T>,
           dg.ptr<float>(), dg.row_stride, du.ptr<float>(), du.row_stride, drho.ptr<float>(), da.ptr<float>(), da.row_stride, g.ptr<T>(), g.row_stride,
           u.ptr<T>(), u.row_stride, rho.ptr<float>(), limit, rows, n);
}

}  // namespace

void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? forward<float>(c, a, g, u, rho, limit) : forward<bf16>(c, a, g, u, rho, limit);
}
void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u, ConstTensorView rho,
                     float limit) {
  g.dtype == DType::f32 ? backward<float>(c, dg, du, drho, da, g, u, rho, limit) : backward<bf16>(c, dg, du, drho, da, g, u, rho, limit);
}

}  // namespace lockstep::device
