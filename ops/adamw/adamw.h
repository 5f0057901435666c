#pragma once
// adamw: one step on f32 master weights (rl spec 18.1):
//   g = grad * grad_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w = w - lr * weight_decay * w - lr * (m / bias1) / (sqrt(v / bias2) + eps),   bias_i = 1 - b_i^step
//   w, m, v, grad [N] f32 (any shape, contiguous). Elementwise: bits do not depend on threads or vector width.
//   Every operation is rounded to f32, left to right as written; none is fused. 1 - b and lr * weight_decay are taken once.
// sum_squares: out[i] (f64, one for each of the tensors) = sum of grads[i]^2: blocks of 4096 elements by the 16-lane tree in f32 products
//   widened to f64 sums, blocks added in ascending order. Deterministic. A non-finite element makes the sum non-finite; so does |grad|
//   over 1.8e19.
// all_finite: *out (i32, one element) = 1 when every element is finite, else 0.
// Scratch: sum_squares N / 4096 f64 over all tensors, all_finite one i32 a worker of the CPU. Cost: bound by memory, 28 bytes an element for the step, 4 for
//   the others.
// Source: Loshchilov and Hutter 2019; rl spec 18.1, 18.4.

#include <span>

#include "core/context.h"

namespace lockstep {

inline constexpr int64_t kSumSquaresBlock = 4096;

struct AdamWStep {
  float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0;
  float bias1 = 1, bias2 = 1;  // 1 - beta^step
  float grad_scale = 1;        // the clip coefficient
};

void adamw(Context& c, TensorView w, TensorView m, TensorView v, ConstTensorView grad, const AdamWStep& step);
void sum_squares(Context& c, TensorView out, std::span<const ConstTensorView> grads);
void all_finite(Context& c, TensorView out, ConstTensorView x);

}  // namespace lockstep
