// Blocks of one row and 32, 64 or 128 columns, which is what activations, kv rows and FP4 have: 4, 8 or 16 threads hold a block in registers, so that x is read
// once. Other blocks, weights' 128 x 128 among them: a thread block each, which reads its part of x twice, from memory and from cache.
// Bound by memory: x once, codes and scales once. Floor: (bytes of x + bytes of codes) / 4 TB/s.

#include "core/device.h"
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

// Magnitudes of a block as bits, whose order is the numbers' order.
struct Largest {
  uint32_t finite = 0, any = 0;
};
GPU_INLINE Largest larger(Largest a, Largest b) { return {a.finite > b.finite ? a.finite : b.finite, a.any > b.any ? a.any : b.any}; }
template <typename T>
GPU_INLINE Largest largest_of(const Elements<T>& x) {
  Largest l;
  for (int i = 0; i < kPiece; ++i) {
    const uint32_t u = std::bit_cast<uint32_t>(to_f32(x.v[i])) & kF32Magnitude;
    l = larger(l, {u < kF32Infinity ? u : 0, u});
  }
  return l;
}
// Over `lanes` neighbouring threads, a power of two.
GPU_INLINE Largest largest_of_lanes(Largest l, int lanes) {
  for (int width = lanes / 2; width >= 1; width /= 2) l = larger(l, {shuffle_xor(l.finite, width), shuffle_xor(l.any, width)});
  return l;
}

template <typename Code>
inline constexpr bool kPacked = std::is_same_v<Code, e2m1x2>;

// Codes of a piece, at column `at` of a row of codes. A packed piece begins at an even column.
template <typename Code, typename T>
GPU_INLINE void write_codes(uint8_t* row, int64_t at, const Elements<T>& x, int count, float inverse, bool aligned) {
  Elements<uint8_t> codes = {};
  for (int i = 0; i < kPiece; ++i)
    if (i < count) codes.v[i] = encode<Code>(scaled(to_f32(x.v[i]), inverse));
  if constexpr (kPacked<Code>) {
    Vector<uint8_t, kPiece / 2> pairs;
    for (int i = 0; i < kPiece / 2; ++i) pairs.v[i] = static_cast<uint8_t>(codes.v[2 * i] | codes.v[2 * i + 1] << 4);
    if (aligned && count == kPiece) {
      store_vector(row + at / 2, pairs);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPiece / 2; ++i)
      if (2 * i < count) row[at / 2 + i] = pairs.v[i];
  } else {
    store(row + at, codes, count, aligned);
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

template <typename Code, typename T, int kLanes>
GPU_KERNEL quantize_rows_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, Matrix m, float amax_floor, bool given_scales) {
  constexpr int64_t kBlock = kLanes * kPiece;
  const int64_t blocks = (m.cols + kBlock - 1) / kBlock;
  const Piece p = piece_of_thread(m.rows, m.cols, blocks * kBlock);
  const Elements<T> e = load(x + p.row * x_stride + p.at, p.count, m.aligned);
  const Largest largest = largest_of_lanes(largest_of(e), kLanes);
  if (p.count == 0) return;
  const int64_t j = p.at / kBlock;
  const float scale = given_scales ? read_scale(scales, p.row, j) : scale_for<Code>(largest.finite, amax_floor, scales.f32);
  if (!given_scales && p.at == j * kBlock)
    write_scale(scales, p.row, j, kPacked<Code> && largest.any > kF32Infinity ? std::bit_cast<float>(kF32Nan) : scale);
  write_codes<Code>(codes.data + p.row * codes.stride, p.at, e, p.count, 1.0f / scale, m.aligned);
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

// Of all threads of the block, in each. The same shared memory may be used again after a barrier.
GPU_INLINE Largest largest_of_block(Largest l, Shared<uint32_t> shared) {
  constexpr int kWaves = kTileThreads / kWave;
  l = largest_of_lanes(l, kWave);
  if (lane() == 0) shared.store(2 * wave(), l.finite), shared.store(2 * wave() + 1, l.any);
  sync_block();
  l = {};
  for (int w = 0; w < kWaves; ++w) l = larger(l, {shared.load(2 * w), shared.load(2 * w + 1)});
  return l;
}
inline constexpr size_t kTileShared = 2 * kTileThreads / 32 * sizeof(uint32_t);

template <typename Code, typename T>
GPU_KERNEL quantize_tiles_kernel(Codes codes, Scales scales, const T* x, int64_t x_stride, int64_t block_rows, int64_t block_cols, Matrix m, float amax_floor,
                                 bool given_scales) {
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(2 * kTileThreads / kWave);
  const int64_t blocks = (m.cols + block_cols - 1) / block_cols, i = block_x() / blocks, j = block_x() - i * blocks;
  float scale = 0;
  if (given_scales) {
    scale = read_scale(scales, i, j);
  } else {
    Largest largest;
    for_pieces(i, j, block_rows, block_cols, m,
               [&](int64_t r, int64_t k, int count) { largest = larger(largest, largest_of(load(x + r * x_stride + k, count, m.aligned))); });
    largest = largest_of_block(largest, shared);
    scale = scale_for<Code>(largest.finite, amax_floor, scales.f32);
    if (thread_x() == 0) write_scale(scales, i, j, kPacked<Code> && largest.any > kF32Infinity ? std::bit_cast<float>(kF32Nan) : scale);
  }
  const float inverse = 1.0f / scale;
  for_pieces(i, j, block_rows, block_cols, m, [&](int64_t r, int64_t k, int count) {
    write_codes<Code>(codes.data + r * codes.stride, k, load(x + r * x_stride + k, count, m.aligned), count, inverse, m.aligned);
  });
}

template <typename Code>
GPU_INLINE uint8_t code_at(const uint8_t* row, int64_t k) {
  if constexpr (kPacked<Code>) return static_cast<uint8_t>(row[k / 2] >> (k % 2 * 4) & 15);
  else return row[k];
}

template <typename Code>
GPU_INLINE Elements<uint8_t> load_codes(const uint8_t* row, int64_t at, int count, bool aligned) {
  if constexpr (!kPacked<Code>) return load(row + at, count, aligned);
  Elements<uint8_t> e = {};
  if (aligned && count == kPiece) {
    const auto pairs = *reinterpret_cast<const Vector<uint8_t, kPiece / 2>*>(row + at / 2);
    for (int k = 0; k < kPiece; ++k) e.v[k] = static_cast<uint8_t>(pairs.v[k / 2] >> (k % 2 * 4) & 15);
  } else {
#pragma unroll
    for (int k = 0; k < kPiece; ++k)
      if (k < count) e.v[k] = code_at<Code>(row, at + k);
  }
  return e;
}

template <typename Code, typename T>
GPU_KERNEL dequantize_kernel(T* y, int64_t y_stride, Codes codes, Scales scales, int64_t block_rows, int64_t block_cols, Matrix m) {
  const Piece p = piece_of_thread(m.rows, m.cols);
  if (p.count == 0) return;
  const uint8_t* const row = codes.data + p.row * codes.stride;
  const int64_t i = p.row / block_rows, first = p.at / block_cols, last = (p.at + p.count - 1) / block_cols;
  const Elements<uint8_t> e = load_codes<Code>(row, p.at, p.count, m.aligned);
  Elements<T> out;
  float scale = read_scale(scales, i, first);
  for (int k = 0; k < kPiece; ++k) {
    if (first != last && k < p.count) scale = read_scale(scales, i, (p.at + k) / block_cols);
    const float v = decode<Code>(e.v[k]) * scale;
    out.v[k] = from_f32<T>(v == v ? v : std::bit_cast<float>(kF32Nan));
  }
  store(y + p.row * y_stride + p.at, out, p.count, m.aligned);
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
      const QuantStats s = quant_stats_of<Code>(to_f32(e.v[k]), scale, c.v[k]);  // nothing for the zeros past the count
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

// One block of `to` a thread block, by the rule of reference::recode_block.
GPU_KERNEL recode_kernel(Codes to, Scales to_scales, uint8_t* lossy, int64_t lossy_stride, int64_t block_rows, int64_t block_cols, Codes from,
                         Scales from_scales, int64_t sub_cols, Matrix m) {
  SharedMemory memory;
  const auto shared = memory.take<uint32_t>(2 * kTileThreads / kWave);
  const int64_t blocks = (m.cols + block_cols - 1) / block_cols, i = block_x() / blocks, j = block_x() - i * blocks;
  const auto sub_scale = [&](int64_t r, int64_t k) -> int { return static_cast<const uint8_t*>(from_scales.data)[r * from_scales.stride + k / sub_cols]; };
  // finite: the largest sub-scale; any: the least scale under which no value overflows.
  Largest found;
  for_pieces(i, j, block_rows, block_cols, m, [&](int64_t r, int64_t at, int count) {
    for (int64_t k = at; k < at + count; ++k) {
      const int s = sub_scale(r, k), magnitude = code_at<e2m1x2>(from.data + r * from.stride, k) & 7;
      if (s == kUe8m0Nan.bits) continue;
      const int tight = magnitude != 0 ? s + (magnitude >> 1) - 9 : 0;
      found = larger(found, {static_cast<uint32_t>(s), static_cast<uint32_t>(tight > 0 ? tight : 0)});
    }
  });
  found = largest_of_block(found, shared);
  const auto write = [&](int scale) {
    bool exact = true;
    for_pieces(i, j, block_rows, block_cols, m, [&](int64_t r, int64_t at, int count) {
      for (int64_t k = at; k < at + count; ++k) {
        const int s = sub_scale(r, k), shift = s - scale < -100 ? -100 : s - scale > 100 ? 100 : s - scale;
        uint8_t code = FloatFormat<e4m3>::kNanCode;
        if (s != kUe8m0Nan.bits) {
          const float v = decode<e2m1x2>(code_at<e2m1x2>(from.data + r * from.stride, k)) * std::bit_cast<float>(static_cast<uint32_t>(127 + shift) << 23);
          code = encode<e4m3>(v);
          exact &= decode<e4m3>(code) == v;
        }
        to.data[r * to.stride + k] = code;
      }
    });
    sync_block();
    return largest_of_block({exact ? 0u : 1u, 0}, shared).finite == 0;
  };
  int scale = found.finite > 6 ? static_cast<int>(found.finite) - 6 : 0;
  bool exact = write(scale);
  if (!exact) {
    scale = static_cast<int>(found.any);
    exact = write(scale);
  }
  if (thread_x() != 0) return;
  const ue8m0 stored{static_cast<uint8_t>(scale)};
  if (to_scales.f32) static_cast<float*>(to_scales.data)[i * to_scales.stride + j] = to_f32(stored);
  else static_cast<ue8m0*>(to_scales.data)[i * to_scales.stride + j] = stored;
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

template <typename Code, typename T>
void quantize_as(Context& c, const QuantView& q, const ConstTensorView& x, float amax_floor, bool given_scales) {
  const Codes codes = codes_of(q.codes);
  const Scales scales = scales_of(q.scales);
  const Matrix m{x.rows(), x.dim(1), all_aligned(x, q.codes) && q.block_cols % kPiece == 0};
  const auto rows = [&](auto kernel) {
    launch(c, "quantize_rows", grid_of_pieces(m.rows, q.scales.dim(1) * q.block_cols), kernel, codes, scales, x.ptr<T>(), x.row_stride, m, amax_floor,
           given_scales);
  };
  if (q.block_rows == 1 && q.block_cols == 128) return rows(quantize_rows_kernel<Code, T, 16>);
  if (q.block_rows == 1 && q.block_cols == 64) return rows(quantize_rows_kernel<Code, T, 8>);
  if (q.block_rows == 1 && q.block_cols == 32) return rows(quantize_rows_kernel<Code, T, 4>);
  launch(c, "quantize_tiles", {.blocks = q.scales.shape.elements(), .threads = kTileThreads, .shared_bytes = kTileShared}, quantize_tiles_kernel<Code, T>,
         codes, scales, x.ptr<T>(), x.row_stride, q.block_rows, q.block_cols, m, amax_floor, given_scales);
}

}  // namespace

void quantize(Context& c, QuantView q, ConstTensorView x, float amax_floor, bool given_scales) {
  with_types(q.codes.dtype, x.dtype,
             [&]<typename Code, typename T>(Code, T) { quantize_as<Code, T>(c, q, x, amax_floor, given_scales); });
}

void dequantize(Context& c, TensorView y, ConstQuantView q) {
  const Matrix m{y.rows(), y.dim(1), all_aligned(y, q.codes)};
  with_types(q.codes.dtype, y.dtype, [&]<typename Code, typename T>(Code, T) {
    launch(c, "dequantize", grid_of_pieces(m.rows, m.cols), dequantize_kernel<Code, T>, y.ptr<T>(), y.row_stride, codes_of(q.codes), scales_of(q.scales),
           q.block_rows, q.block_cols, m);
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
  const Matrix m{from.rows(), from.code_cols(), false};
  launch(c, "recode_fp4", {.blocks = to.scales.shape.elements(), .threads = kTileThreads, .shared_bytes = kTileShared}, recode_kernel, codes_of(to.codes),
         scales_of(to.scales), lossy.data == nullptr ? nullptr : lossy.ptr<uint8_t>(), lossy.row_stride, to.block_rows, to.block_cols, codes_of(from.codes),
         scales_of(from.scales), from.block_cols, m);
}

}  // namespace lockstep::device
