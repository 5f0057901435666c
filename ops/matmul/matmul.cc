#include "ops/matmul/matmul.h"

#include <cstring>

#include "core/formats.h"
#include "ops/matmul/matmul_cpu.h"
#include "ops/moe_permute/moe_permute.h"

namespace lockstep {

namespace {

bool is_float(DType t) { return t == DType::f32 || t == DType::bf16; }
bool is_code(DType t) { return t == DType::e4m3 || t == DType::e2m1x2; }

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
  CHECK(s.rank == 2 + experts && (w.quantized() ? is_code(w.rows.dtype) : is_float(w.rows.dtype)), "{}: w is {} {}, wanted {} of {}", op,
        dtype_name(w.rows.dtype), s.str(), experts == 0 ? "[N, K]" : "[E, N, K]", w.quantized() ? "e4m3 or e2m1x2" : "f32 or bf16");
  CHECK(w.rows.rows() <= 1 || w.rows.row_stride >= s.row_elements(), "{}: w is {} with a stride of {}", op, s.str(),
        w.rows.row_stride);
  if (w.panels.empty()) return;
  const int64_t stride = panel_shape(s).row_elements();  // columns of a wider matrix have panels further apart
  CHECK(w.panels.dtype == w.rows.dtype && w.panels.shape == panel_shape(s) &&
            (w.panels.contiguous() || (experts == 0 && w.panels.row_stride >= stride)),
        "{}: panels are {} {} with a stride of {}, w is {} {}, wanted panels {}", op, dtype_name(w.panels.dtype),
        w.panels.shape.str(), w.panels.row_stride, dtype_name(w.rows.dtype), s.str(), panel_shape(s).str());
}

// What check_weight does not know: K, which codes of two a byte do not tell.
void check_quantized(const char* op, const WeightView& w, int64_t k) {
  const Shape& s = w.rows.shape;
  const int e = s.rank - 2;
  const int64_t n = s[e], bytes = w.rows.dtype == DType::e2m1x2 ? (k + 1) / 2 : k;
  CHECK(s[e + 1] == bytes, "{}: w is {} {} for {} columns", op, dtype_name(w.rows.dtype), s.str(), k);
  CHECK(w.row_grid.block > 0 && w.col_grid.block > 0 && 128 % w.col_grid.block == 0 && (w.rows.dtype == DType::e4m3 || w.col_grid.period == 0) &&
            (w.rows.dtype == DType::e4m3 || w.col_grid.block % 2 == 0),
        "{}: blocks of {} x {}, columns anew every {}, of {}", op, w.row_grid.block, w.col_grid.block, w.col_grid.period, dtype_name(w.rows.dtype));
  const int64_t row_blocks = w.row_grid.blocks_in(n), col_blocks = w.col_grid.blocks_in(k);
  const Shape wanted = e == 0 ? Shape{row_blocks, col_blocks} : Shape{s[0], row_blocks, col_blocks};
  CHECK(w.scales.dtype == DType::ue8m0 && w.scales.shape == wanted, "{}: scales are {} {}, wanted ue8m0 {}", op, dtype_name(w.scales.dtype),
        w.scales.shape.str(), wanted.str());
  CHECK(w.panels.empty() || (w.panel_scales.dtype == DType::f32 && w.panel_scales.shape == panel_scale_shape(w)),
        "{}: panel scales are {} {}, wanted f32 {}", op, dtype_name(w.panel_scales.dtype), w.panel_scales.shape.str(), panel_scale_shape(w).str());
}

// w's last two dimensions in numbers, [N, K].
Shape numbers(const char* op, const WeightView& w, int64_t k) {
  Shape s = w.rows.shape;
  if (!w.quantized()) return s;
  check_quantized(op, w, k);
  s.dims[static_cast<size_t>(s.rank - 1)] = k;
  return s;
}

void check_offsets(const Context& c, const char* op, ConstTensorView offsets, int64_t experts, int64_t rows) {
  CHECK(offsets.shape == Shape({experts + 1}) && offsets.dtype == DType::i32 && offsets.row_stride == 1,
        "{}: offsets are {} {}, wanted i32 [{}]", op, dtype_name(offsets.dtype), offsets.shape.str(), experts + 1);
  if (c.on_gpu()) return;
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

void check_product(const char* op, ConstTensorView y, ConstTensorView x, const WeightView& w, int experts) {
  check_weight(op, w, experts);
  check_forward(op, y, x, numbers(op, w, x.dim(1)));
}

// The same of an x that is there in codes, for the kernels that matmul_input saw to.
void check_codes(const char* op, ConstTensorView y, const MatmulInput& x, const WeightView& w, int experts) {
  ConstTensorView as_read = x.codes;
  as_read.dtype = DType::bf16;
  check_product(op, y, as_read, w, experts);
  CHECK(w.quantized() && x.codes.dtype == DType::e4m3 && x.scales.dtype == DType::f32 && x.scales.shape == Shape({x.codes.rows(), num_blocks(x.codes.dim(1), 128)}),
        "{}: codes {} {}, scales {} {}", op, dtype_name(x.codes.dtype), x.codes.shape.str(), dtype_name(x.scales.dtype), x.scales.shape.str());
}

void check_backward_input(const char* op, ConstTensorView dx, ConstTensorView dy, const Shape& w) {
  check_f32_matrix(op, "dx", dx);
  check_matrix(op, "dy", dy);
  const int64_t n = w[w.rank - 2], k = w[w.rank - 1];
  CHECK(dy.shape[1] == n && dx.shape[1] == k && dx.shape[0] == dy.shape[0], "{}: dy is {}, w is {}, dx is {}", op,
        dy.shape.str(), w.str(), dx.shape.str());
}

void check_backward_weight(const char* op, ConstTensorView dw, ConstTensorView dy, ConstTensorView x, int experts) {
  check_matrix(op, "dy", dy);
  check_matrix(op, "x", x);
  const Shape& s = dw.shape;
  CHECK(s.rank == 2 + experts && dw.dtype == DType::f32, "{}: dw_accum is {} {}, wanted f32 {}", op, dtype_name(dw.dtype),
        s.str(), experts == 0 ? "[N, K]" : "[E, N, K]");
  CHECK(dw.rows() <= 1 || dw.row_stride >= s.row_elements(), "{}: dw_accum is {} with a stride of {}", op, s.str(),
        dw.row_stride);
  CHECK(dy.shape[0] == x.shape[0] && s[s.rank - 2] == dy.shape[1] && s[s.rank - 1] == x.shape[1],
        "{}: dy is {}, x is {}, dw_accum is {}", op, dy.shape.str(), x.shape.str(), s.str());
}

// w [N, K] in bf16, in the workspace, which the caller's scope releases.
ConstTensorView dequantized(Context& c, const WeightView& w, int64_t k) {
  const int64_t n = w.rows.dim(0);
  const TensorView out = c.workspace->tensor(DType::bf16, {n, k}, "matmul dequantized");
  const int64_t row_pitch = w.row_grid.period == 0 ? n : w.row_grid.period, col_pitch = w.col_grid.period == 0 ? k : w.col_grid.period;
  for (int64_t i = 0; i < n; i += row_pitch)
    for (int64_t j = 0; j < k; j += col_pitch) {
      const int64_t rows = std::min(row_pitch, n - i), cols = std::min(col_pitch, k - j);
      const ConstTensorView codes = w.rows.slice(i, rows);
      const ConstTensorView scales = w.scales.slice(w.row_grid.block_of(i), BlockGrid{w.row_grid.block, 0}.blocks_in(rows));
      dequantize(c, out.slice(i, rows).cols(j, cols),
                 {col_pitch == k ? codes : codes.cols(j, cols), scales.cols(w.col_grid.block_of(j), BlockGrid{w.col_grid.block, 0}.blocks_in(cols)),
                  w.row_grid.block, w.col_grid.block});
    }
  return out;
}

// What pack_panel_scales puts into scales for the kernels' decoding.
float left_out(DType codes) { return codes == DType::e4m3 ? 0x1p8f : 0.5f; }

// Column k, lane j of a panel.
float panel_number(ConstTensorView panel, int64_t k, int64_t j) {
  switch (panel.dtype) {
    case DType::f32: return panel.ptr<float>()[k * kPanelWidth + j];
    case DType::bf16: return to_f32(panel.ptr<bf16>()[k * kPanelWidth + j]);
    case DType::e4m3: return to_f32(panel.ptr<e4m3>()[k * kPanelWidth + j]);
    default: {
      const e2m1x2 two = panel.ptr<e2m1x2>()[k / 2 * kPanelWidth + j];
      return k % 2 == 0 ? low_to_f32(two) : high_to_f32(two);
    }
  }
}

}  // namespace

Shape panel_shape(const Shape& rows) {
  CHECK(rows.rank == 2 || rows.rank == 3, "panels of a weight of shape {}", rows.str());
  if (rows.rank == 2) return {(rows[0] + kPanelWidth - 1) / kPanelWidth, rows[1], kPanelWidth};
  return {rows[0], (rows[1] + kPanelWidth - 1) / kPanelWidth, rows[2], kPanelWidth};
}

WeightView columns_of(const WeightView& w, int64_t begin, int64_t count) {
  WeightView columns = {w.rows.cols(begin, count), {}};
  int64_t first_block = 0, blocks = 0;
  if (w.quantized()) {
    CHECK(w.rows.dtype == DType::e4m3 && w.col_grid.period > 0 && begin % w.col_grid.period == 0 && count % w.col_grid.period == 0,
          "columns [{}, {}) of a weight whose blocks begin every {}", begin, begin + count, w.col_grid.period);
    first_block = w.col_grid.blocks_in(begin);
    blocks = w.col_grid.blocks_in(count);
    columns.row_grid = w.row_grid;
    columns.col_grid = w.col_grid;
    columns.scales = w.scales.cols(first_block, blocks);
  }
  if (w.panels.empty()) return columns;
  const int64_t panels = w.panels.dim(0), k = w.panels.dim(1);  // column k of the matrix is row k of each panel
  columns.panels = w.panels.reshape({panels, k * kPanelWidth}).cols(begin * kPanelWidth, count * kPanelWidth);
  columns.panels.shape = {panels, count, kPanelWidth};
  if (w.quantized()) {
    columns.panel_scales = w.panel_scales.reshape({panels, w.panel_scales.dim(1) * kPanelWidth}).cols(first_block * kPanelWidth, blocks * kPanelWidth);
    columns.panel_scales.shape = {panels, blocks, kPanelWidth};
  }
  return columns;
}

WeightView WeightView::at(int64_t e) const {
  const auto part = [e](const ConstTensorView& v) { return v.data == nullptr ? ConstTensorView() : v.at(e); };
  return {part(rows), part(panels), part(scales), part(panel_scales), row_grid, col_grid};
}

Shape panel_scale_shape(const WeightView& w) {
  const Shape panels = panel_shape(w.rows.shape);
  const int64_t blocks = w.scales.shape[w.scales.shape.rank - 1];
  return panels.rank == 3 ? Shape{panels[0], blocks, kPanelWidth} : Shape{panels[0], panels[1], blocks, kPanelWidth};
}

void pack_panel_scales(Context& c, TensorView panel_scales, const WeightView& w) {
  CHECK(panel_scales.dtype == DType::f32 && panel_scales.shape == panel_scale_shape(w) && panel_scales.contiguous(),
        "pack_panel_scales: {} {}, wanted contiguous f32 {}", dtype_name(panel_scales.dtype), panel_scales.shape.str(), panel_scale_shape(w).str());
  const bool grouped = w.rows.shape.rank == 3;
  const int64_t n = w.rows.shape[grouped], experts = grouped ? w.rows.shape[0] : 1;
  const int64_t panels = (n + kPanelWidth - 1) / kPanelWidth, blocks = panel_scales.shape[grouped + 1];
  const float factor = left_out(w.rows.dtype);
  parallel_for(c, experts * panels, blocks * kPanelWidth, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const ConstTensorView scales = grouped ? w.scales.at(i / panels) : w.scales;
      float* to = panel_scales.ptr<float>() + i * blocks * kPanelWidth;
      for (int64_t j = 0; j < kPanelWidth; ++j) {
        const int64_t row = i % panels * kPanelWidth + j;
        const ue8m0* from = row < n ? scales.row<ue8m0>(w.row_grid.block_of(row)) : nullptr;
        for (int64_t b = 0; b < blocks; ++b) to[b * kPanelWidth + j] = from == nullptr ? 0.0f : to_f32(from[b]) * factor;
      }
    }
  });
}

void unpack_panels(Context& c, TensorView out, const WeightView& w) {
  const Shape& s = out.shape;
  const int e = w.rows.shape.rank - 2;
  CHECK(out.dtype == DType::f32 && out.contiguous() && s.rank == 2 + e && !w.panels.empty(), "unpack_panels: out is {} {}, w is {}, its panels {}",
        dtype_name(out.dtype), s.str(), w.rows.shape.str(), w.panels.shape.str());
  check_weight("unpack_panels", w, e);
  CHECK(s == numbers("unpack_panels", w, s[e + 1]), "unpack_panels: out is {}, w is {}", s.str(), w.rows.shape.str());
  const int64_t n = s[e], k = s[e + 1], rows = e == 0 ? n : s[0] * n;
  parallel_for(c, rows, 4 * k, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t panel = i % n / kPanelWidth, lane = i % n % kPanelWidth;
      const auto of = [&](const ConstTensorView& v) { return e == 0 ? v.at(panel) : v.at(i / n).at(panel); };
      const ConstTensorView codes = of(w.panels);
      const float* scales = w.quantized() ? of(w.panel_scales).ptr<float>() + lane : nullptr;
      float* to = out.ptr<float>() + i * k;
      for (int64_t j = 0; j < k; ++j) {
        to[j] = panel_number(codes, j, lane);
        if (scales != nullptr) to[j] *= scales[w.col_grid.block_of(j) * kPanelWidth] / left_out(w.rows.dtype);
      }
    }
  });
}

QuantStats quantize_by_grid(Context& c, TensorView codes, TensorView scales, const BlockGrid& row_grid, const BlockGrid& col_grid, ConstTensorView x,
                            float amax_floor) {
  const auto flat = [](auto v) { return v.shape.rank == 3 ? v.reshape({v.shape[0] * v.shape[1], v.shape[2]}) : v; };
  codes = flat(codes), scales = flat(scales), x = flat(x);
  // Periods of whole blocks are no cut.
  const auto pitch = [](const BlockGrid& grid, int64_t size) { return grid.period == 0 || grid.period % grid.block == 0 ? size : grid.period; };
  const int64_t n = x.dim(0), k = x.dim(1), row_pitch = pitch(row_grid, n), col_pitch = pitch(col_grid, k);
  QuantStats stats;
  for (int64_t i = 0; i < n; i += row_pitch)
    for (int64_t j = 0; j < k; j += col_pitch) {
      const int64_t rows = std::min(row_pitch, n - i), cols = std::min(col_pitch, k - j);
      const BlockGrid in_rows = {row_grid.block, 0}, in_cols = {col_grid.block, 0};
      const TensorView part = codes.slice(i, rows), part_scales = scales.slice(row_grid.block_of(i), in_rows.blocks_in(rows));
      const QuantView q(col_pitch == k ? part : part.cols(j, cols), part_scales.cols(col_grid.block_of(j), in_cols.blocks_in(cols)), row_grid.block,
                        col_grid.block);
      const ConstTensorView from = x.slice(i, rows).cols(j, cols);
      stats += quantize(c, q, from, amax_floor);
      if (c.on_gpu()) stats += quant_stats(c, q, from);
    }
  return stats;
}

void pack_panels(Context& c, TensorView panels, ConstTensorView rows) {
  if (!is_code(rows.dtype)) check_weight("pack_panels", {rows, {}}, rows.shape.rank == 3 ? 1 : 0);
  CHECK(panels.dtype == rows.dtype && panels.shape == panel_shape(rows.shape) && panels.contiguous(),
        "pack_panels: panels are {} {}, rows are {} {}, wanted contiguous panels {}", dtype_name(panels.dtype),
        panels.shape.str(), dtype_name(rows.dtype), rows.shape.str(), panel_shape(rows.shape).str());
  simd::pack_panels(c, panels, rows);
}

void unpack_panels(Context& c, TensorView rows, ConstTensorView panels) {
  CHECK(panels.dtype == rows.dtype && panels.shape == panel_shape(rows.shape) && panels.contiguous() && rows.contiguous(),
        "unpack_panels: {} {} to {} {}", dtype_name(panels.dtype), panels.shape.str(), dtype_name(rows.dtype), rows.shape.str());
  const bool grouped = rows.shape.rank == 3;
  const int64_t n = rows.shape[grouped], k = rows.shape[grouped + 1], all = grouped ? rows.shape[0] * n : n;
  const size_t width = dtype_bytes(rows.dtype);
  parallel_for(c, all, k, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t panel = i / n * num_blocks(n, kPanelWidth) + i % n / kPanelWidth, column = i % n % kPanelWidth;
      const char* from = static_cast<const char*>(panels.data) + static_cast<size_t>(panel * k * kPanelWidth + column) * width;
      char* to = static_cast<char*>(rows.data) + static_cast<size_t>(i * k) * width;
      for (int64_t j = 0; j < k; ++j) std::memcpy(to + static_cast<size_t>(j) * width, from + static_cast<size_t>(j * kPanelWidth) * width, width);
    }
  });
}

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) {
  check_product("matmul", y, x, w, 0);
  CHECK(k_segment >= 0 && (!w.quantized() || k_segment == 0 || k_segment == w.col_grid.period), "matmul: k_segment {}, blocks begin anew every {}", k_segment,
        w.col_grid.period);
  if (c.on_gpu()) return device::matmul(c, y, x, w, k_segment);
  if (w.quantized()) return simd::quantized_matmul(c, y, x, w, k_segment, ConstTensorView());
  simd::matmul(c, y, x, w, k_segment);
}

void matmul_many(Context& c, std::span<const MatmulCall> products) {
  if (!c.on_gpu()) {
    for (const MatmulCall& p : products) matmul(c, p.y, p.x, p.w);
    return;
  }
  for (const MatmulCall& p : products) check_product("matmul_many", p.y, p.x, p.w, 0);
  device::matmul_many(c, products, {}, {});
}

MatmulInput matmul_input(Context& c, DType dtype, int64_t rows, int64_t k, const WeightView& w) {
  if (c.on_gpu() && device::reads_codes(dtype, k, w)) return device::code_input(c, rows, k);
  return {c.workspace->tensor(dtype, {rows, k}, "matmul input")};
}

void matmul(Context& c, TensorView y, const MatmulInput& x, const WeightView& w) {
  if (!x.quantized()) return matmul(c, y, x.x, w);
  check_codes("matmul", y, x, w, 0);
  device::matmul(c, y, x, w, ConstTensorView());
}

void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate) {
  check_weight("matmul_backward_input", w, 0);
  check_backward_input("matmul_backward_input", dx, dy, numbers("matmul_backward_input", w, dx.dim(1)));
  if (c.on_gpu()) return device::matmul_backward_input(c, dx, dy, w, accumulate);
  if (w.quantized()) {
    if (dx.shape.elements() == 0) return;
    ArenaScope scope(*c.workspace);
    return simd::matmul_backward_input(c, dx, dy, {dequantized(c, w, dx.dim(1)), {}}, accumulate);
  }
  simd::matmul_backward_input(c, dx, dy, w, accumulate);
}

void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x) {
  check_backward_weight("matmul_backward_weight", dw_accum, dy, x, 0);
  c.on_gpu() ? device::matmul_backward_weight(c, dw_accum, dy, x) : simd::matmul_backward_weight(c, dw_accum, dy, x);
}

void grouped_matmul_many(Context& c, std::span<const MatmulCall> products, ConstTensorView offsets, const RowsToGather& gather) {
  if (!gather.row_of.empty()) {
    for (const MatmulCall& p : products)
      CHECK(p.x.data == products[0].x.data && p.x.shape == products[0].x.shape && p.y.rows() == gather.row_of.dim(0), "grouped_matmul_many: {} rows of {} to gather for y {}",
            gather.row_of.dim(0), p.x.shape.str(), p.y.shape.str());
    if (!c.on_gpu() || !device::gathers_codes(products)) {
      moe_gather(c, gather.scratch, products[0].x, gather.row_of);
      MatmulCalls gathered;
      for (const MatmulCall& p : products) gathered.push_back({p.y, gather.scratch, p.w});
      return grouped_matmul_many(c, gathered, offsets);
    }
  }
  if (!c.on_gpu()) {
    for (const MatmulCall& p : products) grouped_matmul(c, p.y, p.x, p.w, offsets);
    return;
  }
  for (const MatmulCall& p : products) {
    ConstTensorView x = p.x;
    if (!gather.row_of.empty()) x.shape.dims[0] = gather.row_of.dim(0);
    check_product("grouped_matmul_many", p.y, x, p.w, 1);
    check_offsets(c, "grouped_matmul_many", offsets, p.w.rows.shape[0], x.rows());
  }
  device::matmul_many(c, products, offsets, gather.row_of);
}

ConstTensorView matmul_backward_rows(Context& c, ConstTensorView dy, ConstTensorView dw_accum, ConstTensorView x, const WeightView& w) {
  check_f32_matrix("matmul_backward_rows", "dy", dy);
  return c.on_gpu() ? device::matmul_backward_rows(c, dy, dw_accum, x, w) : dy;
}

void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) {
  check_product("grouped_matmul", y, x, w, 1);
  check_offsets(c, "grouped_matmul", offsets, w.rows.shape[0], x.rows());
  if (c.on_gpu()) return device::grouped_matmul(c, y, x, w, offsets);
  if (w.quantized()) return simd::quantized_matmul(c, y, x, w, 0, offsets);
  simd::grouped_matmul(c, y, x, w, offsets);
}

void grouped_matmul(Context& c, TensorView y, const MatmulInput& x, const WeightView& w, ConstTensorView offsets) {
  if (!x.quantized()) return grouped_matmul(c, y, x.x, w, offsets);
  check_codes("grouped_matmul", y, x, w, 1);
  check_offsets(c, "grouped_matmul", offsets, w.rows.shape[0], x.codes.rows());
  device::matmul(c, y, x, w, offsets);
}

void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets,
                                   bool accumulate) {
  check_weight("grouped_matmul_backward_input", w, 1);
  check_backward_input("grouped_matmul_backward_input", dx, dy, numbers("grouped_matmul_backward_input", w, dx.dim(1)));
  check_offsets(c, "grouped_matmul_backward_input", offsets, w.rows.shape[0], dx.rows());
  if (c.on_gpu()) return device::grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate);
  if (w.quantized()) {  // one expert at a time, so that scratch is one matrix
    const int32_t* at = offsets.ptr<int32_t>();
    for (int64_t e = 0; e < w.rows.shape[0]; ++e) {
      const int64_t rows = at[e + 1] - at[e];
      if (rows == 0 || dx.dim(1) == 0) continue;
      ArenaScope scope(*c.workspace);
      simd::matmul_backward_input(c, dx.slice(at[e], rows), dy.slice(at[e], rows), {dequantized(c, w.at(e), dx.dim(1)), {}}, accumulate);
    }
    return;
  }
  simd::grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate);
}

void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                                    ConstTensorView offsets) {
  check_backward_weight("grouped_matmul_backward_weight", dw_accum, dy, x, 1);
  check_offsets(c, "grouped_matmul_backward_weight", offsets, dw_accum.shape[0], x.rows());
  c.on_gpu() ? device::grouped_matmul_backward_weight(c, dw_accum, dy, x, offsets) : simd::grouped_matmul_backward_weight(c, dw_accum, dy, x, offsets);
}

}  // namespace lockstep
