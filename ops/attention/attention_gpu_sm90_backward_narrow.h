#pragma once
// Attention backward, at most 32 heads: the walk's pieces with heads as columns, N of them, as in attention_gpu_sm90_narrow.h.
//   S^T = rows . q^T, dP^T = rows . G^T; P and dl, [row][head], are the first operand of the entries' shares as they stand in registers;
//   dq^T = rows^T . dl^T in registers to the end of the list, each warpgroup for half of the channels.

#include "ops/attention/attention_gpu_sm90_backward.h"
#include "ops/attention/attention_gpu_sm90_walk.h"

namespace lockstep::gpu::sm90_attention::backward {

template <int D, int N>
struct NarrowMemory {
  static constexpr int kStages = 2;
  bf16 q[N * D], grad[N * D];
  bf16 rows[kStages][kRows * D];
  bf16 dl[2][N * 64];  // [head][row of the piece], swizzled, of even and odd pieces
  WalkBarriers<kStages> barriers;
  int list_size, num_window;  // go with q
};

template <int D, int N, int kHalf>
struct Narrow {
  static constexpr bool kKeepsHeads = true;
  static constexpr int kTiles = D / 128, kPairs = N / 8;  // tiles of 64 channels; pairs of heads a thread
  using Memory = NarrowMemory<D, N>;
  Memory& s;
  const Problem& p;
  int warp, lane, column, num_window;
  int64_t t;
  float dq[kTiles][N / 2], logit[N / 2], dp[N / 2], lse[2 * kPairs], delta[2 * kPairs];
  unsigned weight[N / 4], slope[N / 4];  // P and dl, in pairs of heads

  GPU_INLINE Narrow(Memory& s, const Problem& p) : s(s), p(p) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    warp = thread / 32, lane = thread % 32, column = lane % 4 * 2;
  }
  GPU_INLINE void begin(int64_t query, int) {
    t = query;
    num_window = s.num_window;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) dq[tile][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const int head = i / 2 * 8 + column + i % 2;
      lse[i] = head < p.heads ? p.lse[t * p.lse_stride + head] * kLog2E : std::numeric_limits<float>::infinity();
      delta[i] = head < p.heads ? p.terms[t * p.heads + head].delta : 0.0f;
    }
  }
  GPU_INLINE void multiply_logits(const bf16* rows, int half) {
    for_channels<D>(half, [&](int chunk, int k, bool accumulate) {
      const unsigned long long a = along_channels(rows + chunk * kChunk, k);
      sm90::MmaBf16<N, 0, 0>::run(logit, a, along_channels(s.q + chunk * (N * 64), k), accumulate);
      sm90::MmaBf16<N, 0, 0>::run(dp, a, along_channels(s.grad + chunk * (N * 64), k), accumulate);
    });
  }
  GPU_INLINE void weigh(int, int count) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int head = i / 4 * 2 + i % 2;  // of the thread's
      const float e = warp * 16 + i / 2 % 2 * 8 + lane / 4 < count ? probability(logit[i], p, lse[head]) : 0.0f;
      logit[i] = e;
      dp[i] = e * (dp[i] - delta[head]) * p.scale;
    }
    sm90::sync_warpgroup(kHalf);  // the piece before the last has been multiplied by all warps
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int head = i / 2 * 8 + lane / 4, unit = 2 * warp + i % 2;
      weight[i] = sm90::bf16_pair(logit[2 * i], logit[2 * i + 1]);
      slope[i] = sm90::bf16_pair(dp[2 * i], dp[2 * i + 1]);
      *reinterpret_cast<unsigned*>(s.dl[kHalf] + head * 64 + (unit ^ head % 8) * 8 + column) = sm90::transposed(slope[i]);
    }
    sm90::publish_stores();
    sm90::sync_warpgroup(kHalf);
    announce<kHalf>();
  }
  GPU_INLINE void take() {}
  GPU_INLINE void carry() {}
  template <bool kOwn>
  GPU_INLINE void multiply_rows(const bf16* rows, bool) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        sm90::MmaBf16<N, 1, 0>::run(dq[tile], across_channels(rows + (kHalf * kTiles + tile) * kChunk, k), along_channels(s.dl[kOwn ? kHalf : kHalf ^ 1], k), 1);
  }
  GPU_INLINE void leave(int begin, int count) {
    if (begin < num_window) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const int j = begin + warp * 16 + i % 2 * 8 + lane / 4;
        if (j >= num_window) continue;
        *reinterpret_cast<unsigned*>(p.weight_of(t, j, 0) + i / 2 * 8 + column) = slope[i];
        *reinterpret_cast<unsigned*>(p.weight_of(t, j, 1) + i / 2 * 8 + column) = weight[i];
      }
    }
    if (begin + count <= num_window || begin + kRows <= num_window) return;
    constexpr int kPart = D < 128 ? D : 128;
#pragma unroll 1
    for (int part = 0; part < D / kPart; ++part) {
      float acc[kPart / 2];
      const int at = part * (kPart / 64) * (N * 64);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < N / 16; ++k) sm90::MmaBf16Registers<kPart>::run(acc, slope + 4 * k, sm90::operand_across_k(s.q + at, 2048u * k, N * 128), k > 0);
#pragma unroll
      for (int k = 0; k < N / 16; ++k) sm90::MmaBf16Registers<kPart>::run(acc, weight + 4 * k, sm90::operand_across_k(s.grad + at, 2048u * k, N * 128), 1);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      add_shares<kPart>(p.share_of(t, begin - num_window) + part * kPart, D, acc, num_window - begin, count, /*first=*/true);
    }
  }
  GPU_INLINE void finish(int64_t, int, unsigned) {
    sync_both();  // before the next item's dl
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int head = i / 4 * 8 + column + i % 2;
      if (head >= p.heads) continue;
      float* const to = p.dq + t * p.dq_stride + head * D + kHalf * (D / 2) + warp * 16 + i / 2 % 2 * 8 + lane / 4;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) to[tile * 64] = dq[tile][i];
    }
  }
};

template <int D, int N>
__global__ void __launch_bounds__(kThreads, 1) attention_backward_narrow_sm90_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char shared[];
  NarrowMemory<D, N>& s = *reinterpret_cast<NarrowMemory<D, N>*>(shared);
  if (threadIdx.x == 0) s.barriers.init();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<40>();
    feed<D>(s, p, [&](int64_t t, int, const List<bf16>& list) {
      const int head = Sources<N>::mine();
      Sources<N>(head < p.heads ? p.q + t * p.q_stride + head * D : zeros()).template copy<D / 64>(s.q, 0);
      Sources<N>(head < p.heads ? p.grad_of(t, head) : zeros()).template copy<D / 64>(s.grad, 0);
      if (threadIdx.x == 0) s.num_window = list.num_window;
    });
  } else if (group == 1) {
    sm90::take_registers<232>();
    attend<0, Narrow<D, N, 0>>(s, p);
  } else {
    sm90::take_registers<232>();
    attend<1, Narrow<D, N, 1>>(s, p);
  }
}

}  // namespace lockstep::gpu::sm90_attention::backward
