// Attention in bf16 on Hopper: the walk of attention_gpu_sm90_walk.h over each query's list, for tiles of its heads. Rows are gathered into shared memory, two or three
// pieces in flight, in the layout that the matrix unit reads both ways: along channels for the logits, across for the outputs.
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

template <int D, int N>
__global__ void __launch_bounds__(kThreads, 1) attention_sm90_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char shared[];
  Shared90<D, N>& s = *reinterpret_cast<Shared90<D, N>*>(shared);
  if (threadIdx.x == 0) s.barriers.init();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<40>();
    feed<D>(s, p, [&](int64_t t, int tile, const List<bf16>&) {
      const int head = tile * N + Sources<N>::mine();
      Sources<N>(head < p.heads ? p.q + t * p.q_stride + head * D : zeros()).template copy<D / 64>(s.q, 0);
    });
  } else if (group == 1) {
    sm90::take_registers<232>();
    attend<0, std::conditional_t<N == kRows, Wide<D, 0>, Narrow<D, N, 0>>>(s, p);
  } else {
    sm90::take_registers<232>();
    attend<1, std::conditional_t<N == kRows, Wide<D, 1>, Narrow<D, N, 1>>>(s, p);
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
