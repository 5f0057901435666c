#pragma once
// matmul: y[m, n] = sum_k x[m, k] * w[n, k], the product every linear layer is made of, and its two gradients.
//   x [M, K]  f32 | bf16   row_stride may exceed K; M >= 0
//   w [N, K]  f32 | bf16   (WeightView: row-major, and the same numbers repacked for the kernel)
//   y [M, N]  f32 | bf16   row_stride may exceed N
// Numerics (row contract): y[m, n] is one chain acc = fma(x[m, k], w[n, k], acc), k ascending from acc = 0, in f32, rounded
//   once to y's dtype. With k_segment > 0 each segment of k_segment columns (the last may be shorter) is its own chain from
//   zero and the segments' sums are added in order, 0 + s0 + s1 + ... (how the attention output projection keeps its bits under
//   tensor parallelism). Tiling, packing, thread count and M never change a bit: no split of K anywhere.
// Backward (deterministic; f32 gradients; the same fma chains):
//   matmul_backward_input:  dx[m, k] (+)= sum_n dy[m, n] * w[n, k]     dy [M, N] f32, dx [M, K] f32; n ascending
//   matmul_backward_weight: dw_accum[n, k] += sum_m dy[m, n] * x[m, k] m ascending; dw_accum [N, K] f32
//   Accumulating chains start from the value that is there instead of from zero. So dw of rows given in several calls, in
//   order, has the bits of one call with all rows. Both read w.rows; panels are not needed.
// Panels: [ceil(N/16), K, 16] of w's dtype, panel p column j holding row 16p + j (zeros past N). pack_panels fills them; when a
//   WeightView brings none, matmul packs into scratch first, which costs N*K per call.
// grouped_matmul: rows [offsets[e], offsets[e+1]) of x meet w[e]; each row's bits are those of matmul with that expert alone.
//   x [R, K], y [R, N], w rows [E, N, K], panels [E, ceil(N/16), K, 16], offsets [E + 1] i32 ascending from 0 to R
// Scratch: up to about 1 MiB a thread (f32 copies of blocks), and panels when w brings none. Source: textbook; the blocking is
//   told in matmul_cpu.cc.
// Cost: 2*M*N*K operations; at M = 1 bound by the bytes of w.

#include "core/context.h"

namespace lockstep {

inline constexpr int64_t kPanelWidth = 16;

// One weight as ops see it. Lifetime: whoever owns the views.
struct WeightView {
  ConstTensorView rows;    // [N, K], or [E, N, K] for experts
  ConstTensorView panels;  // see above; may be empty
};

// Columns [begin, begin + count) of a matrix, panels included, without a copy.
WeightView columns_of(const WeightView& w, int64_t begin, int64_t count);

Shape panel_shape(const Shape& rows);  // [N, K] -> [ceil(N/16), K, 16]; [E, N, K] -> [E, ceil(N/16), K, 16]
void pack_panels(Context& c, TensorView panels, ConstTensorView rows);

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment = 0);
void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate = false);
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x);

void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w,
                                   ConstTensorView offsets, bool accumulate = false);
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                                    ConstTensorView offsets);

}  // namespace lockstep
