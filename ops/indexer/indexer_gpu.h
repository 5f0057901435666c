#pragma once
// The GPU's side of indexer.h: what kernels read of a call, and the scores on the matrix units of Hopper (indexer_gpu_sm90.cu) and CDNA4 (indexer_gpu_cdna4.cu), for
// indexer_gpu.cu to choose from.
//
// On matrix units a dot is the unit's sum over the channels, ascending in steps of 16 from zero, in f32; its bits differ from a chain's. Everything after it has the
// CPU's order: relu, then the 16-lane tree of weight * relu over the heads. A score depends on its query and its entry alone, so that decode, prefill and training
// choose alike.

#include <bit>

#include "ops/row_gpu.h"
#include "ops/sequence/sequence_gpu.h"

namespace lockstep::gpu {

// Of queries [begin, begin + queries) the scores of all entries that a query sees, as integers of the same order; queries that see at most k entries have none.
template <typename T>
struct IndexScores {
  SequenceArrays seq;
  const T *q, *keys;
  const float* weight;
  int32_t* ranks;  // [queries, rank_stride]
  int64_t q_stride, weight_stride, key_stride, rank_stride, begin, queries;
  int heads, width, ratio, per_page, k;
  int longest;  // the most entries that a query sees
  GPU_INLINE int visible(int64_t t) const { return (seq.token_pos[t] + 1) / ratio; }
};

// -0 ties with 0.
GPU_INLINE int32_t rank_of_score(float score) {
  const int32_t bits = std::bit_cast<int32_t>(score + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// Entries of sequence s that exist once this call's rows are in: none of its queries sees more.
template <typename T>
GPU_INLINE int entries_of(const IndexScores<T>& p, int s) {
  return (p.seq.seq_pos[s] + p.seq.seq_row[s + 1] - p.seq.seq_row[s]) / p.ratio;
}

// Whether the units take these: bf16; 16, 32 or 64 heads of 64 or 128 channels, side by side; rows at multiples of 16 bytes. Nothing else decides which kernel runs.
inline bool index_scores_on_matrix_units_take(ConstTensorView q, ConstTensorView weight, ConstTensorView keys) {
  const int64_t heads = q.dim(1), width = q.dim(2);
  const auto at = reinterpret_cast<uintptr_t>(q.data) | reinterpret_cast<uintptr_t>(keys.data) | static_cast<uintptr_t>(keys.row_stride) * sizeof(bf16);
  const auto weight_at = reinterpret_cast<uintptr_t>(weight.data) | static_cast<uintptr_t>(weight.row_stride) * sizeof(float);
  return q.dtype == DType::bf16 && (heads == 16 || heads == 32 || heads == 64) && (width == 64 || width == 128) && q.row_stride == heads * width && at % 16 == 0 &&
         weight_at % 16 == 0;
}
void index_scores_on_matrix_units(Context& c, const IndexScores<bf16>& p);
void index_scores_portable(Context& c, const IndexScores<bf16>& p);

// How the units' kernels cut the work: a block takes up to kMostQueries neighbouring queries and kBlockEntries entries. A step multiplies 64 rows of q, 64 / H queries,
// by the entries of one sequence; where sequences meet in a step, it is done for each.
inline constexpr int kMostQueries = 64, kBlockEntries = 256, kStepHeads = 64;

// As many queries a block as leave `full` blocks, at least a step's: keys are read once for all of them.
inline int queries_of_block(const IndexScores<bf16>& p, int64_t full) {
  const int64_t tiles = blocks_for(p.longest, kBlockEntries);
  int queries = kMostQueries;
  while (queries > kStepHeads / p.heads && blocks_for(p.queries, queries) * tiles < full) queries /= 2;
  return queries;
}

// The block's queries in shared memory, kMostQueries each, and the items of work that they make.
struct BlockQueries {
  Shared<int> seq, visible;  // visible: 0 where no scores are wanted
  Shared<int> item, count;   // first query of each run of wanted queries of one sequence in one step; how many
};
// `queries` of them from `first` on, scores wanted of those that see more than `least` entries. By one wave.
GPU_INLINE void find_items(const BlockQueries& b, const IndexScores<bf16>& p, int64_t first, int queries, int least, int a_step) {
  int count = 0;
  for (int base = 0; base < kMostQueries; base += kWave) {
    const int i = base + lane();
    const int64_t t = p.begin + first + i;
    const bool there = i < queries && first + i < p.queries;
    const int sees = there ? p.visible(t) : 0, visible = sees > least ? sees : 0, seq = there ? p.seq.token_seq[t] : -1;
    b.visible.store(i, visible);
    b.seq.store(i, seq);
    sync_wave();
    const bool begins = visible > 0 && (i % a_step == 0 || b.visible.load(i - 1) == 0 || b.seq.load(i - 1) != seq);
    const uint64_t all = ballot(begins);
    if (begins) b.item.store(count + count_bits(all & ((uint64_t{1} << lane()) - 1)), i);
    count += count_bits(all);
  }
  if (lane() == 0) b.count.store(0, count);
}
// The most entries that a query of the step from `first` on and of this sequence sees.
GPU_INLINE int most_visible(const BlockQueries& b, int first, int a_step, int sequence) {
  int most = 0;
#pragma unroll
  for (int q = 0; q < a_step; ++q)
    if (b.seq.load(first + q) == sequence && b.visible.load(first + q) > most) most = b.visible.load(first + q);
  return most;
}

}  // namespace lockstep::gpu
