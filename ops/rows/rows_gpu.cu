// Moves of rows: bound by memory, 4 TB/s on an H200 counting reads and writes.

#include "core/gpu.h"
#include "ops/rows/rows.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 256;

template <typename T>
GPU_KERNEL scatter_kernel(T* out, int64_t out_stride, const T* x, int64_t x_stride, const int32_t* index, int64_t width) {
  const int64_t r = block_y();
  T* const to = out + index[r] * out_stride;
  for (int64_t i = static_cast<int64_t>(block_x()) * kThreads + thread_x(); i < width; i += static_cast<int64_t>(grid_dim()) * kThreads) to[i] = x[r * x_stride + i];
}

GPU_KERNEL number_kernel(int32_t* v, int64_t n) {
  const int64_t i = static_cast<int64_t>(block_x()) * kThreads + thread_x();
  if (i < n) v[i] = static_cast<int32_t>(i);
}

template <typename T>
void scatter(Context& c, TensorView out, ConstTensorView x, ConstTensorView index) {
  constexpr int64_t kRowsMax = 65535;  // of a grid's second dimension
  for (int64_t first = 0; first < x.rows(); first += kRowsMax) {
    const int64_t rows = x.rows() - first < kRowsMax ? x.rows() - first : kRowsMax;
    launch(c, "scatter_rows", {.blocks = blocks_for(x.dim(1), 4 * kThreads), .threads = kThreads, .blocks_y = rows}, scatter_kernel<T>, out.ptr<T>(), out.row_stride,
           x.row<T>(first), x.row_stride, index.ptr<int32_t>() + first, x.dim(1));
  }
}

}  // namespace

void scatter_rows(Context& c, TensorView out, ConstTensorView x, ConstTensorView index) {
  x.dtype == DType::f32 ? scatter<float>(c, out, x, index) : scatter<bf16>(c, out, x, index);
}
void number_rows(Context& c, TensorView v) {
  launch(c, "number_rows", {.blocks = blocks_for(v.rows(), kThreads), .threads = kThreads}, number_kernel, v.ptr<int32_t>(), v.rows());
}

}  // namespace lockstep::device
