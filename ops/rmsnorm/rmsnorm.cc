#include "ops/rmsnorm/rmsnorm.h"

#include "ops/rmsnorm/rmsnorm_cpu.h"

namespace lockstep {

namespace {

bool is_vector(ConstTensorView v, int64_t n) {
  return v.dtype == DType::f32 && v.shape == Shape{n} && v.contiguous();
}

}  // namespace

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  CHECK(x.shape.rank == 2 && y.shape == x.shape && x.dim(1) >= 1, "rmsnorm: x {}, y {}", x.shape.str(), y.shape.str());
  CHECK((x.dtype == DType::f32 || x.dtype == DType::bf16) && y.dtype == x.dtype, "rmsnorm: x {}, y {}", dtype_name(x.dtype),
        dtype_name(y.dtype));
  if (x.empty()) return;
  CHECK(w.empty() || is_vector(w, x.dim(1)), "rmsnorm: w {} {} for x {}", dtype_name(w.dtype), w.shape.str(), x.shape.str());
  CHECK(inv.empty() || is_vector(inv, x.dim(0)), "rmsnorm: inv {} {} for x {}", dtype_name(inv.dtype), inv.shape.str(),
        x.shape.str());
  c.on_gpu() ? device::rmsnorm(c, y, inv, x, w, eps) : simd::rmsnorm(c, y, inv, x, w, eps);
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
