#pragma once
// What the CDNA4 matmul kernels share: tiles of the result, and operands on their way from memory to shared memory.

#include "core/formats.h"
#include "core/gpu_cdna4.h"
#include "ops/matmul/matmul_gpu.h"

namespace lockstep::gpu::cdna4_matmul {

using cdna4::Float16;

constexpr int kStepBytes = 128, kUnit = 16, kUnits = kStepBytes / kUnit;  // of a row of an operand's tile

struct Operand {
  const void* data;
  int64_t stride, slab;  // elements between rows, between experts
  int rows;              // of the result that it makes: what lies beyond counts as zero
};
struct Problem {
  Operand a, b;
  int k, tiles_m, tiles_n, experts;  // k: of all experts where they cut it; tiles_m: unused where they cut the rows
  const int32_t* offsets;
  int k_segment;
  void* y;
  int64_t y_stride, y_slab;
  bool y_is_f32, accumulate;
  const float* a_scale;
  const ue8m0* b_scale;
  int64_t a_scale_stride, b_scale_stride;
};
struct Tile {
  bool there;
  int expert, row, row_end, column, k_begin, k_end;
};

// Tile i, if there are so many. Every lane of the wave has the same answer.
template <typename S>
GPU_INLINE Tile find_tile(const Problem& p, int i) {
  Tile t = {true, 0, 0, p.a.rows, 0, 0, p.k};
  int tiles_m = p.tiles_m, base = 0;
  if constexpr (S::kCutK) {
    t.expert = i / (tiles_m * p.tiles_n);
    i -= t.expert * tiles_m * p.tiles_n;
    if (p.offsets != nullptr) {
      t.k_begin = p.offsets[t.expert];
      t.k_end = p.offsets[t.expert + 1];
    }
  } else if (p.offsets != nullptr) {
    // Each lane counts the tiles of neighbouring experts; the lane that has tile i tells which expert's it is.
    const auto tiles_of = [&](int e) { return (p.offsets[e + 1] - p.offsets[e] + S::kM - 1) / S::kM * p.tiles_n; };
    const int each = (p.experts + kWave - 1) / kWave, begin = lane() * each, end = begin + each < p.experts ? begin + each : p.experts;
    int mine = 0;
    for (int e = begin; e < end; ++e) mine += tiles_of(e);
    int sum = mine;
    for (int d = 1; d < kWave; d *= 2) {
      const int left = shuffle(sum, (lane() - d) & (kWave - 1));
      if (lane() >= d) sum += left;
    }
    const uint64_t has = ballot(sum - mine <= i && i < sum);
    if (has == 0) return {};
    const int owner = __builtin_ctzll(has);
    i -= shuffle(sum - mine, owner);
    int e = owner * each;
    for (int tiles = tiles_of(e); i >= tiles; tiles = tiles_of(++e)) i -= tiles;
    t.expert = e;
    base = p.offsets[e];
    t.row_end = p.offsets[e + 1];
    tiles_m = (t.row_end - base + S::kM - 1) / S::kM;
  }
  constexpr int kGroupM = 8;  // tiles in flight share both operands in the cache
  const int band = kGroupM * p.tiles_n, first = i / band * kGroupM, rows = tiles_m - first < kGroupM ? tiles_m - first : kGroupM;
  t.row = base + (first + i % band % rows) * S::kM;
  t.column = i % band / rows * S::kN;
  return t;
}

// Neighbouring blocks go to different dies, each with a cache of its own: neighbouring tiles go to one.
GPU_INLINE int tile_of_block(int num_blocks) {
  constexpr int kDies = 8;
  const int whole = num_blocks / kDies * kDies;
  return block_x() < whole ? block_x() % kDies * (whole / kDies) + block_x() / kDies : block_x();
}

// Where unit u (16 bytes along the contraction) of a row lies in its tile: eight neighbouring rows, and every eighth row, use different banks.
GPU_INLINE int place(int row, int u) { return row * kStepBytes + (u ^ ((row ^ row >> 3) & 7)) * kUnit; }

// 16 bytes as words, which stay in registers.
using Words = Vector<uint32_t, 4>;

// n of a unit's elements from `from`; the rest is zero.
template <typename T>
GPU_INLINE Words load_unit(const T* from, int n) {
  constexpr int kEach = kUnit / sizeof(T), kAWord = 4 / sizeof(T);
  if (n >= kEach) return *reinterpret_cast<const Words*>(from);
  Words v;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    v.v[w] = 0;
#pragma unroll
    for (int i = 0; i < kAWord; ++i)
      if (w * kAWord + i < n) v.v[w] |= static_cast<uint32_t>(from[w * kAWord + i].bits) << (32 / kAWord * i);
  }
  return v;
}
template <typename T>
GPU_INLINE void put_unit(Shared<T> to, int row, int u, const Words& v) {
  to.store_vector(place(row, u) / static_cast<int>(sizeof(T)), __builtin_bit_cast(Vector<T, static_cast<int>(kUnit / sizeof(T))>, v));
}

// One operand's part of a step, on its way from memory (`fetch`) to shared memory (`put`). Rows: of the tile.
template <typename S, int Rows, bool Across>
struct Staged;
template <typename S, int Rows>
struct Staged<S, Rows, false> {
  using T = typename S::Element;
  static constexpr int kEach = kUnit / sizeof(T), kCount = Rows * kUnits / S::kThreads;
  static_assert(Rows * kUnits % S::kThreads == 0);
  Words unit[kCount];
  GPU_INLINE void fetch(const Operand& o, int slab, int row, int row_end, int k, int k_end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = i * S::kThreads + thread_x(), m = row + at / kUnits, l = k + at % kUnits * kEach;
      unit[i] = load_unit(static_cast<const T*>(o.data) + slab * o.slab + m * o.stride + l, m < row_end ? k_end - l : 0);
    }
  }
  GPU_INLINE void put(Shared<T> to) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = i * S::kThreads + thread_x();
      put_unit(to, at / kUnits, at % kUnits, unit[i]);
    }
  }
};
template <typename S, int Rows>
struct Staged<S, Rows, true> {
  using T = typename S::Element;
  static_assert(sizeof(T) == 2);
  static constexpr int kEach = 8, kSquares = Rows / kEach * kUnits, kCount = (kSquares + S::kThreads - 1) / S::kThreads;  // squares of 8 x 8
  Words line[kCount][kEach];
  GPU_INLINE void fetch(const Operand& o, int slab, int row, int row_end, int k, int k_end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = i * S::kThreads + thread_x();
      if (at >= kSquares) break;
      const int m = row + at % (Rows / kEach) * kEach, l = k + at / (Rows / kEach) * kEach;
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        line[i][j] = load_unit(static_cast<const T*>(o.data) + slab * o.slab + (l + j) * o.stride + m, l + j < k_end ? row_end - m : 0);
    }
  }
  GPU_INLINE void put(Shared<T> to) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = i * S::kThreads + thread_x();
      if (at >= kSquares) break;
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const auto element = [&](int j) { return line[i][j].v[r / 2] >> 16 * (r % 2) & 0xffffu; };
        Words turned;
#pragma unroll
        for (int j = 0; j < 4; ++j) turned.v[j] = element(2 * j) | element(2 * j + 1) << 16;
        put_unit(to, at % (Rows / kEach) * kEach + r, at / (Rows / kEach), turned);
      }
    }
  }
};

template <typename Y>
GPU_INLINE void store(Y* at, float v, bool accumulate) {
  if constexpr (sizeof(Y) == 4) {
    *at = accumulate ? *at + v : v;
  } else {
    *at = to_bf16(v);
  }
}

// Of a wave: result(m, n, i) is element i of square (m, n), which begins at row a_row + 32 m and column b_row + 32 n of the tile.
template <typename S, typename Result>
GPU_INLINE void store_results(const Problem& p, const Tile& tile, int a_row, int b_row, const Result& result) {
#pragma unroll
  for (int m = 0; m < S::kWaveM; ++m)
#pragma unroll
    for (int n = 0; n < S::kWaveN; ++n)
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        const int row = tile.row + a_row + 32 * m + cdna4::result_row(r), column = tile.column + b_row + 32 * n + cdna4::result_column();
        if (row >= tile.row_end || column >= p.b.rows) continue;
        const int64_t at = row * p.y_stride + column + (S::kCutK ? tile.expert * p.y_slab : 0);
        if (p.y_is_f32) {
          store(static_cast<float*>(p.y) + at, result(m, n, r), p.accumulate);
        } else {
          store(static_cast<bf16*>(p.y) + at, result(m, n, r), false);
        }
      }
}

constexpr int64_t kFull = 256;  // compute units

// Rows of a typical batch spread over all experts: do tiles of tile_m x tile_n keep the device busy?
inline bool fills(int64_t m, int64_t experts, int64_t columns, int64_t tile_m, int64_t tile_n) {
  const int64_t busy = experts < m ? experts : m, rows = m / busy;
  return (busy == 1 || rows > tile_m / 2) && busy * blocks_for(rows, tile_m) * blocks_for(columns, tile_n) >= kFull;
}

inline Problem product(const MatmulProblem& q) {
  return {.a = {q.x, q.x_stride, 0, static_cast<int>(q.m)}, .b = {q.w, q.w_stride, q.n * q.w_stride, static_cast<int>(q.n)}, .k = static_cast<int>(q.k), .tiles_m = 0,
          .tiles_n = 0, .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = static_cast<int>(q.k_segment), .y = q.y, .y_stride = q.y_stride,
          .y_slab = 0, .y_is_f32 = q.y_is_f32, .accumulate = q.accumulate, .a_scale = nullptr, .b_scale = nullptr, .a_scale_stride = 0, .b_scale_stride = 0};
}
inline Problem product(const Fp8Problem& q) {
  Problem p = product(q.codes);
  p.a_scale = q.x_scale;
  p.b_scale = reinterpret_cast<const ue8m0*>(q.w_scale);
  p.a_scale_stride = q.x_scale_stride;
  p.b_scale_stride = q.w_scale_stride;
  return p;
}

}  // namespace lockstep::gpu::cdna4_matmul
