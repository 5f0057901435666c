#pragma once
// Attention forward, 64 heads a tile: S = q . rows^T and O = P . rows, heads the rows of the accumulators. Thread t of a warpgroup holds heads
// 16 (t / 32) + t % 32 / 4 and + 8; of a piece rows 8 j + 2 (t % 4) and + 1; of the output the half `kHalf` of the channels, 8 j + 2 (t % 4) and + 1.

#include "ops/attention/attention_gpu_sm90_forward.h"

namespace lockstep::gpu::sm90_attention::forward {

// Among four threads: element i of thread j becomes element j of thread i.
GPU_INLINE void transpose_of_four(unsigned (&v)[4]) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(mask)) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & mask) != 0) continue;
      const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + mask], mask);
      (upper ? v[i] : v[i + mask]) = other;
    }
  }
}

template <int D, int kHalf>
struct Wide {
  static constexpr int kColumns = D / 2;
  static constexpr bool kKeepsHeads = false;
  using Memory = Shared90<D, kRows>;
  Memory& s;
  const Problem& p;
  int row, column;
  float o[kColumns / 2], logit[32], sum[2][4];           // sums of [head], rows 16 w to 16 w + 15
  float highest[2], carried[2];
  unsigned weight[16];                             // the accumulator's layout is the first operand's, in pairs

  GPU_INLINE Wide(Memory& s, const Problem& p) : s(s), p(p) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  }
  GPU_INLINE void begin(int64_t, int) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = kNone;
      if (column == 0) s.highest[kHalf][row + 8 * r] = kNone;
#pragma unroll
      for (int w = 0; w < 4; ++w) sum[r][w] = 0.0f;
    }
    __syncwarp();
  }
  GPU_INLINE void multiply_logits(const bf16* rows, int half) {
    for_channels<D>(half, [&](int chunk, int k, bool accumulate) {
      sm90::MmaBf16<kRows, 0, 0>::run(logit, along_channels(s.q + chunk * kChunk, k), along_channels(rows + chunk * kChunk, k), accumulate);
    });
  }
  GPU_INLINE void weigh(int, int count) {
    if (count < kRows) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + column + i % 2 >= count) logit[i] = kNone;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = logit[2 * r];
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 2 % 2 == r) top = fmaxf(top, logit[i]);
#pragma unroll
      for (int mask = 1; mask <= 2; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      const float m = fmaxf(highest[r], top * p.scale), own_carried = sm90::exp2_approximate(s.highest[kHalf][row + 8 * r] - m);
      carried[r] = sm90::exp2_approximate(highest[r] - m);
      highest[r] = m;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 2 % 2 == r) logit[i] = sm90::exp2_approximate(ieee::fma(logit[i], p.scale, -m));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* const e = logit + 8 * w + 2 * r;
        sum[r][w] = ieee::fma(sum[r][w], own_carried, (e[0] + e[4]) + (e[1] + e[5]));
      }
      __syncwarp();  // the piece before the last, of this warpgroup, has been read
      if (column == 0) s.highest[kHalf][row + 8 * r] = m, s.carried[kHalf][row + 8 * r] = carried[r];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      weight[i] = sm90::bf16_pair(logit[2 * i], logit[2 * i + 1]);
      const int head = row + 8 * (i % 2);
      *reinterpret_cast<unsigned*>(s.p[kHalf] + head * 64 + (i / 2 ^ head % 8) * 8 + column) = weight[i];
    }
    sm90::publish_stores();
    announce<kHalf>();
  }
  GPU_INLINE void take() {
#pragma unroll
    for (int r = 0; r < 2; ++r) highest[r] = s.highest[kHalf ^ 1][row + 8 * r], carried[r] = s.carried[kHalf ^ 1][row + 8 * r];
  }
  GPU_INLINE void carry() {
    if (__all_sync(0xffffffffu, carried[0] == 1.0f && carried[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] = o[i] * carried[i / 2 % 2];
  }
  template <bool kOwn>
  GPU_INLINE void multiply_rows(const bf16* rows, bool first) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned long long b = across_channels(rows + kHalf * (kColumns / 64) * kChunk, k);
      if constexpr (kOwn) sm90::MmaBf16Registers<kColumns>::run(o, weight + 4 * k, b, !first || k > 0);
      else sm90::MmaBf16<kColumns, 0, 1>::run(o, along_channels(s.p[kHalf ^ 1], k), b, !first || k > 0);
    }
  }
  GPU_INLINE void leave(int, int) {}
  GPU_INLINE void finish(int64_t t, int tile, unsigned alternate) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own_carried = sm90::exp2_approximate(s.highest[kHalf][row + 8 * r] - highest[r]);
      float parts[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        parts[w] = sum[r][w];
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) parts[w] = parts[w] + __shfl_xor_sync(0xffffffffu, parts[w], mask);
        parts[w] = parts[w] * own_carried;
      }
      if (column == 0) s.totals[alternate][kHalf][0][row + 8 * r] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
    sync_both();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = tile * kRows + row + 8 * r;
      const bool there = head < p.heads;
      const Ending ending(s.totals[alternate][0][0][row + 8 * r] + s.totals[alternate][1][0][row + 8 * r], highest[r], there ? p.sink[head] : 0.0f);
      if (there && p.lse != nullptr && kHalf == 0 && column == 0) p.lse[t * p.lse_stride + head] = ending.lse;
      bf16* const to = p.o + t * p.o_stride + head * D + kHalf * kColumns + column * 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {  // a thread stores 8 channels in one
        unsigned pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = sm90::bf16_pair(o[4 * (j + i) + 2 * r] * ending.factor, o[4 * (j + i) + 2 * r + 1] * ending.factor);
        transpose_of_four(pair);
        if (there) *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      }
    }
  }
};

}  // namespace lockstep::gpu::sm90_attention::forward
