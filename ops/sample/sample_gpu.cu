// Rows without a filter, the common case: row_stats as select_logprob takes them, then the weights of each of the vocabulary's chunks by 16 threads, then a
// wave a row that finds the chunk and, in it, the token. Three reads of the logits; floor 3 * R * V * 4 bytes / 4 TB/s, of which all but the first are L2's for
// R up to 80.
//
// Rows with a filter or a forbidden id: a thread block each. Ids are ordered by one integer that holds both y and the id, so top-k and top-p are a search for
// the least integer that is kept: digit by digit, by the counts or weights of the ids that share the digits found so far, until one is left. Those ids are put
// into a list once they are few, so that most digits cost little. What all ids cost are some ten passes over 8 bytes each, from L2: 129,280 of them take a block of
// 768 threads about 10 us a pass.

#include <bit>
#include <limits>

#include "core/gpu_check.h"
#include "ops/chain_gpu.h"
#include "ops/logprob/logits_gpu.h"
#include "ops/logprob/logprob.h"
#include "ops/row_gpu.h"
#include "ops/sample/sample_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

// What kernels need of a row's params.
struct Row {
  float temperature, top_p, min_p, u;
  int32_t top_k, forbid;
  int32_t greedy, filtered;  // filtered: a filter or forbid
};

// y in the order of unsigned integers, NaN lowest; the forbidden id is 0, under all.
GPU_INLINE uint32_t key_of(float y) {
  const float v = y == y ? y + 0.0f : -std::numeric_limits<float>::infinity();  // -0 is 0
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
GPU_INLINE float y_of(uint32_t key) { return std::bit_cast<float>((key >> 31) != 0 ? key ^ 0x80000000u : ~key); }
// The place of an id among all: y descending, id ascending is this integer descending. 63 bits.
inline constexpr int kPlaceBits = 63;
inline constexpr uint32_t kIdMask = 0x7fffffffu;
GPU_INLINE uint64_t place_of(uint32_t key, int64_t id) { return static_cast<uint64_t>(key) << 31 | (kIdMask - static_cast<uint32_t>(id)); }
GPU_INLINE int32_t id_of(uint64_t place) { return static_cast<int32_t>(kIdMask - static_cast<uint32_t>(place & kIdMask)); }

GPU_INLINE uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Of each chunk of each row without a filter: the sum of weights, or the first place if the row is greedy.
GPU_KERNEL chunk_weights_kernel(uint64_t* chunk_sums, const Row* params, const float* max, const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                int64_t chunk, int64_t chunks) {
  const int64_t at = row_of_thread(), r = at / chunks, k = at - r * chunks, first = k * chunk;
  int64_t n = 0;
  Row p = {};
  float m = 0;
  if (r < rows) {
    p = params[r];
    m = max[r];
    n = p.filtered != 0 ? 0 : vocab - first < chunk ? vocab - first : chunk;
  }
  const float* const x = logits + r * stride + first;
  uint64_t sum = 0;
  const Cooled y_of = {p.temperature};
  if (p.greedy != 0) each_logit(x, n, [&](float v, int64_t i) { sum = larger(sum, place_of(key_of(y_of(v)), first + i)); });
  else each_logit(x, n, [&](float v, int64_t) { sum = sum + sample_weight(exp_f32(y_of(v) - m)); });
  for (int width = kTreeLanes / 2; width >= 1; width /= 2) {
    const uint64_t other = shuffle_xor(sum, width);
    sum = p.greedy != 0 ? larger(sum, other) : sum + other;
  }
  if (n > 0 && row_lane() == 0) chunk_sums[at] = sum;
}

// The first i < n at which before + the weights up to and with i exceed the threshold; n if none does. `before` becomes what lies before it. A wave calls;
// every lane has the answer. The weight of i is weigh(load(i)); several loads are on their way at once.
template <typename Load, typename Weigh>
GPU_INLINE int64_t first_over(uint64_t* before, double threshold, int64_t n, Load load, Weigh weigh) {
  constexpr int kAhead = 8;
  for (int64_t begin = 0; begin < n; begin += kAhead * kWave) {
    decltype(load(begin)) loaded[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t i = begin + k * kWave + lane();
      loaded[k] = load(i < n ? i : n - 1);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const uint64_t own = begin + k * kWave + lane() < n ? weigh(loaded[k]) : 0;
      uint64_t sum = own;
      for (int width = 1; width < kWave; width *= 2) {
        const uint64_t below = shuffle(sum, lane() >= width ? lane() - width : lane());
        if (lane() >= width) sum += below;
      }
      const int64_t first = begin + k * kWave;
      const uint64_t over = ballot(first + lane() < n && static_cast<double>(*before + sum) > threshold);
      if (over != 0) {
        *before += shuffle(sum - own, lowest_bit(over));
        return first + lowest_bit(over);
      }
      *before += shuffle(sum, kWave - 1);
    }
  }
  return n;
}
// The same, but the last i if none is.
template <typename Load, typename Weigh>
GPU_INLINE int64_t draw(uint64_t before, double threshold, int64_t n, Load load, Weigh weigh) {
  const int64_t i = first_over(&before, threshold, n, load, weigh);
  return i < n ? i : n - 1;
}

// A wave a row.
GPU_KERNEL draw_kernel(int32_t* token, float* logprob, const uint64_t* chunk_sums, const Row* params, const float* max, const float* lse, const float* logits,
                       int64_t stride, int64_t vocab, int64_t chunk, int64_t chunks) {
  const int64_t r = block_x();
  const Row p = params[r];
  if (p.filtered != 0) return;
  const uint64_t* const sums = chunk_sums + r * chunks;
  const float* const x = logits + r * stride;
  const Cooled y_of = {p.temperature};
  uint64_t all = 0;  // total, or largest place
  for (int64_t k = lane(); k < chunks; k += kWave) all = p.greedy != 0 ? larger(all, sums[k]) : all + sums[k];
  for (int width = kWave / 2; width >= 1; width /= 2) {
    const uint64_t other = shuffle_xor(all, width);
    all = p.greedy != 0 ? larger(all, other) : all + other;
  }
  int64_t id = 0;
  if (p.greedy != 0) {
    id = id_of(all);
  } else {
    const double threshold = static_cast<double>(p.u) * static_cast<double>(all);
    uint64_t before = 0;
    const int64_t k = first_over(&before, threshold, chunks - 1, [&](int64_t i) { return sums[i]; }, [](uint64_t w) { return w; });
    const int64_t first = k * chunk, n = vocab - first < chunk ? vocab - first : chunk;
    const float m = max[r];
    id = first + draw(before, threshold, n, [&](int64_t i) { return x[first + i]; }, [&](float v) { return sample_weight(exp_f32(y_of(v) - m)); });
  }
  if (lane() != 0) return;
  token[r] = static_cast<int32_t>(id);
  logprob[r] = y_of(x[id]) - lse[r];
}

// N numbers of each thread of the block, reduced; every thread has the results.
template <int N, typename T, typename Op>
GPU_INLINE void reduce_block(T (&v)[N], Shared<uint64_t> shared, Op op) {
  const int waves = block_dim() / kWave;
#pragma unroll
  for (int i = 0; i < N; ++i)
    for (int width = kWave / 2; width >= 1; width /= 2) v[i] = op(v[i], shuffle_xor(v[i], width));
  sync_block();
  if (lane() == 0)
    for (int i = 0; i < N; ++i) shared.store(N * wave() + i, v[i]);
  sync_block();
  if (thread_x() < N) {
    auto of_all = static_cast<T>(shared.load(thread_x()));
    for (int w = 1; w < waves; ++w) of_all = op(of_all, static_cast<T>(shared.load(N * w + thread_x())));
    shared.store(N * waves + thread_x(), of_all);
  }
  sync_block();
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = static_cast<T>(shared.load(N * waves + i));
}
GPU_INLINE uint64_t sum_block(uint64_t v, Shared<uint64_t> shared) {
  uint64_t one[1] = {v};
  reduce_block(one, shared, [](uint64_t a, uint64_t b) { return a + b; });
  return one[0];
}
// The sum of what threads before this one have.
GPU_INLINE uint32_t sum_before(uint32_t v, Shared<uint64_t> shared) {
  uint32_t sum = v;
  for (int width = 1; width < kWave; width *= 2) {
    const uint32_t below = shuffle(sum, lane() >= width ? lane() - width : lane());
    if (lane() >= width) sum += below;
  }
  sync_block();
  if (lane() == kWave - 1) shared.store(wave(), sum);
  sync_block();
  uint32_t before = sum - v;
  for (int w = 0; w < wave(); ++w) before += static_cast<uint32_t>(shared.load(w));
  sync_block();
  return before;
}
GPU_INLINE uint64_t max_block(uint64_t v, Shared<uint64_t> shared) {
  uint64_t one[1] = {v};
  reduce_block(one, shared, larger);
  return one[0];
}

inline constexpr int kDigitBits = 3, kDigits = 1 << kDigitBits;
static_assert(kPlaceBits % kDigitBits == 0);

// A row's scratch, V elements each, and its thread block's.
struct FilterRow {
  uint32_t* key;
  float* e;
  int32_t* ids;  // the kept, ascending
  int64_t vocab;
  Shared<uint64_t> shared;
};

// The largest place `least` such that the ids from it on satisfy reached(their weight, their number). Those from `floor` on do, and no others count.
template <bool kWeights, typename Reached>
GPU_INLINE uint64_t search(const FilterRow& s, uint64_t floor, Reached reached) {
  const auto plus = [](auto a, auto b) { return a + b; };
  uint64_t found = 0, weight = 0;  // weight and count: of what lies above the digits found
  uint32_t count = 0;
  const int32_t* list = nullptr;  // the ids that share them, or all
  int64_t listed = s.vocab;
  for (int shift = kPlaceBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const auto each = [&](const auto& f) {  // of the ids that share the digits found: f(id, place)
#pragma unroll 2
      for (int64_t i = thread_x(); i < listed; i += block_dim()) {
        const int32_t v = list == nullptr ? static_cast<int32_t>(i) : list[i];
        const uint32_t key = s.key[v];
        const uint64_t place = place_of(key, v);
        if (key != 0 && place >= floor && place >> (shift + kDigitBits) == found >> (shift + kDigitBits)) f(v, place);
      }
    };
    const auto digit_of = [&](uint64_t place) { return static_cast<int>(place >> shift) & (kDigits - 1); };
    uint32_t counts[kDigits] = {};
    uint64_t weights[kDigits] = {};
    each([&](int32_t v, uint64_t place) {
      const int digit = digit_of(place);
      const uint64_t w = kWeights ? sample_weight(s.e[v]) : 0;
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        counts[d] += d == digit ? 1 : 0;
        if (kWeights) weights[d] += d == digit ? w : 0;
      }
    });
    reduce_block(counts, s.shared, plus);
    if (kWeights) reduce_block(weights, s.shared, plus);
    uint32_t inside = 0;
    int chosen = 0;
    bool done = false;
#pragma unroll
    for (int d = kDigits - 1; d >= 0; --d) {
      if (done) continue;
      if (d == 0 || reached(weight + weights[d], count + counts[d])) {
        chosen = d, inside = counts[d];
        done = true;
      } else {
        weight += weights[d];
        count += counts[d];
      }
    }
    if (inside == 1) {
      uint64_t only = 0;
      each([&](int32_t, uint64_t place) {
        if (digit_of(place) == chosen) only = place;
      });
      return max_block(only, s.shared);
    }
    if (int64_t{inside} * 8 <= listed) {  // into the other half of the room
      int32_t* const to = list == s.ids ? s.ids + s.vocab / 2 : s.ids;
      uint32_t mine = 0;
      each([&](int32_t, uint64_t place) { mine += digit_of(place) == chosen ? 1 : 0; });
      uint32_t at = sum_before(mine, s.shared);
      each([&](int32_t v, uint64_t place) {
        if (digit_of(place) == chosen) to[at++] = v;
      });
      sync_block();
      list = to, listed = inside;
    }
    found |= static_cast<uint64_t>(chosen) << shift;
  }
  return found;
}

inline constexpr int kFilterThreadsMax = 768, kStaged = 2048;  // kStaged: numbers that wait for their turn in a chain
// Words of 8 bytes, even numbers of them: each array begins at 16 bytes.
inline constexpr int kReduceWords = kDigits * (kFilterThreadsMax / 32 + 1), kGroupWords = kFilterThreadsMax / kTreeLanes + 2;
inline constexpr size_t kFilterShared = (kReduceWords + 2 * kGroupWords) * sizeof(uint64_t) + kStaged * sizeof(float);

// A thread block a row from `first_row` on; those without a filter have nothing to do.
GPU_KERNEL GPU_BOUNDS(kFilterThreadsMax)
filter_kernel(int32_t* token, float* logprob, int64_t first_row, const Row* params, const float* logits, int64_t stride, uint32_t* keys, float* es,
              int32_t* ids, int64_t vocab) {
  const int64_t r = first_row + block_x();
  const Row p = params[r];
  if (p.filtered == 0) return;
  SharedMemory memory;
  const FilterRow s = {keys + block_x() * vocab, es + block_x() * vocab, ids + block_x() * vocab, vocab, memory.take<uint64_t>(kReduceWords)};
  const auto starts = memory.take<uint64_t>(kGroupWords), before = memory.take<uint64_t>(kGroupWords);
  const auto staged = memory.take<float>(kStaged);
  const float* const x = logits + r * stride;

  uint64_t top = 0;
  for (int64_t v = thread_x(); v < vocab; v += block_dim()) {
    s.key[v] = v == p.forbid ? 0 : key_of(x[v] / p.temperature);
    if (s.key[v] != 0) top = larger(top, place_of(s.key[v], v));
  }
  top = max_block(top, s.shared);
  const float max = y_of(static_cast<uint32_t>(top >> 31));
  for (int64_t v = thread_x(); v < vocab; v += block_dim()) s.e[v] = exp_f32(x[v] / p.temperature - max);
  sync_block();

  const uint64_t n = static_cast<uint64_t>(vocab) - (p.forbid >= 0 ? 1 : 0);
  uint64_t least = 1;  // the kept have this place or a larger one
  if (p.greedy == 0 && p.top_k > 0 && static_cast<uint64_t>(p.top_k) < n)
    least = search<false>(s, least, [&](uint64_t, uint64_t count) { return count >= static_cast<uint64_t>(p.top_k); });
  if (p.greedy == 0 && p.top_p < 1.0f) {
    uint64_t total = 0;
    for (int64_t v = thread_x(); v < vocab; v += block_dim())
      if (s.key[v] != 0 && place_of(s.key[v], v) >= least) total += sample_weight(s.e[v]);
    total = sum_block(total, s.shared);
    const double wanted = static_cast<double>(p.top_p) * static_cast<double>(total);
    least = search<true>(s, least, [&](uint64_t weight, uint64_t count) { return count > 0 && static_cast<double>(weight) >= wanted; });
  }
  const bool by_min_p = p.greedy == 0 && p.min_p > 0.0f;
  const auto kept = [&](int64_t v) { return s.key[v] != 0 && place_of(s.key[v], v) >= least && (!by_min_p || s.e[v] >= p.min_p); };

  // The kept ids in ascending order: 16 threads take a piece of the vocabulary, first to count, then to write behind those before it.
  const int group = thread_x() / kTreeLanes, groups = block_dim() / kTreeLanes;
  const int64_t piece = (vocab + groups - 1) / groups, begin = group * piece, end = begin + piece < vocab ? begin + piece : vocab;
  uint64_t count = 0, weight = 0;
  for (int64_t v = begin + row_lane(); v < end; v += kTreeLanes)
    if (kept(v)) ++count, weight += sample_weight(s.e[v]);
  for (int width = kTreeLanes / 2; width >= 1; width /= 2) count += shuffle_xor(count, width), weight += shuffle_xor(weight, width);
  if (row_lane() == 0) starts.store(group + 1, count), before.store(group + 1, weight);
  sync_block();
  if (thread_x() == 0) {
    starts.store(0, 0), before.store(0, 0);
    for (int g = 0; g < groups; ++g) starts.store(g + 1, starts.load(g) + starts.load(g + 1)), before.store(g + 1, before.load(g) + before.load(g + 1));
  }
  sync_block();
  auto at = static_cast<int64_t>(starts.load(group));
  for (int64_t first = 0; first < piece; first += kTreeLanes) {
    const int64_t v = begin + first + row_lane();
    const bool keep = v < end && kept(v);
    const uint32_t mine = static_cast<uint32_t>(ballot(keep) >> (lane() / kTreeLanes * kTreeLanes)) & 0xffffu;
    if (keep) s.ids[at + count_bits(mine & ((1u << row_lane()) - 1u))] = static_cast<int32_t>(v);
    at += count_bits(mine);
  }
  auto number = static_cast<int64_t>(starts.load(groups));
  if (number == 0) {  // all are NaN: min-p keeps the lowest id
    uint64_t lowest = 0;
    for (int64_t v = thread_x(); v < vocab; v += block_dim())
      if (s.key[v] != 0 && place_of(s.key[v], v) >= least) lowest = larger(lowest, kIdMask - static_cast<uint32_t>(v));
    lowest = max_block(lowest, s.shared);
    if (thread_x() == 0) s.ids[0] = id_of(lowest);
    number = 1;
  }
  sync_block();

  // The tree over the kept ids: all threads bring what its lanes, in the first wave, add up.
  const auto e = [&](int64_t i) { return s.e[s.ids[i]]; };
  float sum = 0;
  for (int64_t first = 0; first < number; first += kStaged) {
    const int count = number - first < kStaged ? static_cast<int>(number - first) : kStaged;
    for (int i = thread_x(); i < count; i += block_dim()) staged.store(i, e(first + i));
    sync_block();
    if (wave() == 0)
      in_order((count - row_lane() + kTreeLanes - 1) / kTreeLanes, [&](int i) { return staged.load(row_lane() + i * kTreeLanes); }, [&](float v) { sum = sum + v; });
    sync_block();
  }
  if (wave() != 0) return;
  sum = fold_row(sum);
  int64_t id = 0;
  if (p.greedy != 0) {
    id = id_of(top);
  } else {
    const double threshold = static_cast<double>(p.u) * static_cast<double>(before.load(groups));
    int g = 0;
    while (g + 1 < groups && !(static_cast<double>(before.load(g + 1)) > threshold)) ++g;
    const auto first = static_cast<int64_t>(starts.load(g)), last = static_cast<int64_t>(starts.load(g + 1));
    int64_t drawn = number - 1;  // nothing has weight
    if (before.load(groups) > 0) drawn = first + draw(before.load(g), threshold, last - first, [&](int64_t i) { return e(first + i); },
                                                            [](float v) { return sample_weight(v); });
    id = s.ids[drawn];
  }
  if (thread_x() != 0) return;
  token[r] = static_cast<int32_t>(id);
  logprob[r] = x[id] / p.temperature - (max + log_f32(sum));
}

}  // namespace

// Rows, then their temperatures again, as row_stats takes them.
SampleFilters pack_sample_params(TensorView packed, const SampleParams* params, int64_t vocab) {
  static_assert(sizeof(Row) + sizeof(float) == kSampleParamWords * sizeof(int32_t));
  const int64_t rows = packed.dim(0) / kSampleParamWords;
  auto* const to = static_cast<Row*>(packed.data);
  auto* const temperatures = reinterpret_cast<float*>(to + rows);
  int64_t num_filtered = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const SampleParams& p = params[r];
    const bool filters = truncates(p, vocab) || p.forbid >= 0;
    to[r] = {temperature_of(p), p.top_p, p.min_p, uniform_of(p), p.top_k, p.forbid, is_greedy(p), filters};
    temperatures[r] = temperature_of(p);
    num_filtered += filters;
  }
  return num_filtered == 0 ? SampleFilters::none : num_filtered < rows ? SampleFilters::some : SampleFilters::all;
}

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, ConstTensorView packed, SampleFilters filters) {
  const int64_t rows = logits.rows(), vocab = logits.dim(1), chunk = vocab_chunk(vocab), chunks = vocab_chunks(vocab);
  GPU_CHECK(token.contiguous() && logprob.contiguous(), "sample: tokens or log-probabilities with a stride");
  ArenaScope scope(*c.workspace);
  const auto* const params = static_cast<const Row*>(packed.data);
  int32_t* const tokens = token.ptr<int32_t>();
  float* const logprobs = logprob.ptr<float>();
  if (filters != SampleFilters::all) {
    const ConstTensorView temperature(params + rows, DType::f32, {rows});
    const TensorView max = c.workspace->tensor(DType::f32, {rows}, "sample max"), lse = c.workspace->tensor(DType::f32, {rows}, "sample lse");
    const auto sums = static_cast<uint64_t*>(c.workspace->allocate(static_cast<size_t>(rows * chunks) * sizeof(uint64_t), "sample chunks"));
    row_stats(c, max, lse, logits, temperature);
    launch(c, "sample_weights", {.blocks = blocks_for(rows * chunks, kRowsABlock), .threads = kRowThreads}, chunk_weights_kernel, sums, params,
           max.ptr<float>(), logits.ptr<float>(), logits.row_stride, rows, vocab, chunk, chunks);
    launch(c, "sample_draw", {.blocks = rows, .threads = kWave}, draw_kernel, tokens, logprobs, sums, params, max.ptr<float>(), lse.ptr<float>(),
           logits.ptr<float>(), logits.row_stride, vocab, chunk, chunks);
  }
  if (filters == SampleFilters::none) return;
  constexpr int64_t kRowsAtOnce = 128;
  const int64_t scratch_rows = std::min(rows, kRowsAtOnce);
  const auto keys = static_cast<uint32_t*>(c.workspace->tensor(DType::i32, {scratch_rows, vocab}, "sample order").data);
  float* const es = c.workspace->tensor(DType::f32, {scratch_rows, vocab}, "sample weights").ptr<float>();
  int32_t* const ids = c.workspace->tensor(DType::i32, {scratch_rows, vocab}, "sample ids").ptr<int32_t>();
  const int threads = vocab < 8192 ? 128 : kFilterThreadsMax;
  for (int64_t first = 0; first < rows; first += kRowsAtOnce)
    launch(c, "sample_filter", {.blocks = std::min(kRowsAtOnce, rows - first), .threads = threads, .shared_bytes = kFilterShared}, filter_kernel, tokens, logprobs,
           first, params, logits.ptr<float>(), logits.row_stride, keys, es, ids, vocab);
}

}  // namespace lockstep::device
