#include "ops/swiglu/swiglu.h"

#include "ops/swiglu/swiglu_cpu.h"

namespace lockstep {

namespace {

void check_inputs(const char* op, ConstTensorView g, ConstTensorView u, ConstTensorView rho) {
  CHECK(g.shape.rank == 2 && u.shape == g.shape, "{}: g {}, u {}", op, g.shape.str(), u.shape.str());
  CHECK((g.dtype == DType::f32 || g.dtype == DType::bf16) && u.dtype == g.dtype, "{}: g {}, u {}", op, dtype_name(g.dtype),
        dtype_name(u.dtype));
  CHECK(rho.data == nullptr || (rho.dtype == DType::f32 && rho.shape == Shape{g.dim(0)} && rho.contiguous()),
        "{}: rho {} {} for g {}", op, dtype_name(rho.dtype), rho.shape.str(), g.shape.str());
}

}  // namespace

void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  check_inputs("swiglu", g, u, rho);
  CHECK(a.shape == g.shape && a.dtype == g.dtype, "swiglu: a {} {}, g {} {}", dtype_name(a.dtype), a.shape.str(),
        dtype_name(g.dtype), g.shape.str());
  if (g.empty()) return;
  c.on_gpu() ? device::swiglu(c, a, g, u, rho, limit) : simd::swiglu(c, a, g, u, rho, limit);
}

void swiglu(Context& c, const MatmulInput& a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  if (!a.quantized()) return swiglu(c, a.x, g, u, rho, limit);
  check_inputs("swiglu", g, u, rho);
  CHECK(a.codes.shape == g.shape && a.scales.shape == Shape({g.dim(0), num_blocks(g.dim(1), 128)}), "swiglu: codes {}, scales {}, g {}", a.codes.shape.str(),
        a.scales.shape.str(), g.shape.str());
  if (!g.empty()) device::swiglu(c, a.codes, a.scales, g, u, rho, limit);
}

void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g,
                     ConstTensorView u, ConstTensorView rho, float limit) {
  check_inputs("swiglu_backward", g, u, rho);
  CHECK(da.shape == g.shape && dg.shape == g.shape && du.shape == g.shape, "swiglu_backward: g {}, da {}, dg {}, du {}",
        g.shape.str(), da.shape.str(), dg.shape.str(), du.shape.str());
  CHECK(da.dtype == DType::f32 && dg.dtype == DType::f32 && du.dtype == DType::f32, "swiglu_backward: da {}, dg {}, du {}",
        dtype_name(da.dtype), dtype_name(dg.dtype), dtype_name(du.dtype));
  if (g.empty()) return;
  CHECK(dg.data != du.data, "swiglu_backward: dg and du share memory");
  CHECK(rho.empty() == drho.empty() &&
            (drho.empty() || (drho.dtype == DType::f32 && drho.shape == rho.shape && drho.contiguous())),
        "swiglu_backward: drho {} {}, rho {}", dtype_name(drho.dtype), drho.shape.str(), rho.shape.str());
  c.on_gpu() ? device::swiglu_backward(c, dg, du, drho, da, g, u, rho, limit)
             : simd::swiglu_backward(c, dg, du, drho, da, g, u, rho, limit);
}

}  // namespace lockstep
