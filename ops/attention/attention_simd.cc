// Attention with vectors. Queries are taken in tiles of consecutive positions of one sequence, which share nearly all their rows:
// a tile transposes its rows once, so that logits have lanes over rows, and outputs and gradients have lanes over channels.

#include "ops/attention/attention_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/attention_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/attention/row_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

constexpr int64_t kTileQueries = 32;

// What one worker writes to.
struct Scratch {
  KeyColumns window, entries;
  const float** list = nullptr;  // [longest list] rows of the current query
  float** row_grad = nullptr;    // [longest list] where their gradients go (backward)
  float* weight = nullptr;       // [heads, stride] logits, then softmax weights; backward [2 * heads, stride]: dl, P of each head
  float** weight_row = nullptr;  // [heads]
  float** second_weight_row = nullptr;  // [heads] (backward)
  int64_t stride = 0;
  float* query = nullptr;             // [heads, width] when q is not f32
  float* out = nullptr;               // [heads, width] (forward)
  float** out_row = nullptr;          // [heads]
  const float** query_row = nullptr;  // [2 * heads] q and d_o of each head (backward)
  float* sum = nullptr;               // [heads] (forward)
  float* highest = nullptr;           // [heads] (forward)
};

template <typename T>
Scratch* MakeScratch(Context& c, int64_t tile, int64_t longest_window_rows, int64_t longest_entries, int64_t heads, int64_t width,
                     bool backward) {
  Arena& arena = *c.workspace;
  Scratch* all = Take<Scratch>(arena, c.num_threads(), "attention workers");
  const int64_t longest = longest_window_rows + longest_entries;
  for (int w = 0; w < c.num_threads(); ++w) {
    Scratch& s = *new (all + w) Scratch;
    s.window = MakeKeyColumns<T>(arena, longest_window_rows + tile - 1, width);
    s.entries = MakeKeyColumns<T>(arena, longest_entries, width);
    s.list = Take<const float*>(arena, longest, "attention rows");
    s.stride = ((longest + 2 * kTreeLanes + 15) / 16 | 1) * 16;
    s.weight = Take<float>(arena, (backward ? 2 : 1) * heads * s.stride, "attention weights");
    s.weight_row = Take<float*>(arena, heads, "attention weight rows");
    s.query = Take<float>(arena, heads * width, "attention query");
    s.out_row = Take<float*>(arena, heads, "attention output rows");
    if (backward) {
      s.row_grad = Take<float*>(arena, longest, "attention row gradients");
      s.second_weight_row = Take<float*>(arena, heads, "attention weight rows");
      s.query_row = Take<const float*>(arena, 2 * heads, "attention query rows");
      for (int64_t h = 0; h < heads; ++h)
        s.weight_row[h] = s.weight + (2 * h + 1) * s.stride, s.second_weight_row[h] = s.weight + 2 * h * s.stride;
    } else {
      s.out = Take<float>(arena, heads * width, "attention output");
      s.sum = Take<float>(arena, heads, "attention denominators");
      s.highest = Take<float>(arena, heads, "attention maxima");
      for (int64_t h = 0; h < heads; ++h) s.weight_row[h] = s.weight + h * s.stride, s.out_row[h] = s.out + h * width;
    }
  }
  return all;
}

// The rows of consecutive queries of one sequence.
template <typename T>
class Tile {
 public:
  Tile(const KeyReader<T>& reader, const AttentionKeys& keys, const AttentionShape& shape, Scratch& scratch, int64_t heads,
       int64_t width)
      : reader_(reader), keys_(keys), shape_(shape), scratch_(scratch), heads_(heads), width_(width) {}

  // Positions [begin, end) of sequence s.
  void Load(int64_t s, int64_t begin, int64_t end) {
    s_ = s;
    end_ = end;
    first_ = std::max<int64_t>(0, begin - shape_.window + 1);
    FillKeyColumns<T>(scratch_.window, 0, end - first_, width_, [&](int64_t j) { return reader_.window(s, first_ + j); });
    entries_loaded_ = 0;
  }

  // Makes the list of row t, at `position`, the current one.
  QueryList Select(int64_t t, int64_t position) {
    const QueryList list = query_list(keys_, shape_, t, position);
    if (list.chosen != nullptr) {
      FillKeyColumns<T>(scratch_.entries, 0, list.num_entries, width_,
                        [&](int64_t j) { return reader_.entry(s_, list.chosen[j]); });
      entries_loaded_ = 0;
    } else if (list.num_entries > entries_loaded_) {
      int64_t want = end_ / shape_.ratio;  // what the last query of the tile may see
      if (keys_.selected.data != nullptr) want = std::min(want, keys_.selected.dim(1));
      FillKeyColumns<T>(scratch_.entries, entries_loaded_, want, width_, [&](int64_t j) { return reader_.entry(s_, j); });
      entries_loaded_ = want;
    }
    num_window_ = list.num_window();
    num_entries_ = list.num_entries;
    window_offset_ = list.first - first_;
    std::copy_n(scratch_.window.row + window_offset_, num_window_, scratch_.list);
    std::copy_n(scratch_.entries.row, num_entries_, scratch_.list + num_window_);
    return list;
  }

  // out[h][j] = x[h] . row j of the current list, with up to a vector of anything after the last.
  void Dots(const float* x, float* const* out) const {
    RowProducts p = {.weight = x,
                     .out_step = width_,
                     .row_step = 1,
                     .row = scratch_.window.channel,
                     .num_rows = width_,
                     .row_offset = window_offset_,
                     .out = out,
                     .num_out = heads_,
                     .out_offset = 0,
                     .width = RoundUp(num_window_)};
    MultiplyRows(p);
    if (num_entries_ == 0) return;
    p.row = scratch_.entries.channel;
    p.row_offset = 0;
    p.out_offset = num_window_;
    p.width = RoundUp(num_entries_);
    MultiplyRows(p);
  }

 private:
  static int64_t RoundUp(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

  const KeyReader<T>& reader_;
  const AttentionKeys& keys_;
  const AttentionShape& shape_;
  Scratch& scratch_;
  const int64_t heads_, width_;
  int64_t s_ = 0, end_ = 0, first_ = 0, entries_loaded_ = 0;
  int64_t num_window_ = 0, num_entries_ = 0, window_offset_ = 0;
};

// l = scale * dots; l becomes exp(l - max(l, sink)). Returns the maximum.
float ExpLogits(float* l, int64_t n, float scale, float sink) {
  const F32Tag d;
  const auto vscale = hn::Set(d, scale);
  auto highest = hn::Set(d, sink);
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const auto v = hn::Mul(hn::LoadU(d, l + j), vscale);
    hn::StoreU(v, d, l + j);
    highest = hn::Max(highest, v);
  }
  if (j < n) {
    const auto v = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(n - j)), hn::Mul(hn::LoadU(d, l + j), vscale), highest);
    hn::StoreU(v, d, l + j);
    highest = hn::Max(highest, v);
  }
  const float m = hn::GetLane(hn::MaxOfLanes(d, highest));
  const auto vm = hn::Set(d, m);
  for (j = 0; j < n; j += kLanes) hn::StoreU(ExpF32(d, hn::Sub(hn::LoadU(d, l + j), vm)), d, l + j);
  return m;
}

template <typename T>
void DivideRow(T* to, const float* from, int64_t n, float denominator) {
  const F32Tag d;
  const auto v = hn::Set(d, denominator);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreF32(d, hn::Div(hn::LoadU(d, from + i), v), to + i);
  for (; i < n; ++i) to[i] = from_f32<T>(from[i] / denominator);
}

// Backward weights of one head from its dots: dp becomes scale * P * (dp - delta), l becomes P.
void BackwardWeights(float* dp, float* l, int64_t n, float scale, float lse, float delta) {
  const F32Tag d;
  const auto vscale = hn::Set(d, scale), vlse = hn::Set(d, lse), vdelta = hn::Set(d, delta);
  for (int64_t j = 0; j < n; j += kLanes) {
    const auto p = ExpF32(d, hn::Sub(hn::Mul(hn::LoadU(d, l + j), vscale), vlse));
    const auto dl = hn::Mul(hn::Mul(p, hn::Sub(hn::LoadU(d, dp + j), vdelta)), vscale);
    hn::StoreU(p, d, l + j);
    hn::StoreU(dl, d, dp + j);
  }
}

template <typename T>
void Forward(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
             const SequenceView& seq, const AttentionShape& shape) {
  const int64_t heads = q.dim(1), width = q.dim(2), num_tokens = seq.num_tokens;
  const int64_t window_rows = longest_window(seq, shape), entry_rows = longest_entry_list(keys, seq, shape);
  const KeyReader<T> reader(keys, seq, shape, width);
  const int64_t block = QueryBlock(c, num_tokens, kTileQueries);
  const int64_t num_blocks = (num_tokens + block - 1) / block;
  ArenaScope scope(*c.workspace);
  Scratch* scratches = MakeScratch<T>(c, block, window_rows, entry_rows, heads, width, /*backward=*/false);
  const int32_t* token_seq = seq.token_seq.ptr<int32_t>();
  const int32_t* token_pos = seq.token_pos.ptr<int32_t>();
  const int32_t* seq_row = seq.seq_row.ptr<int32_t>();
  const float* sinks = sink.ptr<float>();

  const int64_t cost = (window_rows + entry_rows) * width * (heads / 8 + 1) * block;
  parallel_for(c, num_blocks, cost, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
    Scratch& s = scratches[worker];
    Tile<T> tile(reader, keys, shape, s, heads, width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = AlternatingBlock(i, num_blocks), block_end = std::min(num_tokens, (b + 1) * block);
      for (int64_t t = b * block; t < block_end;) {
        const int64_t sequence = token_seq[t], tile_end = std::min<int64_t>(block_end, seq_row[sequence + 1]);
        tile.Load(sequence, token_pos[t], token_pos[t] + tile_end - t);
        for (; t < tile_end; ++t) {
          const int64_t n = tile.Select(t, token_pos[t]).size();
          tile.Dots(AsFloats(q.row<T>(t), heads * width, s.query), s.weight_row);
          float* lse_row = lse.data == nullptr ? nullptr : lse.row<float>(t);
          for (int64_t h = 0; h < heads; ++h) s.highest[h] = ExpLogits(s.weight_row[h], n, shape.scale, sinks[h]);
          MultiplyRows({.weight = s.weight,
                        .out_step = s.stride,
                        .row_step = 1,
                        .row = s.list,
                        .num_rows = n,
                        .row_offset = 0,
                        .out = s.out_row,
                        .num_out = heads,
                        .out_offset = 0,
                        .width = width,
                        .weight_sum = s.sum});
          T* to = o.row<T>(t);
          for (int64_t h = 0; h < heads; ++h) {
            const float denominator = s.sum[h] + exp_f32(sinks[h] - s.highest[h]);
            DivideRow(to + h * width, s.out_row[h], width, denominator);
            if (lse_row != nullptr) lse_row[h] = s.highest[h] + log_f32(denominator);
          }
        }
      }
    }
  });
}

template <typename T>
void Backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum, ConstTensorView d_o,
              ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
              const SequenceView& seq, const AttentionShape& shape) {
  const int64_t heads = q.dim(1), width = q.dim(2), num_sequences = seq.num_sequences;
  const int64_t window_rows = longest_window(seq, shape), entry_rows = longest_entry_list(keys, seq, shape);
  const KeyReader<T> reader(keys, seq, shape, width);
  ArenaScope scope(*c.workspace);
  Scratch* scratches = MakeScratch<T>(c, kTileQueries, window_rows, entry_rows, heads, width, /*backward=*/true);
  float* sink_parts = Take<float>(*c.workspace, num_sequences * heads, "attention sink gradients");
  const int32_t* token_seq = seq.token_seq.ptr<int32_t>();
  const int32_t* seq_row = seq.seq_row.ptr<int32_t>();
  const float* sinks = sink.ptr<float>();

  const auto run_sequence = [&](int64_t sequence, Scratch& s, Tile<T>& tile) HWY_ATTR {
    const int64_t first_row = seq_row[sequence], num_rows = seq_row[sequence + 1] - first_row;
    float* sink_part = sink_parts + sequence * heads;
    std::fill_n(sink_part, heads, 0.0f);
    for (int64_t p = 0; p < num_rows; ++p) std::fill_n(dkv.row<float>(first_row + p), width, 0.0f);
    for (int64_t tile_begin = 0; tile_begin < num_rows; tile_begin += kTileQueries) {
      const int64_t tile_end = std::min(num_rows, tile_begin + kTileQueries);
      tile.Load(sequence, tile_begin, tile_end);
      for (int64_t p = tile_begin; p < tile_end; ++p) {
        const int64_t t = first_row + p;
        const QueryList list = tile.Select(t, p);
        const int64_t n = list.size(), num_window = list.num_window();
        for (int64_t j = 0; j < num_window; ++j) s.row_grad[j] = dkv.row<float>(first_row + list.first + j);
        for (int64_t j = 0; j < list.num_entries; ++j)
          s.row_grad[num_window + j] = dentries_accum.row<float>(entry_row(seq, shape.per_page, sequence, list.entry(j)));

        const float* query = AsFloats(q.row<T>(t), heads * width, s.query);
        const float* grad = d_o.row<float>(t);
        const T* output = o.row<T>(t);
        tile.Dots(query, s.weight_row);
        tile.Dots(grad, s.second_weight_row);
        for (int64_t h = 0; h < heads; ++h) {
          const float log_denominator = lse.row<float>(t)[h];
          const float delta = TreeDot(output + h * width, grad + h * width, width);
          BackwardWeights(s.second_weight_row[h], s.weight_row[h], n, shape.scale, log_denominator, delta);
          sink_part[h] = std::fmaf(-exp_f32(sinks[h] - log_denominator), delta, sink_part[h]);
          s.out_row[h] = dq.row<float>(t) + h * width;
          s.query_row[2 * h] = query + h * width;
          s.query_row[2 * h + 1] = grad + h * width;
        }
        MultiplyRows({.weight = s.weight,
                      .out_step = 2 * s.stride,
                      .row_step = 1,
                      .row = s.list,
                      .num_rows = n,
                      .row_offset = 0,
                      .out = s.out_row,
                      .num_out = heads,
                      .out_offset = 0,
                      .width = width});
        MultiplyRows({.weight = s.weight,
                      .out_step = 1,
                      .row_step = s.stride,
                      .row = s.query_row,
                      .num_rows = 2 * heads,
                      .row_offset = 0,
                      .out = s.row_grad,
                      .num_out = n,
                      .out_offset = 0,
                      .width = width,
                      .accumulate = true});
      }
    }
  };

  // Shares are counted in rows, and a sequence goes to the share its first row is in.
  const int64_t cost = (window_rows + entry_rows) * width * (heads / 3 + 1);
  parallel_for(c, num_sequences == 1 ? 1 : seq.num_tokens, num_sequences == 1 ? 0 : cost,
               [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
                 Scratch& s = scratches[worker];
                 Tile<T> tile(reader, keys, shape, s, heads, width);
                 for (int64_t sequence = token_seq[begin]; sequence < num_sequences && seq_row[sequence] < end; ++sequence)
                   if (seq_row[sequence] >= begin) run_sequence(sequence, s, tile);
               });
  float* dsink = dsink_accum.ptr<float>();
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence)
    for (int64_t h = 0; h < heads; ++h) dsink[h] += sink_parts[sequence * heads + h];
}

void AttentionForward(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys,
                      ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape) {
  if (q.dtype == DType::f32) Forward<float>(c, o, lse, q, keys, sink, seq, shape);
  else Forward<bf16>(c, o, lse, q, keys, sink, seq, shape);
}

void AttentionBackward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                       ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys,
                       ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape) {
  if (q.dtype == DType::f32) Backward<float>(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape);
  else Backward<bf16>(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape);
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::simd {
HWY_EXPORT(AttentionForward);
HWY_EXPORT(AttentionBackward);

void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
               const SequenceView& seq, const AttentionShape& shape) {
  HWY_DYNAMIC_DISPATCH(AttentionForward)(c, o, lse, q, keys, sink, seq, shape);
}

void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                        ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys,
                        ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape) {
  HWY_DYNAMIC_DISPATCH(AttentionBackward)(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape);
}

}  // namespace lockstep::simd
#endif  // HWY_ONCE
