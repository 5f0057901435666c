// hyper_feed_backward is five launches: 16 threads a token for the gradients of the logits, the sums over tokens of those, fn's gradient, and dX, which is read and
// written once.
//
// Floors, of bytes / 4 TB/s a token, E bytes an element: gradients of the logits nDE + 4D; dX nD(E + 8) + 4D.

#include "ops/chain_gpu.h"
#include "ops/hyperconn/hyperconn_cpu.h"
#include "ops/hyperconn/hyperconn_gpu.h"
#include "ops/hyperconn/sinkhorn_gpu.h"
#include "ops/matmul/matmul_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;
using namespace hyper;

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

}  // namespace

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
  if (!dw.fn.empty()) portable::matmul_backward_weight(c, dw.fn, draw, flat);  // in f32, whatever fn's rows

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

}  // namespace lockstep::device
