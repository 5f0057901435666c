// hyper_feed is two launches. The first has the sums of fn's segments and, in blocks of their own, the squares of the tokens' streams (matmul_gpu_thin.cu). The second
// has two kinds of blocks: those that go from pre over h and its norm to u, a token each, and those of post and comb, 32 threads a token, whose Sinkhorn takes as long
// as all the others do. Streams are on their way to registers before pre is known.
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: first nDE, or 1.6 G multiply-adds for 8192 tokens of 4 x 2048, 54 us; second (n + 2)DE.
// A few tokens wait for chains instead, in us at 1.9 GHz for 4 x 2048 (4 x 4096):
//   first    a segment 0.6, the squares' nD / 16 links of 4 cycles 1.1 (2.2), beside each other
//   second   memory 0.4; the segments' sums 0.1 (0.2), pre 0.1, h 0.1, D / 16 links of the norm 0.3 (0.6), its fold and root 0.2, u 0.1;
//            beside it memory 0.4 (0.8), the sums, and 2 iters divisions of 95 cycles (4 shuffles at once, 3 + 1 additions, a reciprocal, a product), 2.0 for 20

#include "ops/chain_gpu.h"
#include "ops/hyperconn/hyperconn_cpu.h"
#include "ops/hyperconn/hyperconn_gpu.h"
#include "ops/hyperconn/sinkhorn_gpu.h"
#include "ops/matmul/matmul_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;
using namespace hyper;

struct Feed {
  float *pre, *post, *comb, *raw, *inv_rms, *norm_inv;  // post and comb null: the head's form
  const float *sums, *squares, *base, *scale, *gain;    // sums may be raw
  int64_t pre_stride, post_stride, comb_stride, raw_stride, sums_stride, x_stride, h_stride, u_stride;
  int rows, streams, iters, width, segments;
  int mix_blocks;  // before the others: their chains are longer
  bool in_pieces;  // streams, h, u and the gain can be taken in whole pieces
  float norm_eps, hc_eps;
};

// Threads at most, and blocks of so many that registers should leave room for.
template <int N>
constexpr int kFeedThreadsMax = N <= 4 ? 512 : 256;
template <typename T, int N>
constexpr int kFeedBlocks = 1;
constexpr int kMixLanes = 2 * kTreeLanes;  // of a token: comb's, then post's
static_assert(kHyperMaxStreams <= kTreeLanes);

GPU_INLINE float inverse_rms(float squares, int n, float eps) { return 1.0f / ieee::sqrt(squares / static_cast<float>(n) + eps); }

// Post and comb of the tokens of a block, and raw of both.
template <int N>
GPU_INLINE void mix(const Feed& p) {
  const int own = (block_x() * block_dim() + thread_x()) / kMixLanes, n = p.streams, num_logits = (2 + n) * n;
  const bool mine = own < p.rows, of_comb = thread_x() % kMixLanes < kTreeLanes, of_post = !of_comb && row_lane() < n;
  const int64_t t = mine ? own : p.rows - 1;
  const float inv = inverse_rms(p.squares[t], n * p.width, p.norm_eps);
  LaneMatrix<N> c;
  const auto inside = [&](int i) { return c.row(i) < n && c.col() < n; };
  float post = 0;
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) {
    const int logit = of_comb ? (inside(i) ? (2 + c.row(i)) * n + c.col() : -1) : of_post && i == 0 ? n + row_lane() : -1;
    c.v[i] = 0.0f;
    if (logit < 0) continue;
    const float slope = p.scale[scale_index(logit, n)], base = p.base[logit];
    const float* const sums = p.sums + t * p.sums_stride + logit;
    float total = 0;
#pragma unroll 32
    for (int s = 0; s < p.segments; ++s) total = total + sums[s * num_logits];
    if (mine) p.raw[t * p.raw_stride + logit] = total;
    const float z = fma(total * inv, slope, base);
    if (of_comb) c.v[i] = z;
    else post = z;
  }
  if (mine && of_post) p.post[t * p.post_stride + row_lane()] = 2.0f * sigmoid_f32(post);
  if (n == N) sinkhorn<N>(c, N, p.iters, p.hc_eps, {});  // with loops of known length
  else sinkhorn<N>(c, n, p.iters, p.hc_eps, {});
#pragma unroll
  for (int i = 0; i < c.kEach; ++i)
    if (mine && of_comb && inside(i)) p.comb[t * p.comb_stride + c.row(i) * n + c.col()] = c.v[i];
}

template <typename T, int N>
GPU_KERNEL GPU_BOUNDS(kFeedThreadsMax<N>, kFeedBlocks<T, N>) feed_kernel(const Feed p, const T* x, T* h, T* u) {
  if (block_x() < p.mix_blocks) return mix<N>(p);
  SharedMemory memory;
  const Shared<float> sums = memory.take<float>(p.segments * N), kept = memory.take<float>((p.width + kPiece - 1) / kPiece * kPiece);
  const Shared<float> weights = memory.take<float>(N), norm_scale = memory.take<float>(1);
  const int64_t t = block_x() - p.mix_blocks;
  const int n = p.streams, num_logits = p.comb == nullptr ? n : (2 + n) * n, thread = thread_x();
  const auto in_row = [&](int at) { return at >= p.width ? 0 : p.width - at < kPiece ? p.width - at : kPiece; };  // elements of a piece
  struct Streams {
    Elements<T> v[N];
  };
  const auto fetch = [&](int at) {
    Streams to = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) to.v[j] = load(x + t * p.x_stride + j * p.width + at, in_row(at), p.in_pieces);
    return to;
  };
  const int step = block_dim() * kPiece;
  Streams streams = fetch(thread * kPiece);
  for (int i = thread; i < p.segments * N; i += block_dim())
    if (i % N < n) sums.store(i, p.sums[t * p.sums_stride + i / N * num_logits + i % N]);
  const bool of_pre = thread < n;
  const float base = of_pre ? p.base[thread] : 0.0f, slope = p.scale[0], squares = p.squares[t];
  sync_block();

  if (wave() == 0) {
    const float inv = inverse_rms(squares, n * p.width, p.norm_eps);
    if (of_pre) {
      float total = 0;
      in_order(p.segments, [&](int s) { return sums.load(s * N + thread); }, [&](float v) { total = total + v; });
      const float weight = sigmoid_f32(fma(total * inv, slope, base)) + p.hc_eps;
      weights.store(thread, weight);
      p.raw[t * p.raw_stride + thread] = total;
      p.pre[t * p.pre_stride + thread] = weight;
    }
    if (thread == 0) p.inv_rms[t] = inv;
  }
  sync_block();

  float weight[N];
#pragma unroll
  for (int j = 0; j < N; ++j) weight[j] = j < n ? weights.load(j) : 0.0f;
  for (int at = thread * kPiece; at < p.width; at += step) {
    const Streams now = streams;
    streams = fetch(at + step);
    Vector<float, 4> out[kPiece / 4];
    Elements<T> e;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      float sum = weight[0] * to_f32(now.v[0].v[i]);
#pragma unroll
      for (int j = 1; j < N; ++j)
        if (j < n) sum = fma(weight[j], to_f32(now.v[j].v[i]), sum);
      e.v[i] = from_f32<T>(sum);
      out[i / 4].v[i % 4] = to_f32(e.v[i]);
    }
#pragma unroll
    for (int i = 0; i < kPiece / 4; ++i) kept.store_vector(at + i * 4, out[i]);
    store(h + t * p.h_stride + at, e, in_row(at), p.in_pieces);
  }
  Elements<float> gain = load(p.gain + thread * kPiece, in_row(thread * kPiece), p.in_pieces);  // on its way before the scale is known
  sync_block();

  if (wave() == 0) {
    float sum = 0;
    if (lane() < kTreeLanes)
      in_order((p.width - row_lane() + kTreeLanes - 1) / kTreeLanes, [&](int i) { return kept.load(row_lane() + i * kTreeLanes); },
               [&](float v) { sum = fma(v, v, sum); });
    const float scale = inverse_rms(fold_row(sum), p.width, p.norm_eps);
    if (thread == 0) p.norm_inv[t] = scale, norm_scale.store(0, scale);
  }
  sync_block();

  const float scale = norm_scale.load(0);
  for (int at = thread * kPiece; at < p.width; at += step) {
    Elements<T> out;
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      const auto v = kept.template load_vector<4>(at + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) out.v[i + k] = from_f32<T>(v.v[k] * scale * gain.v[i + k]);
    }
    store(u + t * p.u_stride + at, out, in_row(at), p.in_pieces);
    gain = load(p.gain + at + step, in_row(at + step), p.in_pieces);
  }
}

// Of rows that no copy in the background takes.
template <typename T>
GPU_KERNEL GPU_BOUNDS(kRowThreads) squares_kernel(float* squares, const T* x, int64_t x_stride, int64_t rows, int64_t n) {
  const int64_t t = row_of_thread();
  const T* const row = x + t * x_stride;
  const auto term = [&](int64_t i) { return to_f32(row[i]); };
  const float sum = row_dot(t < rows ? n : 0, term, term);
  if (t < rows && row_lane() == 0) squares[t] = sum;
}

}  // namespace

void hyper_feed(Context& c, const HyperFeed& f, ConstTensorView x, const HyperWeights& w, const HyperShape& shape, ConstTensorView norm) {
  const int64_t rows = x.rows(), n = shape.streams, width = x.dim(2), elements = n * width, logits = f.raw.dim(1);
  const ConstTensorView flat(x.data, x.dtype, {rows, elements}, x.row_stride);
  const ArenaScope scope(*c.workspace);
  const TensorView squares = c.workspace->tensor(DType::f32, {rows}, "hyperconn squares");
  // Where chains cannot be copied by 16 bytes another kernel multiplies, and adds up too.
  const bool in_segments = thin::supports(flat, w.fn);
  const int64_t segments = in_segments ? blocks_for(elements, kHyperSegment) : 1;
  TensorView sums = f.raw;
  if (in_segments) {
    sums = c.workspace->tensor(DType::f32, {rows, segments, logits}, "hyperconn segments");
    thin::segment_sums(c, sums, squares, flat, w.fn.rows, kHyperSegment);
  } else {
    lockstep::matmul(c, f.raw, flat, w.fn, kHyperSegment);
    with_dtype(x.dtype, [&](auto t) {
      using T = decltype(t);
      launch(c, "hyper_squares", {.blocks = blocks_for(rows, kRowsABlock), .threads = kRowThreads}, squares_kernel<T>, squares.ptr<float>(), x.ptr<T>(), x.row_stride, rows,
             elements);
    });
  }
  const int64_t pieces = blocks_for(width, kPiece);
  Feed p = {.pre = f.pre.ptr<float>(), .post = data_of(f.post), .comb = data_of(f.comb), .raw = f.raw.ptr<float>(), .inv_rms = f.inv_rms.ptr<float>(),
                  .norm_inv = f.norm_inv.ptr<float>(), .sums = sums.ptr<float>(), .squares = squares.ptr<float>(), .base = w.base.ptr<float>(),
                  .scale = w.scale.ptr<float>(), .gain = norm.ptr<float>(), .pre_stride = f.pre.row_stride, .post_stride = f.post.row_stride,
                  .comb_stride = f.comb.row_stride, .raw_stride = f.raw.row_stride, .sums_stride = sums.row_stride, .x_stride = x.row_stride,
                  .h_stride = f.h.row_stride, .u_stride = f.u.row_stride, .rows = static_cast<int>(rows), .streams = static_cast<int>(n), .iters = shape.sinkhorn_iters,
                  .width = static_cast<int>(width), .segments = static_cast<int>(segments), .mix_blocks = 0,
                  .in_pieces = width % kPiece == 0 && streams_aligned(x, f.h, f.u) && is_aligned(norm), .norm_eps = shape.norm_eps, .hc_eps = shape.hc_eps};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(n, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      using T = decltype(t);
      // A thread has a piece of every stream, in whole waves of either width.
      const int threads = static_cast<int>(std::min<int64_t>(blocks_for(pieces, 64) * 64, kFeedThreadsMax<kN>));
      p.mix_blocks = f.comb.empty() ? 0 : static_cast<int>(blocks_for(rows, threads / kMixLanes));
      const size_t floats = static_cast<size_t>(segments * kN + pieces * kPiece + kN + 4);
      const Grid grid = {.blocks = p.mix_blocks + rows, .threads = threads, .shared_bytes = sizeof(float) * floats + 64};
      launch(c, "hyper_feed", grid, feed_kernel<T, kN>, p, x.ptr<T>(), f.h.ptr<T>(), f.u.ptr<T>());
    });
  });
}

}  // namespace lockstep::device
