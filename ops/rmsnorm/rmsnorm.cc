#include "ops/rmsnorm/rmsnorm.h"

#include "ops/rmsnorm/rmsnorm_cpu.h"
#include "ops/rope/rope.h"

namespace lockstep {

namespace {

bool is_vector(ConstTensorView v, int64_t n) {
  return v.dtype == DType::f32 && v.shape == Shape{n} && v.contiguous();
}

void check_forward(const char* op, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w) {
  CHECK(x.shape.rank == 2 && y.shape == x.shape && x.dim(1) >= 1, "{}: x {}, y {}", op, x.shape.str(), y.shape.str());
  CHECK((x.dtype == DType::f32 || x.dtype == DType::bf16) && y.dtype == x.dtype, "{}: x {}, y {}", op, dtype_name(x.dtype),
        dtype_name(y.dtype));
  if (x.empty()) return;
  CHECK(w.empty() || is_vector(w, x.dim(1)), "{}: w {} {} for x {}", op, dtype_name(w.dtype), w.shape.str(), x.shape.str());
  CHECK(inv.empty() || is_vector(inv, x.dim(0)), "{}: inv {} {} for x {}", op, dtype_name(inv.dtype), inv.shape.str(), x.shape.str());
}

}  // namespace

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  check_forward("rmsnorm", y, inv, x, w);
  if (x.empty()) return;
  c.on_gpu() ? device::rmsnorm(c, y, inv, x, w, eps) : simd::rmsnorm(c, y, inv, x, w, eps);
}

void rmsnorm_rope(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps, ConstTensorView pos, ConstTensorView table,
                  int64_t heads) {
  check_forward("rmsnorm_rope", y, inv, x, w);
  if (x.empty()) return;
  const int64_t n = x.dim(1), rotary = table.shape.rank == 2 ? table.dim(1) : 0;
  CHECK(y.contiguous() && heads >= 1 && x.rows() % heads == 0, "rmsnorm_rope: y {} with stride {}, {} heads", y.shape.str(), y.row_stride, heads);
  CHECK(pos.dtype == DType::i32 && pos.shape == Shape{x.rows() / heads} && pos.contiguous() && table.dtype == DType::f32 && table.shape.rank == 2 &&
            rotary % 2 == 0 && rotary <= n,
        "rmsnorm_rope: {} heads of x {}, pos {} {}, table {} {}", heads, x.shape.str(), dtype_name(pos.dtype), pos.shape.str(), dtype_name(table.dtype),
        table.shape.str());
  if (c.on_gpu() && rotary > 0 && (n - rotary) % 8 == 0) return device::rmsnorm_rope(c, y, inv, x, w, eps, pos, table, heads);
  rmsnorm(c, y, inv, x, w, eps);
  rope(c, y.reshape({x.rows() / heads, heads * n}), pos, table, heads, /*inverse=*/false);
}

void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                      ConstTensorView w, ConstTensorView inv, bool accumulate) {
  CHECK(x.shape.rank == 2 && dx.shape == x.shape && dy.shape == x.shape && x.dim(1) >= 1, "rmsnorm_backward: x {}, dx {}, dy {}",
        x.shape.str(), dx.shape.str(), dy.shape.str());
  CHECK((x.dtype == DType::f32 || x.dtype == DType::bf16) && dx.dtype == DType::f32 && dy.dtype == DType::f32,
        "rmsnorm_backward: x {}, dx {}, dy {}", dtype_name(x.dtype), dtype_name(dx.dtype), dtype_name(dy.dtype));
  if (x.empty()) return;
  CHECK(w.empty() || is_vector(w, x.dim(1)), "rmsnorm_backward: w {} {} for x {}", dtype_name(w.dtype), w.shape.str(),
        x.shape.str());
  CHECK(dw_accum.empty() || (!w.empty() && is_vector(dw_accum, x.dim(1))), "rmsnorm_backward: dw {} {} with w {} for x {}",
        dtype_name(dw_accum.dtype), dw_accum.shape.str(), w.shape.str(), x.shape.str());
  CHECK(is_vector(inv, x.dim(0)), "rmsnorm_backward: inv {} {} for x {}", dtype_name(inv.dtype), inv.shape.str(), x.shape.str());
  CHECK(!(accumulate && dx.data == dy.data), "rmsnorm_backward: dx cannot be dy and be added to");
  c.on_gpu() ? device::rmsnorm_backward(c, dx, dw_accum, dy, x, w, inv, accumulate)
             : simd::rmsnorm_backward(c, dx, dw_accum, dy, x, w, inv, accumulate);
}

}  // namespace lockstep
