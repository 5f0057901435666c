#pragma once
// The gradients of the rows, in f32, each one chain over its queries in ascending order, the same however many of them a launch brings: the sums of the shares that the
// queries' blocks left, and, of few heads, the products of the window rows, which are read by the queries beside them. There a block takes 64 rows of the call and every
// query's dl^T . q and P^T . G, with dl and P as its block left them; 64 steps of (query, dl or P, head) are a stage in shared memory.
// Floors: a share is read once; the products read (1 + (w - 1) / 64) T H d 4 bytes of q and G.

#include "core/gpu_check.h"
#include "ops/attention/attention_gpu_sm90_walk.h"
#include "ops/row_gpu.h"

namespace lockstep::gpu::sm90_attention::backward {

struct WindowProblem {
  const bf16 *q, *grad, *weights;  // of Problem
  float* dkv;
  const int32_t* token_pos;
  int64_t q_stride, dkv_stride;
  int begin, end, num_tokens, heads, padded, places, window;  // queries [begin, end)
};

template <int D>
struct WindowMemory {
  static constexpr int kStages = 3;
  bf16 heads[kStages][kRows * D], weights[kStages][kChunk];
  sm90::Barrier full[kStages], empty[kStages];
};

template <int D>
GPU_INLINE void feed_window(WindowMemory<D>& s, const WindowProblem& p, int row, int begin, int end, int stages) {
  const int mine = Sources<>::mine(), group = static_cast<int>(threadIdx.x) / 8, unit = static_cast<int>(threadIdx.x) % 8, units = p.padded / 4;  // units a query
  Place<WindowMemory<D>::kStages> place;
  for (int i = 0; i < stages; ++i, place.advance()) {
    const int step = i * kRows + mine, query = begin + step / (2 * p.padded), which = step / p.padded % 2, head = step % p.padded;
    const bool there = query < end && head < p.heads;
    const Sources<> heads(!there ? zeros()
                          : which == 0 ? p.q + query * p.q_stride + head * D
                                       : p.grad + (static_cast<int64_t>(query - p.begin) * p.heads + head) * D);
    const int t = begin + (i * 8 + unit) / units, at = (i * 8 + unit) % units;
    const int first = t < end ? t - min(p.token_pos[t] + 1, p.window) + 1 : INT32_MAX;
    const bf16* const of_query = p.weights + (static_cast<int64_t>(t - p.begin) * p.places * units + at) * 8;
    s.empty[place.stage].wait(place.phase ^ 1);
    heads.template copy<D / 64>(s.heads[place.stage], 0);
    const unsigned to = sm90::shared_address(s.weights[place.stage] + group * 64 + (unit ^ group % 8) * 8);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int x = row + group + 16 * k;
      copy_16_bytes(to + k * (16 * 128), x >= first && x <= t ? of_query + static_cast<int64_t>(x - first) * units * 8 : zeros());
    }
    arrive_when_copied(s.full[place.stage]);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // no thread leaves copies behind
}

template <int D>
GPU_INLINE void multiply_window(WindowMemory<D>& s, const WindowProblem& p, int first_row, int stages, int half) {
  constexpr int kColumns = D / 2;
  const int thread = static_cast<int>(threadIdx.x) % 128, row = first_row + thread / 32 * 16 + thread % 32 / 4;
  float* const to = p.dkv + row * p.dkv_stride + half * kColumns + thread % 4 * 2;
  float acc[kColumns / 2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      // A row of an earlier launch's queries goes on.
      const float2 before = row + 8 * r < p.begin ? *reinterpret_cast<const float2*>(to + 8 * r * p.dkv_stride + 8 * j) : make_float2(0, 0);
      acc[4 * j + 2 * r] = before.x, acc[4 * j + 2 * r + 1] = before.y;
    }
  Place<WindowMemory<D>::kStages> place;
  for (int i = 0; i < stages; ++i, place.advance()) {
    s.full[place.stage].wait(place.phase);
    sm90::publish_stores();
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sm90::MmaBf16<kColumns, 0, 1>::run(acc, along_channels(s.weights[place.stage], k), across_channels(s.heads[place.stage] + half * (kColumns / 64) * kChunk, k), 1);
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    if (thread % 32 == 0) s.empty[place.stage].arrive();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= p.num_tokens) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
      *reinterpret_cast<float2*>(to + 8 * r * p.dkv_stride + 8 * j) = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1) window_gradient_sm90_kernel(const __grid_constant__ WindowProblem p) {
  extern __shared__ __align__(1024) char shared[];
  WindowMemory<D>& s = *reinterpret_cast<WindowMemory<D>*>(shared);
  const int row = block_x() * kRows, begin = max(row, p.begin), end = min(row + kRows - 1 + p.window, p.end);
  if (begin >= end) return;
  const int stages = ((end - begin) * 2 * p.padded + kRows - 1) / kRows;
  if (threadIdx.x == 0) {
    for (int i = 0; i < WindowMemory<D>::kStages; ++i) {
      s.full[i].init(kFeeders);
      s.empty[i].init(kConsumerWarps);
    }
    sm90::publish_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<56>();
    feed_window<D>(s, p, row, begin, end, stages);
  } else {
    sm90::take_registers<224>();
    multiply_window<D>(s, p, row, stages, group - 1);
  }
}

constexpr int kSumThreads = 128, kSumWarps = kSumThreads / 32;
constexpr int kLookups = 4;  // queries that a thread looks up at once: a search is a chain of loads

// One row a block: its shares over the queries [begin, end) that read it, in order. kEntries: the entry whose last token is the block's row, if there is one.
// all: a query has shares of its whole list, not of the entries alone.
template <int D, bool kEntries>
__global__ void __launch_bounds__(kSumThreads, 4) sum_shares_kernel(float* grad, int64_t grad_stride, KeyRows<bf16> keys, const float* shares, int shared, bool all, int64_t begin,
                                                                 int64_t end) {
  __shared__ int places[kLookups * kSumThreads], counts[kLookups * kSumWarps];
  const int64_t first = block_x();
  const SequenceArrays& seq = keys.seq;
  const int s = seq.token_seq[first], position = seq.token_pos[first], thread = thread_x();
  int64_t last = seq.seq_row[s + 1], row = first;
  int entry = 0;
  if constexpr (kEntries) {
    if ((position + 1) % keys.ratio != 0) return;
    entry = (position + 1) / keys.ratio - 1;
    row = entry_row(seq, keys.per_page, s, entry);
  } else if (first + keys.window < last) {
    last = first + keys.window;
  }
  if (first >= end || last <= begin) return;
  const int64_t from = first < begin ? begin : first, to = last > end ? end : last;
  const int column = thread * 4;
  float* const out = grad + row * grad_stride + column;
  float4 acc = make_float4(0, 0, 0, 0);
  if (column < D && (kEntries || first < begin)) acc = *reinterpret_cast<const float4*>(out);
  for (int64_t batch = from; batch < to; batch += kLookups * kSumThreads) {
    // Where the row stands in each query's list, or -1. Indices ascend, so entry e is not behind place e; what is past a list's end is negative.
    int at[kLookups];
#pragma unroll
    for (int l = 0; l < kLookups; ++l) {
      const int64_t t = batch + l * kSumThreads + thread;
      at[l] = -1;
      if (t >= to) continue;
      const int num_window = min(seq.token_pos[t] + 1, keys.window);
      at[l] = kEntries ? (all ? num_window : 0) + entry : num_window - 1 - static_cast<int>(t - first);
    }
    if (kEntries && keys.selected != nullptr) {
      int low[kLookups] = {}, high[kLookups];
      const int32_t* chosen[kLookups];
#pragma unroll
      for (int l = 0; l < kLookups; ++l) {
        chosen[l] = keys.selected + (batch + l * kSumThreads + thread) * keys.selected_stride;
        high[l] = at[l] < 0 ? 0 : min(keys.num_selected, entry + 1);
      }
      for (int length = min(keys.num_selected, entry + 1); length > 0; length /= 2) {
        int value[kLookups];
#pragma unroll
        for (int l = 0; l < kLookups; ++l) value[l] = low[l] < high[l] ? chosen[l][(low[l] + high[l]) / 2] : 0;
#pragma unroll
        for (int l = 0; l < kLookups; ++l) {
          const int mid = (low[l] + high[l]) / 2;
          if (low[l] >= high[l]) continue;
          if (value[l] >= 0 && value[l] < entry) low[l] = mid + 1;
          else high[l] = mid;
        }
      }
#pragma unroll
      for (int l = 0; l < kLookups; ++l) {
        const bool found = at[l] >= 0 && low[l] < keys.num_selected && chosen[l][low[l]] == entry;
        at[l] = found ? at[l] - entry + low[l] : -1;
      }
    }
    // Those of the queries that read it, in order.
    unsigned reads[kLookups];
    __syncthreads();  // the batch before has been read
#pragma unroll
    for (int l = 0; l < kLookups; ++l) {
      reads[l] = __ballot_sync(0xffffffffu, at[l] >= 0);
      if (thread % 32 == 0) counts[l * kSumWarps + thread / 32] = __popc(reads[l]);
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int l = 0; l < kLookups; ++l) {
#pragma unroll
      for (int w = 0; w < kSumWarps; ++w) {
        if (w == thread / 32 && at[l] >= 0)
          places[count + __popc(reads[l] & ((1u << thread % 32) - 1))] = static_cast<int>(batch + l * kSumThreads + thread - begin) * shared + at[l];
        count += counts[l * kSumWarps + w];
      }
    }
    __syncthreads();
    if (column < D) {
#pragma unroll 16
      for (int i = 0; i < count; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(shares + static_cast<int64_t>(places[i]) * D + column);
        acc = make_float4(acc.x + v.x, acc.y + v.y, acc.z + v.z, acc.w + v.w);
      }
    }
  }
  if (column < D) *reinterpret_cast<float4*>(out) = acc;
}

}  // namespace lockstep::gpu::sm90_attention::backward
