#pragma once
// The CPU side of adamw: kernels over plain ranges; adamw.cc cuts tensors into blocks and shares them among the workers. device: whole ops on the GPU,
// adamw_gpu.cu. Same bits.

#include "ops/adamw/adamw.h"

namespace lockstep {

namespace reference {
void adamw_range(float* w, float* m, float* v, const float* grad, int64_t n, const AdamWStep& step);
double sum_squares_block(const float* grad, int64_t n);  // one block: n <= kSumSquaresBlock
bool all_finite_range(const float* x, int64_t n);
}  // namespace reference

namespace simd {
void adamw_range(float* w, float* m, float* v, const float* grad, int64_t n, const AdamWStep& step);
double sum_squares_block(const float* grad, int64_t n);
bool all_finite_range(const float* x, int64_t n);
}  // namespace simd

namespace device {
void adamw(Context& c, TensorView w, TensorView m, TensorView v, ConstTensorView grad, const AdamWStep& step);
void sum_squares(Context& c, TensorView out, std::span<const ConstTensorView> grads);
void all_finite(Context& c, TensorView out, ConstTensorView x);
}  // namespace device

}  // namespace lockstep
