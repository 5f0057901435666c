#pragma once
// The GPU's side of matmul.h: products on the matrix units of Hopper (matmul_gpu_sm90*) and CDNA4 (matmul_gpu_cdna4*), for matmul_gpu.cu to choose from. Pointers are device memory; calls are enqueued and
// do not wait. bf16 products add in the units' own order: bits differ from the CPU's, but a row's bits depend on that row and the weight alone.
//
// Experts: with `offsets` (i32 [experts + 1], device memory, ascending from 0 to m) rows [offsets[e], offsets[e + 1]) meet w[e] of w [experts, n, k], whose experts
// lie n * w_stride apart. The host knows m only; a row has the bits of a product with its expert alone. Experts without rows cost nothing.
//
// Strides are elements between rows. Every operand's first row is 16-byte aligned and its rows are multiples of 16 bytes apart (tensor_core_operand): n and k may be
// anything, beyond the edges are zeros. m, n, k < 2^31; m may be 0.

#include <cstdint>
#include <span>

#include "core/context.h"

namespace lockstep::gpu {

inline constexpr int64_t kExpertsMax = 512;
inline constexpr size_t kProductsMax = 8;

// Whether the copy engine can read this operand: it depends on the shape of the tensor that the operand is part of, not on its number of rows.
inline bool tensor_core_operand(ConstTensorView v) {
  const auto pitch = static_cast<uint64_t>(v.row_stride) * dtype_bytes(v.dtype);
  return reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && pitch % 16 == 0;
}
// Whether the products below take a weight [n, k] or [E, n, k] of bf16, or of e4m3 whose blocks are 128 x 128 of equal `row_period` and `col_period`
// (BlockGrid; 0: never anew). k_segment as in matmul.h.
inline bool matmul_supported(ConstTensorView w, int64_t row_period = 0, int64_t col_period = 0, int64_t k_segment = 0) {
  const bool known = w.dtype == DType::bf16 || w.dtype == DType::e4m3;
  const int64_t step = w.dtype == DType::e4m3 ? 128 : 64;
  return known && w.shape.elements() > 0 && tensor_core_operand(w) && (w.shape.rank < 3 || w.shape[0] <= kExpertsMax) && row_period % 128 == 0 && col_period % 128 == 0 &&
         k_segment % step == 0;
}

// y = x . w^T, bf16.
struct MatmulProblem {
  int64_t m = 0, n = 0, k = 0;
  const void* x = nullptr;  // [m, k] bf16
  const void* w = nullptr;  // [n, k] bf16, or [experts, n, k]
  void* y = nullptr;        // [m, n] bf16 or f32
  int64_t x_stride = 0, w_stride = 0, y_stride = 0;
  bool y_is_f32 = false;
  bool accumulate = false;  // f32: one addition to what is there
  int64_t k_segment = 0;    // a multiple of 64 (fp8: 128): segments of so many columns begin at zero and are added in order, in f32
  const int32_t* offsets = nullptr;
  int64_t experts = 1;
};
void matmul_bf16(const MatmulProblem& p, void* stream);
// Each as by itself; those of few rows that agree in all but n, operands and y share a launch, up to kProductsMax of them.
void matmul_bf16(std::span<const MatmulProblem> all, void* stream);

// E4M3 codes x [m, k] and w [n, k] with scales of their blocks: x by [1, 128] in f32, w by [128, 128] in UE8M0. Each block of 128 columns is summed by the tensor
// core, then added as fma(partial, x_scale * w_scale, sum) in f32.
struct Fp8Problem {
  MatmulProblem codes;
  const float* x_scale = nullptr;    // [m, ceil(k / 128)]
  const uint8_t* w_scale = nullptr;  // [ceil(n / 128), ceil(k / 128)], or [experts, ...] ceil(n / 128) * w_scale_stride apart
  int64_t x_scale_stride = 0, w_scale_stride = 0;
};
void matmul_fp8(const Fp8Problem& p, void* stream);
void matmul_fp8(std::span<const Fp8Problem> all, void* stream);  // as matmul_bf16 of several

// The same with w in E2M1 codes, two a byte, and scales of [1, 32]: w [n, k / 2], its stride in bytes; w_scale [n, k / 32] or [experts, n, k / 32]. k is a multiple of 128, so
// are the scales' rows of 4 bytes. No segments, y is not accumulated.
//   CDNA4   scales are the instruction's, which adds 64 columns at a time.
//   Hopper  x is what fp4_rows makes, in bf16, and x_scale is not read. An element is one chain of products of 16 columns as in bf16, of each block of 128 in the order that
//           fp4_rows gives it. Scales of w from 2^-100 to 2^33 are exact, larger ones count as NaN.
void matmul_fp4(const Fp8Problem& p, void* stream);
bool fp4_takes_bf16_rows();  // as on Hopper

// The two gradients, f32, of operands in bf16 (round_rows makes dy's). What is added to what is there is added once.
//   input:  dx[m, k] (+)= sum_n dy[m, n] w[n, k]   n ascending; adds if `accumulate`
//   weight: dw[n, k] += sum_m dy[m, n] x[m, k]     m ascending, in blocks of 64 from the expert's first row
struct MatmulBackwardProblem {
  int64_t m = 0, n = 0, k = 0;
  const void* dy = nullptr;     // [m, n] bf16
  const void* other = nullptr;  // input: w [n, k] or [experts, n, k] bf16; weight: x [m, k] bf16
  float* grad = nullptr;        // input: dx [m, k]; weight: dw [n, k] or [experts, n, k], n * grad_stride apart
  int64_t dy_stride = 0, other_stride = 0, grad_stride = 0;
  bool accumulate = false;      // input; of weights always
  const int32_t* offsets = nullptr;
  int64_t experts = 1;
};
void matmul_backward_input_bf16(const MatmulBackwardProblem& p, void* stream);
void matmul_backward_weight_bf16(const MatmulBackwardProblem& p, void* stream);

// Operands of the products from what the model holds; any GPU.
//   round_rows     to [M, N] bf16 = from [M, N] f32, nearest even
//   quantize_rows  codes [M, K] e4m3 and scales [M, ceil(K / 128)] f32 of x [M, K] f32 | bf16: the codes of quantize(x) in kFp8Activation and its scales in f32;
//                  with row_of [M] i32 row r is that of x[row_of[r]]
//   fp4_rows       to [M, K] bf16 = codes [M, K] e4m3 * scales [M, K / 128] f32, exactly, K in whole blocks of 128, whose columns are in the order in which Hopper's matmul_fp4
//                  takes them: column 32 q + 8 v + 4 h + i (q, v, i < 4) lies at 32 v + 8 i + 2 q + h. Rows begin at multiples of 16 bytes of `to`, 8 of codes
// Rows may be apart. A pitch of padded_stride(n) elements makes rows of n fit.
void round_rows(Context& c, TensorView to, ConstTensorView from);
void quantize_rows(Context& c, TensorView codes, TensorView scales, ConstTensorView x, ConstTensorView row_of = {});
void fp4_rows(Context& c, TensorView to, ConstTensorView codes, ConstTensorView scales);
constexpr int64_t padded_stride(DType dtype, int64_t n) {
  const int64_t piece = 16 / static_cast<int64_t>(dtype_bytes(dtype));
  return (n + piece - 1) / piece * piece;
}

}  // namespace lockstep::gpu
