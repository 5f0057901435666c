// Encoders and quantisers against torch's casts: tests/golden/formats.safetensors.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "ops/quantize/quantize.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

class FormatsGolden : public ::testing::Test {
 protected:
  void SetUp() override {
    auto file = SafetensorsFile::open(LOCKSTEP_SOURCE_DIR "/tests/golden/formats.safetensors");
    ASSERT_TRUE(file.is_ok()) << file.message();
    file_.emplace(file.take());
  }
  // Copied: the file promises no alignment.
  testing::Tensor get(const char* name, DType dtype, int64_t n) {
    testing::Tensor t(dtype, {n});
    const Status s = file_->copy_to(name, t);
    EXPECT_TRUE(s.is_ok()) << s.message();
    return t;
  }
  std::optional<SafetensorsFile> file_;
};

TEST_F(FormatsGolden, ValuesOfEveryCode) {
  const auto e4 = get("value.e4m3", DType::f32, 256), e5 = get("value.e5m2", DType::f32, 256), fnuz = get("value.e4m3fnuz", DType::f32, 256);
  const auto same = [](float a, float b) { return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); };
  for (int i = 0; i < 256; ++i) {
    const uint8_t code = static_cast<uint8_t>(i);
    EXPECT_TRUE(same(to_f32(e4m3{code}), e4.ptr<float>()[i])) << i;
    EXPECT_TRUE(same(to_f32(e5m2{code}), e5.ptr<float>()[i])) << i;
    EXPECT_TRUE(same(to_f32(e4m3fnuz{code}), fnuz.ptr<float>()[i])) << i;
  }
}

TEST_F(FormatsGolden, CodesOfEveryBf16AndOfTheBoundaries) {
  constexpr int64_t kBf16 = 65536, kF32 = 61010;
  const auto bits = get("bf16_bits", DType::i32, kBf16), to_bits = get("f32_to_bf16", DType::i32, kF32);
  const auto x32 = get("f32", DType::f32, kF32);
  testing::Tensor x16(DType::bf16, {kBf16});
  for (int64_t i = 0; i < kBf16; ++i) x16.ptr<bf16>()[i].bits = static_cast<uint16_t>(bits.ptr<int32_t>()[i]);
  for (int64_t i = 0; i < kF32; ++i) {
    const bf16 got = to_bf16(x32.ptr<float>()[i]), want{static_cast<uint16_t>(to_bits.ptr<int32_t>()[i])};
    if (std::isnan(to_f32(want))) {
      EXPECT_TRUE(std::isnan(to_f32(got)));
    } else {
      EXPECT_EQ(got.bits, want.bits) << i;
    }
  }

  CpuContext c;
  for (const DType code : {DType::e4m3, DType::e5m2})
    for (const bool wide : {false, true}) {
      const int64_t n = wide ? kF32 : kBf16;
      const std::string name = fmt::format("{}{}_sat", wide ? "f32_to_" : "", dtype_name(code));
      const auto want = get(name.c_str(), DType::u8, n);
      int64_t wrong = 0;
      for (int64_t i = 0; i < n; ++i) {
        const float x = wide ? x32.ptr<float>()[i] : to_f32(x16.ptr<bf16>()[i]);
        wrong += (code == DType::e4m3 ? to_e4m3(x).bits : to_e5m2(x).bits) != want.ptr<uint8_t>()[i];
      }
      EXPECT_EQ(wrong, 0) << name;
      // The quantiser under scales of 1, on every vector width. One number a block keeps NaN and overflow from sending neighbours the plain way.
      const ConstTensorView x = wide ? x32.view().reshape({n, 1}) : x16.view().reshape({n, 1});
      testing::Tensor scales(DType::f32, {n, 1}), codes(code, {n, 1});
      std::fill_n(scales.ptr<float>(), n, 1.0f);
      testing::for_each_simd_target([&](const std::string& target) {
        quantize_given_scales(c, {codes, scales, 1, 128}, x);
        EXPECT_EQ(std::memcmp(codes.view().data, want.view().data, static_cast<size_t>(n)), 0) << name << target;
      });
      // Whole vectors: what neither overflows nor is special, in one row.
      testing::Tensor row(wide ? DType::f32 : DType::bf16, {1, n}), row_codes(code, {1, n}), one(DType::ue8m0, {1, 1});
      std::vector<uint8_t> row_want;
      for (int64_t i = 0; i < n; ++i) {
        const float v = wide ? x32.ptr<float>()[i] : to_f32(x16.ptr<bf16>()[i]);
        if (!(std::abs(v) <= (code == DType::e4m3 ? 448.0f : 57344.0f))) continue;
        row.set(static_cast<int64_t>(row_want.size()), v);
        row_want.push_back(want.ptr<uint8_t>()[i]);
      }
      const int64_t m = static_cast<int64_t>(row_want.size());
      one.ptr<ue8m0>()[0].bits = 127;
      testing::for_each_simd_target([&](const std::string& target) {
        const QuantStats s = quantize_given_scales(c, {row_codes.view().cols(0, m), one, 1, n}, row.view().cols(0, m));
        EXPECT_EQ(s.saturated + s.nonfinite, 0);
        EXPECT_EQ(std::memcmp(row_codes.view().data, row_want.data(), row_want.size()), 0) << name << target;
      });
    }
}

}  // namespace
}  // namespace lockstep
