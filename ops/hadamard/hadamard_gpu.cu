// Rows of 8 to 128 channels (an indexer's head has 128): N / 8 threads hold a row in registers, the near stages within a thread, the far ones by shuffles.
// Bound by memory; floor 2 * T * N elements / 4 TB/s. Other rows go through shared memory, a block a row.

#include "core/gpu_check.h"
#include "ops/elements_gpu.h"
#include "ops/fixed_math.h"
#include "ops/hadamard/hadamard_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

inline constexpr int64_t kRegisterRow = 16 * kPiece;  // 16 threads lie in one wave

template <typename T>
GPU_KERNEL hadamard_kernel(T* x, int64_t x_stride, float scale, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  T* const at = x + p.row * x_stride + p.at;
  const Elements<T> in = load(static_cast<const T*>(at), p.count, aligned);
  float v[kPiece];
  for (int i = 0; i < kPiece; ++i) v[i] = to_f32(in.v[i]);
#pragma unroll
  for (int half = 1; half < kPiece; half *= 2)
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if ((i & half) != 0) continue;
      const float a = v[i], b = v[i + half];
      v[i] = a + b;
      v[i + half] = a - b;
    }
  for (int threads = 1; threads < n / kPiece; threads *= 2) {
    const bool upper = (thread_x() & threads) != 0;
    for (int i = 0; i < kPiece; ++i) {
      const float other = shuffle_xor(v[i], threads);
      v[i] = upper ? other - v[i] : v[i] + other;
    }
  }
  Elements<T> out;
  for (int i = 0; i < kPiece; ++i) out.v[i] = from_f32<T>(v[i] * scale);
  store(at, out, p.count, aligned);
}

template <typename T>
GPU_KERNEL hadamard_shared_kernel(T* x, int64_t x_stride, float scale, int n) {
  SharedMemory memory;
  const auto work = memory.take<float>(n);
  T* const row = x + block_x() * x_stride;
  for (int i = thread_x(); i < n; i += block_dim()) work.store(i, to_f32(row[i]));
  for (int half = 1; half < n; half *= 2) {
    sync_block();
    for (int k = thread_x(); k < n / 2; k += block_dim()) {
      const int i = k / half * (2 * half) + k % half;
      const float a = work.load(i), b = work.load(i + half);
      work.store(i, a + b);
      work.store(i + half, a - b);
    }
  }
  sync_block();
  for (int i = thread_x(); i < n; i += block_dim()) row[i] = from_f32<T>(work.load(i) * scale);
}

template <typename T>
void rotate(Context& c, TensorView x) {
  const int64_t n = x.dim(1);
  const float scale = 1.0f / ieee::sqrt(static_cast<float>(n));
  if (n >= kPiece && n <= kRegisterRow) {
    launch(c, "hadamard", grid_of_pieces(x.rows(), n), hadamard_kernel<T>, x.ptr<T>(), x.row_stride, scale, is_aligned(x), x.rows(), n);
    return;
  }
  const size_t shared = static_cast<size_t>(n) * sizeof(float);
  GPU_CHECK(shared <= kSharedBytesMax, "hadamard: rows of %lld do not fit in shared memory", static_cast<long long>(n));
  launch(c, "hadamard_shared", {.blocks = x.rows(), .threads = 256, .shared_bytes = shared}, hadamard_shared_kernel<T>, x.ptr<T>(), x.row_stride, scale,
         static_cast<int>(n));
}

}  // namespace

void hadamard(Context& c, TensorView x) { x.dtype == DType::f32 ? rotate<float>(c, x) : rotate<bf16>(c, x); }

}  // namespace lockstep::device
