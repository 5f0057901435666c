// hyper_post and its backward, a launch each. Forward a thread has a piece of all streams; backward 16 / post_lanes threads a token have the lanes of the tree.
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: post (2n + 1)DE; its backward nD(E + 4) + D(E + 4).

#include "ops/hyperconn/hyperconn_cpu.h"
#include "ops/hyperconn/hyperconn_gpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;
using namespace hyper;

// Dots over channels: a row has 16 / Lanes threads, each Lanes neighbouring lanes of the tree. Elements [at, at + Lanes) of a row; those past n are zero.
template <int Lanes, bool kAligned, typename T>
GPU_INLINE Vector<float, Lanes> load_lanes(const T* row, int64_t at, int64_t n) {
  Vector<float, Lanes> f = {};
  if (kAligned) {
    if (at >= n) return f;
    const auto v = *reinterpret_cast<const Vector<T, Lanes>*>(row + at);
#pragma unroll
    for (int i = 0; i < Lanes; ++i) f.v[i] = to_f32(v.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < Lanes; ++i)
      if (at + i < n) f.v[i] = to_f32(row[at + i]);
  }
  return f;
}
template <int Lanes, bool kAligned>
GPU_INLINE void store_lanes(float* row, int64_t at, int64_t n, const Vector<float, Lanes>& v) {
  if (kAligned) {
    if (at < n) *reinterpret_cast<Vector<float, Lanes>*>(row + at) = v;
  } else {
#pragma unroll
    for (int i = 0; i < Lanes; ++i)
      if (at + i < n) row[at + i] = v.v[i];
  }
}
// fold_row of lanes held so.
template <int Lanes>
GPU_INLINE float fold_lanes(Vector<float, Lanes> v) {
#pragma unroll
  for (int width = kTreeLanes / 2; width >= Lanes; width /= 2)
#pragma unroll
    for (int i = 0; i < Lanes; ++i) v.v[i] = v.v[i] + shuffle_xor(v.v[i], width / Lanes);
#pragma unroll
  for (int width = Lanes / 2; width >= 1; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) v.v[i] = v.v[i] + v.v[i + width];
  return v.v[0];
}

constexpr int kPostThreads = 64;

template <typename T, int N>
GPU_KERNEL GPU_BOUNDS(kPostThreads)
    post_kernel(T* xout, int64_t xout_stride, const T* x, int64_t x_stride, const T* y, int64_t y_stride, const float* post, int64_t post_stride,
                const float* comb, int64_t comb_stride, int n, bool aligned, int64_t rows, int64_t width) {
  const Piece p = piece_of_thread(rows, width);
  if (p.count == 0) return;
  Elements<T> stream[N] = {};
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < n) stream[j] = load(x + p.row * x_stride + j * width + p.at, p.count, aligned);
  const Elements<T> result = load(y + p.row * y_stride + p.at, p.count, aligned);
  // All before the first store, which might be of any of them.
  float weight[N][N] = {}, own[N] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k >= n) continue;
    own[k] = post[p.row * post_stride + k];
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) weight[j][k] = comb[p.row * comb_stride + j * n + k];
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k >= n) continue;
    Elements<T> out;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      float sum = own[k] * to_f32(result.v[i]);
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < n) sum = fma(weight[j][k], to_f32(stream[j].v[i]), sum);
      out.v[i] = from_f32<T>(sum);
    }
    store(xout + p.row * xout_stride + k * width + p.at, out, p.count, aligned);
  }
}

struct PostGradients {
  float *dy, *dpost, *dcomb;
  const float *dxout, *post;
  int64_t dy_stride, dpost_stride, dcomb_stride, dxout_stride, x_stride, y_stride, post_stride;
  int64_t rows, width;
  int streams;
};
// Lanes of the tree a thread has: as many as leave its sums in registers.
constexpr int post_lanes(int n) { return n <= 4 ? 2 : 1; }

template <typename T, int N, bool kAligned>
GPU_KERNEL GPU_BOUNDS(kRowThreads) post_backward_kernel(const PostGradients p, const T* x, const T* y) {
  constexpr int kLanes = post_lanes(N), kThreads = kTreeLanes / kLanes;
  using Lanes = Vector<float, kLanes>;
  const int64_t t = (static_cast<int64_t>(block_x()) * kRowThreads + thread_x()) / kThreads;
  const int part = thread_x() % kThreads, n = p.streams;
  const bool mine = t < p.rows;
  float post[N] = {};
  Lanes dcomb[N][N] = {}, dpost[N] = {};
  if (mine)
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < n) post[k] = p.post[t * p.post_stride + k];
  const T* const xt = x + t * p.x_stride;
  const T* const yt = y + t * p.y_stride;
  const float* const gt = p.dxout + t * p.dxout_stride;
  float* const dyt = p.dy + t * p.dy_stride;
  const int64_t width = mine ? p.width : 0;
  for (int64_t at = part * kLanes; at < width; at += kTreeLanes) {
    Lanes g[N] = {}, stream[N] = {}, dy = {};
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n) continue;
      g[k] = load_lanes<kLanes, kAligned>(gt + k * p.width, at, width);
      stream[k] = load_lanes<kLanes, kAligned>(xt + k * p.width, at, width);
    }
    const Lanes result = load_lanes<kLanes, kAligned>(yt, at, width);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (at + (kAligned ? 0 : i) >= width) continue;
      dy.v[i] = post[0] * g[0].v[i];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k >= n) continue;
        if (k > 0) dy.v[i] = fma(post[k], g[k].v[i], dy.v[i]);
        dpost[k].v[i] = fma(result.v[i], g[k].v[i], dpost[k].v[i]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int k = 0; k < N; ++k)
          if (j < n && k < n) dcomb[j][k].v[i] = fma(stream[j].v[i], g[k].v[i], dcomb[j][k].v[i]);
    }
    store_lanes<kLanes, kAligned>(dyt, at, width, dy);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k >= n) continue;
    const float sum = fold_lanes(dpost[k]);
    if (mine && part == 0) p.dpost[t * p.dpost_stride + k] = sum;
  }
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (j >= n || k >= n) continue;
      const float sum = fold_lanes(dcomb[j][k]);
      if (mine && part == 0) p.dcomb[t * p.dcomb_stride + j * n + k] = sum;
    }
}

}  // namespace

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  with_dtype(x.dtype, [&](auto t) {
    using T = decltype(t);
    for_streams(x.dim(1), [&](auto most) {
      launch(c, "hyper_post", {.blocks = blocks_for(x.rows() * blocks_for(x.dim(2), kPiece), kPostThreads), .threads = kPostThreads}, post_kernel<T, decltype(most)::value>, xout.ptr<T>(), xout.row_stride, x.ptr<T>(), x.row_stride,
             y.ptr<T>(), y.row_stride, post.ptr<float>(), post.row_stride, comb.ptr<float>(), comb.row_stride, static_cast<int>(x.dim(1)),
             streams_aligned(x, xout, y), x.rows(), x.dim(2));
    });
  });
}

void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x, ConstTensorView y,
                         ConstTensorView post) {
  const PostGradients p = {.dy = dy.ptr<float>(), .dpost = dpost.ptr<float>(), .dcomb = dcomb.ptr<float>(), .dxout = dxout.ptr<float>(),
                           .post = post.ptr<float>(), .dy_stride = dy.row_stride, .dpost_stride = dpost.row_stride, .dcomb_stride = dcomb.row_stride,
                           .dxout_stride = dxout.row_stride, .x_stride = x.row_stride, .y_stride = y.row_stride, .post_stride = post.row_stride,
                           .rows = x.rows(), .width = x.dim(2), .streams = static_cast<int>(x.dim(1))};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(x.dim(1), [&](auto most) {
      using T = decltype(t);
      constexpr int kN = decltype(most)::value, kTokens = kRowThreads / (kTreeLanes / post_lanes(kN));
      const auto kernel = streams_aligned(x, y, dy, dxout) ? post_backward_kernel<T, kN, true> : post_backward_kernel<T, kN, false>;
      launch(c, "hyper_post_backward", {.blocks = blocks_for(x.rows(), kTokens), .threads = kRowThreads}, kernel, p, x.ptr<T>(), y.ptr<T>());
    });
  });
}

}  // namespace lockstep::device
