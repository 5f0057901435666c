// Blocks of one row and 32, 64 or 128 columns, which is what activations, kv rows and FP4 have: one to eight threads hold a block in registers. Weights' blocks of
// 128 x 128: a thread block holds one. Others are read twice, from memory and from cache.
// Bound by memory: x once, codes and scales once. Floor: (bytes of x + bytes of codes) / 4 TB/s. What is beside loads and stores must be few instructions: 33 million
// numbers, whose bytes take 24 to 40 us, take another us for each. So conversions are the GPU's own (core/gpu_formats.h) and places are found without divisions.

#include <algorithm>
#include <initializer_list>

#include "core/device.h"
#include "core/divisor.h"
#include "core/gpu_formats.h"
#include "ops/elements_gpu.h"
#include "ops/quantize/quantize_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

// Scales as kernels see them, f32 or UE8M0.
struct Scales {
  void* data;
  int64_t stride;
  bool f32;
};
Scales scales_of(const ConstTensorView& v) { return {const_cast<void*>(v.data), v.row_stride, v.dtype == DType::f32}; }
GPU_INLINE float scale_at(const Scales& s, int64_t at) { return s.f32 ? static_cast<const float*>(s.data)[at] : to_f32(static_cast<const ue8m0*>(s.data)[at]); }
GPU_INLINE float read_scale(const Scales& s, int64_t i, int64_t j) { return scale_at(s, i * s.stride + j); }
GPU_INLINE void write_scale(const Scales& s, int64_t i, int64_t j, float v) {
  if (s.f32) static_cast<float*>(s.data)[i * s.stride + j] = v;
  else static_cast<ue8m0*>(s.data)[i * s.stride + j] = ue8m0{static_cast<uint8_t>(v == v ? std::bit_cast<uint32_t>(v) >> 23 : kUe8m0Nan.bits)};
}
// The scale that `amax`, the bits of the largest finite magnitude of a block, asks for.
template <typename Code>
GPU_INLINE float scale_for(uint32_t amax, float amax_floor, bool f32) {
  const float least = FloatFormat<Code>::kMax * 0x1p-126f, floor = amax_floor > least ? amax_floor : least, found = std::bit_cast<float>(amax);
  const float a = found > floor ? found : floor;
  return f32 ? f32_scale<Code>(a) : to_f32(ue8m0_scale<Code>(a));
}

// A piece of x as it lies in memory, and a number of it.
template <typename T>
using Words = Vector<uint32_t, kPiece * sizeof(T) / 4>;
template <typename T>
GPU_INLINE float number(const Words<T>& words, int i) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(words.v[i]);
  else return std::bit_cast<float>(i % 2 == 0 ? words.v[i / 2] << 16 : words.v[i / 2] & 0xffff0000u);
}
// kWhole: rows are aligned and all pieces whole; count is kPiece, or 0 beyond the end.
template <typename T, bool kWhole>
GPU_INLINE Words<T> load_piece(const T* from, int count) {
  if constexpr (!kWhole) return std::bit_cast<Words<T>>(load(from, count, false));
  struct Parts {
    Vector<uint32_t, 4> v[sizeof(Words<T>) / 16];
  } parts = {};
  if (count != 0) {
#pragma unroll
    for (size_t i = 0; i < sizeof(parts) / 16; ++i) parts.v[i] = reinterpret_cast<const Vector<uint32_t, 4>*>(from)[i];
  }
  return std::bit_cast<Words<T>>(parts);
}

// The largest magnitude of a block as bits, whose order is the numbers' order, of those that are finite; and whether any is NaN.
struct Largest {
  uint32_t finite = 0;
  bool nan = false;
};
GPU_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
GPU_INLINE Largest larger(const Largest& a, const Largest& b) { return {larger(a.finite, b.finite), a.nan || b.nan}; }
template <typename T, int N>
GPU_INLINE Largest largest_of(const Words<T> (&x)[N]) {
  float most = 0;
#pragma unroll
  for (int h = 0; h < N; ++h)
#pragma unroll
    for (int i = 0; i < kPiece; ++i) most = larger_magnitude(most, number<T>(x[h], i));
  if (std::bit_cast<uint32_t>(most) < kF32Infinity) return {std::bit_cast<uint32_t>(most), false};
  uint32_t finite = 0;
#pragma unroll
  for (int h = 0; h < N; ++h)
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(number<T>(x[h], i)) & kF32Magnitude;
      if (magnitude < kF32Infinity) finite = larger(finite, magnitude);
    }
  return {finite, std::bit_cast<uint32_t>(most) > kF32Infinity};
}

template <typename Code>
inline constexpr bool kPacked = std::is_same_v<Code, e2m1x2>;

// Over `lanes` neighbouring threads, a power of two. Whether any is NaN matters to E2M1 alone, which has no code for it.
template <typename Code>
GPU_INLINE Largest largest_of_lanes(Largest l, int lanes) {
  for (int width = lanes / 2; width >= 1; width /= 2) l.finite = larger(l.finite, shuffle_xor(l.finite, width));
  if constexpr (kPacked<Code>) {
    const uint64_t those = lanes == 64 ? ~uint64_t{0} : ((uint64_t{1} << lanes) - 1) << (lane() & -lanes);
    l.nan = (ballot(l.nan) & those) != 0;
  }
  return l;
}

// Codes of a piece, to where a row's codes of it begin: a packed piece begins at an even column. nan: whether any is.
template <typename Code, typename T>
GPU_INLINE void write_codes(uint8_t* to, const Words<T>& x, bool nan, int count, float inverse, bool aligned) {
  float v[2][4];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i / 4][i % 4] = number<T>(x, i);
  uint32_t first = 0, second = 0;
  if (nan) first = encode_four_or_nan<Code>(v[0], inverse), second = encode_four_or_nan<Code>(v[1], inverse);
  else first = encode_four<Code>(v[0], inverse), second = encode_four<Code>(v[1], inverse);
  constexpr int kBytes = kPacked<Code> ? kPiece / 2 : kPiece, kCodes = kPiece / kBytes;
  using Stored = Vector<uint32_t, kBytes / 4>;
  const auto stored = [&] {
    if constexpr (kPacked<Code>) return Stored{{first | second << 16}};
    else return Stored{{first, second}};
  }();
  if (aligned && count == kPiece) {
    store_vector(reinterpret_cast<uint32_t*>(to), stored);
    return;
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i)
    if (i * kCodes < count) to[i] = static_cast<uint8_t>(stored.v[i / 4] >> (i % 4 * 8));
}
// Bytes that n columns of codes take; n is even where codes are packed.
template <typename Code>
GPU_INLINE int64_t code_bytes(int64_t n) { return kPacked<Code> ? n / 2 : n; }

struct Matrix {
  int64_t rows, cols;
};
struct Codes {
  uint8_t* data;
  int64_t stride;
};
// How a block's scale is found. `given`: it is there.
struct Scaling {
  ScaleRule rule;
  float amax_floor;
};
template <typename Code>
GPU_INLINE float find_scale(const Scales& scales, const Scaling& scaling, const Largest& largest, int64_t i, int64_t j, bool writes) {
  if (scaling.rule == ScaleRule::given) return read_scale(scales, i, j);
  const float scale = scale_for<Code>(largest.finite, scaling.amax_floor, scales.f32 && scaling.rule == ScaleRule::of_format);
  if (writes) write_scale(scales, i, j, kPacked<Code> && largest.nan ? std::bit_cast<float>(kF32Nan) : scale);
  return scale;
}

// Where a row begins; the host has seen that strides fit.
GPU_INLINE int64_t row_offset(uint32_t row, int64_t stride) { return static_cast<int64_t>(uint64_t{row} * static_cast<uint32_t>(stride)); }
GPU_INLINE int piece_count(int64_t left) { return left >= kPiece ? kPiece : left > 0 ? static_cast<int>(left) : 0; }

// Threads hold 64 bytes of a row, in pieces that lie side by side with their neighbours'.
inline constexpr int kRowThreads = 256;
template <typename T>
inline constexpr int kHeld = 64 / (kPiece * static_cast<int>(sizeof(T)));

template <typename Code, typename T, int kBlock, bool kWhole>
GPU_KERNEL GPU_BOUNDS(kRowThreads) quantize_rows_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, const int32_t* row_of, Matrix m, Divisor blocks, Scaling scaling) {
  constexpr int kLanes = kBlock / (kPiece * kHeld<T>);
  const auto thread = static_cast<uint32_t>(thread_x());
  const uint32_t block = (static_cast<uint32_t>(block_x()) * kRowThreads + thread) / kLanes, row = blocks.quotient(block), j = block - row * blocks.divisor;
  const int64_t start = static_cast<int64_t>(j) * kBlock, rest = row < m.rows ? m.cols - start : 0;
  const int left = rest < kBlock ? static_cast<int>(rest) : kBlock, at = static_cast<int>(thread % kLanes) * kPiece;
  const T* const from = x + (row_of == nullptr || row >= m.rows ? row : row_of[row]) * x_stride + start + at;
  Words<T> words[kHeld<T>];
#pragma unroll
  for (int h = 0; h < kHeld<T>; ++h) words[h] = load_piece<T, kWhole>(from + h * kLanes * kPiece, piece_count(left - at - h * kLanes * kPiece));
  const Largest mine = largest_of<T>(words), largest = largest_of_lanes<Code>(mine, kLanes);
  if (left <= at) return;
  const float inverse = 1.0f / find_scale<Code>(scales, scaling, largest, row, j, at == 0);
  uint8_t* const to = codes.data + row * codes.stride + code_bytes<Code>(start + at);
#pragma unroll
  for (int h = 0; h < kHeld<T>; ++h) {
    const int count = piece_count(left - at - h * kLanes * kPiece);
    if (count != 0) write_codes<Code, T>(to + code_bytes<Code>(h * kLanes * kPiece), words[h], mine.nan, kWhole ? kPiece : count, inverse, kWhole);
  }
}

// Of all threads of the block, in each. The same shared memory may be used again after a barrier.
template <typename Code, int kThreads>
GPU_INLINE Largest largest_of_block(Largest l, Shared<uint32_t> shared) {
  constexpr int kWaves = kThreads / kWave;
  l = largest_of_lanes<Code>(l, kWave);
  if (lane() == 0) shared.store(wave(), l.finite | static_cast<uint32_t>(l.nan) << 31);
  sync_block();
  const uint32_t word = shared.load(lane() % kWaves);
  return largest_of_lanes<Code>({word & kF32Magnitude, word >> 31 != 0}, kWaves);
}
template <int kThreads>
inline constexpr size_t kLargestShared = kThreads / 32 * sizeof(uint32_t);

// Blocks of 128 x 128, in pieces of sixteen to a row.
inline constexpr int kSquare = 128, kSquareThreads = 512, kSquareHeld = kSquare * kSquare / kPiece / kSquareThreads;

template <typename Code, typename T, bool kWhole>
GPU_KERNEL GPU_BOUNDS(kSquareThreads, kWhole ? 2 : 1) quantize_squares_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, Matrix m, Divisor blocks, Scaling scaling) {
  constexpr int kAcross = kSquare / kPiece, kDown = kSquareThreads / kAcross;
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(kSquareThreads / kWave);
  const uint32_t i = blocks.quotient(static_cast<uint32_t>(block_x())), j = static_cast<uint32_t>(block_x()) - i * blocks.divisor;
  const int64_t row = static_cast<int64_t>(i) * kSquare + thread_x() / kAcross, at = static_cast<int64_t>(j) * kSquare + thread_x() % kAcross * kPiece;
  const int count = piece_count(m.cols - at), rows = m.rows - row < kSquare ? static_cast<int>(m.rows - row) : kSquare;
  const T* const from = x + row * x_stride + at;
  Words<T> words[kSquareHeld];
#pragma unroll
  for (int h = 0; h < kSquareHeld; ++h) words[h] = load_piece<T, kWhole>(from + h * kDown * x_stride, h * kDown < rows ? count : 0);
  const Largest mine = largest_of<T>(words), largest = largest_of_block<Code, kSquareThreads>(mine, shared);
  const float inverse = 1.0f / find_scale<Code>(scales, scaling, largest, i, j, thread_x() == 0);
  uint8_t* const to = codes.data + row * codes.stride + code_bytes<Code>(at);
#pragma unroll
  for (int h = 0; h < kSquareHeld; ++h)
    if (count != 0 && h * kDown < rows) write_codes<Code, T>(to + h * kDown * codes.stride, words[h], mine.nan, kWhole ? kPiece : count, inverse, kWhole);
}

inline constexpr int kTileThreads = 256;

// Calls f(row, column, count) for the pieces of block (i, j) that are this thread's.
template <typename F>
GPU_INLINE void for_pieces(int64_t i, int64_t j, int64_t block_rows, int64_t block_cols, const Matrix& m, const F& f) {
  const int64_t row0 = i * block_rows, col0 = j * block_cols;
  const int64_t rows = m.rows - row0 < block_rows ? m.rows - row0 : block_rows, cols = m.cols - col0 < block_cols ? m.cols - col0 : block_cols;
  const int64_t a_row = (cols + kPiece - 1) / kPiece;
#pragma unroll 4
  for (int64_t k = thread_x(); k < rows * a_row; k += kTileThreads) {
    const int64_t r = k / a_row, at = (k - r * a_row) * kPiece;
    f(row0 + r, col0 + at, cols - at < kPiece ? static_cast<int>(cols - at) : kPiece);
  }
}

template <typename Code, typename T>
GPU_KERNEL quantize_tiles_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, int64_t block_rows, int64_t block_cols, Matrix m, bool aligned,
                                 Scaling scaling) {
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(kTileThreads / kWave);
  const int64_t blocks = (m.cols + block_cols - 1) / block_cols, i = block_x() / blocks, j = block_x() - i * blocks;
  const auto words_at = [&](int64_t r, int64_t k, int count) { return std::bit_cast<Words<T>>(load(x + r * x_stride + k, count, aligned)); };
  Largest mine;
  for_pieces(i, j, block_rows, block_cols, m, [&](int64_t r, int64_t k, int count) {
    const Words<T> words[] = {words_at(r, k, count)};
    mine = larger(mine, largest_of<T>(words));
  });
  const Largest largest = largest_of_block<Code, kTileThreads>(mine, shared);
  const float inverse = 1.0f / find_scale<Code>(scales, scaling, largest, i, j, thread_x() == 0);
  for_pieces(i, j, block_rows, block_cols, m, [&](int64_t r, int64_t k, int count) {
    write_codes<Code, T>(codes.data + r * codes.stride + code_bytes<Code>(k), words_at(r, k, count), mine.nan, count, inverse, aligned);
  });
}

// A piece of codes, from where it begins in its row; of packed codes the first word alone.
template <typename Code, bool kWhole>
GPU_INLINE Vector<uint32_t, 2> load_codes(const uint8_t* from, int count) {
  Vector<uint32_t, 2> codes = {};
  if constexpr (!kWhole) {
    constexpr int kCodes = kPacked<Code> ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kPiece / kCodes; ++i)
      if (i * kCodes < count) codes.v[i / 4] |= static_cast<uint32_t>(from[i]) << (i % 4 * 8);
  } else if (count != 0) {
    if constexpr (kPacked<Code>) codes.v[0] = *reinterpret_cast<const uint32_t*>(from);
    else codes = *reinterpret_cast<const Vector<uint32_t, 2>*>(from);
  }
  return codes;
}

// Pieces of a row, and blocks: what a place is divided by. Here kWhole says also that no piece has two blocks' columns.
struct Places {
  Divisor a_row, block_rows, block_cols;
};
inline constexpr int kParts = 4;  // pieces of a thread, whose loads are on their way together

template <typename Code, typename T, bool kWhole>
GPU_KERNEL GPU_BOUNDS(kElementThreads) dequantize_kernel(T* y, int64_t y_stride, Codes codes, Scales scales, Places places, Matrix m) {
  uint32_t row[kParts], at[kParts];
  int count[kParts];
  Vector<uint32_t, 2> words[kParts];
  float scale[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const uint32_t i = (static_cast<uint32_t>(block_x()) * kParts + static_cast<uint32_t>(p)) * kElementThreads + static_cast<uint32_t>(thread_x());
    row[p] = places.a_row.quotient(i);
    at[p] = (i - row[p] * places.a_row.divisor) * kPiece;
    const int left = static_cast<int>(m.cols) - static_cast<int>(at[p]);
    count[p] = row[p] >= static_cast<uint32_t>(m.rows) ? 0 : left < kPiece ? left : kPiece;
    words[p] = load_codes<Code, kWhole>(codes.data + row_offset(row[p], codes.stride) + at[p] / (kPacked<Code> ? 2 : 1), count[p]);
    scale[p] = count[p] == 0 ? 0.0f : scale_at(scales, row_offset(places.block_rows.quotient(row[p]), scales.stride) + places.block_cols.quotient(at[p]));
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    if (count[p] == 0) continue;
    float v[2][4];
    decode_four<Code>(words[p].v[0], v[0]);
    decode_four<Code>(kPacked<Code> ? words[p].v[0] >> 16 : words[p].v[1], v[1]);
    bool nan = false;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      if (!kWhole && k < count[p]) scale[p] = read_scale(scales, places.block_rows.quotient(row[p]), places.block_cols.quotient(at[p] + static_cast<uint32_t>(k)));
      v[k / 4][k % 4] *= scale[p];
      nan |= v[k / 4][k % 4] != v[k / 4][k % 4];
    }
    Elements<T> out;
    if (nan) {
      for (int k = 0; k < kPiece; ++k) out.v[k] = from_f32<T>(v[k / 4][k % 4] == v[k / 4][k % 4] ? v[k / 4][k % 4] : std::bit_cast<float>(kF32Nan));
    } else if constexpr (std::is_same_v<T, bf16>) {
      out = std::bit_cast<Elements<T>>(Words<T>{{round_two(v[0][0], v[0][1]), round_two(v[0][2], v[0][3]), round_two(v[1][0], v[1][1]), round_two(v[1][2], v[1][3])}});
    } else {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) out.v[k] = v[k / 4][k % 4];
    }
    store(y + row_offset(row[p], y_stride) + at[p], out, kWhole ? kPiece : count[p], kWhole);
  }
}

// Counts of one thread block each: saturated, underflowed, non-finite.
inline constexpr int kCounts = 3;
inline constexpr int64_t kCountBlocks = 1024;  // at most

template <typename Code, typename T>
GPU_KERNEL quant_stats_kernel(int64_t* counts, Codes codes, Scales scales, const T* x, int64_t x_stride, int64_t block_rows, int64_t block_cols, Matrix m, bool aligned) {
  SharedMemory memory;
  const auto shared = memory.take<int64_t>(kCounts * kTileThreads / kWave);
  int64_t count[kCounts] = {};
  for (int64_t at = static_cast<int64_t>(block_x()) * kTileThreads + thread_x();; at += static_cast<int64_t>(grid_dim()) * kTileThreads) {
    const Piece p = piece_at(at, m.rows, m.cols, m.cols);
    if (p.count == 0) break;
    const Elements<T> e = load(x + p.row * x_stride + p.at, p.count, aligned);
    const uint8_t* const from = codes.data + p.row * codes.stride + code_bytes<Code>(p.at);
    const Vector<uint32_t, 2> c = aligned && p.count == kPiece ? load_codes<Code, true>(from, kPiece) : load_codes<Code, false>(from, p.count);
    const int64_t i = p.row / block_rows, first = p.at / block_cols, last = (p.at + p.count - 1) / block_cols;
    float scale = read_scale(scales, i, first);
    for (int k = 0; k < kPiece; ++k) {
      if (first != last && k < p.count) scale = read_scale(scales, i, (p.at + k) / block_cols);
      const QuantStats s = quant_stats_of<Code>(to_f32(e.v[k]), scale, kPacked<Code> ? c.v[0] >> (4 * k) & 15u : c.v[k / 4] >> (k % 4 * 8) & 255u);  // nothing for the zeros past the count
      count[0] += s.saturated;
      count[1] += s.underflowed;
      count[2] += s.nonfinite;
    }
  }
  for (int s = 0; s < kCounts; ++s) {
    for (int width = kWave / 2; width >= 1; width /= 2) count[s] += shuffle_xor(count[s], width);
    if (lane() == 0) shared.store(kCounts * wave() + s, count[s]);
  }
  sync_block();
  if (thread_x() >= kCounts) return;
  int64_t sum = 0;
  for (int w = 0; w < kTileThreads / kWave; ++w) sum += shared.load(kCounts * w + thread_x());
  counts[block_x() * kCounts + thread_x()] = sum;
}

// A run is up to 32 columns of a sub-block: its codes are entries of one table, the eight magnitudes under the run's scale.
inline constexpr int kRun = 32, kRunThreads = 512;
inline constexpr int kLeastShift = -8, kMostShift = 6;  // powers of two that every magnitude may be multiplied by and be exact in E4M3: 0.5 and 1.5 to 6
// Runs of a row of a block, and of a sub-block.
struct Runs {
  Divisor of_row, of_sub;
  int sub_cols, subs;  // columns of a sub-block, sub-blocks of a block's row
};
struct Run {
  uint32_t row;  // row and column are of the block
  int column, count, scale;
  Vector<uint32_t, 4> nibbles;
  // Bit m: whether a code of magnitude m is there. Rarely asked.
  GPU_INLINE uint32_t magnitudes() const {
    uint32_t found = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t rest = nibbles.v[w];
#pragma unroll 1
      for (int k = 8 * w; k < 8 * w + 8 && k < count; ++k, rest >>= 4) found |= 1u << (rest & 7u);
    }
    return found;
  }
};
template <bool kWhole>
GPU_INLINE Vector<uint32_t, 4> load_run(const uint8_t* from, int count) {
  Vector<uint32_t, 4> nibbles = {};
  if constexpr (kWhole) {
    nibbles = *reinterpret_cast<const Vector<uint32_t, 4>*>(from);
  } else {
#pragma unroll
    for (int k = 0; k < kRun / 2; ++k)
      if (2 * k < count) nibbles.v[k / 4] |= static_cast<uint32_t>(from[k]) << (k % 4 * 8);
  }
  return nibbles;
}
// Half of a run, of which count columns are there.
template <bool kWhole>
GPU_INLINE void store_half(uint8_t* to, const Vector<uint32_t, 4>& codes, int count) {
  if constexpr (kWhole) {
    store_vector(reinterpret_cast<uint32_t*>(to), codes);
  } else {
#pragma unroll
    for (int k = 0; k < kRun / 2; ++k)
      if (k < count) to[k] = static_cast<uint8_t>(codes.v[k / 4] >> (k % 4 * 8));
  }
}

// One block of `to` a thread block, by the rule of reference::recode_block. A thread keeps its first run. kWhole: blocks are 128 x 128 with sub-blocks of 32 columns, which
// is one run a thread; rows are aligned and all runs whole.
template <bool kWhole>
GPU_KERNEL GPU_BOUNDS(kRunThreads) recode_kernel(Codes to, Scales to_scales, uint8_t* lossy, int64_t lossy_stride, int64_t block_rows, int64_t block_cols,
                                                 Codes from, Scales from_scales, Divisor blocks, Runs runs, Matrix m) {
  constexpr int kRuns = kSquare / kRun;  // of a row
  static_assert(kRuns * kSquare == kRunThreads);
  if constexpr (kWhole) block_rows = kSquare, block_cols = kSquare, runs.subs = kRuns;
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(kRunThreads / kWave);
  const uint32_t i = blocks.quotient(static_cast<uint32_t>(block_x())), j = static_cast<uint32_t>(block_x()) - i * blocks.divisor;
  const int64_t row0 = i * block_rows, col0 = j * block_cols, rows = m.rows - row0 < block_rows ? m.rows - row0 : block_rows;
  const int cols = static_cast<int>(m.cols - col0 < block_cols ? m.cols - col0 : block_cols);
  const uint32_t end = static_cast<uint32_t>(rows) * (kWhole ? kRuns : runs.of_row.divisor);
  const uint8_t* const source = from.data + row0 * from.stride + col0 / 2;
  const uint8_t* const sub_scales = static_cast<const uint8_t*>(from_scales.data) + row0 * from_scales.stride + static_cast<int64_t>(j) * runs.subs;
  uint8_t* const target = to.data + row0 * to.stride + col0;
  const auto run_at = [&](uint32_t k) {
    uint32_t down = k / kRuns, sub = k % kRuns;
    int within = 0, column = static_cast<int>(sub) * kRun, left = cols - column;
    if constexpr (!kWhole) {
      down = runs.of_row.quotient(k);
      const uint32_t across = k - down * runs.of_row.divisor;
      sub = runs.of_sub.quotient(across);
      within = static_cast<int>(across - sub * runs.of_sub.divisor) * kRun;
      column = static_cast<int>(sub) * runs.sub_cols + within;
      left = runs.sub_cols - within < cols - column ? runs.sub_cols - within : cols - column;
    }
    if (k >= end || left <= 0) return Run{};
    const int count = kWhole || left >= kRun ? kRun : left, scale = sub_scales[row_offset(down, from_scales.stride) + sub];
    return Run{down, column, count, scale, load_run<kWhole>(source + row_offset(down, from.stride) + column / 2, count)};
  };
  const Run first = run_at(static_cast<uint32_t>(thread_x()));
  // f(run) for the runs that are this thread's.
  const auto for_runs = [&](const auto& f) {
    if (first.count != 0) f(first);
    if constexpr (!kWhole) {
      for (auto k = static_cast<uint32_t>(thread_x()) + kRunThreads; k < end; k += kRunThreads) {
        const Run run = run_at(k);
        if (run.count != 0) f(run);
      }
    }
  };
  // Both halves' largest, of all threads. The same shared memory may be used again after a barrier.
  const auto of_block = [&](uint32_t most) {
    constexpr int kWaves = kRunThreads / kWave;
    for (int width = kWave / 2; width >= 1; width /= 2) most = larger_halves(most, shuffle_xor(most, width));
    if (lane() == 0) shared.store(wave(), most);
    sync_block();
    most = shared.load(lane() % kWaves);
    for (int width = kWaves / 2; width >= 1; width /= 2) most = larger_halves(most, shuffle_xor(most, width));
    return most;
  };
  const auto write = [&](int scale) {
    for_runs([&](const Run& run) {
      const bool nan = run.scale == kUe8m0Nan.bits;
      const int apart = run.scale - scale, shift = apart < -100 ? -100 : apart > 100 ? 100 : apart;
      const float by = std::bit_cast<float>(static_cast<uint32_t>(127 + shift) << 23);
      const Vector<uint32_t, 2> table = {{encode_four<e4m3>({0.0f, 0.5f, 1.0f, 1.5f}, by), encode_four<e4m3>({2.0f, 3.0f, 4.0f, 6.0f}, by)}};
      uint8_t* const codes = target + row_offset(run.row, to.stride) + run.column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<uint32_t, 4> words;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const auto magnitudes = look_up(table, run.nibbles.v[2 * half + w]), signs = nibble_signs(run.nibbles.v[2 * half + w]);
#pragma unroll
          for (int k = 0; k < 2; ++k) words.v[2 * w + k] = nan ? FloatFormat<e4m3>::kNanCode * 0x01010101u : magnitudes.v[k] | signs.v[k];
        }
        store_half<kWhole>(codes + half * kRun / 2, words, run.count - half * kRun / 2);
      }
    });
  };
  // Whether a code under this scale is inexact, of all threads.
  const auto loses = [&](int scale) {
    uint32_t inexact = 0;
    for_runs([&](const Run& run) {
      if (run.scale == kUe8m0Nan.bits) return;
      const uint32_t there = run.magnitudes();
      const int apart = run.scale - scale, shift = apart < -100 ? -100 : apart > 100 ? 100 : apart;
#pragma unroll 1
      for (int k = 0; k < 8; ++k) {
        const float v = decode<e2m1x2>(static_cast<uint8_t>(k)) * std::bit_cast<float>(static_cast<uint32_t>(127 + shift) << 23);
        if (to_f32(to_e4m3(v)) != v) inexact |= there >> k & 1u;
      }
    });
    sync_block();
    return of_block(inexact) != 0;
  };
  // The largest sub-scale, and how far under 255 the least one is.
  uint32_t range = 0;
  for_runs([&](const Run& run) {
    if (run.scale != kUe8m0Nan.bits) range = larger_halves(range, static_cast<uint32_t>(run.scale) | static_cast<uint32_t>(255 - run.scale) << 16);
  });
  range = of_block(range);
  const int most = static_cast<int>(range & 0xffffu), least = 255 - static_cast<int>(range >> 16);
  int scale = most > kMostShift ? most - kMostShift : 0;
  bool lost = false;
  if (least - scale < kLeastShift && loses(scale)) {
    // The least scale under which no value overflows.
    uint32_t tight = 0;
    for_runs([&](const Run& run) {
      const uint32_t there = run.magnitudes() & ~1u;
      if (run.scale == kUe8m0Nan.bits || there == 0) return;
      const int needed = run.scale + (static_cast<int>(std::bit_width(there)) - 1) / 2 - 9;
      tight = larger(tight, static_cast<uint32_t>(needed > 0 ? needed : 0));
    });
    sync_block();
    scale = static_cast<int>(of_block(tight));
    lost = loses(scale);
  }
  write(scale);
  if (thread_x() != 0) return;
  write_scale(to_scales, i, j, to_f32(ue8m0{static_cast<uint8_t>(scale)}));
  if (lossy != nullptr) lossy[i * lossy_stride + j] = lost ? 1 : 0;
}

Codes codes_of(const ConstTensorView& v) { return {static_cast<uint8_t*>(const_cast<void*>(v.data)), v.row_stride}; }

// f(type of the codes, type of x).
template <typename F>
void with_types(DType codes, DType x, const F& f) {
  const auto with_x = [&](auto t) {
    if (codes == DType::e4m3) f(e4m3{}, t);
    else if (codes == DType::e5m2) f(e5m2{}, t);
    else f(e2m1x2{}, t);
  };
  x == DType::f32 ? with_x(float{}) : with_x(bf16{});
}

// Whether every row begins at a multiple of so many bytes.
bool rows_aligned(const ConstTensorView& v, size_t bytes) {
  return reinterpret_cast<uintptr_t>(v.data) % bytes == 0 && (v.rows() <= 1 || static_cast<size_t>(v.row_stride) * dtype_bytes(v.dtype) % bytes == 0);
}
// Kernels count pieces and blocks, and reckon with strides, in 31 bits.
void check_size(const char* op, int64_t rows, int64_t cols, std::initializer_list<int64_t> strides) {
  constexpr int64_t kEnd = int64_t{1} << 31, kIdle = 4096;  // no more threads than that have nothing to do
  GPU_CHECK(rows * (blocks_for(cols, kPiece) + 1) < kEnd - kIdle && std::max(std::max(strides), cols) < kEnd, "%s: [%ld, %ld] is too large", op,
            static_cast<long>(rows), static_cast<long>(cols));
}

template <typename Code, typename T>
void quantize_as(Context& c, const QuantView& q, const ConstTensorView& x, const Scaling& scaling, const ConstTensorView& row_of) {
  const Codes codes = codes_of(q.codes);
  const Scales scales = scales_of(q.scales);
  Matrix m{q.codes.rows(), x.dim(1)};
  const bool aligned = rows_aligned(x, 16) && rows_aligned(q.codes, kPacked<Code> ? kPiece / 2 : kPiece) && q.block_cols % kPiece == 0, whole = aligned && m.cols % kPiece == 0;
  int64_t blocks = q.scales.dim(1);
  check_size("quantize", m.rows, blocks * q.block_cols, {x.row_stride, q.codes.row_stride, q.scales.row_stride});
  if (q.block_rows == 128 && q.block_cols == 128)
    return launch(c, "quantize_squares", {.blocks = q.scales.shape.elements(), .threads = kSquareThreads, .shared_bytes = kLargestShared<kSquareThreads>},
                  whole ? quantize_squares_kernel<Code, T, true> : quantize_squares_kernel<Code, T, false>, codes, scales, x.ptr<T>(), x.row_stride, m, Divisor(blocks), scaling);
  if (q.block_rows == 1 && (q.block_cols == 128 || q.block_cols == 64 || q.block_cols == 32)) {
    // Whole blocks without gaps are one long row.
    if (row_of.empty() && m.cols % q.block_cols == 0 && x.contiguous() && q.codes.contiguous() && q.scales.contiguous()) m.cols *= m.rows, blocks *= m.rows, m.rows = 1;
    const auto run = [&](auto kernel) {
      launch(c, "quantize_rows", {.blocks = blocks_for(m.rows * blocks * q.block_cols, kHeld<T> * kPiece * kRowThreads), .threads = kRowThreads}, kernel, codes, scales, x.ptr<T>(),
             x.row_stride, row_of.empty() ? nullptr : row_of.ptr<int32_t>(), m, Divisor(blocks), scaling);
    };
    if (q.block_cols == 128) return run(whole ? quantize_rows_kernel<Code, T, 128, true> : quantize_rows_kernel<Code, T, 128, false>);
    if (q.block_cols == 64) return run(whole ? quantize_rows_kernel<Code, T, 64, true> : quantize_rows_kernel<Code, T, 64, false>);
    return run(whole ? quantize_rows_kernel<Code, T, 32, true> : quantize_rows_kernel<Code, T, 32, false>);
  }
  launch(c, "quantize_tiles", {.blocks = q.scales.shape.elements(), .threads = kTileThreads, .shared_bytes = kLargestShared<kTileThreads>}, quantize_tiles_kernel<Code, T>, codes,
         scales, x.ptr<T>(), x.row_stride, q.block_rows, q.block_cols, m, aligned, scaling);
}

}  // namespace

void quantize(Context& c, QuantView q, ConstTensorView x, ScaleRule rule, float amax_floor, ConstTensorView row_of) {
  with_types(q.codes.dtype, x.dtype, [&]<typename Code, typename T>(Code, T) { quantize_as<Code, T>(c, q, x, {rule, amax_floor}, row_of); });
}

void dequantize(Context& c, TensorView y, ConstQuantView q) {
  const bool packed = q.codes.dtype == DType::e2m1x2;
  const Matrix m{y.rows(), y.dim(1)};
  const bool whole = rows_aligned(y, 16) && rows_aligned(q.codes, packed ? kPiece / 2 : kPiece) && m.cols % kPiece == 0 && q.block_cols % kPiece == 0;
  const int64_t a_row = blocks_for(m.cols, kPiece);
  check_size("dequantize", m.rows, m.cols, {y.row_stride, q.codes.row_stride, q.scales.row_stride});
  const Places places{Divisor(a_row), Divisor(q.block_rows), Divisor(q.block_cols)};
  with_types(q.codes.dtype, y.dtype, [&]<typename Code, typename T>(Code, T) {
    launch(c, "dequantize", {.blocks = blocks_for(m.rows * a_row, kParts * kElementThreads), .threads = kElementThreads},
           whole ? dequantize_kernel<Code, T, true> : dequantize_kernel<Code, T, false>, y.ptr<T>(), y.row_stride,
           codes_of(q.codes), scales_of(q.scales), places, m);
  });
}

QuantStats quant_stats(Context& c, ConstQuantView q, ConstTensorView x) {
  ArenaScope scope(*c.workspace);
  const Matrix m{x.rows(), x.dim(1)};
  const int64_t blocks = std::min(kCountBlocks, blocks_for(m.rows * blocks_for(m.cols, kPiece), kTileThreads));
  const TensorView counts = c.workspace->tensor(DType::i64, {blocks, kCounts}, "quantize counts");
  with_types(q.codes.dtype, x.dtype, [&]<typename Code, typename T>(Code, T) {
    launch(c, "quant_stats", {.blocks = blocks, .threads = kTileThreads, .shared_bytes = kCounts * kTileThreads / kWave * sizeof(int64_t)},
           quant_stats_kernel<Code, T>, counts.ptr<int64_t>(), codes_of(q.codes), scales_of(q.scales), x.ptr<T>(), x.row_stride, q.block_rows, q.block_cols, m, all_aligned(x, q.codes));
  });
  int64_t host[kCountBlocks][kCounts];
  download_bytes(c, host, counts.data, counts.bytes());
  QuantStats stats;
  stats.elements = x.shape.elements();
  for (int64_t b = 0; b < blocks; ++b) {
    stats.saturated += host[b][0];
    stats.underflowed += host[b][1];
    stats.nonfinite += host[b][2];
  }
  return stats;
}

void recode_fp4(Context& c, QuantView to, TensorView lossy, ConstQuantView from) {
  const int64_t a_sub = blocks_for(from.block_cols, kRun), subs = to.block_cols / from.block_cols;
  const bool whole = rows_aligned(to.codes, kRun / 2) && rows_aligned(from.codes, kRun / 2) && to.block_rows == kSquare && to.block_cols == kSquare && from.block_cols == kRun &&
                     from.code_cols() % kRun == 0;
  check_size("recode_fp4", from.rows(), from.code_cols(), {from.codes.row_stride, from.scales.row_stride, to.codes.row_stride});
  const Runs runs{Divisor(subs * a_sub), Divisor(a_sub), static_cast<int>(from.block_cols), static_cast<int>(subs)};
  GPU_CHECK(to.block_rows * runs.of_row.divisor < (int64_t{1} << 31) && to.block_cols < (int64_t{1} << 31), "recode_fp4: blocks of %ld x %ld are too large", static_cast<long>(to.block_rows),
            static_cast<long>(to.block_cols));
  launch(c, "recode_fp4", {.blocks = to.scales.shape.elements(), .threads = kRunThreads, .shared_bytes = kLargestShared<kRunThreads>},
         whole ? recode_kernel<true> : recode_kernel<false>, codes_of(to.codes), scales_of(to.scales), lossy.data == nullptr ? nullptr : lossy.ptr<uint8_t>(), lossy.row_stride, to.block_rows, to.block_cols, codes_of(from.codes),
         scales_of(from.scales), Divisor(to.scales.dim(1)), runs, Matrix{from.rows(), from.code_cols()});
}

}  // namespace lockstep::device
