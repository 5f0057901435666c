#include "ops/hyperconn/hyperconn.h"

#include "ops/hyperconn/hyperconn_cpu.h"

namespace lockstep {

namespace {

bool is_float(DType t) { return t == DType::f32 || t == DType::bf16; }

void check_shape(const char* op, const char* name, ConstTensorView v, DType dtype, Shape shape) {
  CHECK(v.dtype == dtype && v.shape == shape && (shape.rank > 1 || v.contiguous()), "{}: {} is {} {}, wanted {} {}", op, name,
        dtype_name(v.dtype), v.shape.str(), dtype_name(dtype), shape.str());
}

void check_streams(const char* op, ConstTensorView x) {
  CHECK(x.shape.rank == 3 && x.dim(1) >= 1 && x.dim(1) <= kHyperMaxStreams && x.dim(2) >= 1 && is_float(x.dtype),
        "{}: x is {} {}", op, dtype_name(x.dtype), x.shape.str());
}

// Rows of fn: the head has pre alone.
int64_t logit_count(const HyperShape& shape, bool head) { return head ? shape.streams : (2 + shape.streams) * shape.streams; }

void check_mix(const char* op, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w,
               const HyperShape& shape, bool head) {
  check_streams(op, x);
  const int64_t n = shape.streams, logits = logit_count(shape, head);
  CHECK(x.dim(1) == n && shape.sinkhorn_iters >= 1, "{}: {} streams and {} iterations for x {}", op, n, shape.sinkhorn_iters,
        x.shape.str());
  check_shape(op, "raw", raw, DType::f32, {x.dim(0), logits});
  check_shape(op, "inv_rms", inv_rms, DType::f32, {x.dim(0)});
  check_shape(op, "base", w.base, DType::f32, {logits});
  check_shape(op, "scale", w.scale, DType::f32, {head ? 1 : 3});
  CHECK((w.fn.rows.shape == Shape{logits, n * x.dim(2)}), "{}: fn is {} for x {}", op, w.fn.rows.shape.str(), x.shape.str());
}

// [T, n, D] as [T, n * D].
template <typename View>
View flat(View x) {
  return View(x.data, x.dtype, {x.dim(0), x.dim(1) * x.dim(2)}, x.row_stride);
}

void mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre, ConstTensorView dpost,
                  ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w,
                  const HyperShape& shape) {
  if (c.on_gpu()) return device::hyper_mix_backward(c, dx_accum, dw, dpre, dpost, dcomb, raw, inv_rms, x, w, shape);
  const ArenaScope scope(*c.workspace);
  const TensorView dlogits = c.workspace->tensor(DType::f32, raw.shape, "hyperconn logit gradients");
  simd::hyper_coefficients_backward(c, dx_accum, dlogits, dpre, dpost, dcomb, raw, inv_rms, x, w, shape);
  reference::hyper_raw_gradient(dlogits, dw, raw, inv_rms, w, shape.streams);
  if (!dw.fn.empty()) matmul_backward_weight(c, dw.fn, dlogits, flat(x));
  matmul_backward_input(c, flat(dx_accum), dlogits, w.fn, true);
}

void check_gradients(const char* op, TensorView dx_accum, const HyperGradients& dw, ConstTensorView x, const HyperWeights& w) {
  check_shape(op, "dx", dx_accum, DType::f32, x.shape);
  if (dw.fn.data == nullptr && dw.base.data == nullptr && dw.scale.data == nullptr) return;
  check_shape(op, "dw.fn", dw.fn, DType::f32, w.fn.rows.shape);
  check_shape(op, "dw.base", dw.base, DType::f32, w.base.shape);
  check_shape(op, "dw.scale", dw.scale, DType::f32, w.scale.shape);
}

}  // namespace

void hyper_mix(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView raw, TensorView inv_rms,
               ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  check_mix("hyper_mix", raw, inv_rms, x, w, shape, false);
  const int64_t rows = x.rows(), n = shape.streams;
  check_shape("hyper_mix", "pre", pre, DType::f32, {rows, n});
  check_shape("hyper_mix", "post", post, DType::f32, {rows, n});
  check_shape("hyper_mix", "comb", comb, DType::f32, {rows, n * n});
  if (x.empty()) return;
  matmul(c, raw, flat(x), w.fn);
  c.on_gpu() ? device::hyper_coefficients(c, pre, post, comb, inv_rms, raw, x, w, shape)
             : simd::hyper_coefficients(c, pre, post, comb, inv_rms, raw, x, w, shape);
}

void hyper_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre, ConstTensorView dpost,
                        ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                        const HyperWeights& w, const HyperShape& shape) {
  check_mix("hyper_mix_backward", raw, inv_rms, x, w, shape, false);
  const int64_t rows = x.rows(), n = shape.streams;
  check_gradients("hyper_mix_backward", dx_accum, dw, x, w);
  check_shape("hyper_mix_backward", "dpre", dpre, DType::f32, {rows, n});
  check_shape("hyper_mix_backward", "dpost", dpost, DType::f32, {rows, n});
  check_shape("hyper_mix_backward", "dcomb", dcomb, DType::f32, {rows, n * n});
  if (x.empty()) return;
  mix_backward(c, dx_accum, dw, dpre, dpost, dcomb, raw, inv_rms, x, w, shape);
}

void hyper_head_mix(Context& c, TensorView pre, TensorView raw, TensorView inv_rms, ConstTensorView x, const HyperWeights& w,
                    const HyperShape& shape) {
  check_mix("hyper_head_mix", raw, inv_rms, x, w, shape, true);
  check_shape("hyper_head_mix", "pre", pre, DType::f32, {x.rows(), shape.streams});
  if (x.empty()) return;
  matmul(c, raw, flat(x), w.fn);
  c.on_gpu() ? device::hyper_coefficients(c, pre, {}, {}, inv_rms, raw, x, w, shape) : simd::hyper_coefficients(c, pre, {}, {}, inv_rms, raw, x, w, shape);
}

void hyper_head_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre,
                             ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w,
                             const HyperShape& shape) {
  check_mix("hyper_head_mix_backward", raw, inv_rms, x, w, shape, true);
  check_gradients("hyper_head_mix_backward", dx_accum, dw, x, w);
  check_shape("hyper_head_mix_backward", "dpre", dpre, DType::f32, {x.rows(), shape.streams});
  if (x.empty()) return;
  mix_backward(c, dx_accum, dw, dpre, {}, {}, raw, inv_rms, x, w, shape);
}

void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre) {
  check_streams("hyper_pre", x);
  check_shape("hyper_pre", "h", h, x.dtype, {x.dim(0), x.dim(2)});
  check_shape("hyper_pre", "pre", pre, DType::f32, {x.dim(0), x.dim(1)});
  if (x.empty()) return;
  c.on_gpu() ? device::hyper_pre(c, h, x, pre) : simd::hyper_pre(c, h, x, pre);
}

void hyper_pre_backward(Context& c, TensorView dx_accum, TensorView dpre, ConstTensorView dh, ConstTensorView x,
                        ConstTensorView pre) {
  check_streams("hyper_pre_backward", x);
  check_shape("hyper_pre_backward", "dx", dx_accum, DType::f32, x.shape);
  check_shape("hyper_pre_backward", "dh", dh, DType::f32, {x.dim(0), x.dim(2)});
  check_shape("hyper_pre_backward", "dpre", dpre, DType::f32, {x.dim(0), x.dim(1)});
  check_shape("hyper_pre_backward", "pre", pre, DType::f32, {x.dim(0), x.dim(1)});
  if (x.empty()) return;
  c.on_gpu() ? device::hyper_pre_backward(c, dx_accum, dpre, dh, x, pre) : simd::hyper_pre_backward(c, dx_accum, dpre, dh, x, pre);
}

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  check_streams("hyper_post", x);
  check_shape("hyper_post", "xout", xout, x.dtype, x.shape);
  check_shape("hyper_post", "y", y, x.dtype, {x.dim(0), x.dim(2)});
  check_shape("hyper_post", "post", post, DType::f32, {x.dim(0), x.dim(1)});
  check_shape("hyper_post", "comb", comb, DType::f32, {x.dim(0), x.dim(1) * x.dim(1)});
  if (x.empty()) return;
  c.on_gpu() ? device::hyper_post(c, xout, x, y, post, comb) : simd::hyper_post(c, xout, x, y, post, comb);
}

void hyper_post_backward(Context& c, TensorView dx, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout,
                         ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  check_streams("hyper_post_backward", x);
  const int64_t rows = x.dim(0), n = x.dim(1), width = x.dim(2);
  check_shape("hyper_post_backward", "dx", dx, DType::f32, x.shape);
  check_shape("hyper_post_backward", "dy", dy, DType::f32, {rows, width});
  check_shape("hyper_post_backward", "dpost", dpost, DType::f32, {rows, n});
  check_shape("hyper_post_backward", "dcomb", dcomb, DType::f32, {rows, n * n});
  check_shape("hyper_post_backward", "dxout", dxout, DType::f32, x.shape);
  check_shape("hyper_post_backward", "y", y, x.dtype, {rows, width});
  check_shape("hyper_post_backward", "post", post, DType::f32, {rows, n});
  check_shape("hyper_post_backward", "comb", comb, DType::f32, {rows, n * n});
  if (x.empty()) return;
  CHECK(dx.data != dxout.data, "hyper_post_backward: dx is dxout");
  c.on_gpu() ? device::hyper_post_backward(c, dx, dy, dpost, dcomb, dxout, x, y, post, comb)
             : simd::hyper_post_backward(c, dx, dy, dpost, dcomb, dxout, x, y, post, comb);
}

}  // namespace lockstep
