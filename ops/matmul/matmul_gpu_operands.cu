// Operands of the tensor cores from what the model holds: rows in bf16, or in E4M3 with scales of 128 columns. Eight neighbouring elements a thread, sixteen
// threads a block of 128.
//
// Floor: bytes over the memory's rate: 6 an element of round_rows, 3 (bf16) or 5 (f32) of quantize_rows.

#include "core/formats.h"
#include "core/gpu.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/quantize/quantize.h"

namespace lockstep::gpu {

namespace {

constexpr int kEach = 8, kLanes = 16, kThreads = 256;
constexpr int64_t kBlock = kEach * kLanes;

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

// Eight codes. CUDA's conversion has the bits of encode<e4m3> but for the sign of NaN.
GPU_INLINE Vector<e4m3, kEach> encode_each(const float (&v)[kEach], float factor, bool has_nan) {
  Vector<e4m3, kEach> codes;
#if LOCKSTEP_GPU_CUDA
  if (!has_nan) {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      unsigned short pair;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(v[i + 1] * factor), "f"(v[i] * factor));
      codes.v[i] = {static_cast<uint8_t>(pair)};
      codes.v[i + 1] = {static_cast<uint8_t>(pair >> 8)};
    }
    return codes;
  }
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i) codes.v[i] = to_e4m3(scaled(v[i], factor));
  return codes;
}

template <typename T>
GPU_KERNEL GPU_BOUNDS(kThreads) quantize_rows_kernel(e4m3* codes, int64_t codes_stride, float* scales, int64_t scales_stride, const T* x, int64_t x_stride, bool vectors,
                                                     unsigned rows, unsigned k, unsigned blocks) {
  const unsigned group = static_cast<unsigned>(block_x()) * (kThreads / kLanes) + static_cast<unsigned>(thread_x() / kLanes), row = group / blocks, block = group % blocks;
  const int lane16 = thread_x() % kLanes;
  const int64_t column = static_cast<int64_t>(block) * kBlock + lane16 * kEach, left = row < rows ? static_cast<int64_t>(k) - column : 0;
  const int n = left >= kEach ? kEach : left > 0 ? static_cast<int>(left) : 0;
  float v[kEach];
  load_each(x + row * x_stride + column, n, vectors, v);
  uint32_t amax = std::bit_cast<uint32_t>(kFp8Activation.amax_floor);
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(v[i]) & kF32Magnitude;
    if (magnitude < kF32Infinity && magnitude > amax) amax = magnitude;
    has_nan = has_nan || magnitude > kF32Infinity;
  }
#pragma unroll
  for (int d = kLanes / 2; d >= 1; d /= 2) {
    const uint32_t other = shuffle_xor(amax, d);
    amax = other > amax ? other : amax;
  }
  const float scale = to_f32(ue8m0_scale<e4m3>(std::bit_cast<float>(amax)));
  if (n == 0) return;
  if (lane16 == 0) scales[row * scales_stride + block] = scale;
  store_each(codes + row * codes_stride + column, n, vectors, encode_each(v, 1.0f / scale, has_nan));
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
  const int64_t rows = x.rows(), k = x.dim(1), blocks = blocks_for(k, kBlock);
  GPU_CHECK(rows * blocks < (int64_t{1} << 31), "quantize_rows: [%ld, %ld]", static_cast<long>(rows), static_cast<long>(k));
  if (rows == 0 || k == 0) return;
  const bool vectors = aligned(x, 16) && aligned(codes, kEach);
  const Grid grid = {.blocks = blocks_for(rows * blocks, kThreads / kLanes), .threads = kThreads};
  const auto run = [&](auto kernel, auto* data) {
    launch(c, "quantize_rows", grid, kernel, codes.ptr<e4m3>(), codes.row_stride, scales.ptr<float>(), scales.row_stride, data, x.row_stride, vectors, rows, k, blocks);
  };
  x.dtype == DType::f32 ? run(quantize_rows_kernel<float>, x.ptr<float>()) : run(quantize_rows_kernel<bf16>, x.ptr<bf16>());
}

void round_rows(Context& c, TensorView to, ConstTensorView from) {
  const int64_t rows = from.rows(), n = from.dim(1), pieces = blocks_for(n, kEach);
  GPU_CHECK(rows * pieces < (int64_t{1} << 31), "round_rows: [%ld, %ld]", static_cast<long>(rows), static_cast<long>(n));
  if (rows == 0 || n == 0) return;
  launch(c, "round_rows", {.blocks = blocks_for(rows * pieces, kThreads), .threads = kThreads}, round_rows_kernel, to.ptr<bf16>(), to.row_stride, from.ptr<float>(),
         from.row_stride, aligned(from, 16) && aligned(to, 16), rows, n, pieces);
}

}  // namespace lockstep::gpu
