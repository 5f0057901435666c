#include "ops/rope/rope.h"

#include "ops/rope/rope_cpu.h"

namespace lockstep {

void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  CHECK(x.shape.rank == 2 && pos.shape.rank == 1 && table.shape.rank == 2 && x.dim(0) == pos.dim(0),
        "rope: x {}, pos {}, table {}", x.shape.str(), pos.shape.str(), table.shape.str());
  CHECK((x.dtype == DType::f32 || x.dtype == DType::bf16) && pos.dtype == DType::i32 && table.dtype == DType::f32,
        "rope: x {}, pos {}, table {}", dtype_name(x.dtype), dtype_name(pos.dtype), dtype_name(table.dtype));
  CHECK(heads >= 1 && x.dim(1) % heads == 0 && table.dim(1) % 2 == 0 && x.dim(1) / heads >= table.dim(1),
        "rope: {} heads of x {}, table {}", heads, x.shape.str(), table.shape.str());
  if (x.empty()) return;
  CHECK(pos.contiguous(), "rope: positions with stride {}", pos.row_stride);
  if (c.on_gpu()) return device::rope(c, x, pos, table, heads, inverse);
  const int32_t* p = pos.ptr<int32_t>();
  for (int64_t t = 0; t < pos.rows(); ++t)
    CHECK(p[t] >= 0 && p[t] < table.dim(0), "rope: position {} of row {}, table {}", p[t], t, table.shape.str());
  simd::rope(c, x, pos, table, heads, inverse);
}

}  // namespace lockstep
