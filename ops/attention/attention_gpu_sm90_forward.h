#pragma once
// The forward kernel's block: what it is given and what its warpgroups share. attention_gpu_sm90_wide.h and attention_gpu_sm90_narrow.h have what one of the two
// multiplying warpgroups does with a piece.

#include "ops/attention/attention_gpu_sm90_walk.h"
#include "ops/fixed_math.h"

namespace lockstep::gpu::sm90_attention::forward {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kNarrowHeads = 32;  // at most, for heads as columns

struct Problem {
  KeyRows<bf16> keys;
  const bf16* q;
  bf16* o;
  float* lse;
  const float* sink;
  int64_t q_stride, o_stride, lse_stride;
  int heads, head_tiles, num_items;  // items: tiles of heads of all queries
  float scale;                       // times log2(e)
  GPU_INLINE int64_t query(int item) const { return item / head_tiles; }
  GPU_INLINE int tile(int item) const { return item % head_tiles; }
};

// N heads a tile. [2]: of even and odd pieces.
template <int D, int N>
struct Shared90 {
  static constexpr int kStages = N > 16 ? 2 : 3;
  bf16 q[N * D];
  bf16 rows[kStages][kRows * D];
  bf16 p[2][N * 64];  // weights, [head][row of the piece], swizzled
  float highest[2][N], carried[2][N];
  float tops[2][4][N];       // a warp's largest logits, heads as columns
  float totals[2][2][4][N];  // sums of the weights, of alternate items
  WalkBarriers<kStages> barriers;
  int list_size;  // goes with q
};

// What is left to do with the sums of even and odd pieces: the sink, the division, and the logarithm.
struct Ending {
  float factor, lse;
  GPU_INLINE Ending(float sum, float highest, float sink) {
    const float m = fmaxf(highest, sink * kLog2E), carried = sm90::exp2_approximate(highest - m);
    const float denominator = ieee::fma(sum, carried, sm90::exp2_approximate(ieee::fma(sink, kLog2E, -m)));
    factor = carried / denominator;
    lse = ieee::fma(m, kLn2, log_f32(denominator));
  }
};

}  // namespace lockstep::gpu::sm90_attention::forward
