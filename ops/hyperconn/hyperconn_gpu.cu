// hyper_feed is two launches: the sums of fn's segments and of the squares (matmul_gpu_thin.cu), and a block a token that adds them up and does all the rest.
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: first nDE, or 1.6 G multiply-adds for 8192 tokens of 4 x 2048, 54 us; second (n + 2)DE where the row has
// stayed in the cache, otherwise nDE more. A few tokens wait for chains instead: kHyperSegment multiply-adds (0.6 us), the segments' sums (0.1 us for 32), D / 16
// of the norm's squares (0.5 us for 4096), and Sinkhorn's 2 iters divisions with their sums (95 cycles each, 2 us for 20), which go on beside the norm.

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
  const float *sums, *base, *scale, *gain;
  int64_t pre_stride, post_stride, comb_stride, raw_stride, sums_stride, x_stride, h_stride, u_stride;
  int streams, iters, width, segments;
  bool squares;  // are behind each segment's sums
  bool in_pieces;  // streams, h, u and the gain can be taken in whole pieces
  float norm_eps, hc_eps;
};

GPU_INLINE float inverse_rms(float squares, int n, float eps) { return 1.0f / ieee::sqrt(squares / static_cast<float>(n) + eps); }

// Sum of squares of `count` elements, by the tree, in all lanes of the wave.
template <typename Load>
GPU_INLINE float tree_squares(int count, const Load& load) {
  float sum = 0;
  in_order((count - row_lane() + kTreeLanes - 1) / kTreeLanes, [&](int i) { return to_f32(load(row_lane() + i * kTreeLanes)); }, [&](float v) { sum = fma(v, v, sum); });
  return fold_row(sum);
}

// What a wave makes of a token's segments: weights of the streams, and the logits of comb, in shared memory; the rest goes to memory.
template <int N, typename T>
GPU_INLINE void mix(const Feed& p, const T* x, int64_t t, Shared<float> logits, Shared<float> weights) {
  constexpr int kTotals = (2 + N) * N + 1, kPasses = (kTotals + kWave - 1) / kWave;
  const int n = p.streams, elements = n * p.width, num_logits = p.comb == nullptr ? n : (2 + n) * n, totals = num_logits + (p.squares ? 1 : 0);
  float base[kPasses] = {}, slope[kPasses] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int i = pass * kWave + lane();
    if (i >= totals) continue;
    if (i < num_logits) base[pass] = p.base[i], slope[pass] = p.scale[scale_index(i, n)];
    const float* const sums = p.sums + t * p.sums_stride + i;
    float total = 0;
#pragma unroll 16
    for (int s = 0; s < p.segments; ++s) total = total + sums[s * totals];
    if (i < num_logits) p.raw[t * p.raw_stride + i] = total;
    logits.store(i, total);
  }
  sync_wave();
  float squares = 0;
  if (p.squares) {
    squares = logits.load(num_logits);
  } else {
    for (int begin = 0; begin < elements; begin += kHyperSegment) {
      const int count = elements - begin < kHyperSegment ? elements - begin : static_cast<int>(kHyperSegment);
      squares = squares + tree_squares(count, [&](int i) { return x[begin + i]; });
    }
  }
  const float inv = inverse_rms(squares, elements, p.norm_eps);
  if (lane() == 0) p.inv_rms[t] = inv;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int i = pass * kWave + lane();
    if (i >= num_logits) continue;
    const float z = fma(logits.load(i) * inv, slope[pass], base[pass]);
    if (i >= 2 * n) {
      logits.store(i, z);
      continue;
    }
    const float s = sigmoid_f32(z);
    if (i < n) {
      weights.store(i, s + p.hc_eps);
      p.pre[t * p.pre_stride + i] = s + p.hc_eps;
    } else {
      p.post[t * p.post_stride + i - n] = 2.0f * s;
    }
  }
}

template <int N>
GPU_INLINE void comb(const Feed& p, int64_t t, Shared<float> logits) {
  const int n = p.streams;
  LaneMatrix<N> c;
  const auto inside = [&](int i) { return c.row(i) < n && c.col() < n; };
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) c.v[i] = inside(i) ? logits.load((2 + c.row(i)) * n + c.col()) : 0.0f;
  sinkhorn<N>(c, n, p.iters, p.hc_eps, {});
#pragma unroll
  for (int i = 0; i < c.kEach; ++i)
    if (lane() < kTreeLanes && inside(i)) p.comb[t * p.comb_stride + c.row(i) * n + c.col()] = c.v[i];
}

// A block of one token: the first wave adds up the segments and does Sinkhorn, `Threads` others have the channels. The latter's first pieces of x are on their way
// while they wait for the weights, and each of their waves has the norm's squares by itself.
constexpr int kFeedHeld = 2;  // pieces of each stream
constexpr int kFeedFewThreads = 256, kFeedManyThreads = 64;
constexpr int64_t kFeedManyRows = 512;  // from here on blocks of few waves fill the device, and the norm's squares are summed less often
template <typename T, int N, int Threads>
GPU_KERNEL GPU_BOUNDS(Threads + kWave, Threads == kFeedManyThreads && N <= 4 ? 6 : 1) feed_kernel(const Feed p, const T* x, T* h, T* u) {
  SharedMemory memory;
  const Shared<T> kept = memory.take<T>((p.width + kPiece - 1) / kPiece * kPiece);
  const Shared<float> logits = memory.take<float>((2 + N) * N + 1), weights = memory.take<float>(N);
  const int n = p.streams, thread = thread_x() - kWave;
  const int64_t t = block_x();
  const T* const from = x + t * p.x_stride;
  const bool first = wave() == 0;
  const auto in_row = [&](int at) { return at >= p.width ? 0 : p.width - at < kPiece ? p.width - at : kPiece; };  // elements of a piece
  struct Streams {
    Elements<T> v[N];
  };
  const auto fetch = [&](int at) {
    Streams s = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) s.v[j] = load(from + j * p.width + at, in_row(at), p.in_pieces);
    return s;
  };
  Streams held[kFeedHeld];
  if (first) {
    mix<N>(p, from, t, logits, weights);
  } else {
#pragma unroll
    for (int i = 0; i < kFeedHeld; ++i) held[i] = fetch((i * Threads + thread) * kPiece);
  }
  sync_block();

  if (!first) {
    float weight[N];
#pragma unroll
    for (int j = 0; j < N; ++j) weight[j] = j < n ? weights.load(j) : 0.0f;
    const auto put = [&](const Streams& s, int at) {
      const int count = in_row(at);
      if (count == 0) return;
      Elements<T> e;
      Vector<T, kPiece> out;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        float sum = weight[0] * to_f32(s.v[0].v[i]);
#pragma unroll
        for (int j = 1; j < N; ++j)
          if (j < n) sum = fma(weight[j], to_f32(s.v[j].v[i]), sum);
        out.v[i] = e.v[i] = from_f32<T>(sum);
      }
      kept.store_vector(at, out);
      store(h + t * p.h_stride + at, e, count, p.in_pieces);
    };
#pragma unroll
    for (int i = 0; i < kFeedHeld; ++i) put(held[i], (i * Threads + thread) * kPiece);
    for (int at = (kFeedHeld * Threads + thread) * kPiece; at < p.width; at += Threads * kPiece) put(fetch(at), at);
  }
  sync_block();

  if (first) {
    if (p.comb != nullptr) comb<N>(p, t, logits);
    return;
  }
  Elements<float> gain = load(p.gain + thread * kPiece, in_row(thread * kPiece), p.in_pieces);  // on its way before the scale is known
  const float scale = inverse_rms(tree_squares(p.width, [&](int i) { return kept.load(i); }), p.width, p.norm_eps);
  if (thread == 0) p.norm_inv[t] = scale;
  for (int at = thread * kPiece; at < p.width; at += Threads * kPiece) {
    const auto e = kept.template load_vector<kPiece>(at);
    Elements<T> out;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out.v[i] = from_f32<T>(to_f32(e.v[i]) * scale * gain.v[i]);
    store(u + t * p.u_stride + at, out, in_row(at), p.in_pieces);
    const int next = at + Threads * kPiece;
    gain = load(p.gain + next, in_row(next), p.in_pieces);
  }
}

}  // namespace

void hyper_feed(Context& c, const HyperFeed& f, ConstTensorView x, const HyperWeights& w, const HyperShape& shape, ConstTensorView norm) {
  const int64_t rows = x.rows(), n = shape.streams, width = x.dim(2), elements = n * width, logits = f.raw.dim(1);
  const ConstTensorView flat(x.data, x.dtype, {rows, elements}, x.row_stride);
  const ArenaScope scope(*c.workspace);
  // Where chains cannot be copied by 16 bytes another kernel multiplies, and adds up too.
  const bool in_segments = thin::supports(flat, w.fn);
  const int64_t segments = in_segments ? blocks_for(elements, kHyperSegment) : 1;
  TensorView sums = f.raw;
  if (in_segments) {
    sums = c.workspace->tensor(DType::f32, {rows, segments, logits + 1}, "hyperconn segments");
    thin::segment_sums(c, sums, flat, w.fn.rows, kHyperSegment);
  } else {
    lockstep::matmul(c, f.raw, flat, w.fn, kHyperSegment);
  }
  const Feed p = {.pre = f.pre.ptr<float>(), .post = data_of(f.post), .comb = data_of(f.comb), .raw = f.raw.ptr<float>(), .inv_rms = f.inv_rms.ptr<float>(),
                  .norm_inv = f.norm_inv.ptr<float>(), .sums = sums.ptr<float>(), .base = w.base.ptr<float>(), .scale = w.scale.ptr<float>(),
                  .gain = norm.ptr<float>(), .pre_stride = f.pre.row_stride, .post_stride = f.post.row_stride, .comb_stride = f.comb.row_stride,
                  .raw_stride = f.raw.row_stride, .sums_stride = sums.row_stride, .x_stride = x.row_stride, .h_stride = f.h.row_stride, .u_stride = f.u.row_stride,
                  .streams = static_cast<int>(n), .iters = shape.sinkhorn_iters, .width = static_cast<int>(width), .segments = static_cast<int>(segments), .squares = in_segments,
                  .in_pieces = width % kPiece == 0 && streams_aligned(x, f.h, f.u) && is_aligned(norm), .norm_eps = shape.norm_eps, .hc_eps = shape.hc_eps};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(n, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      using T = decltype(t);
      const size_t shared_bytes = sizeof(T) * static_cast<size_t>(blocks_for(width, kPiece) * kPiece) + sizeof(float) * ((2 + kN) * kN + 1 + kN) + 64;
      const auto run = [&](auto threads) {
        constexpr int kThreads = decltype(threads)::value;
        launch(c, "hyper_feed", {.blocks = rows, .threads = kThreads + kWave, .shared_bytes = shared_bytes}, feed_kernel<T, kN, kThreads>, p, x.ptr<T>(), f.h.ptr<T>(), f.u.ptr<T>());
      };
      if (rows >= kFeedManyRows) run(std::integral_constant<int, kFeedManyThreads>());
      else run(std::integral_constant<int, kFeedFewThreads>());
    });
  });
}

}  // namespace lockstep::device
