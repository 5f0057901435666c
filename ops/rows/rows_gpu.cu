// Moves of rows: bound by memory, 4 TB/s on an H200 counting reads and writes.

#include "core/gpu.h"
#include "ops/rows/rows.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 256, kCopies = 4;
constexpr int64_t kRowsMax = 65535;  // of a grid's second dimension

template <typename T>
GPU_KERNEL scatter_kernel(T* out, int64_t out_stride, const T* x, int64_t x_stride, const int32_t* index, int64_t width) {
  const int64_t r = block_y();
  T* const to = out + index[r] * out_stride;
  for (int64_t i = static_cast<int64_t>(block_x()) * kThreads + thread_x(); i < width; i += static_cast<int64_t>(grid_dim()) * kThreads) to[i] = x[r * x_stride + i];
}

// Bytes, in units of sizeof(Unit), of which everything is a multiple.
template <typename Unit>
GPU_KERNEL copy_kernel(char* out, int64_t out_stride, const char* x, int64_t x_stride, int64_t units) {
  Unit* const to = reinterpret_cast<Unit*>(out + block_y() * out_stride);
  const Unit* const from = reinterpret_cast<const Unit*>(x + block_y() * x_stride);
  const int64_t begin = static_cast<int64_t>(block_x()) * kThreads * kCopies + thread_x();
#pragma unroll
  for (int i = 0; i < kCopies; ++i)
    if (const int64_t at = begin + i * kThreads; at < units) to[at] = from[at];
}

GPU_KERNEL number_kernel(int32_t* v, int64_t n) {
  const int64_t i = static_cast<int64_t>(block_x()) * kThreads + thread_x();
  if (i < n) v[i] = static_cast<int32_t>(i);
}

template <typename T>
void scatter(Context& c, TensorView out, ConstTensorView x, ConstTensorView index) {
  for (int64_t first = 0; first < x.rows(); first += kRowsMax) {
    const int64_t rows = x.rows() - first < kRowsMax ? x.rows() - first : kRowsMax;
    launch(c, "scatter_rows", {.blocks = blocks_for(x.dim(1), 4 * kThreads), .threads = kThreads, .blocks_y = rows}, scatter_kernel<T>, out.ptr<T>(), out.row_stride,
           x.row<T>(first), x.row_stride, index.ptr<int32_t>() + first, x.dim(1));
  }
}

template <typename Unit>
void copy_in(Context& c, char* out, int64_t out_stride, const char* x, int64_t x_stride, int64_t rows, int64_t row_bytes) {
  const auto units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = 0; first < rows; first += kRowsMax)
    launch(c, "copy_rows", {.blocks = blocks_for(units, kCopies * kThreads), .threads = kThreads, .blocks_y = rows - first < kRowsMax ? rows - first : kRowsMax},
           copy_kernel<Unit>, out + first * out_stride, out_stride, x + first * x_stride, x_stride, units);
}

}  // namespace

void copy_rows(Context& c, TensorView out, ConstTensorView x) {
  const auto element = static_cast<int64_t>(dtype_bytes(x.dtype));
  const bool together = out.contiguous() && x.contiguous();
  const int64_t rows = together ? 1 : x.rows(), row_bytes = (together ? x.shape.elements() : x.dim(1)) * element;
  const int64_t out_stride = rows == 1 ? 0 : out.row_stride * element, x_stride = rows == 1 ? 0 : x.row_stride * element;
  char* const to = static_cast<char*>(out.data);
  const char* const from = static_cast<const char*>(x.data);
  const auto all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) | out_stride | x_stride | row_bytes;
  const auto copy = [&](auto unit) { copy_in<decltype(unit)>(c, to, out_stride, from, x_stride, rows, row_bytes); };
  if (all % 16 == 0) copy(Vector<uint32_t, 4>());
  else if (all % 4 == 0) copy(uint32_t{});
  else if (all % 2 == 0) copy(uint16_t{});
  else copy(uint8_t{});
}

void scatter_rows(Context& c, TensorView out, ConstTensorView x, ConstTensorView index) {
  x.dtype == DType::f32 ? scatter<float>(c, out, x, index) : scatter<bf16>(c, out, x, index);
}
void number_rows(Context& c, TensorView v) {
  launch(c, "number_rows", {.blocks = blocks_for(v.rows(), kThreads), .threads = kThreads}, number_kernel, v.ptr<int32_t>(), v.rows());
}

}  // namespace lockstep::device
