// The one product behind attention and the indexer, for the Highway target being compiled: weighted sums of f32 rows, many at
// once. Include after hwy/foreach_target.h, inside no namespace.

#if defined(LOCKSTEP_OPS_ROW_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOCKSTEP_OPS_ROW_PRODUCTS_INL_H_
#undef LOCKSTEP_OPS_ROW_PRODUCTS_INL_H_
#else
#define LOCKSTEP_OPS_ROW_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "core/context.h"
#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

// out[a][out_offset + x] = init + sum over b of weight[a * out_step + b * row_step] * row[b][row_offset + x],   x in [0, width)
// One fma chain over b ascending for every element, so neither the blocking nor the vector width shows in the bits. `init` is 0,
// or what is there with `accumulate`. weight_sum[a], if wanted, is the chain of plain additions of the weights of `a`. It serves
// the logits (rows are channels of transposed keys), the outputs and dq (rows are keys) and the key gradients (rows are queries).
struct RowProducts {
  const float* weight;
  int64_t out_step, row_step;
  const float* const* row;
  int64_t num_rows, row_offset;
  float* const* out;
  int64_t num_out, out_offset;
  int64_t width;
  bool accumulate = false;
  float* weight_sum = nullptr;
};

constexpr int64_t kLanes = static_cast<int64_t>(kF32Lanes);
constexpr int kProductOuts = kF32Lanes >= 16 ? 8 : 4;  // outputs held in registers, two vectors each; AVX2 has half the registers
constexpr int64_t kProductRows = 128;                  // rows of one pass: 128 rows of two vectors stay in the first cache

template <int kOuts, int kVectors, bool kTail, bool kSum>
HWY_NOINLINE void ProductBlock(const RowProducts& p, int64_t a0, int64_t b0, int64_t b1, int64_t x0, size_t tail) {
  const F32Tag d;
  using V = hn::Vec<F32Tag>;
  const auto mask = hn::FirstN(d, kTail ? tail : kF32Lanes);
  const auto load = [&](const float* from) HWY_ATTR { return kTail ? hn::MaskedLoad(mask, d, from) : hn::LoadU(d, from); };
  V acc[kOuts][kVectors], sum[kOuts];
  const bool resume = p.accumulate || b0 > 0;
  for (int a = 0; a < kOuts; ++a) {
    const float* out = p.out[a0 + a] + p.out_offset + x0;
    for (int v = 0; v < kVectors; ++v) acc[a][v] = resume ? load(out + v * kF32Lanes) : hn::Zero(d);
    if constexpr (kSum) sum[a] = b0 > 0 ? hn::Set(d, p.weight_sum[a0 + a]) : hn::Zero(d);
  }
  const float* weight = p.weight + a0 * p.out_step + b0 * p.row_step;
  const int64_t out_step = p.out_step, row_step = p.row_step, at = p.row_offset + x0;
  const float* const* HWY_RESTRICT rows = p.row;
  for (int64_t b = b0; b < b1; ++b, weight += row_step) {
    const float* row = rows[b] + at;
    V r[kVectors];
    for (int v = 0; v < kVectors; ++v) r[v] = load(row + v * kF32Lanes);
    const float* w = weight;
    for (int a = 0; a < kOuts; ++a, w += out_step) {
      const V wa = hn::Set(d, *w);
      for (int v = 0; v < kVectors; ++v) acc[a][v] = hn::MulAdd(wa, r[v], acc[a][v]);
      if constexpr (kSum) sum[a] = hn::Add(sum[a], wa);
    }
  }
  for (int a = 0; a < kOuts; ++a) {
    float* out = p.out[a0 + a] + p.out_offset + x0;
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kTail) hn::BlendedStore(acc[a][v], mask, d, out + v * kF32Lanes);
      else hn::StoreU(acc[a][v], d, out + v * kF32Lanes);
    }
    if constexpr (kSum) p.weight_sum[a0 + a] = hn::GetLane(sum[a]);
  }
}

template <int kVectors, bool kTail, bool kSum>
HWY_INLINE void ProductColumns(const RowProducts& p, int64_t b0, int64_t b1, int64_t x0, size_t tail) {
  int64_t a = 0;
  for (; a + kProductOuts <= p.num_out; a += kProductOuts)
    ProductBlock<kProductOuts, kVectors, kTail, kSum>(p, a, b0, b1, x0, tail);
  if (kProductOuts > 4 && a + 4 <= p.num_out) ProductBlock<4, kVectors, kTail, kSum>(p, a, b0, b1, x0, tail), a += 4;
  if (a + 2 <= p.num_out) ProductBlock<2, kVectors, kTail, kSum>(p, a, b0, b1, x0, tail), a += 2;
  if (a < p.num_out) ProductBlock<1, kVectors, kTail, kSum>(p, a, b0, b1, x0, tail);
}

template <bool kSum>
HWY_INLINE void ProductPass(const RowProducts& p, int64_t b0, int64_t b1, int64_t x0, int64_t x1) {
  int64_t x = x0;
  for (; x + 2 * kLanes <= x1; x += 2 * kLanes) ProductColumns<2, false, kSum>(p, b0, b1, x, 0);
  if (x + kLanes <= x1) ProductColumns<1, false, kSum>(p, b0, b1, x, 0), x += kLanes;
  if (x < x1) ProductColumns<1, true, kSum>(p, b0, b1, x, static_cast<size_t>(x1 - x));
}

inline void MultiplyRows(const RowProducts& p) {
  if (p.num_rows == 0) {
    for (int64_t a = 0; a < p.num_out; ++a) {
      if (!p.accumulate) std::fill_n(p.out[a] + p.out_offset, p.width, 0.0f);
      if (p.weight_sum != nullptr) p.weight_sum[a] = 0.0f;
    }
    return;
  }
  for (int64_t b0 = 0; b0 < p.num_rows; b0 += kProductRows) {
    const int64_t b1 = std::min(p.num_rows, b0 + kProductRows);
    if (p.weight_sum == nullptr) {
      ProductPass<false>(p, b0, b1, 0, p.width);
    } else {  // the sums ride along with the first block of columns
      const int64_t head = p.width >= 2 * kLanes ? 2 * kLanes : std::min(p.width, kLanes);
      ProductPass<true>(p, b0, b1, 0, head);
      ProductPass<false>(p, b0, b1, head, p.width);
    }
  }
}

inline void ConvertRow(float* to, const float* from, int64_t n) { std::copy_n(from, n, to); }
inline void ConvertRow(float* to, const bf16* from, int64_t n) {
  const F32Tag d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(LoadF32(d, from + i), d, to + i);
  for (; i < n; ++i) to[i] = to_f32(from[i]);
}

// n numbers in f32: themselves, or a copy.
inline const float* AsFloats(const float* x, int64_t, float*) { return x; }
inline const float* AsFloats(const bf16* x, int64_t n, float* copy) {
  ConvertRow(copy, x, n);
  return copy;
}

template <typename P>
P* Take(Arena& arena, int64_t n, std::string_view name) {
  return static_cast<P*>(arena.allocate(sizeof(P) * static_cast<size_t>(n), name));
}

// Queries are shared out in blocks: enough of them for every worker, none longer than a tile.
inline int64_t QueryBlock(const Context& c, int64_t num_queries, int64_t tile) {
  return c.num_threads() == 1 ? tile : std::clamp<int64_t>(num_queries / (4 * c.num_threads()), 1, tile);
}
// Early and late blocks alternate, so that equal shares of blocks are about equal work when lists grow with the position.
inline int64_t AlternatingBlock(int64_t i, int64_t num_blocks) { return i % 2 == 0 ? i / 2 : num_blocks - 1 - i / 2; }

// A transposed f32 copy of key rows (channel[i][j] is channel i of row j), and the rows themselves in f32, wherever they are.
struct KeyColumns {
  const float** channel = nullptr;  // [width]
  const float** row = nullptr;      // [capacity]
  float* transposed = nullptr;
  float* converted = nullptr;  // rows stored as bf16
  int64_t stride = 0;          // floats between channels
};

// Room for `capacity` rows. Products read up to a vector past the last one. An odd number of cache lines between channels spreads
// them over the sets of the cache.
template <typename T>
KeyColumns MakeKeyColumns(Arena& arena, int64_t capacity, int64_t width) {
  KeyColumns k;
  k.stride = ((capacity + kTreeLanes + 15) / 16 | 1) * 16;
  k.channel = Take<const float*>(arena, width, "key channels");
  k.row = Take<const float*>(arena, capacity, "key rows");
  k.transposed = Take<float>(arena, k.stride * width, "transposed keys");
  if constexpr (!std::is_same_v<T, float>) k.converted = Take<float>(arena, capacity * width, "f32 keys");
  for (int64_t i = 0; i < width; ++i) k.channel[i] = k.transposed + i * k.stride;
  return k;
}

// Sets columns [begin, end) from source(j), a pointer to the stored row j; the vector after them becomes zero.
template <typename T, typename Source>
void FillKeyColumns(KeyColumns& k, int64_t begin, int64_t end, int64_t width, const Source& source) {
  const hn::FixedTag<float, 4> d4;
  for (int64_t j = begin; j < end; ++j) {
    if constexpr (std::is_same_v<T, float>) {
      k.row[j] = source(j);
    } else {
      ConvertRow(k.converted + j * width, source(j), width);
      k.row[j] = k.converted + j * width;
    }
  }
  for (int64_t j = begin; j < end; j += 4) {  // the last step may repeat a row into columns that are not in use
    const float* r0 = k.row[j];
    const float* r1 = k.row[std::min(j + 1, end - 1)];
    const float* r2 = k.row[std::min(j + 2, end - 1)];
    const float* r3 = k.row[std::min(j + 3, end - 1)];
    float* to = k.transposed + j;
    int64_t i = 0;
    for (; i + 4 <= width; i += 4, to += 4 * k.stride) {
      const auto v0 = hn::LoadU(d4, r0 + i), v1 = hn::LoadU(d4, r1 + i), v2 = hn::LoadU(d4, r2 + i), v3 = hn::LoadU(d4, r3 + i);
      const auto low02 = hn::InterleaveLower(d4, v0, v2), low13 = hn::InterleaveLower(d4, v1, v3);
      const auto high02 = hn::InterleaveUpper(d4, v0, v2), high13 = hn::InterleaveUpper(d4, v1, v3);
      hn::StoreU(hn::InterleaveLower(d4, low02, low13), d4, to);
      hn::StoreU(hn::InterleaveUpper(d4, low02, low13), d4, to + k.stride);
      hn::StoreU(hn::InterleaveLower(d4, high02, high13), d4, to + 2 * k.stride);
      hn::StoreU(hn::InterleaveUpper(d4, high02, high13), d4, to + 3 * k.stride);
    }
    for (; i < width; ++i, to += k.stride) to[0] = r0[i], to[1] = r1[i], to[2] = r2[i], to[3] = r3[i];
  }
  const F32Tag d;
  for (int64_t i = 0; i < width; ++i) hn::StoreU(hn::Zero(d), d, k.transposed + i * k.stride + end);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
