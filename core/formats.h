#pragma once
// Numbers of 8 and 4 bits and their conversions, bit for bit: E4M3 (OCP "fn"), E5M2, E2M1, UE8M0, and E4M3FNUZ as a translation.
// bf16 is in core/dtype.h. Everything is integer arithmetic on the bits of an f32 (no tables, no rounding mode, no library), so
// that host and device code share it.
//
//   format  bias  largest  Inf  NaN          zero    NaN encodes as       +-Inf, saturating
//   e4m3      7      448   no   7F, FF       +0 -0   7F, FF by sign       +-448
//   e5m2     15    57344   yes  7D-7F FD-FF  +0 -0   7F, FF by sign       +-57344
//   e2m1      1        6   no   none         +0 -0   +0                   +-6
//   ue8m0   127    2^127   no   FF           none    FF                   2^127; values are 2^(bits - 127)
//   fnuz      8      240   no   80           +0
//
// Encoding rounds to nearest, ties to the even code, sub-normals included; a value that rounds to zero keeps its sign. Saturating
// encoders return the largest code beyond it. "Overflows" below means: the nearest number, had the format no largest exponent,
// is over the largest (E4M3: |x| > 464, E5M2: |x| >= 61440, E2M1: |x| >= 7).
// Decoding gives every NaN as the quiet NaN of its sign.
// Source: OCP 8-bit floating point specification 1.0; OCP microscaling formats 1.0; AMD CDNA 3 ISA (FNUZ). Golden values in
// tests/golden/formats.safetensors; formats_test.cc checks every code and every rounding boundary.

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/dtype.h"

namespace lockstep {

// What the conversions need to know of a format; e2m1x2 stands for one of its nibbles.
template <typename T>
struct FloatFormat;
template <>
struct FloatFormat<e4m3> {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr uint32_t kMaxCode = 0x7e, kNanCode = 0x7f, kOverflowCode = 0x7f, kSignShift = 7;
  static constexpr float kMax = 448.0f;
};
template <>
struct FloatFormat<e5m2> {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr uint32_t kMaxCode = 0x7b, kNanCode = 0x7f, kOverflowCode = 0x7c, kSignShift = 7;
  static constexpr float kMax = 57344.0f;
};
template <>
struct FloatFormat<e2m1x2> {
  static constexpr int kMantissaBits = 1, kBias = 1;
  static constexpr uint32_t kMaxCode = 0x7, kSignShift = 3;
  static constexpr float kMax = 6.0f;
};

inline constexpr uint32_t kF32Magnitude = 0x7fffffffu, kF32Infinity = 0x7f800000u, kF32Nan = 0x7fc00000u;

// u / 2^n to nearest, ties to even.
constexpr uint32_t shift_right_to_even(uint32_t u, int n) { return (u + (1u << (n - 1)) - 1u + ((u >> n) & 1u)) >> n; }

// The code of the magnitude whose f32 bits are `a` (not NaN), had the format no largest exponent: what is over kMaxCode overflows.
template <typename T>
constexpr uint32_t unbounded_code(uint32_t a) {
  using F = FloatFormat<T>;
  constexpr int kDropped = 23 - F::kMantissaBits;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - F::kBias) << 23;
  if (a >= kMinNormal) return shift_right_to_even(a, kDropped) - (static_cast<uint32_t>(127 - F::kBias) << F::kMantissaBits);
  // Sub-normal: a multiple of 2^(1 - bias - mantissa bits). The significand counts 2^(exponent - 150); f32's own sub-normals and
  // whatever lies more than a bit under half a step are 0.
  const int exponent = static_cast<int>(a >> 23);
  const int shift = 151 - F::kBias - F::kMantissaBits - exponent;
  if (exponent == 0 || shift > 25) return 0;
  return shift_right_to_even((a & 0x007fffffu) | 0x00800000u, shift);
}

// The code of x, saturating; a nibble for e2m1x2.
template <typename T>
constexpr uint8_t encode(float x) {
  using F = FloatFormat<T>;
  const uint32_t u = std::bit_cast<uint32_t>(x), a = u & kF32Magnitude;
  const uint32_t sign = (u >> 31) << F::kSignShift;
  if (a > kF32Infinity) {
    if constexpr (std::is_same_v<T, e2m1x2>) return 0;
    else return static_cast<uint8_t>(sign | F::kNanCode);
  }
  const uint32_t code = unbounded_code<T>(a);
  return static_cast<uint8_t>(sign | (code > F::kMaxCode ? F::kMaxCode : code));
}

// The value of a code; a nibble for e2m1x2.
template <typename T>
constexpr float decode(uint8_t code) {
  using F = FloatFormat<T>;
  constexpr uint32_t kMantissa = (1u << F::kMantissaBits) - 1u;
  const uint32_t sign = static_cast<uint32_t>(code >> F::kSignShift) << 31;
  const uint32_t magnitude = code & ((1u << F::kSignShift) - 1u);
  const uint32_t exponent = magnitude >> F::kMantissaBits, mantissa = magnitude & kMantissa;
  if constexpr (!std::is_same_v<T, e2m1x2>) {
    if (magnitude > F::kMaxCode) {
      const bool infinite = std::is_same_v<T, e5m2> && magnitude == F::kOverflowCode;
      return std::bit_cast<float>(sign | (infinite ? kF32Infinity : kF32Nan));
    }
  }
  if (exponent == 0) {
    constexpr float kStep = std::bit_cast<float>(static_cast<uint32_t>(128 - F::kBias - F::kMantissaBits) << 23);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * kStep));
  }
  return std::bit_cast<float>(sign | ((exponent + 127u - F::kBias) << 23) | (mantissa << (23 - F::kMantissaBits)));
}

constexpr e4m3 to_e4m3(float x) { return {encode<e4m3>(x)}; }
constexpr e5m2 to_e5m2(float x) { return {encode<e5m2>(x)}; }
constexpr float to_f32(e4m3 x) { return decode<e4m3>(x.bits); }
constexpr float to_f32(e5m2 x) { return decode<e5m2>(x.bits); }

// Not saturating: what overflows becomes NaN (E4M3, which has no infinity) or infinity (E5M2), with its sign.
constexpr e4m3 to_e4m3_or_nan(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (unbounded_code<e4m3>(u & kF32Magnitude) <= FloatFormat<e4m3>::kMaxCode) return to_e4m3(x);
  return {static_cast<uint8_t>((u >> 31 << 7) | FloatFormat<e4m3>::kNanCode)};
}
constexpr e5m2 to_e5m2_or_inf(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), a = u & kF32Magnitude;
  if (a > kF32Infinity || unbounded_code<e5m2>(a) <= FloatFormat<e5m2>::kMaxCode) return to_e5m2(x);
  return {static_cast<uint8_t>((u >> 31 << 7) | FloatFormat<e5m2>::kOverflowCode)};
}

constexpr e2m1x2 to_e2m1x2(float low, float high) {
  return {static_cast<uint8_t>(encode<e2m1x2>(low) | (encode<e2m1x2>(high) << 4))};
}
constexpr float low_to_f32(e2m1x2 x) { return decode<e2m1x2>(x.bits & 15); }
constexpr float high_to_f32(e2m1x2 x) { return decode<e2m1x2>(x.bits >> 4); }

// Powers of two.

inline constexpr ue8m0 kUe8m0Nan{0xff};

constexpr float to_f32(ue8m0 x) {
  if (x.bits == 0) return std::bit_cast<float>(0x00400000u);  // 2^-127, sub-normal in f32
  return std::bit_cast<float>(x.bits == kUe8m0Nan.bits ? kF32Nan : static_cast<uint32_t>(x.bits) << 23);
}
// The least power of two that is at least x: 2^-127 for what is less (0 too), 2^127 for what is more. NaN and negative x give NaN.
constexpr ue8m0 to_ue8m0_up(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & kF32Magnitude) == 0) return {0};
  if (u > kF32Infinity) return kUe8m0Nan;
  if (u < 0x00800000u) return {static_cast<uint8_t>(u > 0x00400000u)};
  const uint32_t up = (u + 0x007fffffu) >> 23;
  return {static_cast<uint8_t>(up > 0xfe ? 0xfe : up)};
}
// Whether a scale held as f32 can be held as UE8M0 without loss.
constexpr bool is_ue8m0(float x) { return to_f32(to_ue8m0_up(x)) == x; }
// Twice x, saturating at 2^127.
constexpr ue8m0 doubled(ue8m0 x) { return {static_cast<uint8_t>(x.bits < 0xfe ? x.bits + 1 : x.bits)}; }

// Scales of a block whose largest magnitude is amax, kMax * 2^-126 <= amax < infinity.

// The least power of two s with amax <= s * kMax, by the exponents and mantissas alone: exact, unlike a product with 1 / kMax.
template <typename T>
constexpr ue8m0 ue8m0_scale(float amax) {
  constexpr uint32_t kMax = std::bit_cast<uint32_t>(FloatFormat<T>::kMax);
  const uint32_t a = std::bit_cast<uint32_t>(amax);
  const uint32_t bump = (a & 0x007fffffu) > (kMax & 0x007fffffu) ? 1 : 0;
  return {static_cast<uint8_t>((a >> 23) + 127u - (kMax >> 23) + bump)};
}
// amax / kMax rounded up to 20 significant bits, so that code * scale is exact in f32 for every code (of a normal product). With an
// inexact product the scale of a de-quantised block could come out one ulp off and quantising it again would not give the same
// numbers. Rounded down where kMax * scale would overflow.
template <typename T>
constexpr float f32_scale(float amax) {
  constexpr uint32_t kLargest = std::bit_cast<uint32_t>(std::numeric_limits<float>::max() / FloatFormat<T>::kMax) & ~15u;
  const uint32_t up = (std::bit_cast<uint32_t>(amax / FloatFormat<T>::kMax) + 15u) & ~15u;
  return std::bit_cast<float>(up > kLargest ? kLargest : up);
}

// E4M3FNUZ (CDNA 3), in which a byte means half of what it means in E4M3: value(x) == 2 * value(to_fnuz(x)). The scale that goes
// with the codes is doubled(). -0 becomes +0 (80 is FNUZ's NaN), NaN becomes 80.
struct e4m3fnuz {
  uint8_t bits;
};
constexpr e4m3fnuz to_fnuz(e4m3 x) {
  if ((x.bits & 0x7f) == 0x7f) return {0x80};
  return {static_cast<uint8_t>(x.bits == 0x80 ? 0 : x.bits)};
}
constexpr float to_f32(e4m3fnuz x) {
  if (x.bits == 0x80) return std::bit_cast<float>(kF32Nan);
  if ((x.bits & 0x7f) == 0x7f) return x.bits == 0x7f ? 240.0f : -240.0f;  // 7F, FF: numbers here, NaN in E4M3
  return 0.5f * to_f32(e4m3{x.bits});
}

}  // namespace lockstep
