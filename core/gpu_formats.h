#pragma once
// The conversions of core/formats.h and core/dtype.h in kernels, several numbers at a time: the same bits, by the instructions of the GPU that has them.
// Codes of four numbers are what lies in memory: a word of 8-bit ones, 16 bits of E2M1, the first in the lowest bits.
// Source: PTX ISA 8.x, sections on cvt and prmt; CDNA4 ISA, V_PERM_B32.

#include "core/formats.h"
#include "core/gpu.h"

namespace lockstep::gpu {

// The code of a number that is not NaN. A magnitude y < 2 is rounded to a multiple of 1/2, to one of 1 below 4, else to one of 2 by adding so large a power of two
// that those are its last bits: what the sum has over it counts them. Codes go on from 2 at 2, from 4 at 4.
GPU_INLINE uint32_t encode_e2m1(float x) {
  const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & kF32Magnitude), y = magnitude < FloatFormat<e2m1x2>::kMax ? magnitude : FloatFormat<e2m1x2>::kMax;
  const uint32_t exponent = std::bit_cast<uint32_t>(y > 1.0f ? y : 1.0f) & kF32Infinity, large = exponent + (22u << 23);
  const uint32_t steps = std::bit_cast<uint32_t>(y + std::bit_cast<float>(large)) - large;
  return steps + (exponent >> 22) - 2 * 127u + (std::bit_cast<uint32_t>(x) >> 31 << 3);
}

// Codes of v[i] * by, by > 0 and finite: encode<Code>, where NaN keeps the sign of v[i]. E2M1, which has none, takes no NaN.
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
    // The unit's NaN is positive. Every other code has its number's sign already.
    const auto bits = [&v](int i) { return std::bit_cast<uint32_t>(v[i]); };
    const uint32_t tops = __byte_perm(__byte_perm(bits(0), bits(1), 0x73), __byte_perm(bits(2), bits(3), 0x73), 0x5410);
    return codes | (tops & 0x80808080u);
#else
    uint32_t codes = 0;
    for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(encode<Code>(scaled(v[i], by))) << (8 * i);
    return codes;
#endif
  }
}

// Values of four codes. NaN becomes some NaN.
template <typename Code>
GPU_INLINE void decode_four(uint32_t codes, float (&v)[4]) {
  using F = FloatFormat<Code>;
#if LOCKSTEP_GPU_CUDA
  if constexpr (!std::is_same_v<Code, e2m1x2>) {
    const auto pair = [](uint32_t two, float& low, float& high) {
      if constexpr (std::is_same_v<Code, e4m3>)
        asm("{\n.reg .b32 both;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 both, %2;\nmov.b32 {low, high}, both;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
            : "=f"(low), "=f"(high) : "h"(static_cast<uint16_t>(two)));
      else
        asm("{\n.reg .b32 both;\n.reg .b16 low, high;\ncvt.rn.f16x2.e5m2x2 both, %2;\nmov.b32 {low, high}, both;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
            : "=f"(low), "=f"(high) : "h"(static_cast<uint16_t>(two)));
    };
    pair(codes & 0xffffu, v[0], v[1]);
    pair(codes >> 16, v[2], v[3]);
    return;
  }
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
