// Attention in bf16 on Hopper. A block takes one query and 64 of its heads, which are the rows of the matrix instructions, and walks the query's list in pieces of 64
// rows. A warpgroup gathers them into shared memory, two pieces in flight, in the layout that the matrix unit reads both ways: along channels for the logits, across
// for the outputs. Two warpgroups multiply; each has all logits of a piece, so neither waits for the other, and half of the output's channels in registers.
//
// Per piece: S = q . rows^T in f32 (k16 steps, channels ascending); m' = max(m, scale S); e = exp_f32(fma(S, scale, -m')); o = o exp_f32(m - m') + bf16(e) . rows;
// the sum adds e in f32. The sink comes last, then one division and one rounding. What lies beyond the list's end has S = -inf and a row of zeros.
//
// Row contract: pieces begin at multiples of 64 in the query's own list, whatever else the call holds; heads beyond the tile's last are zeros that no other row sees.
//
// Floor: T H n d 4 operations at 989 TFLOP/s; both warpgroups computing S makes it 6, so 660 TFLOP/s at best. Rows come from the cache: n d 2 bytes a query and
// 64 heads, 660 KB for n = 640, d = 512.

#include <algorithm>

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/attention/attention_gpu.h"
#include "ops/attention/attention_gpu_sm90.h"
#include "ops/attention/attention_gpu_sm90_tiles.h"
#include "ops/fixed_math.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_attention;

constexpr int kStages = 2;

struct Problem {
  KeyRows<bf16> keys;
  const bf16* q;
  bf16* o;
  float* lse;
  const float* sink;
  int64_t q_stride, o_stride, lse_stride;
  int heads, head_tiles, num_items;  // items: tiles of heads of all queries
  float scale;
};

template <int D>
struct Shared90 {
  bf16 q[kRows * D];
  bf16 rows[kStages][kRows * D];
  sm90::Barrier q_full, q_empty, full[kStages], empty[kStages];
  int list_size;  // goes with q
};

template <int D>
GPU_INLINE void feed(Shared90<D>& s, const Problem& p) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, mine = warp + 4 * (lane % 16);
  int stage = 0;
  unsigned phase = 1, q_phase = 1;
  for (int item = block_x(); item < p.num_items; item += grid_dim(), q_phase ^= 1) {
    const int64_t t = item / p.head_tiles;
    const int head = item % p.head_tiles * kRows + mine;
    const List<bf16> list = p.keys.list(t);
    const int n = list.size();
    s.q_empty.wait(q_phase);
    copy_rows<D>(s.q, head < p.heads ? p.q + t * p.q_stride + head * D : nullptr, p.q, warp, lane);
    arrive_when_copied(s.q_full);
    if (threadIdx.x == 0) {
      s.list_size = n;
      s.q_full.arrive();
    }
    for (int begin = 0; begin < n; begin += kRows) {
      const bf16* const row = begin + mine < n ? p.keys.row(list, begin + mine) : nullptr;
      s.empty[stage].wait(phase);
      copy_rows<D>(s.rows[stage], row, p.q, warp, lane);
      arrive_when_copied(s.full[stage]);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // no thread leaves copies behind
}

// The larger over the four threads that share a row of an accumulator.
GPU_INLINE float highest_of_row(float v) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, mask));
  return v;
}
GPU_INLINE float sum_of_row(float v) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) v = v + __shfl_xor_sync(0xffffffffu, v, mask);
  return v;
}

// Thread t of warpgroup `half`: rows (heads) 16 (t / 32) + t % 32 / 4 and + 8 of the tile, channels half * D / 2 + 8 j + 2 (t % 4) and + 1.
template <int D>
GPU_INLINE void attend(Shared90<D>& s, const Problem& p, int half) {
  constexpr int kColumns = D / 2;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
  int stage = 0;
  unsigned phase = 0, q_phase = 0;
  float o[kColumns / 2];
  for (int item = block_x(); item < p.num_items; item += grid_dim(), q_phase ^= 1) {
    s.q_full.wait(q_phase);
    const int n = s.list_size;
    float highest[2] = {-std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}, sum[2] = {0.0f, 0.0f};
    for (int begin = 0; begin < n; begin += kRows) {
      s.full[stage].wait(phase);
      sm90::publish_stores();
      float logit[32];
      sm90::wgmma_fence();
#pragma unroll
      for (int chunk = 0; chunk < D / 64; ++chunk)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sm90::MmaBf16<kRows, 0, 0>::run(logit, along_channels(s.q + chunk * kChunk, k), along_channels(s.rows[stage] + chunk * kChunk, k), (chunk | k) != 0);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      if (begin + kRows >= n) {  // q has been read for the last time
        if (lane == 0) s.q_empty.arrive();
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (begin + i / 4 * 8 + column + i % 2 >= n) logit[i] = -std::numeric_limits<float>::infinity();
      }

      float carried[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = logit[2 * r];
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (i / 2 % 2 == r) largest = fmaxf(largest, logit[i]);
        const float m = fmaxf(highest[r], highest_of_row(largest) * p.scale);
        carried[r] = exp_f32(highest[r] - m);
        highest[r] = m;
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; ++i)
          if (i / 2 % 2 == r) {
            logit[i] = exp_f32(ieee::fma(logit[i], p.scale, -m));
            part = part + logit[i];
          }
        sum[r] = ieee::fma(sum[r], carried[r], part);
      }
      // The accumulator's layout is the first operand's, in pairs.
      unsigned weight[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(logit[2 * i], logit[2 * i + 1]);
        weight[i] = *reinterpret_cast<const unsigned*>(&pair);
      }
      if (begin > 0 && !__all_sync(0xffffffffu, carried[0] == 1.0f && carried[1] == 1.0f)) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) o[i] = o[i] * carried[i / 2 % 2];
      }
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        sm90::MmaBf16Registers<kColumns>::run(o, weight + 4 * k, across_channels(s.rows[stage] + half * (kColumns / 64) * kChunk, k), begin > 0 || k > 0);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      if (lane == 0) s.empty[stage].arrive();
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }

    const int64_t t = item / p.head_tiles;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = item % p.head_tiles * kRows + row + 8 * r;
      const float all = sum_of_row(sum[r]);
      if (head >= p.heads) continue;
      const float sink = p.sink[head], m = fmaxf(highest[r], sink), carried = exp_f32(highest[r] - m);
      const float denominator = ieee::fma(all, carried, exp_f32(sink - m)), factor = carried / denominator;
      if (p.lse != nullptr && half == 0 && lane % 4 == 0) p.lse[t * p.lse_stride + head] = m + log_f32(denominator);
      bf16* const to = p.o + t * p.o_stride + head * D + half * kColumns + column;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        *reinterpret_cast<__nv_bfloat162*>(to + 8 * j) = __floats2bfloat162_rn(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1) attention_sm90_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char shared[];
  Shared90<D>& s = *reinterpret_cast<Shared90<D>*>(shared);
  if (threadIdx.x == 0) {
    s.q_full.init(kFeeders + 1);
    s.q_empty.init(kConsumerWarps);
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init(kFeeders);
      s.empty[i].init(kConsumerWarps);
    }
    sm90::publish_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<56>();
    feed<D>(s, p);
  } else {
    sm90::take_registers<224>();
    attend<D>(s, p, group - 1);
  }
}

template <int D>
void launch_sm90(const Problem& p, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(Shared90<D>);
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(attention_sm90_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const auto blocks = static_cast<unsigned>(std::min(p.num_items, multiprocessors()));
  attention_sm90_kernel<D><<<blocks, kThreads, kBytes, stream>>>(p);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "attention of %ld tiles: %s", static_cast<long>(p.num_items), cudaGetErrorString(e));
}

}  // namespace

bool attention_sm90_takes(ConstTensorView o, ConstTensorView q, const AttentionKeys& keys) {
  const int64_t d = q.dim(2);
  if (q.dtype != DType::bf16 || (d != 128 && d != 256 && d != 512)) return false;
  uintptr_t at = 0;
  for (const ConstTensorView& v : {o, q, keys.kv, keys.ring, keys.entries}) at |= reinterpret_cast<uintptr_t>(v.data) | static_cast<uintptr_t>(v.row_stride) * sizeof(bf16);
  return at % 16 == 0;
}

void attention_sm90(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                    const AttentionShape& shape) {
  Problem p = {};
  p.keys = key_rows<bf16>(keys, seq, shape);
  p.q = q.ptr<bf16>(), p.q_stride = q.row_stride;
  p.o = o.ptr<bf16>(), p.o_stride = o.row_stride;
  if (lse.data != nullptr) p.lse = lse.ptr<float>(), p.lse_stride = lse.row_stride;
  p.sink = sink.ptr<float>();
  p.heads = static_cast<int>(q.dim(1));
  p.head_tiles = (p.heads + kRows - 1) / kRows;
  p.num_items = static_cast<int>(seq.num_tokens) * p.head_tiles;
  p.scale = shape.scale;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (q.dim(2) == 128) launch_sm90<128>(p, stream);
  else if (q.dim(2) == 256) launch_sm90<256>(p, stream);
  else launch_sm90<512>(p, stream);
}

}  // namespace lockstep::gpu
