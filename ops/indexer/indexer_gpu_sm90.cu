// Index scores on Hopper's tensor cores.
//
// A block makes the scores of 256 entries for up to kMostQueries neighbouring queries. Each of four warpgroups keeps the keys of 64 entries in registers, as the A of its
// products, for as long as queries are of one sequence; wherever its pages lie, a key is read from memory once a block. A thread of a fifth sends queries through a ring in
// shared memory, 64 heads a step (of 64 / H queries): the B. A thread then has two entries' dots with a quarter of the heads, which are virtual lanes of the tree
// over heads: relu, weight and most of the tree are in registers, four shuffles a query are left.
//
// Row contract: a dot is one chain of wgmma's steps of 16 channels, ascending, the tree is that of H lanes: neither depends on what else is in the block.
//
// Floor: 2 H di operations a score over 800 TFLOP/s; in decode, the bytes of the keys over the memory's rate. Of the cache each block reads 256 keys and its queries: with
// 64 queries of 64 heads of 128 channels 1.1 MB for 64 x 1024 cycles of products, 17 bytes a cycle of about 30.

#include <algorithm>

#include "core/device.h"
#include "core/gpu_sm90.h"
#include "ops/indexer/indexer_gpu.h"
#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

constexpr int kRows = 64, kGroups = kBlockEntries / kRows, kColumns = kStepHeads, kThreads = (kGroups + 1) * 128;
constexpr int kStages = 6, kChunk = 64;  // channels: 128 bytes

template <int Chunks>
struct SharedScores {
  bf16 q[kStages][Chunks][kColumns * kChunk];
  sm90::Barrier full[kStages], empty[kStages];
  int seq[kMostQueries], visible[kMostQueries], item[kMostQueries], num_items;
  GPU_INLINE BlockQueries queries() { return {Shared<int>(seq), Shared<int>(visible), Shared<int>(item), Shared<int>(&num_items)}; }
};

// 4 x 4 words of the four lanes of a quad, transposed.
GPU_INLINE void transpose_quad(unsigned (&w)[4], int c) {
  const bool odd = c & 1, upper = c & 2;
  unsigned a = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
  (odd ? w[0] : w[1]) = a, (odd ? w[2] : w[3]) = b;
  a = __shfl_xor_sync(0xffffffffu, upper ? w[0] : w[2], 2), b = __shfl_xor_sync(0xffffffffu, upper ? w[1] : w[3], 2);
  (upper ? w[0] : w[2]) = a, (upper ? w[1] : w[3]) = b;
}

// Keys of entries `entry` and entry + 8 of sequence s as fragments of A, four words a step of 16 channels; zeros for entries that are not there. A thread loads 16 bytes of
// every 64 and gets from its quad what its place in the fragments asks for.
template <int Chunks>
GPU_INLINE void load_keys(unsigned (&key)[Chunks * 16], const IndexScores<bf16>& p, int s, int entry, int c) {
  const int there = entries_of(p, s);
  unsigned word[2][Chunks * 2][4] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int e = entry + 8 * r;
    if (e >= there) continue;
    const bf16* const from = p.keys + entry_row(p.seq, p.per_page, s, e) * p.key_stride + c * 8;
#pragma unroll
    for (int i = 0; i < Chunks * 2; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + i * 32));
      word[r][i][0] = v.x, word[r][i][1] = v.y, word[r][i][2] = v.z, word[r][i][3] = v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < Chunks * 2; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      transpose_quad(word[r][i], c);
#pragma unroll
      for (int j = 0; j < 4; ++j) key[i * 8 + j / 2 * 4 + j % 2 * 2 + r] = word[r][i][j];
    }
}

template <int Chunks>
GPU_INLINE void feed(SharedScores<Chunks>& s, const CUtensorMap& q_map, int heads, int64_t first_query) {
  sm90::leave_registers<24>();
  if (thread_x() != kGroups * 128) return;
  int stage = 0;
  unsigned phase = 0;
  for (int i = 0; i < s.num_items; ++i) {
    const int first = s.item[i] * heads / kColumns * kColumns;
    s.empty[stage].wait(phase ^ 1);
    s.full[stage].arrive_and_expect(sizeof s.q[stage]);
#pragma unroll
    for (int chunk = 0; chunk < Chunks; ++chunk)
      sm90::load_tile(s.q[stage][chunk], &q_map, &s.full[stage], chunk * kChunk, static_cast<int>(first_query) * heads + first, 0);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

template <int Heads, int Chunks>
GPU_INLINE void score(SharedScores<Chunks>& s, const IndexScores<bf16>& p, int64_t first_query, int first_entry, int thread) {
  constexpr int kAStep = kColumns / Heads, kPairs = Heads / 8;  // queries a step; pairs of heads a thread has of each
  sm90::take_registers<112>();
  unsigned key[Chunks * 16];
  int loaded = -1, stage = 0;
  unsigned phase = 0;
#pragma unroll 1
  for (int i = 0; i < s.num_items; ++i) {
    asm volatile("" : "+r"(thread));  // places are worked out where they are needed: registers are scarce
    const int row = thread / 32 * 16 + thread % 32 / 4, c = thread % 4;
    const int first = s.item[i] / kAStep * kAStep, sequence = s.seq[s.item[i]];
    const bool any = most_visible(s.queries(), first, kAStep, sequence) > first_entry;  // otherwise the warpgroup goes along without work
    if (any && sequence != loaded) {
      load_keys<Chunks>(key, p, sequence, first_entry + row, c);
      loaded = sequence;
    }
    s.full[stage].wait(phase);
    float dot[kColumns / 2];
    float2 weight[kAStep][kPairs];
    if (any) {
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Chunks * 4; ++k)
        sm90::MmaBf16Registers<kColumns, 0>::run(dot, key + 4 * k, sm90::operand_along_k(s.q[stage][k / 4], 32u * static_cast<unsigned>(k % 4)), k != 0);
      sm90::wgmma_commit();
#pragma unroll
      for (int q = 0; q < kAStep; ++q) {
        const int64_t t = p.begin + min(first_query + first + q, p.queries - 1);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) weight[q][j] = __ldg(reinterpret_cast<const float2*>(p.weight + t * p.weight_stride + 8 * j + 2 * c));
      }
      sm90::wgmma_wait<0>();
    }
    if (thread % 32 == 0) s.empty[stage].arrive();
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
    if (!any) continue;
#pragma unroll
    for (int q = 0; q < kAStep; ++q) {
      // Head 8 j + 2 c + b is of virtual lane 8 (j % 2) + 2 c + b. Lanes eight apart fold here; those four apart between c and c ^ 2, each of which goes on with one of the
      // two entries; those two apart between c and c ^ 1, each with one b; and at last those.
      float part[2][2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float lanes[2] = {};
#pragma unroll
          for (int j = 0; j < kPairs; ++j)
            lanes[j % 2] = fma(b == 0 ? weight[q][j].x : weight[q][j].y, fmaxf(dot[4 * (q * kPairs + j) + 2 * r + b], 0.0f), lanes[j % 2]);
          part[r][b] = lanes[0] + lanes[1];
        }
      const bool upper = c & 2, odd = c & 1;
      const float of_0 = (upper ? part[1][0] : part[0][0]) + shuffle_xor(upper ? part[0][0] : part[1][0], 2);
      const float of_1 = (upper ? part[1][1] : part[0][1]) + shuffle_xor(upper ? part[0][1] : part[1][1], 2);
      float sum = (odd ? of_1 : of_0) + shuffle_xor(odd ? of_0 : of_1, 1);
      sum = sum + shuffle_xor(sum, 1);
      const int query = first + q, mine = first_entry + row + c / 2 * 8;  // the entry whose sum this lane has
      if (!odd && s.seq[query] == sequence && mine < s.visible[query]) p.ranks[(first_query + query) * p.rank_stride + mine] = rank_of_score(sum);
    }
  }
}

template <int Heads, int Chunks>
__global__ void __launch_bounds__(kThreads, 1) index_scores_sm90_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ IndexScores<bf16> p, int queries) {
  extern __shared__ __align__(1024) char shared[];
  SharedScores<Chunks>& s = *reinterpret_cast<SharedScores<Chunks>*>(shared);
  const int64_t first_query = static_cast<int64_t>(block_x()) * queries;
  const int first_entry = block_y() * kBlockEntries, group = thread_x() / 128;
  if (thread_x() == 0) {
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init(1);
      s.empty[i].init(kGroups * 4);
    }
    sm90::publish_barriers();
  }
  if (wave() == kGroups * 4) find_items(s.queries(), p, first_query, queries, max(p.k, first_entry), kColumns / Heads);
  __syncthreads();
  if (group == kGroups) {
    feed<Chunks>(s, q_map, Heads, p.begin + first_query);
  } else {
    score<Heads, Chunks>(s, p, first_query, first_entry + group * kRows, thread_x() % 128);
  }
}

template <int Heads, int Chunks>
void run(const IndexScores<bf16>& p, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedScores<Chunks>);
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(index_scores_sm90_kernel<Heads, Chunks>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const int queries = queries_of_block(p, 2 * device_info().multiprocessors);
  const int64_t rows = p.begin + p.queries;
  GPU_CHECK(rows * Heads < (int64_t{1} << 31), "index scores of %ld queries", static_cast<long>(rows));
  const CUtensorMap q_map = sm90_matmul::make_map<bf16>(p.q, 1, rows * Heads, p.width, p.width, kColumns);
  index_scores_sm90_kernel<Heads, Chunks>
      <<<dim3(static_cast<unsigned>(blocks_for(p.queries, queries)), static_cast<unsigned>(blocks_for(p.longest, kBlockEntries))), kThreads, kBytes, stream>>>(q_map, p, queries);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "index scores of %ld queries: %s", static_cast<long>(p.queries), cudaGetErrorString(e));
}

template <int Heads>
void run(const IndexScores<bf16>& p, cudaStream_t stream) {
  p.width == 64 ? run<Heads, 1>(p, stream) : run<Heads, 2>(p, stream);
}

}  // namespace

void index_scores_on_matrix_units(Context& c, const IndexScores<bf16>& p) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (p.heads == 16) run<16>(p, stream);
  else if (p.heads == 32) run<32>(p, stream);
  else run<64>(p, stream);
}

}  // namespace lockstep::gpu
