// The product with quantised weights. Tiles and blocks are those of matmul_simd.cc; what differs:
//   x is quantised once a call (ops/quantize), a block of its codes decoded to f32 for its tiles, its scales spread to the weight's blocks.
//   w is read from panels of codes, 1 or 1/2 byte a weight. A single tile of rows decodes them in registers, where that is hidden behind
//   memory; more tiles share a block decoded into scratch.
//   a chain runs over the codes of one block of columns, from zero, in registers; at its end sum = fma(chain, sx * sw, sum), sums resting
//   where matmul_simd.cc rests its chains.
// Decoding E4M3 goes through f16, which has room for all of it, sub-normals included: the bits moved up by 7 are value * 2^-8. E2M1 is a table
// of 16 integers, value * 2. pack_panel_scales makes up for these powers of two, exactly.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/matmul_quantized_simd.cc"
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

#ifndef LOCKSTEP_OPS_MATMUL_QUANTIZED
#define LOCKSTEP_OPS_MATMUL_QUANTIZED
namespace lockstep {

// Columns of the weight that share a scale.
struct ColumnBlock {
  int64_t begin, end;
  int64_t x_block;    // the block of x that holds them
  bool ends_segment;
};

struct QuantizedProduct {
  DType codes, y_dtype;
  int64_t x_stride, x_scale_stride;          // elements between rows
  int64_t panel_stride, panel_scale_stride;  // elements between panels
  int64_t y_stride;
  int64_t n;
  bool segmented;
  const ColumnBlock* blocks;
  int64_t num_blocks;
};

// One matrix product of a call; a grouped call has one an expert.
struct QuantizedProblem {
  const e4m3* x;
  const ue8m0* x_scales;
  const uint8_t* panels;
  const float* panel_scales;
  void* y;
  int64_t m;
};

}  // namespace lockstep
#endif

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

using Vec = hn::Vec<F32Tag>;

// As in matmul_simd.cc.
constexpr bool kWide = kF32Lanes == 16;
constexpr int kTileRows = kWide ? 12 : 6;
constexpr int64_t kBlockTiles = kWide ? 8 : 16;
constexpr int64_t kBlockK = 512;
constexpr int64_t kBlocksMax = 32;  // blocks of columns in kBlockK, when they are short
constexpr int64_t kChunkPanels = 32;
constexpr int kPanelsMax = 8;
constexpr int max_panels(int64_t rows) {
  if (kWide) return rows <= 2 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// Columns [v * lanes, ...) of step i of a panel, i even or odd as kOdd says.
template <int kOdd>
HWY_INLINE Vec LoadStep(F32Tag d, const float* panel, int64_t i, int v) {
  return hn::LoadU(d, panel + i * kPanelWidth + v * static_cast<int>(kF32Lanes));
}
// 16-bit lanes: those of one f32 vector, or of two.
template <class D16>
HWY_INLINE hn::Vec<hn::Rebind<hwy::float16_t, D16>> DecodeE4m3ToHalf(D16 d16, const e4m3* p) {  // value * 2^-8
  const hn::Rebind<int8_t, D16> d8;
  const hn::Rebind<hwy::float16_t, D16> half;
  const auto code = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(p)));
  const auto bits = hn::And(hn::ShiftLeft<7>(code), hn::Set(d16, static_cast<int16_t>(0xbf80)));
  // One more than the largest magnitude carries into bit 14, and only NaN is there: with it the exponent is all ones.
  const auto nan = hn::Add(bits, hn::Set(d16, 0x80));
  return hn::BitCast(half, hn::OrAnd(bits, nan, hn::Set(d16, 0x4000)));
}
HWY_INLINE Vec DecodeE4m3(F32Tag d, const e4m3* p) { return hn::PromoteTo(d, DecodeE4m3ToHalf(hn::Rebind<int16_t, F32Tag>(), p)); }
template <int kOdd>
HWY_INLINE Vec LoadStep(F32Tag d, const e4m3* panel, int64_t i, int v) {
  return DecodeE4m3(d, panel + i * kPanelWidth + v * static_cast<int>(kF32Lanes));
}
template <int kOdd>
HWY_INLINE Vec LoadStep(F32Tag d, const e2m1x2* panel, int64_t i, int v) {  // value * 2
  alignas(16) static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const hn::Rebind<uint8_t, F32Tag> d8;
  const hn::Rebind<int8_t, F32Tag> s8;
  const hn::Rebind<int32_t, F32Tag> d32;
  auto two = hn::LoadU(d8, reinterpret_cast<const uint8_t*>(panel) + i / 2 * kPanelWidth + v * static_cast<int>(kF32Lanes));
  if constexpr (kOdd != 0) two = hn::ShiftRight<4>(two);
  const auto code = hn::And(two, hn::Set(d8, 15));
  const auto table = hn::Load(hn::Full128<int8_t>(), kTwice);
  return hn::ConvertTo(d, hn::PromoteTo(d32, hn::BitCast(s8, hn::TableLookupBytes(table, code))));
}

// The panels of codes that the next tiles read, fetched from memory while this one computes, as in matmul_simd.cc.
struct Ahead {
  const uint8_t* codes;
  int64_t stride, step;  // bytes
};

// sum[r, 0..16 * kPanels) over `count` blocks of columns. a: codes of x; a_scale: their scales, a column a block. b points at the first block's
// first step of its first panel. from_zero starts the sums, otherwise what is there does.
template <int kRows, int kPanels, typename B>
void Tile(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT a_scale, int64_t a_scale_stride, const B* HWY_RESTRICT b,
          int64_t b_stride, const float* HWY_RESTRICT b_scale, int64_t b_scale_stride, const ColumnBlock* blocks, int64_t count,
          const Ahead& ahead, float* HWY_RESTRICT sum, int64_t sum_stride, bool from_zero) {
  const F32Tag d;
  constexpr int kLanes = static_cast<int>(kF32Lanes), kPerPanel = static_cast<int>(kLaneVectors);
  constexpr int kVectors = kPanels * kPerPanel;
  const int64_t first = blocks[0].begin;
  for (int64_t block = 0; block < count; ++block) {
    Vec acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::Zero(d);

    const auto step = [&]<int kOdd>(int64_t i) HWY_ATTR {
      Vec bv[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) bv[v] = LoadStep<kOdd>(d, b + (v / kPerPanel) * b_stride, i, v % kPerPanel);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec av = hn::Set(d, a[r * a_stride + i]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
      }
    };
    const auto fetch = [&](int64_t i) {
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) hwy::Prefetch(ahead.codes + p * ahead.stride + i * ahead.step);
    };
    int64_t i = blocks[block].begin - first;  // even wherever codes are two a byte
    const int64_t end = blocks[block].end - first;
    if constexpr (std::is_same_v<B, e4m3> && kPerPanel == 1) {  // two steps of a panel are decoded at once
      const hn::Repartition<int16_t, F32Tag> d16;
      const hn::Rebind<hwy::float16_t, F32Tag> half;
      for (; i + 2 <= end; i += 2) {
        fetch(i);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          const auto two = DecodeE4m3ToHalf(d16, b + v * b_stride + i * kPanelWidth);
          const Vec even = hn::PromoteTo(d, hn::LowerHalf(two)), odd = hn::PromoteTo(d, hn::UpperHalf(half, two));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            acc[r][v] = hn::MulAdd(hn::Set(d, a[r * a_stride + i]), even, acc[r][v]);
            acc[r][v] = hn::MulAdd(hn::Set(d, a[r * a_stride + i + 1]), odd, acc[r][v]);
          }
        }
      }
    }
    for (; i + 2 <= end; i += 2) {
      fetch(i);
      step.template operator()<0>(i);
      step.template operator()<1>(i + 1);
    }
    if (i < end) step.template operator()<0>(i);

#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const Vec scale = hn::LoadU(d, b_scale + (v / kPerPanel) * b_scale_stride + block * kPanelWidth + (v % kPerPanel) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float* at = sum + r * sum_stride + v * kLanes;
        const Vec before = from_zero && block == 0 ? hn::Zero(d) : hn::LoadU(d, at);
        hn::StoreU(hn::MulAdd(acc[r][v], hn::Mul(hn::Set(d, a_scale[r * a_scale_stride + block]), scale), before), d, at);
      }
    }
  }
}

template <typename B>
using TileFunction = void (*)(const float*, int64_t, const float*, int64_t, const B*, int64_t, const float*, int64_t, const ColumnBlock*, int64_t, const Ahead&,
                              float*, int64_t, bool);

template <int kRows, int kPanels, typename B>
constexpr TileFunction<B> tile_function() {
  if constexpr (kPanels <= max_panels(kRows)) return &Tile<kRows, kPanels, B>;
  else return nullptr;
}
// [rows - 1][log2 panels]
template <typename B, int... kRow>
constexpr auto make_tiles(std::integer_sequence<int, kRow...>) {
  return std::array<std::array<TileFunction<B>, 4>, kTileRows>{{{tile_function<kRow + 1, 1, B>(), tile_function<kRow + 1, 2, B>(),
                                                                 tile_function<kRow + 1, 4, B>(), tile_function<kRow + 1, 8, B>()}...}};
}
template <typename B>
constexpr auto kTiles = make_tiles<B>(std::make_integer_sequence<int, kTileRows>());

// Steps [0, k) of one panel of codes as f32.
template <typename B>
void DecodePanel(const B* HWY_RESTRICT from, int64_t k, float* HWY_RESTRICT to) {
  const F32Tag d;
  const auto step = [&]<int kOdd>(int64_t i) HWY_ATTR {
    for (int v = 0; v < static_cast<int>(kLaneVectors); ++v)
      hn::Store(LoadStep<kOdd>(d, from, i, v), d, to + i * kPanelWidth + v * static_cast<int>(kF32Lanes));
  };
  int64_t i = 0;
  for (; i + 2 <= k; i += 2) {
    step.template operator()<0>(i);
    step.template operator()<1>(i + 1);
  }
  if (i < k) step.template operator()<0>(i);
}

void DecodeRow(const e4m3* HWY_RESTRICT from, int64_t k, float* HWY_RESTRICT to) {
  const F32Tag d;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kF32Lanes) <= k; i += static_cast<int64_t>(kF32Lanes))
    hn::StoreU(hn::Mul(DecodeE4m3(d, from + i), hn::Set(d, 0x1p8f)), d, to + i);
  for (; i < k; ++i) to[i] = to_f32(from[i]);
}

template <typename To>
void Round(const float* HWY_RESTRICT from, To* HWY_RESTRICT to, int64_t n) {
  const F32Tag d;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kF32Lanes) <= n; i += static_cast<int64_t>(kF32Lanes)) StoreF32(d, LoadF32(d, from + i), to + i);
  for (; i < n; ++i) to[i] = from_f32<To>(from[i]);
}

constexpr int64_t num_panels(int64_t n) { return (n + kPanelWidth - 1) / kPanelWidth; }
constexpr int64_t num_tiles(int64_t m) { return (m + kTileRows - 1) / kTileRows; }
constexpr int64_t tile_row(int64_t m, int64_t tiles, int64_t tile) { return tile * m / tiles; }
constexpr int64_t kLeftStride = kBlockK + 16;

struct Scratch {
  float *a, *a_scale, *b, *sum, *total;
};
struct ScratchSizes {
  int64_t a, a_scale, b, sum, total;
  int64_t all() const { return a + a_scale + b + sum + total; }
};

ScratchSizes scratch_sizes(const QuantizedProduct& s, const QuantizedProblem* problems, int64_t count, int64_t block_tiles) {
  int64_t most_rows = 0;
  for (int64_t e = 0; e < count; ++e) most_rows = std::max(most_rows, std::min(problems[e].m, block_tiles * kTileRows));
  const int64_t columns = std::min(num_panels(s.n), kChunkPanels) * kPanelWidth;
  return {most_rows * kLeftStride, most_rows * kBlocksMax, most_rows > kTileRows ? kPanelsMax * kBlockK * kPanelWidth : 0, most_rows * columns,
          s.segmented ? most_rows * columns : 0};
}

// Tiles [tile0, tile1) of the rows of problem p, panels [panel0, panel1) of its columns.
template <typename B>
void RunBlock(const QuantizedProduct& s, const QuantizedProblem& p, const Scratch& scratch, int64_t tiles, int64_t tile0, int64_t tile1, int64_t panel0,
              int64_t panel1) {
  constexpr int64_t kStepsAByte = std::is_same_v<B, e2m1x2> ? 2 : 1;
  const int64_t row0 = tile_row(p.m, tiles, tile0), rows = tile_row(p.m, tiles, tile1) - row0;
  const int64_t panels_max = max_panels((p.m + tiles - 1) / tiles);
  const int64_t K = s.blocks[s.num_blocks - 1].end;

  for (int64_t chunk = panel0; chunk < panel1; chunk += kChunkPanels) {
    const int64_t chunk_end = std::min(panel1, chunk + kChunkPanels), stride = (chunk_end - chunk) * kPanelWidth;
    bool chain_begins = true, first_segment = true;
    for (int64_t b0 = 0, b1 = 0; b0 < s.num_blocks; b0 = b1) {
      const ColumnBlock* blocks = s.blocks + b0;
      const int64_t k0 = blocks->begin;
      for (b1 = b0; b1 < s.num_blocks && b1 - b0 < kBlocksMax && s.blocks[b1].end - k0 <= kBlockK;)
        if (s.blocks[b1++].ends_segment && s.segmented) break;
      const int64_t k1 = s.blocks[b1 - 1].end, k = k1 - k0;
      const bool chain_ends = s.segmented ? s.blocks[b1 - 1].ends_segment : k1 == K;

      for (int64_t r = 0; r < rows; ++r) {
        DecodeRow(p.x + (row0 + r) * s.x_stride + k0, k, scratch.a + r * kLeftStride);
        for (int64_t b = b0; b < b1; ++b) scratch.a_scale[r * kBlocksMax + b - b0] = to_f32(p.x_scales[(row0 + r) * s.x_scale_stride + s.blocks[b].x_block]);
      }

      for (int64_t q = chunk, panels = 0; q < chunk_end; q += panels) {
        panels = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::min(panels_max, chunk_end - q))));
        const int log2_panels = std::countr_zero(static_cast<uint64_t>(panels));
        float* sums = scratch.sum + (q - chunk) * kPanelWidth;
        const B* codes = reinterpret_cast<const B*>(p.panels + q * s.panel_stride) + k0 / kStepsAByte * kPanelWidth;
        const bool last = q + panels == chunk_end;  // of this chunk at k0
        const Ahead ahead{p.panels + (last && k1 < K ? chunk : q + panels) * s.panel_stride + (!last ? k0 : k1 < K ? k1 : 0) / kStepsAByte * kPanelWidth, s.panel_stride,
                          kPanelWidth / kStepsAByte};
        const float* scales = p.panel_scales + q * s.panel_scale_stride + b0 * kPanelWidth;
        const auto run_tiles = [&]<typename Right>(const Right* right, int64_t right_stride) {
          for (int64_t t = tile0; t < tile1; ++t) {
            const int64_t first = tile_row(p.m, tiles, t) - row0, tile_rows = tile_row(p.m, tiles, t + 1) - row0 - first;
            kTiles<Right>[tile_rows - 1][log2_panels](scratch.a + first * kLeftStride, kLeftStride, scratch.a_scale + first * kBlocksMax, kBlocksMax, right,
                                                      right_stride, scales, s.panel_scale_stride, blocks, b1 - b0, ahead, sums + first * stride, stride,
                                                      chain_begins);
          }
        };
        if (tile1 - tile0 == 1) {
          run_tiles(codes, s.panel_stride);
        } else {
          for (int64_t i = 0; i < panels; ++i) DecodePanel(codes + i * s.panel_stride, k, scratch.b + i * k * kPanelWidth);
          run_tiles(static_cast<const float*>(scratch.b), k * kPanelWidth);
        }
        if (!chain_ends) continue;

        const F32Tag d;
        const float* result = sums;
        if (s.segmented) {
          float* total = scratch.total + (q - chunk) * kPanelWidth;
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < panels * kPanelWidth; j += static_cast<int64_t>(kF32Lanes)) {
              float* at = total + r * stride + j;
              hn::StoreU(hn::Add(first_segment ? hn::Zero(d) : hn::LoadU(d, at), hn::LoadU(d, sums + r * stride + j)), d, at);
            }
          result = total;
        }
        if (k1 < K) continue;
        const int64_t column = q * kPanelWidth, columns = std::min(panels * kPanelWidth, s.n - column);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (row0 + r) * s.y_stride + column;
          if (s.y_dtype == DType::f32) Round(result + r * stride, static_cast<float*>(p.y) + at, columns);
          else Round(result + r * stride, static_cast<bf16*>(p.y) + at, columns);
        }
      }
      chain_begins = chain_ends;
      first_segment = first_segment && !chain_ends;
    }
  }
}

// The work is cut as RunProduct of matmul_simd.cc cuts it.
void RunQuantized(Context& c, const QuantizedProduct& s, const QuantizedProblem* problems, int64_t count) {
  const int64_t pairs = (num_panels(s.n) + 1) / 2, K = s.blocks[s.num_blocks - 1].end;
  int64_t tiles_total = 0;
  for (int64_t e = 0; e < count; ++e) tiles_total += num_tiles(problems[e].m);
  if (tiles_total == 0) return;
  const int threads = c.num_threads();
  const int64_t block_tiles = threads == 1 ? kBlockTiles : std::clamp(tiles_total * pairs / (4 * threads), int64_t{1}, kBlockTiles);

  ArenaScope scope(*c.workspace);
  const ScratchSizes sizes = scratch_sizes(s, problems, count, block_tiles);
  float* const base = c.workspace->tensor(DType::f32, {threads, sizes.all()}, "matmul blocks").ptr<float>();
  constexpr int64_t kStepCost = 10;
  parallel_for(c, tiles_total * pairs, kStepCost * K, [&](int64_t begin, int64_t end, int worker) {
    float* at = base + worker * sizes.all();
    Scratch scratch;
    scratch.a = at;
    scratch.a_scale = scratch.a + sizes.a;
    scratch.b = scratch.a_scale + sizes.a_scale;
    scratch.sum = scratch.b + sizes.b;
    scratch.total = scratch.sum + sizes.sum;
    int64_t first = 0;  // work before this block
    for (int64_t e = 0; e < count && first < end; ++e) {
      const QuantizedProblem& p = problems[e];
      const int64_t tiles = num_tiles(p.m), blocks = (tiles + block_tiles - 1) / block_tiles;
      for (int64_t b = 0; b < blocks && first < end; ++b) {
        const int64_t tile0 = b * tiles / blocks, tile1 = (b + 1) * tiles / blocks, pair_work = tile1 - tile0;
        // Ours are the pairs of this block whose work begins in [begin, end).
        const int64_t pair0 = std::clamp((begin - first + pair_work - 1) / pair_work, int64_t{0}, pairs);
        const int64_t pair1 = std::clamp((end - first + pair_work - 1) / pair_work, int64_t{0}, pairs);
        if (pair0 < pair1) {
          const int64_t panel0 = pair0 * 2, panel1 = std::min(pair1 * 2, num_panels(s.n));
          if (s.codes == DType::e4m3) RunBlock<e4m3>(s, p, scratch, tiles, tile0, tile1, panel0, panel1);
          else RunBlock<e2m1x2>(s, p, scratch, tiles, tile0, tile1, panel0, panel1);
        }
        first += pairs * pair_work;
      }
    }
  });
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::simd {

HWY_EXPORT(RunQuantized);

void quantized_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment, ConstTensorView offsets) {
  const int64_t M = x.rows(), K = x.dim(1);
  if (y.shape.elements() == 0) return;
  if (K == 0) {
    for (int64_t r = 0; r < M; ++r)
      std::memset(static_cast<char*>(y.data) + static_cast<size_t>(r * y.row_stride) * dtype_bytes(y.dtype), 0,
                  static_cast<size_t>(y.dim(1)) * dtype_bytes(y.dtype));
    return;
  }
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;

  const BlockGrid x_grid = {kFp8Activation.block_cols, w.col_grid.period};
  const TensorView codes = ws.tensor(DType::e4m3, {M, K}, "matmul codes"), scales = ws.tensor(DType::ue8m0, {M, x_grid.blocks_in(K)}, "matmul scales");
  quantize_by_grid(c, codes, scales, {}, x_grid, x, kFp8Activation.amax_floor);

  const int64_t num_blocks = w.col_grid.blocks_in(K), period = w.col_grid.period == 0 ? K : w.col_grid.period;
  ColumnBlock* blocks = static_cast<ColumnBlock*>(ws.allocate(static_cast<size_t>(num_blocks) * sizeof(ColumnBlock), "matmul column blocks"));
  for (int64_t b = 0, begin = 0; b < num_blocks; begin = blocks[b++].end) {
    const int64_t end = w.col_grid.end_of_block(begin, K);
    blocks[b] = {begin, end, x_grid.block_of(begin), end % period == 0 || end == K};
  }

  WeightView packed = w;
  if (w.panels.empty()) {
    const TensorView panels = ws.tensor(w.rows.dtype, panel_shape(w.rows.shape), "matmul panels");
    const TensorView panel_scales = ws.tensor(DType::f32, panel_scale_shape(w), "matmul panel scales");
    simd::pack_panels(c, panels, w.rows);
    pack_panel_scales(c, panel_scales, w);
    packed.panels = panels;
    packed.panel_scales = panel_scales;
  }

  const bool grouped = w.rows.shape.rank == 3;
  const int64_t panel_stride = grouped ? packed.panels.shape[2] * kPanelWidth : packed.panels.row_stride;
  const int64_t panel_scale_stride = grouped ? num_blocks * kPanelWidth : packed.panel_scales.row_stride;
  const QuantizedProduct s = {.codes = w.rows.dtype, .y_dtype = y.dtype, .x_stride = codes.row_stride, .x_scale_stride = scales.row_stride,
                              .panel_stride = panel_stride, .panel_scale_stride = panel_scale_stride, .y_stride = y.row_stride, .n = y.dim(1),
                              .segmented = k_segment > 0, .blocks = blocks, .num_blocks = num_blocks};
  const int64_t experts = grouped ? w.rows.shape[0] : 1;
  QuantizedProblem* problems = static_cast<QuantizedProblem*>(ws.allocate(static_cast<size_t>(experts) * sizeof(QuantizedProblem), "matmul experts"));
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t first = grouped ? offsets.ptr<int32_t>()[e] : 0, rows = grouped ? offsets.ptr<int32_t>()[e + 1] - first : M;
    problems[e] = {codes.ptr<e4m3>() + first * codes.row_stride,
                   scales.ptr<ue8m0>() + first * scales.row_stride,
                   static_cast<const uint8_t*>(packed.panels.data) + e * packed.panels.row_stride,
                   packed.panel_scales.ptr<float>() + e * packed.panel_scales.row_stride,
                   static_cast<char*>(y.data) + first * y.row_stride * static_cast<int64_t>(dtype_bytes(y.dtype)),
                   rows};
  }
  HWY_DYNAMIC_DISPATCH(RunQuantized)(c, s, problems, grouped ? experts : 1);
}

}  // namespace lockstep::simd
#endif  // HWY_ONCE
