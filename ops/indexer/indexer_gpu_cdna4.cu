// Index scores on CDNA4's matrix units.
//
// A block makes the scores of 256 entries for up to kMostQueries neighbouring queries. Each of four waves keeps the keys of 64 entries in registers, as columns of the
// product, for as long as queries are of one sequence; wherever its pages lie, a key is read from memory once a block. Queries come through shared memory, 64 heads a step (of
// 64 / H queries): the rows. A lane then has, of two entries, dots with half of the heads, which are virtual lanes of the tree over heads: relu, weight and all of
// the tree but one step are in registers, four shuffles a query are left.
//
// Row contract: a dot is one chain of instructions of 16 channels, ascending, the tree is that of H lanes: neither depends on what else is in the block.
//
// Floor: 2 H di operations a score over 2.3e15 a second; in decode, the bytes of the keys over the memory's rate. Shared memory gives 16 bytes a lane for two instructions
// of 32 cycles, half of its rate.

#include "core/gpu_cdna4.h"
#include "ops/indexer/indexer_gpu.h"

namespace lockstep::gpu {

namespace {

using cdna4::Float16;

constexpr int kWaves = 4, kThreads = 64 * kWaves, kUnit = 8;  // bf16 elements of 16 bytes
constexpr int kTiles = kBlockEntries / kWaves / 32;           // of 32 entries, a wave
static_assert(kTiles == 2);
constexpr int64_t kFull = 512;                                // blocks: two a compute unit
using Unit = Vector<bf16, kUnit>;

template <int Width>
constexpr int place(int row, int u) {
  return row * Width + (u ^ (row % (Width / kUnit))) * kUnit;
}

template <int Heads, int Width>
GPU_KERNEL GPU_BOUNDS(kThreads, 2) index_scores_cdna4_kernel(IndexScores<bf16> p, int queries) {
  constexpr int kAStep = kStepHeads / Heads, kGroups = Heads / 8;                    // queries a step; groups of eight heads of each
  constexpr int kUnits = Width / kUnit, kTurns = Width / 16, kEach = kStepHeads * kUnits / kThreads;
  SharedMemory memory;
  const Shared<bf16> steps = memory.take<bf16>(2 * kStepHeads * Width, 128);
  const BlockQueries b = {memory.take<int>(kMostQueries), memory.take<int>(kMostQueries), memory.take<int>(kMostQueries), memory.take<int>(1)};
  const int64_t first_query = static_cast<int64_t>(block_x()) * queries;
  const int block_entry = block_y() * kBlockEntries, first_entry = block_entry + wave() * 32 * kTiles, half = lane() / 32;
  if (wave() == 0) find_items(b, p, first_query, queries, p.k > block_entry ? p.k : block_entry, kAStep);
  sync_block();
  const int num_items = b.count.load(0);
  if (num_items == 0) return;

  // A step's rows of q, on their way from memory (`fetch`) to shared memory (`put`); zeros beyond the last query.
  Unit unit[kEach];
  const auto fetch = [&](int item) {
    const int64_t row = (first_query + b.item.load(item) / kAStep * kAStep) * Heads, end = p.queries * Heads;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kThreads + thread_x();
      unit[i] = row + at / kUnits < end ? reinterpret_cast<const Unit*>(p.q + p.begin * p.q_stride)[row * kUnits + at] : Unit{};
    }
  };
  const auto put = [&](int item) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kThreads + thread_x();
      steps.store_vector<kUnit>(item % 2 * kStepHeads * Width + place<Width>(at / kUnits, at % kUnits), unit[i]);
    }
  };

  Unit key[kTiles][kTurns];
  int loaded = -1;
  fetch(0);
  put(0);
  sync_block();
  for (int item = 0; item < num_items; ++item) {
    if (item + 1 < num_items) fetch(item + 1);
    const int first = b.item.load(item) / kAStep * kAStep, sequence = b.seq.load(b.item.load(item));
    if (most_visible(b, first, kAStep, sequence) > first_entry) {  // otherwise the wave goes along without work
      if (sequence != loaded) {
        const int there = entries_of(p, sequence);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int e = first_entry + 32 * n + lane() % 32;
          const bf16* const from = e < there ? p.keys + entry_row(p.seq, p.per_page, sequence, e) * p.key_stride + half * kUnit : nullptr;
#pragma unroll
          for (int turn = 0; turn < kTurns; ++turn) key[n][turn] = from == nullptr ? Unit{} : *reinterpret_cast<const Unit*>(from + 16 * turn);
        }
        loaded = sequence;
      }
      const Shared<bf16> rows = steps.from(item % 2 * kStepHeads * Width);
      Float16 dot[2][kTiles] = {};
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const Unit heads = rows.load_vector<kUnit>(place<Width>(32 * m + lane() % 32, 2 * turn + half));
#pragma unroll
          for (int n = 0; n < kTiles; ++n) cdna4::multiply_bf16(dot[m][n], heads, key[n][turn]);
        }
#pragma unroll
      for (int q = 0; q < kAStep; ++q) {
        const int query = first + q;
        const int64_t at = first_query + query < p.queries ? first_query + query : p.queries - 1;
        const float* const weight = p.weight + (p.begin + at) * p.weight_stride + 4 * half;
        // Head 8 g + 4 half + i is of virtual lane 8 (g % 2) + 4 half + i.
        float part[kTiles][4] = {}, other[kTiles][4] = {};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const auto w = *reinterpret_cast<const Vector<float, 4>*>(weight + 8 * g);
          const int group = q * kGroups + g;
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float d = dot[group / 4][n][group % 4 * 4 + i];
              float& sum = g % 2 == 0 ? part[n][i] : other[n][i];
              sum = fma(w.v[i], d > 0.0f ? d : 0.0f, sum);
            }
        }
        // Lanes eight apart fold here; those four apart between the wave's halves, each of which goes on with one tile; the others here again.
        float mine[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float low = part[0][i] + other[0][i], high = part[1][i] + other[1][i];
          mine[i] = (half == 0 ? low : high) + shuffle_xor(half == 0 ? high : low, 32);
        }
        const float sum = (mine[0] + mine[2]) + (mine[1] + mine[3]);
        const int entry = first_entry + lane();
        if (b.seq.load(query) == sequence && entry < b.visible.load(query)) p.ranks[(first_query + query) * p.rank_stride + entry] = rank_of_score(sum);
      }
    }
    if (item + 1 < num_items) put(item + 1);
    sync_block();
  }
}

template <int Heads, int Width>
void run(Context& c, const IndexScores<bf16>& p) {
  const int queries = queries_of_block(p, kFull);
  launch(c, "index_scores",
         {.blocks = blocks_for(p.queries, queries),
          .threads = kThreads,
          .blocks_y = blocks_for(p.longest, kBlockEntries),
          .shared_bytes = sizeof(bf16) * 2 * kStepHeads * Width + sizeof(int) * (3 * kMostQueries + 4)},
         index_scores_cdna4_kernel<Heads, Width>, p, queries);
}

template <int Heads>
void run(Context& c, const IndexScores<bf16>& p) {
  p.width == 64 ? run<Heads, 64>(c, p) : run<Heads, 128>(c, p);
}

}  // namespace

void index_scores_on_matrix_units(Context& c, const IndexScores<bf16>& p) {
  if (p.heads == 16) run<16>(c, p);
  else if (p.heads == 32) run<32>(c, p);
  else run<64>(c, p);
}

}  // namespace lockstep::gpu
