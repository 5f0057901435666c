#include "ops/rows/rows.h"

#include <cstring>
#include <numeric>

namespace lockstep {

void scatter_rows(Context& c, TensorView out, ConstTensorView x, ConstTensorView index) {
  CHECK(out.shape.rank == 2 && x.shape.rank == 2 && out.dim(1) == x.dim(1) && out.dtype == x.dtype && index.dtype == DType::i32 &&
            index.shape == Shape{x.rows()},
        "scatter_rows: x {} {}, out {} {}, index {} {}", dtype_name(x.dtype), x.shape.str(), dtype_name(out.dtype), out.shape.str(), dtype_name(index.dtype),
        index.shape.str());
  if (x.empty()) return;
  if (c.on_gpu()) return device::scatter_rows(c, out, x, index);
  const size_t element = dtype_bytes(x.dtype), bytes = static_cast<size_t>(x.dim(1)) * element;
  parallel_for(c, x.rows(), x.dim(1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t to = index.ptr<int32_t>()[r];
      CHECK(to >= 0 && to < out.rows(), "scatter_rows: index {} of {} rows", to, out.rows());
      std::memcpy(static_cast<char*>(out.data) + static_cast<size_t>(to * out.row_stride) * element,
                  static_cast<const char*>(x.data) + static_cast<size_t>(r * x.row_stride) * element, bytes);
    }
  });
}

void copy_rows(Context& c, TensorView out, ConstTensorView x) {
  CHECK(out.shape.rank == 2 && out.shape == x.shape && out.dtype == x.dtype, "copy_rows: x {} {}, out {} {}", dtype_name(x.dtype), x.shape.str(),
        dtype_name(out.dtype), out.shape.str());
  if (x.empty()) return;
  if (c.on_gpu()) return device::copy_rows(c, out, x);
  char* const to = static_cast<char*>(out.data);
  const char* const from = static_cast<const char*>(x.data);
  if (out.contiguous() && x.contiguous()) {
    parallel_for(c, static_cast<int64_t>(x.bytes()), 1, [&](int64_t b, int64_t e, int) { std::memcpy(to + b, from + b, static_cast<size_t>(e - b)); });
    return;
  }
  const auto element = static_cast<int64_t>(dtype_bytes(x.dtype)), bytes = x.dim(1) * element;
  parallel_for(c, x.rows(), bytes, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) std::memcpy(to + r * out.row_stride * element, from + r * x.row_stride * element, static_cast<size_t>(bytes));
  });
}

void number_rows(Context& c, TensorView v) {
  CHECK(v.dtype == DType::i32 && v.shape.rank == 1, "number_rows: {} {}", dtype_name(v.dtype), v.shape.str());
  if (v.empty()) return;
  if (c.on_gpu()) return device::number_rows(c, v);
  std::iota(v.ptr<int32_t>(), v.ptr<int32_t>() + v.rows(), 0);
}

}  // namespace lockstep
