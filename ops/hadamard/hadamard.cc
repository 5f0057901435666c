#include "ops/hadamard/hadamard.h"

#include <bit>

#include "ops/hadamard/hadamard_cpu.h"

namespace lockstep {

void hadamard(Context& c, TensorView x) {
  CHECK(x.shape.rank == 2 && (x.dtype == DType::f32 || x.dtype == DType::bf16), "hadamard: x is {} {}, wanted a matrix of f32 or bf16", dtype_name(x.dtype),
        x.shape.str());
  CHECK(std::has_single_bit(static_cast<uint64_t>(x.dim(1))), "hadamard: rows of {}, not a power of two", x.dim(1));
  c.on_gpu() ? device::hadamard(c, x) : reference::hadamard(c, x);
}

}  // namespace lockstep
