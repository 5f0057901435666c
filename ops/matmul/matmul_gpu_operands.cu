// Operands of the tensor cores from what the model holds: rows in bf16, or in E4M3 with scales of 128 columns.
//
// Floor: bytes over the memory's rate: 6 an element of round_rows, 3 (bf16) or 5 (f32) of quantize_rows.

#include "ops/elements_gpu.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/quantize/quantize_cpu.h"

namespace lockstep::gpu {

namespace {

constexpr int kThreads = 256;

bool aligned(ConstTensorView v, size_t bytes) {
  return reinterpret_cast<uintptr_t>(v.data) % bytes == 0 && static_cast<size_t>(v.row_stride) * dtype_bytes(v.dtype) % bytes == 0;
}

GPU_KERNEL GPU_BOUNDS(kThreads) round_rows_kernel(bf16* to, int64_t to_stride, const float* from, int64_t from_stride, bool vectors, unsigned rows, unsigned n, unsigned pieces) {
  const unsigned at = static_cast<unsigned>(block_x()) * kThreads + static_cast<unsigned>(thread_x()), row = at / pieces, column = at % pieces * kPiece;
  if (row >= rows) return;
  const int count = n - column < kPiece ? static_cast<int>(n - column) : kPiece;
  const Elements<float> v = load(from + row * from_stride + column, count, vectors);
  Elements<bf16> rounded;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) rounded.v[i] = to_bf16(v.v[i]);
  store(to + row * to_stride + column, rounded, count, vectors);
}

}  // namespace

void quantize_rows(Context& c, TensorView codes, TensorView scales, ConstTensorView x, ConstTensorView row_of) {
  if (!codes.empty())
    device::quantize(c, {codes, scales, kFp8Activation.block_rows, kFp8Activation.block_cols}, x, ScaleRule::power_of_two, kFp8Activation.amax_floor, row_of);
}

void round_rows(Context& c, TensorView to, ConstTensorView from) {
  const int64_t rows = from.rows(), n = from.dim(1), pieces = blocks_for(n, kPiece);
  GPU_CHECK(rows * pieces < (int64_t{1} << 31), "round_rows: [%ld, %ld]", static_cast<long>(rows), static_cast<long>(n));
  if (rows == 0 || n == 0) return;
  launch(c, "round_rows", {.blocks = blocks_for(rows * pieces, kThreads), .threads = kThreads}, round_rows_kernel, to.ptr<bf16>(), to.row_stride, from.ptr<float>(),
         from.row_stride, aligned(from, 16) && aligned(to, 16), rows, n, pieces);
}

}  // namespace lockstep::gpu
