// Streams are mixed elementwise, 8 channels of a token a thread; dots over channels take 16 threads by the tree of ops/row_gpu.h; a token's Sinkhorn is one
// thread's, its matrix in registers. The mean of squares has a block a token: all threads bring the row into shared memory, 16 run the tree, so that few
// tokens too have enough loads on their way.
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: coefficients nDE; pre (n + 1)DE; post (2n + 1)DE; backward of pre nD(E + 8) + 4D; of post
// nD(E + 8) + D(E + 4); of the coefficients nD(E + 8). A few tokens wait for chains instead: nD / 16 additions (2 us for 16384), Sinkhorn's divisions (3 us).

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

template <int N>
struct Matrix {
  float v[N][N];
};

// Where a thread's Sinkhorn leaves what its backward needs: value i lies i * stride further. Null: nowhere.
struct Record {
  float* at = nullptr;
  int64_t stride = 0;
  GPU_INLINE void put(int i, float v) const {
    if (at != nullptr) at[i * stride] = v;
  }
  GPU_INLINE float get(int i) const { return at[i * stride]; }
};

// One division of the rows, or the columns, by their sums + eps; the record has the results and the reciprocals from `first` on.
template <int N, bool kRows>
GPU_INLINE void divide(Matrix<N>& c, int n, float eps, const Record& record, int first) {
#pragma unroll
  for (int a = 0; a < N; ++a) {
    if (a >= n) continue;
    float sum = kRows ? c.v[a][0] : c.v[0][a];
#pragma unroll
    for (int b = 1; b < N; ++b)
      if (b < n) sum = sum + (kRows ? c.v[a][b] : c.v[b][a]);
    const float inverse = 1.0f / (sum + eps);
    record.put(first + n * n + a, inverse);
#pragma unroll
    for (int b = 0; b < N; ++b) {
      if (b >= n) continue;
      float& v = kRows ? c.v[a][b] : c.v[b][a];
      v = v * inverse;
      record.put(first + (kRows ? a * n + b : b * n + a), v);
    }
  }
}

template <int N, bool kRows>
GPU_INLINE void divide_backward(Matrix<N>& g, int n, const Record& record, int first) {
#pragma unroll
  for (int a = 0; a < N; ++a) {
    if (a >= n) continue;
    const auto result = [&](int b) { return record.get(first + (kRows ? a * n + b : b * n + a)); };
    float dot = (kRows ? g.v[a][0] : g.v[0][a]) * result(0);
#pragma unroll
    for (int b = 1; b < N; ++b)
      if (b < n) dot = fma(kRows ? g.v[a][b] : g.v[b][a], result(b), dot);
    const float inverse = record.get(first + n * n + a);
#pragma unroll
    for (int b = 0; b < N; ++b) {
      if (b >= n) continue;
      float& v = kRows ? g.v[a][b] : g.v[b][a];
      v = (v - dot) * inverse;
    }
  }
}

template <int N>
GPU_INLINE void sinkhorn(Matrix<N>& c, int n, int iters, float eps, const Record& record) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j >= n) continue;
    float most = c.v[j][0];
#pragma unroll
    for (int k = 1; k < N; ++k)
      if (k < n) most = c.v[j][k] > most ? c.v[j][k] : most;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n) continue;
      c.v[j][k] = exp_f32(c.v[j][k] - most);
      sum = k == 0 ? c.v[j][k] : sum + c.v[j][k];
    }
    const float inverse = 1.0f / sum;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n) continue;
      const float p = c.v[j][k] * inverse;
      record.put(j * n + k, p);
      c.v[j][k] = p + eps;
    }
  }
  const int each = n * n + n;
  divide<N, false>(c, n, eps, record, n * n);
  for (int i = 1; i < iters; ++i) {
    divide<N, true>(c, n, eps, record, n * n + (2 * i - 1) * each);
    divide<N, false>(c, n, eps, record, n * n + 2 * i * each);
  }
}

template <int N>
GPU_INLINE void sinkhorn_backward(Matrix<N>& g, int n, int iters, const Record& record) {
  const int each = n * n + n;
  for (int i = iters - 1; i >= 1; --i) {
    divide_backward<N, false>(g, n, record, n * n + 2 * i * each);
    divide_backward<N, true>(g, n, record, n * n + (2 * i - 1) * each);
  }
  divide_backward<N, false>(g, n, record, n * n);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j >= n) continue;
    float dot = g.v[j][0] * record.get(j * n);
#pragma unroll
    for (int k = 1; k < N; ++k)
      if (k < n) dot = fma(g.v[j][k], record.get(j * n + k), dot);
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < n) g.v[j][k] = record.get(j * n + k) * (g.v[j][k] - dot);
  }
}

struct Coefficients {
  float *pre, *post, *comb, *inv_rms;  // post and comb null: the head's form
  const float *raw, *base, *scale;
  int64_t pre_stride, post_stride, comb_stride, raw_stride;
  int streams, iters;
  float norm_eps, hc_eps;
};

constexpr int kMixThreads = 64, kMixPieces = 4, kMixElements = kMixThreads * kMixPieces * kPiece;

// A block a token.
template <typename T, int N>
GPU_KERNEL coefficients_kernel(const Coefficients p, const T* x, int64_t x_stride, int64_t elements, bool aligned) {
  SharedMemory memory;
  const Shared<float> row = memory.take<float>(kMixElements), logits = memory.take<float>((2 + N) * N), inverse = memory.take<float>(1);
  const int64_t t = block_x();
  const int thread = thread_x(), n = p.streams, num_logits = p.comb == nullptr ? n : (2 + n) * n;
  const T* const from = x + t * x_stride;

  Elements<T> piece[kMixPieces];
  const auto bring = [&](int64_t begin) {
#pragma unroll
    for (int i = 0; i < kMixPieces; ++i) {
      const int64_t at = begin + (i * kMixThreads + thread) * kPiece, left = elements - at;
      piece[i] = load(from + at, left <= 0 ? 0 : left < kPiece ? static_cast<int>(left) : kPiece, aligned);
    }
  };
  bring(0);
  float squares = 0;
  for (int64_t begin = 0; begin < elements; begin += kMixElements) {
#pragma unroll
    for (int i = 0; i < kMixPieces; ++i)
#pragma unroll
      for (int k = 0; k < kPiece; k += 4)
        row.store_vector<4>((i * kMixThreads + thread) * kPiece + k, {{to_f32(piece[i].v[k]), to_f32(piece[i].v[k + 1]), to_f32(piece[i].v[k + 2]), to_f32(piece[i].v[k + 3])}});
    sync_block();
    bring(begin + kMixElements);
    if (thread < kTreeLanes) {
      const int count = elements - begin < kMixElements ? static_cast<int>(elements - begin) : kMixElements;
#pragma unroll 16
      for (int i = thread; i < count; i += kTreeLanes) {
        const float v = row.load(i);
        squares = fma(v, v, squares);
      }
    }
    sync_block();
  }
  squares = fold_row(squares);
  if (thread == 0) {
    const float inv = 1.0f / ieee::sqrt(squares / static_cast<float>(elements) + p.norm_eps);
    inverse.store(0, inv);
    p.inv_rms[t] = inv;
  }
  sync_block();

  const float inv = inverse.load(0);
  for (int i = thread; i < num_logits; i += kMixThreads) {
    const float z = fma(p.raw[t * p.raw_stride + i] * inv, p.scale[scale_index(i, n)], p.base[i]);
    if (i < n) p.pre[t * p.pre_stride + i] = sigmoid_f32(z) + p.hc_eps;
    else if (i < 2 * n) p.post[t * p.post_stride + i - n] = 2.0f * sigmoid_f32(z);
    else logits.store(i, z);
  }
  if (p.comb == nullptr) return;
  sync_block();
  if (thread != 0) return;
  Matrix<N> c = {};
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (j < n && k < n) c.v[j][k] = logits.load(2 * n + j * n + k);
  sinkhorn<N>(c, n, p.iters, p.hc_eps, {});
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (j < n && k < n) p.comb[t * p.comb_stride + j * n + k] = c.v[j][k];
}

struct CoefficientGradients {
  float *dlogits, *factor, *record;  // factor [T]: dx += factor * x; record: value i of token t at i * tokens + t
  const float *dpre, *dpost, *dcomb, *raw, *inv_rms, *base, *scale;
  int64_t dlogits_stride, dpre_stride, dpost_stride, dcomb_stride, raw_stride, tokens, elements;
  int streams, iters;
  float hc_eps;
};

constexpr int kTokenThreads = 64;

// A thread a token.
template <int N>
GPU_KERNEL GPU_BOUNDS(kTokenThreads) coefficients_backward_kernel(const CoefficientGradients p) {
  const int64_t t = static_cast<int64_t>(block_x()) * block_dim() + thread_x();
  if (t >= p.tokens) return;
  const int n = p.streams, num_logits = p.dcomb == nullptr ? n : (2 + n) * n;
  const float inv = p.inv_rms[t];
  const float* const raw = p.raw + t * p.raw_stride;
  float* const g = p.dlogits + t * p.dlogits_stride;
  const auto logit = [&](int i) { return fma(raw[i] * inv, p.scale[scale_index(i, n)], p.base[i]); };
  for (int j = 0; j < n; ++j) {
    const float s = sigmoid_f32(logit(j));
    g[j] = p.dpre[t * p.dpre_stride + j] * (s * (1.0f - s));
  }
  if (p.dcomb != nullptr) {
    for (int j = 0; j < n; ++j) {
      const float s = sigmoid_f32(logit(n + j));
      g[n + j] = 2.0f * p.dpost[t * p.dpost_stride + j] * (s * (1.0f - s));
    }
    const Record record = {p.record + t, p.tokens};
    Matrix<N> c = {}, dc = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (j >= n || k >= n) continue;
        c.v[j][k] = logit(2 * n + j * n + k);
        dc.v[j][k] = p.dcomb[t * p.dcomb_stride + j * n + k];
      }
    sinkhorn<N>(c, n, p.iters, p.hc_eps, record);
    sinkhorn_backward<N>(dc, n, p.iters, record);
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (j < n && k < n) g[2 * n + j * n + k] = dc.v[j][k];
  }
  float dot = 0;
  for (int i = 0; i < num_logits; ++i) dot = fma(g[i] * p.scale[scale_index(i, n)], raw[i], dot);
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

constexpr int kRawThreads = 512, kRawEach = 8;

struct RawGradient {
  float* g;
  const float *raw, *inv_rms, *scale;
  float *dbase, *dscale;  // null: not wanted
  int64_t g_stride, raw_stride, rows;
  int logits, streams;
  bool head;
};
// One block: the sums are chains over all tokens. All threads bring pieces of them, and turn g into the gradient of raw; a thread a logit adds.
GPU_KERNEL raw_gradient_kernel(const RawGradient p) {
  SharedMemory memory;
  const Shared<float> gradient = memory.take<float>(kRawThreads * kRawEach), mu = memory.take<float>(kRawThreads * kRawEach);
  const int thread = thread_x(), tokens = kRawThreads * kRawEach / p.logits, count = tokens * p.logits;
  float g[kRawEach], m[kRawEach];
  const auto bring = [&](int64_t begin) {
#pragma unroll
    for (int i = 0; i < kRawEach; ++i) {
      const int at = i * kRawThreads + thread, logit = at % p.logits;
      const int64_t t = begin + at / p.logits;
      g[i] = m[i] = 0;
      if (at >= count || t >= p.rows) continue;
      float* const place = p.g + t * p.g_stride + logit;
      const float inv = p.inv_rms[t];
      g[i] = *place;
      m[i] = p.raw[t * p.raw_stride + logit] * inv;
      *place = g[i] * p.scale[scale_index(logit, p.streams)] * inv;
    }
  };
  bring(0);
  float base_sum = 0, scale_sum = 0;
  for (int64_t begin = 0; begin < p.rows; begin += tokens) {
#pragma unroll
    for (int i = 0; i < kRawEach; ++i) {
      gradient.store(i * kRawThreads + thread, g[i]);
      mu.store(i * kRawThreads + thread, m[i]);
    }
    sync_block();
    bring(begin + tokens);
    if (thread < p.logits) {
      const int rows = p.rows - begin < tokens ? static_cast<int>(p.rows - begin) : tokens;
#pragma unroll 8
      for (int t = 0; t < rows; ++t) {
        const float v = gradient.load(t * p.logits + thread);
        base_sum = base_sum + v;
        scale_sum = fma(v, mu.load(t * p.logits + thread), scale_sum);
      }
    }
    sync_block();
  }
  if (p.dbase == nullptr) return;
  if (thread < p.logits) {
    p.dbase[thread] = p.dbase[thread] + base_sum;
    gradient.store(thread, scale_sum);
  }
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

// 16 threads a stream of a token.
template <typename T>
GPU_KERNEL pre_backward_kernel(float* dx, int64_t dx_stride, float* dpre, int64_t dpre_stride, const float* dh, int64_t dh_stride, const T* x, int64_t x_stride,
                               const float* pre, int64_t pre_stride, int streams, int64_t rows, int64_t width) {
  const int64_t item = row_of_thread(), t = item / streams;
  const int j = static_cast<int>(item % streams);
  const bool mine = t < rows;
  const T* const stream = x + t * x_stride + j * width;
  const float* const g = dh + t * dh_stride;
  float* const to = dx + t * dx_stride + j * width;
  const float weight = mine ? pre[t * pre_stride + j] : 0.0f;
  float dot = 0;
#pragma unroll 8
  for (int64_t i = row_lane(); i < (mine ? width : 0); i += kTreeLanes) {
    dot = fma(to_f32(stream[i]), g[i], dot);
    to[i] = fma(weight, g[i], to[i]);
  }
  dot = fold_row(dot);
  if (mine && row_lane() == 0) dpre[t * dpre_stride + j] = dot;
}

template <typename T, int N>
GPU_KERNEL post_kernel(T* xout, int64_t xout_stride, const T* x, int64_t x_stride, const T* y, int64_t y_stride, const float* post, int64_t post_stride,
                       const float* comb, int64_t comb_stride, int n, bool aligned, int64_t rows, int64_t width) {
  const Piece p = piece_of_thread(rows, width);
  if (p.count == 0) return;
  Elements<T> stream[N] = {};
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < n) stream[j] = load(x + p.row * x_stride + j * width + p.at, p.count, aligned);
  const Elements<T> result = load(y + p.row * y_stride + p.at, p.count, aligned);
  const float* const weights = comb + p.row * comb_stride;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k >= n) continue;
    const float own = post[p.row * post_stride + k];
    float weight[N] = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) weight[j] = weights[j * n + k];
    Elements<T> out;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      float sum = own * to_f32(result.v[i]);
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j < n) sum = fma(weight[j], to_f32(stream[j].v[i]), sum);
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
// 16 threads a token.
template <typename T, int N>
GPU_KERNEL GPU_BOUNDS(kRowThreads) post_backward_kernel(const PostGradients p, const T* x, const T* y) {
  const int64_t t = row_of_thread();
  const bool mine = t < p.rows;
  const int n = p.streams;
  float comb[N][N] = {}, post[N] = {}, dcomb[N][N] = {}, dpost[N] = {};
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
#pragma unroll 2
  for (int64_t i = row_lane(); i < (mine ? p.width : 0); i += kTreeLanes) {
    float g[N] = {}, stream[N] = {};
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n) continue;
      g[k] = gt[k * p.width + i];
      stream[k] = to_f32(xt[k * p.width + i]);
    }
    const float result = to_f32(yt[i]);
    float dy = post[0] * g[0];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n) continue;
      if (k > 0) dy = fma(post[k], g[k], dy);
      dpost[k] = fma(result, g[k], dpost[k]);
    }
    dyt[i] = dy;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j >= n) continue;
      float dx = comb[j][0] * g[0];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k >= n) continue;
        if (k > 0) dx = fma(comb[j][k], g[k], dx);
        dcomb[j][k] = fma(stream[j], g[k], dcomb[j][k]);
      }
      dxt[j * p.width + i] = dx;
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k >= n) continue;
    const float sum = fold_row(dpost[k]);
    if (mine && row_lane() == 0) p.dpost[t * p.dpost_stride + k] = sum;
  }
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (j >= n || k >= n) continue;
      const float sum = fold_row(dcomb[j][k]);
      if (mine && row_lane() == 0) p.dcomb[t * p.dcomb_stride + j * n + k] = sum;
    }
}

float* data_of(TensorView v) { return v.empty() ? nullptr : v.ptr<float>(); }
const float* data_of(ConstTensorView v) { return v.empty() ? nullptr : v.ptr<float>(); }

// Every stream of x, and every row of the others, begins at a multiple of 16 bytes.
template <typename... Views>
bool streams_aligned(ConstTensorView x, const Views&... v) {
  return x.dim(2) * static_cast<int64_t>(dtype_bytes(x.dtype)) % 16 == 0 && all_aligned(x, v...);
}

template <typename T>
void coefficients_backward(Context& c, TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost, ConstTensorView dcomb,
                           ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  const int64_t rows = x.rows(), n = shape.streams, elements = n * x.dim(2);
  const ArenaScope scope(*c.workspace);
  const TensorView factor = c.workspace->tensor(DType::f32, {rows}, "hyperconn factors");
  const TensorView record = dcomb.empty() ? TensorView() : c.workspace->tensor(DType::f32, {hyper_record_floats(n, shape.sinkhorn_iters), rows}, "sinkhorn record");
  const CoefficientGradients p = {.dlogits = dlogits.ptr<float>(), .factor = factor.ptr<float>(), .record = data_of(record), .dpre = dpre.ptr<float>(),
                                  .dpost = data_of(dpost), .dcomb = data_of(dcomb), .raw = raw.ptr<float>(), .inv_rms = inv_rms.ptr<float>(),
                                  .base = w.base.ptr<float>(), .scale = w.scale.ptr<float>(), .dlogits_stride = dlogits.row_stride, .dpre_stride = dpre.row_stride,
                                  .dpost_stride = dpost.row_stride, .dcomb_stride = dcomb.row_stride, .raw_stride = raw.row_stride, .tokens = rows,
                                  .elements = elements, .streams = static_cast<int>(n), .iters = shape.sinkhorn_iters, .hc_eps = shape.hc_eps};
  for_streams(n, [&](auto most) {
    launch(c, "hyper_coefficients_backward", {.blocks = blocks_for(rows, kTokenThreads), .threads = kTokenThreads}, coefficients_backward_kernel<decltype(most)::value>, p);
  });
  launch(c, "hyper_add_scaled", grid_of_pieces(rows, elements), add_scaled_kernel<T>, dx_accum.ptr<float>(), dx_accum.row_stride, factor.ptr<float>(), x.ptr<T>(),
         x.row_stride, all_aligned(dx_accum, x), rows, elements);
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
                          .norm_eps = shape.norm_eps, .hc_eps = shape.hc_eps};
  with_dtype(x.dtype, [&](auto t) {
    for_streams(shape.streams, [&](auto most) {
      constexpr int kN = decltype(most)::value;
      const Grid grid = {.blocks = x.rows(), .threads = kMixThreads, .shared_bytes = sizeof(float) * (kMixElements + (2 + kN) * kN + 1) + 32};
      launch(c, "hyper_coefficients", grid, coefficients_kernel<decltype(t), kN>, p, x.ptr<decltype(t)>(), x.row_stride, shape.streams * x.dim(2), all_aligned(x));
    });
  });
}

void hyper_coefficients_backward(Context& c, TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost, ConstTensorView dcomb,
                                 ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  with_dtype(x.dtype, [&](auto t) { coefficients_backward<decltype(t)>(c, dx_accum, dlogits, dpre, dpost, dcomb, raw, inv_rms, x, w, shape); });
}

void hyper_raw_gradient(Context& c, TensorView dlogits, const HyperGradients& dw, ConstTensorView raw, ConstTensorView inv_rms, const HyperWeights& w,
                        int64_t streams) {
  const RawGradient p = {.g = dlogits.ptr<float>(), .raw = raw.ptr<float>(), .inv_rms = inv_rms.ptr<float>(), .scale = w.scale.ptr<float>(),
                         .dbase = data_of(dw.base), .dscale = data_of(dw.scale), .g_stride = dlogits.row_stride, .raw_stride = raw.row_stride, .rows = raw.rows(),
                         .logits = static_cast<int>(raw.dim(1)), .streams = static_cast<int>(streams), .head = w.scale.rows() == 1};
  launch(c, "hyper_raw_gradient", {.blocks = 1, .threads = kRawThreads, .shared_bytes = 2 * sizeof(float) * kRawThreads * kRawEach}, raw_gradient_kernel, p);
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
    launch(c, "hyper_pre_backward", {.blocks = blocks_for(x.rows() * x.dim(1), kRowsABlock), .threads = kRowThreads}, pre_backward_kernel<decltype(t)>,
           dx_accum.ptr<float>(), dx_accum.row_stride, dpre.ptr<float>(), dpre.row_stride, dh.ptr<float>(), dh.row_stride, x.ptr<decltype(t)>(), x.row_stride,
           pre.ptr<float>(), pre.row_stride, static_cast<int>(x.dim(1)), x.rows(), x.dim(2));
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
      launch(c, "hyper_post_backward", {.blocks = blocks_for(x.rows(), kRowsABlock), .threads = kRowThreads}, post_backward_kernel<decltype(t), decltype(most)::value>, p,
             x.ptr<decltype(t)>(), y.ptr<decltype(t)>());
    });
  });
}

}  // namespace lockstep::device
