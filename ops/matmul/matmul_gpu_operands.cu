// Operands of the tensor cores from what the model holds: rows in bf16, or in E4M3 with scales of 128 columns.
//
// Floor: bytes over the memory's rate: 6 an element of round_rows, 3 (bf16) or 5 (f32) of quantize_rows.

#include "core/gpu.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/quantize/quantize_cpu.h"

namespace lockstep::gpu {

namespace {

constexpr int kEach = 8, kThreads = 256;

// n <= 8 elements; the rest is zero. aligned: eight may be loaded, or stored, as vectors of 16 bytes (or all of their bytes).
template <typename T>
GPU_INLINE void load_each(const T* from, int n, bool aligned, float (&v)[kEach]) {
  constexpr int kVector = 16 / sizeof(T);
  if (aligned && n == kEach) {
#pragma unroll
    for (int i = 0; i < kEach; i += kVector) {
      const auto piece = *reinterpret_cast<const Vector<T, kVector>*>(from + i);
#pragma unroll
      for (int j = 0; j < kVector; ++j) v[i + j] = to_f32(piece.v[j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) v[i] = i < n ? to_f32(from[i]) : 0.0f;
}
template <typename T>
GPU_INLINE void store_each(T* to, int n, bool aligned, const Vector<T, kEach>& v) {
  if (aligned && n == kEach) {
    store_vector(to, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (i < n) to[i] = v.v[i];
}

bool aligned(ConstTensorView v, size_t bytes) {
  return reinterpret_cast<uintptr_t>(v.data) % bytes == 0 && static_cast<size_t>(v.row_stride) * dtype_bytes(v.dtype) % bytes == 0;
}

GPU_KERNEL GPU_BOUNDS(kThreads) round_rows_kernel(bf16* to, int64_t to_stride, const float* from, int64_t from_stride, bool vectors, unsigned rows, unsigned n, unsigned pieces) {
  const unsigned at = static_cast<unsigned>(block_x()) * kThreads + static_cast<unsigned>(thread_x()), row = at / pieces, column = at % pieces * kEach;
  if (row >= rows) return;
  const int count = n - column < kEach ? static_cast<int>(n - column) : kEach;
  float v[kEach];
  load_each(from + row * from_stride + column, count, vectors, v);
  Vector<bf16, kEach> rounded;
#pragma unroll
  for (int i = 0; i < kEach; ++i) rounded.v[i] = to_bf16(v[i]);
  store_each(to + row * to_stride + column, count, vectors, rounded);
}

}  // namespace

void quantize_rows(Context& c, TensorView codes, TensorView scales, ConstTensorView x) {
  if (!x.empty()) device::quantize(c, {codes, scales, kFp8Activation.block_rows, kFp8Activation.block_cols}, x, ScaleRule::power_of_two, kFp8Activation.amax_floor);
}

void round_rows(Context& c, TensorView to, ConstTensorView from) {
  const int64_t rows = from.rows(), n = from.dim(1), pieces = blocks_for(n, kEach);
  GPU_CHECK(rows * pieces < (int64_t{1} << 31), "round_rows: [%ld, %ld]", static_cast<long>(rows), static_cast<long>(n));
  if (rows == 0 || n == 0) return;
  launch(c, "round_rows", {.blocks = blocks_for(rows * pieces, kThreads), .threads = kThreads}, round_rows_kernel, to.ptr<bf16>(), to.row_stride, from.ptr<float>(),
         from.row_stride, aligned(from, 16) && aligned(to, 16), rows, n, pieces);
}

}  // namespace lockstep::gpu
