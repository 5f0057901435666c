#pragma once
// Manifold-constrained hyper-connections: how n residual streams feed one sublayer and take its result back.
//
// hyper_mix: per token, x = flatten(X) (stream-major), rho = rsqrt(mean(x^2) + norm_eps), mu = rho * (fn x):
//   pre_j  = sigmoid(mu_j * scale_0 + base_j) + hc_eps                                     j < n
//   post_j = 2 sigmoid(mu_{n+j} * scale_1 + base_{n+j})
//   comb   = sinkhorn(mu_{2n+jn+k} * scale_2 + base_{2n+jn+k}): row softmax + hc_eps, column division, then (iters - 1) times
//            row and column divisions, each by (sum + hc_eps)
// hyper_head_mix: the head's form: n rows in fn, one scale, only pre.
// hyper_pre:  h[t, :] = sum_j pre[t, j] * X[t, j, :]
// hyper_post: Xout[t, k, :] = post[t, k] * y[t, :] + sum_j comb[t, j, k] * X[t, j, :]     (first index of comb is summed)
//   X, Xout [T, n, D], h, y [T, D]    f32 | bf16 (one dtype)
//   raw [T, (2+n)n] f32 = fn x, inv_rms [T] f32: written by hyper_mix, read by its backward (head: raw [T, n])
//   pre, post [T, n], comb [T, n*n] f32;  fn [(2+n)n, nD] f32, base [(2+n)n], scale [3] f32 (head: [n, nD], [n], [1])
// Numerics: all f32. fn x by matmul's chain; mean by the 16-lane tree; logits by fma(mu, scale, base); Sinkhorn sums left
//   to right, per token, and divides a line by one reciprocal of its sum; hyper_pre and hyper_post: acc = pre_0 * X_0 (resp.
//   post_k * y), then fma over j ascending; one rounding. Row contract holds for every output, and for dX, dy, dpre, dpost and
//   dcomb.
// Backward: dX_accum [T, n, D] f32 is added to by hyper_mix_backward and hyper_pre_backward, written by hyper_post_backward (so
//   call that one first). d(post), d(comb), d(pre) are f32 of the shapes above, dh, dy [T, D] f32. Parameter gradients are summed
//   over tokens in ascending order. Formulas: V4 spec 6.4. The Sinkhorn iterates are recomputed, not stored; dots over D by the
//   16-lane tree. dX of hyper_post_backward may not be dxout.
// Scratch: hyper_mix_backward takes T*(2+n)n f32 and, a thread, the iterates of 16 tokens (50 KiB at n = 4, 20 iterations).
// Source: V4 spec 2.2, 2.9; arXiv 2512.24880 (mHC).

#include "core/context.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

inline constexpr int64_t kHyperMaxStreams = 8;

struct HyperShape {
  int64_t streams = 4;  // n, 1..kHyperMaxStreams
  int sinkhorn_iters = 20;
  float norm_eps = 1e-6f;
  float hc_eps = 1e-6f;
};

struct HyperWeights {
  WeightView fn;
  ConstTensorView base;
  ConstTensorView scale;
};
struct HyperGradients {
  TensorView fn, base, scale;  // accumulated, f32; all empty: not wanted
};

void hyper_mix(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView raw, TensorView inv_rms,
               ConstTensorView x, const HyperWeights& w, const HyperShape& shape);
void hyper_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre,
                        ConstTensorView dpost, ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms,
                        ConstTensorView x, const HyperWeights& w, const HyperShape& shape);

void hyper_head_mix(Context& c, TensorView pre, TensorView raw, TensorView inv_rms, ConstTensorView x,
                    const HyperWeights& w, const HyperShape& shape);
void hyper_head_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre,
                             ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w,
                             const HyperShape& shape);

void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre);
void hyper_pre_backward(Context& c, TensorView dx_accum, TensorView dpre, ConstTensorView dh, ConstTensorView x,
                        ConstTensorView pre);

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post,
                ConstTensorView comb);
void hyper_post_backward(Context& c, TensorView dx, TensorView dy, TensorView dpost, TensorView dcomb,
                         ConstTensorView dxout, ConstTensorView x, ConstTensorView y, ConstTensorView post,
                         ConstTensorView comb);

}  // namespace lockstep
