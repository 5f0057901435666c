// hyper_feed is two launches: the sums of fn's segments (matmul_gpu_thin.cu), and a block a token that adds them up and does all the rest, its row copied in the
// background and kept in shared memory where it fits. hyper_feed_backward is five: 16 threads a token for the gradients of the logits, the sums over tokens of
// those, fn's gradient, and dX, which is read and written once. Dots over channels have 16 threads a row, the tree's virtual lanes. A token's Sinkhorn is in 16
// lanes, an element of the matrix each (four for 8 streams).
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: sums nDE, or 1.6 G multiply-adds for 8192 tokens of 4 x 2048, 54 us; the rest of the feed (n + 2)DE where
// the row has stayed in the cache, otherwise nDE more; post (2n + 1)DE; backward of post nD(E + 4) + D(E + 4); gradients of the logits nDE + 4D; dX
// nD(E + 8) + 4D. A few tokens wait for chains instead: kHyperSegment multiply-adds (0.6 us), nD / 16 of the mean of squares (1.2 us for 8192), and Sinkhorn's
// 2 iters divisions with their sums (80 cycles each, 2 us for 20), which go on beside h and its norm.

#include "ops/chain_gpu.h"
#include "ops/elements_gpu.h"
#include "ops/hyperconn/hyperconn_cpu.h"
#include "ops/matmul/matmul_cpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

// Streams that a kernel is made for: 4, or all that are allowed. Loops over fewer are unrolled to these, so that matrices stay in registers.
template <typename F>
void for_streams(int64_t n, const F& f) {
  if (n <= 4) f(std::integral_constant<int, 4>());
  else f(std::integral_constant<int, static_cast<int>(kHyperMaxStreams)>());
}

GPU_INLINE int scale_index(int i, int n) { return i < n ? 0 : i < 2 * n ? 1 : 2; }

// A token's matrix of n <= N streams in 16 lanes of a wave: lane l has elements l, l + 16, ... of it as N x N, so that all it has are of one column.
template <int N>
struct LaneMatrix {
  static constexpr int kEach = N * N / kTreeLanes, kRowsApart = kTreeLanes / N;
  float v[kEach];
  GPU_INLINE static int row(int i) { return row_lane() / N + i * kRowsApart; }
  GPU_INLINE static int col() { return row_lane() % N; }
  // Element `along` of the row of element i, or of the column.
  template <bool kRows>
  GPU_INLINE float get(int i, int along) const {
    const int first = lane() / kTreeLanes * kTreeLanes;
    return kRows ? shuffle(v[i], first + row_lane() / N * N + along) : shuffle(v[along / kRowsApart], first + along % kRowsApart * N + col());
  }
  // Sum, and dot product with the other's, of the row (column) of element i, first to last.
  template <bool kRows>
  GPU_INLINE float sum(int i, int n) const {
    float sum = get<kRows>(i, 0);
#pragma unroll
    for (int a = 1; a < N; ++a)
      if (a < n) sum = sum + get<kRows>(i, a);
    return sum;
  }
  template <bool kRows>
  GPU_INLINE float dot(const LaneMatrix& other, int i, int n) const {
    float dot = get<kRows>(i, 0) * other.template get<kRows>(i, 0);
#pragma unroll
    for (int a = 1; a < N; ++a)
      if (a < n) dot = fma(get<kRows>(i, a), other.template get<kRows>(i, a), dot);
    return dot;
  }
};

// Where a lane's Sinkhorn leaves what its backward needs: the softmax, then of each division its results and the reciprocals, matrix i lying i * kEach * stride
// further. Null: nowhere.
template <int N>
struct Record {
  float* at = nullptr;
  int64_t stride = 0;
  GPU_INLINE void put(int matrix, const LaneMatrix<N>& m) const {
    if (at == nullptr) return;
#pragma unroll
    for (int i = 0; i < m.kEach; ++i) at[(matrix * m.kEach + i) * stride] = m.v[i];
  }
  GPU_INLINE LaneMatrix<N> get(int matrix) const {
    LaneMatrix<N> m;
#pragma unroll
    for (int i = 0; i < m.kEach; ++i) m.v[i] = at[(matrix * m.kEach + i) * stride];
    return m;
  }
};
constexpr int64_t record_matrices(int iters) { return 1 + 2 * (2 * iters - 1); }

// Division number `number` of the rows, or the columns, by their sums + eps.
template <int N, bool kRows>
GPU_INLINE void divide(LaneMatrix<N>& c, int n, float eps, const Record<N>& record, int number) {
  LaneMatrix<N> inverse;
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) inverse.v[i] = !kRows && i > 0 ? inverse.v[0] : 1.0f / (c.template sum<kRows>(i, n) + eps);
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) c.v[i] = c.v[i] * inverse.v[i];
  record.put(1 + 2 * number, c), record.put(2 + 2 * number, inverse);
}

template <int N, bool kRows>
GPU_INLINE void divide_backward(LaneMatrix<N>& g, int n, const Record<N>& record, int number) {
  const LaneMatrix<N> result = record.get(1 + 2 * number), inverse = record.get(2 + 2 * number);
  float dot[N * N / kTreeLanes];
#pragma unroll
  for (int i = 0; i < g.kEach; ++i) dot[i] = !kRows && i > 0 ? dot[0] : g.template dot<kRows>(result, i, n);
#pragma unroll
  for (int i = 0; i < g.kEach; ++i) g.v[i] = (g.v[i] - dot[i]) * inverse.v[i];
}

// Every lane of the wave calls these.
template <int N>
GPU_INLINE void sinkhorn(LaneMatrix<N>& c, int n, int iters, float eps, const Record<N>& record) {
  float most[N * N / kTreeLanes];
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) {
    most[i] = c.template get<true>(i, 0);
#pragma unroll
    for (int k = 1; k < N; ++k) {
      const float v = c.template get<true>(i, k);
      if (k < n) most[i] = v > most[i] ? v : most[i];
    }
  }
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) c.v[i] = exp_f32(c.v[i] - most[i]);
  float inverse[N * N / kTreeLanes];
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) inverse[i] = 1.0f / c.template sum<true>(i, n);
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) c.v[i] = c.v[i] * inverse[i];
  record.put(0, c);
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) c.v[i] = c.v[i] + eps;
  divide<N, false>(c, n, eps, record, 0);
  for (int i = 1; i < iters; ++i) {
    divide<N, true>(c, n, eps, record, 2 * i - 1);
    divide<N, false>(c, n, eps, record, 2 * i);
  }
}

template <int N>
GPU_INLINE void sinkhorn_backward(LaneMatrix<N>& g, int n, int iters, const Record<N>& record) {
  for (int i = iters - 1; i >= 1; --i) {
    divide_backward<N, false>(g, n, record, 2 * i);
    divide_backward<N, true>(g, n, record, 2 * i - 1);
  }
  divide_backward<N, false>(g, n, record, 0);
  const LaneMatrix<N> p = record.get(0);
  float dot[N * N / kTreeLanes];
#pragma unroll
  for (int i = 0; i < g.kEach; ++i) dot[i] = g.template dot<true>(p, i, n);
#pragma unroll
  for (int i = 0; i < g.kEach; ++i) g.v[i] = p.v[i] * (g.v[i] - dot[i]);
}

struct Feed {
  float *pre, *post, *comb, *raw, *inv_rms, *norm_inv;  // post and comb null: the head's form
  const float *sums, *base, *scale, *gain;
  int64_t pre_stride, post_stride, comb_stride, raw_stride, sums_stride, x_stride, h_stride, u_stride;
  int rows, streams, iters, width, segments;
  int slots;      // stages of the row that shared memory holds
  bool whole;     // which are all
  bool aligned;   // rows of x can be copied by 16 bytes
  bool in_pieces; // streams, h, u and the gain can be taken in whole pieces
  float norm_eps, hc_eps;
};

constexpr int kFeedThreads = 128, kFeedElements = 2048, kFeedAhead = 4;  // elements of a stage, and stages on their way
constexpr int kFeedWholeBytes = 64 << 10;
constexpr int64_t kPairRows = 256;  // from here on pairs of tokens fill a device, and leave fewer lanes idle
template <int N>
constexpr size_t kFeedFloats = 3 * (2 + N) * N + N + 4;  // logits and what they are made with, weights, and two scales

template <typename T>
GPU_INLINE Elements<T> load_piece(Shared<T> from, int at, int count, bool aligned) {
  Elements<T> e = {};
  if (aligned) {
    const auto v = from.template load_vector<kPiece>(at);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) e.v[i] = v.v[i];
  } else {
    for (int i = 0; i < count; ++i) e.v[i] = from.load(at + i);
  }
  return e;
}

// Sum of squares of the elements lane, lane + 16, ... below count.
template <typename T>
GPU_INLINE float add_squares(float sum, Shared<T> from, int count) {
  in_order((count - row_lane() + kTreeLanes - 1) / kTreeLanes, [&](int i) { return to_f32(from.load(row_lane() + i * kTreeLanes)); },
           [&](float v) { sum = fma(v, v, sum); });
  return sum;
}
GPU_INLINE float inverse_rms(float squares, int n, float eps) { return 1.0f / ieee::sqrt(squares / static_cast<float>(n) + eps); }

// A block of one token or two, 128 threads each. Sixteen threads a token of the first wave add squares in the tree's order; the second wave adds up the segments,
// and does Sinkhorn while the first has the norm's squares.
template <typename T, int N, int Tokens>
GPU_KERNEL GPU_BOUNDS(kFeedThreads * Tokens) feed_kernel(const Feed p, const T* x, T* h, T* u) {
  constexpr int kWords = 16 / static_cast<int>(sizeof(T)), kLogits = (2 + N) * N;
  static_assert(Tokens * kTreeLanes <= kWave);
  const int slots = p.slots * kFeedElements, padded = (p.width + kPiece - 1) / kPiece * kPiece;
  SharedMemory memory;
  const Shared<T> all_rows = memory.take<T>(Tokens * slots, 64), all_kept = memory.take<T>(Tokens * padded, 64);
  const Shared<float> all_logits = memory.take<float>(Tokens * kLogits), all_weights = memory.take<float>(Tokens * N), scales = memory.take<float>(2 * Tokens);
  const Shared<float> bases = memory.take<float>(kLogits), slopes = memory.take<float>(kLogits);
  const int n = p.streams, num_logits = p.comb == nullptr ? n : (2 + n) * n, elements = n * p.width;
  const int own = thread_x() / kFeedThreads, thread = thread_x() % kFeedThreads;  // of the pieces; chains are a tree's lanes
  const int chain = lane() / kTreeLanes < Tokens ? lane() / kTreeLanes : 0;       // the token that this thread's lanes are of
  const bool in_tree = lane() < Tokens * kTreeLanes;
  const int64_t first = static_cast<int64_t>(block_x()) * Tokens;
  const auto token = [&](int i) { return first + i < p.rows ? first + i : p.rows - 1; };  // an absent one does the last again
  const int64_t t = token(own), chain_t = token(chain);
  const Shared<T> row = all_rows.from(own * slots), kept = all_kept.from(own * padded);
  const T* const from = x + t * p.x_stride;
  const auto bring = [&](int stage) {
    const int begin = stage * kFeedElements, to = stage % p.slots * kFeedElements;
#pragma unroll
    for (int i = thread * kWords; i < kFeedElements; i += kFeedThreads * kWords) {
      if (begin + i >= elements) continue;
      if (p.aligned && begin + i + kWords <= elements) {
        copy_async(row, to + i, from + begin + i);
      } else {
        for (int k = 0; k < kWords && begin + i + k < elements; ++k) row.store(to + i + k, from[begin + i + k]);
      }
    }
    copy_commit();
  };
#pragma unroll
  for (int s = 0; s < kFeedAhead; ++s) bring(s);
  const auto logit_of = [&](int i, float inv) { return fma(all_logits.load(i) * inv, slopes.load(i % kLogits), bases.load(i % kLogits)); };
  const auto each_logit = [&](const auto& f) {  // of every token, kLogits apart
    for (int i = lane(); i < Tokens * kLogits; i += kWave)
      if (i % kLogits < num_logits) f(i, i % kLogits, i / kLogits);
  };
  if (wave() == 1)
    each_logit([&](int at, int i, int of) {
      const float* const sums = p.sums + token(of) * p.sums_stride + i;
      float total = 0;
#pragma unroll 16
      for (int s = 0; s < p.segments; ++s) total = total + sums[s * num_logits];
      if (of == 0) bases.store(i, p.base[i]), slopes.store(i, p.scale[scale_index(i, n)]);
      p.raw[token(of) * p.raw_stride + i] = total;
      all_logits.store(at, total);
    });
  float squares = 0;
  for (int stage = 0; stage * kFeedElements < elements; ++stage) {
    copy_wait<kFeedAhead - 1>();
    sync_block();
    bring(stage + kFeedAhead);
    const int left = elements - stage * kFeedElements;
    if (wave() == 0 && in_tree)
      squares = add_squares(squares, all_rows.from(chain * slots + stage % p.slots * kFeedElements), left < kFeedElements ? left : kFeedElements);
  }
  if (wave() == 0) {
    const float inv = inverse_rms(fold_row(squares), elements, p.norm_eps);
    if (in_tree && row_lane() == 0) p.inv_rms[chain_t] = inv, scales.store(chain, inv);
  }
  sync_block();

  // pre by the first wave; post and the logits of comb by the second.
  if (wave() == 0 && in_tree && row_lane() < n) {
    const float weight = sigmoid_f32(logit_of(chain * kLogits + row_lane(), scales.load(chain))) + p.hc_eps;
    all_weights.store(chain * N + row_lane(), weight);
    p.pre[chain_t * p.pre_stride + row_lane()] = weight;
  }
  if (wave() == 1)
    each_logit([&](int at, int i, int of) {
      if (i < n) return;
      const float z = logit_of(at, scales.load(of));
      if (i < 2 * n) p.post[token(of) * p.post_stride + i - n] = 2.0f * sigmoid_f32(z);
      else all_logits.store(at, z);
    });
  sync_block();

  float weight[N];
#pragma unroll
  for (int j = 0; j < N; ++j) weight[j] = j < n ? all_weights.load(own * N + j) : 0.0f;
  const auto in_row = [&](int at) { return at >= p.width ? 0 : p.width - at < kPiece ? p.width - at : kPiece; };  // elements of a piece
  const auto each_piece = [&](const auto& f) {
    for (int at = thread * kPiece; at < p.width; at += kFeedThreads * kPiece) f(at, in_row(at));
  };
  each_piece([&](int at, int count) {
    Elements<T> stream[N] = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) stream[j] = p.whole ? load_piece(row, j * p.width + at, count, p.in_pieces) : load(from + j * p.width + at, count, p.in_pieces);
    Vector<T, kPiece> out;
    Elements<T> e;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      float sum = weight[0] * to_f32(stream[0].v[i]);
#pragma unroll
      for (int j = 1; j < N; ++j)
        if (j < n) sum = fma(weight[j], to_f32(stream[j].v[i]), sum);
      out.v[i] = e.v[i] = from_f32<T>(sum);
    }
    kept.store_vector(at, out);
    store(h + t * p.h_stride + at, e, count, p.in_pieces);
  });
  sync_block();
  if (wave() == 0) {
    const float sum = fold_row(in_tree ? add_squares(0.0f, all_kept.from(chain * padded), p.width) : 0.0f);
    const float scale = inverse_rms(sum, p.width, p.norm_eps);
    if (in_tree && row_lane() == 0) p.norm_inv[chain_t] = scale, scales.store(Tokens + chain, scale);
  } else if (wave() == 1 && p.comb != nullptr) {
    LaneMatrix<N> c;
    const auto inside = [&](int i) { return c.row(i) < n && c.col() < n; };
#pragma unroll
    for (int i = 0; i < c.kEach; ++i) c.v[i] = inside(i) ? all_logits.load(chain * kLogits + (2 + c.row(i)) * n + c.col()) : 0.0f;
    sinkhorn<N>(c, n, p.iters, p.hc_eps, {});
#pragma unroll
    for (int i = 0; i < c.kEach; ++i)
      if (in_tree && inside(i)) p.comb[chain_t * p.comb_stride + c.row(i) * n + c.col()] = c.v[i];
  }
  Elements<float> gain = load(p.gain + thread * kPiece, in_row(thread * kPiece), p.in_pieces);  // on its way before the scale is known
  sync_block();
  const float scale = scales.load(Tokens + own);
  each_piece([&](int at, int count) {
    const Elements<T> e = load_piece(kept, at, count, true);
    Elements<T> out;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out.v[i] = from_f32<T>(to_f32(e.v[i]) * scale * gain.v[i]);
    store(u + t * p.u_stride + at, out, count, p.in_pieces);
    const int next = at + kFeedThreads * kPiece;
    gain = load(p.gain + next, in_row(next), p.in_pieces);
  });
}

struct LogitGradients {
  float *dlogits, *draw, *factor, *record;  // draw: of raw, contiguous as dlogits; factor [T]: dx += factor * x
  const float *dh, *dpost, *dcomb, *raw, *inv_rms, *base, *scale;  // dpost and dcomb null: the head's form
  int64_t dh_stride, dpost_stride, dcomb_stride, raw_stride, x_stride, tokens;
  int streams, width, iters;
  float hc_eps;
};

constexpr int kTokenThreads = 64, kTokensABlock = kTokenThreads / kTreeLanes;

// dots[j] = sum_i of x[j, i] * g[i] for i in this lane of the tree: several loads of each come before the first use.
template <int N, typename T>
GPU_INLINE void add_dots(float (&dots)[N], const T* x, const float* g, int n, int width) {
  constexpr int kAhead = 4;
  for (int begin = row_lane(); begin < width; begin += kAhead * kTreeLanes) {
    T v[kAhead][N] = {};
    float d[kAhead] = {};
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = begin + a * kTreeLanes;
      if (at >= width) continue;
      d[a] = g[at];
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < n) v[a][j] = x[static_cast<int64_t>(j) * width + at];
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (begin + a * kTreeLanes >= width) continue;
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < n) dots[j] = fma(to_f32(v[a][j]), d[a], dots[j]);
    }
  }
}

// 16 threads a token.
template <typename T, int N>
GPU_KERNEL GPU_BOUNDS(kTokenThreads, N <= 4 ? 8 : 4) logit_gradients_kernel(const LogitGradients p, const T* x) {
  constexpr int kLogits = (2 + N) * N;
  SharedMemory memory;
  const Shared<float> gradient = memory.take<float>(kTokensABlock * kLogits).from(thread_x() / kTreeLanes * kLogits);
  const int64_t own = static_cast<int64_t>(block_x()) * kTokensABlock + thread_x() / kTreeLanes;
  const bool mine = own < p.tokens;
  const int64_t t = mine ? own : p.tokens - 1;
  const int n = p.streams, num_logits = p.dcomb == nullptr ? n : (2 + n) * n;
  float dpre[N] = {};
  add_dots(dpre, x + t * p.x_stride, p.dh + t * p.dh_stride, n, p.width);
#pragma unroll
  for (int j = 0; j < N; ++j) dpre[j] = fold_row(dpre[j]);
  const float inv = p.inv_rms[t];
  const float* const raw = p.raw + t * p.raw_stride;
  const auto logit = [&](int i) { return fma(raw[i] * inv, p.scale[scale_index(i, n)], p.base[i]); };
  const auto put = [&](int i, float g) {
    gradient.store(i, g);
    if (!mine) return;
    p.dlogits[t * num_logits + i] = g;
    p.draw[t * num_logits + i] = g * p.scale[scale_index(i, n)] * inv;
  };
  for (int i = row_lane(); i < (p.dcomb == nullptr ? n : 2 * n); i += kTreeLanes) {
    const float s = sigmoid_f32(logit(i));
    float g = i < n ? 0.0f : 2.0f * p.dpost[t * p.dpost_stride + i - n];
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j == i && i < n) g = dpre[j];
    put(i, g * (s * (1.0f - s)));
  }
  if (p.dcomb != nullptr) {
    const int64_t lanes = (p.tokens + kTokensABlock - 1) / kTokensABlock * kTokenThreads;
    const Record<N> record = {p.record + own * kTreeLanes + row_lane(), lanes};
    LaneMatrix<N> c, dc;
    const auto inside = [&](int i) { return c.row(i) < n && c.col() < n; };
#pragma unroll
    for (int i = 0; i < c.kEach; ++i) {
      c.v[i] = inside(i) ? logit((2 + c.row(i)) * n + c.col()) : 0.0f;
      dc.v[i] = inside(i) ? p.dcomb[t * p.dcomb_stride + c.row(i) * n + c.col()] : 0.0f;
    }
    sinkhorn<N>(c, n, p.iters, p.hc_eps, record);
    sinkhorn_backward<N>(dc, n, p.iters, record);
#pragma unroll
    for (int i = 0; i < c.kEach; ++i)
      if (inside(i)) put((2 + c.row(i)) * n + c.col(), dc.v[i]);
  }
  sync_wave();
  if (!mine || row_lane() > 0) return;
  float dot = 0;
#pragma unroll 8
  for (int i = 0; i < num_logits; ++i) dot = fma(gradient.load(i) * p.scale[scale_index(i, n)], raw[i], dot);
  p.factor[t] = -(dot * (inv * inv * inv / static_cast<float>(n * p.width)));
}

struct StreamGradients {
  float* dx;
  const float *dxout, *dh, *comb, *pre, *draw, *factor, *fn;  // comb and dxout null: the head's form
  int64_t dx_stride, dxout_stride, dh_stride, comb_stride, pre_stride, draw_stride, x_stride, fn_stride;
  int rows, width, streams, logits;
};

constexpr int kStreamThreads = 128, kStreamTokens = 64, kStreamAhead = 4;
// What a token's channels share: gradients of raw, comb, pre, factor.
template <int N>
struct TokenLine {
  static constexpr int kLogits = (2 + N) * N, kComb = kLogits, kPre = kComb + N * N, kFactor = kPre + N, kFloats = kFactor + 4;
};

// dx[t, j, i]: comb's sum over dxout, pre * dh, factor * x, then the chain over logits l of draw[t, l] * fn[l, j, i]. A thread has one channel of all streams; it
// keeps fn's columns where they fit in registers, and walks over tokens, the elements of several on their way at once. kFull: all N streams, not the head's form.
template <typename T, int N, bool kFull>
GPU_KERNEL GPU_BOUNDS(kStreamThreads, 2) stream_gradients_kernel(const StreamGradients p, const T* x) {
  using Line = TokenLine<N>;
  constexpr bool kKeep = N <= 4;
  SharedMemory memory;
  const Shared<float> lines = memory.take<float>(kStreamTokens * Line::kFloats);
  const int n = kFull ? N : p.streams, logits = kFull ? Line::kLogits : p.logits, thread = thread_x();
  const int t0 = block_x() * kStreamTokens, tokens = p.rows - t0 < kStreamTokens ? p.rows - t0 : kStreamTokens;
  for (int i = thread; i < tokens * Line::kFloats; i += kStreamThreads) {
    const int place = i % Line::kFloats;
    const int64_t t = t0 + i / Line::kFloats;
    float v = 0;
    if (place < Line::kLogits) {
      if (place < logits) v = p.draw[t * p.draw_stride + place];
    } else if (place < Line::kPre) {
      const int j = (place - Line::kComb) / N, k = (place - Line::kComb) % N;
      if (p.comb != nullptr && j < n && k < n) v = p.comb[t * p.comb_stride + j * n + k];
    } else if (place < Line::kFactor) {
      if (place - Line::kPre < n) v = p.pre[t * p.pre_stride + place - Line::kPre];
    } else if (place == Line::kFactor) {
      v = p.factor[t];
    }
    lines.store(i, v);
  }
  sync_block();

  const int channel = block_y() * kStreamThreads + thread;
  if (channel >= p.width) return;
  const float* const columns = p.fn + channel;
  float fn[kKeep ? Line::kLogits : 1][N] = {};
  if constexpr (kKeep) {
#pragma unroll
    for (int l = 0; l < Line::kLogits; ++l)
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (l < logits && j < n) fn[l][j] = columns[l * p.fn_stride + j * p.width];
  }
  struct Tokens {
    float g[kStreamAhead][N], d[kStreamAhead];
    T v[kStreamAhead][N];
  };
  const auto fetch = [&](Tokens& to, int begin) {
#pragma unroll
    for (int a = 0; a < kStreamAhead; ++a) {
      if (begin + a >= tokens) continue;
      const int64_t t = t0 + begin + a;
      to.d[a] = p.dh[t * p.dh_stride + channel];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j >= n) continue;
        to.v[a][j] = x[t * p.x_stride + j * p.width + channel];
        if (kFull || p.comb != nullptr) to.g[a][j] = p.dxout[t * p.dxout_stride + j * p.width + channel];
      }
    }
  };
  const auto finish = [&](const Tokens& from, int begin) {
#pragma unroll
    for (int a = 0; a < kStreamAhead; ++a) {
      if (begin + a >= tokens) continue;
      const Shared<float> line = lines.from((begin + a) * Line::kFloats);
      const float factor = line.load(Line::kFactor);
      float sum[N] = {};
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j >= n) continue;
        if (kFull || p.comb != nullptr) {
          sum[j] = line.load(Line::kComb + j * N) * from.g[a][0];
#pragma unroll
          for (int k = 1; k < N; ++k)
            if (k < n) sum[j] = fma(line.load(Line::kComb + j * N + k), from.g[a][k], sum[j]);
        }
        sum[j] = fma(line.load(Line::kPre + j), from.d[a], sum[j]);
        sum[j] = fma(factor, to_f32(from.v[a][j]), sum[j]);
      }
      if constexpr (kKeep) {
#pragma unroll
        for (int l = 0; l < Line::kLogits; l += 4) {
          if (l >= logits) continue;
          const auto draw = line.template load_vector<4>(l);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (l + i >= logits) continue;
#pragma unroll
            for (int j = 0; j < N; ++j)
              if (j < n) sum[j] = fma(draw.v[i], fn[l + i][j], sum[j]);
          }
        }
      } else {
#pragma unroll 1
        for (int l = 0; l < logits; ++l)
#pragma unroll
          for (int j = 0; j < N; ++j)
            if (j < n) sum[j] = fma(line.load(l), columns[l * p.fn_stride + j * p.width], sum[j]);
      }
      float* const to = p.dx + (t0 + begin + a) * p.dx_stride + channel;
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < n) to[j * p.width] = sum[j];
    }
  };
  Tokens even = {}, odd = {};
  fetch(even, 0);
  for (int begin = 0; begin < tokens; begin += 2 * kStreamAhead) {
    fetch(odd, begin + kStreamAhead);
    finish(even, begin);
    fetch(even, begin + 2 * kStreamAhead);
    finish(odd, begin + kStreamAhead);
  }
}

struct LogitSums {
  float* sums;  // of g, then of g * mu, a logit each
  const float *g, *raw, *inv_rms;
  int64_t g_stride, raw_stride, rows;
  int logits;
  bool aligned;
};
// Chains over all tokens: a block has 16 of them, of one kind.
GPU_KERNEL GPU_BOUNDS(kChainThreads) logit_sums_kernel(const LogitSums p) {
  const int first = block_x() * kChainColumns, columns = p.logits - first < kChainColumns ? p.logits - first : kChainColumns;
  const bool of_scale = block_y() == 1;
  struct Quad {
    Vector<float, 4> g, raw;
    float inv;
  };
  const auto load = [&](int64_t t, int column) {
    const float* const g = p.g + t * p.g_stride + first + column;
    const float* const raw = p.raw + t * p.raw_stride + first + column;
    Quad q = {};
    q.inv = p.inv_rms[t];
    if (p.aligned && column + 4 <= columns) {
      q.g = *reinterpret_cast<const Vector<float, 4>*>(g);
      q.raw = *reinterpret_cast<const Vector<float, 4>*>(raw);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < columns) q.g.v[i] = g[i], q.raw.v[i] = raw[i];
    }
    return q;
  };
  const auto terms = [&](const Quad& q) {
    ChainTerms out = {.a = q.g, .b = {}};
#pragma unroll
    for (int i = 0; i < 4; ++i) out.b.v[i] = of_scale ? q.raw.v[i] * q.inv : 1.0f;
    return out;
  };
  const float sum = chain_columns(0.0f, p.rows, columns, load, terms);
  if (thread_x() < columns) p.sums[block_y() * p.logits + first + thread_x()] = sum;
}

constexpr int kSumThreads = 128;
// dbase += the sums of g, dscale += those of g * mu over the logits that share it.
GPU_KERNEL GPU_BOUNDS(kSumThreads) add_logit_sums_kernel(float* dbase, float* dscale, const float* sums, int logits, int streams, bool head) {
  const int i = thread_x();
  if (i < logits) dbase[i] = dbase[i] + sums[i];
  if (i < (head ? 1 : 3)) {
    float total = 0;
    for (int k = 0; k < logits; ++k)
      if (scale_index(k, streams) == i) total = total + sums[logits + k];
    dscale[i] = dscale[i] + total;
  }
}

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

float* data_of(TensorView v) { return v.empty() ? nullptr : v.ptr<float>(); }
const float* data_of(ConstTensorView v) { return v.empty() ? nullptr : v.ptr<float>(); }

// Every stream of x, and every row of the others, begins at a multiple of 16 bytes.
template <typename... Views>
bool streams_aligned(ConstTensorView x, const Views&... v) {
  return x.dim(2) * static_cast<int64_t>(dtype_bytes(x.dtype)) % 16 == 0 && all_aligned(x, v...);
}

template <typename F>
void with_dtype(DType t, const F& f) {
  if (t == DType::f32) f(float());
  else f(bf16());
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
    sums = c.workspace->tensor(DType::f32, {rows, segments, logits}, "hyperconn segments");
    thin::segment_sums(c, sums, flat, w.fn.rows, kHyperSegment);
  } else {
    lockstep::matmul(c, f.raw, flat, w.fn, kHyperSegment);
  }
  const int64_t stages = blocks_for(elements, kFeedElements);
  const bool whole = elements * static_cast<int64_t>(dtype_bytes(x.dtype)) <= kFeedWholeBytes;
  const Feed p = {.pre = f.pre.ptr<float>(), .post = data_of(f.post), .comb = data_of(f.comb), .raw = f.raw.ptr<float>(), .inv_rms = f.inv_rms.ptr<float>(),
                  .norm_inv = f.norm_inv.ptr<float>(), .sums = sums.ptr<float>(), .base = w.base.ptr<float>(), .scale = w.scale.ptr<float>(),
                  .gain = norm.ptr<float>(), .pre_stride = f.pre.row_stride, .post_stride = f.post.row_stride, .comb_stride = f.comb.row_stride,
                  .raw_stride = f.raw.row_stride, .sums_stride = sums.row_stride, .x_stride = x.row_stride, .h_stride = f.h.row_stride, .u_stride = f.u.row_stride,
                  .rows = static_cast<int>(rows), .streams = static_cast<int>(n), .iters = shape.sinkhorn_iters, .width = static_cast<int>(width), .segments = static_cast<int>(segments),
                  .slots = static_cast<int>(whole ? std::max<int64_t>(stages, kFeedAhead + 1) : kFeedAhead + 1), .whole = whole, .aligned = all_aligned(x),
                  .in_pieces = width % kPiece == 0 && streams_aligned(x, f.h, f.u) && is_aligned(norm), .norm_eps = shape.norm_eps, .hc_eps = shape.hc_eps};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(n, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      using T = decltype(t);
      const size_t kept = static_cast<size_t>(blocks_for(width, kPiece) * kPiece);
      const size_t token_bytes = sizeof(T) * (static_cast<size_t>(p.slots) * kFeedElements + kept) + sizeof(float) * kFeedFloats<kN> + 64;
      const auto run = [&](auto tokens) {
        constexpr int kTokens = decltype(tokens)::value;
        const Grid grid = {.blocks = blocks_for(rows, kTokens), .threads = kFeedThreads * kTokens, .shared_bytes = kTokens * token_bytes};
        launch(c, "hyper_feed", grid, feed_kernel<T, kN, kTokens>, p, x.ptr<T>(), f.h.ptr<T>(), f.u.ptr<T>());
      };
      if (rows >= kPairRows) run(std::integral_constant<int, 2>());
      else run(std::integral_constant<int, 1>());
    });
  });
}

void hyper_feed_backward(Context& c, TensorView dx, const HyperGradients& dw, ConstTensorView dh, ConstTensorView dpost, ConstTensorView dcomb,
                         ConstTensorView dxout, ConstTensorView x, const HyperFeed& f, const HyperWeights& w, const HyperShape& shape) {
  const int64_t rows = x.rows(), n = shape.streams, width = x.dim(2), logits = f.raw.dim(1), blocks = blocks_for(rows, kTokensABlock);
  const bool head = f.comb.empty();
  const ArenaScope scope(*c.workspace);
  const TensorView dlogits = c.workspace->tensor(DType::f32, f.raw.shape, "hyperconn logit gradients");
  const TensorView draw = c.workspace->tensor(DType::f32, f.raw.shape, "hyperconn draw");
  const TensorView factor = c.workspace->tensor(DType::f32, {rows}, "hyperconn factors");
  with_dtype(x.dtype, [&](auto t) {
    for_streams(n, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      using T = decltype(t);
      const ArenaScope record_scope(*c.workspace);
      const Shape recorded = {LaneMatrix<kN>::kEach * record_matrices(shape.sinkhorn_iters), blocks * kTokenThreads};
      const TensorView record = head ? TensorView() : c.workspace->tensor(DType::f32, recorded, "sinkhorn record");
      const LogitGradients p = {.dlogits = dlogits.ptr<float>(), .draw = draw.ptr<float>(), .factor = factor.ptr<float>(), .record = data_of(record), .dh = dh.ptr<float>(),
                                .dpost = data_of(dpost), .dcomb = data_of(dcomb), .raw = f.raw.ptr<float>(), .inv_rms = f.inv_rms.ptr<float>(),
                                .base = w.base.ptr<float>(), .scale = w.scale.ptr<float>(), .dh_stride = dh.row_stride,
                                .dpost_stride = dpost.row_stride, .dcomb_stride = dcomb.row_stride, .raw_stride = f.raw.row_stride, .x_stride = x.row_stride,
                                .tokens = rows, .streams = static_cast<int>(n), .width = static_cast<int>(width), .iters = shape.sinkhorn_iters,
                                .hc_eps = shape.hc_eps};
      const Grid grid = {.blocks = blocks, .threads = kTokenThreads, .shared_bytes = sizeof(float) * kTokensABlock * (2 + kN) * kN};
      launch(c, "hyper_logit_gradients", grid, logit_gradients_kernel<T, kN>, p, x.ptr<T>());
    });
  });

  if (!dw.base.empty()) {
    const TensorView sums = c.workspace->tensor(DType::f32, {2, logits}, "hyperconn logit sums");
    const LogitSums p = {.sums = sums.ptr<float>(), .g = dlogits.ptr<float>(), .raw = f.raw.ptr<float>(), .inv_rms = f.inv_rms.ptr<float>(),
                         .g_stride = dlogits.row_stride, .raw_stride = f.raw.row_stride, .rows = rows, .logits = static_cast<int>(logits),
                         .aligned = all_aligned(dlogits, f.raw)};
    launch(c, "hyper_logit_sums", {.blocks = blocks_for(logits, kChainColumns), .threads = kChainThreads, .blocks_y = 2, .shared_bytes = kChainBytes},
           logit_sums_kernel, p);
    launch(c, "hyper_add_logit_sums", {.blocks = 1, .threads = kSumThreads}, add_logit_sums_kernel, dw.base.ptr<float>(), dw.scale.ptr<float>(),
           sums.ptr<float>(), static_cast<int>(logits), static_cast<int>(n), head);
  }
  const ConstTensorView flat(x.data, x.dtype, {rows, n * width}, x.row_stride);
  if (!dw.fn.empty()) lockstep::matmul_backward_weight(c, dw.fn, draw, flat);

  with_dtype(x.dtype, [&](auto t) {
    for_streams(n, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      using T = decltype(t);
      const StreamGradients q = {.dx = dx.ptr<float>(), .dxout = data_of(dxout), .dh = dh.ptr<float>(), .comb = data_of(f.comb), .pre = f.pre.ptr<float>(),
                                 .draw = draw.ptr<float>(), .factor = factor.ptr<float>(), .fn = w.fn.rows.ptr<float>(), .dx_stride = dx.row_stride,
                                 .dxout_stride = dxout.row_stride, .dh_stride = dh.row_stride, .comb_stride = f.comb.row_stride,
                                 .pre_stride = f.pre.row_stride, .draw_stride = draw.row_stride, .x_stride = x.row_stride, .fn_stride = w.fn.rows.row_stride,
                                 .rows = static_cast<int>(rows), .width = static_cast<int>(width), .streams = static_cast<int>(n),
                                 .logits = static_cast<int>(logits)};
      const Grid grid = {.blocks = blocks_for(rows, kStreamTokens), .threads = kStreamThreads, .blocks_y = blocks_for(width, kStreamThreads),
                         .shared_bytes = sizeof(float) * kStreamTokens * TokenLine<kN>::kFloats};
      const auto kernel = n == 4 && !head ? stream_gradients_kernel<T, kN, kN == 4> : stream_gradients_kernel<T, kN, false>;
      launch(c, "hyper_stream_gradients", grid, kernel, q, x.ptr<T>());
    });
  });
}

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
