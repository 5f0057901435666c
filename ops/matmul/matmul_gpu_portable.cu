// Every product of matmul.h as one kernel, portable, with the CPU's bits: an output is one chain of fused multiply-adds, its index ascending. What differs
// between forward and backward is where the chain runs in the operands:
//   forward          rows m, columns n, chain k:  x[m, k], w[n, k]      both along the chain
//   input gradient   rows m, columns k, chain n:  dy[m, n], w[n, k]     the second across it
//   weight gradient  rows n, columns k, chain m:  dy[m, n], x[m, k]     both across it
//
// A block computes a tile of outputs. Pieces of both operands are decoded to f32 in shared memory, transposed to the chain's order (element k of a line beside
// element k of the next), while the next pieces are on their way in registers. A thread keeps rows x columns of chains in registers. Since a chain is never
// split, tiles of any shape give the same bits, so their shape follows the call: large ones with most operands shared once they fill the device, otherwise
// narrow ones that walk far along the chain at once, so that enough of w is on its way (128 blocks x 16 KB cover the memory's latency).
//
// Chains that begin anew (k_segment, blocks of quantised weights) are cut at their ends into pieces, whose sums are added by the rules of matmul.h.
// Experts: the grid has a tile for the worst case, floor(R / rows) + E of them; a block finds its expert in the offsets.
// Floors on 132 multiprocessors: 2 M N K / 67 TFLOP/s; the bytes of w / 4 TB/s; and a chain's own 4 cycles a step, 9 us for K = 4096.

#include <algorithm>

#include "core/formats.h"
#include "core/gpu.h"
#include "ops/matmul/matmul_cpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device::portable {

namespace {

using namespace gpu;

enum class Form { forward, quantized, input_gradient, weight_gradient };

// Rows [0, rows) and columns [0, cols) of y, chains over [0, chain). Strides count elements of the dtype between the rows of a tensor.
struct Product {
  const void *a = nullptr, *b = nullptr;
  void* y = nullptr;
  int64_t a_stride = 0, b_stride = 0, y_stride = 0;
  DType a_type = DType::f32, b_type = DType::f32, y_type = DType::f32;
  int rows = 0, cols = 0, chain = 0;
  bool accumulate = false;
  // Experts: the rows, or in the weight gradient the chain, in parts [offsets[e], offsets[e + 1]).
  const int32_t* offsets = nullptr;
  int experts = 0;
  int64_t b_expert = 0, y_expert = 0;  // elements between experts
  // The chain begins anew every `block` from every multiple of `period` on; `segmented`: sums of periods are added up.
  int block = 0, period = 0;
  bool segmented = false;
  // Quantised: scales of x by 128 columns, of w by its grids.
  const float* a_scale = nullptr;
  const ue8m0* b_scale = nullptr;
  int64_t a_scale_stride = 0, b_scale_stride = 0, b_scale_expert = 0;
  BlockGrid row_grid = {}, col_grid = {};
};

// M x N outputs, a thread having Rows x Cols of them, Step links of the chain at once, Unroll of them in one piece of code.
template <int M, int N, int Rows, int Cols, int Step, int Unroll>
struct Tile {
  static constexpr int kM = M, kN = N, kRows = Rows, kCols = Cols, kStep = Step, kUnroll = Unroll;
  static constexpr int kColThreads = N / Cols, kThreads = M / Rows * kColThreads;
  static constexpr size_t kSharedBytes = 2 * sizeof(float) * Step * (M + N);
};
using Large = Tile<128, 64, 8, 4, 32, 4>;
using Flat32 = Tile<32, 128, 8, 4, 32, 4>;
using Flat16 = Tile<16, 32, 4, 1, 128, 16>;
using Flat4 = Tile<4, 32, 1, 1, 256, 32>;

// The chain's pieces: at most `step` long, none over the end of a block.
struct Pieces {
  int at = 0, end = 0;
  int run_begin = 0, run_end = 0, run = -1;  // the block that holds it, and its number
  int period_begin = 0, period_end = 0;
  int x_block = 0;  // of 128 columns: the number of the period's first

  GPU_INLINE void advance(const Product& p, int chain, int step) {
    at = end;
    if (at == run_end) {
      ++run;
      run_begin = at;
      if (at == period_end) {
        x_block += (period_end - period_begin + 127) / 128;
        period_begin = at;
        period_end = chain - at < p.period ? chain : at + p.period;
      }
      run_end = period_end - at < p.block ? period_end : at + p.block;
    }
    end = run_end - at < step ? run_end : at + step;
  }
};

// Codes as numbers. The bits of a magnitude, moved to where f32 has them, are the value times a power of two, sub-normals included.
GPU_INLINE float value_of_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7f, bits = magnitude == 0x7f ? kF32Nan : std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f);
  return std::bit_cast<float>(bits | (code & 0x80) << 24);
}
GPU_INLINE float value_of_e2m1(uint32_t code) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>((code & 7) << 22) * 0x1p126f) | (code & 8) << 28);
}

// Element i of a row, any dtype.
GPU_INLINE float element(const void* data, DType dtype, int64_t row, int i) {
  switch (dtype) {
    case DType::f32: return static_cast<const float*>(data)[row + i];
    case DType::bf16: return to_f32(static_cast<const bf16*>(data)[row + i]);
    case DType::e4m3: return value_of_e4m3(static_cast<const e4m3*>(data)[row + i].bits);
    default: return value_of_e2m1(static_cast<uint32_t>(static_cast<const e2m1x2*>(data)[row + i / 2].bits) >> i % 2 * 4);
  }
}

template <typename Word, int N>
GPU_INLINE void load_words(uint32_t* to, const void* from) {
  const auto v = *static_cast<const Vector<Word, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = v.v[i];
}

constexpr int kChunk = 8;  // numbers that a thread moves at once

// One operand's way into shared memory: `Lines` rows or columns of the tile, a step of the chain. Element k of a line lies at k * Lines + place(line, k);
// the place spreads lines over the banks, for 32 threads that bring four chunks along the chain of eight lines.
template <int Lines, bool kAlongChain, int Step, int Threads, bool kVector>
struct Operand {
  static constexpr int kChunks = Lines * Step / kChunk / Threads;
  static_assert(kChunks * kChunk * Threads == Lines * Step && Step % 32 == 0);
  const void* data;
  int64_t stride;
  DType dtype;
  int line0, lines;  // of the whole operand

  uint32_t raw[kChunks][kChunk];  // as in memory, or, brought one by one, decoded
  float scale[kChunks];           // of a quantised weight in the input gradient

  // Where chunk i of this thread lies in the tile.
  GPU_INLINE static int line_of(int i) {
    const int c = thread_x() + i * Threads;
    return kAlongChain ? c / 4 % Lines : c % (Lines / kChunk) * kChunk;
  }
  GPU_INLINE static int link_of(int i) {
    const int c = thread_x() + i * Threads;
    return kAlongChain ? c / (4 * Lines) * 32 + c % 4 * kChunk : c / (Lines / kChunk);
  }
  GPU_INLINE static int place(int line, int k) { return line ^ (k & 28 & (Lines - 1)); }

  // Chunks of links [at, end). scale_of(chain index, line): of this operand's blocks, where that is wanted.
  template <typename ScaleOf>
  GPU_INLINE void load(int at, int end, const ScaleOf& scale_of) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int line = line0 + line_of(i), link = at + link_of(i);
      const int64_t row = (kAlongChain ? line : link) * stride;
      const int from = kAlongChain ? link : line;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) raw[i][j] = 0;
      scale[i] = 1.0f;
      if constexpr (kVector) {
        if (line >= lines || link >= end) continue;
        if constexpr (!kAlongChain) scale[i] = scale_of(link, line);
        if (dtype == DType::f32) {
          load_words<uint32_t, 4>(raw[i], static_cast<const float*>(data) + row + from);
          load_words<uint32_t, 4>(raw[i] + 4, static_cast<const float*>(data) + row + from + 4);
        } else if (dtype == DType::bf16) {
          load_words<uint32_t, 4>(raw[i], static_cast<const bf16*>(data) + row + from);
        } else if (dtype == DType::e4m3) {
          load_words<uint32_t, 2>(raw[i], static_cast<const e4m3*>(data) + row + from);
        } else {
          load_words<uint32_t, 1>(raw[i], static_cast<const e2m1x2*>(data) + row + from / 2);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          const int j_line = kAlongChain ? line : line + j, j_link = kAlongChain ? link + j : link;
          if (j_line >= lines || j_link >= end) continue;
          float v = element(data, dtype, row, from + j);
          if constexpr (!kAlongChain) {
            if (dtype == DType::e4m3 || dtype == DType::e2m1x2) v = to_f32(to_bf16(v * scale_of(link, line + j)));
          }
          raw[i][j] = std::bit_cast<uint32_t>(v);
        }
      }
    }
  }

  GPU_INLINE void store(Shared<float> to) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float v[kChunk];
      const uint32_t* const w = raw[i];
      if (!kVector || dtype == DType::f32) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) v[j] = std::bit_cast<float>(w[j]);
      } else if (dtype == DType::bf16) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) v[j] = std::bit_cast<float>(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xffff0000u);
      } else {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) v[j] = dtype == DType::e4m3 ? value_of_e4m3(w[j / 4] >> j % 4 * 8 & 0xff) : value_of_e2m1(w[0] >> j * 4);
        if constexpr (!kAlongChain)
#pragma unroll
          for (int j = 0; j < kChunk; ++j) v[j] = to_f32(to_bf16(v[j] * scale[i]));
      }
      const int line = line_of(i), link = link_of(i);
      if constexpr (kAlongChain) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) to.store((link + j) * Lines + place(line, link + j), v[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kChunk; j += 4) to.template store_vector<4>(link * Lines + place(line + j, link), {{v[j], v[j + 1], v[j + 2], v[j + 3]}});
      }
    }
  }
};

// Lines of a tile that belong to thread `group` of Lines / Count: vectors of four, if it has as many.
template <int Lines, int Count>
struct Fragment {
  static constexpr int kVector = Count < 4 ? Count : 4, kVectors = Count / kVector;
  GPU_INLINE static int line(int i, int group) { return i / kVector * (Lines / kVectors) + group * kVector + i % kVector; }
  // Element k of each, k = begin + j: `begin` a multiple of Unroll and j less, so that most of the place is known beforehand.
  template <int Unroll>
  GPU_INLINE static void load(float (&to)[Count], Shared<float> from, int begin, int j, int group) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int place = line(v * kVector, group) ^ (((begin & 28 & ~(Unroll - 1)) | (j & 28)) & (Lines - 1));
      const auto vector = from.load_vector<kVector>((begin + j) * Lines + place);
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[v * kVector + i] = vector.v[i];
    }
  }
};

// Links [0, count) of the pieces in shared memory.
template <typename T>
GPU_INLINE void multiply(float (&acc)[T::kRows][T::kCols], Shared<float> a, Shared<float> b, int count, int row_group, int col_group) {
  const auto link = [&](int begin, int j) {
    float left[T::kRows], right[T::kCols];
    Fragment<T::kM, T::kRows>::template load<T::kUnroll>(left, a, begin, j, row_group);
    Fragment<T::kN, T::kCols>::template load<T::kUnroll>(right, b, begin, j, col_group);
#pragma unroll
    for (int r = 0; r < T::kRows; ++r)
#pragma unroll
      for (int c = 0; c < T::kCols; ++c) acc[r][c] = fma(left[r], right[c], acc[r][c]);
  };
  int begin = 0;
  for (; begin + T::kUnroll <= count; begin += T::kUnroll)
#pragma unroll
    for (int j = 0; j < T::kUnroll; ++j) link(begin, j);
  for (int j = 0; begin + j < count; ++j) link(begin, j);
}

template <typename T>
GPU_INLINE void set_zero(float (&v)[T::kRows][T::kCols]) {
#pragma unroll
  for (int r = 0; r < T::kRows; ++r)
#pragma unroll
    for (int c = 0; c < T::kCols; ++c) v[r][c] = 0;
}

// The expert whose slots of tiles hold this one: those of expert e begin at floor(offsets[e] / tile_rows) + e, which leaves each enough.
GPU_INLINE int expert_of(const Product& p, int tile, int tile_rows, Shared<float> scratch) {
  const Shared<int32_t> found(reinterpret_cast<int32_t*>(scratch.data()));
  for (int e = thread_x(); e < p.experts; e += block_dim())
    if (tile >= p.offsets[e] / tile_rows + e && tile <= p.offsets[e + 1] / tile_rows + e) found.store(0, e);
  sync_block();
  const int e = found.load(0);
  sync_block();
  return e;
}

template <typename T, Form kForm, bool kSegmented, bool kVector>
GPU_KERNEL GPU_BOUNDS(T::kThreads) matmul_kernel(const Product p) {
  constexpr bool kQuantized = kForm == Form::quantized;
  SharedMemory memory;
  const Shared<float> shared = memory.take<float>(2 * T::kStep * (T::kM + T::kN));
  const auto a_tile = [&](int stage) { return shared.from(stage * T::kStep * (T::kM + T::kN)); };
  const auto b_tile = [&](int stage) { return a_tile(stage).from(T::kStep * T::kM); };

  Operand<T::kM, kForm != Form::weight_gradient, T::kStep, T::kThreads, kVector> a;
  Operand<T::kN, kForm == Form::forward || kQuantized, T::kStep, T::kThreads, kVector> b;
  a.data = p.a, a.stride = p.a_stride, a.dtype = p.a_type;
  b.data = p.b, b.stride = p.b_stride, b.dtype = p.b_type;
  b.line0 = block_y() * T::kN, b.lines = p.cols;
  int chain_begin = 0, chain = p.chain;
  int64_t y_first = 0, b_first = 0, b_scale_first = 0;
  if (p.offsets == nullptr) {
    a.line0 = block_x() * T::kM, a.lines = p.rows;
  } else if (kForm == Form::weight_gradient) {
    const int tiles = (p.rows + T::kM - 1) / T::kM, e = block_x() / tiles;
    a.line0 = block_x() % tiles * T::kM, a.lines = p.rows;
    chain_begin = p.offsets[e], chain = p.offsets[e + 1] - chain_begin;
    if (chain == 0) return;  // nothing to add
    y_first = e * p.y_expert;
  } else {
    const int e = expert_of(p, block_x(), T::kM, shared);
    a.line0 = p.offsets[e] + (block_x() - (p.offsets[e] / T::kM + e)) * T::kM, a.lines = p.offsets[e + 1];
    if (a.line0 >= a.lines) return;
    b_first = e * p.b_expert, b_scale_first = e * p.b_scale_expert;
  }
  const ue8m0* const b_scale = p.b_scale + b_scale_first;
  // Of the weight in the input gradient: the chain is over its rows.
  const auto scale_of = [&](int row, int col) {
    if (p.b_scale == nullptr) return 1.0f;
    return to_f32(b_scale[p.row_grid.block_of(row) * p.b_scale_stride + p.col_grid.block_of(col)]);
  };
  if constexpr (kForm != Form::weight_gradient) b.data = static_cast<const char*>(p.b) + b_first * static_cast<int64_t>(dtype_bytes(p.b_type));
  const auto bring = [&](const Pieces& piece) {
    a.load(chain_begin + piece.at, chain_begin + piece.end, [](int, int) { return 1.0f; });
    b.load(chain_begin + piece.at, chain_begin + piece.end, scale_of);
  };

  const int row_group = thread_x() / T::kColThreads, col_group = thread_x() % T::kColThreads;
  const auto row_of = [&](int r) { return a.line0 + Fragment<T::kM, T::kRows>::line(r, row_group); };
  const auto col_of = [&](int c) { return b.line0 + Fragment<T::kN, T::kCols>::line(c, col_group); };
  const auto each = [&](const auto& f) {  // outputs of this thread
#pragma unroll
    for (int r = 0; r < T::kRows; ++r)
#pragma unroll
      for (int c = 0; c < T::kCols; ++c)
        if (row_of(r) < a.lines && col_of(c) < p.cols) f(r, c, y_first + row_of(r) * p.y_stride + col_of(c));
  };

  float acc[T::kRows][T::kCols], sum[T::kRows][T::kCols], total[T::kRows][T::kCols];  // of a run of the chain, of a period, of all
  set_zero<T>(acc), set_zero<T>(sum), set_zero<T>(total);
  if constexpr (kForm == Form::input_gradient || kForm == Form::weight_gradient)
    if (p.accumulate) each([&](int r, int c, int64_t i) { acc[r][c] = static_cast<const float*>(p.y)[i]; });
  float x_scale[T::kRows] = {}, w_scale[T::kCols] = {};
  int64_t w_scale_row[T::kCols];
  if constexpr (kQuantized)
#pragma unroll
    for (int c = 0; c < T::kCols; ++c) w_scale_row[c] = p.row_grid.block_of(col_of(c) < p.cols ? col_of(c) : 0) * p.b_scale_stride;

  Pieces piece;
  piece.advance(p, chain, T::kStep);
  if (piece.at < chain) {
    bring(piece);
    a.store(a_tile(0)), b.store(b_tile(0));
  }
  sync_block();
  for (int stage = 0; piece.at < chain; stage ^= 1) {
    Pieces next = piece;
    next.advance(p, chain, T::kStep);
    const bool more = next.at < chain;
    if (more) bring(next);
    if (kQuantized && piece.at == piece.run_begin) {
      const int x_block = piece.x_block + (piece.at - piece.period_begin) / 128;
#pragma unroll
      for (int r = 0; r < T::kRows; ++r) x_scale[r] = row_of(r) < a.lines ? p.a_scale[row_of(r) * p.a_scale_stride + x_block] : 0.0f;
#pragma unroll
      for (int c = 0; c < T::kCols; ++c) w_scale[c] = to_f32(b_scale[w_scale_row[c] + piece.run]);
    }
    multiply<T>(acc, a_tile(stage), b_tile(stage), piece.end - piece.at, row_group, col_group);
    if constexpr (kSegmented || kQuantized) {
      if (piece.end == piece.run_end) {
#pragma unroll
        for (int r = 0; r < T::kRows; ++r)
#pragma unroll
          for (int c = 0; c < T::kCols; ++c) {
            sum[r][c] = kQuantized ? fma(acc[r][c], x_scale[r] * w_scale[c], sum[r][c]) : acc[r][c];
            acc[r][c] = 0;
          }
        if (p.segmented && piece.end == piece.period_end)
#pragma unroll
          for (int r = 0; r < T::kRows; ++r)
#pragma unroll
            for (int c = 0; c < T::kCols; ++c) {
              total[r][c] = total[r][c] + sum[r][c];
              sum[r][c] = 0;
            }
      }
    }
    if (more) a.store(a_tile(stage ^ 1)), b.store(b_tile(stage ^ 1));
    sync_block();
    piece = next;
  }

  each([&](int r, int c, int64_t i) {
    const float of_chain = kQuantized ? sum[r][c] : acc[r][c], of_segments = total[r][c];
    const float v = p.segmented ? of_segments : of_chain;
    if (p.y_type == DType::f32) static_cast<float*>(p.y)[i] = v;
    else static_cast<bf16*>(p.y)[i] = to_bf16(v);
  });
}

// x in E4M3, one scale (f32) for each 128 columns, which begin anew every `period`: 16 threads a block of columns, 8 numbers each.
template <typename X>
GPU_KERNEL quantize_rows_kernel(e4m3* codes, int64_t codes_stride, float* scales, const X* x, int64_t x_stride, int cols, int period, int x_blocks, int64_t items) {
  constexpr int kEach = 128 / kTreeLanes;
  const int64_t item = row_of_thread(), row = item / x_blocks;
  const int block = static_cast<int>(item % x_blocks), a_period = (period + 127) / 128;
  const int first = block / a_period * period, last = cols - first < period ? cols : first + period;
  const int begin = first + block % a_period * 128, end = item < items ? last : 0;
  const auto column = [&](int j) { return begin + j * kTreeLanes + row_lane(); };
  float v[kEach], amax = kFp8Activation.amax_floor;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    v[j] = column(j) < end ? to_f32(x[row * x_stride + column(j)]) : 0.0f;
    const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(v[j]) & kF32Magnitude);
    if (magnitude < std::numeric_limits<float>::infinity() && magnitude > amax) amax = magnitude;
  }
  for (int width = kTreeLanes / 2; width >= 1; width /= 2) {
    const float other = shuffle_xor(amax, width);
    if (other > amax) amax = other;
  }
  const float scale = to_f32(ue8m0_scale<e4m3>(amax)), inverse = 1.0f / scale;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (column(j) < end) codes[row * codes_stride + column(j)] = to_e4m3(v[j] * inverse);
  if (item < items && row_lane() == 0) scales[item] = scale;
}

// Whether `data`, rows `stride` elements apart, can be read in chunks.
bool has_chunks(const void* data, int64_t stride, DType dtype) {
  const size_t chunk = dtype == DType::e2m1x2 ? kChunk / 2 : kChunk;
  return reinterpret_cast<uintptr_t>(data) % std::min<size_t>(16, chunk * dtype_bytes(dtype)) == 0 && stride % static_cast<int64_t>(chunk) == 0;
}

template <typename T, Form kForm, bool kSegmented>
void launch_tiles(Context& c, const Product& p, bool vector) {
  int64_t row_tiles = blocks_for(p.rows, T::kM);
  if (p.offsets != nullptr) row_tiles = kForm == Form::weight_gradient ? row_tiles * p.experts : p.rows / T::kM + p.experts;
  const Grid grid = {.blocks = row_tiles, .threads = T::kThreads, .blocks_y = blocks_for(p.cols, T::kN), .shared_bytes = T::kSharedBytes};
  launch(c, "matmul", grid, vector ? matmul_kernel<T, kForm, kSegmented, true> : matmul_kernel<T, kForm, kSegmented, false>, p);
}

constexpr int64_t kBlocksWanted = 128;  // about a device's multiprocessors

template <Form kForm, bool kSegmented>
void run_forward(Context& c, const Product& p, bool vector) {
  const int64_t experts = std::max(p.experts, 1), rows = p.rows / experts;  // of one expert, on average
  const auto fills = [&](int64_t m, int64_t n) { return experts * blocks_for(rows, m) * blocks_for(p.cols, n) >= kBlocksWanted; };
  if (p.cols > Large::kN / 2 && rows > Flat32::kM && fills(Large::kM, Large::kN)) return launch_tiles<Large, kForm, kSegmented>(c, p, vector);
  if (rows > Flat4::kM && fills(Flat16::kM, Flat16::kN)) return launch_tiles<Flat16, kForm, kSegmented>(c, p, vector);
  launch_tiles<Flat4, kForm, kSegmented>(c, p, vector);
}

template <Form kForm>
void run_backward(Context& c, const Product& p, bool vector) {
  const int64_t rows = kForm == Form::weight_gradient ? p.rows : p.rows / std::max(p.experts, 1);
  if (rows > Flat32::kM) launch_tiles<Large, kForm, false>(c, p, vector);
  else launch_tiles<Flat32, kForm, false>(c, p, vector);
}

void set_experts(Product& p, const WeightView* w, ConstTensorView offsets) {
  if (offsets.data == nullptr) return;
  p.offsets = offsets.ptr<int32_t>();
  p.experts = static_cast<int>(offsets.rows() - 1);
  if (w == nullptr) return;
  p.b_expert = w->rows.row_stride;
  p.b_scale_expert = w->quantized() ? w->scales.row_stride : 0;
}
int64_t row_stride(ConstTensorView rows) { return rows.shape.rank == 3 ? rows.shape[2] : rows.row_stride; }

void set_scales(Product& p, const WeightView& w) {
  p.b_scale = w.scales.ptr<ue8m0>();
  p.b_scale_stride = row_stride(w.scales);
  p.row_grid = w.row_grid, p.col_grid = w.col_grid;
}

void forward(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment, ConstTensorView offsets) {
  const int64_t k = x.dim(1);
  if (y.shape.elements() == 0) return;
  if (offsets.data == nullptr && k_segment == 0 && thin::supports(x, w)) return thin::matmul(c, y, x, w.rows);
  Product p = {.a = x.data, .b = w.rows.data, .y = y.data, .a_stride = x.row_stride, .b_stride = row_stride(w.rows), .y_stride = y.row_stride,
               .a_type = x.dtype, .b_type = w.rows.dtype, .y_type = y.dtype,
               .rows = static_cast<int>(x.rows()), .cols = static_cast<int>(y.dim(1)), .chain = static_cast<int>(k)};
  set_experts(p, &w, offsets);
  p.segmented = k_segment > 0;
  p.block = p.period = static_cast<int>(k_segment > 0 ? k_segment : k);
  const ArenaScope scope(*c.workspace);
  if (w.quantized()) {
    set_scales(p, w);
    p.block = static_cast<int>(w.col_grid.block);
    p.period = static_cast<int>(w.col_grid.period == 0 ? k : w.col_grid.period);
    const int64_t x_blocks = BlockGrid{kFp8Activation.block_cols, w.col_grid.period}.blocks_in(k), stride = (k + 15) / 16 * 16, items = x.rows() * x_blocks;
    const TensorView codes = c.workspace->tensor(DType::e4m3, {x.rows(), stride}, "matmul codes"), scales = c.workspace->tensor(DType::f32, {x.rows(), x_blocks}, "matmul scales");
    const auto quantize_rows = [&](const auto* from) {
      launch(c, "matmul_quantize", {.blocks = blocks_for(items, kRowsABlock), .threads = kRowThreads}, quantize_rows_kernel<std::remove_cvref_t<decltype(*from)>>,
             codes.ptr<e4m3>(), stride, scales.ptr<float>(), from, x.row_stride, p.chain, p.period, static_cast<int>(x_blocks), items);
    };
    x.dtype == DType::f32 ? quantize_rows(x.ptr<float>()) : quantize_rows(x.ptr<bf16>());
    p.a = codes.data, p.a_stride = stride, p.a_type = DType::e4m3;
    p.a_scale = scales.ptr<float>(), p.a_scale_stride = x_blocks;
  }
  const bool vector = k % kChunk == 0 && p.block % kChunk == 0 && p.period % kChunk == 0 && has_chunks(p.a, p.a_stride, p.a_type) &&
                      has_chunks(p.b, p.b_stride, p.b_type) && has_chunks(p.b, p.b_expert, p.b_type);
  if (w.quantized()) run_forward<Form::quantized, true>(c, p, vector);
  else if (p.segmented) run_forward<Form::forward, true>(c, p, vector);
  else run_forward<Form::forward, false>(c, p, vector);
}

void input_gradient(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate) {
  if (dx.shape.elements() == 0) return;
  Product p = {.a = dy.data, .b = w.rows.data, .y = dx.data, .a_stride = dy.row_stride, .b_stride = row_stride(w.rows), .y_stride = dx.row_stride,
               .b_type = w.rows.dtype, .rows = static_cast<int>(dx.rows()), .cols = static_cast<int>(dx.dim(1)),
               .chain = static_cast<int>(dy.dim(1)), .accumulate = accumulate};
  set_experts(p, &w, offsets);
  p.block = p.period = p.chain;
  if (w.quantized()) set_scales(p, w);
  const bool vector = p.chain % kChunk == 0 && p.cols % kChunk == 0 && has_chunks(p.a, p.a_stride, p.a_type) && has_chunks(p.b, p.b_stride, p.b_type) &&
                      has_chunks(p.b, p.b_expert, p.b_type) && (!w.quantized() || (w.col_grid.block % kChunk == 0 && w.col_grid.period % kChunk == 0));
  run_backward<Form::input_gradient>(c, p, vector);
}

void weight_gradient(Context& c, TensorView dw, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets) {
  if (dw.shape.elements() == 0 || x.rows() == 0) return;
  if (offsets.data == nullptr && thin::supports_weight_gradient(dw, dy, x)) return thin::matmul_backward_weight(c, dw, dy, x);
  Product p = {.a = dy.data, .b = x.data, .y = dw.data, .a_stride = dy.row_stride, .b_stride = x.row_stride, .y_stride = row_stride(dw),
               .b_type = x.dtype, .rows = static_cast<int>(dy.dim(1)), .cols = static_cast<int>(x.dim(1)), .chain = static_cast<int>(x.rows()), .accumulate = true};
  set_experts(p, nullptr, offsets);
  p.y_expert = dw.row_stride;
  p.block = p.period = p.chain;
  const bool vector = p.rows % kChunk == 0 && p.cols % kChunk == 0 && has_chunks(p.a, p.a_stride, p.a_type) && has_chunks(p.b, p.b_stride, p.b_type);
  run_backward<Form::weight_gradient>(c, p, vector);
}

}  // namespace

void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) { forward(c, y, x, w, k_segment, {}); }
void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate) {
  input_gradient(c, dx, dy, w, {}, accumulate);
}
void matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x) { weight_gradient(c, dw_accum, dy, x, {}); }
void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) { forward(c, y, x, w, 0, offsets); }
void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate) {
  input_gradient(c, dx, dy, w, offsets, accumulate);
}
void grouped_matmul_backward_weight(Context& c, TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets) {
  weight_gradient(c, dw_accum, dy, x, offsets);
}

}  // namespace lockstep::device::portable
