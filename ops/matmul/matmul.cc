#include "ops/matmul/matmul.h"

#include "ops/matmul/matmul_cpu.h"

namespace lockstep {

namespace {

bool is_float(DType t) { return t == DType::f32 || t == DType::bf16; }

void check_matrix(const char* op, const char* name, ConstTensorView v) {
  CHECK(v.shape.rank == 2 && is_float(v.dtype), "{}: {} is {} {}, wanted a matrix of f32 or bf16", op, name, dtype_name(v.dtype),
        v.shape.str());
  CHECK(v.rows() <= 1 || v.row_stride >= v.shape[1], "{}: {} is {} with rows {} apart", op, name, v.shape.str(), v.row_stride);
}

void check_f32_matrix(const char* op, const char* name, ConstTensorView v) {
  check_matrix(op, name, v);
  CHECK(v.dtype == DType::f32, "{}: {} is {}, wanted f32", op, name, dtype_name(v.dtype));
}

// `experts` is the rank of the leading dimension: 0 for one matrix, 1 for [E, N, K].
void check_weight(const char* op, const WeightView& w, int experts) {
  const Shape& s = w.rows.shape;
  CHECK(s.rank == 2 + experts && is_float(w.rows.dtype), "{}: w is {} {}, wanted {} of f32 or bf16", op, dtype_name(w.rows.dtype),
        s.str(), experts == 0 ? "[N, K]" : "[E, N, K]");
  CHECK(w.rows.rows() <= 1 || w.rows.row_stride >= s.row_elements(), "{}: w is {} with a stride of {}", op, s.str(),
        w.rows.row_stride);
  if (w.panels.empty()) return;
  const int64_t stride = panel_shape(s).row_elements();  // columns of a wider matrix have panels further apart
  CHECK(w.panels.dtype == w.rows.dtype && w.panels.shape == panel_shape(s) &&
            (w.panels.contiguous() || (experts == 0 && w.panels.row_stride >= stride)),
        "{}: panels are {} {} with a stride of {}, w is {} {}, wanted panels {}", op, dtype_name(w.panels.dtype),
        w.panels.shape.str(), w.panels.row_stride, dtype_name(w.rows.dtype), s.str(), panel_shape(s).str());
}

void check_offsets(const char* op, ConstTensorView offsets, int64_t experts, int64_t rows) {
  CHECK(offsets.shape == Shape({experts + 1}) && offsets.dtype == DType::i32 && offsets.row_stride == 1,
        "{}: offsets are {} {}, wanted i32 [{}]", op, dtype_name(offsets.dtype), offsets.shape.str(), experts + 1);
  const int32_t* at = offsets.ptr<int32_t>();
  CHECK(at[0] == 0 && at[experts] == rows, "{}: offsets run from {} to {}, wanted 0 to {}", op, at[0], at[experts], rows);
  for (int64_t e = 0; e < experts; ++e)
    CHECK(at[e] <= at[e + 1], "{}: offsets fall from {} to {} at expert {}", op, at[e], at[e + 1], e);
}

// y [M, N] = x [M, K] * w with w's last two dimensions [N, K].
void check_forward(const char* op, ConstTensorView y, ConstTensorView x, const Shape& w) {
  check_matrix(op, "x", x);
  check_matrix(op, "y", y);
  const int64_t n = w[w.rank - 2], k = w[w.rank - 1];
  CHECK(x.shape[1] == k && y.shape[1] == n && x.shape[0] == y.shape[0], "{}: x is {}, w is {}, y is {}", op, x.shape.str(),
        w.str(), y.shape.str());
}

void check_backward_input(const char* op, ConstTensorView dx, ConstTensorView dy, const Shape& w) {
  check_f32_matrix(op, "dx", dx);
  check_f32_matrix(op, "dy", dy);
  const int64_t n = w[w.rank - 2], k = w[w.rank - 1];
  CHECK(dy.shape[1] == n && dx.shape[1] == k && dx.shape[0] == dy.shape[0], "{}: dy is {}, w is {}, dx is {}", op,
        dy.shape.str(), w.str(), dx.shape.str());
}

void check_backward_weight(const char* op, ConstTensorView dw, ConstTensorView dy, ConstTensorView x, int experts) {
  check_f32_matrix(op, "dy", dy);
  check_matrix(op, "x", x);
  const Shape& s = dw.shape;
  CHECK(s.rank == 2 + experts && dw.dtype == DType::f32, "{}: dw_accum is {} {}, wanted f32 {}", op, dtype_name(dw.dtype),
        s.str(), experts == 0 ? "[N, K]" : "[E, N, K]");
  CHECK(dw.rows() <= 1 || dw.row_stride >= s.row_elements(), "{}: dw_accum is {} with a stride of {}", op, s.str(),
        dw.row_stride);
  CHECK(dy.shape[0] == x.shape[0] && s[s.rank - 2] == dy.shape[1] && s[s.rank - 1] == x.shape[1],
        "{}: dy is {}, x is {}, dw_accum is {}", op, dy.shape.str(), x.shape.str(), s.str());
}

}  // namespace

Shape panel_shape(const Shape& rows) {
  CHECK(rows.rank == 2 || rows.rank == 3, "panels of a weight of shape {}", rows.str());
  if (rows.rank == 2) return {(rows[0] + kPanelWidth - 1) / kPanelWidth, rows[1], kPanelWidth};
  return {rows[0], (rows[1] + kPanelWidth - 1) / kPanelWidth, rows[2], kPanelWidth};
}

WeightView columns_of(const WeightView& w, int64_t begin, int64_t count) {
  WeightView columns = {w.rows.cols(begin, count), {}};
  if (w.panels.empty()) return columns;
  const int64_t panels = w.panels.dim(0), k = w.panels.dim(1);  // column k of the matrix is row k of each panel
  columns.panels = w.panels.reshape({panels, k * kPanelWidth}).cols(begin * kPanelWidth, count * kPanelWidth);
  columns.panels.shape = {panels, count, kPanelWidth};
  return columns;
}

void pack_panels(Context& c, TensorView panels, ConstTensorView rows) {
  check_weight("pack_panels", {rows, {}}, rows.shape.rank == 3 ? 1 : 0);
  CHECK(panels.dtype == rows.dtype && panels.shape == panel_shape(rows.shape) && panels.contiguous(),
        "pack_panels: panels are {} {}, rows are {} {}, wanted contiguous panels {}", dtype_name(panels.dtype),
        panels.shape.str(), dtype_name(rows.dtype), rows.shape.str(), panel_shape(rows.shape).str());
  simd::pack_panels(c, panels, rows);
}

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) {
  check_weight("matmul", w, 0);
  check_forward("matmul", y, x, w.rows.shape);
  CHECK(k_segment >= 0, "matmul: k_segment {}", k_segment);
  simd::matmul(c, y, x, w, k_segment);
}

void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate) {
  check_weight("matmul_backward_input", w, 0);
  check_backward_input("matmul_backward_input", dx, dy, w.rows.shape);
  simd::matmul_backward_input(c, dx, dy, w, accumulate);
}

void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x) {
  check_backward_weight("matmul_backward_weight", dw_accum, dy, x, 0);
  simd::matmul_backward_weight(c, dw_accum, dy, x);
}

void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) {
  check_weight("grouped_matmul", w, 1);
  check_forward("grouped_matmul", y, x, w.rows.shape);
  check_offsets("grouped_matmul", offsets, w.rows.shape[0], x.rows());
  simd::grouped_matmul(c, y, x, w, offsets);
}

void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets,
                                   bool accumulate) {
  check_weight("grouped_matmul_backward_input", w, 1);
  check_backward_input("grouped_matmul_backward_input", dx, dy, w.rows.shape);
  check_offsets("grouped_matmul_backward_input", offsets, w.rows.shape[0], dx.rows());
  simd::grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate);
}

void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                                    ConstTensorView offsets) {
  check_backward_weight("grouped_matmul_backward_weight", dw_accum, dy, x, 1);
  check_offsets("grouped_matmul_backward_weight", offsets, dw_accum.shape[0], x.rows());
  simd::grouped_matmul_backward_weight(c, dw_accum, dy, x, offsets);
}

}  // namespace lockstep
