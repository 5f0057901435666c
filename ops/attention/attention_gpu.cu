// Attention with the CPU's bits. A block takes one query and a tile of its heads, which share all rows: it gathers them 32 at a time into shared memory, where
// every thread keeps a few logits and then a few outputs in registers.
//
// Forward goes over the list twice: first for the maximum, then, with the same logits again, for weights, their sum and the outputs. That is half again as many
// products as keeping the logits, needs no memory for them, and works for lists of any length.
//
// Backward: the same walk leaves dq, and each row's dl_j and P_j in scratch; then a block takes 8 key rows and adds up their gradients over the queries that read
// them, in order. When scratch holds fewer than all queries, both steps take a range of them at a time; a gradient waits between ranges in its f32, so that the
// ranges do not show in the bits.
//
// Floor, n rows a list: T H n d 2 * 3 operations forward, * 5 backward, over 67 TFLOP/s (Hopper, f32).

#include <algorithm>
#include <type_traits>

#include "ops/attention/attention_cpu.h"
#include "ops/attention/attention_gpu.h"
#if LOCKSTEP_GPU_CUDA
#include "ops/attention/attention_gpu_sm90.h"
#endif
#include "core/gpu_check.h"
#include "ops/chain_gpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 256;
constexpr int kTileRows = 32;
constexpr int kWidthMax = 512;
constexpr int kOuts = 8;  // heads whose outputs a thread holds

template <typename T>
struct Problem {
  KeyRows<T> keys;
  const T* q;
  const float* sink;
  int q_stride;
  int heads, width, stride;  // of a row in shared memory: an odd number of vectors of 4
  bool vectors;              // every row of every tensor begins at a multiple of 4 elements and is a multiple of 4 long
  float scale;
};

template <typename T>
GPU_INLINE float element(const Vector<T, 4>& v, int i) { return to_f32(v.v[i]); }

// Row `from` of `width` elements, or zeros, to a row in shared memory, zeros up to a multiple of 4; `threads` of them, of which this is `lane`.
template <typename T>
GPU_INLINE void load_row(Shared<T> to, const T* from, int width, bool vectors, int lane, int threads) {
  if (vectors) {
#pragma unroll 4
    for (int i = lane * 4; i < width; i += threads * 4)
      to.template store_vector<4>(i, from == nullptr ? Vector<T, 4>{} : *reinterpret_cast<const Vector<T, 4>*>(from + i));
  } else {
    for (int i = lane; i < (width + 3) / 4 * 4; i += threads) to.store(i, from == nullptr || i >= width ? from_f32<T>(0.0f) : from[i]);
  }
}
// Rows h of [heads, width] from `first` on to shared rows; zeros beyond the last.
template <int kHeads, typename T>
GPU_INLINE void load_heads(Shared<T> to, const T* from, int first, int heads, int width, int stride, bool vectors) {
  constexpr int kLanes = kThreads / kHeads;
  const int h = thread_x() / kLanes;
  load_row(to.from(h * stride), first + h < heads ? from + static_cast<int64_t>(first + h) * width : nullptr, width, vectors, thread_x() % kLanes, kLanes);
}
// Rows [begin, begin + count) of the list.
template <typename T>
GPU_INLINE void load_tile(Shared<T> to, const Problem<T>& p, const List<T>& list, int begin, int count) {
  constexpr int kLanes = kThreads / kTileRows;
  const int j = thread_x() / kLanes;
  load_row(to.from(j * p.stride), j < count ? p.keys.row(list, begin + j) : nullptr, p.width, p.vectors, thread_x() % kLanes, kLanes);
}

// out[a][b] = x row (h + a * kHeadStep) . key row (j + b * kKeyStep), each one chain.
template <int kA, int kB, int kHeadStep, int kKeyStep, typename X, typename T>
GPU_INLINE void dots(float (&out)[kA][kB], Shared<X> x, Shared<T> keys, int h, int j, int width, int stride) {
#pragma unroll
  for (int a = 0; a < kA; ++a)
#pragma unroll
    for (int b = 0; b < kB; ++b) out[a][b] = 0.0f;
#pragma unroll 2
  for (int i = 0; i < width; i += 4) {
    Vector<X, 4> xs[kA];
    Vector<T, 4> ks[kB];
#pragma unroll
    for (int a = 0; a < kA; ++a) xs[a] = x.template load_vector<4>((h + a * kHeadStep) * stride + i);
#pragma unroll
    for (int b = 0; b < kB; ++b) ks[b] = keys.template load_vector<4>((j + b * kKeyStep) * stride + i);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int a = 0; a < kA; ++a)
#pragma unroll
        for (int b = 0; b < kB; ++b) out[a][b] = fma(element(xs[a], k), element(ks[b], k), out[a][b]);
  }
}

// Outputs of a thread: 8 heads, and columns in kPieces vectors of kVector.
template <int kHeads>
struct Columns {
  static constexpr int kGroup = kThreads / (kHeads / kOuts);        // threads that share 8 heads
  static constexpr int kCount = kWidthMax / kGroup;                 // columns a thread
  static constexpr int kVector = kCount < 4 ? kCount : 4, kPieces = kCount / kVector;
  GPU_INLINE static int first_head() { return thread_x() / kGroup * kOuts; }
  GPU_INLINE static int column(int piece) { return (piece * kGroup + thread_x() % kGroup) * kVector; }
};

// acc[h][column] += weight[j][h] * row[j][column], j ascending.
template <int kHeads, typename T>
GPU_INLINE void add_rows(float (&acc)[kOuts][Columns<kHeads>::kCount], Shared<float> weight, Shared<T> rows, int count, int width, int stride) {
  using C = Columns<kHeads>;
  if (C::column(0) >= width) return;
  for (int j = 0; j < count; ++j) {
    const Vector<float, 4> w0 = weight.load_vector<4>(j * kHeads + C::first_head()), w1 = weight.load_vector<4>(j * kHeads + C::first_head() + 4);
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      if (C::column(piece) >= width) continue;
      const auto row = rows.template load_vector<C::kVector>(j * stride + C::column(piece));
#pragma unroll
      for (int v = 0; v < C::kVector; ++v)
#pragma unroll
        for (int h = 0; h < kOuts; ++h) acc[h][piece * C::kVector + v] = fma(h < 4 ? w0.v[h & 3] : w1.v[h & 3], to_f32(row.v[v]), acc[h][piece * C::kVector + v]);
    }
  }
}
// f(h, column, acc) for what a thread holds of a tile whose heads begin at `first`.
template <int kHeads, typename F>
GPU_INLINE void for_each_output(const float (&acc)[kOuts][Columns<kHeads>::kCount], int first, int heads, int width, F f) {
  using C = Columns<kHeads>;
#pragma unroll
  for (int h = 0; h < kOuts; ++h)
#pragma unroll
    for (int i = 0; i < C::kCount; ++i) {
      const int column = C::column(i / C::kVector) + i % C::kVector;
      if (first + C::first_head() + h < heads && column < width) f(C::first_head() + h, column, acc[h][i]);
    }
}

template <int kHeads>
constexpr size_t forward_shared_bytes(int stride, size_t element) {
  return static_cast<size_t>((kHeads + kTileRows) * stride) * element + (static_cast<size_t>(kHeads) * (kTileRows + 1)) * sizeof(float) + 64;
}

template <typename T, int kHeads>
GPU_KERNEL GPU_BOUNDS(kThreads, 1) attention_kernel(T* o, int o_stride, float* lse, int lse_stride, Problem<T> p) {
  constexpr int kA = kHeads == 32 ? 2 : 1, kB = kHeads == 8 ? 1 : 2, kKeyStep = kTileRows / kB, kHeadStep = kHeads / kA;
  SharedMemory memory;
  const Shared<T> q = memory.take<T>(kHeads * p.stride), rows = memory.take<T>(kTileRows * p.stride);
  const Shared<float> weight = memory.take<float>(kTileRows * kHeads), sums = memory.take<float>(kHeads);
  const int64_t t = block_x();
  const int first = block_y() * kHeads, j = thread_x() % kKeyStep, h = thread_x() / kKeyStep;
  const List<T> list = p.keys.list(t);
  const int n = list.size();
  load_heads<kHeads>(q, p.q + t * p.q_stride, first, p.heads, p.width, p.stride, p.vectors);

  float highest[kA], logit[kA][kB];
#pragma unroll
  for (int a = 0; a < kA; ++a) highest[a] = first + h + a * kHeadStep < p.heads ? p.sink[first + h + a * kHeadStep] : 0.0f;
  for (int begin = 0; begin < n; begin += kTileRows) {
    if (begin > 0) sync_block();
    load_tile(rows, p, list, begin, n - begin);
    sync_block();
    dots<kA, kB, kHeadStep, kKeyStep>(logit, q, rows, h, j, p.width, p.stride);
#pragma unroll
    for (int a = 0; a < kA; ++a)
#pragma unroll
      for (int b = 0; b < kB; ++b) {
        const float l = logit[a][b] * p.scale;
        if (begin + j + b * kKeyStep < n && l > highest[a]) highest[a] = l;
      }
  }
#pragma unroll
  for (int a = 0; a < kA; ++a)
    for (int width = kKeyStep / 2; width >= 1; width /= 2) {
      const float other = shuffle_xor(highest[a], width);
      highest[a] = other > highest[a] ? other : highest[a];
    }

  float acc[kOuts][Columns<kHeads>::kCount] = {}, sum = 0.0f;
  for (int begin = 0; begin < n; begin += kTileRows) {
    const int count = n - begin < kTileRows ? n - begin : kTileRows;
    if (n > kTileRows) {  // otherwise the rows are there
      sync_block();
      load_tile(rows, p, list, begin, count);
      sync_block();
      dots<kA, kB, kHeadStep, kKeyStep>(logit, q, rows, h, j, p.width, p.stride);
    }
#pragma unroll
    for (int a = 0; a < kA; ++a)
#pragma unroll
      for (int b = 0; b < kB; ++b) weight.store((j + b * kKeyStep) * kHeads + h + a * kHeadStep, exp_f32(logit[a][b] * p.scale - highest[a]));
    sync_block();
    if (thread_x() < kHeads)
      for (int i = 0; i < count; ++i) sum = sum + weight.load(i * kHeads + thread_x());
    add_rows<kHeads>(acc, weight, rows, count, p.width, p.stride);
  }
  // A head's maximum is with the threads of its logits, its sum with another one: they meet through `weight`.
  sync_block();
  if (j == 0)
#pragma unroll
    for (int a = 0; a < kA; ++a) weight.store(h + a * kHeadStep, highest[a]);
  sync_block();
  if (thread_x() < kHeads && first + thread_x() < p.heads) {
    const float m = weight.load(thread_x()), denominator = sum + exp_f32(p.sink[first + thread_x()] - m);
    sums.store(thread_x(), denominator);
    if (lse != nullptr) lse[t * lse_stride + first + thread_x()] = m + log_f32(denominator);
  }
  sync_block();
  T* const to = o + t * o_stride + static_cast<int64_t>(first) * p.width;
  for_each_output<kHeads>(acc, first, p.heads, p.width,
                          [&](int head, int column, float v) { to[head * p.width + column] = from_f32<T>(v / sums.load(head)); });
}

// dl and P of one (query, row, head); [query of the range][list row][head].
struct alignas(8) Weight {
  float dl, p;
};
template <int kHeads>
constexpr size_t backward_shared_bytes(int stride, size_t element) {
  return static_cast<size_t>((kHeads + kTileRows) * stride) * element + static_cast<size_t>(kHeads * stride) * sizeof(float) +
         static_cast<size_t>(kHeads) * (kTileRows + 1) * sizeof(float) + 64;
}

template <typename T, int kHeads>
GPU_KERNEL GPU_BOUNDS(kThreads, 1)
    attention_query_gradient_kernel(float* dq, int64_t dq_stride, Weight* weights, AttentionSinkTerm* sink_terms, const float* d_o, int64_t do_stride, const T* o, int64_t o_stride,
                                    const float* lse, int64_t lse_stride, int64_t begin_t, int longest, Problem<T> p) {
  constexpr int kB = kHeads == 8 ? 1 : 2, kKeyStep = kTileRows / kB;
  SharedMemory memory;
  const Shared<T> q = memory.take<T>(kHeads * p.stride), rows = memory.take<T>(kTileRows * p.stride);
  const Shared<float> grad = memory.take<float>(kHeads * p.stride), dl_tile = memory.take<float>(kTileRows * kHeads), deltas = memory.take<float>(kHeads);
  const int64_t t = begin_t + block_x();
  const int first = block_y() * kHeads, h = thread_x() % kHeads, j = thread_x() / kHeads;
  const bool mine = first + h < p.heads;
  const List<T> list = p.keys.list(t);
  const int n = list.size();
  load_heads<kHeads>(q, p.q + t * p.q_stride, first, p.heads, p.width, p.stride, p.vectors);
  load_heads<kHeads>(grad, d_o + t * do_stride, first, p.heads, p.width, p.stride, p.vectors);
  {  // delta = o . do: 16 threads a head
    const int head = thread_x() / kTreeLanes;
    const bool takes = head < kHeads && first + head < p.heads;
    const T* const output = o + t * o_stride + static_cast<int64_t>(first + head) * p.width;
    const float* const g = d_o + t * do_stride + static_cast<int64_t>(first + head) * p.width;
    const float delta = row_dot(takes ? p.width : 0, [&](int64_t i) { return to_f32(output[i]); }, [&](int64_t i) { return g[i]; });
    if (head < kHeads && row_lane() == 0) {
      deltas.store(head, delta);
      if (takes) sink_terms[t * p.heads + first + head] = {exp_f32(p.sink[first + head] - lse[t * lse_stride + first + head]), delta};
    }
  }
  const float log_denominator = mine ? lse[t * lse_stride + first + h] : 0.0f;
  float acc[kOuts][Columns<kHeads>::kCount] = {};
  for (int begin = 0; begin < n; begin += kTileRows) {
    const int count = n - begin < kTileRows ? n - begin : kTileRows;
    if (begin > 0) sync_block();
    load_tile(rows, p, list, begin, count);
    sync_block();
    float dot[1][kB], dp[1][kB];
    dots<1, kB, 1, kKeyStep>(dot, q, rows, h, j, p.width, p.stride);
    dots<1, kB, 1, kKeyStep>(dp, grad, rows, h, j, p.width, p.stride);
    const float delta = deltas.load(h);
#pragma unroll
    for (int b = 0; b < kB; ++b) {
      const int at = j + b * kKeyStep;
      const float weight = exp_f32(dot[0][b] * p.scale - log_denominator), dl = weight * (dp[0][b] - delta) * p.scale;
      dl_tile.store(at * kHeads + h, dl);
      if (mine && at < count) weights[(static_cast<int64_t>(block_x()) * longest + begin + at) * p.heads + first + h] = {dl, weight};
    }
    sync_block();
    add_rows<kHeads>(acc, dl_tile, rows, count, p.width, p.stride);
  }
  float* const to = dq + t * dq_stride + static_cast<int64_t>(first) * p.width;
  for_each_output<kHeads>(acc, first, p.heads, p.width, [&](int head, int column, float v) { to[head * p.width + column] = v; });
}

constexpr int kKeys = 8;            // rows whose gradients a block adds up
constexpr int kKeyThreads = 128;
constexpr int kKeyColumns = 2;      // a thread
constexpr int kQueries = kKeyThreads / kKeys;  // looked up at once

template <typename T>
struct KeyProblem {
  KeyRows<T> keys;
  float* grad;  // dkv, or dentries
  const T* q;
  const float* d_o;
  const Weight* weights;
  int grad_stride, q_stride, do_stride, begin, end;  // queries of this range
  int heads, longest, num_tokens;
};

// kEntries: entries of the pages; entry s of a sequence is found at its last token's row. Any `ratio` rows in succession hold the last token of one entry at most.
// Otherwise window rows.
template <typename T, bool kEntries>
GPU_KERNEL GPU_BOUNDS(kKeyThreads, 1) attention_key_gradient_kernel(KeyProblem<T> p) {
  SharedMemory memory;
  const Shared<int> last_token = memory.take<int>(kKeys), key_begin = memory.take<int>(kKeys), key_end = memory.take<int>(kKeys), key_row = memory.take<int>(kKeys),
                    index = memory.take<int>(kKeyThreads);
  const Shared<float> weight = memory.take<float>(2 * 2 * kKeys * p.heads);
  const auto& seq = p.keys.seq;
  const int width = p.keys.width, ratio = p.keys.ratio;

  if constexpr (kEntries) {
    if (thread_x() < kKeys) last_token.store(thread_x(), -1);
    sync_block();
    for (int i = thread_x(); i < kKeys * ratio; i += kKeyThreads) {
      const int64_t t = static_cast<int64_t>(block_x()) * kKeys * ratio + i;
      if (t < p.num_tokens && (seq.token_pos[t] + 1) % ratio == 0) last_token.store(i / ratio, static_cast<int>(t));
    }
    sync_block();
  }
  // Key i: the rows of the queries that may read it, and where its gradient is, or -1 where no query of this range reads it.
  if (thread_x() < kKeys) {
    const int t = kEntries ? last_token.load(thread_x()) : block_x() * kKeys + thread_x();
    int row = -1, end = 0;
    if (t >= 0 && t < p.num_tokens) {
      const int s = seq.token_seq[t];
      end = seq.seq_row[s + 1];
      if (!kEntries && t + p.keys.window < end) end = t + p.keys.window;
      if (end > p.begin && t < p.end) row = kEntries ? static_cast<int>(entry_row(seq, p.keys.per_page, s, (seq.token_pos[t] + 1) / ratio - 1)) : t;
    }
    key_begin.store(thread_x(), t);
    key_end.store(thread_x(), end);
    key_row.store(thread_x(), row);
  }
  sync_block();
  int begin = p.end, end = p.begin;
  float acc[kKeys][kKeyColumns];
  const int column = (block_y() * kKeyThreads + thread_x()) * kKeyColumns;
  const bool has_column = column < width;
  const int second = column + 1 < width ? 1 : 0;  // 0: the last column twice, one of which is not kept
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int row = key_row.load(i), first = key_begin.load(i), last = key_end.load(i);
    if (row >= 0) {
      begin = first < begin ? first : begin;
      end = last > end ? last : end;
    }
    const bool resumes = row >= 0 && has_column && (kEntries || first < p.begin);
    const float* const from = p.grad + static_cast<int64_t>(row) * p.grad_stride + column;
    acc[i][0] = resumes ? from[0] : 0.0f;
    acc[i][1] = resumes ? from[second] : 0.0f;
  }
  begin = begin < p.begin ? p.begin : begin;
  end = end > p.end ? p.end : end;

  const int my_begin = key_begin.load(thread_x() % kKeys), my_end = key_row.load(thread_x() % kKeys) < 0 ? 0 : key_end.load(thread_x() % kKeys);
  const int my_entry = kEntries && my_end > 0 ? (seq.token_pos[my_begin] + 1) / ratio - 1 : 0;
  for (int batch = begin; batch < end; batch += kQueries) {
    {  // the key's place in the list of each query, or -1
      const int t = batch + thread_x() / kKeys;
      int at = -1;
      if (t >= my_begin && t < my_end && t < end) {
        const int before = seq.token_pos[t] + 1, num_window = before < p.keys.window ? before : p.keys.window;
        if constexpr (!kEntries) {
          at = my_begin - (t - num_window + 1);
        } else if (p.keys.selected == nullptr) {
          at = num_window + my_entry;
        } else {
          const int32_t* const chosen = p.keys.selected + static_cast<int64_t>(t) * p.keys.selected_stride;  // ascending, then -1
          int low = 0, high = p.keys.num_selected;
          while (low < high) {
            const int mid = (low + high) / 2;
            if (chosen[mid] >= 0 && chosen[mid] < my_entry) low = mid + 1;
            else high = mid;
          }
          at = low < p.keys.num_selected && chosen[low] == my_entry ? num_window + low : -1;
        }
      }
      index.store(thread_x(), at);
    }
    sync_block();
    const int queries = end - batch < kQueries ? end - batch : kQueries;
    for (int i = 0; i < queries; ++i) {
      const int64_t t = batch + i;
      const Shared<float> w = weight.from((i & 1) * 2 * kKeys * p.heads);  // [head][dl of the keys, P of the keys]
      int present = 0;
#pragma unroll
      for (int k = 0; k < kKeys; ++k) present |= (index.load(i * kKeys + k) >= 0 ? 1 : 0) << k;
      if (present != 0) {
        const int k = thread_x() % kKeys, at = index.load(i * kKeys + k);
        const Weight* const from = p.weights + ((t - p.begin) * p.longest + at) * p.heads;
        for (int head = thread_x() / kKeys; head < p.heads; head += kKeyThreads / kKeys) {
          const Weight v = at < 0 ? Weight{0, 0} : from[head];
          w.store(head * 2 * kKeys + k, v.dl);
          w.store(head * 2 * kKeys + kKeys + k, v.p);
        }
      }
      sync_block();
      if (present == 0 || !has_column) continue;
      const T* const q = p.q + t * p.q_stride + column;
      const float* const g = p.d_o + t * p.do_stride + column;
      const auto add = [&](auto all) {
#pragma unroll 4
        for (int head = 0; head < p.heads; ++head) {
          const float x[kKeyColumns] = {to_f32(q[head * width]), to_f32(q[head * width + second])}, y[kKeyColumns] = {g[head * width], g[head * width + second]};
          Vector<float, 4> wv[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) wv[k] = w.load_vector<4>(head * 2 * kKeys + 4 * k);
#pragma unroll
          for (int k = 0; k < kKeys; ++k) {
            if (!decltype(all)::value && (present >> k & 1) == 0) continue;
#pragma unroll
            for (int v = 0; v < kKeyColumns; ++v) acc[k][v] = fma(wv[2 + k / 4].v[k % 4], y[v], fma(wv[k / 4].v[k % 4], x[v], acc[k][v]));
          }
        }
      };
      if (present == (1 << kKeys) - 1) add(std::true_type{});
      else add(std::false_type{});
    }
    sync_block();  // before `index` is written again
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int row = key_row.load(i);
    if (row < 0 || !has_column) continue;
    float* const to = p.grad + static_cast<int64_t>(row) * p.grad_stride + column;
    to[0] = acc[i][0];
    if (second == 1) to[1] = acc[i][1];
  }
}

// A chain over a sequence's tokens a head, then the sequences in order.
GPU_KERNEL GPU_BOUNDS(kChainThreads) attention_sink_parts_kernel(float* parts, const AttentionSinkTerm* terms, SequenceArrays seq, int heads) {
  const int s = block_x(), first = block_y() * kChainColumns, columns = heads - first < kChainColumns ? heads - first : kChainColumns;
  const int64_t begin = seq.seq_row[s];
  struct Quad {
    AttentionSinkTerm v[4];
  };
  const auto load = [&](int64_t t, int column) {
    const AttentionSinkTerm* const from = terms + (begin + t) * heads + first + column;
    Quad q = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < columns) q.v[i] = from[i];
    return q;
  };
  const auto terms_of = [](const Quad& q) {
    return ChainTerms{.a = {{-q.v[0].p, -q.v[1].p, -q.v[2].p, -q.v[3].p}}, .b = {{q.v[0].delta, q.v[1].delta, q.v[2].delta, q.v[3].delta}}};
  };
  const float part = chain_columns(0.0f, seq.seq_row[s + 1] - begin, columns, load, terms_of);
  if (thread_x() < columns) parts[static_cast<int64_t>(s) * heads + first + thread_x()] = part;
}
GPU_KERNEL attention_sink_gradient_kernel(float* dsink, const float* parts, int num_sequences, int heads) {
  const int h = block_x() * 32 + thread_x();
  if (h >= heads) return;
  float sum = dsink[h];
  in_order(num_sequences, [&](int s) { return parts[static_cast<int64_t>(s) * heads + h]; }, [&](float part) { sum = sum + part; });
  dsink[h] = sum;
}

bool at_multiples_of_4(ConstTensorView v) {
  return (reinterpret_cast<uintptr_t>(v.data) | static_cast<uintptr_t>(v.row_stride) * dtype_bytes(v.dtype)) % (4 * dtype_bytes(v.dtype)) == 0;
}

template <typename T>
Problem<T> problem(ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape) {
  GPU_CHECK(q.dim(2) <= kWidthMax, "attention: %ld channels a head, at most %d on the GPU", static_cast<long>(q.dim(2)), kWidthMax);
  Problem<T> p = {};
  p.keys = key_rows<T>(keys, seq, shape);
  p.q = q.ptr<T>(), p.q_stride = static_cast<int>(q.row_stride);
  p.sink = sink.ptr<float>();
  p.heads = static_cast<int>(q.dim(1)), p.width = static_cast<int>(q.dim(2));
  p.stride = ((p.width + 3) / 4 | 1) * 4;
  p.vectors = rows_at_multiples(p.keys, 4) && at_multiples_of_4(q);
  p.scale = shape.scale;
  return p;
}

template <typename T, int kHeads>
void forward(Context& c, TensorView o, TensorView lse, const SequenceView& seq, const Problem<T>& p) {
  launch(c, "attention",
         {.blocks = seq.num_tokens, .threads = kThreads, .blocks_y = blocks_for(p.heads, kHeads), .shared_bytes = forward_shared_bytes<kHeads>(p.stride, sizeof(T))},
         attention_kernel<T, kHeads>, o.ptr<T>(), static_cast<int>(o.row_stride), lse.data == nullptr ? nullptr : lse.ptr<float>(),
         static_cast<int>(lse.row_stride), p);
}
template <typename T>
void forward(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
             const AttentionShape& shape) {
  const Problem<T> p = problem<T>(q, keys, sink, seq, shape);
  p.heads <= 8 ? forward<T, 8>(c, o, lse, seq, p) : forward<T, 32>(c, o, lse, seq, p);
}

// Rows of the longest list of the call, or more.
int64_t longest_list(const AttentionKeys& keys, const SequenceView& seq, const AttentionShape& shape) {
  const int64_t visible = shape.ratio == 0 ? 0 : seq.longest / shape.ratio;
  return std::min(shape.window, seq.longest) + (keys.selected.data == nullptr ? visible : std::min(visible, keys.selected.dim(1)));
}

template <typename T, int kHeads>
void backward(Context& c, const AttentionBackward& v, const SequenceView& seq, const Problem<T>& p, AttentionSinkTerm* terms, int64_t longest, int64_t scratch_bytes) {
  const int64_t a_query = longest * p.heads * static_cast<int64_t>(sizeof(Weight));
  const int64_t range = std::clamp<int64_t>(scratch_bytes / a_query, 1, seq.num_tokens);
  ArenaScope scope(*c.workspace);
  auto* const weights = static_cast<Weight*>(c.workspace->allocate(static_cast<size_t>(range * a_query), "attention weights"));
  KeyProblem<T> k = {};
  k.keys = p.keys;
  k.q = p.q, k.q_stride = p.q_stride, k.d_o = v.d_o.ptr<float>(), k.do_stride = static_cast<int>(v.d_o.row_stride);
  k.weights = weights;
  k.heads = p.heads, k.longest = static_cast<int>(longest), k.num_tokens = static_cast<int>(seq.num_tokens);
  const Grid key_grid = {.threads = kKeyThreads,
                         .blocks_y = blocks_for(p.width, kKeyThreads * kKeyColumns),
                         .shared_bytes = sizeof(int) * (4 * kKeys + kKeyThreads) + sizeof(float) * static_cast<size_t>(4 * kKeys * p.heads) + 64};
  for (k.begin = 0; k.begin < seq.num_tokens; k.begin = k.end) {
    k.end = static_cast<int>(std::min(seq.num_tokens, k.begin + range));
    launch(c, "attention_query_gradient",
           {.blocks = k.end - k.begin,
            .threads = kThreads,
            .blocks_y = blocks_for(p.heads, kHeads),
            .shared_bytes = backward_shared_bytes<kHeads>(p.stride, sizeof(T))},
           attention_query_gradient_kernel<T, kHeads>, v.dq.ptr<float>(), v.dq.row_stride, weights, terms, k.d_o, k.do_stride, v.o.ptr<T>(), v.o.row_stride,
           v.lse.ptr<float>(), v.lse.row_stride, k.begin, k.longest, p);
    Grid grid = key_grid;
    grid.blocks = blocks_for(seq.num_tokens, kKeys);
    k.grad = v.dkv.ptr<float>(), k.grad_stride = static_cast<int>(v.dkv.row_stride);
    launch(c, "attention_key_gradient", grid, attention_key_gradient_kernel<T, false>, k);
    if (p.keys.ratio == 0 || seq.longest < p.keys.ratio) continue;
    grid.blocks = blocks_for(seq.num_tokens, kKeys * p.keys.ratio);
    k.grad = v.dentries.ptr<float>(), k.grad_stride = static_cast<int>(v.dentries.row_stride);
    launch(c, "attention_entry_gradient", grid, attention_key_gradient_kernel<T, true>, k);
  }
}
template <typename T>
void backward(Context& c, const AttentionBackward& v, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape,
              AttentionSinkTerm* terms, int64_t scratch_bytes) {
  Problem<T> p = problem<T>(v.q, keys, sink, seq, shape);
  p.vectors = p.vectors && at_multiples_of_4(v.d_o);
  const int64_t longest = longest_list(keys, seq, shape);
  p.heads <= 8 ? backward<T, 8>(c, v, seq, p, terms, longest, scratch_bytes) : backward<T, 16>(c, v, seq, p, terms, longest, scratch_bytes);
}

AttentionSinkTerm* make_sink_terms(Context& c, ConstTensorView q) {
  return static_cast<AttentionSinkTerm*>(c.workspace->allocate(sizeof(AttentionSinkTerm) * static_cast<size_t>(q.dim(0) * q.dim(1)), "attention sink terms"));
}
void sum_sinks(Context& c, TensorView dsink, const AttentionSinkTerm* terms, const SequenceView& seq) {
  const int heads = static_cast<int>(dsink.dim(0));
  const int64_t sequences = seq.num_sequences;
  const ArenaScope scope(*c.workspace);
  auto* const parts = static_cast<float*>(c.workspace->allocate(sizeof(float) * static_cast<size_t>(sequences * heads), "attention sink parts"));
  launch(c, "attention_sink_parts", {.blocks = sequences, .threads = kChainThreads, .blocks_y = blocks_for(heads, kChainColumns), .shared_bytes = kChainBytes},
         attention_sink_parts_kernel, parts, terms, arrays(seq), heads);
  launch(c, "attention_sink_gradient", {.blocks = blocks_for(heads, 32), .threads = 32}, attention_sink_gradient_kernel, dsink.ptr<float>(),
         static_cast<const float*>(parts), static_cast<int>(sequences), heads);
}

}  // namespace

void portable_attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                        const AttentionShape& shape) {
  q.dtype == DType::f32 ? forward<float>(c, o, lse, q, keys, sink, seq, shape) : forward<bf16>(c, o, lse, q, keys, sink, seq, shape);
}
bool attention_on_tensor_cores([[maybe_unused]] ConstTensorView o, [[maybe_unused]] ConstTensorView q, [[maybe_unused]] const AttentionKeys& keys) {
#if LOCKSTEP_GPU_CUDA
  return attention_sm90_takes(o, q, keys);
#else
  return false;
#endif
}
void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
               const AttentionShape& shape) {
#if LOCKSTEP_GPU_CUDA
  if (attention_on_tensor_cores(o, q, keys)) return attention_sm90(c, o, lse, q, keys, sink, seq, shape);
#endif
  portable_attention(c, o, lse, q, keys, sink, seq, shape);
}
void portable_attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum, ConstTensorView d_o,
                                 ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                                 const AttentionShape& shape, int64_t scratch_bytes) {
  const AttentionBackward v = {dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q};
  ArenaScope scope(*c.workspace);
  AttentionSinkTerm* const terms = make_sink_terms(c, q);
  q.dtype == DType::f32 ? backward<float>(c, v, keys, sink, seq, shape, terms, scratch_bytes) : backward<bf16>(c, v, keys, sink, seq, shape, terms, scratch_bytes);
  sum_sinks(c, dsink_accum, terms, seq);
}
void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum, ConstTensorView d_o, ConstTensorView o,
                        ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                        const AttentionShape& shape, int64_t scratch_bytes) {
#if LOCKSTEP_GPU_CUDA
  if (attention_on_tensor_cores(o, q, keys) && at_multiples_of_4(dq) && at_multiples_of_4(dkv) && at_multiples_of_4(dentries_accum) && at_multiples_of_4(d_o)) {
    ArenaScope scope(*c.workspace);
    AttentionSinkTerm* const terms = make_sink_terms(c, q);
    attention_backward_sm90(c, {dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q}, keys, sink, seq, shape, terms, longest_list(keys, seq, shape), scratch_bytes);
    return sum_sinks(c, dsink_accum, terms, seq);
  }
#endif
  portable_attention_backward(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape, scratch_bytes);
}

}  // namespace lockstep::device
