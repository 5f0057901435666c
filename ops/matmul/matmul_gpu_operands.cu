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

constexpr int kEach = 8, kLanes = 16, kThreads = 256, kParts = 2;
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
GPU_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

bool aligned(ConstTensorView v, size_t bytes) {
  return reinterpret_cast<uintptr_t>(v.data) % bytes == 0 && static_cast<size_t>(v.row_stride) * dtype_bytes(v.dtype) % bytes == 0;
}

// Eight codes of values without NaN. CUDA's conversion has the bits of encode<e4m3> but for the sign of NaN.
GPU_INLINE Vector<e4m3, kEach> encode_each(const float (&v)[kEach], float factor) {
  Vector<e4m3, kEach> codes;
#if LOCKSTEP_GPU_CUDA
  Vector<unsigned, kEach / 4> words;
#pragma unroll
  for (int i = 0; i < kEach; i += 4)
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
        : "=r"(words.v[i / 4])
        : "f"(v[i] * factor), "f"(v[i + 1] * factor), "f"(v[i + 2] * factor), "f"(v[i + 3] * factor));
  codes = std::bit_cast<Vector<e4m3, kEach>>(words);
#else
#pragma unroll
  for (int i = 0; i < kEach; ++i) codes.v[i] = to_e4m3(v[i] * factor);
#endif
  return codes;
}

// A block of 128 columns, as sixteen threads see it: where it lies, and this thread's part of it.
struct Part {
  unsigned row, block;
  int64_t column;
  int n;
};

// Each thread has parts of kParts blocks, whose loads are on their way together.
template <typename T>
GPU_KERNEL GPU_BOUNDS(kThreads) quantize_rows_kernel(e4m3* codes, int64_t codes_stride, float* scales, int64_t scales_stride, const T* x, int64_t x_stride, bool vectors,
                                                     unsigned rows, int64_t k, unsigned blocks) {
  constexpr unsigned kGroups = kThreads / kLanes;
  const int lane16 = thread_x() % kLanes;
  Part part[kParts];
  float v[kParts][kEach];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const unsigned group = (static_cast<unsigned>(block_x()) * kParts + static_cast<unsigned>(p)) * kGroups + static_cast<unsigned>(thread_x() / kLanes);
    const unsigned row = rows == 1 ? 0 : group / blocks, block = group - row * blocks;
    const int64_t column = static_cast<int64_t>(block) * kBlock + lane16 * kEach, left = row < rows ? k - column : 0;
    part[p] = {row, block, column, left >= kEach ? kEach : left > 0 ? static_cast<int>(left) : 0};
    load_each(x + row * x_stride + column, part[p].n, vectors, v[p]);
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) most = larger(most, std::bit_cast<uint32_t>(v[p][i]) & kF32Magnitude);
    const bool finite = most < kF32Infinity;
    uint32_t amax = most;
    if (!finite) {  // neither Inf nor NaN counts
      amax = 0;
      for (int i = 0; i < kEach; ++i) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(v[p][i]) & kF32Magnitude;
        if (magnitude < kF32Infinity) amax = larger(amax, magnitude);
      }
    }
    amax = larger(amax, std::bit_cast<uint32_t>(kFp8Activation.amax_floor));
#pragma unroll
    for (int d = kLanes / 2; d >= 1; d /= 2) amax = larger(amax, shuffle_xor(amax, d));
    const auto [row, block, column, n] = part[p];
    if (n == 0) continue;
    // Between 2^-22 (of the floor) and 2^120, so that its reciprocal is the power of two of the opposite exponent.
    const float scale = to_f32(ue8m0_scale<e4m3>(std::bit_cast<float>(amax)));
    const float factor = std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
    if (lane16 == 0) scales[row * scales_stride + block] = scale;
    Vector<e4m3, kEach> out;
    if (finite) {
      out = encode_each(v[p], factor);
    } else {
      for (int i = 0; i < kEach; ++i) out.v[i] = to_e4m3(scaled(v[p][i], factor));
    }
    store_each(codes + row * codes_stride + column, n, vectors, out);
  }
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
  int64_t rows = x.rows(), k = x.dim(1), blocks = blocks_for(k, kBlock);
  GPU_CHECK(rows * blocks < (int64_t{1} << 31), "quantize_rows: [%ld, %ld]", static_cast<long>(rows), static_cast<long>(k));
  if (rows == 0 || k == 0) return;
  // Whole blocks without gaps are one long row, whose blocks nobody needs to divide for.
  if (k % kBlock == 0 && x.row_stride == k && codes.row_stride == k && scales.row_stride == blocks) k *= rows, blocks *= rows, rows = 1;
  const bool vectors = aligned(x, 16) && aligned(codes, kEach);
  const Grid grid = {.blocks = blocks_for(rows * blocks, kParts * (kThreads / kLanes)), .threads = kThreads};
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
