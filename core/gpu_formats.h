#pragma once
// The conversions of core/formats.h and core/dtype.h in kernels, several numbers at a time: the same bits, by the instructions of the GPU that has them.
// Codes of four numbers are what lies in memory: a word of 8-bit ones, 16 bits of E2M1, the first in the lowest bits.
// Source: PTX ISA 8.x, sections on cvt and prmt; CDNA4 ISA, V_PERM_B32.

#include "core/formats.h"
#include "core/gpu.h"

namespace lockstep::gpu {

// The larger magnitude of a and b; NaN if either is.
GPU_INLINE float larger_magnitude(float a, float b) {
#if LOCKSTEP_GPU_CUDA
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
#else
  const uint32_t x = std::bit_cast<uint32_t>(a) & kF32Magnitude, y = std::bit_cast<uint32_t>(b) & kF32Magnitude;
  return std::bit_cast<float>(x > y ? x : y);
#endif
}
// The larger one of both pairs of 16-bit numbers.
GPU_INLINE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if LOCKSTEP_GPU_CUDA
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
  return (a > b ? a : b) >> 16 << 16 | (low & 0xffffu);
#endif
}

// The code of a number that is not NaN. A magnitude y < 2 is rounded to a multiple of 1/2, to one of 1 below 4, else to one of 2 by adding so large a number that those
// are its last bits. They begin at 0, 2 and 4, so that they become the code: codes go on from 2 at 2, from 4 at 4.
GPU_INLINE uint32_t encode_e2m1(float x) {
  constexpr uint32_t kMax = std::bit_cast<uint32_t>(FloatFormat<e2m1x2>::kMax), kOne = std::bit_cast<uint32_t>(1.0f);
  const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & kF32Magnitude, y = magnitude < kMax ? magnitude : kMax, exponent = (y > kOne ? y : kOne) & kF32Infinity;
  const float sum = std::bit_cast<float>(y) + std::bit_cast<float>(exponent + (exponent >> 22) + ((22u << 23) - 2 * 127u));
  return (std::bit_cast<uint32_t>(sum) & 7u) | (u >> 28 & 8u);
}

// Codes of v[i] * by, by > 0 and finite: encode<Code>, where NaN keeps the sign of v[i].
template <typename Code>
GPU_INLINE uint32_t encode_four_or_nan(const float (&v)[4], float by) {
  uint32_t codes = 0;
  for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(encode<Code>(scaled(v[i], by))) << ((FloatFormat<Code>::kSignShift + 1) * static_cast<uint32_t>(i));
  return codes;
}
// The same where none is NaN.
template <typename Code>
GPU_INLINE uint32_t encode_four(const float (&v)[4], float by) {
  if constexpr (std::is_same_v<Code, e2m1x2>) {
    return encode_e2m1(v[0] * by) | encode_e2m1(v[1] * by) << 4 | encode_e2m1(v[2] * by) << 8 | encode_e2m1(v[3] * by) << 12;
  } else {
#if LOCKSTEP_GPU_CUDA
    uint32_t codes;
    if constexpr (std::is_same_v<Code, e4m3>)
      asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
          : "=r"(codes) : "f"(v[0] * by), "f"(v[1] * by), "f"(v[2] * by), "f"(v[3] * by));
    else
      asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
          : "=r"(codes) : "f"(v[0] * by), "f"(v[1] * by), "f"(v[2] * by), "f"(v[3] * by));
    return codes;
#else
    return encode_four_or_nan<Code>(v, by);
#endif
  }
}

// Values of four codes. NaN becomes some NaN.
template <typename Code>
GPU_INLINE void decode_four(uint32_t codes, float (&v)[4]) {
  using F = FloatFormat<Code>;
#if LOCKSTEP_GPU_CUDA
#define LOCKSTEP_DECODE_FOUR(format)                                                                                                                      \
  asm("{\n.reg .b16 a, b, c, d;\n.reg .b32 low, high;\nmov.b32 {a, b}, %4;\ncvt.rn.f16x2." format " low, a;\ncvt.rn.f16x2." format                         \
      " high, b;\nmov.b32 {a, b}, low;\nmov.b32 {c, d}, high;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}\n"       \
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(codes))
  if constexpr (std::is_same_v<Code, e4m3>) {
    LOCKSTEP_DECODE_FOUR("e4m3x2");
    return;
  } else if constexpr (std::is_same_v<Code, e5m2>) {
    LOCKSTEP_DECODE_FOUR("e5m2x2");
    return;
  }
#undef LOCKSTEP_DECODE_FOUR
#endif
  // Moved to f32's place a magnitude is its value times a power of two, sub-normals as well.
  constexpr uint32_t kMagnitude = (1u << F::kSignShift) - 1u;
  constexpr float kUp = std::bit_cast<float>(static_cast<uint32_t>(254 - F::kBias) << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> ((F::kSignShift + 1) * static_cast<uint32_t>(i)), magnitude = code & kMagnitude;
    v[i] = std::bit_cast<float>((code >> F::kSignShift & 1u) << 31 | magnitude << (23 - F::kMantissaBits)) * kUp;
    if constexpr (!std::is_same_v<Code, e2m1x2>)
      if (magnitude > F::kMaxCode) v[i] = decode<Code>(static_cast<uint8_t>(code));
  }
}

// Two numbers rounded to bf16, neither of them NaN; the first in the low half.
GPU_INLINE uint32_t round_two(float first, float second) {
#if LOCKSTEP_GPU_CUDA
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(first), "f"(second));
  return both;
#else
  return to_bf16(first).bits | static_cast<uint32_t>(to_bf16(second).bits) << 16;
#endif
}

// Eight bytes of a table of eight, each chosen by the lower three bits of a nibble.
GPU_INLINE Vector<uint32_t, 2> look_up(const Vector<uint32_t, 2>& table, uint32_t nibbles) {
#if LOCKSTEP_GPU_CUDA
  const uint32_t at = nibbles & 0x77777777u;
  return {{__byte_perm(table.v[0], table.v[1], at), __byte_perm(table.v[0], table.v[1], at >> 16)}};
#elif LOCKSTEP_GPU_HIP
  const uint32_t even = __builtin_amdgcn_perm(table.v[1], table.v[0], nibbles & 0x07070707u), odd = __builtin_amdgcn_perm(table.v[1], table.v[0], nibbles >> 4 & 0x07070707u);
  return {{__builtin_amdgcn_perm(odd, even, 0x05010400u), __builtin_amdgcn_perm(odd, even, 0x07030602u)}};
#else
  Vector<uint32_t, 2> found = {};
  for (int i = 0; i < 8; ++i) {
    const uint32_t at = nibbles >> (4 * i) & 7u;
    found.v[i / 4] |= (table.v[at / 4] >> (at % 4 * 8) & 0xffu) << (i % 4 * 8);
  }
  return found;
#endif
}
// Bit 7 of eight bytes: the top bits of eight nibbles.
GPU_INLINE Vector<uint32_t, 2> nibble_signs(uint32_t nibbles) {
  const uint32_t even = nibbles << 4 & 0x80808080u, odd = nibbles & 0x80808080u;  // of nibbles 0, 2, 4, 6 and 1, 3, 5, 7
#if LOCKSTEP_GPU_CUDA
  return {{__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)}};
#elif LOCKSTEP_GPU_HIP
  return {{__builtin_amdgcn_perm(odd, even, 0x05010400u), __builtin_amdgcn_perm(odd, even, 0x07030602u)}};
#else
  const auto spread = [](uint32_t e, uint32_t o) { return (e & 0xffu) | (o & 0xffu) << 8 | (e & 0xff00u) << 8 | (o & 0xff00u) << 16; };
  return {{spread(even, odd), spread(even >> 16, odd >> 16)}};
#endif
}

}  // namespace lockstep::gpu
