#include "ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "ops/quantize/quantize_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

std::vector<std::unique_ptr<CpuContext>> contexts() {
  std::vector<std::unique_ptr<CpuContext>> out;
  for (int threads = 1; threads <= 3; ++threads) out.push_back(std::make_unique<CpuContext>(threads));
  return out;
}

// Codes and scales with rows three elements longer than needed, full of 0xa5, so that writes beyond a row show.
struct Quantised {
  QuantFormat format;
  int64_t rows, cols;
  Tensor codes, scales;

  Quantised(const QuantFormat& f, int64_t rows, int64_t cols) : format(f), rows(rows), cols(cols) {
    const Shape c = code_shape(f, rows, cols), s = scale_shape(f, rows, cols);
    codes = Tensor(f.codes, {rows + 1, c[1] + 3});
    scales = Tensor(f.scales, {s[0] + 1, s[1] + 3});
    std::memset(codes.view().data, 0xa5, codes.view().bytes());
    std::memset(scales.view().data, 0xa5, scales.view().bytes());
  }
  QuantView view() const {
    const Shape c = code_shape(format, rows, cols), s = scale_shape(format, rows, cols);
    return {TensorView(codes.view().data, format.codes, c, c[1] + 3), TensorView(scales.view().data, format.scales, s, s[1] + 3),
            format.block_rows, format.block_cols};
  }
};
void expect_same(const Quantised& a, const Quantised& b, const std::string& what) {
  EXPECT_EQ(testing::count_bit_differences(a.codes, b.codes), 0) << "codes " << what;
  EXPECT_EQ(testing::count_bit_differences(a.scales, b.scales), 0) << "scales " << what;
}

std::vector<QuantFormat> formats() {
  std::vector<QuantFormat> out;
  for (const DType codes : {DType::e4m3, DType::e5m2, DType::e2m1x2})
    for (const DType scales : {DType::f32, DType::ue8m0})
      for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{128, 128}, {1, 128}, {1, 64}, {1, 32}, {3, 10}})
        out.push_back({codes, scales, rows, cols, rows == 1 ? 1e-4f : 0.0f});
  return out;
}
std::string name(const QuantFormat& f) {
  return fmt::format("{} {} {}x{}", dtype_name(f.codes), dtype_name(f.scales), f.block_rows, f.block_cols);
}

enum class Values { normal, wide, bits, special };
Tensor numbers(uint64_t seed, DType dtype, int64_t rows, int64_t cols, Values kind) {
  Tensor x(dtype, {rows, cols});
  Philox rng(seed, RngPurpose::test);
  const float special[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 0x1p-126f, 1.0f, -448.0f, 3e38f, -3.4028235e38f, 1e-8f, kInf, -kInf, kNan, -kNan};
  for (int64_t i = 0; i < x.elements(); ++i) {
    float v = rng.normal();
    if (kind == Values::wide) v = std::ldexp(v, static_cast<int>(rng.below(60)) - 30) * (rng.below(8) != 0);
    if (kind == Values::special && rng.below(4) == 0) v = special[rng.below(static_cast<uint32_t>(rng.below(30) == 0 ? std::size(special) : 10))];
    if (kind != Values::bits) {
      x.set(i, v);
    } else if (dtype == DType::f32) {
      x.ptr<float>()[i] = std::bit_cast<float>(static_cast<uint32_t>(rng.next()));
    } else {
      x.ptr<bf16>()[i].bits = static_cast<uint16_t>(rng.next());
    }
  }
  return x;
}

const std::vector<std::pair<int64_t, int64_t>> kShapes = {{1, 1}, {1, 7}, {2, 31}, {5, 32}, {3, 129}, {130, 77}, {129, 300}, {2, 1031}};

TEST(Quantize, SimdGivesTheBitsOfTheReference) {
  const auto all = contexts();
  uint64_t seed = 0;
  for (const QuantFormat& f : formats())
    for (const auto& [rows, cols] : kShapes)
      for (const DType dtype : {DType::f32, DType::bf16})
        for (const Values kind : {Values::normal, Values::wide, Values::bits, Values::special}) {
          const Tensor storage = numbers(++seed, dtype, rows + 1, cols + 1, kind);
          const ConstTensorView x(static_cast<char*>(storage.view().data) + dtype_bytes(dtype), dtype, {rows, cols}, cols + 1);
          Quantised want(f, rows, cols);
          const QuantStats stats = reference::quantize(want.view(), x, f.amax_floor, false);
          Tensor y(dtype, {rows, cols}), y_want(dtype, {rows, cols});
          reference::dequantize(y_want, want.view());
          testing::for_each_simd_target([&](const std::string& target) {
            const std::string what = fmt::format("{} {} [{}, {}] {} values {}", target, name(f), rows, cols, dtype_name(dtype), static_cast<int>(kind));
            Quantised got(f, rows, cols);
            CpuContext& c = *all[seed % all.size()];
            EXPECT_EQ(quantize(c, got.view(), x, f.amax_floor), stats) << what;
            expect_same(got, want, what);
            dequantize(c, y, want.view());
            EXPECT_EQ(testing::count_bit_differences(y, y_want), 0) << what;
          });
          if (::testing::Test::HasFailure()) return;
        }
}

TEST(Quantize, GivenScalesSaturateAndCount) {
  const auto all = contexts();
  uint64_t seed = 1000;
  for (const QuantFormat& f : formats())
    for (const auto& [rows, cols] : kShapes)
      for (const Values kind : {Values::normal, Values::wide, Values::special}) {
        const Tensor x = numbers(++seed, DType::f32, rows, cols, kind);
        Quantised want(f, rows, cols);
        const QuantView q = want.view();
        Philox rng(seed, RngPurpose::test, 1);
        for (int64_t i = 0; i < q.scales.rows(); ++i)
          for (int64_t j = 0; j < q.scales.dim(1); ++j) {
            const float s = std::ldexp(1.0f, static_cast<int>(rng.below(12)) - 10);
            if (f.scales == DType::f32) q.scales.row<float>(i)[j] = 1.1f * s;
            else q.scales.row<ue8m0>(i)[j] = to_ue8m0_up(s);
          }
        Quantised got(f, rows, cols);
        std::memcpy(got.scales.view().data, want.scales.view().data, want.scales.view().bytes());
        const QuantStats stats = reference::quantize(want.view(), x, 0, true);
        testing::for_each_simd_target([&](const std::string& target) {
          EXPECT_EQ(quantize_given_scales(*all[seed % all.size()], got.view(), x), stats) << target << name(f);
          expect_same(got, want, target + name(f));
        });
        if (rows * cols > 1000 && f.codes == DType::e2m1x2 && kind == Values::wide) {
          EXPECT_GT(stats.saturated, 0);
        }
      }
  CpuContext c;
  Quantised q({DType::e4m3, DType::f32, 1, 8}, 1, 6);
  q.view().scales.row<float>(0)[0] = 1;
  Tensor x(DType::f32, {1, 6});
  const float values[6] = {464, 465, -1e9f, 0x1p-10f, 0x1.8p-10f, -kInf};
  std::copy(values, values + 6, x.ptr<float>());
  EXPECT_EQ(quantize_given_scales(c, q.view(), x), (QuantStats{.elements = 6, .saturated = 2, .underflowed = 1, .nonfinite = 1}));
  const uint8_t codes[6] = {0x7e, 0x7e, 0xfe, 0x00, 0x01, 0xfe};
  EXPECT_EQ(std::memcmp(q.codes.view().data, codes, 6), 0);
}

// The definition in f64, written another way: the scale found by search, the code by search over all codes.
TEST(Quantize, MatchesTheDefinition) {
  CpuContext c;
  const int64_t rows = 5, cols = 300;
  for (const Values kind : {Values::normal, Values::wide}) {
    const Tensor x = numbers(7, DType::f32, rows, cols, kind);
    for (const QuantFormat& f : {kFp8Activation, kFp8Kv, kFp4}) {
      const bool fp4 = f.codes == DType::e2m1x2;
      const double max = fp4 ? 6 : 448;
      Quantised q(f, rows, cols);
      quantize(c, q.view(), x, f.amax_floor);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < cols; ++k) {
          double amax = f.amax_floor;
          for (int64_t i = k / f.block_cols * f.block_cols; i < std::min(cols, (k / f.block_cols + 1) * f.block_cols); ++i)
            amax = std::max<double>(amax, std::abs(x.ptr<float>()[r * cols + i]));
          int e = -126;
          while (amax > max * std::ldexp(1.0, e)) ++e;
          ASSERT_EQ(q.view().scale(r, k / f.block_cols), std::ldexp(1.0, e));
          const double v = std::ldexp(static_cast<double>(x.ptr<float>()[r * cols + k]), -e);
          const uint8_t code = fp4 ? static_cast<uint8_t>(q.view().codes.row<e2m1x2>(r)[k / 2].bits >> (k % 2 * 4) & 15)
                                   : q.view().codes.row<e4m3>(r)[k].bits;
          const auto value = [&](int at) { return static_cast<double>(fp4 ? decode<e2m1x2>(static_cast<uint8_t>(at)) : decode<e4m3>(static_cast<uint8_t>(at))); };
          const double error = std::abs(v - value(code));
          for (int other = 0; other < (fp4 ? 16 : 256); ++other) {
            if (std::isnan(value(other)) || value(other) == value(code)) continue;
            const double d = std::abs(v - value(other));
            ASSERT_TRUE(error < d || (error == d && code % 2 == 0)) << v << " as " << int(code) << " or " << other;
          }
          ASSERT_EQ((code & (fp4 ? 8 : 0x80)) != 0, std::signbit(v));
        }
    }
  }
}

TEST(Quantize, AgainIsTheIdentity) {
  CpuContext c;
  for (const QuantFormat& f : formats())
    for (const Values kind : {Values::normal, Values::wide})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        if (dtype == DType::bf16 && f.scales == DType::f32) continue;  // products are rounded
        const int64_t rows = 131, cols = 150;
        const Tensor x = numbers(3, dtype, rows, cols, kind);
        Quantised once(f, rows, cols), twice(f, rows, cols);
        quantize(c, once.view(), x, f.amax_floor);
        Tensor y(dtype, {rows, cols}), z(dtype, {rows, cols});
        dequantize(c, y, once.view());
        quantize(c, twice.view(), y, f.amax_floor);
        dequantize(c, z, twice.view());
        EXPECT_EQ(testing::count_bit_differences(y, z), 0) << name(f) << dtype_name(dtype);
        if (f.scales == DType::f32) expect_same(once, twice, name(f));
      }
}

// Several tiles a row of blocks, several threads; the parts have other tiles.
TEST(Quantize, WideMatricesGiveTheBitsOfTheirParts) {
  const auto all = contexts();
  const int64_t rows = 384, cols = 128 * 70 + 32, parts = 3;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor x = numbers(9, dtype, rows, cols, Values::wide);
    Quantised whole(kFp8Weight, rows, cols), parted(kFp8Weight, rows, cols);
    for (const auto& c : all)
      testing::for_each_simd_target([&](const std::string& target) {
        const QuantStats stats = quantize(*c, whole.view(), x, 0);
        QuantStats sum;
        for (int64_t p = 0; p < parts; ++p) {
          const QuantView v = parted.view();
          const int64_t n = rows / parts;
          sum += quantize(*all[0], {v.codes.slice(p * n, n), v.scales.slice(p * n / 128, n / 128), 128, 128}, x.view().slice(p * n, n), 0);
        }
        EXPECT_EQ(stats, sum);
        EXPECT_EQ(stats.elements, rows * cols);
        EXPECT_GT(stats.underflowed, 0);
        expect_same(whole, parted, target);
      });
  }
}

TEST(Quantize, RowContract) {
  const auto all = contexts();
  for (const QuantFormat& f : formats()) {
    if (f.block_rows != 1) continue;
    const int64_t rows = 40, cols = 300;
    const Tensor x = numbers(5, DType::bf16, rows, cols, Values::special);
    Quantised whole(f, rows, cols);
    quantize(*all[2], whole.view(), x, f.amax_floor);
    for (const int64_t cut : {1, 7, 40})
      for (int64_t r0 = 0; r0 < rows; r0 += cut) {
        const int64_t n = std::min(cut, rows - r0);
        Quantised part(f, n, cols);
        quantize(*all[0], part.view(), x.view().slice(r0, n), f.amax_floor);
        EXPECT_EQ(testing::count_bit_differences(part.view().codes, whole.view().codes.slice(r0, n)), 0);
        EXPECT_EQ(testing::count_bit_differences(part.view().scales, whole.view().scales.slice(r0, n)), 0);
      }
  }
}

TEST(Quantize, SpecialBlocks) {
  CpuContext c;
  const auto run = [&](const QuantFormat& f, const std::vector<float>& values, Quantised& q, QuantStats want) {
    Tensor x(DType::f32, {1, static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), x.ptr<float>());
    EXPECT_EQ(quantize(c, q.view(), x, f.amax_floor), want);
  };
  {  // zeros keep their sign; the scale is the floor's
    Quantised q(kFp8Activation, 1, 3);
    run(kFp8Activation, {0, -0.0f, 0}, q, {.elements = 3});
    EXPECT_EQ(std::memcmp(q.codes.view().data, "\x00\x80\x00", 3), 0);
    EXPECT_EQ(q.view().scale(0, 0), 0x1p-22f);
  }
  {  // no floor: the least scale
    Quantised q(kFp8Weight, 1, 3);
    run(kFp8Weight, {0, 1e-45f, -1e-45f}, q, {.elements = 3, .underflowed = 2});
    EXPECT_EQ(std::memcmp(q.codes.view().data, "\x00\x00\x80", 3), 0);
    EXPECT_EQ(q.view().scale(0, 0), 0x1p-126f);
  }
  {  // sub-normal numbers are numbers
    Quantised q(kFp8Weight, 1, 2);
    run(kFp8Weight, {0x1p-129f, -0x1p-127f}, q, {.elements = 2});
    Tensor y(DType::f32, {1, 2});
    dequantize(c, y, q.view());
    EXPECT_EQ(y.get(0), 0x1p-129f);
    EXPECT_EQ(y.get(1), -0x1p-127f);
  }
  {  // NaN and Inf have no part in the scale
    Quantised q(kFp8Weight, 1, 5);
    run(kFp8Weight, {448, kNan, -kInf, -kNan, 1}, q, {.elements = 5, .nonfinite = 3});
    EXPECT_EQ(std::memcmp(q.codes.view().data, "\x7e\x7f\xfe\xff\x38", 5), 0);
    EXPECT_EQ(q.view().scale(0, 0), 1.0f);
  }
  {  // FP4 has no NaN: its block becomes NaN, the next does not
    Quantised q(kFp4, 1, 33);
    std::vector<float> v(33, 6.0f);
    v[3] = kNan;
    v[5] = kInf;
    run(kFp4, v, q, {.elements = 33, .nonfinite = 2});
    EXPECT_EQ(q.view().scales.row<ue8m0>(0)[0].bits, 0xff);
    EXPECT_EQ(q.view().scale(0, 1), 1.0f);
    EXPECT_EQ(q.view().codes.row<e2m1x2>(0)[1].bits, 0x07);   // 6, NaN
    EXPECT_EQ(q.view().codes.row<e2m1x2>(0)[2].bits, 0x77);   // 6, Inf
    EXPECT_EQ(q.view().codes.row<e2m1x2>(0)[16].bits, 0x07);  // the odd end is a zero nibble
    Tensor y(DType::bf16, {1, 33});
    dequantize(c, y, q.view());
    for (int i = 0; i < 32; ++i) EXPECT_EQ(y.ptr<bf16>()[i].bits, 0x7fc0);
    EXPECT_EQ(y.get(32), 6.0f);
  }
  {  // the largest number with f32 scales does not come back as infinity
    const QuantFormat f{DType::e4m3, DType::f32, 1, 128};
    Quantised q(f, 1, 1);
    run(f, {std::numeric_limits<float>::max()}, q, {.elements = 1});
    Tensor y(DType::f32, {1, 1});
    dequantize(c, y, q.view());
    EXPECT_TRUE(std::isfinite(y.get(0)));
  }
  Tensor none(DType::f32, {0, 5}), narrow(DType::bf16, {5, 0});
  EXPECT_EQ(quantize(c, Quantised(kFp8Weight, 0, 5).view(), none, 0), QuantStats{});
  EXPECT_EQ(quantize(c, Quantised(kFp4, 5, 0).view(), narrow, 0), QuantStats{});
}

// Sub-scales around 2^-10, `span` octaves wide within the first block.
Quantised fp4_matrix(uint64_t seed, int64_t rows, int64_t cols, uint32_t span, bool hostile) {
  Quantised q(kFp4, rows, cols);
  Philox rng(seed, RngPurpose::test);
  const QuantView v = q.view();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols / 2; ++k) v.codes.row<e2m1x2>(r)[k].bits = static_cast<uint8_t>(rng.next());
    for (int64_t j = 0; j < v.scales.dim(1); ++j)
      v.scales.row<ue8m0>(r)[j].bits = static_cast<uint8_t>(hostile ? rng.below(rng.below(9) ? 255 : 256) : 117 + rng.below(span + 1));
  }
  return q;
}

TEST(RecodeFp4, SimdGivesTheBitsOfTheReferenceAndValuesStay) {
  const auto all = contexts();
  uint64_t seed = 0;
  for (const DType scales : {DType::f32, DType::ue8m0})
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{128, 128}, {3, 96}, {200, 418}, {1, 2}, {130, 1024}})
      for (const int64_t block_rows : {1, 128})
        for (const uint32_t span : {0u, 5u, 14u, 15u, 20u, 999u}) {
          const QuantFormat f{DType::e4m3, scales, block_rows, 128};
          const Quantised from = fp4_matrix(++seed, rows, cols, span, span == 999);
          Quantised want(f, rows, cols);
          const Shape grid = scale_shape(f, rows, cols);
          Tensor lossy(DType::u8, grid), lossy_want(DType::u8, grid);
          const RecodeStats stats = reference::recode_fp4(want.view(), lossy_want, from.view());
          testing::for_each_simd_target([&](const std::string& target) {
            Quantised got(f, rows, cols);
            EXPECT_EQ(recode_fp4(*all[seed % all.size()], got.view(), lossy, from.view()), stats) << target;
            expect_same(got, want, target);
            EXPECT_EQ(testing::count_bit_differences(lossy, lossy_want), 0);
          });
          EXPECT_EQ(stats.blocks, grid.elements());
          if (span <= 14) {
            EXPECT_EQ(stats.lossy_blocks, 0);
          }
          if (span == 20 && rows >= 128 && block_rows == 128) {
            EXPECT_GT(stats.lossy_blocks, 0);
          }

          // Outside of marked blocks values are equal; in them, exactly `inexact` are not.
          Tensor x(DType::f32, {rows, cols}), y(DType::f32, {rows, cols});
          reference::dequantize(x, from.view());
          reference::dequantize(y, want.view());
          int64_t changed = 0, nan = 0, marked = 0;
          for (int64_t i = 0; i < grid.elements(); ++i) marked += lossy.ptr<uint8_t>()[i];
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < cols; ++k) {
              const float a = x.ptr<float>()[r * cols + k], b = y.ptr<float>()[r * cols + k];
              nan += std::isnan(a);
              const bool same = a == b || (std::isnan(a) && std::isnan(b));
              changed += !same;
              if (lossy.ptr<uint8_t>()[r / block_rows * grid[1] + k / 128] == 0) {
                EXPECT_TRUE(same) << a << " " << b;
              }
            }
          EXPECT_EQ(marked, stats.lossy_blocks);
          EXPECT_EQ(nan, stats.nonfinite);
          if (span != 999) {  // under hostile scales f32 itself may round the products
            EXPECT_EQ(changed, stats.inexact);
          }
          EXPECT_EQ(marked == 0, stats.inexact == 0);
        }
}

TEST(RecodeFp4, TheReleaseRuleThenTheTightScale) {
  CpuContext c;
  const QuantFormat f{DType::e4m3, DType::ue8m0, 1, 128};
  Quantised from(kFp4, 1, 64), to(f, 1, 64);
  Tensor lossy(DType::u8, {1, 1});
  const QuantView q = from.view();
  // 6 * 2^0 beside 0.5 * 2^-14: just representable.
  std::memset(q.codes.data, 0, 32);
  q.codes.row<e2m1x2>(0)[0].bits = 7;
  q.codes.row<e2m1x2>(0)[16].bits = 1;
  q.scales.row<ue8m0>(0)[0].bits = 127;
  q.scales.row<ue8m0>(0)[1].bits = 127 - 14;
  EXPECT_EQ(recode_fp4(c, to.view(), lossy, q), (RecodeStats{.blocks = 1}));
  EXPECT_EQ(to.view().scale(0, 0), 0x1p-6f);
  EXPECT_EQ(to.view().codes.row<e4m3>(0)[32].bits, 1);
  // One octave more is not: 0.25 of a step is lost, and the block is marked.
  q.scales.row<ue8m0>(0)[1].bits = 127 - 15;
  EXPECT_EQ(recode_fp4(c, to.view(), lossy, q), (RecodeStats{.blocks = 1, .lossy_blocks = 1, .inexact = 1}));
  EXPECT_EQ(lossy.ptr<uint8_t>()[0], 1);
  // Unless the largest number is smaller than its sub-scale allows: 1 * 2^0 leaves room for a scale of 2^-8.
  q.codes.row<e2m1x2>(0)[0].bits = 2;
  EXPECT_EQ(recode_fp4(c, to.view(), lossy, q), (RecodeStats{.blocks = 1}));
  EXPECT_EQ(to.view().scale(0, 0), 0x1p-8f);
  EXPECT_EQ(lossy.ptr<uint8_t>()[0], 0);
}

TEST(QuantizeDeath, ChecksArguments) {
  CpuContext c;
  Tensor x(DType::f32, {4, 130}), ids(DType::i32, {4, 130}), codes(DType::e4m3, {4, 130}), packed(DType::e2m1x2, {4, 65}), scales(DType::f32, {4, 2}),
      few(DType::f32, {4, 1}), ue(DType::ue8m0, {4, 5});
  EXPECT_DEATH(quantize(c, {codes, scales, 1, 128}, ids, 0), "i32");
  EXPECT_DEATH(quantize(c, {codes, few, 1, 128}, x, 0), "scales \\[4, 1\\], \\[4, 2\\] is wanted");
  EXPECT_DEATH(quantize(c, {packed, scales, 1, 65}, x, 0), "blocks of 1 x 65");
  EXPECT_DEATH(quantize(c, {scales, scales, 1, 128}, x, 0), "codes f32");
  EXPECT_DEATH(quantize(c, {codes, scales, 1, 128}, x, -1), "amax_floor -1");
  EXPECT_DEATH(quantize_given_scales(c, {codes, scales, 1, 128}, x), "scales\\[0, 0\\] is 0");
  EXPECT_DEATH(dequantize(c, x, {packed, scales, 2, 128}), "scales \\[4, 2\\], \\[2, 2\\] is wanted");
  EXPECT_DEATH(recode_fp4(c, {codes, scales, 1, 128}, {}, {codes, ue, 1, 32}), "from codes e4m3");
  EXPECT_DEATH(recode_fp4(c, {codes, scales, 1, 65}, {}, {packed, ue, 1, 26}), "blocks of 65 columns from blocks of 26");
}

}  // namespace
}  // namespace lockstep
