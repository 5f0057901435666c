#pragma once
// How kernels reduce a row: by the tree of fixed_math.h, so that they have the CPU's bits. kTreeLanes (16) threads work on a row, thread l being virtual lane l:
// it takes elements l, l + 16, ... in order, and the lanes fold by shuffles. A wave of 32 or 64 holds two or four rows.

#include "core/gpu.h"
#include "core/dtype.h"
#include "ops/fixed_math.h"

namespace lockstep::gpu {

inline constexpr int kRowThreads = 256;                         // of a block
inline constexpr int kRowsABlock = kRowThreads / kTreeLanes;    // rows that it works on

// Row and virtual lane of the calling thread, in blocks of kRowThreads.
GPU_INLINE int64_t row_of_thread() { return static_cast<int64_t>(block_x()) * kRowsABlock + thread_x() / kTreeLanes; }
GPU_INLINE int row_lane() { return thread_x() % kTreeLanes; }

// Folds the lanes of each row; every lane has the sum. Every thread of the wave calls.
GPU_INLINE float fold_row(float v GPU_PLACE_PARAMETER) {
  for (int width = kTreeLanes / 2; width >= 1; width /= 2) v = v + shuffle_xor(v, width GPU_FORWARD_PLACE);
  return v;
}
// sum over i < n of term(i), and of a(i) * b(i) by fused multiply-adds: tree_sum and tree_dot. Threads without a row pass n = 0.
template <typename Term>
GPU_INLINE float row_sum(int64_t n, Term term GPU_PLACE_PARAMETER) {
  float sum = 0;
#pragma unroll 4
  for (int64_t i = row_lane(); i < n; i += kTreeLanes) sum = sum + term(i);
  return fold_row(sum GPU_FORWARD_PLACE);
}
template <typename A, typename B>
GPU_INLINE float row_dot(int64_t n, A a, B b GPU_PLACE_PARAMETER) {
  float sum = 0;
#pragma unroll 8
  for (int64_t i = row_lane(); i < n; i += kTreeLanes) sum = fma(a(i), b(i), sum);
  return fold_row(sum GPU_FORWARD_PLACE);
}

}  // namespace lockstep::gpu
