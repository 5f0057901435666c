// Rows without a filter, the common case: row_stats as select_logprob takes them, then the weights of each of the vocabulary's chunks by 16 threads, then a
// wave a row that finds the chunk and, in it, the token. Three reads of the logits; floor 3 * R * V * 4 bytes / 4 TB/s, of which all but the first are L2's for
// R up to 80.
//
// Rows with a filter or a forbidden id: a thread block each. Ids are ordered by one integer that holds both y and the id, so top-k and top-p are a search for
// the least integer that is kept: a histogram of the counts or weights over 1,024 distances from the largest y, then over digits of the few ids that lie where the
// sum is reached. 129,280 ids cost six passes over 4 or 8 bytes each, from L2 (about 10 us at an SM's 64 bytes a cycle), their exponentials (10 us), and what is kept
// is added up in a chain for each of 16 lanes: 8,080 steps of 4 cycles if all are.

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

// The sum over the threads up to this one, and over all.
struct Running {
  uint64_t up_to, total;
};
GPU_INLINE Running running_sum(uint64_t v, Shared<uint64_t> words) {
  for (int width = 1; width < kWave; width *= 2) {
    const uint64_t below = shuffle(v, lane() >= width ? lane() - width : lane());
    if (lane() >= width) v += below;
  }
  sync_block();
  if (lane() == kWave - 1) words.store(wave(), v);
  sync_block();
  uint64_t before = 0, total = 0;
  for (int w = 0; w < block_dim() / kWave; ++w) {
    const uint64_t of_wave = words.load(w);
    if (w < wave()) before += of_wave;
    total += of_wave;
  }
  return {before + v, total};
}
GPU_INLINE uint64_t max_block(uint64_t v, Shared<uint64_t> words) {
  for (int width = kWave / 2; width >= 1; width /= 2) v = larger(v, shuffle_xor(v, width));
  sync_block();
  if (lane() == 0) words.store(wave(), v);
  sync_block();
  for (int w = 0; w < block_dim() / kWave; ++w) v = larger(v, words.load(w));
  return v;
}

// visit(load(i), i, whether i < n) for i = first, first + step, ...: as often in threads whose first / step is the same, so that visit may be of the whole wave.
// Several loads are on their way at once.
template <typename Load, typename Visit>
GPU_INLINE void each_ahead(int64_t first, int64_t n, int step, const Load& load, const Visit& visit) {
  constexpr int kAhead = 4;
  const int64_t lowest = first / step * step;
  for (int64_t begin = lowest; begin < n; begin += kAhead * step) {
    decltype(load(begin)) loaded[kAhead];
    const int64_t mine = begin + (first - lowest);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) loaded[k] = load(mine + k * step < n ? mine + k * step : n - 1);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (begin + k * step < n) visit(loaded[k], mine + k * step, mine + k * step < n);
  }
}

struct alignas(8) Entry {
  uint32_t key;
  float e;
};

inline constexpr int kFilterThreadsMax = 1024, kBins = 1024;
inline constexpr int kBinsANat = 32;  // of the first histogram: all ids of weight lie in 28 nats
inline constexpr int kStaged = 4096;  // numbers that wait for their turn in a chain, twice
// Words of 8 bytes, even numbers of them: each array begins at 16 bytes.
inline constexpr int kWaveWords = kFilterThreadsMax / 32 + 2;
inline constexpr size_t kFilterShared = 2 * kBins * sizeof(uint32_t) + (3 * kWaveWords + 4) * sizeof(uint64_t) + 2 * kStaged * sizeof(float);

// A row's scratch, V elements each, and its thread block's.
struct FilterRow {
  Entry* entries;
  int32_t* ids;
  int64_t vocab;
  float max;
  Shared<uint32_t> low, high;  // a histogram's sums
  Shared<uint64_t> words;      // of waves
  Shared<uint64_t> found;      // a bin, and what lies above it
  Shared<uint32_t> listed;

  GPU_INLINE void clear() const {
    sync_block();
    for (int i = thread_x(); i < kBins; i += block_dim()) low.store(i, 0), high.store(i, 0);
    if (thread_x() == 0) found.store(0, kBins);
    sync_block();
  }
  // 64-bit sums by additions of 32, which GPUs have in shared memory: whoever overflows the low half carries.
  GPU_INLINE void add(int bin, uint64_t v) const {
    const auto v_low = static_cast<uint32_t>(v), was = atomic_add(low, bin, v_low);
    const uint32_t v_high = static_cast<uint32_t>(v >> 32) + (was + v_low < was ? 1 : 0);
    if (v_high != 0) atomic_add(high, bin, v_high);
  }
};

struct Bin {
  int bin;  // kBins: none
  uint64_t above, total;
};
// The highest bin such that reached(above + the sum of those from it on, the sum of all) says yes; with what lies above that bin.
template <typename Reached>
GPU_INLINE Bin find_bin(const FilterRow& s, uint64_t above, const Reached& reached) {
  const int each = kBins / block_dim(), highest = kBins - 1 - thread_x() * each;
  const auto sum_of = [&](int bin) { return static_cast<uint64_t>(s.high.load(bin)) << 32 | s.low.load(bin); };
  sync_block();
  uint64_t own = 0;
  for (int k = 0; k < each; ++k) own += sum_of(highest - k);
  const Running sums = running_sum(own, s.words);
  uint64_t sum = above + sums.up_to - own;
  for (int k = 0; k < each; ++k) {
    const uint64_t with = sum + sum_of(highest - k);
    if (with != sum && reached(with, sums.total) && (sum == 0 || !reached(sum, sums.total))) s.found.store(0, static_cast<uint64_t>(highest - k)), s.found.store(1, sum);
    sum = with;
  }
  sync_block();
  const auto bin = static_cast<int>(s.found.load(0));
  return {bin, bin < kBins ? s.found.load(1) : 0, sums.total};
}

// The largest place such that the values of the ids from it on satisfy reached(their sum, the sum of all), which no sum of 0 does; 0 if all values are 0. Ids
// below the place `floor` do not count. First a histogram by the distance of y from its maximum; then the ids of the bin where it happens are listed and searched
// by digits of their places.
template <typename Value, typename Reached>
GPU_INLINE uint64_t search(const FilterRow& s, uint64_t floor, const Value& value, const Reached& reached) {
  const auto bin_of = [&](uint32_t key) {
    const float below = (s.max - y_of(key)) * kBinsANat;
    return kBins - 1 - (below < kBins - 1 ? static_cast<int>(below) : kBins - 1);
  };
  const auto value_of = [&](Entry e, int64_t v) { return e.key != 0 && place_of(e.key, v) >= floor ? value(e) : uint64_t{0}; };
  const auto load = [&](int64_t v) { return s.entries[v]; };
  s.clear();
  each_ahead(thread_x(), s.vocab, block_dim(), load, [&](Entry e, int64_t v, bool inside) {
    const uint64_t of_id = inside ? value_of(e, v) : 0;
    if (of_id != 0) s.add(bin_of(e.key), of_id);
  });
  Bin at = find_bin(s, 0, reached);
  if (at.bin == kBins) return 0;
  const uint64_t total = at.total;
  if (thread_x() == 0) s.listed.store(0, 0);
  sync_block();
  each_ahead(thread_x(), s.vocab, block_dim(), load, [&](Entry e, int64_t v, bool inside) {
    const bool mine = inside && bin_of(e.key) == at.bin && value_of(e, v) != 0;
    const uint64_t all = ballot(mine);
    if (all == 0) return;
    const uint32_t to = shuffle(lane() == 0 ? atomic_add(s.listed, 0, static_cast<uint32_t>(count_bits(all))) : 0u, 0);
    if (mine) s.ids[to + static_cast<uint32_t>(count_bits(all & ((uint64_t{1} << lane()) - 1)))] = static_cast<int32_t>(v);
  });
  sync_block();
  const int64_t listed = s.listed.load(0);
  uint64_t from = 0, to = ~uint64_t{0};  // places that are left
  const auto each_listed = [&](const auto& f) {
    for (int64_t i = thread_x(); i < listed; i += block_dim()) {
      const int32_t v = s.ids[i];
      const Entry e = s.entries[v];
      const uint64_t place = place_of(e.key, v);
      if (place >= from && place <= to) f(e, place);
    }
  };
  for (;;) {
    uint64_t highest = 0, not_lowest = 0;
    each_listed([&](Entry, uint64_t place) { highest = larger(highest, place), not_lowest = larger(not_lowest, ~place); });
    highest = max_block(highest, s.words);
    const uint64_t lowest = ~max_block(not_lowest, s.words);
    if (highest == lowest) return lowest;
    int shift = 0;
    while ((highest ^ lowest) >> shift >= kBins) ++shift;
    s.clear();
    each_listed([&](Entry e, uint64_t place) { s.add(static_cast<int>(place >> shift) & (kBins - 1), value(e)); });
    at = find_bin(s, at.above, [&](uint64_t sum, uint64_t) { return reached(sum, total); });
    from = ((highest >> shift & ~uint64_t{kBins - 1}) | static_cast<uint64_t>(at.bin)) << shift;
    to = from + ((uint64_t{1} << shift) - 1);
  }
}

// A thread block a row from `first_row` on; those without a filter have nothing to do.
GPU_KERNEL GPU_BOUNDS(kFilterThreadsMax)
filter_kernel(int32_t* token, float* logprob, int64_t first_row, const Row* params, const float* logits, int64_t stride, Entry* entries, int32_t* ids,
              int64_t vocab) {
  const int64_t r = first_row + block_x();
  const Row p = params[r];
  if (p.filtered == 0) return;
  SharedMemory memory;
  const auto low = memory.take<uint32_t>(kBins), high = memory.take<uint32_t>(kBins);
  const auto words = memory.take<uint64_t>(kWaveWords), starts = memory.take<uint64_t>(kWaveWords), before = memory.take<uint64_t>(kWaveWords);
  const auto found = memory.take<uint64_t>(2);
  const auto listed = memory.take<uint32_t>(4);
  const auto staged = memory.take<float>(2 * kStaged);
  const float* const x = logits + r * stride;
  const Cooled y_of_logit = {p.temperature};

  // A temperature keeps the order of logits, so their largest gives that of y; where it makes two equal, the row draws and needs no first among them.
  uint64_t top = 0;
  each_ahead(thread_x(), vocab, block_dim(), [&](int64_t v) { return x[v]; }, [&](float logit, int64_t v, bool inside) {
    if (inside && v != p.forbid) top = larger(top, place_of(key_of(logit), v));
  });
  top = max_block(top, words);
  const float max = y_of_logit(y_of(static_cast<uint32_t>(top >> 31)));
  const FilterRow s = {entries + block_x() * vocab, ids + block_x() * vocab, vocab, max, low, high, words, found, listed};
  each_ahead(thread_x(), vocab, block_dim(), [&](int64_t v) { return x[v]; }, [&](float logit, int64_t v, bool inside) {
    const float y = y_of_logit(logit);
    if (inside) s.entries[v] = {v == p.forbid ? 0 : key_of(y), exp_f32(y - max)};
  });
  sync_block();

  const uint64_t n = static_cast<uint64_t>(vocab) - (p.forbid >= 0 ? 1 : 0);
  uint64_t least = 1;  // the kept have this place or a larger one
  if (p.greedy == 0 && p.top_k > 0 && static_cast<uint64_t>(p.top_k) < n)
    least = search(s, least, [](Entry) { return uint64_t{1}; }, [k = static_cast<uint64_t>(p.top_k)](uint64_t count, uint64_t) { return count >= k; });
  if (p.greedy == 0 && p.top_p < 1.0f) {
    const uint64_t place = search(s, least, [](Entry e) { return sample_weight(e.e); }, [share = static_cast<double>(p.top_p)](uint64_t weight, uint64_t total) {
      return static_cast<double>(weight) >= share * static_cast<double>(total);
    });
    uint64_t first = 0;  // if nothing has weight
    for (int64_t v = thread_x(); place == 0 && v < vocab; v += block_dim())
      if (s.entries[v].key != 0) first = larger(first, place_of(s.entries[v].key, v));
    least = place != 0 ? place : max_block(first, words);
  }
  const bool by_min_p = p.greedy == 0 && p.min_p > 0.0f;
  const auto kept = [&](Entry e, int64_t v) { return e.key != 0 && place_of(e.key, v) >= least && (!by_min_p || e.e >= p.min_p); };

  // The kept ids' exponentials in ascending order of id: a wave takes a piece of the vocabulary, first to count, then to write behind those before it.
  const auto load = [&](int64_t v) { return s.entries[v]; };
  const int waves = block_dim() / kWave;
  const int64_t piece = (blocks_for(vocab, waves) + kWave - 1) / kWave * kWave;
  const int64_t begin = wave() * piece, end = begin + piece < vocab ? begin + piece : vocab;
  uint64_t count = 0, weight = 0;
  each_ahead(begin + lane(), end, kWave, load, [&](Entry e, int64_t v, bool inside) {
    if (inside && kept(e, v)) ++count, weight += sample_weight(e.e);
  });
  for (int width = kWave / 2; width >= 1; width /= 2) count += shuffle_xor(count, width), weight += shuffle_xor(weight, width);
  if (lane() == 0) starts.store(wave() + 1, count), before.store(wave() + 1, weight);
  sync_block();
  if (thread_x() == 0) {
    starts.store(0, 0), before.store(0, 0);
    for (int w = 0; w < waves; ++w) starts.store(w + 1, starts.load(w) + starts.load(w + 1)), before.store(w + 1, before.load(w) + before.load(w + 1));
  }
  sync_block();
  auto* const kept_e = reinterpret_cast<float*>(s.ids);
  auto at = static_cast<int64_t>(starts.load(wave()));
  each_ahead(begin + lane(), end, kWave, load, [&](Entry e, int64_t v, bool inside) {
    const bool keep = inside && kept(e, v);
    const uint64_t all = ballot(keep);
    if (keep) kept_e[at + count_bits(all & ((uint64_t{1} << lane()) - 1))] = e.e;
    at += count_bits(all);
  });
  auto number = static_cast<int64_t>(starts.load(waves));
  int64_t id = id_of(top);
  if (p.greedy == 0 && before.load(waves) == 0) {  // nothing has weight: the last of the kept; of none, which are NaN all, min-p keeps the lowest id
    uint64_t chosen = 0;
    for (int64_t v = thread_x(); v < vocab; v += block_dim()) {
      const Entry e = s.entries[v];
      if (number > 0 ? kept(e, v) : e.key != 0 && place_of(e.key, v) >= least) chosen = larger(chosen, number > 0 ? static_cast<uint64_t>(v) : kIdMask - static_cast<uint64_t>(v));
    }
    chosen = max_block(chosen, words);
    id = number > 0 ? static_cast<int64_t>(chosen) : id_of(chosen);
    if (number == 0 && thread_x() == 0) kept_e[0] = s.entries[id].e;
    number = number > 0 ? number : 1;
  }
  sync_block();

  // The tree over them: the lanes of the first wave add up what the others bring.
  float sum = 0;
  for (int64_t first = 0; first < number + kStaged; first += kStaged) {
    const auto here = staged.from(first / kStaged % 2 * kStaged), last = staged.from((first / kStaged + 1) % 2 * kStaged);
    if (wave() > 0) {
      const int64_t many = number - first < kStaged ? number - first : kStaged;
      if (many > 0)
        each_ahead(thread_x() - kWave, many, block_dim() - kWave, [&](int64_t i) { return kept_e[first + i]; }, [&](float e, int64_t i, bool inside) {
          if (inside) here.store(static_cast<int>(i), e);
        });
    } else if (first > 0) {
      const int64_t left = number - (first - kStaged);
      const int many = left < kStaged ? static_cast<int>(left) : kStaged;
      in_order((many - row_lane() + kTreeLanes - 1) / kTreeLanes, [&](int i) { return last.load(row_lane() + i * kTreeLanes); }, [&](float e) { sum = sum + e; });
    }
    sync_block();
  }
  if (wave() != 0) return;
  sum = fold_row(sum);
  if (p.greedy == 0 && before.load(waves) > 0) {
    const double threshold = static_cast<double>(p.u) * static_cast<double>(before.load(waves));
    int w = 0;
    while (w + 1 < waves && !(static_cast<double>(before.load(w + 1)) > threshold)) ++w;
    struct Candidate {
      Entry entry;
      int32_t v;
    };
    const int64_t first = w * piece, many = (first + piece < vocab ? first + piece : vocab) - first;
    id = first + draw(before.load(w), threshold, many, [&](int64_t i) { return Candidate{s.entries[first + i], static_cast<int32_t>(first + i)}; },
                      [&](const Candidate& c) { return kept(c.entry, c.v) ? sample_weight(c.entry.e) : 0; });
  }
  if (thread_x() != 0) return;
  token[r] = static_cast<int32_t>(id);
  logprob[r] = y_of_logit(x[id]) - (max + log_f32(sum));
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
  const auto entries = static_cast<Entry*>(c.workspace->allocate(static_cast<size_t>(scratch_rows * vocab) * sizeof(Entry), "sample weights"));
  int32_t* const ids = c.workspace->tensor(DType::i32, {scratch_rows, vocab}, "sample ids").ptr<int32_t>();
  const int threads = vocab < 8192 ? 128 : kFilterThreadsMax;
  for (int64_t first = 0; first < rows; first += kRowsAtOnce)
    launch(c, "sample_filter", {.blocks = std::min(kRowsAtOnce, rows - first), .threads = threads, .shared_bytes = kFilterShared}, filter_kernel, tokens, logprobs,
           first, params, logits.ptr<float>(), logits.row_stride, entries, ids, vocab);
}

}  // namespace lockstep::device
