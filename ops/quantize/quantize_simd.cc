#include <array>
#include <cstring>
#include <mutex>

#include "ops/quantize/quantize_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/quantize_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/cache_control.h>

#include "ops/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

using U32Tag = hn::RebindToUnsigned<F32Tag>;
using U32Vec = hn::Vec<U32Tag>;

// f32 bits of the least normal number of a format.
template <typename Code>
constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - FloatFormat<Code>::kBias) << 23;

// The bit pattern of a magnitude as stored, and the vectors in which the largest is looked for: unsigned integers order as magnitudes do,
// with infinities and NaN on top.
template <typename T>
using Bits = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint16_t>;
template <typename T>
using BitsTag = hn::ScalableTag<Bits<T>>;

template <typename T>
HWY_INLINE hn::Vec<BitsTag<T>> LargestMagnitude(const T* x, int64_t n, hn::Vec<BitsTag<T>> largest) {
  const BitsTag<T> d;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(BitsTag<T>()));
  const auto magnitude = hn::Set(d, static_cast<Bits<T>>(static_cast<Bits<T>>(~Bits<T>{0}) >> 1));
  const auto* bits = reinterpret_cast<const Bits<T>*>(x);
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    hwy::Prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(bits + k) + simd::kFetchAhead));
    largest = hn::Max(largest, hn::And(hn::LoadU(d, bits + k), magnitude));
  }
  if (k < n) {
    HWY_ALIGN Bits<T> part[kLanes] = {};
    std::memcpy(part, bits + k, static_cast<size_t>(n - k) * sizeof(T));
    largest = hn::Max(largest, hn::And(hn::Load(d, part), magnitude));
  }
  return largest;
}

// As f32 bits.
template <typename T>
HWY_INLINE uint32_t Reduce(hn::Vec<BitsTag<T>> largest) {
  const uint32_t bits = hn::GetLane(hn::MaxOfLanes(BitsTag<T>(), largest));
  return std::is_same_v<T, float> ? bits : bits << 16;
}

// Codes of one vector of scaled numbers, none of which overflows.
template <typename Code>
HWY_INLINE U32Vec WithSign(U32Vec code, U32Vec scaled) {
  constexpr int kSign = static_cast<int>(FloatFormat<Code>::kSignShift);
  return hn::Or(code, hn::And(hn::ShiftRight<31 - kSign>(scaled), hn::Set(U32Tag(), 1u << kSign)));
}
// Adding 2^23 steps of the number's binade, or of the sub-normals, rounds it to a whole number of steps, to nearest even, in the low bits
// of the sum.
template <typename Code>
HWY_INLINE U32Vec EncodeAny(F32Vec scaled) {
  using F = FloatFormat<Code>;
  const F32Tag d;
  const U32Tag du;
  constexpr int kDropped = 23 - F::kMantissaBits;
  const U32Vec u = hn::BitCast(du, scaled);
  const U32Vec binade = hn::Max(hn::And(u, hn::Set(du, kF32Infinity)), hn::Set(du, kMinNormal<Code>));
  const F32Vec magic = hn::BitCast(d, hn::Add(binade, hn::Set(du, static_cast<uint32_t>(kDropped) << 23)));
  const U32Vec sum = hn::BitCast(du, hn::Add(hn::Abs(scaled), magic));
  const U32Vec steps = hn::Sub(sum, hn::Set(du, (static_cast<uint32_t>(kDropped) << 23) + (kMinNormal<Code> >> kDropped)));
  return WithSign<Code>(hn::Add(hn::Sub(steps, binade), hn::ShiftRight<kDropped>(binade)), u);
}
// Of numbers that are normal in the format: shift_right_to_even.
template <typename Code>
HWY_INLINE U32Vec EncodeNormal(U32Vec scaled, U32Vec magnitude) {
  using F = FloatFormat<Code>;
  const U32Tag du;
  constexpr int kDropped = 23 - F::kMantissaBits;
  const U32Vec odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(du, 1u));
  const U32Vec moved = hn::Add(magnitude, hn::Set(du, (1u << (kDropped - 1)) - 1u - (static_cast<uint32_t>(127 - F::kBias) << 23)));
  return WithSign<Code>(hn::ShiftRight<kDropped>(hn::Add(moved, odd)), scaled);
}

// Stores the codes of kRowStep numbers.
template <typename Code>
HWY_INLINE void StoreCodes(U32Vec codes, uint8_t* to) {
  if constexpr (std::is_same_v<Code, e2m1x2>) {
    const hn::Repartition<uint64_t, U32Tag> d64;
    const hn::Rebind<uint8_t, decltype(d64)> d8;
    const auto pairs = hn::BitCast(d64, codes);
    hn::StoreU(hn::TruncateTo(d8, hn::Or(pairs, hn::ShiftRight<28>(pairs))), d8, to);
  } else {
    const hn::Rebind<uint8_t, F32Tag> d8;
    hn::StoreU(hn::TruncateTo(d8, codes), d8, to);
  }
}

constexpr int64_t CodeBytes(DType t, int64_t n) { return t == DType::e2m1x2 ? (n + 1) / 2 : n; }

// Codes of kRowStep numbers; returns how many underflow. Blocks of E4M3 and E5M2 rarely hold sub-normals: a vector without them takes
// the shorter way.
template <typename Code, typename T>
HWY_INLINE int64_t QuantizeVector(uint8_t* to, const T* x, F32Vec factor) {
  const F32Tag d;
  const U32Tag du;
  const F32Vec v = LoadF32(d, x), scaled = hn::Mul(v, factor);
  if constexpr (!std::is_same_v<Code, e2m1x2>) {
    const U32Vec u = hn::BitCast(du, scaled), magnitude = hn::And(u, hn::Set(du, kF32Magnitude));
    if (HWY_LIKELY(hn::AllFalse(du, hn::Lt(magnitude, hn::Set(du, kMinNormal<Code>))))) {
      StoreCodes<Code>(EncodeNormal<Code>(u, magnitude), to);
      return 0;
    }
  }
  const U32Vec codes = EncodeAny<Code>(scaled);
  StoreCodes<Code>(codes, to);
  const auto zero_code = hn::Eq(hn::And(codes, hn::Set(du, (1u << FloatFormat<Code>::kSignShift) - 1u)), hn::Zero(du));
  const U32Vec zeros = hn::IfThenElseZero(zero_code, hn::And(hn::BitCast(du, v), hn::Set(du, kF32Magnitude)));
  return static_cast<int64_t>(hn::CountTrue(du, hn::Ne(zeros, hn::Zero(du))));
}

// The same for bf16 under a power of two, where scaling is an addition to the exponent and 16 bits are enough.
class Bf16Quantizer {
 public:
  using Tag = hn::ScalableTag<int16_t>;
  static constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Tag()));
  using Vec = hn::Vec<Tag>;

  template <typename Code>
  struct Constants {
    Vec least, offset;
    explicit Constants(float inverse) {
      using F = FloatFormat<Code>;
      const int exponent = static_cast<int>(std::bit_cast<uint32_t>(inverse) >> 23) - 127;
      // The least magnitude that is normal before and after scaling, and what makes its shifted bits the code.
      least = hn::Set(Tag(), static_cast<int16_t>(std::max(128 - F::kBias - exponent, 1) * 128));
      offset = hn::Set(Tag(), static_cast<int16_t>((exponent - 127 + F::kBias) * 128 + (1 << (6 - F::kMantissaBits)) - 1));
    }
  };

  template <typename Code>
  static HWY_INLINE int64_t Run(uint8_t* to, const bf16* x, F32Vec factor, const Constants<Code>& c) {
    const Tag d;
    const hn::RebindToUnsigned<Tag> du;
    const hn::Rebind<uint8_t, Tag> d8;
    constexpr int kDropped = 7 - FloatFormat<Code>::kMantissaBits;
    const Vec u = hn::LoadU(d, reinterpret_cast<const int16_t*>(x));
    const Vec magnitude = hn::And(u, hn::Set(d, int16_t{0x7fff}));
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::Lt(magnitude, c.least)))) {
      int64_t underflowed = 0;
      for (int64_t i = 0; i < kLanes; i += kRowStep) underflowed += QuantizeVector<Code>(to + i, x + i, factor);
      return underflowed;
    }
    const Vec odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(d, int16_t{1}));
    const auto code = hn::ShiftRight<kDropped>(hn::BitCast(du, hn::Add(hn::Add(magnitude, c.offset), odd)));
    const auto sign = hn::And(hn::ShiftRight<8>(hn::BitCast(du, u)), hn::Set(du, uint16_t{0x80}));
    hn::StoreU(hn::TruncateTo(d8, hn::Or(code, sign)), d8, to);
    return 0;
  }
};

// Codes of n numbers of one row and block; returns how many underflow.
template <typename Code, typename T>
HWY_INLINE int64_t QuantizePiece(uint8_t* to, const T* x, int64_t n, float inverse) {
  const F32Vec factor = hn::Set(F32Tag(), inverse);
  int64_t underflowed = 0, k = 0;
  if constexpr (std::is_same_v<T, bf16> && !std::is_same_v<Code, e2m1x2>) {
    if ((std::bit_cast<uint32_t>(inverse) & 0x007fffffu) == 0) {
      const Bf16Quantizer::Constants<Code> constants(inverse);
      for (; k + Bf16Quantizer::kLanes <= n; k += Bf16Quantizer::kLanes)
        underflowed += Bf16Quantizer::Run<Code>(to + k, x + k, factor, constants);
    }
  }
  for (; k + kRowStep <= n; k += kRowStep)
    underflowed += QuantizeVector<Code>(to + CodeBytes(DTypeOf<Code>::value, k), x + k, factor);
  if (k < n) {
    const int64_t count = n - k;
    T from[kRowStep] = {};
    uint8_t codes[kRowStep];
    std::memcpy(from, x + k, static_cast<size_t>(count) * sizeof(T));
    underflowed += QuantizeVector<Code>(codes, from, factor);
    std::memcpy(to + CodeBytes(DTypeOf<Code>::value, k), codes, static_cast<size_t>(CodeBytes(DTypeOf<Code>::value, count)));
  }
  return underflowed;
}

// Tiles [begin, end) in the order of memory. The search for a tile's largest magnitudes, which waits for memory, and the encoding of the
// tile before it, which computes, go on together, block piece by block piece.
template <typename Code, typename T>
QuantStats QuantizeTiles(const QuantView& q, const ConstTensorView& x, const simd::QuantizeRun& run, int64_t begin, int64_t end) {
  const BitsTag<T> d;
  constexpr size_t kLanes = hn::MaxLanes(BitsTag<T>());
  const int64_t cols = x.dim(1), blocks_a_row = q.scales.dim(1), tiles_a_row = num_blocks(blocks_a_row, run.tile_blocks);
  const T* from = x.ptr<T>();
  uint8_t* to = reinterpret_cast<uint8_t*>(q.codes.ptr<Code>());
  struct Tile {
    int64_t i = 0, j0 = 0, blocks = 0;
    int64_t row0 = 0, rows = 0;
    float inverse[simd::kTileBlocksMax];  // 0: the block is done
  };
  Tile tiles[2];
  HWY_ALIGN Bits<T> largest[static_cast<size_t>(simd::kTileBlocksMax) * kLanes];
  QuantStats stats;
  for (int64_t t = begin; t <= end; ++t) {
    Tile& next = tiles[t % 2];
    const Tile& last = tiles[(t + 1) % 2];
    next.rows = next.blocks = 0;
    if (t < end) {
      next.i = t / tiles_a_row;
      next.j0 = t % tiles_a_row * run.tile_blocks;
      next.blocks = std::min(run.tile_blocks, blocks_a_row - next.j0);
      next.row0 = next.i * q.block_rows;
      next.rows = std::min(q.block_rows, x.rows() - next.row0);
    }
    const auto piece = [&](const Tile& tile, int64_t j) {  // first column and width of a block
      const int64_t k = (tile.j0 + j) * q.block_cols;
      return std::pair<int64_t, int64_t>(k, std::min(q.block_cols, cols - k));
    };
    for (int64_t r = 0; r < std::max(next.rows, last.rows); ++r)
      for (int64_t j = 0; j < std::max(next.blocks, last.blocks); ++j) {
        if (r < next.rows && j < next.blocks) {
          const auto [k, n] = piece(next, j);
          Bits<T>* kept = largest + static_cast<size_t>(j) * kLanes;
          const auto before = r == 0 ? hn::Zero(d) : hn::Load(d, kept);
          hn::Store(LargestMagnitude(from + (next.row0 + r) * x.row_stride + k, n, before), d, kept);
        }
        if (r < last.rows && j < last.blocks && last.inverse[j] != 0) {
          const auto [k, n] = piece(last, j);
          uint8_t* out = to + (last.row0 + r) * q.codes.row_stride + CodeBytes(DTypeOf<Code>::value, k);
          stats.underflowed += QuantizePiece<Code>(out, from + (last.row0 + r) * x.row_stride + k, n, last.inverse[j]);
        }
      }
    // A block with Inf, NaN or, under given scales, overflow goes the plain way.
    for (int64_t j = 0; j < next.blocks; ++j) {
      const uint32_t bits = Reduce<T>(hn::Load(d, largest + static_cast<size_t>(j) * kLanes));
      const float amax = std::bit_cast<float>(bits);
      next.inverse[j] = 0;
      if (bits < kF32Infinity) {
        const float s = run.given_scales ? q.scale(next.i, next.j0 + j) : store_scale<Code>(q, next.i, next.j0 + j, amax, run.amax_floor);
        if (unbounded_code<Code>(std::bit_cast<uint32_t>(amax * (1.0f / s))) <= FloatFormat<Code>::kMaxCode) next.inverse[j] = 1.0f / s;
      }
      if (next.inverse[j] == 0) stats += reference::quantize_block(q, x, run.amax_floor, run.given_scales, next.i, next.j0 + j);
      else stats.elements += next.rows * piece(next, j).second;
    }
  }
  return stats;
}

QuantStats Quantize(const QuantView& q, const ConstTensorView& x, const simd::QuantizeRun& run, int64_t begin, int64_t end) {
  const auto from = [&]<typename T>(T) {
    switch (q.codes.dtype) {
      case DType::e4m3: return QuantizeTiles<e4m3, T>(q, x, run, begin, end);
      case DType::e5m2: return QuantizeTiles<e5m2, T>(q, x, run, begin, end);
      default: return QuantizeTiles<e2m1x2, T>(q, x, run, begin, end);
    }
  };
  return x.dtype == DType::f32 ? from(float{}) : from(bf16{});
}

// Values of kRowStep codes: the bits moved to f32's place mean 2^(bias - 127) times as much; that product is exact, sub-normals too.
template <typename Code>
HWY_INLINE F32Vec Decode(const uint8_t* from) {
  using F = FloatFormat<Code>;
  const F32Tag d;
  const U32Tag du;
  U32Vec codes;
  if constexpr (std::is_same_v<Code, e2m1x2>) {
    const hn::Repartition<uint64_t, U32Tag> d64;
    const hn::Rebind<uint8_t, decltype(d64)> d8;
    const hn::Rebind<uint32_t, decltype(d64)> d32;
    const auto bytes = hn::PromoteTo(d64, hn::PromoteTo(d32, hn::LoadU(d8, from)));
    codes = hn::And(hn::BitCast(du, hn::Or(bytes, hn::ShiftLeft<28>(bytes))), hn::Set(du, 15u));
  } else {
    codes = hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint8_t, F32Tag>(), from));
  }
  const U32Vec magnitude = hn::And(codes, hn::Set(du, (1u << F::kSignShift) - 1u));
  const U32Vec sign = hn::ShiftLeft<31 - static_cast<int>(F::kSignShift)>(hn::Xor(codes, magnitude));
  const F32Vec moved = hn::BitCast(d, hn::Or(hn::ShiftLeft<23 - F::kMantissaBits>(magnitude), sign));
  F32Vec value = hn::Mul(moved, hn::Set(d, std::bit_cast<float>(static_cast<uint32_t>(254 - F::kBias) << 23)));
  if constexpr (!std::is_same_v<Code, e2m1x2>) {
    const auto special = hn::Gt(magnitude, hn::Set(du, F::kMaxCode));
    if (HWY_UNLIKELY(!hn::AllFalse(du, special))) {
      U32Vec bits = hn::Set(du, kF32Nan);
      if (std::is_same_v<Code, e5m2>)
        bits = hn::Or(hn::IfThenElse(hn::Eq(magnitude, hn::Set(du, F::kOverflowCode)), hn::Set(du, kF32Infinity), bits), sign);
      value = hn::BitCast(d, hn::IfThenElse(special, bits, hn::BitCast(du, value)));
    }
  }
  return value;
}

template <typename Code, typename T>
HWY_INLINE void DequantizeVector(T* y, const uint8_t* from, F32Vec factor) {
  const F32Tag d;
  const F32Vec v = hn::Mul(Decode<Code>(from), factor);
  StoreF32(d, hn::IfThenElse(hn::Eq(v, v), v, hn::BitCast(d, hn::Set(U32Tag(), kF32Nan))), y);
}

template <typename Code, typename T>
HWY_INLINE void DequantizePiece(T* y, const uint8_t* from, int64_t n, float scale) {
  const F32Vec factor = hn::Set(F32Tag(), scale);
  int64_t k = 0;
  for (; k + kRowStep <= n; k += kRowStep) DequantizeVector<Code>(y + k, from + CodeBytes(DTypeOf<Code>::value, k), factor);
  if (k < n) {
    uint8_t codes[kRowStep] = {};
    T out[kRowStep];
    std::memcpy(codes, from + CodeBytes(DTypeOf<Code>::value, k), static_cast<size_t>(CodeBytes(DTypeOf<Code>::value, n - k)));
    DequantizeVector<Code>(out, codes, factor);
    std::memcpy(y + k, out, static_cast<size_t>(n - k) * sizeof(T));
  }
}

template <typename Code, typename T>
void DequantizeRows(const TensorView& y, const ConstQuantView& q, int64_t begin, int64_t end) {
  const Code* from = q.codes.ptr<Code>();
  T* to = y.ptr<T>();
  for (int64_t r = begin; r < end; ++r)
    for (int64_t j = 0; j < q.scales.dim(1); ++j) {
      const int64_t k = j * q.block_cols;
      const uint8_t* codes = reinterpret_cast<const uint8_t*>(from + r * q.codes.row_stride) + CodeBytes(DTypeOf<Code>::value, k);
      DequantizePiece<Code>(to + r * y.row_stride + k, codes, std::min(q.block_cols, y.dim(1) - k), q.scale(r / q.block_rows, j));
    }
}

void Dequantize(const TensorView& y, const ConstQuantView& q, int64_t begin, int64_t end) {
  const auto to = [&]<typename T>(T) {
    switch (q.codes.dtype) {
      case DType::e4m3: return DequantizeRows<e4m3, T>(y, q, begin, end);
      case DType::e5m2: return DequantizeRows<e5m2, T>(y, q, begin, end);
      default: return DequantizeRows<e2m1x2, T>(y, q, begin, end);
    }
  };
  y.dtype == DType::f32 ? to(float{}) : to(bf16{});
}

// E4M3 codes of the 16 E2M1 codes times 2^f, for the factors -8 <= f <= 6 under which all are exact.
constexpr int kFactorMin = -8, kFactorMax = 6;
constexpr auto kRecode = [] {
  std::array<std::array<uint8_t, 16>, kFactorMax - kFactorMin + 1> t{};
  for (int f = kFactorMin; f <= kFactorMax; ++f)
    for (uint8_t code = 0; code < 16; ++code)
      t[static_cast<size_t>(f - kFactorMin)][code] =
          encode<e4m3>(decode<e2m1x2>(code) * std::bit_cast<float>(static_cast<uint32_t>(127 + f) << 23));
  return t;
}();

void RecodePiece(uint8_t* to, const uint8_t* from, int64_t n, const uint8_t* table16) {
  const hn::Full128<uint8_t> d;
  const auto table = hn::LoadU(d, table16);
  const auto step = [&](const uint8_t* pairs, uint8_t* codes) HWY_ATTR {
    const auto v = hn::LoadU(d, pairs);
    const auto low = hn::TableLookupBytes(table, hn::And(v, hn::Set(d, uint8_t{15})));
    const auto high = hn::TableLookupBytes(table, hn::BitCast(d, hn::ShiftRight<4>(v)));
    hn::StoreU(hn::InterleaveLower(d, low, high), d, codes);
    hn::StoreU(hn::InterleaveUpper(d, low, high), d, codes + 16);
  };
  int64_t k = 0;
  for (; k + 32 <= n; k += 32) step(from + k / 2, to + k);
  if (k < n) {
    uint8_t pairs[16] = {}, codes[32];
    std::memcpy(pairs, from + k / 2, static_cast<size_t>((n - k) / 2));
    step(pairs, codes);
    std::memcpy(to + k, codes, static_cast<size_t>(n - k));
  }
}

RecodeStats RecodeBlock(const QuantView& to, const TensorView& lossy, const ConstQuantView& from, int64_t i, int64_t j) {
  const BlockRange b = block_range(to, i, j, from.rows(), from.code_cols());
  const int64_t s0 = b.col0 / from.block_cols, s1 = num_blocks(b.col1, from.block_cols);
  int least = 255, largest = 0;
  for (int64_t r = b.row0; r < b.row1; ++r)
    for (int64_t s = s0; s < s1; ++s) {
      const int bits = from.scales.row<ue8m0>(r)[s].bits;
      least = std::min(least, bits);
      largest = std::max(largest, bits);
    }
  const int scale = largest - kFactorMax;
  // NaN among the sub-scales, a scale below 2^-127, or a span that may lose: the plain way.
  if (largest == kUe8m0Nan.bits || scale < 0 || least - scale < kFactorMin) return reference::recode_block(to, lossy, from, i, j);
  for (int64_t r = b.row0; r < b.row1; ++r)
    for (int64_t s = s0; s < s1; ++s) {
      const int64_t k = s * from.block_cols;
      const auto& table = kRecode[static_cast<size_t>(from.scales.row<ue8m0>(r)[s].bits - scale - kFactorMin)];
      RecodePiece(reinterpret_cast<uint8_t*>(to.codes.row<e4m3>(r) + k),
                  reinterpret_cast<const uint8_t*>(from.codes.row<e2m1x2>(r) + k / 2), std::min(from.block_cols, b.col1 - k),
                  table.data());
    }
  const ue8m0 stored{static_cast<uint8_t>(scale)};
  if (to.scales.dtype == DType::f32) to.scales.row<float>(i)[j] = to_f32(stored);
  else to.scales.row<ue8m0>(i)[j] = stored;
  if (lossy.data != nullptr) lossy.row<uint8_t>(i)[j] = 0;
  RecodeStats stats;
  stats.blocks = 1;
  return stats;
}

}  // namespace

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(Quantize);
HWY_EXPORT(Dequantize);
HWY_EXPORT(RecodeBlock);

namespace simd {

namespace {

// Sum of stats over ranges that threads take as they come; integers, so the order is free.
template <typename Stats>
class Total {
 public:
  void operator+=(const Stats& s) {
    const std::lock_guard lock(mutex_);
    sum_ += s;
  }
  Stats get() const { return sum_; }

 private:
  std::mutex mutex_;
  Stats sum_;
};

}  // namespace

QuantStats quantize(Context& c, QuantView q, ConstTensorView x, float amax_floor, bool given_scales) {
  const int64_t block_rows = q.scales.rows(), blocks = q.scales.dim(1);
  // Wide tiles, unless threads would go without.
  constexpr int64_t kTilesAThread = 4, kTileBlocksMin = 8;
  const int64_t tile_blocks =
      std::clamp(block_rows * blocks / (kTilesAThread * c.num_threads()), kTileBlocksMin, kTileBlocksMax);
  const QuantizeRun run{.amax_floor = amax_floor, .given_scales = given_scales, .tile_blocks = std::min(tile_blocks, blocks)};
  Total<QuantStats> total;
  parallel_for(c, block_rows * num_blocks(blocks, run.tile_blocks), run.tile_blocks * q.block_rows * q.block_cols / 4,
               [&](int64_t begin, int64_t end, int) { total += HWY_DYNAMIC_DISPATCH(Quantize)(q, x, run, begin, end); });
  return total.get();
}

void dequantize(Context& c, TensorView y, ConstQuantView q) {
  parallel_for(c, y.rows(), 10 + y.dim(1) / 4,
               [&](int64_t begin, int64_t end, int) { HWY_DYNAMIC_DISPATCH(Dequantize)(y, q, begin, end); });
}

RecodeStats recode_fp4(Context& c, QuantView to, TensorView lossy, ConstQuantView from) {
  const int64_t blocks = to.scales.dim(1);
  Total<RecodeStats> total;
  parallel_for(c, to.scales.rows() * blocks, 10 + to.block_rows * to.block_cols / 8, [&](int64_t begin, int64_t end, int) {
    RecodeStats stats;
    for (int64_t t = begin; t < end; ++t) stats += HWY_DYNAMIC_DISPATCH(RecodeBlock)(to, lossy, from, t / blocks, t % blocks);
    total += stats;
  });
  return total.get();
}

}  // namespace simd
}  // namespace lockstep
#endif  // HWY_ONCE
