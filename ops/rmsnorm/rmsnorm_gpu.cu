// A row is a team's: its threads load up to 2 pieces of 8 elements, at once, and keep them; by way of shared memory 16 threads, the tree's virtual lanes, sum them
// in order; then each thread writes what it kept. Teams, and so rows a block (D = 512: 8, 2048: 2), depend on the row's length alone. The gain's gradient is a
// chain a column, over the rows.
//
// Floors at T x D, bf16: forward 4 T D bytes / 4 TB/s; backward 10 T D (14 accumulating); gain 6 T D or 4 T cycles, whichever is longer.

#include <bit>

#include "ops/chain_gpu.h"
#include "ops/elements_gpu.h"
#include "ops/rmsnorm/rmsnorm_cpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kForwardPieces = 2, kBackwardPieces = 2;  // of a thread, at most

// Rows [T, n] as blocks of kRowThreads take them, 2^team_bits threads a row.
struct Teams {
  int64_t rows;
  int n, team_bits;
  bool aligned;  // all operands
};

// Place of the calling thread: its team's row, its pieces of each chunk of kPieces * team pieces, and the row that it sums as a virtual lane: blocks
// side by side use different waves for it, which differ in the scheduler.
template <int kPieces>
struct Member {
  int team, chunk, pitch, own, index, sums;  // pitch: of rows in shared memory; those that a wave sums lie in different banks
  int64_t row;
  bool mine, sums_mine;
  GPU_INLINE explicit Member(const Teams& k) {
    const int rows_a_block = kRowThreads >> k.team_bits;
    const int64_t first = static_cast<int64_t>(block_x()) * rows_a_block;
    team = 1 << k.team_bits, chunk = team * kPieces * kPiece, pitch = chunk + kTreeLanes;
    own = thread_x() >> k.team_bits, index = thread_x() & (team - 1), row = first + own, mine = row < k.rows;
    sums = (thread_x() + block_x() % 4 * kWave) % kRowThreads / kTreeLanes, sums_mine = sums < rows_a_block && first + sums < k.rows;
  }
  GPU_INLINE int at(int begin, int piece) const { return begin + (piece * team + index) * kPiece; }
  GPU_INLINE int count(const Teams& k, int at) const { return !mine || at >= k.n ? 0 : k.n - at < kPiece ? k.n - at : kPiece; }
  // Where a piece of a chunk lies in shared memory, and how many elements of the chunk the lane has, from `lane_at` on, kTreeLanes apart.
  GPU_INLINE int staged(int begin, int at) const { return own * pitch + at - begin; }
  GPU_INLINE int lane_at() const { return sums * pitch + row_lane(); }
  GPU_INLINE int lane_count(const Teams& k, int begin) const {
    const int length = k.n - begin < chunk ? k.n - begin : chunk;
    return (length - row_lane() + kTreeLanes - 1) / kTreeLanes;
  }
};
template <int kPieces>
constexpr int kStaged = kRowThreads * kPieces * kPiece + kRowsABlock * kTreeLanes;

GPU_INLINE void stage(Shared<float> to, const float (&v)[kPiece]) {
  to.store_vector<4>(0, {{v[0], v[1], v[2], v[3]}});
  to.store_vector<4>(4, {{v[4], v[5], v[6], v[7]}});
}

// The rotation of a row's last elements, from `first` on, a multiple of kPiece (ops/rope): token of row r is r / heads.
struct Rotation {
  const int32_t* pos;
  const float* table;
  int64_t stride;
  int heads, first;
};

template <typename T>
GPU_INLINE void rotate(Elements<T>* e, const Elements<float>& turn) {
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    const float cos = turn.v[i], sin = turn.v[i + 1];
    const float even = to_f32(e->v[i]), odd = to_f32(e->v[i + 1]);
    e->v[i] = from_f32<T>(fma(even, cos, -(odd * sin)));
    e->v[i + 1] = from_f32<T>(fma(even, sin, odd * cos));
  }
}

template <typename T, int kPieces, bool kRotates>
GPU_KERNEL GPU_BOUNDS(kRowThreads) rmsnorm_kernel(T* y, int64_t y_stride, float* inv, const T* x, int64_t x_stride, const float* w, float eps, Teams k,
                                                  Rotation rotation) {
  const Member<kPieces> m(k);
  SharedMemory memory;
  const Shared<float> staged = memory.take<float>(kStaged<kPieces>), scales = memory.take<float>(kRowsABlock);
  const int position = kRotates && m.mine ? rotation.pos[static_cast<int>(m.row) / rotation.heads] : 0;
  const T* const from = x + m.row * x_stride;
  T* const to = y + m.row * y_stride;
  Elements<T> kept[kPieces] = {};
  Elements<float> gain[kPieces] = {};
  const auto fetch = [&](int begin) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) kept[j] = load(from + m.at(begin, j), m.count(k, m.at(begin, j)), k.aligned);
  };
  const auto fetch_gain = [&](int begin) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) gain[j] = load(w + m.at(begin, j), w == nullptr ? 0 : m.count(k, m.at(begin, j)), k.aligned);
  };
  Elements<float> turn[kPieces] = {};
  const auto fetch_turn = [&](int begin) {
    if constexpr (kRotates) {
      const float* const from = rotation.table + position * rotation.stride - rotation.first;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) turn[j] = load(from + m.at(begin, j), m.at(begin, j) < rotation.first ? 0 : m.count(k, m.at(begin, j)), k.aligned);
    }
  };
  float sum = 0;
  for (int begin = 0; begin < k.n; begin += m.chunk) {
    fetch(begin);
    if (begin > 0) sync_block();
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = m.at(begin, j);
      if (m.count(k, at) == 0) continue;
      float v[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) v[i] = to_f32(kept[j].v[i]);
      stage(staged.from(m.staged(begin, at)), v);
    }
    sync_block();
    if (m.sums_mine)
      in_order(m.lane_count(k, begin), [&](int i) { return staged.load(m.lane_at() + i * kTreeLanes); }, [&](float v) { sum = fma(v, v, sum); });
  }
  if (k.n <= m.chunk) fetch_gain(0), fetch_turn(0);  // on their way while the sums are folded
  const float squares = fold_row(sum);
  if (m.sums_mine && row_lane() == 0) {
    const float scale = 1.0f / ieee::sqrt(squares / static_cast<float>(k.n) + eps);
    scales.store(m.sums, scale);
    if (inv != nullptr) inv[m.row - m.own + m.sums] = scale;
  }
  sync_block();
  if (!m.mine) return;
  const float scale = scales.load(m.own);
  for (int begin = 0; begin < k.n; begin += m.chunk) {
    if (k.n > m.chunk) {
      fetch(begin);
      fetch_gain(begin);
      fetch_turn(begin);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = m.at(begin, j), count = m.count(k, at);
      if (count == 0) continue;
      Elements<T> out;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const float v = to_f32(kept[j].v[i]) * scale;
        out.v[i] = from_f32<T>(w == nullptr ? v : v * gain[j].v[i]);
      }
      if (kRotates && at >= rotation.first) rotate(&out, turn[j]);
      store(to + at, out, count, k.aligned);
    }
  }
}

template <typename T, int kPieces>
GPU_KERNEL GPU_BOUNDS(kRowThreads) rmsnorm_backward_kernel(float* dx, int64_t dx_stride, const float* dy, int64_t dy_stride, const T* x, int64_t x_stride,
                                                           const float* w, const float* inv, bool accumulate, Teams k) {
  const Member<kPieces> m(k);
  SharedMemory memory;
  const Shared<float> norms = memory.take<float>(kStaged<kPieces>), gains = memory.take<float>(kStaged<kPieces>), means = memory.take<float>(kRowsABlock);
  const T* const from = x + m.row * x_stride;
  const float* const g = dy + m.row * dy_stride;
  float* const to = dx + m.row * dx_stride;
  const float scale = m.mine ? inv[m.row] : 0.0f;
  float normed[kPieces][kPiece] = {}, gained[kPieces][kPiece] = {};
  const auto fetch = [&](int begin) {
    Elements<T> e[kPieces];
    Elements<float> d[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = m.at(begin, j), count = m.count(k, at);
      e[j] = load(from + at, count, k.aligned);
      d[j] = load(g + at, count, k.aligned);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = m.at(begin, j);
      const Elements<float> gain = load(w + at, w == nullptr ? 0 : m.count(k, at), k.aligned);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        normed[j][i] = to_f32(e[j].v[i]) * scale;
        gained[j][i] = w == nullptr ? d[j].v[i] : gain.v[i] * d[j].v[i];
      }
    }
  };
  float sum = 0;
  for (int begin = 0; begin < k.n; begin += m.chunk) {
    fetch(begin);
    if (begin > 0) sync_block();
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = m.at(begin, j);
      if (m.count(k, at) == 0) continue;
      stage(norms.from(m.staged(begin, at)), normed[j]);
      stage(gains.from(m.staged(begin, at)), gained[j]);
    }
    sync_block();
    if (m.sums_mine)
      in_order(m.lane_count(k, begin),
               [&](int i) {
                 return Vector<float, 2>{{norms.load(m.lane_at() + i * kTreeLanes), gains.load(m.lane_at() + i * kTreeLanes)}};
               },
               [&](const Vector<float, 2>& v) { sum = fma(v.v[0], v.v[1], sum); });
  }
  sum = fold_row(sum);
  if (m.sums_mine && row_lane() == 0) means.store(m.sums, sum / static_cast<float>(k.n));
  sync_block();
  if (!m.mine) return;
  const float mean = means.load(m.own);
  for (int begin = 0; begin < k.n; begin += m.chunk) {
    if (k.n > m.chunk) fetch(begin);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int at = m.at(begin, j), count = m.count(k, at);
      if (count == 0) continue;
      Elements<float> out = load(static_cast<const float*>(to) + at, accumulate ? count : 0, k.aligned);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const float v = scale * fma(-normed[j][i], mean, gained[j][i]);
        out.v[i] = accumulate ? out.v[i] + v : v;
      }
      store(to + at, out, count, k.aligned);
    }
  }
}

// Four columns of a row, x as the words it came in.
template <typename T>
struct GainQuad {
  Vector<float, 4> dy;
  Vector<uint32_t, sizeof(T)> x;
  float inv;
};

template <typename T>
GPU_KERNEL GPU_BOUNDS(kChainThreads) rmsnorm_gain_kernel(float* dw, const float* dy, int64_t dy_stride, const T* x, int64_t x_stride, const float* inv, bool aligned,
                                                         int64_t rows, int64_t n) {
  const int64_t first = static_cast<int64_t>(block_x()) * kChainColumns;
  const int columns = n - first < kChainColumns ? static_cast<int>(n - first) : kChainColumns;
  const bool mine = thread_x() < columns;
  const auto load = [&](int64_t t, int column) {
    const float* const g = dy + t * dy_stride + first + column;
    const T* const e = x + t * x_stride + first + column;
    GainQuad<T> q;
    q.inv = inv[t];
    if (aligned && column + 4 <= columns) {
      q.dy = *reinterpret_cast<const Vector<float, 4>*>(g);
      q.x = *reinterpret_cast<const Vector<uint32_t, sizeof(T)>*>(e);
    } else {
      Vector<T, 4> v = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q.dy.v[i] = column + i < columns ? g[i] : 0.0f;
        if (column + i < columns) v.v[i] = e[i];
      }
      q.x = std::bit_cast<Vector<uint32_t, sizeof(T)>>(v);
    }
    return q;
  };
  const auto terms = [](const GainQuad<T>& q) {
    const auto v = std::bit_cast<Vector<T, 4>>(q.x);
    ChainTerms out = {.a = q.dy, .b = {}};
#pragma unroll
    for (int i = 0; i < 4; ++i) out.b.v[i] = to_f32(v.v[i]) * q.inv;
    return out;
  };
  const float sum = chain_columns(mine ? dw[first + thread_x()] : 0.0f, rows, columns, load, terms);
  if (mine) dw[first + thread_x()] = sum;
}

// f(pieces a thread keeps, at most kPiecesMax, teams, grid without its shared memory)
template <int kPiecesMax, typename F>
void with_teams(int64_t rows, int64_t n, bool aligned, const F& f) {
  Teams k = {.rows = rows, .n = static_cast<int>(n), .team_bits = 4, .aligned = aligned};
  const int64_t pieces = blocks_for(n, kPiece);
  while ((1 << k.team_bits) < kRowThreads && kPiecesMax << k.team_bits < pieces) ++k.team_bits;
  const Grid grid = {.blocks = blocks_for(rows, kRowThreads >> k.team_bits), .threads = kRowThreads};
  if (pieces <= kTreeLanes) f(std::integral_constant<int, 1>(), k, grid);
  else f(std::integral_constant<int, kPiecesMax>(), k, grid);
}

template <typename T, bool kRotates>
void forward(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps, const Rotation& rotation, bool aligned = true) {
  with_teams<kForwardPieces>(x.rows(), x.dim(1), aligned && all_aligned(y, x) && (w.empty() || is_aligned(w)), [&](auto pieces, const Teams& k, Grid grid) {
    constexpr int kPieces = decltype(pieces)::value;
    grid.shared_bytes = sizeof(float) * (kStaged<kPieces> + kRowsABlock);
    launch(c, kRotates ? "rmsnorm_rope" : "rmsnorm", grid, rmsnorm_kernel<T, kPieces, kRotates>, y.ptr<T>(), y.row_stride,
           inv.empty() ? nullptr : inv.ptr<float>(), x.ptr<T>(), x.row_stride, w.empty() ? nullptr : w.ptr<float>(), eps, k, rotation);
  });
}

template <typename T>
void backward(Context& c, TensorView dx, TensorView dw, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv, bool accumulate) {
  const int64_t rows = x.rows(), n = x.dim(1);
  // The gain first: dx may overwrite dy.
  if (!dw.empty())
    launch(c, "rmsnorm_gain", {.blocks = blocks_for(n, kChainColumns), .threads = kChainThreads, .shared_bytes = kChainBytes}, rmsnorm_gain_kernel<T>, dw.ptr<float>(),
           dy.ptr<float>(), dy.row_stride, x.ptr<T>(), x.row_stride, inv.ptr<float>(), all_aligned(dy, x), rows, n);
  with_teams<kBackwardPieces>(rows, n, all_aligned(dx, dy, x) && (w.empty() || is_aligned(w)), [&](auto pieces, const Teams& k, Grid grid) {
    constexpr int kPieces = decltype(pieces)::value;
    grid.shared_bytes = sizeof(float) * (2 * kStaged<kPieces> + kRowsABlock);
    launch(c, "rmsnorm_backward", grid, rmsnorm_backward_kernel<T, kPieces>, dx.ptr<float>(), dx.row_stride, dy.ptr<float>(), dy.row_stride, x.ptr<T>(), x.row_stride,
           w.empty() ? nullptr : w.ptr<float>(), inv.ptr<float>(), accumulate, k);
  });
}

}  // namespace

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  x.dtype == DType::f32 ? forward<float, false>(c, y, inv, x, w, eps, {}) : forward<bf16, false>(c, y, inv, x, w, eps, {});
}
void rmsnorm_rope(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps, ConstTensorView pos, ConstTensorView table,
                  int64_t heads) {
  const Rotation rotation = {.pos = pos.ptr<int32_t>(), .table = table.ptr<float>(), .stride = table.row_stride, .heads = static_cast<int>(heads),
                             .first = static_cast<int>(x.dim(1) - table.dim(1))};
  const bool aligned = is_aligned(table);
  x.dtype == DType::f32 ? forward<float, true>(c, y, inv, x, w, eps, rotation, aligned) : forward<bf16, true>(c, y, inv, x, w, eps, rotation, aligned);
}
void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv,
                      bool accumulate) {
  x.dtype == DType::f32 ? backward<float>(c, dx, dw_accum, dy, x, w, inv, accumulate) : backward<bf16>(c, dx, dw_accum, dy, x, w, inv, accumulate);
}

}  // namespace lockstep::device
