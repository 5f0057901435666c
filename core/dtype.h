#pragma once
// Number formats and their conversions, bit for bit.
//
// f32 is IEEE binary32. bf16 is the upper half of f32; conversion rounds to nearest, ties to even, keeps
// infinities, and maps every NaN to a quiet NaN of the same sign. Both directions are defined for every bit
// pattern; core_test.cc checks all 65,536 bf16 codes and rounding at every midpoint.
//
// Formats of 8 and 4 bits are named here and converted in core/formats.h. An element of e2m1x2 is a byte that holds two E2M1
// numbers: number 2i of a row is the low nibble of byte i, number 2i + 1 the high one, so its shapes count bytes.

#include <bit>
#include <cstddef>
#include <cstdint>

namespace lockstep {

enum class DType : uint8_t { f32, bf16, f64, i32, i64, u8, e4m3, e5m2, e2m1x2, ue8m0 };

constexpr size_t dtype_bytes(DType t) {
  switch (t) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::f64: return 8;
    case DType::i32: return 4;
    case DType::i64: return 8;
    case DType::u8: return 1;
    case DType::e4m3: return 1;
    case DType::e5m2: return 1;
    case DType::e2m1x2: return 1;
    case DType::ue8m0: return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f64: return "f64";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::e2m1x2: return "e2m1x2";
    case DType::ue8m0: return "ue8m0";
  }
  return "?";
}

// Storage of one bf16 number. Arithmetic is always done in f32.
struct bf16 {
  uint16_t bits;
};
static_assert(sizeof(bf16) == 2);

// Storage of the small formats of core/formats.h.
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
struct e2m1x2 {
  uint8_t bits;
};
struct ue8m0 {
  uint8_t bits;
};

constexpr float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
constexpr float to_f32(float x) { return x; }

constexpr bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x0040u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <typename T>
constexpr T from_f32(float x);
template <>
constexpr float from_f32<float>(float x) { return x; }
template <>
constexpr bf16 from_f32<bf16>(float x) { return to_bf16(x); }

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> { static constexpr DType value = DType::f32; };
template <>
struct DTypeOf<bf16> { static constexpr DType value = DType::bf16; };
template <>
struct DTypeOf<double> { static constexpr DType value = DType::f64; };
template <>
struct DTypeOf<int32_t> { static constexpr DType value = DType::i32; };
template <>
struct DTypeOf<int64_t> { static constexpr DType value = DType::i64; };
template <>
struct DTypeOf<uint8_t> { static constexpr DType value = DType::u8; };
template <>
struct DTypeOf<e4m3> { static constexpr DType value = DType::e4m3; };
template <>
struct DTypeOf<e5m2> { static constexpr DType value = DType::e5m2; };
template <>
struct DTypeOf<e2m1x2> { static constexpr DType value = DType::e2m1x2; };
template <>
struct DTypeOf<ue8m0> { static constexpr DType value = DType::ue8m0; };

// The model-wide choice of arithmetic. f32, bf16: weights of matrices and activations in this dtype, accumulation in f32. fp8: the large
// linear layers multiply E4M3 codes of weights and activations, everything else as in bf16. fp4: fp8, with routed experts' weights in MXFP4.
// Which layers: TensorSpec::quant_format (model/weights.h); the product: ops/matmul/matmul.h.
enum class Numerics : uint8_t { f32, bf16, fp8, fp4 };
inline constexpr Numerics kAllNumerics[] = {Numerics::f32, Numerics::bf16, Numerics::fp8, Numerics::fp4};
constexpr DType storage_dtype(Numerics n) { return n == Numerics::f32 ? DType::f32 : DType::bf16; }
constexpr bool is_quantized(Numerics n) { return n == Numerics::fp8 || n == Numerics::fp4; }
constexpr const char* numerics_name(Numerics n) {
  switch (n) {
    case Numerics::f32: return "f32";
    case Numerics::bf16: return "bf16";
    case Numerics::fp8: return "fp8";
    case Numerics::fp4: return "fp4";
  }
  return "?";
}

// What is rounded further before attention keeps it, in any mode (V4 spec 3.3; off by default, as in 3.4). The call that makes such a row reads
// it rounded too. kv_fp8: the channels of window rows and compressed entries that are not rotated, E4M3 1x64. index_fp4: indexer queries and
// keys, rotated by a Hadamard matrix and rounded to E2M1 1x32.
struct CacheRounding {
  bool kv_fp8 = false, index_fp4 = false;
  bool operator==(const CacheRounding&) const = default;
};

}  // namespace lockstep
