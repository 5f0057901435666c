// A thread rotates one piece of a head's rotary channels. Bound by memory: reads and writes the rotary channels once; the table's row stays in cache for the
// heads. Floor: 2 * T * H * r * bytes of x / 4 TB/s.

#include "ops/elements_gpu.h"
#include "ops/rope/rope_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

template <typename T>
GPU_KERNEL rope_kernel(T* x, int64_t x_stride, const int32_t* pos, const float* table, int64_t table_stride, int64_t heads, int64_t width, int64_t rotary,
                       bool inverse, bool aligned, int64_t rows) {
  const Piece p = piece_of_thread(rows * heads, rotary);
  if (p.count == 0) return;
  const int64_t t = p.row / heads, h = p.row - t * heads;
  T* const at = x + t * x_stride + (h + 1) * width - rotary + p.at;
  const Elements<float> turn = load(table + pos[t] * table_stride + p.at, p.count, aligned);
  Elements<T> e = load(static_cast<const T*>(at), p.count, aligned);
  for (int i = 0; i < kPiece; i += 2) {
    const float cos = turn.v[i], sin = inverse ? -turn.v[i + 1] : turn.v[i + 1];
    const float even = to_f32(e.v[i]), odd = to_f32(e.v[i + 1]);
    e.v[i] = from_f32<T>(fma(even, cos, -(odd * sin)));
    e.v[i + 1] = from_f32<T>(fma(even, sin, odd * cos));
  }
  store(at, e, p.count, aligned);
}

template <typename T>
void rotate(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  const int64_t width = x.dim(1) / heads, rotary = table.dim(1);
  if (rotary == 0) return;
  constexpr int64_t kVector = 16 / sizeof(T);
  const bool aligned = all_aligned(x, table) && width % kVector == 0 && rotary % kVector == 0;
  launch(c, "rope", grid_of_pieces(x.rows() * heads, rotary), rope_kernel<T>, x.ptr<T>(), x.row_stride, pos.ptr<int32_t>(), table.ptr<float>(),
         table.row_stride, heads, width, rotary, inverse, aligned, x.rows());
}

}  // namespace

void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse) {
  x.dtype == DType::f32 ? rotate<float>(c, x, pos, table, heads, inverse) : rotate<bf16>(c, x, pos, table, heads, inverse);
}

}  // namespace lockstep::device
