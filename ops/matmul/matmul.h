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
//   matmul_backward_rows: dy as these products of w and dw_accum (grouped or not) read it, so that it is rounded once for all of them: on a GPU's matrix
//   units a bf16 copy in c.workspace, which the caller's scope releases, and which they take instead; otherwise dy itself.
// Panels: [ceil(N/16), K, 16] of w's dtype, panel p column j holding row 16p + j (zeros past N). pack_panels fills them; when a
//   WeightView brings none, matmul packs into scratch first, which costs N*K per call.
// grouped_matmul: rows [offsets[e], offsets[e+1]) of x meet w[e]; each row's bits are those of matmul with that expert alone.
//   x [R, K], y [R, N], w rows [E, N, K], panels [E, ceil(N/16), K, 16], offsets [E + 1] i32 ascending from 0 to R
// matmul_many, grouped_matmul_many: products that do not depend on one another, each with the bits of a call of its own. On a GPU those of few rows that agree
//   in M and K run side by side, so that it streams all their weights at once, and an x that several E4M3 weights meet is quantised once.
// Quantised weights (WeightView::scales is set): rows holds E4M3 codes, or E2M1 codes two a byte, and value = code * scale.
//   forward: x is quantised inside, row by row in blocks of 128 columns, to E4M3 with UE8M0 scales (kFp8Activation: amax floor 1e-4). Then
//     y[m, n] = round(sum), sum = fma(partial_b, sx_b * sw_b, sum) over the weight's blocks of columns b in order, from 0, where partial_b is
//     the fma chain over the codes of block b alone, from 0. So f32 sums are promoted every 128 columns (E2M1: every 32). With k_segment,
//     which must be the period of col_grid, sum begins anew in each segment and the segments' sums are added as above.
//     Row contract: codes and scales of a row of x depend on that row alone. NaN and Inf: NaN in x or w gives NaN, Inf in x is 448 * sx.
//   backward_input: straight-through, the chain above with w de-quantised to bf16 (exact: four significant bits, scales of at least 2^-124).
//   backward_weight: x as it was stored, before the forward's quantisation.
// On a GPU with matrix units products of bf16, E4M3 and E2M1 add in the units' own order, and gradients come from dy rounded to bf16: see matmul_gpu.h and
//   matmul_gpu.cu, which chooses. The row contract holds there as well, forward and dx; everything else has the bits above.
// Scratch: up to about 1 MiB a thread (f32 copies of blocks), and panels when w brings none; on a GPU codes of x, and on matrix units dy in bf16 and
//   what is quantised of w de-quantised. Source: textbook; the blocking is told in matmul_cpu.cc. Quantised: V4 release, inference/kernel.py (fp8_gemm, fp4_gemm); V4 spec 3.3.
// Cost: 2*M*N*K operations; at M = 1 bound by the bytes of w.

#include <algorithm>
#include <span>

#include "core/context.h"
#include "core/fixed_list.h"
#include "core/host_device.h"
#include "ops/quantize/quantize.h"

namespace lockstep {

inline constexpr int64_t kPanelWidth = 16;

// How one dimension is cut into blocks that share a scale. Blocks begin anew at every multiple of `period` (0: never), so that a part of whole
// periods, which is what a rank of a tp group holds, has the scales that it has in the whole.
struct BlockGrid {
  int64_t block = 1, period = 0;
  HOST_DEVICE int64_t blocks_in(int64_t n) const { return n / pitch(n) * num_blocks(pitch(n)) + num_blocks(n % pitch(n)); }  // of a dimension of n
  HOST_DEVICE int64_t block_of(int64_t i) const { return period == 0 ? i / block : i / period * num_blocks(period) + i % period / block; }
  int64_t end_of_block(int64_t i, int64_t n) const {  // of the block that holds i
    const int64_t first = period == 0 ? 0 : i / period * period, last = period == 0 ? n : std::min(n, first + period);
    return std::min(last, first + ((i - first) / block + 1) * block);
  }

 private:
  HOST_DEVICE int64_t num_blocks(int64_t n) const { return (n + block - 1) / block; }
  HOST_DEVICE int64_t pitch(int64_t n) const { return period != 0 ? period : n > 1 ? n : 1; }
};

// One weight as ops see it. Lifetime: whoever owns the views.
struct WeightView {
  ConstTensorView rows;         // [N, K], or [E, N, K] for experts; of e2m1x2 [N, ceil(K / 2)]
  ConstTensorView panels;       // see above; may be empty. Codes are packed as bytes, so two steps of e2m1x2 lie in one
  ConstTensorView scales = {};  // quantised: ue8m0 [row blocks, column blocks], or [E, row blocks, column blocks]
  ConstTensorView panel_scales = {};  // with panels: f32 [ceil(N / 16), column blocks, 16], or [E, ...]; see pack_panel_scales
  BlockGrid row_grid = {}, col_grid = {};
  bool quantized() const { return scales.data != nullptr; }
  WeightView at(int64_t e) const;  // expert e
};

// Columns [begin, begin + count) of a matrix, panels included, without a copy.
WeightView columns_of(const WeightView& w, int64_t begin, int64_t count);

Shape panel_shape(const Shape& rows);  // [N, K] -> [ceil(N/16), K, 16]; [E, N, K] -> [E, ceil(N/16), K, 16]
void pack_panels(Context& c, TensorView panels, ConstTensorView rows);
void unpack_panels(Context& c, TensorView rows, ConstTensorView panels);  // the rows that were packed; rare, so not fast

// Scales as the kernel reads them: those of 16 rows side by side, times the constant that its decoding leaves out (2^8 for E4M3, 1/2 for E2M1).
Shape panel_scale_shape(const WeightView& w);
void pack_panel_scales(Context& c, TensorView panel_scales, const WeightView& w);  // reads w.rows (dtype and shape) and w.scales

// The numbers that the kernels take from w's panels, value = code * scale where it is quantised: out [N, K] f32, or [E, N, K]. CHECK: no panels.
void unpack_panels(Context& c, TensorView out, const WeightView& w);

// codes and scales of x [N, K] by the grids; of experts' [E, N, K] with N as the period of rows. e2m1x2 takes no period of columns. On the GPU the host
// waits for what it counts.
QuantStats quantize_by_grid(Context& c, TensorView codes, TensorView scales, const BlockGrid& row_grid, const BlockGrid& col_grid, ConstTensorView x,
                            float amax_floor = 0);

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment = 0);

// No y overlaps another, or any x.
struct MatmulCall {
  TensorView y;
  ConstTensorView x;
  WeightView w;
};
inline constexpr size_t kMatmulCallsMax = 32;
using MatmulCalls = FixedList<MatmulCall, kMatmulCallsMax>;
void matmul_many(Context& c, std::span<const MatmulCall> products);  // at most kMatmulCallsMax

// Rows of experts that have yet to be brought there: row r of the products' one x is its row row_of[r] (moe_permute.h's row_token).
struct RowsToGather {
  ConstTensorView row_of;  // [R] i32, trusted; empty: x has the rows already
  TensorView scratch = {};  // [R, K] of x's dtype, which takes the rows where they have to be copied; quantised products on a GPU gather while they quantise
};

// x of one product, for an op to write as the product reads it: in codes where quantised products run on a GPU's matrix units, which saves writing x and reading it
// again. The bits are those of x written in its dtype and then quantised.
struct MatmulInput {
  TensorView x;                    // [M, K] f32 | bf16, or empty:
  TensorView codes = {}, scales = {};  // e4m3 [M, K] and f32 [M, ceil(K / 128)]
  bool quantized() const { return codes.data != nullptr; }
};
// In c.workspace, until the caller's scope ends, and undefined. dtype: of x.
MatmulInput matmul_input(Context& c, DType dtype, int64_t rows, int64_t k, const WeightView& w);
void matmul(Context& c, TensorView y, const MatmulInput& x, const WeightView& w);

void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate = false);
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x);
ConstTensorView matmul_backward_rows(Context& c, ConstTensorView dy, ConstTensorView dw_accum, ConstTensorView x, const WeightView& w);

void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul(Context& c, TensorView y, const MatmulInput& x, const WeightView& w, ConstTensorView offsets);
void grouped_matmul_many(Context& c, std::span<const MatmulCall> products, ConstTensorView offsets, const RowsToGather& gather = {});
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w,
                                   ConstTensorView offsets, bool accumulate = false);
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                                    ConstTensorView offsets);

}  // namespace lockstep
