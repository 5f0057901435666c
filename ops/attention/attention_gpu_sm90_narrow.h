#pragma once
// Attention forward, at most 32 heads: S^T = rows . q^T and O^T = rows^T . P^T, heads the columns of the accumulators, N of them. Thread t of a warpgroup holds
// heads 8 j + 2 (t % 4) and + 1; of a piece rows 16 (t / 32) + t % 32 / 4 and + 8; of the output, in its half of the channels, the same of each 64.
// Every sum has the terms and the order of attention_gpu_sm90_wide.h.

#include "ops/attention/attention_gpu_sm90_forward.h"

namespace lockstep::gpu::sm90_attention::forward {

template <int D, int N, int kHalf>
struct Narrow {
  static constexpr int kTiles = D / 128, kPairs = N / 8;  // tiles of 64 channels; pairs of heads a thread
  static constexpr bool kKeepsHeads = false;
  using Memory = Shared90<D, N>;
  Memory& s;
  const Problem& p;
  int warp, lane, column;
  float o[kTiles][N / 2], logit[N / 2], sum[2 * kPairs];
  float highest[2 * kPairs], carried[2 * kPairs], own_highest[2 * kPairs];

  GPU_INLINE Narrow(Memory& s, const Problem& p) : s(s), p(p) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    warp = thread / 32, lane = thread % 32, column = lane % 4 * 2;
  }
  GPU_INLINE void begin(int64_t, int) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) highest[i] = own_highest[i] = kNone, sum[i] = 0.0f;
  }
  GPU_INLINE void multiply_logits(const bf16* rows, int half) {
    for_channels<D>(half, [&](int chunk, int k, bool accumulate) {
      sm90::MmaBf16<N, 0, 0>::run(logit, along_channels(rows + chunk * kChunk, k), along_channels(s.q + chunk * (N * 64), k), accumulate);
    });
  }
  GPU_INLINE void weigh(int, int count) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (warp * 16 + 8 * r + lane / 4 >= count) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) logit[4 * j + 2 * r] = logit[4 * j + 2 * r + 1] = kNone;
      }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      float top = fmaxf(logit[i / 2 * 4 + i % 2], logit[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
      for (int mask = 4; mask <= 16; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      if (lane / 4 == 0) s.tops[kHalf][warp][i / 2 * 8 + column + i % 2] = top;
    }
    sm90::sync_warpgroup(kHalf);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int head = i / 2 * 8 + column + i % 2, at = i / 2 * 4 + i % 2;
      const float top = fmaxf(fmaxf(s.tops[kHalf][0][head], s.tops[kHalf][1][head]), fmaxf(s.tops[kHalf][2][head], s.tops[kHalf][3][head]));
      const float m = fmaxf(highest[i], top * p.scale), own_carried = sm90::exp2_approximate(own_highest[i] - m);
      carried[i] = sm90::exp2_approximate(highest[i] - m);
      highest[i] = own_highest[i] = m;
#pragma unroll
      for (int r = 0; r < 2; ++r) logit[at + 2 * r] = sm90::exp2_approximate(ieee::fma(logit[at + 2 * r], p.scale, -m));
      const float pair = logit[at] + logit[at + 2];
      sum[i] = ieee::fma(sum[i], own_carried, pair + __shfl_xor_sync(0xffffffffu, pair, 4));
      if (warp == 0 && lane / 4 == 0) s.highest[kHalf][head] = m, s.carried[kHalf][head] = carried[i];
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = 8 * j + lane / 4, unit = 2 * warp + r;
        *reinterpret_cast<unsigned*>(s.p[kHalf] + head * 64 + (unit ^ head % 8) * 8 + column) =
            sm90::transposed(sm90::bf16_pair(logit[4 * j + 2 * r], logit[4 * j + 2 * r + 1]));
      }
    sm90::publish_stores();
    sm90::sync_warpgroup(kHalf);
    announce<kHalf>();
  }
  GPU_INLINE void take() {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int head = i / 2 * 8 + column + i % 2;
      highest[i] = s.highest[kHalf ^ 1][head], carried[i] = s.carried[kHalf ^ 1][head];
    }
  }
  GPU_INLINE void carry() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) o[tile][i] = o[tile][i] * carried[i / 4 * 2 + i % 2];
  }
  template <bool kOwn>
  GPU_INLINE void multiply_rows(const bf16* rows, bool first) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        sm90::MmaBf16<N, 1, 0>::run(o[tile], across_channels(rows + (kHalf * kTiles + tile) * kChunk, k), along_channels(s.p[kOwn ? kHalf : kHalf ^ 1], k), !first || k > 0);
  }
  GPU_INLINE void leave(int, int) {}
  GPU_INLINE void finish(int64_t t, int, unsigned alternate) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      float part = sum[i];
#pragma unroll
      for (int mask = 8; mask <= 16; mask *= 2) part = part + __shfl_xor_sync(0xffffffffu, part, mask);
      if (lane / 4 == 0) s.totals[alternate][kHalf][warp][i / 2 * 8 + column + i % 2] = part * sm90::exp2_approximate(own_highest[i] - highest[i]);
    }
    sync_both();
    float factor[2 * kPairs];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int head = i / 2 * 8 + column + i % 2;
      float all[2];
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const auto& parts = s.totals[alternate][parity];
        all[parity] = (parts[0][head] + parts[1][head]) + (parts[2][head] + parts[3][head]);
      }
      const Ending ending(all[0] + all[1], highest[i], head < p.heads ? p.sink[head] : 0.0f);
      factor[i] = ending.factor;
      if (p.lse != nullptr && kHalf == 0 && warp == 0 && lane / 4 == 0 && head < p.heads) p.lse[t * p.lse_stride + head] = ending.lse;
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int head = 8 * j + lane / 4;
      bf16* const to = p.o + t * p.o_stride + head * D + kHalf * (D / 2) + warp * 16 + column;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const from = o[tile] + 4 * j + 2 * r;
          const unsigned pair = sm90::transposed(sm90::bf16_pair(from[0] * factor[2 * j], from[1] * factor[2 * j + 1]));
          if (head < p.heads) *reinterpret_cast<unsigned*>(to + tile * 64 + 8 * r) = pair;
        }
    }
  }
};

}  // namespace lockstep::gpu::sm90_attention::forward
