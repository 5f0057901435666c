// Index scores with lanes over entries, for blocks of keys that stay in cache while a tile of queries reads them; then a
// selection by counting, which has no branches that depend on the scores.

#include "ops/indexer/indexer_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/indexer/indexer_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/attention/row_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

constexpr int64_t kTileQueries = 16;
constexpr int64_t kBlockKeys = 256;

struct Scratch {
  KeyColumns keys;
  float* query = nullptr;  // [heads, width] when q is not f32
  float* dots = nullptr;   // [heads, kBlockKeys]
  float** dot_row = nullptr;
  int32_t* ranks = nullptr;  // [kTileQueries, stride] the scores of each query of the tile, as integers in the same order
  int64_t stride = 0;
};

// ranks[i] = an integer that compares as sum_h weight[h] * max(0, dots[h][i]) does, for i in [0, n) and up to a vector more.
// Virtual lanes kUsed and up of the tree have no head: adding their zeros could only change the sign of a zero, which the end
// undoes anyway.
template <int kUsed>
void RankScoresOf(int32_t* ranks, const float* const* dots, const float* weight, int64_t heads, int64_t n) {
  const F32Tag d;
  const hn::RebindToSigned<F32Tag> di;
  const auto zero = hn::Zero(d);
  for (int64_t i = 0; i < n; i += kLanes) {
    hn::Vec<F32Tag> lane[kUsed];
    for (int l = 0; l < kUsed; ++l) {
      lane[l] = zero;
      for (int64_t h = l; h < heads; h += kTreeLanes) {
        const auto dot = hn::LoadU(d, dots[h] + i);
        lane[l] = hn::MulAdd(hn::Set(d, weight[h]), hn::IfThenElseZero(hn::Gt(dot, zero), dot), lane[l]);
      }
    }
    for (int width = kUsed / 2; width >= 1; width /= 2)
      for (int l = 0; l < width; ++l) lane[l] = hn::Add(lane[l], lane[l + width]);
    const auto bits = hn::BitCast(di, hn::Add(lane[0], zero));  // -0 ties with 0
    hn::StoreU(hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff))), di, ranks + i);
  }
}

void RankScores(int32_t* ranks, const float* const* dots, const float* weight, int64_t heads, int64_t n) {
  if (heads <= 4) RankScoresOf<4>(ranks, dots, weight, heads, n);
  else if (heads <= 8) RankScoresOf<8>(ranks, dots, weight, heads, n);
  else RankScoresOf<16>(ranks, dots, weight, heads, n);
}

// How many of [0, n) are larger than `bound`; n is a whole number of vectors.
int64_t CountAbove(const int32_t* ranks, int64_t n, int32_t bound) {
  const hn::RebindToSigned<F32Tag> di;
  const auto v = hn::Set(di, bound);
  auto count = hn::Zero(di);
  for (int64_t i = 0; i < n; i += kLanes) count = hn::Sub(count, hn::VecFromMask(di, hn::Gt(hn::LoadU(di, ranks + i), v)));
  return hn::GetLane(hn::SumOfLanes(di, count));
}

// The k largest of n > k ranks, lower index first among equals, in ascending index. Overwrites the ranks.
void SelectLargest(int32_t* out, int64_t k, int32_t* ranks, int64_t n) {
  const hn::RebindToSigned<F32Tag> di;
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  std::fill(ranks + n, ranks + padded, std::numeric_limits<int32_t>::min());
  // A threshold that at least k ranks reach, bit by bit from the top (offset to make it unsigned), until exactly k do or it is
  // the k-th largest itself. The padding is above nothing.
  uint32_t found = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    const int64_t count = CountAbove(ranks, padded, static_cast<int32_t>(((found | bit) - 1) ^ 0x80000000u));
    if (count >= k) found |= bit;
    if (count == k) break;
  }
  const int32_t threshold = static_cast<int32_t>(found ^ 0x80000000u);
  int64_t equal_left = k - CountAbove(ranks, padded, threshold);
  // The list grows over ranks that have been read.
  const auto v = hn::Set(di, threshold);
  int64_t taken = 0;
  for (int64_t i = 0; i < padded && taken < k; i += kLanes) {
    const auto rank = hn::LoadU(di, ranks + i);
    auto equal = hn::Eq(rank, v);
    if (const int64_t num_equal = static_cast<int64_t>(hn::CountTrue(di, equal)); num_equal > equal_left) {
      int64_t lanes = 0;
      for (int64_t left = equal_left; left > 0; ++lanes) left -= ranks[i + lanes] == threshold;
      equal = hn::And(equal, hn::FirstN(di, static_cast<size_t>(lanes)));
      equal_left = 0;
    } else {
      equal_left -= num_equal;
    }
    taken += static_cast<int64_t>(
        hn::CompressStore(hn::Iota(di, static_cast<int32_t>(i)), hn::Or(hn::Gt(rank, v), equal), di, ranks + taken));
  }
  std::copy_n(ranks, k, out);
}

template <typename T>
void Select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
            const SequenceView& seq, const IndexerShape& shape) {
  const int64_t heads = q.dim(1), width = q.dim(2), k = selected.dim(1), num_tokens = seq.num_tokens;
  const int32_t* token_seq = seq.token_seq.ptr<int32_t>();
  const int32_t* token_pos = seq.token_pos.ptr<int32_t>();
  const int32_t* seq_row = seq.seq_row.ptr<int32_t>();
  int64_t longest = 0;
  for (int64_t s = 0; s < seq.num_sequences; ++s) longest = std::max(longest, (last_position(seq, s) + 1) / shape.ratio);
  const int64_t block = QueryBlock(c, num_tokens, kTileQueries), num_blocks = (num_tokens + block - 1) / block;

  ArenaScope scope(*c.workspace);
  Arena& arena = *c.workspace;
  Scratch* scratches = nullptr;
  if (longest > k) {
    scratches = Take<Scratch>(arena, c.num_threads(), "index workers");
    for (int w = 0; w < c.num_threads(); ++w) {
      Scratch& s = *new (scratches + w) Scratch;
      s.keys = MakeKeyColumns<T>(arena, kBlockKeys, width);
      s.query = Take<float>(arena, heads * width, "index query");
      s.dots = Take<float>(arena, heads * kBlockKeys, "index dots");
      s.dot_row = Take<float*>(arena, heads, "index dot rows");
      for (int64_t h = 0; h < heads; ++h) s.dot_row[h] = s.dots + h * kBlockKeys;
      s.stride = (longest + kTreeLanes - 1) / kTreeLanes * kTreeLanes;
      s.ranks = Take<int32_t>(arena, block * s.stride, "index scores");
    }
  }

  // Rows [begin, end) of sequence s.
  const auto run_tile = [&](int64_t s, int64_t begin, int64_t end, Scratch* scratch) HWY_ATTR {
    const auto visible = [&](int64_t t) { return (token_pos[t] + 1) / shape.ratio; };
    int64_t first_scored = begin;  // those before see k entries or fewer
    for (; first_scored < end && visible(first_scored) <= k; ++first_scored) {
      int32_t* out = selected.row<int32_t>(first_scored);
      const int64_t n = visible(first_scored);
      for (int64_t i = 0; i < k; ++i) out[i] = i < n ? static_cast<int32_t>(i) : -1;
    }
    if (first_scored == end) return;
    const int64_t last = visible(end - 1);
    for (int64_t key = 0; key < last; key += kBlockKeys) {
      FillKeyColumns<T>(scratch->keys, 0, std::min(kBlockKeys, last - key), width,
                        [&](int64_t j) { return keys.row<T>(entry_row(seq, shape.per_page, s, key + j)); });
      for (int64_t t = first_scored; t < end; ++t) {
        const int64_t n = std::min(kBlockKeys, visible(t) - key);
        if (n <= 0) continue;
        MultiplyRows({.weight = AsFloats(q.row<T>(t), heads * width, scratch->query),
                      .out_step = width,
                      .row_step = 1,
                      .row = scratch->keys.channel,
                      .num_rows = width,
                      .row_offset = 0,
                      .out = scratch->dot_row,
                      .num_out = heads,
                      .out_offset = 0,
                      .width = (n + kLanes - 1) / kLanes * kLanes});
        RankScores(scratch->ranks + (t - begin) * scratch->stride + key, scratch->dot_row, weight.row<float>(t), heads, n);
      }
    }
    for (int64_t t = first_scored; t < end; ++t)
      SelectLargest(selected.row<int32_t>(t), k, scratch->ranks + (t - begin) * scratch->stride, visible(t));
  };

  const int64_t cost = longest > k ? longest * width * (heads / 4 + 1) * block / 2 : (k / 4 + 8) * block;
  parallel_for(c, num_blocks, cost, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
    Scratch* scratch = scratches == nullptr ? nullptr : scratches + worker;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = AlternatingBlock(i, num_blocks), block_end = std::min(num_tokens, (b + 1) * block);
      for (int64_t t = b * block; t < block_end;) {
        const int64_t tile_end = std::min<int64_t>(block_end, seq_row[token_seq[t] + 1]);
        run_tile(token_seq[t], t, tile_end, scratch);
        t = tile_end;
      }
    }
  });
}

void IndexSelect(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                 const SequenceView& seq, const IndexerShape& shape) {
  if (q.dtype == DType::f32) Select<float>(c, selected, q, weight, keys, seq, shape);
  else Select<bf16>(c, selected, q, weight, keys, seq, shape);
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::simd {
HWY_EXPORT(IndexSelect);

void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape) {
  HWY_DYNAMIC_DISPATCH(IndexSelect)(c, selected, q, weight, keys, seq, shape);
}

}  // namespace lockstep::simd
#endif  // HWY_ONCE
