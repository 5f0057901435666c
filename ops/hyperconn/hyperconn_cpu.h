#pragma once
// Internal to ops/hyperconn: the parts that hyper_feed and its backward are made of on the CPU, but for the product with fn and the norm, without argument
// checks; and what the GPU does in few launches (device, hyperconn_gpu.cu). Same bits.
// In the head's form post and comb (and their gradients) are empty.

#include "ops/hyperconn/hyperconn.h"

namespace lockstep {

namespace reference {

// inv_rms and the coefficients from raw = fn x.
void hyper_coefficients(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView inv_rms, ConstTensorView raw,
                        ConstTensorView x, const HyperWeights& w, const HyperShape& shape);
// dlogits [T, R] f32: the gradients of mu * scale + base. Adds to dx_accum what flows through inv_rms.
void hyper_coefficients_backward(Context& c, TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost,
                                 ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                                 const HyperWeights& w, const HyperShape& shape);
// Adds to the gradients of base and scale when wanted, and turns dlogits into the gradient of raw in place.
void hyper_raw_gradient(TensorView dlogits, const HyperGradients& dw, ConstTensorView raw, ConstTensorView inv_rms,
                        const HyperWeights& w, int64_t streams);

void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre);
// dx = what comes through hyper_post (dxout and comb; both empty: 0), then pre * dh on top; dpre.
void hyper_pre_backward(Context& c, TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb,
                        ConstTensorView x, ConstTensorView pre);
void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb);
void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post);

}  // namespace reference

namespace simd {

// The backward of the coefficients and of the product with fn (hyperconn.cc): adds to dx_accum and dw.
void hyper_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre, ConstTensorView dpost, ConstTensorView dcomb,
                        ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w, const HyperShape& shape);
void hyper_coefficients(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView inv_rms, ConstTensorView raw,
                        ConstTensorView x, const HyperWeights& w, const HyperShape& shape);
void hyper_coefficients_backward(Context& c, TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost,
                                 ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                                 const HyperWeights& w, const HyperShape& shape);
void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre);
void hyper_pre_backward(Context& c, TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb,
                        ConstTensorView x, ConstTensorView pre);
void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb);
void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post);

}  // namespace simd

namespace device {

void hyper_feed(Context& c, const HyperFeed& feed, ConstTensorView x, const HyperWeights& w, const HyperShape& shape, ConstTensorView norm);
void hyper_feed_backward(Context& c, TensorView dx, const HyperGradients& dw, ConstTensorView dh, ConstTensorView dpost, ConstTensorView dcomb,
                         ConstTensorView dxout, ConstTensorView x, const HyperFeed& feed, const HyperWeights& w, const HyperShape& shape);
void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb);
void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post);

}  // namespace device

// What one token's Sinkhorn keeps for its backward: the softmax, then for each division its result and the reciprocals.
constexpr int64_t hyper_record_floats(int64_t streams, int sinkhorn_iters) {
  return streams * streams + (2 * sinkhorn_iters - 1) * (streams * streams + streams);
}

}  // namespace lockstep
