// The register-tiled product behind matmul and its gradients; matmul_cpu.cc tells the plan.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/matmul_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "ops/fixed_math-inl.h"
#include "ops/matmul/matmul_cpu.h"

#ifndef LOCKSTEP_OPS_MATMUL_PRODUCT
#define LOCKSTEP_OPS_MATMUL_PRODUCT
namespace lockstep {

// c[r, n] = chain over ascending k of fma(a(r, k), b(k, n), .): what the forward and both backward products come down to.
enum class Left { rows, columns };   // a(r, k) is a[r * a_stride + k], or a[k * a_stride + r] (f32 only)
enum class Right { panels, rows };   // b(k, n) is in panel n / 16 of b, b_stride elements a panel, or b[k * b_stride + n]
struct Product {
  Left left;
  Right right;
  DType a_dtype, b_dtype, c_dtype;
  int64_t a_stride, b_stride, c_stride;
  int64_t n;            // columns of c
  bool accumulate;      // chains start from what c holds (f32 only)
  int64_t k_segment;    // 0, or the length of the chains that are summed
};

// One matrix product of a call; a grouped call has one an expert.
struct Problem {
  const void* a;
  const void* b;
  void* c;
  int64_t m;  // rows of c
  int64_t k;  // length of the chains
};

}  // namespace lockstep
#endif

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

using Vec = hn::Vec<F32Tag>;

// A tile is kTileRows x 2 panels with 32 registers (24 accumulators, 2 vectors of b, a broadcast) and kTileRows x 1 panel
// with 16 (12 accumulators, 2 and 1). Both leave far more chains in flight than the 8 that two FMA units of latency 4 need.
constexpr bool kWide = kF32Lanes == 16;
constexpr int kTileRows = kWide ? 12 : 6;
constexpr int64_t kBlockTiles = kWide ? 8 : 16;  // 96 rows: with kBlockK steps a block of a is 192 KiB, at home in L2
constexpr int64_t kBlockK = 512;                 // two panels of a block are 64 KiB, read once every tile
constexpr int64_t kChunkPanels = 32;             // a block of a is converted once every 512 columns, and chains rest in 192 KiB
constexpr int64_t kPackedPanels = 8;             // rows of b can be pages apart: 512 bytes of each are taken while it is at hand
constexpr int64_t kNearColumns = 256;            // columns of a are read in place when its rows are at most 1 KiB apart
constexpr int64_t kColumnStride = kWide ? 16 : 8;  // otherwise they are packed: floats a step, kTileRows and padding

// Few rows leave registers for more panels, and need them to have 8 chains in flight.
constexpr int max_panels(int64_t rows) {
  if (kWide) return rows <= 2 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// c[r, 0..16 * kPanels) over k steps. b points at step 0 of its first panel. from_zero starts the chains, otherwise c does. `next` is where the tile after
// this one finds its panels: they come from memory while this one computes, which a few rows' streams of b are too few to make the hardware do.
template <int kRows, int kPanels, Left kLeft, typename B>
void Tile(const float* HWY_RESTRICT a, int64_t a_stride, const B* HWY_RESTRICT b, int64_t b_stride, const B* next, int64_t k,
          float* HWY_RESTRICT c, int64_t c_stride, bool from_zero) {
  const F32Tag d;
  constexpr int kLanes = static_cast<int>(kF32Lanes), kPerPanel = static_cast<int>(kLaneVectors);
  constexpr int kVectors = kPanels * kPerPanel;
  Vec acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[r][v] = from_zero ? hn::Zero(d) : hn::LoadU(d, c + r * c_stride + v * kLanes);

  // The first k / kPanels steps fetch the next tile's first panel, and so on.
  constexpr int kLine = 64 / sizeof(B), kStepFetch = kPanels * static_cast<int>(kPanelWidth);
  for (int part = 0; part < kPanels; ++part) {
    const B* fetch = next + part * b_stride;
    for (int64_t i = part * k / kPanels, end = (part + 1) * k / kPanels; i < end; ++i) {
#pragma GCC unroll 8
      for (int line = 0; line < kStepFetch; line += kLine) hwy::Prefetch(fetch + line);
      fetch += kStepFetch;
      Vec bv[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) bv[v] = LoadF32(d, b + (v / kPerPanel) * b_stride + (v % kPerPanel) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec av = hn::Set(d, kLeft == Left::columns ? a[r] : a[r * a_stride]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
      }
      a += kLeft == Left::columns ? a_stride : 1;
      b += kPanelWidth;
    }
  }

#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) hn::StoreU(acc[r][v], d, c + r * c_stride + v * kLanes);
}

template <typename B>
using TileFunction = void (*)(const float*, int64_t, const B*, int64_t, const B*, int64_t, float*, int64_t, bool);

template <int kRows, int kPanels, Left kLeft, typename B>
constexpr TileFunction<B> tile_function() {
  if constexpr (kPanels <= max_panels(kRows)) return &Tile<kRows, kPanels, kLeft, B>;
  else return nullptr;
}

// [rows - 1][log2 panels]
template <Left kLeft, typename B, int... kRow>
constexpr auto make_tiles(std::integer_sequence<int, kRow...>) {
  return std::array<std::array<TileFunction<B>, 4>, kTileRows>{
      {{tile_function<kRow + 1, 1, kLeft, B>(), tile_function<kRow + 1, 2, kLeft, B>(), tile_function<kRow + 1, 4, kLeft, B>(),
        tile_function<kRow + 1, 8, kLeft, B>()}...}};
}
template <Left kLeft, typename B>
constexpr auto kTiles = make_tiles<kLeft, B>(std::make_integer_sequence<int, kTileRows>());

// Copies n values to f32 or from f32; a tail goes by fours and ones so that nothing past it is touched.
template <typename From, typename To>
HWY_INLINE void Convert(const From* HWY_RESTRICT from, To* HWY_RESTRICT to, int64_t n) {
  const F32Tag d;
  const hn::CappedTag<float, 4> d4;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kF32Lanes) <= n; i += kF32Lanes) StoreF32(d, LoadF32(d, from + i), to + i);
  for (; i + 4 <= n; i += 4) StoreF32(d4, LoadF32(d4, from + i), to + i);
  for (; i < n; ++i) to[i] = from_f32<To>(to_f32(from[i]));
}

// Steps [0, k) of panels [panel, panel + panels) of a row-major b, as f32 panels of k steps; zeros past column n.
template <typename B>
void PackRows(const B* HWY_RESTRICT b, int64_t b_stride, int64_t n, int64_t panel, int64_t panels, int64_t k,
              float* HWY_RESTRICT to) {
  const F32Tag d;
  const int64_t first = panel * kPanelWidth, columns = std::min(n - first, panels * kPanelWidth);
  const int64_t whole = columns / kPanelWidth, rest = columns % kPanelWidth;
  const int64_t panel_stride = k * kPanelWidth;
  b += first;
  for (int64_t i = 0; i < k; ++i, b += b_stride, to += kPanelWidth) {
    for (int64_t p = 0; p < whole; ++p)
      for (size_t v = 0; v < kLaneVectors; ++v)
        hn::Store(LoadF32(d, b + p * kPanelWidth + v * kF32Lanes), d, to + p * panel_stride + v * kF32Lanes);
    if (rest == 0) continue;
    float* last = to + whole * panel_stride;
    Convert(b + whole * kPanelWidth, last, rest);
    for (int64_t j = rest; j < kPanelWidth; ++j) last[j] = 0.0f;
  }
}

struct Scratch {
  float* a;    // a block of the left operand in f32
  float* b;    // a sliver of the right operand in f32
  float* c;    // chains of a block of columns when c cannot hold them (bf16, a last panel past n, segments)
  float* sum;  // sums of segments
};
struct ScratchSizes {
  int64_t a, b, c, sum;  // floats
  int64_t total() const { return a + b + c + sum; }
};

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
constexpr int64_t num_panels(int64_t n) { return (n + kPanelWidth - 1) / kPanelWidth; }
constexpr int64_t num_tiles(int64_t m) { return (m + kTileRows - 1) / kTileRows; }
// Rows are spread evenly over the tiles: 13 rows are 7 + 6, never 12 + 1.
constexpr int64_t tile_row(int64_t m, int64_t tiles, int64_t tile) { return tile * m / tiles; }

constexpr int64_t column_tile_stride(int64_t k) { return k * kColumnStride + 16; }
bool holds_chains(const Product& s) { return s.c_dtype == DType::bf16 || s.n % kPanelWidth != 0 || s.k_segment > 0; }

ScratchSizes scratch_sizes(const Product& s, const Problem* problems, int64_t count, int64_t block_tiles) {
  ScratchSizes need{};
  for (int64_t e = 0; e < count; ++e) {
    const Problem& p = problems[e];
    const int64_t tiles = std::min(num_tiles(p.m), block_tiles), rows = std::min(p.m, tiles * kTileRows);
    const int64_t k = std::min(p.k, kBlockK);
    const int64_t columns = std::min(num_panels(s.n), kChunkPanels) * kPanelWidth;
    if (s.left == Left::columns) need.a = std::max(need.a, s.a_stride > kNearColumns ? tiles * column_tile_stride(k) : 0);
    else if (s.a_dtype == DType::bf16) need.a = std::max(need.a, rows * (round_up(k, 16) + 16));
    if (s.right == Right::rows) need.b = std::max(need.b, k * std::min(num_panels(s.n), kPackedPanels) * kPanelWidth);
    if (holds_chains(s)) need.c = std::max(need.c, rows * columns);
    if (s.k_segment > 0) need.sum = std::max(need.sum, rows * columns);
  }
  for (int64_t* x : {&need.a, &need.b, &need.c, &need.sum}) *x = round_up(*x, 16);
  return need;
}

// One block of the left operand, ready for tiles.
struct LeftBlock {
  const float* data;
  int64_t stride;       // between rows, or between steps of columns
  int64_t tile_stride;  // between tiles of packed columns, 0 for others
};

LeftBlock PrepareLeft(const Product& s, const Problem& p, int64_t tiles, int64_t tile0, int64_t tile1, int64_t k0, int64_t k,
                      float* to) {
  const int64_t row0 = tile_row(p.m, tiles, tile0), rows = tile_row(p.m, tiles, tile1) - row0;
  if (s.left == Left::rows) {
    const int64_t at = row0 * s.a_stride + k0;
    if (s.a_dtype == DType::f32) return {static_cast<const float*>(p.a) + at, s.a_stride, 0};
    const bf16* from = static_cast<const bf16*>(p.a) + at;
    const int64_t stride = round_up(k, 16) + 16;  // not a multiple of 4 KiB: 12 rows would share one set of L1
    for (int64_t r = 0; r < rows; ++r) Convert(from + r * s.a_stride, to + r * stride, k);
    return {to, stride, 0};
  }
  const float* from = static_cast<const float*>(p.a) + k0 * s.a_stride;
  if (s.a_stride <= kNearColumns) return {from + row0, s.a_stride, 0};
  // Gather each tile's columns, kColumnStride floats a step. A copy may run past the tile's columns, not past the matrix.
  const hn::CappedTag<float, kColumnStride> d;
  const int64_t tile_stride = column_tile_stride(k), readable = (p.k - k0 - 1) * s.a_stride + p.m;
  for (int64_t i = 0; i < k; ++i)
    for (int64_t t = tile0; t < tile1; ++t) {
      const int64_t first = tile_row(p.m, tiles, t), at = i * s.a_stride + first;
      float* out = to + (t - tile0) * tile_stride + i * kColumnStride;
      if (at + kColumnStride <= readable) hn::StoreU(hn::LoadU(d, from + at), d, out);
      else std::memcpy(out, from + at, static_cast<size_t>(tile_row(p.m, tiles, t + 1) - first) * sizeof(float));
    }
  return {to, kColumnStride, tile_stride};
}

template <Left kLeft, typename B>
HWY_INLINE void RunTiles(const LeftBlock& a, const B* b, int64_t b_stride, const B* next, int64_t k, float* c, int64_t c_stride,
                         bool from_zero, int64_t m, int64_t tiles, int64_t tile0, int64_t tile1, int64_t panels) {
  const int log2_panels = std::countr_zero(static_cast<uint64_t>(panels));
  const int64_t row0 = tile_row(m, tiles, tile0);
  for (int64_t t = tile0; t < tile1; ++t) {
    const int64_t first = tile_row(m, tiles, t), rows = tile_row(m, tiles, t + 1) - first;
    const float* left = a.tile_stride > 0 ? a.data + (t - tile0) * a.tile_stride
                                          : a.data + (first - row0) * (kLeft == Left::columns ? 1 : a.stride);
    float* out = c + (first - row0) * c_stride;
    kTiles<kLeft, B>[rows - 1][log2_panels](left, a.stride, b, b_stride, t == tile0 ? next : b, k, out, c_stride, from_zero);
  }
}

// Tiles [tile0, tile1) of the rows of problem p, panels [panel0, panel1) of its columns.
void RunBlock(const Product& s, const Problem& p, const Scratch& scratch, int64_t tiles, int64_t tile0, int64_t tile1,
              int64_t panel0, int64_t panel1) {
  const int64_t row0 = tile_row(p.m, tiles, tile0), rows = tile_row(p.m, tiles, tile1) - row0;
  const int64_t panels_max = max_panels((p.m + tiles - 1) / tiles);
  const bool segmented = s.k_segment > 0;
  float* const c_f32 = s.c_dtype == DType::f32 ? static_cast<float*>(p.c) : nullptr;

  for (int64_t chunk = panel0; chunk < panel1; chunk += kChunkPanels) {
    const int64_t chunk_end = std::min(panel1, chunk + kChunkPanels);
    for (int64_t k0 = 0, k1 = 0; k0 < p.k; k0 = k1) {
      const int64_t segment_end = segmented ? std::min(p.k, (k0 / s.k_segment + 1) * s.k_segment) : p.k;
      k1 = std::min(segment_end, k0 + kBlockK);
      const int64_t k = k1 - k0;
      const bool chain_begins = segmented ? k0 % s.k_segment == 0 : k0 == 0;
      const LeftBlock left = PrepareLeft(s, p, tiles, tile0, tile1, k0, k, scratch.a);

      for (int64_t q = chunk, panels = 0; q < chunk_end; q += panels) {
        panels = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::min(panels_max, chunk_end - q))));
        const int64_t column = q * kPanelWidth, columns = std::min(panels * kPanelWidth, s.n - column);

        // Where the chains rest: c itself when it is f32 and whole panels fit.
        const bool direct = c_f32 != nullptr && columns == panels * kPanelWidth && !segmented;
        float* chains = direct ? c_f32 + row0 * s.c_stride + column : scratch.c + (q - chunk) * kPanelWidth;
        const int64_t chains_stride = direct ? s.c_stride : (chunk_end - chunk) * kPanelWidth;
        if (!direct && chain_begins && s.accumulate)
          for (int64_t r = 0; r < rows; ++r)
            Convert(c_f32 + (row0 + r) * s.c_stride + column, chains + r * chains_stride, columns);
        const bool from_zero = chain_begins && !s.accumulate;

        const auto tiles_with = [&]<Left kLeft, typename B>(const B* right, int64_t right_stride, const B* next) {
          RunTiles<kLeft>(left, right, right_stride, next, k, chains, chains_stride, from_zero, p.m, tiles, tile0, tile1, panels);
        };
        if (s.right == Right::panels) {
          const bool last = q + panels == chunk_end;  // of this chunk at k0
          const int64_t at = q * s.b_stride + k0 * kPanelWidth;
          const int64_t next = last && k1 < p.k ? chunk * s.b_stride + k1 * kPanelWidth : (q + panels) * s.b_stride + (last ? 0 : k0 * kPanelWidth);
          const auto panels_of = [&]<typename B>(const B* b) { tiles_with.template operator()<Left::rows>(b + at, s.b_stride, b + next); };
          if (s.b_dtype == DType::f32) panels_of(static_cast<const float*>(p.b));
          else panels_of(static_cast<const bf16*>(p.b));
        } else {
          const int64_t packed = (q - chunk) % kPackedPanels;
          if (packed == 0) {
            const int64_t count = std::min(kPackedPanels, chunk_end - q), at = k0 * s.b_stride;
            if (s.b_dtype == DType::f32) PackRows(static_cast<const float*>(p.b) + at, s.b_stride, s.n, q, count, k, scratch.b);
            else PackRows(static_cast<const bf16*>(p.b) + at, s.b_stride, s.n, q, count, k, scratch.b);
          }
          const float* right = scratch.b + packed * k * kPanelWidth;
          if (s.left == Left::rows) tiles_with.template operator()<Left::rows>(right, k * kPanelWidth, right);
          else tiles_with.template operator()<Left::columns>(right, k * kPanelWidth, right);
        }
        if (direct) continue;

        // Results out of scratch: a segment that ended joins its sum, and after the last step rows are rounded into c.
        float* result = chains;
        if (segmented) {
          const F32Tag d;
          result = scratch.sum + (q - chunk) * kPanelWidth;
          if (k1 == segment_end)
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t j = 0; j < panels * kPanelWidth; j += kF32Lanes) {
                float* sum = result + r * chains_stride + j;
                const Vec before = segment_end <= s.k_segment ? hn::Zero(d) : hn::LoadU(d, sum);
                hn::StoreU(hn::Add(before, hn::LoadU(d, chains + r * chains_stride + j)), d, sum);
              }
        }
        if (k1 < p.k) continue;
        for (int64_t r = 0; r < rows; ++r) {
          const float* from = result + r * chains_stride;
          const int64_t at = (row0 + r) * s.c_stride + column;
          if (c_f32 != nullptr) Convert(from, c_f32 + at, columns);
          else Convert(from, static_cast<bf16*>(p.c) + at, columns);
        }
      }
    }
  }
}

// Cuts all problems into blocks of rows and pairs of panels, weighs each by its work, and gives every worker a run of equal
// weight: experts of unequal size then keep all workers busy within one loop.
void RunProduct(Context& c, const Product& s, const Problem* problems, int64_t count) {
  const int64_t pairs = (num_panels(s.n) + 1) / 2;
  int64_t tiles_total = 0, work_total = 0;  // work: (tile, pair, step) triples
  for (int64_t e = 0; e < count; ++e) {
    tiles_total += num_tiles(problems[e].m);
    work_total += num_tiles(problems[e].m) * pairs * problems[e].k;
  }
  if (work_total == 0) return;
  // Blocks as tall as the caches like, but low enough that every thread gets about four pieces.
  const int threads = c.num_threads();
  const int64_t block_tiles =
      threads == 1 ? kBlockTiles : std::clamp(tiles_total * pairs / (4 * threads), int64_t{1}, kBlockTiles);

  ArenaScope scope(*c.workspace);
  const ScratchSizes sizes = scratch_sizes(s, problems, count, block_tiles);
  float* base = nullptr;
  if (sizes.total() > 0)
    base = c.workspace->tensor(DType::f32, {threads, sizes.total()}, "matmul blocks").ptr<float>();

  // In parallel_for's unit of about 1/3 ns: a step of a full tile is 12 cycles; of a one-row tile 64 bytes of w, about as long.
  constexpr int64_t kStepCost = 10;
  parallel_for(c, work_total, kStepCost, [&](int64_t begin, int64_t end, int worker) {
    float* at = base + worker * sizes.total();
    const Scratch scratch{at, at + sizes.a, at + sizes.a + sizes.b, at + sizes.a + sizes.b + sizes.c};
    int64_t first = 0;  // work before this block
    for (int64_t e = 0; e < count && first < end; ++e) {
      const Problem& p = problems[e];
      if (p.m == 0 || p.k == 0) continue;
      const int64_t tiles = num_tiles(p.m), blocks = (tiles + block_tiles - 1) / block_tiles;
      for (int64_t b = 0; b < blocks && first < end; ++b) {
        const int64_t tile0 = b * tiles / blocks, tile1 = (b + 1) * tiles / blocks;
        const int64_t pair_work = (tile1 - tile0) * p.k;
        // Ours are the pairs of this block whose work begins in [begin, end).
        const int64_t pair0 = std::clamp((begin - first + pair_work - 1) / pair_work, int64_t{0}, pairs);
        const int64_t pair1 = std::clamp((end - first + pair_work - 1) / pair_work, int64_t{0}, pairs);
        if (pair0 < pair1)
          RunBlock(s, p, scratch, tiles, tile0, tile1, pair0 * 2, std::min(pair1 * 2, num_panels(s.n)));
        first += pairs * pair_work;
      }
    }
  });
}

// One panel from up to 16 rows: squares of 128-bit vectors are transposed by log2(lanes) rounds of a perfect shuffle.
template <typename T>
void PackPanel(T* HWY_RESTRICT to, const T* HWY_RESTRICT rows, int64_t row_stride, int64_t num_rows, int64_t k) {
  constexpr int kLanes = 16 / sizeof(T);  // 16 bytes of a code: one whole panel
  const hn::CappedTag<T, kLanes> d;
  using V = hn::Vec<decltype(d)>;
  for (int64_t j0 = 0; j0 < kPanelWidth; j0 += kLanes) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
      V v[kLanes], w[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) v[j] = j0 + j < num_rows ? hn::LoadU(d, rows + (j0 + j) * row_stride + i) : hn::Zero(d);
#pragma GCC unroll 8
      for (int round = 1; round < kLanes; round *= 2) {
#pragma GCC unroll 16
        for (int j = 0; j < kLanes / 2; ++j) {
          w[2 * j] = hn::InterleaveLower(d, v[j], v[j + kLanes / 2]);
          w[2 * j + 1] = hn::InterleaveUpper(d, v[j], v[j + kLanes / 2]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) v[j] = w[j];
      }
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) hn::StoreU(v[j], d, to + (i + j) * kPanelWidth + j0);
    }
    for (; i < k; ++i)
      for (int j = 0; j < kLanes; ++j) to[i * kPanelWidth + j0 + j] = j0 + j < num_rows ? rows[(j0 + j) * row_stride + i] : T{0};
  }
}

// [experts, n, k] rows to [experts, panels, k, 16]; T is the storage's unsigned integer.
template <typename T>
void PackAll(Context& c, void* panels, const void* rows, int64_t experts, int64_t n, int64_t k, int64_t expert_stride,
             int64_t row_stride) {
  const int64_t per_expert = num_panels(n);
  parallel_for(c, experts * per_expert, k * kPanelWidth, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / per_expert, first = i % per_expert * kPanelWidth;
      const T* from = static_cast<const T*>(rows) + e * expert_stride + first * row_stride;
      PackPanel(static_cast<T*>(panels) + i * k * kPanelWidth, from, row_stride, std::min(n - first, kPanelWidth), k);
    }
  });
}

void RunPack(Context& c, TensorView panels, ConstTensorView rows) {
  const bool grouped = rows.shape.rank == 3;
  const int64_t experts = grouped ? rows.shape[0] : 1, n = rows.shape[grouped], k = rows.shape[grouped + 1];
  const int64_t row_stride = grouped ? k : rows.row_stride;
  if (experts * n * k == 0) return;
  if (rows.dtype == DType::f32) PackAll<uint32_t>(c, panels.data, rows.data, experts, n, k, rows.row_stride, row_stride);
  else if (dtype_bytes(rows.dtype) == 1) PackAll<uint8_t>(c, panels.data, rows.data, experts, n, k, rows.row_stride, row_stride);
  else PackAll<uint16_t>(c, panels.data, rows.data, experts, n, k, rows.row_stride, row_stride);
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::simd {

HWY_EXPORT(RunProduct);
HWY_EXPORT(RunPack);

namespace {

const void* plus(const void* data, DType dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * static_cast<int64_t>(dtype_bytes(dtype));
}
void* plus(void* data, DType dtype, int64_t elements) {
  return static_cast<char*>(data) + elements * static_cast<int64_t>(dtype_bytes(dtype));
}

void zero_rows(TensorView v) {
  for (int64_t r = 0; r < v.rows(); ++r)
    std::memset(plus(v.data, v.dtype, r * v.row_stride), 0, static_cast<size_t>(v.shape[1]) * dtype_bytes(v.dtype));
}

void run(Context& c, const Product& s, const Problem* problems, int64_t count) {
  HWY_DYNAMIC_DISPATCH(RunProduct)(c, s, problems, count);
}

// The view's own panels, or fresh ones in the workspace, which the caller's scope releases.
ConstTensorView panels_of(Context& c, const WeightView& w) {
  if (!w.panels.empty()) return w.panels;
  const TensorView panels = c.workspace->tensor(w.rows.dtype, panel_shape(w.rows.shape), "matmul panels");
  simd::pack_panels(c, panels, w.rows);
  return panels;
}

Product forward_product(TensorView y, ConstTensorView x, const WeightView& w, int64_t n, int64_t panel_stride,
                        int64_t k_segment) {
  return {.left = Left::rows, .right = Right::panels, .a_dtype = x.dtype, .b_dtype = w.rows.dtype, .c_dtype = y.dtype,
          .a_stride = x.row_stride, .b_stride = panel_stride, .c_stride = y.row_stride, .n = n, .accumulate = false,
          .k_segment = k_segment};
}
Product input_product(TensorView dx, ConstTensorView dy, const WeightView& w, int64_t w_stride, int64_t k, bool accumulate) {
  return {.left = Left::rows, .right = Right::rows, .a_dtype = DType::f32, .b_dtype = w.rows.dtype, .c_dtype = DType::f32,
          .a_stride = dy.row_stride, .b_stride = w_stride, .c_stride = dx.row_stride, .n = k, .accumulate = accumulate,
          .k_segment = 0};
}
Product weight_product(ConstTensorView dy, ConstTensorView x, int64_t dw_stride) {
  return {.left = Left::columns, .right = Right::rows, .a_dtype = DType::f32, .b_dtype = x.dtype, .c_dtype = DType::f32,
          .a_stride = dy.row_stride, .b_stride = x.row_stride, .c_stride = dw_stride, .n = x.shape[1], .accumulate = true,
          .k_segment = 0};
}

Problem* make_problems(Context& c, int64_t count) {
  return static_cast<Problem*>(c.workspace->allocate(static_cast<size_t>(count) * sizeof(Problem), "matmul experts"));
}

}  // namespace

void pack_panels(Context& c, TensorView panels, ConstTensorView rows) { HWY_DYNAMIC_DISPATCH(RunPack)(c, panels, rows); }

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) {
  const int64_t n = w.rows.shape[0], k = w.rows.shape[1];
  if (k == 0) return zero_rows(y);
  if (y.shape.elements() == 0) return;
  ArenaScope scope(*c.workspace);
  const ConstTensorView panels = panels_of(c, w);
  const Problem p{x.data, panels.data, y.data, y.rows(), k};
  run(c, forward_product(y, x, w, n, panels.row_stride, k_segment), &p, 1);
}

void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate) {
  const int64_t n = w.rows.shape[0], k = w.rows.shape[1];
  if (n == 0 && !accumulate) return zero_rows(dx);
  const Problem p{dy.data, w.rows.data, dx.data, dx.rows(), n};
  run(c, input_product(dx, dy, w, w.rows.row_stride, k, accumulate), &p, 1);
}

void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x) {
  const Problem p{dy.data, x.data, dw_accum.data, dw_accum.rows(), x.rows()};
  run(c, weight_product(dy, x, dw_accum.row_stride), &p, 1);
}

void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) {
  const int64_t experts = w.rows.shape[0], n = w.rows.shape[1], k = w.rows.shape[2];
  if (k == 0) return zero_rows(y);
  if (y.shape.elements() == 0) return;
  ArenaScope scope(*c.workspace);
  const ConstTensorView panels = panels_of(c, w);
  const int32_t* at = offsets.ptr<int32_t>();
  Problem* problems = make_problems(c, experts);
  for (int64_t e = 0; e < experts; ++e)
    problems[e] = {plus(x.data, x.dtype, at[e] * x.row_stride), plus(panels.data, panels.dtype, e * panels.row_stride),
                   plus(y.data, y.dtype, at[e] * y.row_stride), at[e + 1] - at[e], k};
  run(c, forward_product(y, x, w, n, k * kPanelWidth, 0), problems, experts);
}

void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets,
                                   bool accumulate) {
  const int64_t experts = w.rows.shape[0], n = w.rows.shape[1], k = w.rows.shape[2];
  if (n == 0 && !accumulate) return zero_rows(dx);
  if (dx.shape.elements() == 0) return;
  ArenaScope scope(*c.workspace);
  const int32_t* at = offsets.ptr<int32_t>();
  Problem* problems = make_problems(c, experts);
  for (int64_t e = 0; e < experts; ++e)
    problems[e] = {plus(dy.data, dy.dtype, at[e] * dy.row_stride), plus(w.rows.data, w.rows.dtype, e * w.rows.row_stride),
                   plus(dx.data, dx.dtype, at[e] * dx.row_stride), at[e + 1] - at[e], n};
  run(c, input_product(dx, dy, w, k, k, accumulate), problems, experts);
}

void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                                    ConstTensorView offsets) {
  const int64_t experts = dw_accum.shape[0];
  if (x.shape.elements() == 0 || dy.shape.elements() == 0) return;
  ArenaScope scope(*c.workspace);
  const int32_t* at = offsets.ptr<int32_t>();
  Problem* problems = make_problems(c, experts);
  for (int64_t e = 0; e < experts; ++e)
    problems[e] = {plus(dy.data, dy.dtype, at[e] * dy.row_stride), plus(x.data, x.dtype, at[e] * x.row_stride),
                   plus(dw_accum.data, dw_accum.dtype, e * dw_accum.row_stride), dw_accum.shape[1], at[e + 1] - at[e]};
  run(c, weight_product(dy, x, dw_accum.shape[2]), problems, experts);
}

}  // namespace lockstep::simd
#endif  // HWY_ONCE
