// Operands of the tensor cores from what the model holds: rows in bf16, or in E4M3 with scales of 128 columns.
//
// Floor: bytes over the memory's rate: 6 an element of round_rows, 3 (bf16) or 5 (f32) of quantize_rows, 3 of fp4_rows.

#include "core/gpu_formats.h"
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

constexpr int kBlock = 128, kBlockThreads = kBlock / kPiece, kBlocksHeld = 2;

// Thread 4 q + v of a block reads columns 32 q + 8 v on, as pairs of columns i and i + 4; it stores pairs q of threads v, 4 + v, 8 + v and 12 + v.
GPU_KERNEL GPU_BOUNDS(kThreads) fp4_rows_kernel(bf16* to, int64_t to_stride, const e4m3* codes, int64_t codes_stride, const float* scales, int64_t scales_stride, unsigned count,
                                                unsigned blocks) {
  const unsigned thread = static_cast<unsigned>(thread_x()) % kBlockThreads;
  unsigned row[kBlocksHeld], block[kBlocksHeld];
  Vector<uint32_t, 2> words[kBlocksHeld];
  float scale[kBlocksHeld];
#pragma unroll
  for (unsigned b = 0; b < kBlocksHeld; ++b) {
    const unsigned at = (static_cast<unsigned>(block_x()) * kBlocksHeld + b) * (kThreads / kBlockThreads) + static_cast<unsigned>(thread_x()) / kBlockThreads;
    row[b] = at / blocks, block[b] = at - row[b] * blocks;
    if (at >= count) block[b] = blocks;
    const bool there = at < count;
    words[b] = there ? *reinterpret_cast<const Vector<uint32_t, 2>*>(codes + row[b] * codes_stride + block[b] * kBlock + thread * kPiece) : Vector<uint32_t, 2>{};
    scale[b] = there ? scales[row[b] * scales_stride + block[b]] : 0.0f;
  }
#pragma unroll
  for (int b = 0; b < kBlocksHeld; ++b) {
    float low[4], high[4];
    decode_four<e4m3>(words[b].v[0], low);
    decode_four<e4m3>(words[b].v[1], high);
    Vector<uint32_t, 4> pairs;
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs.v[i] = round_two(low[i] * scale[b], high[i] * scale[b]);
    // A bit of the pair's number changes places with one of q.
    const auto exchange = [&](uint32_t& first, uint32_t& second, unsigned bit) {
      const bool keeps_second = (thread & bit) != 0;
      const uint32_t got = shuffle_xor(keeps_second ? first : second, static_cast<int>(bit));
      (keeps_second ? first : second) = got;
    };
    exchange(pairs.v[0], pairs.v[2], 8);
    exchange(pairs.v[1], pairs.v[3], 8);
    exchange(pairs.v[0], pairs.v[1], 4);
    exchange(pairs.v[2], pairs.v[3], 4);
    const unsigned place = thread % 4 * 4 + thread / 4;
    if (block[b] < blocks) store_vector(reinterpret_cast<uint32_t*>(to + row[b] * to_stride + block[b] * kBlock + place * kPiece), pairs);
  }
}

}  // namespace

void quantize_rows(Context& c, TensorView codes, TensorView scales, ConstTensorView x, ConstTensorView row_of) {
  if (!codes.empty())
    device::quantize(c, {codes, scales, kFp8Activation.block_rows, kFp8Activation.block_cols}, x, ScaleRule::power_of_two, kFp8Activation.amax_floor, row_of);
}

void fp4_rows(Context& c, TensorView to, ConstTensorView codes, ConstTensorView scales) {
  const int64_t k = codes.dim(1), blocks = k / kBlock, count = codes.rows() * blocks;
  GPU_CHECK(k % kBlock == 0 && aligned(to, 16) && aligned(codes, 8) && count < (int64_t{1} << 31), "fp4_rows: [%ld, %ld]", static_cast<long>(codes.rows()), static_cast<long>(k));
  if (count == 0) return;
  launch(c, "fp4_rows", {.blocks = blocks_for(count, kBlocksHeld * kThreads / kBlockThreads), .threads = kThreads}, fp4_rows_kernel, to.ptr<bf16>(), to.row_stride, codes.ptr<e4m3>(),
         codes.row_stride, scales.ptr<float>(), scales.row_stride, count, blocks);
}

void round_rows(Context& c, TensorView to, ConstTensorView from) {
  const int64_t rows = from.rows(), n = from.dim(1), pieces = blocks_for(n, kPiece);
  GPU_CHECK(rows * pieces < (int64_t{1} << 31), "round_rows: [%ld, %ld]", static_cast<long>(rows), static_cast<long>(n));
  if (rows == 0 || n == 0) return;
  launch(c, "round_rows", {.blocks = blocks_for(rows * pieces, kThreads), .threads = kThreads}, round_rows_kernel, to.ptr<bf16>(), to.row_stride, from.ptr<float>(),
         from.row_stride, aligned(from, 16) && aligned(to, 16), rows, n, pieces);
}

}  // namespace lockstep::gpu
