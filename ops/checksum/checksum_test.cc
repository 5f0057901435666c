#include "ops/checksum/checksum.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

uint64_t sum_of(Context& c, const ChecksumItem& item) {
  const Tensor out(DType::i64, {1});
  checksum(c, out, {&item, 1});
  return static_cast<uint64_t>(out.ptr<int64_t>()[0]);
}

Tensor random_bytes(DType dtype, Shape shape) {
  Tensor t(dtype, shape);
  Philox rng(1, RngPurpose::test);
  for (size_t i = 0; i < t.view().bytes(); ++i) static_cast<uint8_t*>(t.view().data)[i] = static_cast<uint8_t>(rng.below(256));
  return t;
}

// Word by word, as the header says it.
TEST(Checksum, IsTheSumOfTheHeader) {
  CpuContext c(2);
  const Tensor x = random_bytes(DType::u8, {3, 13});
  const uint64_t key = 77;
  uint64_t expected = 0;
  for (uint64_t r = 0; r < 3; ++r)
    for (uint64_t q = 0; q < 4; ++q) {
      uint32_t word = 0;
      std::memcpy(&word, x.ptr<uint8_t>() + r * 13 + q * 4, std::min<size_t>(4, 13 - q * 4));
      uint64_t z = key + (r + 5) * 0x9e3779b97f4a7c15u + q / 2 * 0xd6e8feb86659fd93u;
      z = (z ^ z >> 32) * 0xbf58476d1ce4e5b9u;
      z ^= z >> 29;
      expected += word * ((q % 2 == 0 ? z : z << 32 | z >> 32) | 1);
    }
  EXPECT_EQ(sum_of(c, {x, key, 5, 0}), expected);
}

TEST(Checksum, PartsAddUpToTheWhole) {
  CpuContext c(2);
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32}) {
    const Tensor x = random_bytes(dtype, {9, 37});
    const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
    const uint64_t whole = sum_of(c, {x, 3, 0, 0});
    for (int64_t row = 0; row <= 9; row += 3)
      for (int64_t column = 0; column <= 37; ++column) {
        const auto part = [&](int64_t r, int64_t rows, int64_t k, int64_t columns) {
          return sum_of(c, {x.view().slice(r, rows).cols(k, columns), 3, r, k * bytes});
        };
        const uint64_t sum = part(0, row, 0, column) + part(0, row, column, 37 - column) + part(row, 9 - row, 0, column) +
                             part(row, 9 - row, column, 37 - column);
        EXPECT_EQ(sum, whole) << dtype_name(dtype) << " cut at row " << row << ", column " << column;
      }
  }
}

TEST(Checksum, ShowsEveryBitAndPlace) {
  CpuContext c;
  const Tensor x = random_bytes(DType::u8, {2, 19});
  uint8_t* const at = x.ptr<uint8_t>();
  const uint64_t before = sum_of(c, {x, 3, 0, 0});
  for (int i = 0; i < 2 * 19; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      at[i] ^= static_cast<uint8_t>(1 << bit);
      EXPECT_NE(sum_of(c, {x, 3, 0, 0}), before) << "bit " << bit << " of byte " << i;
      at[i] ^= static_cast<uint8_t>(1 << bit);
    }
    for (int j = 0; j < i; ++j) {
      if (at[i] == at[j]) continue;
      std::swap(at[i], at[j]);
      EXPECT_NE(sum_of(c, {x, 3, 0, 0}), before) << "bytes " << i << " and " << j << " exchanged";
      std::swap(at[i], at[j]);
    }
  }
  EXPECT_NE(sum_of(c, {x, 4, 0, 0}), before);
  EXPECT_NE(sum_of(c, {x, 3, 1, 0}), before);
  EXPECT_NE(sum_of(c, {x, 3, 0, 1}), before);
}

}  // namespace
}  // namespace lockstep
