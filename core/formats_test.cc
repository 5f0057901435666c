// Every code of the small formats, and every f32 that matters to their encoders, against an oracle that knows only the definition of a
// format (sign, exponent, mantissa, bias) in f64 and searches all codes for the nearest.

#include "core/formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

namespace lockstep {
namespace {

float f32(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

// The definition: magnitudes of the finite codes in rising order, code i having the value values[i].
struct Oracle {
  std::vector<double> values;
  double beyond;  // the next value, had the format one exponent more
  uint8_t sign;

  Oracle(int exponent_bits, int mantissa_bits, int bias, int finite_codes) : sign(static_cast<uint8_t>(1 << (exponent_bits + mantissa_bits))) {
    const auto value = [&](int code) {
      const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
      const double fraction = std::ldexp(mantissa, -mantissa_bits);
      return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
    };
    for (int code = 0; code < finite_codes; ++code) values.push_back(value(code));
    beyond = value(finite_codes);
  }
  // Nearest code of |x|, ties to even; values.size() where that is beyond the largest.
  uint32_t nearest(double x) const {
    x = std::min(std::abs(x), 2 * beyond);  // where f64 still tells neighbours apart
    uint32_t best = 0;
    double distance = x;
    const auto consider = [&](uint32_t code, double value) {
      const double d = std::abs(x - value);
      if (d < distance || (d == distance && code % 2 == 0)) {
        best = code;
        distance = d;
      }
    };
    for (uint32_t code = 1; code < values.size(); ++code) consider(code, values[code]);
    consider(static_cast<uint32_t>(values.size()), beyond);
    return best;
  }
  uint8_t saturated(float x) const {
    const uint8_t s = std::signbit(x) ? sign : 0;
    if (std::isinf(x)) return static_cast<uint8_t>(s | (values.size() - 1));
    return static_cast<uint8_t>(s | std::min<size_t>(nearest(x), values.size() - 1));
  }
};
const Oracle& e4m3_oracle() {
  static const Oracle o(4, 3, 7, 0x7f);
  return o;
}
const Oracle& e5m2_oracle() {
  static const Oracle o(5, 2, 15, 0x7c);
  return o;
}
const Oracle& e2m1_oracle() {
  static const Oracle o(2, 1, 1, 8);
  return o;
}

// Compares all encoders on x; true if they agree with the oracles.
bool agree(float x) {
  if (std::isnan(x)) {
    const uint8_t nan = std::signbit(x) ? 0xff : 0x7f;
    return to_e4m3(x).bits == nan && to_e5m2(x).bits == nan && encode<e2m1x2>(x) == 0 && to_e4m3_or_nan(x).bits == nan && to_e5m2_or_inf(x).bits == nan;
  }
  const uint8_t s = std::signbit(x) ? 0x80 : 0;
  const bool over4 = std::isinf(x) || e4m3_oracle().nearest(x) == 0x7f, over5 = std::isinf(x) || e5m2_oracle().nearest(x) == 0x7c;
  return to_e4m3(x).bits == e4m3_oracle().saturated(x) && to_e5m2(x).bits == e5m2_oracle().saturated(x) &&
         encode<e2m1x2>(x) == e2m1_oracle().saturated(x) &&
         to_e4m3_or_nan(x).bits == (over4 ? (s | 0x7f) : e4m3_oracle().saturated(x)) &&
         to_e5m2_or_inf(x).bits == (over5 ? (s | 0x7c) : e5m2_oracle().saturated(x)) &&
         (unbounded_code<e4m3>(bits(std::abs(x))) > 0x7e) == over4 && (unbounded_code<e5m2>(bits(std::abs(x))) > 0x7b) == over5 &&
         (unbounded_code<e2m1x2>(bits(std::abs(x))) > 7) == (std::isinf(x) || e2m1_oracle().nearest(x) == 8);
}

TEST(Formats, EveryCodeDecodesToItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    const uint8_t c = static_cast<uint8_t>(code);
    const size_t magnitude = c & 0x7f;
    const double sign = c & 0x80 ? -1 : 1;
    const uint32_t sign_bit = c & 0x80 ? 0x80000000u : 0;
    if (magnitude < 0x7f) {
      EXPECT_EQ(bits(to_f32(e4m3{c})), bits(static_cast<float>(sign * e4m3_oracle().values[magnitude]))) << code;
    } else {
      EXPECT_EQ(bits(to_f32(e4m3{c})), sign_bit | 0x7fc00000u) << code;
    }
    if (magnitude < 0x7c) {
      EXPECT_EQ(bits(to_f32(e5m2{c})), bits(static_cast<float>(sign * e5m2_oracle().values[magnitude]))) << code;
    } else {
      EXPECT_EQ(bits(to_f32(e5m2{c})), sign_bit | (magnitude == 0x7c ? 0x7f800000u : 0x7fc00000u)) << code;
    }
    const auto nibble = [](int n) { return static_cast<float>((n & 8 ? -1 : 1) * e2m1_oracle().values[static_cast<size_t>(n & 7)]); };
    EXPECT_EQ(bits(low_to_f32(e2m1x2{c})), bits(nibble(code & 15))) << code;
    EXPECT_EQ(bits(high_to_f32(e2m1x2{c})), bits(nibble(code >> 4))) << code;
    EXPECT_EQ(to_e2m1x2(nibble(code & 15), nibble(code >> 4)).bits, c);
    if (code < 255) {
      EXPECT_EQ(to_f32(ue8m0{c}), std::ldexp(1.0f, code - 127)) << code;
    } else {
      EXPECT_TRUE(std::isnan(to_f32(ue8m0{c})));
    }
  }
  const double fp4[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  EXPECT_TRUE(std::equal(fp4, fp4 + 8, e2m1_oracle().values.begin()));
  EXPECT_EQ(e4m3_oracle().values.back(), 448);
  EXPECT_EQ(e5m2_oracle().values.back(), 57344);
}

TEST(Formats, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code < 256; ++code) {
    const uint8_t c = static_cast<uint8_t>(code);
    EXPECT_EQ(to_e4m3(to_f32(e4m3{c})).bits, c);
    EXPECT_EQ(to_e4m3_or_nan(to_f32(e4m3{c})).bits, c);
    const int magnitude = c & 0x7f;
    const uint8_t nan = static_cast<uint8_t>(c | 0x7f);
    EXPECT_EQ(to_e5m2_or_inf(to_f32(e5m2{c})).bits, magnitude <= 0x7c ? c : nan);
    EXPECT_EQ(to_e5m2(to_f32(e5m2{c})).bits, magnitude < 0x7c ? c : magnitude == 0x7c ? c - 1 : nan);
    EXPECT_EQ(to_ue8m0_up(to_f32(ue8m0{c})).bits, c);
  }
}

TEST(Formats, EveryUpperHalfOfAnF32) {  // with a lower half of 0 these are all bf16 numbers
  int64_t wrong = 0;
  for (uint32_t high = 0; high < 65536; ++high)
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x5a5au}) wrong += !agree(f32(high << 16 | low));
  EXPECT_EQ(wrong, 0);
}

TEST(Formats, EveryBoundaryAndItsNeighbours) {
  int64_t wrong = 0, seen = 0;
  for (const Oracle* o : {&e4m3_oracle(), &e5m2_oracle(), &e2m1_oracle()})
    for (size_t i = 0; i < o->values.size(); ++i) {
      const double next = i + 1 < o->values.size() ? o->values[i + 1] : o->beyond;
      const float mid = static_cast<float>((o->values[i] + next) / 2);  // exact: one bit more than the format
      EXPECT_EQ(static_cast<double>(mid), (o->values[i] + next) / 2);
      for (const double at : {static_cast<double>(mid), o->values[i]})
        for (int ulp = -2; ulp <= 2; ++ulp) {
          const uint32_t u = bits(static_cast<float>(at));
          if (u == 0 && ulp < 0) continue;
          for (const uint32_t sign : {0u, 0x80000000u}) {
            wrong += !agree(f32((u + static_cast<uint32_t>(ulp)) | sign));
            ++seen;
          }
        }
    }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(seen, 5000);
}

TEST(Formats, StatedLimits) {
  EXPECT_EQ(to_e4m3_or_nan(464.0f).bits, 0x7e);
  EXPECT_EQ(to_e4m3_or_nan(std::nextafter(464.0f, 500.0f)).bits, 0x7f);
  EXPECT_EQ(to_e5m2_or_inf(std::nextafter(61440.0f, 0.0f)).bits, 0x7b);
  EXPECT_EQ(to_e5m2_or_inf(-61440.0f).bits, 0xfc);
  EXPECT_EQ(to_e4m3(-1e-30f).bits, 0x80);
  EXPECT_EQ(encode<e2m1x2>(-0.25f), 8);   // tie between 0 and 0.5
  EXPECT_EQ(encode<e2m1x2>(0.75f), 2);    // tie between 0.5 and 1
  EXPECT_EQ(encode<e2m1x2>(5.0f), 6);     // tie between 4 and 6
  EXPECT_EQ(encode<e2m1x2>(std::numeric_limits<float>::infinity()), 7);
  static_assert(to_e4m3(448.0f).bits == 0x7e && to_f32(e4m3{1}) == 0x1p-9f && to_f32(e5m2{1}) == 0x1p-16f);
}

TEST(Formats, PowersOfTwoRoundUp) {
  for (uint32_t high = 0; high < 0x7f80; ++high)
    for (const uint32_t low : {0u, 1u, 0xffffu}) {
      const float x = f32(high << 16 | low);
      const ue8m0 up = to_ue8m0_up(x);
      ASSERT_NE(up.bits, kUe8m0Nan.bits);
      if (x <= 0x1p127f) {
        ASSERT_GE(to_f32(up), x);
      } else {
        ASSERT_EQ(up.bits, 0xfe);
      }
      if (up.bits > 0) {
        ASSERT_LT(to_f32(ue8m0{static_cast<uint8_t>(up.bits - 1)}), x);
      }
      int exponent = 0;
      ASSERT_EQ(is_ue8m0(x), std::frexp(x, &exponent) == 0.5f && x >= 0x1p-127f) << x;
    }
  EXPECT_EQ(to_ue8m0_up(-1.0f).bits, 0xff);
  EXPECT_EQ(to_ue8m0_up(-0.0f).bits, 0);
  EXPECT_EQ(to_ue8m0_up(std::numeric_limits<float>::quiet_NaN()).bits, 0xff);
  EXPECT_EQ(to_ue8m0_up(std::numeric_limits<float>::infinity()).bits, 0xfe);
  for (int code = 0; code < 0xfe; ++code) EXPECT_EQ(to_f32(doubled({static_cast<uint8_t>(code)})), 2 * to_f32(ue8m0{static_cast<uint8_t>(code)}));
  EXPECT_EQ(doubled({0xfe}).bits, 0xfe);
  EXPECT_EQ(doubled({0xff}).bits, 0xff);
}

template <typename T>
void check_scales(float amax) {
  const double kMax = FloatFormat<T>::kMax;
  const ue8m0 s = ue8m0_scale<T>(amax);
  ASSERT_LE(amax, kMax * to_f32(s));
  ASSERT_GT(amax, kMax * to_f32(s) / 2);
  const float f = f32_scale<T>(amax);
  ASSERT_EQ(bits(f) & 15u, 0u);
  ASSERT_GE(f * kMax * (amax < 0x1.fffep127f ? 1 + 0x1p-24 : 1 + 0x1p-19), amax);
  ASSERT_LE(f * kMax, amax * (1 + 0x1p-19));
  for (uint32_t code = 0; code <= FloatFormat<T>::kMaxCode; ++code) {
    const float value = decode<T>(static_cast<uint8_t>(code)), product = value * f;
    ASSERT_EQ(static_cast<double>(product), static_cast<double>(value) * f);
  }
}

TEST(Formats, ScalesOfABlock) {
  for (uint32_t high = 0x0a00; high < 0x7f80; ++high)  // every exponent for which every product is normal, every bf16 mantissa
    for (const uint32_t low : {0u, 1u, 0xffffu}) {
      const float amax = f32(high << 16 | low);
      check_scales<e4m3>(amax);
      check_scales<e2m1x2>(amax);
      if (high >= 0x1200) check_scales<e5m2>(amax);
    }
  // One ulp decides.
  for (int e = -120; e <= 110; ++e) {
    const float limit = std::ldexp(448.0f, e);
    EXPECT_EQ(ue8m0_scale<e4m3>(limit).bits, 127 + e);
    EXPECT_EQ(ue8m0_scale<e4m3>(std::nextafter(limit, INFINITY)).bits, 128 + e);
    EXPECT_EQ(ue8m0_scale<e4m3>(std::nextafter(limit, 0.0f)).bits, 127 + e);
  }
  // Exponents published with the model's specification.
  const std::map<float, int> fp8 = {{448, 0}, {447, 0}, {896, 1}, {3.5f, -7}, {1.75f, -8}, {1, -8}, {0.875f, -9}, {1e-4f, -22}};
  for (const auto& [amax, e] : fp8) EXPECT_EQ(ue8m0_scale<e4m3>(amax).bits, 127 + e) << amax;
  const std::map<float, int> fp4 = {{6, 0}, {6.1f, 1}, {5, 0}, {3, -1}, {1, -2}, {0.75f, -3}};
  for (const auto& [amax, e] : fp4) EXPECT_EQ(ue8m0_scale<e2m1x2>(amax).bits, 127 + e) << amax;
}

TEST(Formats, FnuzMeansHalf) {
  for (int code = 0; code < 256; ++code) {
    const e4m3 x{static_cast<uint8_t>(code)};
    const e4m3fnuz y = to_fnuz(x);
    if (std::isnan(to_f32(x))) {
      EXPECT_EQ(y.bits, 0x80);
    } else {
      EXPECT_EQ(2 * to_f32(y), to_f32(x));
      EXPECT_NE(y.bits, 0x80);
      EXPECT_EQ(y.bits, code == 0x80 ? 0 : code);
    }
    // Bias 8, no infinity, NaN at 80 alone.
    const e4m3fnuz raw{static_cast<uint8_t>(code)};
    if (code == 0x80) {
      EXPECT_TRUE(std::isnan(to_f32(raw)));
    } else {
      const Oracle o(4, 3, 8, 0x80);
      EXPECT_EQ(to_f32(raw), (code & 0x80 ? -1 : 1) * o.values[static_cast<size_t>(code & 0x7f)]);
    }
  }
}

}  // namespace
}  // namespace lockstep
