// Elementwise, bound by memory: cast reads and writes every element once, add reads two and writes one. Floor: bytes / 4 TB/s.

#include "ops/cast/cast_cpu.h"
#include "ops/elements_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

// The same type keeps every bit, those of a signalling NaN too.
template <typename To, typename From>
GPU_INLINE To converted(From v) {
  if constexpr (std::is_same_v<To, From>) return v;
  else return from_f32<To>(to_f32(v));
}

template <typename To, typename From>
GPU_KERNEL cast_kernel(To* to, int64_t to_stride, const From* from, int64_t from_stride, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  const Elements<From> x = load(from + p.row * from_stride + p.at, p.count, aligned);
  Elements<To> y;
  for (int i = 0; i < kPiece; ++i) y.v[i] = converted<To>(x.v[i]);
  store(to + p.row * to_stride + p.at, y, p.count, aligned);
}

GPU_KERNEL add_kernel(float* to, int64_t to_stride, const float* from, int64_t from_stride, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  float* const at = to + p.row * to_stride + p.at;
  Elements<float> sum = load(static_cast<const float*>(at), p.count, aligned);
  const Elements<float> x = load(from + p.row * from_stride + p.at, p.count, aligned);
  for (int i = 0; i < kPiece; ++i) sum.v[i] = sum.v[i] + x.v[i];
  store(at, sum, p.count, aligned);
}

GPU_KERNEL scale_kernel(float* to, int64_t to_stride, float factor, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  float* const at = to + p.row * to_stride + p.at;
  Elements<float> x = load(static_cast<const float*>(at), p.count, aligned);
  for (int i = 0; i < kPiece; ++i) x.v[i] = x.v[i] * factor;
  store(at, x, p.count, aligned);
}

template <typename To, typename From>
void convert(Context& c, TensorView dst, ConstTensorView src) {
  const Shape s = as_rows(dst.shape, dst, src);
  launch(c, "cast", grid_of_pieces(s[0], s[1]), cast_kernel<To, From>, dst.ptr<To>(), dst.row_stride, src.ptr<From>(), src.row_stride, all_aligned(dst, src),
         s[0], s[1]);
}

}  // namespace

void cast(Context& c, TensorView dst, ConstTensorView src) {
  if (dst.dtype == DType::f32) src.dtype == DType::f32 ? convert<float, float>(c, dst, src) : convert<float, bf16>(c, dst, src);
  else src.dtype == DType::f32 ? convert<bf16, float>(c, dst, src) : convert<bf16, bf16>(c, dst, src);
}

void add(Context& c, TensorView dst_accum, ConstTensorView src) {
  const Shape s = as_rows(dst_accum.shape, dst_accum, src);
  launch(c, "add", grid_of_pieces(s[0], s[1]), add_kernel, dst_accum.ptr<float>(), dst_accum.row_stride, src.ptr<float>(), src.row_stride,
         all_aligned(dst_accum, src), s[0], s[1]);
}

void scale(Context& c, TensorView dst, float factor) {
  const Shape s = as_rows(dst.shape, dst);
  launch(c, "scale", grid_of_pieces(s[0], s[1]), scale_kernel, dst.ptr<float>(), dst.row_stride, factor, is_aligned(dst), s[0], s[1]);
}

}  // namespace lockstep::device
