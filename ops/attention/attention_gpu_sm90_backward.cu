// attention_backward in bf16 on Hopper. A block takes one query and walks its list in pieces of 64 rows as the forward kernel does, for 64 heads at a time. Per piece,
// with G the output's gradient:
//   S = q . rows^T, dP = G . rows^T    each of two warpgroups for 32 of the rows
//   P = exp_f32(scale S - lse), dl = P (dP - delta) scale, rounded to bf16, to shared memory for both
//   dq += dl . rows                    in registers to the end of the list; each warpgroup has half of the channels
//   part = dl^T . q + P^T . G          the query's share of these rows' gradients, to scratch in f32
// Then each row's shares are added up over its queries in ascending order: deterministic, and the same however many queries scratch holds at a time.
//
// Every product is in f32, K ascending in steps of 16. G is rounded to bf16 once, before.
//
// Floor: T H n d 10 operations at 989 TFLOP/s; the shares go out and come back, T n d 8 bytes / 4 TB/s.

#include <algorithm>

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/attention/attention_gpu.h"
#include "ops/attention/attention_gpu_sm90.h"
#include "ops/attention/attention_gpu_sm90_tiles.h"
#include "ops/row_gpu.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_attention;

struct Problem {
  KeyRows<bf16> keys;
  const bf16 *q, *grad;  // grad [queries of the range, heads, D]
  float *dq, *shares;    // shares [queries of the range, longest, D]
  const float* lse;
  const AttentionSinkTerm* terms;
  int64_t q_stride, dq_stride, lse_stride, begin;
  int heads, head_tiles, longest, num_queries;
  float scale;
};

template <int D>
struct Shared90 {
  bf16 q[kRows * D], grad[kRows * D], rows[kRows * D];
  bf16 dl[2][kChunk], p[2][kChunk];  // [head][row of the piece], swizzled; pieces alternate
  sm90::Barrier q_full, q_empty, rows_full, rows_empty;
  int list_size;  // goes with q
};

template <int D>
GPU_INLINE void feed(Shared90<D>& s, const Problem& p) {
  const int mine = Sources<>::mine();
  unsigned phase = 1, q_phase = 1;
  for (int query = block_x(); query < p.num_queries; query += grid_dim()) {
    const int64_t t = p.begin + query;
    const List<bf16> list = p.keys.list(t);
    const int n = list.size();
    for (int tile = 0; tile < p.head_tiles; ++tile, q_phase ^= 1) {
      const int head = tile * kRows + mine;
      const Sources<> heads(head < p.heads ? p.q + t * p.q_stride + head * D : zeros());
      const Sources<> grads(head < p.heads ? p.grad + (static_cast<int64_t>(query) * p.heads + head) * D : zeros());
      s.q_empty.wait(q_phase);
      heads.copy<D / 64>(s.q, 0);
      grads.copy<D / 64>(s.grad, 0);
      arrive_when_copied(s.q_full);
      if (threadIdx.x == 0) {
        s.list_size = n;
        s.q_full.arrive();
      }
      for (int begin = 0; begin < n; begin += kRows, phase ^= 1) {
        const Sources<> rows(begin + mine < n ? p.keys.row(list, begin + mine) : zeros());
        s.rows_empty.wait(phase);
        rows.copy<D / 64>(s.rows, 0);
        arrive_when_copied(s.rows_full);
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // no thread leaves copies behind
}

GPU_INLINE void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Adds `acc`, rows and columns as an accumulator holds them, to the shares; the first tile of heads writes.
template <int N>
GPU_INLINE void add_shares(float* to, int stride, const float (&acc)[N / 2], int rows, bool first) {
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= rows) continue;
    float* const at = to + static_cast<int64_t>(row + 8 * r) * stride + column;
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

// Thread t of warpgroup `half`: heads 16 (t / 32) + t % 32 / 4 and + 8 of the tile; rows half * 32 + 8 j + 2 (t % 4) and + 1 of the piece for P and dl, channels
// half * D / 2 + 8 j + 2 (t % 4) and + 1 for dq and the shares.
template <int D>
GPU_INLINE void attend(Shared90<D>& s, const Problem& p, int half) {
  constexpr int kColumns = D / 2, kPart = kColumns < 128 ? kColumns : 128;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
  unsigned phase = 0, q_phase = 0;
  int buffer = 0;
  float dq[kColumns / 2];
  for (int query = block_x(); query < p.num_queries; query += grid_dim()) {
    const int64_t t = p.begin + query;
    for (int tile = 0; tile < p.head_tiles; ++tile, q_phase ^= 1) {
      float lse[2], delta[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = tile * kRows + row + 8 * r;
        lse[r] = head < p.heads ? p.lse[t * p.lse_stride + head] : std::numeric_limits<float>::infinity();
        delta[r] = head < p.heads ? p.terms[t * p.heads + head].delta : 0.0f;
      }
      s.q_full.wait(q_phase);
      const int n = s.list_size;
      for (int begin = 0; begin < n; begin += kRows, phase ^= 1, buffer ^= 1) {
        s.rows_full.wait(phase);
        sm90::publish_stores();
        float logit[16], dp[16];
        sm90::wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < D / 64; ++chunk)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const unsigned long long rows = along_channels(s.rows + chunk * kChunk + half * (kChunk / 2), k);
            sm90::MmaBf16<32, 0, 0>::run(logit, along_channels(s.q + chunk * kChunk, k), rows, (chunk | k) != 0);
            sm90::MmaBf16<32, 0, 0>::run(dp, along_channels(s.grad + chunk * kChunk, k), rows, (chunk | k) != 0);
          }
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();

#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int r = i / 2 % 2;
          const float weight = begin + half * 32 + i / 4 * 8 + column + i % 2 < n ? exp_f32(ieee::fma(logit[i], p.scale, -lse[r])) : 0.0f;
          logit[i] = weight;
          dp[i] = weight * (dp[i] - delta[r]) * p.scale;
        }
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
          const int head = row + 8 * (i / 2 % 2), unit = half * 4 + i / 4, at = head * 64 + (unit ^ head % 8) * 8 + column;
          *reinterpret_cast<__nv_bfloat162*>(s.p[buffer] + at) = __floats2bfloat162_rn(logit[i], logit[i + 1]);
          *reinterpret_cast<__nv_bfloat162*>(s.dl[buffer] + at) = __floats2bfloat162_rn(dp[i], dp[i + 1]);
        }
        sm90::publish_stores();
        sync_consumers();

        sm90::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sm90::MmaBf16<kColumns, 0, 1>::run(dq, along_channels(s.dl[buffer], k), across_channels(s.rows + half * (kColumns / 64) * kChunk, k), begin > 0 || k > 0);
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();
        if (lane == 0) s.rows_empty.arrive();

        float* const shares = p.shares + (static_cast<int64_t>(query) * p.longest + begin) * D + half * kColumns;
#pragma unroll 1
        for (int part = 0; part < kColumns / kPart; ++part) {
          float acc[kPart / 2];
          const int chunk = (half * kColumns + part * kPart) / 64 * kChunk;
          sm90::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) sm90::MmaBf16<kPart, 1, 1>::run(acc, across_channels(s.dl[buffer], k), across_channels(s.q + chunk, k), k > 0);
#pragma unroll
          for (int k = 0; k < 4; ++k) sm90::MmaBf16<kPart, 1, 1>::run(acc, across_channels(s.p[buffer], k), across_channels(s.grad + chunk, k), 1);
          sm90::wgmma_commit();
          sm90::wgmma_wait<0>();
          add_shares<kPart>(shares + part * kPart, D, acc, n - begin, tile == 0);
        }
      }
      if (lane == 0) s.q_empty.arrive();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = tile * kRows + row + 8 * r;
        if (head >= p.heads) continue;
        float* const to = p.dq + t * p.dq_stride + head * D + half * kColumns + column;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(dq[4 * j + 2 * r], dq[4 * j + 2 * r + 1]);
      }
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1) attention_backward_sm90_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char shared[];
  Shared90<D>& s = *reinterpret_cast<Shared90<D>*>(shared);
  if (threadIdx.x == 0) {
    s.q_full.init(kFeeders + 1);
    s.q_empty.init(kConsumerWarps);
    s.rows_full.init(kFeeders);
    s.rows_empty.init(kConsumerWarps);
    sm90::publish_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<40>();
    feed<D>(s, p);
  } else {
    sm90::take_registers<232>();
    attend<D>(s, p, group - 1);
  }
}

// Of the queries from `begin` on: delta = o . d_o, the sink's weight, and d_o in bf16. A group of 16 threads a head.
__global__ void __launch_bounds__(kRowThreads) prepare_kernel(bf16* grad, AttentionSinkTerm* terms, const float* d_o, int64_t do_stride, const bf16* o, int64_t o_stride,
                                                              const float* lse, int64_t lse_stride, const float* sink, int64_t begin, int64_t num_queries, int heads,
                                                              int width) {
  const int64_t i = row_of_thread(), query = i / heads, t = begin + query, h = i % heads;
  const bool mine = query < num_queries;
  const float* const g = d_o + t * do_stride + h * width;
  const bf16* const output = o + t * o_stride + h * width;
  const float delta = row_dot(mine ? width : 0, [&](int64_t x) { return to_f32(output[x]); }, [&](int64_t x) { return g[x]; });
  if (!mine) return;
  if (row_lane() == 0) terms[t * heads + h] = {exp_f32(sink[h] - lse[t * lse_stride + h]), delta};
  for (int x = row_lane() * 2; x < width; x += 2 * kTreeLanes) {
    const float2 v = *reinterpret_cast<const float2*>(g + x);
    *reinterpret_cast<__nv_bfloat162*>(grad + i * width + x) = __floats2bfloat162_rn(v.x, v.y);
  }
}

constexpr int kSumThreads = 128, kSumWarps = kSumThreads / 32;
constexpr int kLookups = 4;  // queries that a thread looks up at once: a search is a chain of loads

// One row a block: its shares over the queries [begin, end) that read it, in order. kEntries: the entry whose last token is the block's row, if there is one.
template <int D, bool kEntries>
__global__ void __launch_bounds__(kSumThreads, 4) sum_shares_kernel(float* grad, int64_t grad_stride, KeyRows<bf16> keys, const float* shares, int longest, int64_t begin,
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
      at[l] = kEntries ? num_window + entry : num_window - 1 - static_cast<int>(t - first);
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
          places[count + __popc(reads[l] & ((1u << thread % 32) - 1))] = static_cast<int>(batch + l * kSumThreads + thread - begin) * longest + at[l];
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

template <typename... Parameters, typename... Arguments>
void run(cudaStream_t stream, int64_t blocks, int threads, size_t shared_bytes, void (*kernel)(Parameters...), const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(arguments...);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "attention_backward: %s", cudaGetErrorString(e));
}

template <int D>
void backward(Context& c, const AttentionBackward& v, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape,
              AttentionSinkTerm* terms, int64_t longest, int64_t scratch_bytes) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  constexpr size_t kBytes = sizeof(Shared90<D>);
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(attention_backward_sm90_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const int64_t blocks = multiprocessors(), heads = v.q.dim(1), a_query = longest * D * static_cast<int64_t>(sizeof(float));
  int64_t range = std::clamp<int64_t>(scratch_bytes / a_query, 1, seq.num_tokens);
  if (range > blocks && range < seq.num_tokens) range = range / blocks * blocks;  // no block waits for another's last query

  ArenaScope scope(*c.workspace);
  Problem p = {};
  p.keys = key_rows<bf16>(keys, seq, shape);
  p.q = v.q.ptr<bf16>(), p.q_stride = v.q.row_stride;
  auto* const grad = static_cast<bf16*>(c.workspace->allocate(static_cast<size_t>(range * heads * D) * sizeof(bf16), "attention output gradients"));
  p.grad = grad;
  p.shares = static_cast<float*>(c.workspace->allocate(static_cast<size_t>(range * a_query), "attention row gradients"));
  p.dq = v.dq.ptr<float>(), p.dq_stride = v.dq.row_stride;
  p.lse = v.lse.ptr<float>(), p.lse_stride = v.lse.row_stride;
  p.terms = terms;
  p.heads = static_cast<int>(heads);
  p.head_tiles = static_cast<int>((heads + kRows - 1) / kRows);
  p.longest = static_cast<int>(longest);
  p.scale = shape.scale;
  for (p.begin = 0; p.begin < seq.num_tokens; p.begin += range) {
    const int64_t end = std::min(seq.num_tokens, p.begin + range);
    p.num_queries = static_cast<int>(end - p.begin);
    run(stream, blocks_for(p.num_queries * heads, kRowsABlock), kRowThreads, 0, prepare_kernel, grad, terms, v.d_o.ptr<float>(), v.d_o.row_stride, v.o.ptr<bf16>(),
        v.o.row_stride, p.lse, p.lse_stride, sink.ptr<float>(), p.begin, static_cast<int64_t>(p.num_queries), p.heads, D);
    run(stream, std::min<int64_t>(blocks, p.num_queries), kThreads, kBytes, attention_backward_sm90_kernel<D>, p);
    run(stream, seq.num_tokens, kSumThreads, 0, sum_shares_kernel<D, false>, v.dkv.ptr<float>(), v.dkv.row_stride, p.keys, static_cast<const float*>(p.shares), p.longest,
        p.begin, end);
    if (shape.ratio > 0 && seq.longest >= shape.ratio)
      run(stream, seq.num_tokens, kSumThreads, 0, sum_shares_kernel<D, true>, v.dentries.ptr<float>(), v.dentries.row_stride, p.keys,
          static_cast<const float*>(p.shares), p.longest, p.begin, end);
  }
}

}  // namespace

void attention_backward_sm90(Context& c, const AttentionBackward& v, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                             const AttentionShape& shape, AttentionSinkTerm* terms, int64_t longest, int64_t scratch_bytes) {
  if (v.q.dim(2) == 128) backward<128>(c, v, keys, sink, seq, shape, terms, longest, scratch_bytes);
  else if (v.q.dim(2) == 256) backward<256>(c, v, keys, sink, seq, shape, terms, longest, scratch_bytes);
  else backward<512>(c, v, keys, sink, seq, shape, terms, longest, scratch_bytes);
}

}  // namespace lockstep::gpu
