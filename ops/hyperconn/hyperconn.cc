#include "ops/hyperconn/hyperconn.h"

#include "ops/hyperconn/hyperconn_cpu.h"
#include "ops/rmsnorm/rmsnorm.h"

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

void check_feed(const char* op, const HyperFeed& f, ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  check_streams(op, x);
  const bool head = f.comb.shape.rank == 0;
  const int64_t rows = x.dim(0), n = shape.streams, logits = logit_count(shape, head);
  CHECK(x.dim(1) == n && shape.sinkhorn_iters >= 1, "{}: {} streams and {} iterations for x {}", op, n, shape.sinkhorn_iters,
        x.shape.str());
  check_shape(op, "pre", f.pre, DType::f32, {rows, n});
  if (!head) {
    check_shape(op, "post", f.post, DType::f32, {rows, n});
    check_shape(op, "comb", f.comb, DType::f32, {rows, n * n});
  }
  check_shape(op, "raw", f.raw, DType::f32, {rows, logits});
  check_shape(op, "inv_rms", f.inv_rms, DType::f32, {rows});
  check_shape(op, "base", w.base, DType::f32, {logits});
  check_shape(op, "scale", w.scale, DType::f32, {head ? 1 : 3});
  CHECK((w.fn.rows.shape == Shape{logits, n * x.dim(2)}) && w.fn.rows.dtype == DType::f32, "{}: fn is {} {} for x {}", op, dtype_name(w.fn.rows.dtype),
        w.fn.rows.shape.str(), x.shape.str());
}

// [T, n, D] as [T, n * D].
template <typename View>
View flat(View x) {
  return View(x.data, x.dtype, {x.dim(0), x.dim(1) * x.dim(2)}, x.row_stride);
}

void check_gradients(const char* op, TensorView dx_accum, const HyperGradients& dw, ConstTensorView x, const HyperWeights& w) {
  check_shape(op, "dx", dx_accum, DType::f32, x.shape);
  if (dw.fn.data == nullptr && dw.base.data == nullptr && dw.scale.data == nullptr) return;
  check_shape(op, "dw.fn", dw.fn, DType::f32, w.fn.rows.shape);
  check_shape(op, "dw.base", dw.base, DType::f32, w.base.shape);
  check_shape(op, "dw.scale", dw.scale, DType::f32, w.scale.shape);
}

}  // namespace

void simd::hyper_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre, ConstTensorView dpost,
                              ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w,
                              const HyperShape& shape) {
  const ArenaScope scope(*c.workspace);
  const TensorView dlogits = c.workspace->tensor(DType::f32, raw.shape, "hyperconn logit gradients");
  simd::hyper_coefficients_backward(c, dx_accum, dlogits, dpre, dpost, dcomb, raw, inv_rms, x, w, shape);
  reference::hyper_raw_gradient(dlogits, dw, raw, inv_rms, w, shape.streams);
  if (!dw.fn.empty()) matmul_backward_weight(c, dw.fn, dlogits, flat(x));
  matmul_backward_input(c, flat(dx_accum), dlogits, w.fn, true);
}

void hyper_feed(Context& c, const HyperFeed& f, ConstTensorView x, const HyperWeights& w, const HyperShape& shape, ConstTensorView norm) {
  check_feed("hyper_feed", f, x, w, shape);
  check_shape("hyper_feed", "h", f.h, x.dtype, {x.dim(0), x.dim(2)});
  check_shape("hyper_feed", "u", f.u, x.dtype, {x.dim(0), x.dim(2)});
  check_shape("hyper_feed", "norm_inv", f.norm_inv, DType::f32, {x.dim(0)});
  check_shape("hyper_feed", "norm", norm, DType::f32, {x.dim(2)});
  if (x.empty()) return;
  if (c.on_gpu()) return device::hyper_feed(c, f, x, w, shape, norm);
  matmul(c, f.raw, flat(x), w.fn, kHyperSegment);
  simd::hyper_coefficients(c, f.pre, f.post, f.comb, f.inv_rms, f.raw, x, w, shape);
  simd::hyper_pre(c, f.h, x, f.pre);
  rmsnorm(c, f.u, f.norm_inv, f.h, norm, shape.norm_eps);
}

void hyper_feed_backward(Context& c, TensorView dx, const HyperGradients& dw, ConstTensorView dh, ConstTensorView dpost, ConstTensorView dcomb,
                         ConstTensorView dxout, ConstTensorView x, const HyperFeed& f, const HyperWeights& w, const HyperShape& shape) {
  check_feed("hyper_feed_backward", f, x, w, shape);
  check_gradients("hyper_feed_backward", dx, dw, x, w);
  const int64_t rows = x.dim(0), n = shape.streams;
  check_shape("hyper_feed_backward", "dh", dh, DType::f32, {rows, x.dim(2)});
  if (f.comb.shape.rank > 0) {
    check_shape("hyper_feed_backward", "dpost", dpost, DType::f32, {rows, n});
    check_shape("hyper_feed_backward", "dcomb", dcomb, DType::f32, {rows, n * n});
    check_shape("hyper_feed_backward", "dxout", dxout, DType::f32, x.shape);
  }
  if (x.empty()) return;
  CHECK(dx.data != dxout.data, "hyper_feed_backward: dx is dxout");
  if (c.on_gpu()) return device::hyper_feed_backward(c, dx, dw, dh, dpost, dcomb, dxout, x, f, w, shape);
  const ArenaScope scope(*c.workspace);
  const TensorView dpre = c.workspace->tensor(DType::f32, {rows, n}, "hyperconn dpre");
  simd::hyper_pre_backward(c, dx, dpre, dh, dxout, f.comb, x, f.pre);
  simd::hyper_mix_backward(c, dx, dw, dpre, dpost, dcomb, f.raw, f.inv_rms, x, w, shape);
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

void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post) {
  check_streams("hyper_post_backward", x);
  const int64_t rows = x.dim(0), n = x.dim(1), width = x.dim(2);
  check_shape("hyper_post_backward", "dy", dy, DType::f32, {rows, width});
  check_shape("hyper_post_backward", "dpost", dpost, DType::f32, {rows, n});
  check_shape("hyper_post_backward", "dcomb", dcomb, DType::f32, {rows, n * n});
  check_shape("hyper_post_backward", "dxout", dxout, DType::f32, x.shape);
  check_shape("hyper_post_backward", "y", y, x.dtype, {rows, width});
  check_shape("hyper_post_backward", "post", post, DType::f32, {rows, n});
  if (x.empty()) return;
  c.on_gpu() ? device::hyper_post_backward(c, dy, dpost, dcomb, dxout, x, y, post) : simd::hyper_post_backward(c, dy, dpost, dcomb, dxout, x, y, post);
}

}  // namespace lockstep
