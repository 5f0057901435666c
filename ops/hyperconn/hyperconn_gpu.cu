// Streams are mixed elementwise, 8 channels of a token a thread. Dots over channels keep the tree of ops/row_gpu.h with several of its lanes a thread, so that
// loads are of 8 or 16 bytes; those of several steps are made before the first store, which might be to any of them. A token's Sinkhorn is in 16 lanes, an
// element of the matrix each (four for 8 streams). The mean of squares has a block a token, which copies the row in the background.
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: coefficients nDE; pre (n + 1)DE; post (2n + 1)DE; backward of pre nD(E + 8) + 4D; of post
// nD(E + 8) + D(E + 4); of the coefficients, with the product's input gradient, nD(E + 8). A few tokens wait for chains instead: nD / 16 additions (2 us for
// 16384), and Sinkhorn's 2 iters divisions with their sums (80 cycles each, 2 us for 20).

#include "ops/elements_gpu.h"
#include "ops/hyperconn/hyperconn_cpu.h"
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

struct Coefficients {
  float *pre, *post, *comb, *inv_rms;  // post and comb null: the head's form
  const float *raw, *base, *scale;
  int64_t pre_stride, post_stride, comb_stride, raw_stride;
  int streams, iters, elements;
  float norm_eps, hc_eps;
};

constexpr int kMixThreads = 64, kMixElements = 2048, kMixStages = 5;

// A block a token. All threads bring its elements, four stages ahead; 16 add their squares, and the wave that has them goes on.
template <typename T, int N>
GPU_KERNEL coefficients_kernel(const Coefficients p, const T* x, int64_t x_stride, bool aligned) {
  constexpr int kWords = 16 / static_cast<int>(sizeof(T));
  SharedMemory memory;
  const Shared<T> row = memory.take<T>(kMixStages * kMixElements);
  const Shared<float> logits = memory.take<float>((2 + N) * N);
  const int64_t t = block_x();
  const int thread = thread_x(), n = p.streams, num_logits = p.comb == nullptr ? n : (2 + n) * n;
  const T* const from = x + t * x_stride;
  const auto bring = [&](int stage, int begin) {
#pragma unroll 4
    for (int i = thread * kWords; i < kMixElements && begin + i < p.elements; i += kMixThreads * kWords) {
      if (aligned && begin + i + kWords <= p.elements) {
        copy_async(row, stage * kMixElements + i, from + begin + i);
      } else {
        for (int k = 0; k < kWords && begin + i + k < p.elements; ++k) row.store(stage * kMixElements + i + k, from[begin + i + k]);
      }
    }
    copy_commit();
  };
#pragma unroll
  for (int s = 0; s + 1 < kMixStages; ++s) bring(s, s * kMixElements);
  float squares = 0;
  int stage = 0;
  for (int begin = 0; begin < p.elements; begin += kMixElements) {
    copy_wait<kMixStages - 2>();
    sync_block();
    bring(stage == 0 ? kMixStages - 1 : stage - 1, begin + (kMixStages - 1) * kMixElements);
    if (thread < kTreeLanes) {
      const Shared<T> piece = row.from(stage * kMixElements);
      const int count = p.elements - begin < kMixElements ? p.elements - begin : kMixElements;
#pragma unroll 32
      for (int i = thread; i < count; i += kTreeLanes) {
        const float v = to_f32(piece.load(i));
        squares = fma(v, v, squares);
      }
    }
    stage = stage + 1 == kMixStages ? 0 : stage + 1;
  }
  if (wave() > 0) return;
  squares = shuffle(fold_row(squares), 0);
  const float inv = 1.0f / ieee::sqrt(squares / static_cast<float>(p.elements) + p.norm_eps);
  if (thread == 0) p.inv_rms[t] = inv;
  for (int i = thread; i < num_logits; i += kWave) {
    const float z = fma(p.raw[t * p.raw_stride + i] * inv, p.scale[scale_index(i, n)], p.base[i]);
    if (i < n) p.pre[t * p.pre_stride + i] = sigmoid_f32(z) + p.hc_eps;
    else if (i < 2 * n) p.post[t * p.post_stride + i - n] = 2.0f * sigmoid_f32(z);
    else logits.store(i, z);
  }
  if (p.comb == nullptr) return;
  sync_wave();
  LaneMatrix<N> c;
  const auto inside = [&](int i) { return c.row(i) < n && c.col() < n; };
#pragma unroll
  for (int i = 0; i < c.kEach; ++i) c.v[i] = inside(i) ? logits.load((2 + c.row(i)) * n + c.col()) : 0.0f;
  sinkhorn<N>(c, n, p.iters, p.hc_eps, {});
#pragma unroll
  for (int i = 0; i < c.kEach; ++i)
    if (thread < kTreeLanes && inside(i)) p.comb[t * p.comb_stride + c.row(i) * n + c.col()] = c.v[i];
}

struct CoefficientGradients {
  float *dlogits, *factor, *record;  // factor [T]: dx += factor * x
  const float *dpre, *dpost, *dcomb, *raw, *inv_rms, *base, *scale;
  int64_t dlogits_stride, dpre_stride, dpost_stride, dcomb_stride, raw_stride, tokens, elements;
  int streams, iters;
  float hc_eps;
};

constexpr int kTokenThreads = 64, kTokensABlock = kTokenThreads / kTreeLanes;

// 16 threads a token.
template <int N>
GPU_KERNEL GPU_BOUNDS(kTokenThreads) coefficients_backward_kernel(const CoefficientGradients p) {
  constexpr int kLogits = (2 + N) * N;
  SharedMemory memory;
  const Shared<float> gradient = memory.take<float>(kTokensABlock * kLogits).from(thread_x() / kTreeLanes * kLogits);
  const int64_t own = static_cast<int64_t>(block_x()) * kTokensABlock + thread_x() / kTreeLanes;
  const bool mine = own < p.tokens;
  const int64_t t = mine ? own : p.tokens - 1;
  const int n = p.streams, num_logits = p.dcomb == nullptr ? n : (2 + n) * n;
  const float inv = p.inv_rms[t];
  const float* const raw = p.raw + t * p.raw_stride;
  const auto logit = [&](int i) { return fma(raw[i] * inv, p.scale[scale_index(i, n)], p.base[i]); };
  const auto put = [&](int i, float g) {
    gradient.store(i, g);
    if (mine) p.dlogits[t * p.dlogits_stride + i] = g;
  };
  for (int i = row_lane(); i < (p.dcomb == nullptr ? n : 2 * n); i += kTreeLanes) {
    const float s = sigmoid_f32(logit(i));
    put(i, (i < n ? p.dpre[t * p.dpre_stride + i] : 2.0f * p.dpost[t * p.dpost_stride + i - n]) * (s * (1.0f - s)));
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
  p.factor[t] = -(dot * (inv * inv * inv / static_cast<float>(p.elements)));
}

// dx[t, :] += factor[t] * x[t, :].
template <typename T>
GPU_KERNEL add_scaled_kernel(float* dx, int64_t dx_stride, const float* factor, const T* x, int64_t x_stride, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  float* const to = dx + p.row * dx_stride + p.at;
  const Elements<T> v = load(x + p.row * x_stride + p.at, p.count, aligned);
  Elements<float> sum = load(to, p.count, aligned);
  const float f = factor[p.row];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) sum.v[i] = fma(f, to_f32(v.v[i]), sum.v[i]);
  store(to, sum, p.count, aligned);
}

constexpr int kInputThreads = 128, kInputCols = 4, kInputTokens = 64, kInputAhead = 4, kInputLogits = 24;

struct InputGradient {
  float* dx;
  const float *dlogits, *factor, *fn;
  int64_t dx_stride, x_stride, fn_stride;
  int rows, cols, logits;
};
// dx[t, k] += factor[t] * x[t, k], then the chain over logits l of dlogits[t, l] * fn[l, k]. A thread keeps 4 columns of fn, at most 24 rows, and walks over 64
// tokens, the elements of four on their way at once.
template <typename T>
GPU_KERNEL GPU_BOUNDS(kInputThreads) input_gradient_kernel(const InputGradient p, const T* x) {
  SharedMemory memory;
  const Shared<float> dlogits = memory.take<float>(kInputTokens * kInputLogits), factor = memory.take<float>(kInputTokens);
  const int thread = thread_x(), t0 = block_x() * kInputTokens, tokens = p.rows - t0 < kInputTokens ? p.rows - t0 : kInputTokens;
  for (int i = thread; i < kInputTokens * kInputLogits; i += kInputThreads) {
    const int t = i / kInputLogits, l = i % kInputLogits;
    dlogits.store(i, t < tokens && l < p.logits ? p.dlogits[static_cast<int64_t>(t0 + t) * p.logits + l] : 0.0f);
  }
  for (int t = thread; t < tokens; t += kInputThreads) factor.store(t, p.factor[t0 + t]);
  sync_block();

  const int col = (block_y() * kInputThreads + thread) * kInputCols;
  if (col >= p.cols) return;
  using Four = Vector<float, kInputCols>;
  Four fn[kInputLogits] = {};
#pragma unroll
  for (int l = 0; l < kInputLogits; ++l)
    if (l < p.logits) fn[l] = *reinterpret_cast<const Four*>(p.fn + l * p.fn_stride + col);
  for (int begin = 0; begin < tokens; begin += kInputAhead) {
    Four sum[kInputAhead];
    Vector<T, kInputCols> v[kInputAhead];
#pragma unroll
    for (int i = 0; i < kInputAhead; ++i) {
      if (begin + i >= tokens) continue;
      sum[i] = *reinterpret_cast<const Four*>(p.dx + (t0 + begin + i) * p.dx_stride + col);
      v[i] = *reinterpret_cast<const Vector<T, kInputCols>*>(x + (t0 + begin + i) * p.x_stride + col);
    }
#pragma unroll
    for (int i = 0; i < kInputAhead; ++i) {
      if (begin + i >= tokens) continue;
      const float f = factor.load(begin + i);
#pragma unroll
      for (int k = 0; k < kInputCols; ++k) sum[i].v[k] = fma(f, to_f32(v[i].v[k]), sum[i].v[k]);
#pragma unroll
      for (int l = 0; l < kInputLogits; l += 4) {
        if (l >= p.logits) continue;
        const auto d = dlogits.load_vector<4>((begin + i) * kInputLogits + l);
#pragma unroll
        for (int a = 0; a < 4; ++a)
          if (l + a < p.logits)
#pragma unroll
            for (int k = 0; k < kInputCols; ++k) sum[i].v[k] = fma(d.v[a], fn[l + a].v[k], sum[i].v[k]);
      }
      *reinterpret_cast<Four*>(p.dx + (t0 + begin + i) * p.dx_stride + col) = sum[i];
    }
  }
}

constexpr int kRawThreads = 512, kRawEach = 8;

struct RawGradient {
  float* g;
  const float *raw, *inv_rms, *scale;
  float *dbase, *dscale;  // null: not wanted
  int64_t g_stride, raw_stride, rows;
  int logits, streams;
  bool head;
};
// One block: the sums are chains over all tokens. All threads bring pieces of them, and turn g into the gradient of raw; a thread a sum adds.
GPU_KERNEL GPU_BOUNDS(kRawThreads) raw_gradient_kernel(const RawGradient p) {
  SharedMemory memory;
  const Shared<float> gradient = memory.take<float>(kRawThreads * kRawEach), mu = memory.take<float>(kRawThreads * kRawEach);
  const int thread = thread_x(), tokens = kRawThreads * kRawEach / p.logits;
  int logit[kRawEach], token[kRawEach];
  float scale[kRawEach], g[kRawEach], raw[kRawEach], inv[kRawEach];
#pragma unroll
  for (int i = 0; i < kRawEach; ++i) {
    const int at = i * kRawThreads + thread;
    logit[i] = at % p.logits, token[i] = at / p.logits;
    scale[i] = p.scale[scale_index(logit[i], p.streams)];
  }
  const auto inside = [&](int i, int64_t begin) { return token[i] < tokens && begin + token[i] < p.rows; };
  const auto bring = [&](int64_t begin) {
#pragma unroll
    for (int i = 0; i < kRawEach; ++i) {
      g[i] = raw[i] = inv[i] = 0;
      if (!inside(i, begin)) continue;
      const int64_t t = begin + token[i];
      g[i] = p.g[t * p.g_stride + logit[i]], raw[i] = p.raw[t * p.raw_stride + logit[i]], inv[i] = p.inv_rms[t];
    }
  };
  bring(0);
  float base_sum = 0, scale_sum = 0;
  const int adds_base = thread, adds_scale = thread - kRawThreads / 2;  // in waves of their own
  for (int64_t begin = 0; begin < p.rows; begin += tokens) {
#pragma unroll
    for (int i = 0; i < kRawEach; ++i) {
      gradient.store(i * kRawThreads + thread, g[i]);
      mu.store(i * kRawThreads + thread, raw[i] * inv[i]);
      if (inside(i, begin)) p.g[(begin + token[i]) * p.g_stride + logit[i]] = g[i] * scale[i] * inv[i];
    }
    sync_block();
    bring(begin + tokens);
    const int rows = p.rows - begin < tokens ? static_cast<int>(p.rows - begin) : tokens;
    if (adds_base < p.logits) {
#pragma unroll 16
      for (int t = 0; t < rows; ++t) base_sum = base_sum + gradient.load(t * p.logits + adds_base);
    }
    if (adds_scale >= 0 && adds_scale < p.logits) {
#pragma unroll 16
      for (int t = 0; t < rows; ++t) scale_sum = fma(gradient.load(t * p.logits + adds_scale), mu.load(t * p.logits + adds_scale), scale_sum);
    }
    sync_block();
  }
  if (p.dbase == nullptr) return;
  if (adds_base < p.logits) p.dbase[adds_base] = p.dbase[adds_base] + base_sum;
  if (adds_scale >= 0 && adds_scale < p.logits) gradient.store(adds_scale, scale_sum);
  sync_block();
  if (thread < (p.head ? 1 : 3)) {
    float total = 0;
    for (int i = 0; i < p.logits; ++i)
      if (scale_index(i, p.streams) == thread) total = total + gradient.load(i);
    p.dscale[thread] = p.dscale[thread] + total;
  }
}

template <typename T, int N>
GPU_KERNEL pre_kernel(T* h, int64_t h_stride, const T* x, int64_t x_stride, const float* pre, int64_t pre_stride, int n, bool aligned, int64_t rows, int64_t width) {
  const Piece p = piece_of_thread(rows, width);
  if (p.count == 0) return;
  Elements<T> stream[N] = {};
  float weight[N] = {};
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < n) {
      stream[j] = load(x + p.row * x_stride + j * width + p.at, p.count, aligned);
      weight[j] = pre[p.row * pre_stride + j];
    }
  Elements<T> out;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    float sum = weight[0] * to_f32(stream[0].v[i]);
#pragma unroll
    for (int j = 1; j < N; ++j)
      if (j < n) sum = fma(weight[j], to_f32(stream[j].v[i]), sum);
    out.v[i] = from_f32<T>(sum);
  }
  store(h + p.row * h_stride + p.at, out, p.count, aligned);
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

constexpr int kPreLanes = 4, kPreThreads = kTreeLanes / kPreLanes, kPreAhead = 4;

// 4 threads a stream of a token.
template <typename T, bool kAligned>
GPU_KERNEL GPU_BOUNDS(kRowThreads)
    pre_backward_kernel(float* dx, int64_t dx_stride, float* dpre, int64_t dpre_stride, const float* dh, int64_t dh_stride, const T* x, int64_t x_stride,
                        const float* pre, int64_t pre_stride, int streams, int64_t rows, int64_t width) {
  const int64_t item = (static_cast<int64_t>(block_x()) * kRowThreads + thread_x()) / kPreThreads, t = item / streams;
  const int j = static_cast<int>(item % streams), part = thread_x() % kPreThreads;
  const bool mine = t < rows;
  const T* const stream = x + t * x_stride + j * width;
  const float* const g = dh + t * dh_stride;
  float* const to = dx + t * dx_stride + j * width;
  const float weight = mine ? pre[t * pre_stride + j] : 0.0f;
  const int64_t n = mine ? width : 0;
  using Lanes = Vector<float, kPreLanes>;
  Lanes dot = {};
  for (int64_t begin = part * kPreLanes; begin < n; begin += kPreAhead * kTreeLanes) {
    Lanes v[kPreAhead], grad[kPreAhead], sum[kPreAhead];
#pragma unroll
    for (int a = 0; a < kPreAhead; ++a) {
      const int64_t at = begin + a * kTreeLanes;
      v[a] = load_lanes<kPreLanes, kAligned>(stream, at, n);
      grad[a] = load_lanes<kPreLanes, kAligned>(g, at, n);
      sum[a] = load_lanes<kPreLanes, kAligned>(to, at, n);
    }
#pragma unroll
    for (int a = 0; a < kPreAhead; ++a) {
      const int64_t at = begin + a * kTreeLanes;
#pragma unroll
      for (int i = 0; i < kPreLanes; ++i) {
        if (at + (kAligned ? 0 : i) < n) dot.v[i] = fma(v[a].v[i], grad[a].v[i], dot.v[i]);
        sum[a].v[i] = fma(weight, grad[a].v[i], sum[a].v[i]);
      }
      store_lanes<kPreLanes, kAligned>(to, at, n, sum[a]);
    }
  }
  const float total = fold_lanes(dot);
  if (mine && part == 0) dpre[t * dpre_stride + j] = total;
}

template <typename T, int N>
GPU_KERNEL GPU_BOUNDS(kElementThreads)
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
  float *dx, *dy, *dpost, *dcomb;
  const float *dxout, *post, *comb;
  int64_t dx_stride, dy_stride, dpost_stride, dcomb_stride, dxout_stride, x_stride, y_stride, post_stride, comb_stride;
  int64_t rows, width;
  int streams;
};
// Lanes of the tree a thread has: as many as leave its sums in registers.
constexpr int post_lanes(int n) { return n <= 4 ? 2 : 1; }

template <typename T, int N, bool kAligned>
GPU_KERNEL GPU_BOUNDS(kRowThreads) post_backward_kernel(const PostGradients p, const T* x, const T* y) {
  constexpr int kLanes = post_lanes(N), kThreads = kTreeLanes / kLanes, kAhead = kLanes;
  using Lanes = Vector<float, kLanes>;
  const int64_t t = (static_cast<int64_t>(block_x()) * kRowThreads + thread_x()) / kThreads;
  const int part = thread_x() % kThreads, n = p.streams;
  const bool mine = t < p.rows;
  float comb[N][N] = {}, post[N] = {};
  Lanes dcomb[N][N] = {}, dpost[N] = {};
  if (mine)
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j >= n) continue;
      post[j] = p.post[t * p.post_stride + j];
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (k < n) comb[j][k] = p.comb[t * p.comb_stride + j * n + k];
    }
  const T* const xt = x + t * p.x_stride;
  const T* const yt = y + t * p.y_stride;
  const float* const gt = p.dxout + t * p.dxout_stride;
  float* const dxt = p.dx + t * p.dx_stride;
  float* const dyt = p.dy + t * p.dy_stride;
  const int64_t width = mine ? p.width : 0;
  for (int64_t begin = part * kLanes; begin < width; begin += kAhead * kTreeLanes) {
    Lanes g[kAhead][N] = {}, stream[kAhead][N] = {}, result[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t at = begin + a * kTreeLanes;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k >= n) continue;
        g[a][k] = load_lanes<kLanes, kAligned>(gt + k * p.width, at, width);
        stream[a][k] = load_lanes<kLanes, kAligned>(xt + k * p.width, at, width);
      }
      result[a] = load_lanes<kLanes, kAligned>(yt, at, width);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t at = begin + a * kTreeLanes;
      Lanes dy = {}, dx[N] = {};
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (at + (kAligned ? 0 : i) >= width) continue;
        dy.v[i] = post[0] * g[a][0].v[i];
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (k >= n) continue;
          if (k > 0) dy.v[i] = fma(post[k], g[a][k].v[i], dy.v[i]);
          dpost[k].v[i] = fma(result[a].v[i], g[a][k].v[i], dpost[k].v[i]);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (j >= n) continue;
          dx[j].v[i] = comb[j][0] * g[a][0].v[i];
#pragma unroll
          for (int k = 0; k < N; ++k) {
            if (k >= n) continue;
            if (k > 0) dx[j].v[i] = fma(comb[j][k], g[a][k].v[i], dx[j].v[i]);
            dcomb[j][k].v[i] = fma(stream[a][j].v[i], g[a][k].v[i], dcomb[j][k].v[i]);
          }
        }
      }
      store_lanes<kLanes, kAligned>(dyt, at, width, dy);
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < n) store_lanes<kLanes, kAligned>(dxt + j * p.width, at, width, dx[j]);
    }
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

void hyper_coefficients(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView inv_rms, ConstTensorView raw, ConstTensorView x,
                        const HyperWeights& w, const HyperShape& shape) {
  const Coefficients p = {.pre = pre.ptr<float>(), .post = data_of(post), .comb = data_of(comb), .inv_rms = inv_rms.ptr<float>(), .raw = raw.ptr<float>(),
                          .base = w.base.ptr<float>(), .scale = w.scale.ptr<float>(), .pre_stride = pre.row_stride, .post_stride = post.row_stride,
                          .comb_stride = comb.row_stride, .raw_stride = raw.row_stride, .streams = static_cast<int>(shape.streams), .iters = shape.sinkhorn_iters,
                          .elements = static_cast<int>(shape.streams * x.dim(2)), .norm_eps = shape.norm_eps, .hc_eps = shape.hc_eps};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(shape.streams, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      using T = decltype(t);
      const Grid grid = {.blocks = x.rows(), .threads = kMixThreads, .shared_bytes = sizeof(T) * kMixStages * kMixElements + sizeof(float) * (2 + kN) * kN};
      launch(c, "hyper_coefficients", grid, coefficients_kernel<T, kN>, p, x.ptr<T>(), x.row_stride, all_aligned(x));
    });
  });
}

void hyper_mix_backward(Context& c, TensorView dx_accum, const HyperGradients& dw, ConstTensorView dpre, ConstTensorView dpost, ConstTensorView dcomb,
                        ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  const int64_t rows = x.rows(), n = shape.streams, elements = n * x.dim(2), blocks = blocks_for(rows, kTokensABlock);
  const ArenaScope scope(*c.workspace);
  const TensorView dlogits = c.workspace->tensor(DType::f32, raw.shape, "hyperconn logit gradients");
  const TensorView factor = c.workspace->tensor(DType::f32, {rows}, "hyperconn factors");
  for_streams(n, [&](auto most) {
    constexpr int kN = decltype(most)::value;
    const ArenaScope record_scope(*c.workspace);
    const Shape recorded = {LaneMatrix<kN>::kEach * record_matrices(shape.sinkhorn_iters), blocks * kTokenThreads};
    const TensorView record = dcomb.empty() ? TensorView() : c.workspace->tensor(DType::f32, recorded, "sinkhorn record");
    const CoefficientGradients p = {.dlogits = dlogits.ptr<float>(), .factor = factor.ptr<float>(), .record = data_of(record), .dpre = dpre.ptr<float>(),
                                    .dpost = data_of(dpost), .dcomb = data_of(dcomb), .raw = raw.ptr<float>(), .inv_rms = inv_rms.ptr<float>(),
                                    .base = w.base.ptr<float>(), .scale = w.scale.ptr<float>(), .dlogits_stride = dlogits.row_stride,
                                    .dpre_stride = dpre.row_stride, .dpost_stride = dpost.row_stride, .dcomb_stride = dcomb.row_stride,
                                    .raw_stride = raw.row_stride, .tokens = rows,
                                    .elements = elements, .streams = static_cast<int>(n), .iters = shape.sinkhorn_iters, .hc_eps = shape.hc_eps};
    const Grid grid = {.blocks = blocks, .threads = kTokenThreads, .shared_bytes = sizeof(float) * kTokensABlock * (2 + kN) * kN};
    launch(c, "hyper_coefficients_backward", grid, coefficients_backward_kernel<kN>, p);
  });

  const RawGradient p = {.g = dlogits.ptr<float>(), .raw = raw.ptr<float>(), .inv_rms = inv_rms.ptr<float>(), .scale = w.scale.ptr<float>(),
                         .dbase = data_of(dw.base), .dscale = data_of(dw.scale), .g_stride = dlogits.row_stride, .raw_stride = raw.row_stride, .rows = rows,
                         .logits = static_cast<int>(raw.dim(1)), .streams = static_cast<int>(n), .head = w.scale.rows() == 1};
  launch(c, "hyper_raw_gradient", {.blocks = 1, .threads = kRawThreads, .shared_bytes = 2 * sizeof(float) * kRawThreads * kRawEach}, raw_gradient_kernel, p);

  const ConstTensorView flat(x.data, x.dtype, {rows, elements}, x.row_stride);
  const TensorView dx(dx_accum.data, DType::f32, {rows, elements}, dx_accum.row_stride);
  if (!dw.fn.empty()) lockstep::matmul_backward_weight(c, dw.fn, dlogits, flat);
  with_dtype(x.dtype, [&](auto t) {
    using T = decltype(t);
    const ConstTensorView fn = w.fn.rows;
    if (!w.fn.quantized() && fn.dtype == DType::f32 && fn.rows() <= kInputLogits && elements % kInputCols == 0 && all_aligned(dx, flat, fn)) {
      const InputGradient in = {.dx = dx.ptr<float>(), .dlogits = dlogits.ptr<float>(), .factor = factor.ptr<float>(), .fn = fn.ptr<float>(),
                                .dx_stride = dx.row_stride, .x_stride = flat.row_stride, .fn_stride = fn.row_stride, .rows = static_cast<int>(rows),
                                .cols = static_cast<int>(elements),
                                .logits = static_cast<int>(fn.rows())};
      const Grid grid = {.blocks = blocks_for(rows, kInputTokens), .threads = kInputThreads, .blocks_y = blocks_for(elements, kInputThreads * kInputCols),
                         .shared_bytes = sizeof(float) * kInputTokens * (kInputLogits + 1)};
      launch(c, "hyper_input_gradient", grid, input_gradient_kernel<T>, in, flat.ptr<T>());
    } else {
      launch(c, "hyper_add_scaled", grid_of_pieces(rows, elements), add_scaled_kernel<T>, dx.ptr<float>(), dx.row_stride, factor.ptr<float>(), flat.ptr<T>(),
             flat.row_stride, all_aligned(dx, flat), rows, elements);
      lockstep::matmul_backward_input(c, dx, dlogits, w.fn, true);
    }
  });
}

void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre) {
  with_dtype(x.dtype, [&](auto t) {
    using T = decltype(t);
    for_streams(x.dim(1), [&](auto most) {
      launch(c, "hyper_pre", grid_of_pieces(x.rows(), x.dim(2)), pre_kernel<T, decltype(most)::value>, h.ptr<T>(), h.row_stride, x.ptr<T>(), x.row_stride,
             pre.ptr<float>(), pre.row_stride, static_cast<int>(x.dim(1)), streams_aligned(x, h), x.rows(), x.dim(2));
    });
  });
}

void hyper_pre_backward(Context& c, TensorView dx_accum, TensorView dpre, ConstTensorView dh, ConstTensorView x, ConstTensorView pre) {
  with_dtype(x.dtype, [&](auto t) {
    using T = decltype(t);
    const auto kernel = streams_aligned(x, dx_accum, dh) ? pre_backward_kernel<T, true> : pre_backward_kernel<T, false>;
    const Grid grid = {.blocks = blocks_for(x.rows() * x.dim(1), kRowThreads / kPreThreads), .threads = kRowThreads};
    launch(c, "hyper_pre_backward", grid, kernel, dx_accum.ptr<float>(), dx_accum.row_stride,
           dpre.ptr<float>(), dpre.row_stride, dh.ptr<float>(), dh.row_stride, x.ptr<T>(), x.row_stride, pre.ptr<float>(), pre.row_stride,
           static_cast<int>(x.dim(1)), x.rows(), x.dim(2));
  });
}

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  with_dtype(x.dtype, [&](auto t) {
    using T = decltype(t);
    for_streams(x.dim(1), [&](auto most) {
      launch(c, "hyper_post", grid_of_pieces(x.rows(), x.dim(2)), post_kernel<T, decltype(most)::value>, xout.ptr<T>(), xout.row_stride, x.ptr<T>(), x.row_stride,
             y.ptr<T>(), y.row_stride, post.ptr<float>(), post.row_stride, comb.ptr<float>(), comb.row_stride, static_cast<int>(x.dim(1)),
             streams_aligned(x, xout, y), x.rows(), x.dim(2));
    });
  });
}

void hyper_post_backward(Context& c, TensorView dx, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x, ConstTensorView y,
                         ConstTensorView post, ConstTensorView comb) {
  const PostGradients p = {.dx = dx.ptr<float>(), .dy = dy.ptr<float>(), .dpost = dpost.ptr<float>(), .dcomb = dcomb.ptr<float>(), .dxout = dxout.ptr<float>(),
                           .post = post.ptr<float>(), .comb = comb.ptr<float>(), .dx_stride = dx.row_stride, .dy_stride = dy.row_stride,
                           .dpost_stride = dpost.row_stride, .dcomb_stride = dcomb.row_stride, .dxout_stride = dxout.row_stride, .x_stride = x.row_stride,
                           .y_stride = y.row_stride, .post_stride = post.row_stride, .comb_stride = comb.row_stride, .rows = x.rows(), .width = x.dim(2),
                           .streams = static_cast<int>(x.dim(1))};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(x.dim(1), [&](auto most) {
      using T = decltype(t);
      constexpr int kN = decltype(most)::value, kTokens = kRowThreads / (kTreeLanes / post_lanes(kN));
      const auto kernel = streams_aligned(x, y, dx, dy, dxout) ? post_backward_kernel<T, kN, true> : post_backward_kernel<T, kN, false>;
      launch(c, "hyper_post_backward", {.blocks = blocks_for(x.rows(), kTokens), .threads = kRowThreads}, kernel, p, x.ptr<T>(), y.ptr<T>());
    });
  });
}

}  // namespace lockstep::device
