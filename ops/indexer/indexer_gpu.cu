// Index scores and the choice of the largest, with the CPU's bits.
//
// Scores: a block takes one query and 256 entries, 64 at a time: their keys and the query's heads in shared memory, 4 x 4 chains in a thread's registers. Thread l of
// 16 has the heads l, l + 16, ... and so is virtual lane l of the sum over heads. Floor: 2 H di operations a score / 67 TFLOP/s (Hopper, f32).
//
// Choice: scores as integers of the same order. A block finds its query's k-th largest digit by digit from the top, counting; then writes indices, ascending: of those
// above all, of those equal the first. Up to kMostHeld scores are read once, to shared memory. Floor: ten reads of the
// scores, from shared memory or the cache.

#include <algorithm>

#include "ops/indexer/indexer_cpu.h"
#include "ops/indexer/indexer_gpu.h"

namespace lockstep::gpu {

namespace {

constexpr int kThreads = 256;
constexpr int kTileKeys = 64, kBlockKeys = 256;
constexpr int kKeysAThread = kTileKeys / (kThreads / kTreeLanes);  // 4

constexpr int shared_stride(int width) { return ((width + 3) / 4 | 1) * 4; }

// Row `from` of `width` elements, or zeros, as f32 into shared memory, zeros up to a multiple of 4. Vectors are on their way 8 at a time.
template <typename T>
GPU_INLINE void load_row(Shared<float> to, const T* from, int width, bool vectors, int lane, int threads) {
  if (vectors) {
    constexpr int kBatch = 8;
    const int step = threads * 4;
    for (int begin = lane * 4; begin < width; begin += kBatch * step) {
      Vector<T, 4> v[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (from != nullptr && begin + j * step < width) v[j] = *reinterpret_cast<const Vector<T, 4>*>(from + begin + j * step);
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (begin + j * step < width) to.store_vector<4>(begin + j * step, {{to_f32(v[j].v[0]), to_f32(v[j].v[1]), to_f32(v[j].v[2]), to_f32(v[j].v[3])}});
    }
  } else {
    for (int i = lane; i < (width + 3) / 4 * 4; i += threads) to.store(i, from == nullptr || i >= width ? 0.0f : to_f32(from[i]));
  }
}

// kHeads: 16 or 64 at a time.
template <typename T, int kHeads>
GPU_KERNEL GPU_BOUNDS(kThreads, kHeads == kTreeLanes ? 4 : 2) index_scores_kernel(IndexScores<T> p, bool vectors) {
  constexpr int kA = kHeads / kTreeLanes, kB = kKeysAThread;
  const int64_t t = p.begin + block_x();
  const int visible = p.visible(t), block_begin = block_y() * kBlockKeys;
  if (visible <= p.k || block_begin >= visible) return;
  const int stride = shared_stride(p.width), block_end = visible - block_begin < kBlockKeys ? visible : block_begin + kBlockKeys;
  SharedMemory memory;
  const Shared<float> q = memory.take<float>(kHeads * stride), keys = memory.take<float>(kTileKeys * stride);
  const int s = p.seq.token_seq[t], l = row_lane(), group = thread_x() / kTreeLanes;
  for (int tile = block_begin; tile < block_end; tile += kTileKeys) {
    float lane[kB] = {};
    for (int first = 0; first < p.heads; first += kHeads) {
      sync_block();
      if (tile == block_begin || p.heads > kHeads) {
        constexpr int kLanes = kThreads / kHeads;
        const int h = first + thread_x() / kLanes;
        load_row(q.from(thread_x() / kLanes * stride), h < p.heads ? p.q + t * p.q_stride + static_cast<int64_t>(h) * p.width : nullptr, p.width, vectors,
                 thread_x() % kLanes, kLanes);
      }
      if (first == 0) {
        constexpr int kLanes = kThreads / kTileKeys;
        const int j = tile + thread_x() / kLanes;
        load_row(keys.from(thread_x() / kLanes * stride), j < block_end ? p.keys + entry_row(p.seq, p.per_page, s, j) * p.key_stride : nullptr, p.width, vectors,
                 thread_x() % kLanes, kLanes);
      }
      sync_block();
      float dot[kA][kB] = {};
#pragma unroll 2
      for (int i = 0; i < p.width; i += 4) {
        Vector<float, 4> x[kA], y[kB];
#pragma unroll
        for (int a = 0; a < kA; ++a) x[a] = q.load_vector<4>((l + a * kTreeLanes) * stride + i);
#pragma unroll
        for (int b = 0; b < kB; ++b) y[b] = keys.load_vector<4>((group * kB + b) * stride + i);
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
          for (int a = 0; a < kA; ++a)
#pragma unroll
            for (int b = 0; b < kB; ++b) dot[a][b] = fma(x[a].v[v], y[b].v[v], dot[a][b]);
      }
#pragma unroll
      for (int a = 0; a < kA; ++a) {
        const int h = first + l + a * kTreeLanes;
        if (h >= p.heads) continue;
        const float w = p.weight[t * p.weight_stride + h];
#pragma unroll
        for (int b = 0; b < kB; ++b) lane[b] = fma(w, dot[a][b] > 0.0f ? dot[a][b] : 0.0f, lane[b]);
      }
    }
#pragma unroll
    for (int b = 0; b < kB; ++b) {
      const int32_t rank = rank_of_score(fold_row(lane[b]));
      const int j = tile + group * kB + b;
      if (l == 0 && j < block_end) p.ranks[block_x() * p.rank_stride + j] = rank;
    }
  }
}

constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int kWaves = kThreads / kWave;

template <typename T>
void run_scores(Context& c, const IndexScores<T>& p) {
  const int heads = p.heads <= kTreeLanes ? kTreeLanes : 4 * kTreeLanes;
  // All rows begin at multiples of 4 elements and are a multiple of 4 long.
  const bool vectors =
      (reinterpret_cast<uintptr_t>(p.q) | reinterpret_cast<uintptr_t>(p.keys) | static_cast<uintptr_t>(p.q_stride | p.key_stride | p.width) * sizeof(T)) % (4 * sizeof(T)) == 0;
  const Grid grid = {.blocks = p.queries,
                     .threads = kThreads,
                     .blocks_y = blocks_for(p.longest, kBlockKeys),
                     .shared_bytes = static_cast<size_t>((heads + kTileKeys) * shared_stride(p.width)) * sizeof(float) + 32};
  if (heads == kTreeLanes) launch(c, "index_scores", grid, index_scores_kernel<T, kTreeLanes>, p, vectors);
  else launch(c, "index_scores", grid, index_scores_kernel<T, 4 * kTreeLanes>, p, vectors);
}

constexpr int kMostHeld = 8192;  // 32 KB beside the counts' 16

template <typename T, bool Held>
GPU_KERNEL GPU_BOUNDS(kThreads) index_choice_kernel(int32_t* selected, int64_t selected_stride, IndexScores<T> p) {
  const int64_t t = p.begin + block_x();
  const int n = p.visible(t), k = p.k;
  int32_t* const out = selected + t * selected_stride;
  if (n <= k) {
    for (int i = thread_x(); i < k; i += kThreads) out[i] = i < n ? i : -1;
    return;
  }
  SharedMemory memory;
  const Shared<int> counts = memory.take<int>(kDigits * kThreads), totals = memory.take<int>(kDigits), above = memory.take<int>(kWaves), equal = memory.take<int>(kWaves);
  const int32_t* const ranks = p.ranks + block_x() * p.rank_stride;
  const Shared<int32_t> held = memory.take<int32_t>(Held ? p.longest : 0);
  if constexpr (Held) {
#pragma unroll 8
    for (int i = thread_x(); i < n; i += kThreads) held.store(i, ranks[i]);
    sync_block();
  }
  const auto rank = [&](int i) { return static_cast<uint32_t>(Held ? held.load(i) : ranks[i]) ^ 0x80000000u; };

  // The k-th largest: `found` its digits so far, `left` how many of those that share them are wanted.
  uint32_t found = 0;
  int left = k;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
#pragma unroll
    for (int d = 0; d < kDigits; ++d) counts.store(d * kThreads + thread_x(), 0);
#pragma unroll 4
    for (int i = thread_x(); i < n; i += kThreads) {
      const uint32_t r = rank(i);
      if (shift + kDigitBits < 32 && (r ^ found) >> (shift + kDigitBits) != 0) continue;
      const int at = static_cast<int>(r >> shift & (kDigits - 1)) * kThreads + thread_x();
      counts.store(at, counts.load(at) + 1);
    }
    sync_block();
    int sum = 0;  // 16 threads a digit
#pragma unroll
    for (int i = 0; i < kThreads / kDigits; ++i) sum += counts.load(thread_x() / kDigits * kThreads + thread_x() % kDigits + i * kDigits);
    for (int width = kDigits / 2; width >= 1; width /= 2) sum += shuffle_xor(sum, width);
    if (thread_x() % kDigits == 0) totals.store(thread_x() / kDigits, sum);
    sync_block();
    int digit = kDigits - 1;
    for (; digit > 0; --digit) {
      const int here = totals.load(digit);
      if (here >= left) break;
      left -= here;
    }
    found |= static_cast<uint32_t>(digit) << shift;
  }

  // Each wave writes what it finds in its own part of the list, after what comes before.
  const int part = (n + kWaves - 1) / kWaves, begin = wave() * part, end = begin + part < n ? begin + part : n;
  int num_above = 0, num_equal = 0;
  for (int base = begin; base < end; base += kWave) {
    const int i = base + lane();
    const uint32_t r = i < end ? rank(i) : 0;
    num_above += count_bits(ballot(i < end && r > found));
    num_equal += count_bits(ballot(i < end && r == found));
  }
  if (lane() == 0) {
    above.store(wave(), num_above);
    equal.store(wave(), num_equal);
  }
  sync_block();
  num_above = 0, num_equal = 0;
  for (int w = 0; w < wave(); ++w) {
    num_above += above.load(w);
    num_equal += equal.load(w);
  }
  for (int base = begin; base < end; base += kWave) {
    const int i = base + lane();
    const uint32_t r = i < end ? rank(i) : 0;
    const bool is_above = i < end && r > found, is_equal = i < end && r == found;
    const uint64_t all_above = ballot(is_above), all_equal = ballot(is_equal), before = (uint64_t{1} << lane()) - 1;
    const int equal_before = num_equal + count_bits(all_equal & before);
    if (is_above || (is_equal && equal_before < left)) out[num_above + count_bits(all_above & before) + (equal_before < left ? equal_before : left)] = i;
    num_above += count_bits(all_above);
    num_equal += count_bits(all_equal);
  }
}

}  // namespace

void index_scores_portable(Context& c, const IndexScores<bf16>& p) { run_scores(c, p); }

}  // namespace lockstep::gpu

namespace lockstep::device {

namespace {

using namespace gpu;

// The executor keeps to the CPU's order, which tests compare; indexer_gpu_scores_test runs the units' kernels wherever they can.
#if LOCKSTEP_GPU_SIMT
constexpr bool kMatrixUnits = false;
#else
constexpr bool kMatrixUnits = true;
#endif

void scores(Context& c, const IndexScores<float>& p, bool) { run_scores(c, p); }
void scores(Context& c, const IndexScores<bf16>& p, bool matrix_units) {
  if constexpr (kMatrixUnits)
    if (matrix_units) return index_scores_on_matrix_units(c, p);
  index_scores_portable(c, p);
}

// Scratch for the scores of as many queries as fit.
constexpr int64_t kScratchBytes = int64_t{512} << 20;

template <typename T>
void select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys, const SequenceView& seq, const IndexerShape& shape) {
  const int64_t longest = seq.longest / shape.ratio;
  const int64_t range = std::min(seq.num_tokens, std::max<int64_t>(1, kScratchBytes / static_cast<int64_t>(sizeof(int32_t)) / std::max<int64_t>(longest, 1)));
  ArenaScope scope(*c.workspace);
  IndexScores<T> p = {};
  p.seq = arrays(seq);
  p.q = q.ptr<T>(), p.q_stride = q.row_stride;
  if (longest > 0) p.keys = keys.ptr<T>(), p.key_stride = keys.row_stride;
  p.weight = weight.ptr<float>(), p.weight_stride = weight.row_stride;
  p.heads = static_cast<int>(q.dim(1)), p.width = static_cast<int>(q.dim(2));
  p.ratio = static_cast<int>(shape.ratio), p.per_page = static_cast<int>(shape.per_page), p.k = static_cast<int>(selected.dim(1));
  p.rank_stride = longest;
  p.longest = static_cast<int>(longest);
  if (longest > p.k) p.ranks = static_cast<int32_t*>(c.workspace->allocate(static_cast<size_t>(range * longest) * sizeof(int32_t), "index scores"));
  const bool matrix_units = index_scores_on_matrix_units_take(q, weight, keys);
  for (p.begin = 0; p.begin < seq.num_tokens; p.begin += range) {
    p.queries = std::min(range, seq.num_tokens - p.begin);
    if (longest > p.k) scores(c, p, matrix_units);
    const bool held = longest <= kMostHeld;
    const Grid grid = {.blocks = p.queries,
                       .threads = kThreads,
                       .shared_bytes = sizeof(int) * static_cast<size_t>(kDigits * kThreads + kDigits + 2 * kWaves + (held ? longest : 0)) + 64};
    launch(c, "index_choice", grid, held ? index_choice_kernel<T, true> : index_choice_kernel<T, false>, selected.ptr<int32_t>(), selected.row_stride, p);
  }
}

}  // namespace

void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys, const SequenceView& seq,
                  const IndexerShape& shape) {
  q.dtype == DType::f32 ? select<float>(c, selected, q, weight, keys, seq, shape) : select<bf16>(c, selected, q, weight, keys, seq, shape);
}

}  // namespace lockstep::device
