// Blocks of one row and 32, 64 or 128 columns, which is what activations, kv rows and FP4 have: 2, 4 or 8 threads hold a block in registers. Weights' blocks of
// 128 x 128: a thread block holds one. Others are read twice, from memory and from cache.
// Bound by memory: x once, codes and scales once. Floor: (bytes of x + bytes of codes) / 4 TB/s. What is beside loads and stores must be few instructions: 33 million
// numbers, whose bytes take 24 to 40 us, take another us for each. So conversions are the GPU's own (core/gpu_formats.h) and places are found without divisions.

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
GPU_INLINE float read_scale(const Scales& s, int64_t i, int64_t j) {
  return s.f32 ? static_cast<const float*>(s.data)[i * s.stride + j] : to_f32(static_cast<const ue8m0*>(s.data)[i * s.stride + j]);
}
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

// The largest magnitude of a block as bits, whose order is the numbers' order, of those that are finite; and whether any is NaN.
struct Largest {
  uint32_t finite = 0;
  bool nan = false;
};
GPU_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
template <typename T>
GPU_INLINE uint32_t magnitude(T v) { return std::bit_cast<uint32_t>(to_f32(v)) & kF32Magnitude; }
template <typename T>
GPU_INLINE Largest largest_of(const Elements<T>& x) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) most = larger(most, magnitude(x.v[i]));
  if (most < kF32Infinity) return {most, false};
  uint32_t finite = 0;
  for (int i = 0; i < kPiece; ++i)
    if (magnitude(x.v[i]) < kF32Infinity) finite = larger(finite, magnitude(x.v[i]));
  return {finite, most > kF32Infinity};
}
GPU_INLINE Largest larger(const Largest& a, const Largest& b) { return {larger(a.finite, b.finite), a.nan || b.nan}; }

template <typename Code>
inline constexpr bool kPacked = std::is_same_v<Code, e2m1x2>;
// Only E2M1 has no code for NaN: there it is written as +0, and the scale tells.
template <typename Code>
inline constexpr bool kTellsNan = kPacked<Code>;

// Over `lanes` neighbouring threads, a power of two.
template <typename Code>
GPU_INLINE Largest largest_of_lanes(Largest l, int lanes) {
  for (int width = lanes / 2; width >= 1; width /= 2) l.finite = larger(l.finite, shuffle_xor(l.finite, width));
  if constexpr (kTellsNan<Code>) {
    const uint64_t those = lanes == 64 ? ~uint64_t{0} : ((uint64_t{1} << lanes) - 1) << (lane() & -lanes);
    l.nan = (ballot(l.nan) & those) != 0;
  }
  return l;
}

// Codes of a piece, at column `at` of a row of codes. A packed piece begins at an even column.
template <typename Code, typename T>
GPU_INLINE void write_codes(uint8_t* row, int64_t at, const Elements<T>& x, bool nan, int count, float inverse, bool aligned) {
  float v[2][4];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i / 4][i % 4] = to_f32(x.v[i]);
  if (kTellsNan<Code> && nan) {
    for (int i = 0; i < kPiece; ++i) v[i / 4][i % 4] = v[i / 4][i % 4] == v[i / 4][i % 4] ? v[i / 4][i % 4] : 0.0f;
  }
  const uint32_t first = encode_four<Code>(v[0], inverse), second = encode_four<Code>(v[1], inverse);
  if constexpr (kPacked<Code>) {
    const auto pairs = std::bit_cast<Vector<uint8_t, kPiece / 2>>(first | second << 16);
    if (aligned && count == kPiece) {
      store_vector(row + at / 2, pairs);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPiece / 2; ++i)
      if (2 * i < count) row[at / 2 + i] = pairs.v[i];
  } else {
    store(row + at, std::bit_cast<Elements<uint8_t>>(Vector<uint32_t, 2>{{first, second}}), count, aligned);
  }
}

struct Matrix {
  int64_t rows, cols;
  bool aligned;
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
  if (writes) write_scale(scales, i, j, kTellsNan<Code> && largest.nan ? std::bit_cast<float>(kF32Nan) : scale);
  return scale;
}

inline constexpr int kRowThreads = 256, kHeld = 2;  // pieces of a block that a thread holds

template <typename Code, typename T, int kLanes>
GPU_KERNEL GPU_BOUNDS(kRowThreads) quantize_rows_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, const int32_t* row_of, Matrix m, Divisor blocks, Scaling scaling) {
  const uint32_t block = (static_cast<uint32_t>(block_x()) * kRowThreads + static_cast<uint32_t>(thread_x())) / kLanes;
  const uint32_t row = m.rows == 1 ? 0 : blocks.quotient(block), j = block - row * blocks.divisor;
  const int64_t from = row_of == nullptr || row >= m.rows ? row : row_of[row];
  const int lane = thread_x() % kLanes;
  int64_t at[kHeld];
  int count[kHeld];
  Elements<T> e[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    at[h] = (static_cast<int64_t>(j) * kHeld + h) * (kLanes * kPiece) + lane * kPiece;
    const int64_t left = row < m.rows ? m.cols - at[h] : 0;
    count[h] = left >= kPiece ? kPiece : left > 0 ? static_cast<int>(left) : 0;
    e[h] = load(x + from * x_stride + at[h], count[h], m.aligned);
  }
  Largest largest;
#pragma unroll
  for (int h = 0; h < kHeld; ++h) largest = larger(largest, largest_of(e[h]));
  largest = largest_of_lanes<Code>(largest, kLanes);
  if (count[0] == 0) return;
  const float inverse = 1.0f / find_scale<Code>(scales, scaling, largest, row, j, lane == 0);
#pragma unroll
  for (int h = 0; h < kHeld; ++h) write_codes<Code>(codes.data + row * codes.stride, at[h], e[h], largest.nan, count[h], inverse, m.aligned);
}

// Of all threads of the block, in each. The same shared memory may be used again after a barrier.
template <typename Code, int kThreads>
GPU_INLINE Largest largest_of_block(Largest l, Shared<uint32_t> shared) {
  constexpr int kWaves = kThreads / kWave;
  l = largest_of_lanes<Code>(l, kWave);
  if (lane() == 0) shared.store(wave(), l.finite | static_cast<uint32_t>(l.nan) << 31);
  sync_block();
  l = {};
#pragma unroll
  for (int w = 0; w < kWaves; ++w) {
    const uint32_t word = shared.load(w);
    l = larger(l, {word & kF32Magnitude, word >> 31 != 0});
  }
  return l;
}
template <int kThreads>
inline constexpr size_t kLargestShared = kThreads / 32 * sizeof(uint32_t);

// Blocks of 128 x 128, in pieces of sixteen to a row.
inline constexpr int kSquare = 128, kSquareThreads = 512, kSquareHeld = kSquare * kSquare / kPiece / kSquareThreads;

template <typename Code, typename T>
GPU_KERNEL GPU_BOUNDS(kSquareThreads, 2) quantize_squares_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, Matrix m, Divisor blocks, Scaling scaling) {
  constexpr int kAcross = kSquare / kPiece, kDown = kSquareThreads / kAcross;
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(kSquareThreads / kWave);
  const uint32_t i = blocks.quotient(static_cast<uint32_t>(block_x())), j = static_cast<uint32_t>(block_x()) - i * blocks.divisor;
  const int64_t row = static_cast<int64_t>(i) * kSquare + thread_x() / kAcross, at = static_cast<int64_t>(j) * kSquare + thread_x() % kAcross * kPiece, left = m.cols - at;
  const int count = left >= kPiece ? kPiece : left > 0 ? static_cast<int>(left) : 0;
  Elements<T> e[kSquareHeld];
#pragma unroll
  for (int h = 0; h < kSquareHeld; ++h) e[h] = load(x + (row + h * kDown) * x_stride + at, row + h * kDown < m.rows ? count : 0, m.aligned);
  Largest largest;
#pragma unroll
  for (int h = 0; h < kSquareHeld; ++h) largest = larger(largest, largest_of(e[h]));
  largest = largest_of_block<Code, kSquareThreads>(largest, shared);
  const float inverse = 1.0f / find_scale<Code>(scales, scaling, largest, i, j, thread_x() == 0);
#pragma unroll
  for (int h = 0; h < kSquareHeld; ++h)
    write_codes<Code>(codes.data + (row + h * kDown) * codes.stride, at, e[h], largest.nan, row + h * kDown < m.rows ? count : 0, inverse, m.aligned);
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
GPU_KERNEL quantize_tiles_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, int64_t block_rows, int64_t block_cols, Matrix m, Scaling scaling) {
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(kTileThreads / kWave);
  const int64_t blocks = (m.cols + block_cols - 1) / block_cols, i = block_x() / blocks, j = block_x() - i * blocks;
  Largest largest;
  for_pieces(i, j, block_rows, block_cols, m,
             [&](int64_t r, int64_t k, int count) { largest = larger(largest, largest_of(load(x + r * x_stride + k, count, m.aligned))); });
  largest = largest_of_block<Code, kTileThreads>(largest, shared);
  const float inverse = 1.0f / find_scale<Code>(scales, scaling, largest, i, j, thread_x() == 0);
  for_pieces(i, j, block_rows, block_cols, m, [&](int64_t r, int64_t k, int count) {
    write_codes<Code>(codes.data + r * codes.stride, k, load(x + r * x_stride + k, count, m.aligned), largest.nan, count, inverse, m.aligned);
  });
}

template <typename Code>
GPU_INLINE uint8_t code_at(const uint8_t* row, int64_t k) {
  if constexpr (kPacked<Code>) return static_cast<uint8_t>(row[k / 2] >> (k % 2 * 4) & 15);
  else return row[k];
}

// The bytes of a piece of codes; of packed codes they fill one half.
template <typename Code>
GPU_INLINE Elements<uint8_t> load_codes(const uint8_t* row, int64_t at, int count, bool aligned) {
  if constexpr (!kPacked<Code>) return load(row + at, count, aligned);
  Vector<uint8_t, kPiece / 2> pairs = {};
  if (aligned && count == kPiece) {
    pairs = *reinterpret_cast<const Vector<uint8_t, kPiece / 2>*>(row + at / 2);
  } else {
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k)
      if (2 * k < count) pairs.v[k] = row[at / 2 + k];
  }
  return std::bit_cast<Elements<uint8_t>>(Vector<uint32_t, 2>{{std::bit_cast<uint32_t>(pairs), 0}});
}

// Pieces of a row, and blocks: what a place is divided by.
struct Places {
  Divisor a_row, block_rows, block_cols;
  bool whole;  // no piece has two blocks' columns
};
inline constexpr int kParts = 4;  // pieces of a thread, whose loads are on their way together

template <typename Code, typename T>
GPU_KERNEL GPU_BOUNDS(kElementThreads) dequantize_kernel(T* y, int64_t y_stride, Codes codes, Scales scales, Places places, Matrix m) {
  Piece piece[kParts];
  Elements<uint8_t> bytes[kParts];  // of packed codes the first half
  float scale[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const uint32_t i = (static_cast<uint32_t>(block_x()) * kParts + static_cast<uint32_t>(p)) * kElementThreads + static_cast<uint32_t>(thread_x());
    const uint32_t row = m.rows == 1 ? 0 : places.a_row.quotient(i), at = (i - row * places.a_row.divisor) * kPiece;
    const int64_t left = row < m.rows ? m.cols - at : 0;
    const int count = left >= kPiece ? kPiece : left > 0 ? static_cast<int>(left) : 0;
    piece[p] = {row, at, count};
    bytes[p] = load_codes<Code>(codes.data + row * codes.stride, at, count, m.aligned);
    scale[p] = count == 0 ? 0.0f : read_scale(scales, places.block_rows.quotient(row), places.block_cols.quotient(at));
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const auto words = std::bit_cast<Vector<uint32_t, 2>>(bytes[p]);
    float v[2][4];
    decode_four<Code>(words.v[0], v[0]);
    decode_four<Code>(kPacked<Code> ? words.v[0] >> 16 : words.v[1], v[1]);
    bool nan = false;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      if (!places.whole && k < piece[p].count)
        scale[p] = read_scale(scales, places.block_rows.quotient(static_cast<uint32_t>(piece[p].row)), places.block_cols.quotient(static_cast<uint32_t>(piece[p].at + k)));
      v[k / 4][k % 4] *= scale[p];
      nan |= v[k / 4][k % 4] != v[k / 4][k % 4];
    }
    Elements<T> out;
    if (nan) {
      for (int k = 0; k < kPiece; ++k) out.v[k] = from_f32<T>(v[k / 4][k % 4] == v[k / 4][k % 4] ? v[k / 4][k % 4] : std::bit_cast<float>(kF32Nan));
    } else if constexpr (std::is_same_v<T, bf16>) {
      out = std::bit_cast<Elements<T>>(Vector<uint32_t, 4>{{round_two(v[0][0], v[0][1]), round_two(v[0][2], v[0][3]), round_two(v[1][0], v[1][1]), round_two(v[1][2], v[1][3])}});
    } else {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) out.v[k] = v[k / 4][k % 4];
    }
    store(y + piece[p].row * y_stride + piece[p].at, out, piece[p].count, m.aligned);
  }
}

// Counts of one thread block each: saturated, underflowed, non-finite.
inline constexpr int kCounts = 3;
inline constexpr int64_t kCountBlocks = 1024;  // at most

template <typename Code, typename T>
GPU_KERNEL quant_stats_kernel(int64_t* counts, Codes codes, Scales scales, const T* x, int64_t x_stride, int64_t block_rows, int64_t block_cols, Matrix m) {
  SharedMemory memory;
  const auto shared = memory.take<int64_t>(kCounts * kTileThreads / kWave);
  int64_t count[kCounts] = {};
  for (int64_t at = static_cast<int64_t>(block_x()) * kTileThreads + thread_x();; at += static_cast<int64_t>(grid_dim()) * kTileThreads) {
    const Piece p = piece_at(at, m.rows, m.cols, m.cols);
    if (p.count == 0) break;
    const Elements<T> e = load(x + p.row * x_stride + p.at, p.count, m.aligned);
    const Elements<uint8_t> c = load_codes<Code>(codes.data + p.row * codes.stride, p.at, p.count, m.aligned);
    const int64_t i = p.row / block_rows, first = p.at / block_cols, last = (p.at + p.count - 1) / block_cols;
    float scale = read_scale(scales, i, first);
    for (int k = 0; k < kPiece; ++k) {
      if (first != last && k < p.count) scale = read_scale(scales, i, (p.at + k) / block_cols);
      const QuantStats s = quant_stats_of<Code>(to_f32(e.v[k]), scale, kPacked<Code> ? c.v[k / 2] >> (k % 2 * 4) & 15u : c.v[k]);  // nothing for the zeros past the count
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
inline constexpr int kRun = 32;
// Runs of a row of a block, and of a sub-block.
struct Runs {
  Divisor of_row, of_sub;
  int64_t sub_cols;
  bool aligned;
};
GPU_INLINE Vector<uint32_t, 4> load_run(const uint8_t* from, int count, bool aligned) {
  if (aligned && count == kRun) return *reinterpret_cast<const Vector<uint32_t, 4>*>(from);
  Vector<uint8_t, kRun / 2> pairs = {};
#pragma unroll
  for (int k = 0; k < kRun / 2; ++k)
    if (2 * k < count) pairs.v[k] = from[k];
  return std::bit_cast<Vector<uint32_t, 4>>(pairs);
}
GPU_INLINE void store_run(uint8_t* to, const Vector<uint32_t, 8>& codes, int count, bool aligned) {
  const auto bytes = std::bit_cast<Vector<uint8_t, kRun>>(codes);
  if (aligned && count == kRun) {
    store_vector(to, bytes);
    return;
  }
#pragma unroll
  for (int k = 0; k < kRun; ++k)
    if (k < count) to[k] = bytes.v[k];
}
// Bit m: whether a code of magnitude m is among the nibbles.
GPU_INLINE uint32_t magnitudes_among(const Vector<uint32_t, 4>& nibbles, int count) {
  uint32_t found = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k)
    if (k < count) found |= 1u << (nibbles.v[k / 8] >> (k % 8 * 4) & 7u);
  return found;
}

// One block of `to` a thread block, by the rule of reference::recode_block.
GPU_KERNEL GPU_BOUNDS(kTileThreads) recode_kernel(Codes to, Scales to_scales, uint8_t* lossy, int64_t lossy_stride, int64_t block_rows, int64_t block_cols, Codes from,
                                                  Scales from_scales, Divisor blocks, Runs runs, Matrix m) {
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(kTileThreads / kWave);
  const uint32_t i = blocks.quotient(static_cast<uint32_t>(block_x())), j = static_cast<uint32_t>(block_x()) - i * blocks.divisor;
  const int64_t row0 = i * block_rows, col0 = j * block_cols, rows = m.rows - row0 < block_rows ? m.rows - row0 : block_rows;
  // f(row, column, count, sub-scale) for the runs that are this thread's.
  const auto for_runs = [&](const auto& f) {
    const auto end = static_cast<uint32_t>(rows) * runs.of_row.divisor;
#pragma unroll 2
    for (auto k = static_cast<uint32_t>(thread_x()); k < end; k += kTileThreads) {
      const uint32_t row = runs.of_row.quotient(k), run = k - row * runs.of_row.divisor, sub = runs.of_sub.quotient(run);
      const int64_t within = static_cast<int64_t>(run - sub * runs.of_sub.divisor) * kRun, column = col0 + sub * runs.sub_cols + within;
      const int64_t of_sub = runs.sub_cols - within, left = of_sub < m.cols - column ? of_sub : m.cols - column;
      if (left <= 0) continue;
      const int64_t r = row0 + row;
      const int scale = static_cast<const uint8_t*>(from_scales.data)[r * from_scales.stride + col0 / runs.sub_cols + sub];
      f(r, column, left < kRun ? static_cast<int>(left) : kRun, scale);
    }
  };
  const auto of_block = [&](uint32_t most) {
    sync_block();
    return static_cast<int>(largest_of_block<e4m3, kTileThreads>({most, false}, shared).finite);
  };
  const auto write = [&](int scale) {
    uint32_t inexact = 0;
    for_runs([&](int64_t r, int64_t column, int count, int sub_scale) {
      const auto nibbles = load_run(from.data + r * from.stride + column / 2, count, runs.aligned);
      Vector<uint32_t, 8> codes;
      if (sub_scale == kUe8m0Nan.bits) {
#pragma unroll
        for (int w = 0; w < 8; ++w) codes.v[w] = FloatFormat<e4m3>::kNanCode * 0x01010101u;
      } else {
        const int apart = sub_scale - scale, shift = apart < -100 ? -100 : apart > 100 ? 100 : apart;
        const float by = std::bit_cast<float>(static_cast<uint32_t>(127 + shift) << 23);
        const Vector<uint32_t, 2> table = {{encode_four<e4m3>({0.0f, 0.5f, 1.0f, 1.5f}, by), encode_four<e4m3>({2.0f, 3.0f, 4.0f, 6.0f}, by)}};
        if (shift < -8 || shift > 6) {  // between them every magnitude is exact
          const uint32_t among = magnitudes_among(nibbles, count);
          for (uint32_t k = 0; k < 8; ++k)
            if (decode<e4m3>(static_cast<uint8_t>(table.v[k / 4] >> (k % 4 * 8))) != decode<e2m1x2>(static_cast<uint8_t>(k)) * by) inexact |= among >> k & 1u;
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto magnitudes = look_up(table, nibbles.v[w]), signs = nibble_signs(nibbles.v[w]);
          codes.v[2 * w] = magnitudes.v[0] | signs.v[0];
          codes.v[2 * w + 1] = magnitudes.v[1] | signs.v[1];
        }
      }
      store_run(to.data + r * to.stride + column, codes, count, runs.aligned);
    });
    return of_block(inexact) == 0;
  };
  uint32_t largest = 0;
  for_runs([&](int64_t, int64_t, int, int sub_scale) { largest = larger(largest, sub_scale == kUe8m0Nan.bits ? 0u : static_cast<uint32_t>(sub_scale)); });
  const int most = of_block(largest);
  int scale = most > 6 ? most - 6 : 0;
  bool exact = write(scale);
  if (!exact) {
    // The least scale under which no value overflows.
    uint32_t tight = 0;
    for_runs([&](int64_t r, int64_t column, int count, int sub_scale) {
      const uint32_t among = magnitudes_among(load_run(from.data + r * from.stride + column / 2, count, runs.aligned), count) & ~1u;
      if (sub_scale == kUe8m0Nan.bits || among == 0) return;
      const int needed = sub_scale + (static_cast<int>(std::bit_width(among)) - 1) / 2 - 9;
      tight = larger(tight, static_cast<uint32_t>(needed > 0 ? needed : 0));
    });
    scale = of_block(tight);
    exact = write(scale);
  }
  if (thread_x() != 0) return;
  write_scale(to_scales, i, j, to_f32(ue8m0{static_cast<uint8_t>(scale)}));
  if (lossy != nullptr) lossy[i * lossy_stride + j] = exact ? 0 : 1;
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
// Kernels count pieces, and blocks, in 31 bits.
void check_size(const char* op, int64_t rows, int64_t cols) {
  GPU_CHECK(rows * (blocks_for(cols, kPiece) + 1) < (int64_t{1} << 31), "%s: [%ld, %ld] is too large", op, static_cast<long>(rows), static_cast<long>(cols));
}

template <typename Code, typename T>
void quantize_as(Context& c, const QuantView& q, const ConstTensorView& x, const Scaling& scaling, const ConstTensorView& row_of) {
  const Codes codes = codes_of(q.codes);
  const Scales scales = scales_of(q.scales);
  Matrix m{q.codes.rows(), x.dim(1), rows_aligned(x, 16) && rows_aligned(q.codes, kPacked<Code> ? kPiece / 2 : kPiece) && q.block_cols % kPiece == 0};
  int64_t blocks = q.scales.dim(1);
  check_size("quantize", m.rows, blocks * q.block_cols);
  if (q.block_rows == 128 && q.block_cols == 128)
    return launch(c, "quantize_squares", {.blocks = q.scales.shape.elements(), .threads = kSquareThreads, .shared_bytes = kLargestShared<kSquareThreads>},
                  quantize_squares_kernel<Code, T>, codes, scales, x.ptr<T>(), x.row_stride, m, Divisor(blocks), scaling);
  if (q.block_rows == 1 && (q.block_cols == 128 || q.block_cols == 64 || q.block_cols == 32)) {
    // Whole blocks without gaps are one long row.
    if (row_of.empty() && m.cols % q.block_cols == 0 && x.contiguous() && q.codes.contiguous() && q.scales.contiguous()) m.cols *= m.rows, blocks *= m.rows, m.rows = 1;
    const auto run = [&](auto kernel) {
      launch(c, "quantize_rows", {.blocks = blocks_for(m.rows * blocks * q.block_cols, kHeld * kPiece * kRowThreads), .threads = kRowThreads}, kernel, codes, scales, x.ptr<T>(),
             x.row_stride, row_of.empty() ? nullptr : row_of.ptr<int32_t>(), m, Divisor(blocks), scaling);
    };
    return run(q.block_cols == 128 ? quantize_rows_kernel<Code, T, 8> : q.block_cols == 64 ? quantize_rows_kernel<Code, T, 4> : quantize_rows_kernel<Code, T, 2>);
  }
  launch(c, "quantize_tiles", {.blocks = q.scales.shape.elements(), .threads = kTileThreads, .shared_bytes = kLargestShared<kTileThreads>}, quantize_tiles_kernel<Code, T>, codes,
         scales, x.ptr<T>(), x.row_stride, q.block_rows, q.block_cols, m, scaling);
}

}  // namespace

void quantize(Context& c, QuantView q, ConstTensorView x, ScaleRule rule, float amax_floor, ConstTensorView row_of) {
  with_types(q.codes.dtype, x.dtype, [&]<typename Code, typename T>(Code, T) { quantize_as<Code, T>(c, q, x, {rule, amax_floor}, row_of); });
}

void dequantize(Context& c, TensorView y, ConstQuantView q) {
  const bool packed = q.codes.dtype == DType::e2m1x2;
  const Matrix m{y.rows(), y.dim(1), rows_aligned(y, 16) && rows_aligned(q.codes, packed ? kPiece / 2 : kPiece)};
  const int64_t a_row = blocks_for(m.cols, kPiece);
  check_size("dequantize", m.rows, m.cols);
  const Places places{Divisor(a_row), Divisor(q.block_rows), Divisor(q.block_cols), q.block_cols % kPiece == 0};
  with_types(q.codes.dtype, y.dtype, [&]<typename Code, typename T>(Code, T) {
    launch(c, "dequantize", {.blocks = blocks_for(m.rows * a_row, kParts * kElementThreads), .threads = kElementThreads}, dequantize_kernel<Code, T>, y.ptr<T>(), y.row_stride,
           codes_of(q.codes), scales_of(q.scales), places, m);
  });
}

QuantStats quant_stats(Context& c, ConstQuantView q, ConstTensorView x) {
  ArenaScope scope(*c.workspace);
  const Matrix m{x.rows(), x.dim(1), all_aligned(x, q.codes)};
  const int64_t blocks = std::min(kCountBlocks, blocks_for(m.rows * blocks_for(m.cols, kPiece), kTileThreads));
  const TensorView counts = c.workspace->tensor(DType::i64, {blocks, kCounts}, "quantize counts");
  with_types(q.codes.dtype, x.dtype, [&]<typename Code, typename T>(Code, T) {
    launch(c, "quant_stats", {.blocks = blocks, .threads = kTileThreads, .shared_bytes = kCounts * kTileThreads / kWave * sizeof(int64_t)},
           quant_stats_kernel<Code, T>, counts.ptr<int64_t>(), codes_of(q.codes), scales_of(q.scales), x.ptr<T>(), x.row_stride, q.block_rows, q.block_cols, m);
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
  const int64_t a_sub = blocks_for(from.block_cols, kRun), cols = from.code_cols();
  const bool aligned = rows_aligned(to.codes, kRun) && rows_aligned(from.codes, kRun / 2) && from.block_cols % kRun == 0;
  const Runs runs{Divisor(to.block_cols / from.block_cols * a_sub), Divisor(a_sub), from.block_cols, aligned};
  GPU_CHECK(to.block_rows * runs.of_row.divisor < (int64_t{1} << 31), "recode_fp4: blocks of %ld x %ld are too large", static_cast<long>(to.block_rows),
            static_cast<long>(to.block_cols));
  launch(c, "recode_fp4", {.blocks = to.scales.shape.elements(), .threads = kTileThreads, .shared_bytes = kLargestShared<kTileThreads>}, recode_kernel, codes_of(to.codes),
         scales_of(to.scales), lossy.data == nullptr ? nullptr : lossy.ptr<uint8_t>(), lossy.row_stride, to.block_rows, to.block_cols, codes_of(from.codes),
         scales_of(from.scales), Divisor(to.scales.dim(1)), runs, Matrix{from.rows(), cols, aligned});
}

}  // namespace lockstep::device
