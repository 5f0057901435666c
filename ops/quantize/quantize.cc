#include "ops/quantize/quantize.h"

#include <cmath>

#include "ops/quantize/quantize_cpu.h"

namespace lockstep {

namespace {

bool is_code(DType t) { return t == DType::e4m3 || t == DType::e5m2 || t == DType::e2m1x2; }

// q describes a matrix [rows, cols].
void check_quantised(const char* op, const ConstQuantView& q, int64_t rows, int64_t cols) {
  CHECK(is_code(q.codes.dtype) && (q.scales.dtype == DType::f32 || q.scales.dtype == DType::ue8m0), "{}: codes {}, scales {}", op,
        dtype_name(q.codes.dtype), dtype_name(q.scales.dtype));
  const bool packed = q.codes.dtype == DType::e2m1x2;
  CHECK(q.block_rows > 0 && q.block_cols > 0 && !(packed && q.block_cols % 2), "{}: blocks of {} x {} {}", op, q.block_rows,
        q.block_cols, dtype_name(q.codes.dtype));
  const QuantFormat f{q.codes.dtype, q.scales.dtype, q.block_rows, q.block_cols};
  CHECK(q.codes.shape == code_shape(f, rows, cols), "{}: codes {}, {} is wanted for [{}, {}] in {}", op, q.codes.shape.str(),
        code_shape(f, rows, cols).str(), rows, cols, dtype_name(q.codes.dtype));
  CHECK(q.scales.shape == scale_shape(f, rows, cols), "{}: scales {}, {} is wanted for [{}, {}] in blocks of {} x {}", op,
        q.scales.shape.str(), scale_shape(f, rows, cols).str(), rows, cols, q.block_rows, q.block_cols);
}

void check_dense(const char* op, const ConstTensorView& x) {
  CHECK(x.shape.rank == 2 && (x.dtype == DType::f32 || x.dtype == DType::bf16), "{}: {} {}, a matrix of f32 or bf16 is wanted", op,
        dtype_name(x.dtype), x.shape.str());
}

}  // namespace

QuantStats quantize(Context& c, QuantView q, ConstTensorView x, float amax_floor) {
  check_dense("quantize", x);
  check_quantised("quantize", q, x.rows(), x.dim(1));
  CHECK(amax_floor >= 0 && std::isfinite(amax_floor), "quantize: amax_floor {}", amax_floor);
  if (x.empty()) return {};
  if (!c.on_gpu()) return simd::quantize(c, q, x, amax_floor, false);
  device::quantize(c, q, x, ScaleRule::of_format, amax_floor);
  return {};
}

QuantStats quantize_given_scales(Context& c, QuantView q, ConstTensorView x) {
  check_dense("quantize_given_scales", x);
  check_quantised("quantize_given_scales", q, x.rows(), x.dim(1));
  if (x.empty()) return {};
  if (c.on_gpu()) {
    device::quantize(c, q, x, ScaleRule::given, 0);
    return {};
  }
  for (int64_t i = 0; i < q.scales.rows(); ++i)
    for (int64_t j = 0; j < q.scales.dim(1); ++j) {
      const float s = q.scale(i, j);
      CHECK(s >= 0x1p-126f && std::isfinite(s), "quantize_given_scales: scales[{}, {}] is {}", i, j, s);
    }
  return simd::quantize(c, q, x, 0, true);
}

QuantStats quant_stats(Context& c, ConstQuantView q, ConstTensorView x) {
  check_dense("quant_stats", x);
  check_quantised("quant_stats", q, x.rows(), x.dim(1));
  if (x.empty()) return {};
  return c.on_gpu() ? device::quant_stats(c, q, x) : reference::quant_stats(q, x);
}

void dequantize(Context& c, TensorView y, ConstQuantView q) {
  check_dense("dequantize", y);
  check_quantised("dequantize", q, y.rows(), y.dim(1));
  if (y.empty()) return;
  c.on_gpu() ? device::dequantize(c, y, q) : simd::dequantize(c, y, q);
}

void round_through(Context& c, TensorView x, const QuantFormat& f) {
  ArenaScope scope(*c.workspace);
  const QuantView q(c.workspace->tensor(f.codes, code_shape(f, x.rows(), x.dim(1)), "quantize codes"),
                    c.workspace->tensor(f.scales, scale_shape(f, x.rows(), x.dim(1)), "quantize scales"), f.block_rows, f.block_cols);
  quantize(c, q, x, f.amax_floor);
  dequantize(c, x, q);
}

RecodeStats recode_fp4(Context& c, QuantView to, TensorView lossy, ConstQuantView from) {
  CHECK(from.codes.dtype == DType::e2m1x2 && from.scales.dtype == DType::ue8m0 && from.block_rows == 1,
        "recode_fp4: from codes {}, scales {}, {} rows a block", dtype_name(from.codes.dtype), dtype_name(from.scales.dtype),
        from.block_rows);
  CHECK(to.codes.dtype == DType::e4m3 && from.codes.shape.rank == 2, "recode_fp4: to {} from {}", dtype_name(to.codes.dtype),
        from.codes.shape.str());
  check_quantised("recode_fp4: from", from, from.rows(), from.code_cols());
  check_quantised("recode_fp4: to", to, from.rows(), from.code_cols());
  CHECK(to.block_cols % from.block_cols == 0, "recode_fp4: blocks of {} columns from blocks of {}", to.block_cols, from.block_cols);
  const bool mark = lossy.data != nullptr;
  CHECK(!mark || (lossy.dtype == DType::u8 && lossy.shape == to.scales.shape), "recode_fp4: lossy {} {}, scales {}",
        dtype_name(lossy.dtype), lossy.shape.str(), to.scales.shape.str());
  if (from.codes.empty()) return {};
  if (!c.on_gpu()) return simd::recode_fp4(c, to, lossy, from);
  device::recode_fp4(c, to, lossy, from);
  return {};
}

}  // namespace lockstep
