#pragma once
// Sinkhorn in the lanes of a tree, 16 a token, and its backward. Sums run left to right, so that the bits are the CPU's.

#include "ops/row_gpu.h"

namespace lockstep::gpu {

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

}  // namespace lockstep::gpu
