// Which kernels a product takes on the GPU: the matrix units' (matmul_gpu.h) where the build and the weight allow, otherwise the portable ones. Chosen by dtypes
// and by the shapes of the weight and of the tensors that operands are part of, never by the number of rows.
//
// On matrix units gradients come from dy rounded to bf16, and that of the input from weights in bf16, which quantised ones fit in exactly; those are
// de-quantised for the call, all experts at once. Gradients of weights of fewer than kThin rows stay in f32.

#include <algorithm>

#include "core/gpu.h"
#include "ops/matmul/matmul_cpu.h"
#include "ops/matmul/matmul_gpu.h"

namespace lockstep::device {

namespace {

#if LOCKSTEP_GPU_CUDA || LOCKSTEP_GPU_HIP
constexpr bool kMatrixUnits = true;
#else
constexpr bool kMatrixUnits = false;
#endif
constexpr int64_t kThin = 64;  // rows of the narrowest tile of dw

int64_t inner_stride(ConstTensorView v) { return v.shape.rank == 3 ? v.shape[2] : v.row_stride; }

// Period of a dimension of n as far as it cuts it.
int64_t cutting_period(const BlockGrid& grid, int64_t n) { return grid.period >= n ? 0 : grid.period; }

// Whether rows, [N, K] or [E, N, K], can be read by the units; experts lie side by side.
bool readable(ConstTensorView rows) {
  const Shape& s = rows.shape;
  return inner_stride(rows) * static_cast<int64_t>(dtype_bytes(rows.dtype)) % 16 == 0 && (s.rank < 3 || (s[0] <= gpu::kExpertsMax && rows.row_stride == s[1] * s[2]));
}

// E2M1 codes with scales of [1, 32], in whole blocks of the inputs' scales.
bool use_matrix_units_fp4(ConstTensorView x, const WeightView& w, int64_t k_segment) {
  return kMatrixUnits && w.rows.shape.elements() > 0 && readable(w.rows) && gpu::tensor_core_operand(w.rows) && x.dim(1) % 128 == 0 && k_segment == 0 && w.row_grid.block == 1 &&
         w.col_grid.block == 32 && cutting_period(w.col_grid, x.dim(1)) == 0 && w.scales.contiguous() && reinterpret_cast<uintptr_t>(w.scales.data) % 4 == 0;
}

// Whether the units can read w [N, K] or [E, N, K] as it is, in bf16 or E4M3.
bool units_read(const WeightView& w, int64_t k_segment) {
  const int e = w.rows.shape.rank - 2;
  const int64_t n = w.rows.shape[e], k = w.rows.shape[e + 1];
  if (!kMatrixUnits || !readable(w.rows) || !gpu::matmul_supported(w.rows, cutting_period(w.row_grid, n), cutting_period(w.col_grid, k), k_segment)) return false;
  return !w.quantized() || (w.rows.dtype == DType::e4m3 && w.row_grid.block == 128 && w.col_grid.block == 128 && (e == 0 || w.scales.contiguous()));
}

bool use_matrix_units(ConstTensorView x, const WeightView& w, int64_t k_segment) {
  if (w.rows.dtype == DType::e2m1x2) return use_matrix_units_fp4(x, w, k_segment);
  if (!units_read(w, k_segment)) return false;
  return w.quantized() || (x.dtype == DType::bf16 && w.rows.dtype == DType::bf16 && gpu::tensor_core_operand(x));
}

gpu::MatmulProblem forward_problem(TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment, ConstTensorView offsets) {
  gpu::MatmulProblem p = {.m = y.rows(), .n = y.dim(1), .k = x.dim(1), .x = x.data, .w = w.rows.data, .y = y.data, .x_stride = x.row_stride,
                          .w_stride = inner_stride(w.rows), .y_stride = y.row_stride, .y_is_f32 = y.dtype == DType::f32, .k_segment = k_segment};
  if (offsets.data != nullptr) p.offsets = offsets.ptr<int32_t>(), p.experts = w.rows.shape[0];
  return p;
}

// x in E4M3, in the workspace, which the caller's scope releases.
MatmulInput quantized(Context& c, ConstTensorView x, ConstTensorView row_of) {
  const MatmulInput out = code_input(c, row_of.empty() ? x.rows() : row_of.dim(0), x.dim(1));
  gpu::quantize_rows(c, out.codes, out.scales, x, row_of);
  return out;
}
gpu::Fp8Problem fp8_problem(gpu::MatmulProblem p, const MatmulInput& x, const WeightView& w) {
  p.x = x.codes.data, p.x_stride = x.codes.row_stride;
  return {.codes = p, .x_scale = x.scales.ptr<float>(), .w_scale = static_cast<const uint8_t*>(w.scales.data), .x_scale_stride = x.scales.row_stride,
          .w_scale_stride = inner_stride(w.scales)};
}

// The same with w in E2M1. rows: of x in bf16, where those are what it reads; made here when they are not there, in the workspace.
gpu::Fp8Problem fp4_problem(Context& c, gpu::Fp8Problem p, const MatmulInput& x, TensorView& rows) {
  if (!gpu::fp4_takes_bf16_rows()) return p;
  if (rows.data == nullptr) {
    rows = c.workspace->tensor(DType::bf16, x.codes.shape, "matmul rows");
    gpu::fp4_rows(c, rows, x.codes, x.scales);
  }
  p.codes.x = rows.data, p.codes.x_stride = rows.row_stride;
  return p;
}

void codes_on_matrix_units(Context& c, TensorView y, const MatmulInput& x, const WeightView& w, int64_t k_segment, ConstTensorView offsets) {
  const gpu::Fp8Problem p = fp8_problem(forward_problem(y, x.codes, w, k_segment, offsets), x, w);
  if (w.rows.dtype != DType::e2m1x2) return gpu::matmul_fp8(p, c.stream);
  const ArenaScope scope(*c.workspace);
  TensorView rows;
  gpu::matmul_fp4(fp4_problem(c, p, x, rows), c.stream);
}

void forward_on_matrix_units(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment, ConstTensorView offsets) {
  if (!w.quantized()) return gpu::matmul_bf16(forward_problem(y, x, w, k_segment, offsets), c.stream);
  const ArenaScope scope(*c.workspace);
  codes_on_matrix_units(c, y, quantized(c, x, {}), w, k_segment, offsets);
}

void many_on_matrix_units(Context& c, std::span<const MatmulCall> products, ConstTensorView offsets, ConstTensorView row_of) {
  const ArenaScope scope(*c.workspace);
  FixedList<gpu::MatmulProblem, kMatmulCallsMax> bf16;
  FixedList<gpu::Fp8Problem, kMatmulCallsMax> fp8;
  struct Operand {
    ConstTensorView x;
    MatmulInput quantized;
    TensorView fp4_rows;
  };
  FixedList<Operand, kMatmulCallsMax> operands;
  for (const auto& [y, x, w] : products) {
    const gpu::MatmulProblem p = forward_problem(y, x, w, 0, offsets);
    if (!w.quantized()) {
      bf16.push_back(p);
      continue;
    }
    const auto same = [&x = x](const Operand& o) { return o.x.data == x.data && o.x.dtype == x.dtype && o.x.shape == x.shape && o.x.row_stride == x.row_stride; };
    Operand* const found = std::find_if(operands.begin(), operands.end(), same);
    if (found == operands.end()) operands.push_back({x, quantized(c, x, row_of), {}});
    const gpu::Fp8Problem q = fp8_problem(p, found->quantized, w);
    if (w.rows.dtype == DType::e2m1x2) {
      gpu::matmul_fp4(fp4_problem(c, q, found->quantized, found->fp4_rows), c.stream);
    } else {
      fp8.push_back(q);
    }
  }
  gpu::matmul_bf16(bf16, c.stream);
  gpu::matmul_fp8(fp8, c.stream);
}

// dy in bf16, in the workspace, which the caller's scope releases, unless matmul_backward_rows made it so.
ConstTensorView rounded(Context& c, ConstTensorView dy) {
  if (dy.dtype == DType::bf16) return dy;
  const TensorView out = c.workspace->tensor(DType::bf16, {dy.rows(), gpu::padded_stride(DType::bf16, dy.dim(1))}, "matmul gradient").cols(0, dy.dim(1));
  gpu::round_rows(c, out, dy);
  return out;
}

// Whether w [N, K], or experts as one matrix [E N, K], is cut into whole blocks, so that de-quantising needs to know nothing else.
bool in_whole_blocks(const WeightView& w, int64_t k) {
  const int e = w.rows.shape.rank - 2;
  const int64_t n = w.rows.shape[e];
  return cutting_period(w.row_grid, n) % w.row_grid.block == 0 && cutting_period(w.col_grid, k) % w.col_grid.block == 0 &&
         (e == 0 || (n % w.row_grid.block == 0 && w.rows.contiguous() && w.scales.contiguous()));
}

bool use_matrix_units_backward(const WeightView& w, int64_t k) {
  if (!kMatrixUnits || w.rows.shape.elements() == 0) return false;
  if (w.quantized()) return k % 8 == 0 && in_whole_blocks(w, k) && (w.rows.shape.rank < 3 || w.rows.shape[0] <= gpu::kExpertsMax);
  return w.rows.dtype == DType::bf16 && readable(w.rows) && gpu::matmul_supported(w.rows);
}

void input_gradient_on_matrix_units(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate) {
  const ArenaScope scope(*c.workspace);
  const int64_t k = dx.dim(1);
  ConstTensorView rows = w.rows;
  if (w.quantized()) {
    const auto flat = [](ConstTensorView v) { return v.shape.rank == 3 ? v.reshape({v.shape[0] * v.shape[1], v.shape[2]}) : v; };
    const TensorView out = c.workspace->tensor(DType::bf16, {flat(w.rows).rows(), k}, "matmul dequantized");
    dequantize(c, out, {flat(w.rows), flat(w.scales), w.row_grid.block, w.col_grid.block});
    rows = out;
  }
  const ConstTensorView d = rounded(c, dy);
  gpu::MatmulBackwardProblem p = {.m = dy.rows(), .n = dy.dim(1), .k = k, .dy = d.data, .other = rows.data, .grad = dx.ptr<float>(), .dy_stride = d.row_stride,
                                  .other_stride = inner_stride(rows), .grad_stride = dx.row_stride, .accumulate = accumulate};
  if (offsets.data != nullptr) p.offsets = offsets.ptr<int32_t>(), p.experts = w.rows.shape[0];
  gpu::matmul_backward_input_bf16(p, c.stream);
}

bool use_matrix_units_for_weights(ConstTensorView dw, ConstTensorView x) {
  const Shape& s = dw.shape;
  return kMatrixUnits && x.dtype == DType::bf16 && gpu::tensor_core_operand(x) && s[s.rank - 2] >= kThin &&
         (s.rank < 3 || (s[0] <= gpu::kExpertsMax && dw.contiguous()));
}

void weight_gradient_on_matrix_units(Context& c, TensorView dw, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets) {
  const ArenaScope scope(*c.workspace);
  const ConstTensorView d = rounded(c, dy);
  gpu::MatmulBackwardProblem p = {.m = dy.rows(), .n = dy.dim(1), .k = x.dim(1), .dy = d.data, .other = x.data, .grad = dw.ptr<float>(), .dy_stride = d.row_stride,
                                  .other_stride = x.row_stride, .grad_stride = inner_stride(dw)};
  if (offsets.data != nullptr) p.offsets = offsets.ptr<int32_t>(), p.experts = dw.shape[0];
  gpu::matmul_backward_weight_bf16(p, c.stream);
}

}  // namespace

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) {
  if constexpr (kMatrixUnits)
    if (use_matrix_units(x, w, k_segment)) return forward_on_matrix_units(c, y, x, w, k_segment, {});
  portable::matmul(c, y, x, w, k_segment);
}
bool reads_codes(DType x, int64_t k, const WeightView& w) {
  ConstTensorView one_row;
  one_row.dtype = x, one_row.shape = {1, k}, one_row.row_stride = k;
  return w.quantized() && use_matrix_units(one_row, w, 0);
}
MatmulInput code_input(Context& c, int64_t rows, int64_t k) {
  return {{}, c.workspace->tensor(DType::e4m3, {rows, gpu::padded_stride(DType::e4m3, k)}, "matmul codes").cols(0, k),
          c.workspace->tensor(DType::f32, {rows, num_blocks(k, 128)}, "matmul scales")};
}
void matmul(Context& c, TensorView y, const MatmulInput& x, const WeightView& w, ConstTensorView offsets) {
  if constexpr (kMatrixUnits) codes_on_matrix_units(c, y, x, w, 0, offsets);
}
bool gathers_codes(std::span<const MatmulCall> products) {
  return std::all_of(products.begin(), products.end(), [](const MatmulCall& p) { return p.w.quantized() && use_matrix_units(p.x, p.w, 0); });
}
void matmul_many(Context& c, std::span<const MatmulCall> products, ConstTensorView offsets, ConstTensorView row_of) {
  MatmulCalls on_units;
  for (const MatmulCall& p : products) {
    if (use_matrix_units(p.x, p.w, 0)) {
      on_units.push_back(p);
    } else {
      offsets.data == nullptr ? portable::matmul(c, p.y, p.x, p.w, 0) : portable::grouped_matmul(c, p.y, p.x, p.w, offsets);
    }
  }
  if constexpr (kMatrixUnits) many_on_matrix_units(c, on_units, offsets, row_of);
}
void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate) {
  if constexpr (kMatrixUnits)
    if (use_matrix_units_backward(w, dx.dim(1))) return input_gradient_on_matrix_units(c, dx, dy, w, {}, accumulate);
  portable::matmul_backward_input(c, dx, dy, w, accumulate);
}
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x) {
  if constexpr (kMatrixUnits)
    if (use_matrix_units_for_weights(dw_accum, x)) return weight_gradient_on_matrix_units(c, dw_accum, dy, x, {});
  portable::matmul_backward_weight(c, dw_accum, dy, x);
}

ConstTensorView matmul_backward_rows(Context& c, ConstTensorView dy, ConstTensorView dw_accum, ConstTensorView x, const WeightView& w) {
  return use_matrix_units_backward(w, x.dim(1)) && use_matrix_units_for_weights(dw_accum, x) ? rounded(c, dy) : dy;
}

void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) {
  if constexpr (kMatrixUnits)
    if (use_matrix_units(x, w, 0)) return forward_on_matrix_units(c, y, x, w, 0, offsets);
  portable::grouped_matmul(c, y, x, w, offsets);
}
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate) {
  if constexpr (kMatrixUnits)
    if (use_matrix_units_backward(w, dx.dim(1))) return input_gradient_on_matrix_units(c, dx, dy, w, offsets, accumulate);
  portable::grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate);
}
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets) {
  if constexpr (kMatrixUnits)
    if (use_matrix_units_for_weights(dw_accum, x)) return weight_gradient_on_matrix_units(c, dw_accum, dy, x, offsets);
  portable::grouped_matmul_backward_weight(c, dw_accum, dy, x, offsets);
}

}  // namespace lockstep::device
