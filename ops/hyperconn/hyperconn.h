#pragma once
// Manifold-constrained hyper-connections: how n residual streams feed one sublayer and take its result back.
//
// hyper_feed: what a sublayer reads. Per token, x = flatten(X) (stream-major), rho = rsqrt(mean(x^2) + norm_eps), mu = rho * (fn x):
//   pre_j  = sigmoid(mu_j * scale_0 + base_j) + hc_eps                                     j < n
//   post_j = 2 sigmoid(mu_{n+j} * scale_1 + base_{n+j})
//   comb   = sinkhorn(mu_{2n+jn+k} * scale_2 + base_{2n+jn+k}): row softmax + hc_eps, column division, then (iters - 1) times
//            row and column divisions, each by (sum + hc_eps)
//   h[t, :] = sum_j pre[t, j] * X[t, j, :],  u = rmsnorm(h) with the gain `norm` [D] f32
//   The head's form, with post and comb empty: n rows in fn, one scale, only pre.
// hyper_post: Xout[t, k, :] = post[t, k] * y[t, :] + sum_j comb[t, j, k] * X[t, j, :]     (first index of comb is summed)
//   X, Xout [T, n, D], h, u, y [T, D]    f32 | bf16 (one dtype)
//   raw [T, (2+n)n] f32 = fn x, inv_rms [T] f32 = rho, norm_inv [T] f32: read by the backward (head: raw [T, n])
//   pre, post [T, n], comb [T, n*n] f32;  fn [(2+n)n, nD] f32, base [(2+n)n], scale [3] f32 (head: [n, nD], [n], [1])
// Numerics: all f32. fn x by matmul's chains with k_segment = kHyperSegment; the mean's squares by the 16-lane tree in each of those
//   segments, whose sums are added in order from zero; logits by fma(mu, scale, base); Sinkhorn sums left to right, per token, and divides a line by one reciprocal of its sum; h and hyper_post: acc = pre_0 *
//   X_0 (resp. post_k * y), then fma over j ascending; one rounding; u from h as rounded. Row contract holds for every output, and
//   for dX, dy, dpost and dcomb.
// Backward, in this order around the branch's and rmsnorm's own:
//   hyper_post_backward: dy, dpost, dcomb from dXout.
//   hyper_feed_backward: dX [T, n, D] f32, written: sum_k comb[j, k] dXout[k] (head: 0), then by fma pre_j * dh, the mean's share and
//     the chain over fn's rows; dX may not be dXout. d(post), d(comb) are f32 of the shapes above, dh, dy [T, D] f32. Parameter
//     gradients are summed over tokens in ascending order. Formulas: V4 spec 6.4. The Sinkhorn iterates are recomputed, not
//     stored; dots over D by the 16-lane tree.
// Scratch: hyper_feed on a GPU takes the segments' sums, T * ((2+n)n + 1) * ceil(nD / kHyperSegment) f32; hyper_feed_backward takes
//   T*((2+n)n + n) f32 and, a thread, the iterates of 16 tokens (50 KiB at n = 4, 20 iterations; on a GPU those of all tokens).
// Source: V4 spec 2.2, 2.9; arXiv 2512.24880 (mHC).

#include "core/context.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

inline constexpr int64_t kHyperMaxStreams = 8;
// Columns of fn that are one chain of fn x, and one tree of squares. On a GPU all segments run side by side, each at the latency of its chain, 0.6 us.
inline constexpr int64_t kHyperSegment = 256;

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

// What hyper_feed makes of a site's streams. In the head's form post and comb are empty.
struct HyperFeed {
  TensorView pre, post, comb, raw, inv_rms;
  TensorView h, norm_inv, u;
};

void hyper_feed(Context& c, const HyperFeed& feed, ConstTensorView x, const HyperWeights& w, const HyperShape& shape, ConstTensorView norm);
void hyper_feed_backward(Context& c, TensorView dx, const HyperGradients& dw, ConstTensorView dh, ConstTensorView dpost, ConstTensorView dcomb,
                         ConstTensorView dxout, ConstTensorView x, const HyperFeed& feed, const HyperWeights& w, const HyperShape& shape);

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post,
                ConstTensorView comb);
void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post);

}  // namespace lockstep
