#pragma once
// The implementations behind matmul.h; arguments are already checked. Internal to ops/matmul. device: on the GPU, matmul_gpu.cu.

#include "ops/matmul/matmul.h"

// Plain loops: the specification that runs. Reads w.rows only.
namespace lockstep::reference {

void pack_panels(TensorView panels, ConstTensorView rows);
void matmul(TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment);
void quantized_matmul(TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment);  // reads w.rows and w.scales
void matmul_backward_input(TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate);
void matmul_backward_weight(TensorView dw_accum, ConstTensorView dy, ConstTensorView x);
void grouped_matmul(TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul_backward_input(TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets,
                                   bool accumulate);
void grouped_matmul_backward_weight(TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets);

}  // namespace lockstep::reference

namespace lockstep::simd {

void pack_panels(Context& c, TensorView panels, ConstTensorView rows);
void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment);
// offsets: of experts; empty for one matrix.
void quantized_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment, ConstTensorView offsets);
void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate);
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x);
void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w,
                                   ConstTensorView offsets, bool accumulate);
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                                    ConstTensorView offsets);

}  // namespace lockstep::simd

// Reads w.rows and w.scales; w may be quantised in all. offsets lie in device memory. matmul_gpu.cu chooses between matrix units (matmul_gpu.h) and the
// portable kernels (matmul_gpu_portable.cu), which have the CPU's bits.
namespace lockstep::device {

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment);
void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate);
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x);
// offsets: of experts; empty for one matrix each. row_of as in RowsToGather: only for products that gathers_codes is true of.
void matmul_many(Context& c, std::span<const MatmulCall> products, ConstTensorView offsets, ConstTensorView row_of);
bool gathers_codes(std::span<const MatmulCall> products);
// MatmulInput: whether a product reads codes, room for them, and the product (offsets: of experts, or empty).
bool reads_codes(DType x, int64_t k, const WeightView& w);
MatmulInput code_input(Context& c, int64_t rows, int64_t k);
void matmul(Context& c, TensorView y, const MatmulInput& x, const WeightView& w, ConstTensorView offsets);
ConstTensorView matmul_backward_rows(Context& c, ConstTensorView dy, ConstTensorView dw_accum, ConstTensorView x, const WeightView& w);
void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate);
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets);

}  // namespace lockstep::device

namespace lockstep::device::portable {

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment);
void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate);
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x);
void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate);
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets);

}  // namespace lockstep::device::portable

// Thin weights in f32, with the CPU's bits (matmul_gpu_thin.cu); the portable products take these where they can.
namespace lockstep::device::thin {

constexpr int64_t kThinRows = 32;

bool supports(ConstTensorView x, const WeightView& w);
void matmul(Context& c, TensorView y, ConstTensorView x, ConstTensorView w);
// The sums [M, ceil(K / k_segment), N + 1] f32 of the segments, for ops that add them up themselves, and behind each segment's N that of the squares of x, by the
// 16-lane tree. k_segment is a multiple of 16.
void segment_sums(Context& c, TensorView sums, ConstTensorView x, ConstTensorView w, int64_t k_segment);
bool supports_weight_gradient(ConstTensorView dw, ConstTensorView dy, ConstTensorView x);
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x);

}  // namespace lockstep::device::thin
