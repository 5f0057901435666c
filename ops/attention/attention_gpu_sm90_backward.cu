// attention_backward in bf16 on Hopper. A block takes one query and walks its list in pieces of 64 rows as the forward kernel does. Per piece, with G the output's
// gradient:
//   S = q . rows^T, dP = G . rows^T
//   P = exp(scale S - lse) by the unit's exponential, dl = P (dP - delta) scale, rounded to bf16, to shared memory for both of two warpgroups
//   dq += dl . rows                    in registers to the end of the list; each warpgroup has half of the channels
//   dl^T . q + P^T . G                 the query's share of these rows' gradients, to scratch in f32
// Then the rows' gradients are formed (attention_gpu_sm90_rows.h): deterministic, and the same however many queries scratch holds at a time. More than 32 heads are
// the rows of the products, 64 at a time (this file); fewer are columns, and of window rows P and dl go to scratch (attention_gpu_sm90_backward_narrow.h).
//
// Every product is in f32, K ascending in steps of 16. G is rounded to bf16 once, before.
//
// Floor: T H n d 10 operations at 989 TFLOP/s; the shares go out and come back, T n d 8 bytes / 4 TB/s.

#include <algorithm>

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/attention/attention_gpu.h"
#include "ops/attention/attention_gpu_sm90.h"
#include "ops/attention/attention_gpu_sm90_backward_narrow.h"
#include "ops/attention/attention_gpu_sm90_rows.h"
#include "ops/row_gpu.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_attention;
using namespace sm90_attention::backward;

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
  for (int query = block_x(); query < p.num_items; query += grid_dim()) {
    const int64_t t = p.begin + query;
    const List<bf16> list = p.keys.list(t);
    const int n = list.size();
    for (int tile = 0; tile < p.head_tiles; ++tile, q_phase ^= 1) {
      const int head = tile * kRows + mine;
      const Sources<> heads(head < p.heads ? p.q + t * p.q_stride + head * D : zeros());
      const Sources<> grads(head < p.heads ? p.grad_of(t, head) : zeros());
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

// Thread t of warpgroup `half`: heads 16 (t / 32) + t % 32 / 4 and + 8 of the tile; rows half * 32 + 8 j + 2 (t % 4) and + 1 of the piece for P and dl, channels
// half * D / 2 + 8 j + 2 (t % 4) and + 1 for dq and the shares.
template <int D>
GPU_INLINE void attend(Shared90<D>& s, const Problem& p, int half) {
  constexpr int kColumns = D / 2, kPart = kColumns < 128 ? kColumns : 128;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
  unsigned phase = 0, q_phase = 0;
  int buffer = 0;
  float dq[kColumns / 2];
  for (int query = block_x(); query < p.num_items; query += grid_dim()) {
    const int64_t t = p.begin + query;
    for (int tile = 0; tile < p.head_tiles; ++tile, q_phase ^= 1) {
      float lse[2], delta[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = tile * kRows + row + 8 * r;
        lse[r] = head < p.heads ? p.lse[t * p.lse_stride + head] * kLog2E : std::numeric_limits<float>::infinity();
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
          const float weight = begin + half * 32 + i / 4 * 8 + column + i % 2 < n ? probability(logit[i], p, lse[r]) : 0.0f;
          logit[i] = weight;
          dp[i] = weight * (dp[i] - delta[r]) * p.scale;
        }
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
          const int head = row + 8 * (i / 2 % 2), unit = half * 4 + i / 4, at = head * 64 + (unit ^ head % 8) * 8 + column;
          *reinterpret_cast<unsigned*>(s.p[buffer] + at) = sm90::bf16_pair(logit[i], logit[i + 1]);
          *reinterpret_cast<unsigned*>(s.dl[buffer] + at) = sm90::bf16_pair(dp[i], dp[i + 1]);
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

        float* const shares = p.share_of(t, begin) + half * kColumns;
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
          add_shares<kPart>(shares + part * kPart, D, acc, 0, n - begin, tile == 0);
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

template <typename... Parameters, typename... Arguments>
void run(cudaStream_t stream, int64_t blocks, int threads, size_t shared_bytes, void (*kernel)(Parameters...), const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(arguments...);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "attention_backward: %s", cudaGetErrorString(e));
}

// A kernel whose block has a Memory.
template <auto kKernel, typename Memory, typename P>
void run_with(cudaStream_t stream, int64_t blocks, const P& p) {
  constexpr size_t kBytes = sizeof(Memory);
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  run(stream, blocks, kThreads, kBytes, kKernel, p);
}

template <int D>
void launch(Context& c, const AttentionBackward& v, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape,
              AttentionSinkTerm* terms, int64_t longest, int64_t scratch_bytes) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const int64_t blocks = multiprocessors(), heads = v.q.dim(1), places = std::min(shape.window, seq.longest), padded = heads <= 16 ? 16 : 32;
  const bool few = heads <= 32;
  // Queries whose G and weights are kept, and among them those whose shares are. No block waits for another's last query.
  const auto fit = [&](int64_t bytes, int64_t a_query, int64_t queries) {
    const int64_t n = std::clamp<int64_t>(bytes / std::max<int64_t>(a_query, 1), 1, queries);
    return n > blocks && n < queries ? n / blocks * blocks : n;
  };
  const int64_t shared = few ? longest - places : longest, a_share = shared * D * static_cast<int64_t>(sizeof(float));
  const int64_t a_grad = heads * D * static_cast<int64_t>(sizeof(bf16)), a_weight = few ? places * 2 * padded * static_cast<int64_t>(sizeof(bf16)) : 0;
  const int64_t kept = few ? fit(scratch_bytes / 2, a_grad + a_weight, seq.num_tokens) : fit(scratch_bytes, a_share, seq.num_tokens);
  const int64_t range = few ? fit(scratch_bytes / 2, a_share, kept) : kept;

  ArenaScope scope(*c.workspace);
  const auto allocate = [&](int64_t bytes, const char* what) { return bytes == 0 ? nullptr : c.workspace->allocate(static_cast<size_t>(bytes), what); };
  Problem p = {};
  p.keys = key_rows<bf16>(keys, seq, shape);
  p.q = v.q.ptr<bf16>(), p.q_stride = v.q.row_stride;
  auto* const grad = static_cast<bf16*>(allocate(kept * a_grad, "attention output gradients"));
  p.grad = grad;
  p.weights = static_cast<bf16*>(allocate(kept * a_weight, "attention weights"));
  p.shares = static_cast<float*>(allocate(range * a_share, "attention row gradients"));
  p.dq = v.dq.ptr<float>(), p.dq_stride = v.dq.row_stride;
  p.lse = v.lse.ptr<float>(), p.lse_stride = v.lse.row_stride;
  p.terms = terms;
  p.heads = static_cast<int>(heads);
  p.padded = static_cast<int>(padded);
  p.head_tiles = static_cast<int>((heads + kRows - 1) / kRows);
  p.places = static_cast<int>(places);
  p.shared = static_cast<int>(shared);
  p.scale = shape.scale, p.scale_log2e = shape.scale * kLog2E;
  const auto sum = [&](auto kernel, TensorView to, int64_t end) {
    run(stream, seq.num_tokens, kSumThreads, 0, kernel, to.ptr<float>(), to.row_stride, p.keys, static_cast<const float*>(p.shares), p.shared, !few, p.begin, end);
  };
  for (p.kept = 0; p.kept < seq.num_tokens; p.kept += kept) {
    const int64_t kept_end = std::min(seq.num_tokens, p.kept + kept), num_kept = kept_end - p.kept;
    run(stream, blocks_for(num_kept * heads, kRowsABlock), kRowThreads, 0, prepare_kernel, grad, terms, v.d_o.ptr<float>(), v.d_o.row_stride, v.o.ptr<bf16>(), v.o.row_stride,
        p.lse, p.lse_stride, sink.ptr<float>(), p.kept, num_kept, p.heads, D);
    for (p.begin = p.kept; p.begin < kept_end; p.begin += range) {
      const int64_t end = std::min(kept_end, p.begin + range);
      p.num_items = static_cast<int>(end - p.begin);
      const int64_t query_blocks = std::min<int64_t>(blocks, p.num_items);
      if (!few) run_with<attention_backward_sm90_kernel<D>, Shared90<D>>(stream, query_blocks, p);
      else if (padded == 16) run_with<attention_backward_narrow_sm90_kernel<D, 16>, NarrowMemory<D, 16>>(stream, query_blocks, p);
      else run_with<attention_backward_narrow_sm90_kernel<D, 32>, NarrowMemory<D, 32>>(stream, query_blocks, p);
      if (!few) sum(sum_shares_kernel<D, false>, v.dkv, end);
      if (shape.ratio > 0 && seq.longest >= shape.ratio) sum(sum_shares_kernel<D, true>, v.dentries, end);
    }
    if (!few) continue;
    WindowProblem w = {};
    w.q = p.q, w.q_stride = p.q_stride, w.grad = p.grad, w.weights = p.weights;
    w.dkv = v.dkv.ptr<float>(), w.dkv_stride = v.dkv.row_stride;
    w.token_pos = p.keys.seq.token_pos;
    w.begin = static_cast<int>(p.kept), w.end = static_cast<int>(kept_end), w.num_tokens = static_cast<int>(seq.num_tokens);
    w.heads = p.heads, w.padded = p.padded, w.places = p.places, w.window = p.keys.window;
    run_with<window_gradient_sm90_kernel<D>, WindowMemory<D>>(stream, blocks_for(seq.num_tokens, kRows), w);
  }
}

}  // namespace

void attention_backward_sm90(Context& c, const AttentionBackward& v, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                             const AttentionShape& shape, AttentionSinkTerm* terms, int64_t longest, int64_t scratch_bytes) {
  if (v.q.dim(2) == 128) launch<128>(c, v, keys, sink, seq, shape, terms, longest, scratch_bytes);
  else if (v.q.dim(2) == 256) launch<256>(c, v, keys, sink, seq, shape, terms, longest, scratch_bytes);
  else launch<512>(c, v, keys, sink, seq, shape, terms, longest, scratch_bytes);
}

}  // namespace lockstep::gpu
