// Attention in bf16 on Hopper. A block takes one query and a tile of its heads and walks the query's list in pieces of 64 rows. A warpgroup gathers them into shared
// memory, two or three pieces in flight, in the layout that the matrix unit reads both ways: along channels for the logits, across for the outputs. Of two warpgroups
// that multiply, one has the logits and weights of the even pieces, one those of the odd, which they give each other through shared memory; each has half of the
// output's channels in registers. So one's softmax runs beside the other's products.
//
// Per piece i: S = q . rows^T in f32 (k16 steps, channels ascending); m' = max(m, S scale log2(e)); e = 2^(S scale log2(e) - m') by the unit's own exponential;
// o = o 2^(m - m') + bf16(e) . rows, in the order of the pieces; sums of e in f32 by parity of the piece and
// by (row / 2 mod 4, row / 16), added at the end. The sink comes
// last, then one division and one rounding. What lies beyond the list's end has S = -inf and a row of zeros.
//
// Row contract: pieces begin at multiples of 64 in the query's own list, whatever else the call holds; other heads, and how many, show in no bit of a head.
// Heads are rows of the products, 64 a tile, or, if there are no more than 32, columns: fewer would be padded to 64 (attention_gpu_sm90_narrow.h).
//
// Floor: T H n d 4 operations at 989 TFLOP/s; rows come from the cache, n d 2 bytes a query and tile of heads, 660 KB for n = 640, d = 512: at 5.5 TB/s 700 TFLOP/s
// for 64 heads and 175 for 16.

#include <algorithm>
#include <type_traits>

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/attention/attention_gpu.h"
#include "ops/attention/attention_gpu_sm90.h"
#include "ops/attention/attention_gpu_sm90_narrow.h"
#include "ops/attention/attention_gpu_sm90_wide.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_attention;
using namespace sm90_attention::forward;

// Where a piece is in shared memory, and the parity of its barriers.
template <int kStages>
struct Place {
  int stage = 0;
  unsigned phase = 0;
  GPU_INLINE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <int D, int N>
GPU_INLINE void feed(Shared90<D, N>& s, const Problem& p) {
  const int mine = Sources<>::mine();
  Place<Shared90<D, N>::kStages> place;
  unsigned q_phase = 1;
  for (int item = block_x(); item < p.num_items; item += grid_dim(), q_phase ^= 1) {
    const int64_t t = item / p.head_tiles;
    const int head = item % p.head_tiles * N + mine;
    const List<bf16> list = p.keys.list(t);
    const int n = list.size();
    const Sources<N> heads(head < p.heads ? p.q + t * p.q_stride + head * D : zeros());
    s.q_empty.wait(q_phase);
    heads.template copy<D / 64>(s.q, 0);
    arrive_when_copied(s.q_full);
    if (threadIdx.x == 0) {
      s.list_size = n;
      s.q_full.arrive();
    }
    for (int begin = 0; begin < n; begin += kRows) {
      const Sources<> rows(begin + mine < n ? p.keys.row(list, begin + mine) : zeros());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s.empty[place.stage][half].wait(place.phase ^ 1);
        rows.template copy<D / 128>(s.rows[place.stage], half * (D / 128));
        arrive_when_copied(s.full[place.stage][half]);
      }
      place.advance();
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // no thread leaves copies behind
}

// Warpgroup 0 has the even pieces' weights, 1 the odd ones'. Each multiplies all pieces in order.
template <int D, int N, int kHalf>
GPU_INLINE void attend(Shared90<D, N>& s, const Problem& p) {
  std::conditional_t<N == kRows, Wide<D, kHalf>, Narrow<D, N, kHalf>> work(s, p);
  using At = Place<Shared90<D, N>::kStages>;
  At place;
  unsigned q_phase = 0;
  int alternate = 0;
  const auto arrive = [&](sm90::Barrier& barrier) {
    if (work.lane == 0) barrier.arrive();
  };
  const auto multiply_logits = [&](const At& at) {
    sm90::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      s.full[at.stage][half].wait(at.phase);
      sm90::publish_stores();
      work.multiply_logits(s.rows[at.stage], half);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
  };
  // O takes in a piece whose weights are known; its rows are then free.
  const auto add = [&](auto own, const At& at, bool first) {
    if (!first) work.carry();
    sm90::wgmma_fence();
    work.template multiply_rows<decltype(own)::value>(s.rows[at.stage], first);
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    arrive(s.empty[at.stage][kHalf]);
  };
  const auto add_others = [&](const At& at, bool first) {
    await<kHalf ^ 1>();
    work.take();
    s.full[at.stage][kHalf].wait(at.phase);
    sm90::publish_stores();
    add(std::false_type{}, at, first);
  };
  for (int item = block_x(); item < p.num_items; item += grid_dim(), q_phase ^= 1, alternate ^= 1) {
    s.q_full.wait(q_phase);
    const int n = s.list_size;
    work.begin();
    if (kHalf == 1 && n <= kRows) arrive(s.q_empty);
    for (int begin = 0; begin < n; begin += 2 * kRows) {
      const int odd = begin + kRows;
      const At even_at = place;
      place.advance();
      const At odd_at = place;
      if (odd < n) place.advance();
      if constexpr (kHalf == 0) {
        multiply_logits(even_at);
        if (begin + 2 * kRows >= n) arrive(s.q_empty);  // q has been read for the last time
        work.weigh(n - begin);
        add(std::true_type{}, even_at, begin == 0);
        if (odd < n) add_others(odd_at, false);
      } else {
        if (odd < n) multiply_logits(odd_at);
        add_others(even_at, begin == 0);
        if (odd >= n) continue;
        if (odd + 2 * kRows >= n) arrive(s.q_empty);
        work.weigh(n - odd);
        add(std::true_type{}, odd_at, false);
      }
    }
    work.finish(item / p.head_tiles, item % p.head_tiles * N, alternate);
  }
}

template <int D, int N>
__global__ void __launch_bounds__(kThreads, 1) attention_sm90_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char shared[];
  Shared90<D, N>& s = *reinterpret_cast<Shared90<D, N>*>(shared);
  if (threadIdx.x == 0) {
    s.q_full.init(kFeeders + 1);
    s.q_empty.init(kConsumerWarps);
    for (int i = 0; i < Shared90<D, N>::kStages * 2; ++i) {
      s.full[i / 2][i % 2].init(kFeeders);
      s.empty[i / 2][i % 2].init(kConsumerWarps / 2);
    }
    sm90::publish_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<56>();
    feed(s, p);
  } else if (group == 1) {
    sm90::take_registers<224>();
    attend<D, N, 0>(s, p);
  } else {
    sm90::take_registers<224>();
    attend<D, N, 1>(s, p);
  }
}

template <int D, int N>
void launch_sm90(Problem p, int64_t queries, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(Shared90<D, N>);
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(attention_sm90_kernel<D, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  p.head_tiles = (p.heads + N - 1) / N;
  p.num_items = static_cast<int>(queries) * p.head_tiles;
  const auto blocks = static_cast<unsigned>(std::min(p.num_items, multiprocessors()));
  attention_sm90_kernel<D, N><<<blocks, kThreads, kBytes, stream>>>(p);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "attention of %ld tiles: %s", static_cast<long>(p.num_items), cudaGetErrorString(e));
}
template <int D>
void launch_sm90(const Problem& p, int64_t queries, cudaStream_t stream) {
  if (p.heads <= 16) launch_sm90<D, 16>(p, queries, stream);
  else if (p.heads <= kNarrowHeads) launch_sm90<D, kNarrowHeads>(p, queries, stream);
  else launch_sm90<D, kRows>(p, queries, stream);
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
  p.scale = shape.scale * kLog2E;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (q.dim(2) == 128) launch_sm90<128>(p, seq.num_tokens, stream);
  else if (q.dim(2) == 256) launch_sm90<256>(p, seq.num_tokens, stream);
  else launch_sm90<512>(p, seq.num_tokens, stream);
}

}  // namespace lockstep::gpu
