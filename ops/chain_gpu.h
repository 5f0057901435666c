#pragma once
// Sums whose order is fixed, one after the other: a chain runs at the latency of its instruction (4 cycles a step) where the operands come in time. in_order
// fetches them some steps ahead, from shared memory; chain_columns has other waves bring them there.

#include "core/gpu.h"

namespace lockstep::gpu {

// visit(load(0)), visit(load(1)), ..., visit(load(n - 1)).
template <typename Load, typename Visit>
GPU_INLINE void in_order(int n, const Load& load, const Visit& visit) {
  constexpr int kAhead = 8;
  int i = 0;
  if (n >= kAhead) {
    decltype(load(0)) even[kAhead], odd[kAhead];  // in turns, so that none is copied
    const auto fetch = [&](auto& to, int from) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) to[k] = load(from + k);
    };
    const auto visit_all = [&](const auto& v) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) visit(v[k]);
    };
    fetch(even, 0);
    for (; i + 3 * kAhead <= n; i += 2 * kAhead) {
      fetch(odd, i + kAhead);
      visit_all(even);
      fetch(even, i + 2 * kAhead);
      visit_all(odd);
    }
    const bool two = i + 2 * kAhead <= n;
    if (two) fetch(odd, i + kAhead);
    visit_all(even);
    if (two) visit_all(odd);
    i += two ? 2 * kAhead : kAhead;
  }
  for (; i < n; ++i) visit(load(i));
}

// A block's kChainColumns columns, over rows in order: the first wave's threads are the chains, the others bring tiles of rows.
inline constexpr int kChainColumns = 16, kChainRows = 256, kChainLoaders = 256, kChainThreads = kWave + kChainLoaders;
inline constexpr size_t kChainBytes = sizeof(float) * 2 * 2 * kChainRows * kChainColumns;

struct ChainTerms {
  Vector<float, 4> a, b;
};
// sum = fma(a, b, sum) over rows, of column thread_x() of `columns` <= kChainColumns; the value counts in those threads. load(row, column) fetches what
// terms(loaded) makes the terms of columns column ... column + 3 of (a multiple of 4, below `columns`): several loads come before the first of their terms.
// Every thread of a block of kChainThreads calls, with kChainBytes of shared memory.
template <typename Load, typename Terms>
GPU_INLINE float chain_columns(float sum, int64_t rows, int columns, const Load& load, const Terms& terms) {
  constexpr int kQuads = kChainColumns / 4, kStep = kChainLoaders / kQuads, kTile = kChainRows * kChainColumns * 2;
  const Shared<float> tiles = SharedMemory().take<float>(2 * kTile);
  const int loader = thread_x() - kWave, column = loader % kQuads * 4, row = loader / kQuads;
  const bool loads = loader >= 0 && column < columns, chains = thread_x() < columns;
  const int num_tiles = static_cast<int>((rows + kChainRows - 1) / kChainRows);
  const auto rows_of = [&](int tile) { return rows - static_cast<int64_t>(tile) * kChainRows < kChainRows ? static_cast<int>(rows - static_cast<int64_t>(tile) * kChainRows) : kChainRows; };
  for (int tile = 0; tile <= num_tiles; ++tile) {
    if (loads && tile < num_tiles) {
      decltype(load(int64_t{0}, 0)) loaded[kChainRows / kStep] = {};
      const int n = rows_of(tile);
#pragma unroll
      for (int j = 0; j < kChainRows / kStep; ++j)
        if (row + j * kStep < n) loaded[j] = load(static_cast<int64_t>(tile) * kChainRows + row + j * kStep, column);
      const Shared<float> to = tiles.from(tile % 2 * kTile + (row * kChainColumns + column) * 2);
#pragma unroll
      for (int j = 0; j < kChainRows / kStep; ++j) {
        if (row + j * kStep >= n) continue;
        const auto [a, b] = terms(loaded[j]);
        to.store_vector<4>(j * kStep * kChainColumns * 2, {{a.v[0], b.v[0], a.v[1], b.v[1]}});
        to.store_vector<4>(j * kStep * kChainColumns * 2 + 4, {{a.v[2], b.v[2], a.v[3], b.v[3]}});
      }
    }
    if (chains && tile > 0) {
      const Shared<float> from = tiles.from((tile - 1) % 2 * kTile + thread_x() * 2);
      in_order(rows_of(tile - 1), [&](int i) { return from.load_vector<2>(i * kChainColumns * 2); },
               [&](const Vector<float, 2>& v) { sum = fma(v.v[0], v.v[1], sum); });
    }
    sync_block();
  }
  return sum;
}

}  // namespace lockstep::gpu
