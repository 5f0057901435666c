#pragma once
// What the backward kernels are given, and how they leave what the rows' gradients are made of. Of each query and row of its list, a share: dl^T . q + P^T . G in f32.
// With few heads, a window row's dl and P are less than its share and are left instead; attention_gpu_sm90_rows.h multiplies them.

#include "ops/attention/attention_gpu_sm90_tiles.h"
#include "ops/fixed_math.h"

namespace lockstep::gpu::sm90_attention::backward {

struct Problem {
  KeyRows<bf16> keys;
  const bf16 *q, *grad;  // grad [queries from kept on, heads, D]
  bf16* weights;         // [queries from kept on, places, 2, padded]: dl, then P, of the list's window rows; zeros for heads beyond the last. Few heads only
  float *dq, *shares;    // shares [queries from begin on, shared, D], of all rows, or, of few heads, of the entries
  const float* lse;
  const AttentionSinkTerm* terms;
  int64_t q_stride, dq_stride, lse_stride, kept, begin;
  int heads, padded, head_tiles, places, shared, num_items;  // items: queries
  float scale, scale_log2e;
  GPU_INLINE int64_t query(int item) const { return begin + item; }
  GPU_INLINE int tile(int) const { return 0; }
  // Of row j of query t's list; `which` 0: dl, 1: P.
  GPU_INLINE bf16* weight_of(int64_t t, int j, int which) const { return weights + (((t - kept) * places + j) * 2 + which) * padded; }
  GPU_INLINE const bf16* grad_of(int64_t t, int head) const { return grad + ((t - kept) * heads + head) * keys.width; }
  GPU_INLINE float* share_of(int64_t t, int row) const { return shares + ((t - begin) * shared + row) * keys.width; }
};

constexpr float kLog2E = 1.44269504088896341f;
// P of a logit before its scale, with lse times log2(e).
GPU_INLINE float probability(float dot, const Problem& p, float lse_log2e) { return sm90::exp2_approximate(ieee::fma(dot, p.scale_log2e, -lse_log2e)); }

// Adds rows [from, to) of `acc`, rows and columns as an accumulator holds them, to the shares; the first tile of heads writes.
template <int N>
GPU_INLINE void add_shares(float* shares, int stride, const float (&acc)[N / 2], int from, int to, bool first) {
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r < from || row + 8 * r >= to) continue;
    float* const at = shares + static_cast<int64_t>(row + 8 * r) * stride + column;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float2 v = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
      if (!first) {
        const float2 before = *reinterpret_cast<const float2*>(at + 8 * j);
        v = make_float2(before.x + v.x, before.y + v.y);
      }
      *reinterpret_cast<float2*>(at + 8 * j) = v;
    }
  }
}

}  // namespace lockstep::gpu::sm90_attention::backward
