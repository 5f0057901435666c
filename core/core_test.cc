// dtype conversions, views, arenas, the thread pool and Philox.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "core/divisor.h"
#include "core/dtype.h"
#include "core/rng.h"

namespace lockstep {
namespace {

TEST(DType, EveryBf16CodeSurvivesTheRoundTrip) {
  for (uint32_t u = 0; u < 65536; ++u) {
    const bf16 x{static_cast<uint16_t>(u)};
    const float f = to_f32(x);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(to_f32(to_bf16(f))));
    } else {
      EXPECT_EQ(to_bf16(f).bits, x.bits);
    }
  }
}

TEST(DType, RoundsToNearestEvenAtEveryMidpoint) {
  for (uint32_t u = 0; u < 0x7f80; ++u) {
    const uint32_t mid = (u << 16) | 0x8000u;
    const uint16_t even = static_cast<uint16_t>(u + (u & 1));
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid)).bits, even);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid - 1)).bits, u);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid + 1)).bits, u + 1);
    EXPECT_EQ(to_bf16(std::bit_cast<float>(mid | 0x80000000u)).bits, even | 0x8000);
  }
}

TEST(DType, LargeValuesRoundToInfinityAndNanStaysNan) {
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Philox, PublishedVectors) {  // Random123's known-answer file, philox4x32-10
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformStaysInsideTheOpenInterval) {
  EXPECT_GT(uniform_open(0), 0.0f);
  EXPECT_LT(uniform_open(0xffffffffu), 1.0f);
}

TEST(Philox, NormalHasUnitVariance) {
  Philox rng(1, RngPurpose::test);
  double sum = 0, squares = 0;
  const int n = 200000;
  for (int i = 0; i < n; ++i) {
    const double x = rng.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0.0, 5.0 / std::sqrt(n));                // five standard errors
  EXPECT_NEAR(squares / n, 1.0, 5.0 * std::sqrt(2.0 / n));
}

TEST(Arena, MarksReleaseAndHighWaterStays) {
  Arena a("test", 1 << 20);
  a.allocate(100, "x");
  const size_t mark = a.mark();
  char* first = static_cast<char*>(a.allocate(1000, "y"));
  a.release(mark);
  EXPECT_EQ(a.allocate(10, "z"), first);
  EXPECT_EQ(a.high_bytes(), Arena::footprint(100) + Arena::footprint(1000));
  EXPECT_EQ(Arena::footprint(100), kAddressSanitizer ? 192u : 128u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
}

TEST(ArenaDeath, AnAllocationThatWouldWrapDoesNotFit) {
  Arena a("small", 4096);
  EXPECT_DEATH(a.allocate(SIZE_MAX - 10, "wraps"), "arena small.*'wraps' do not fit");
}

// What the address sanitizer sees of arenas: the byte behind a piece, a released piece, and a piece nobody has written.
TEST(ArenaDeath, TheAddressSanitizerGuardsPieces) {
  if (!kAddressSanitizer) GTEST_SKIP() << "not a build under the address sanitizer";
  Arena a("guarded", 1 << 20);
  volatile char* unused = static_cast<char*>(a.allocate(0, "unused"));
  volatile char* first = static_cast<char*>(a.allocate(100, "first"));
  first[99] = 1;
  EXPECT_DEATH(unused[0] = 1, "use-after-poison");
  EXPECT_DEATH(first[100] = 1, "use-after-poison");
  const size_t mark = a.mark();
  const TensorView second = a.tensor(DType::f32, {16}, "second");  // a multiple of the alignment: no padding behind it
  EXPECT_TRUE(std::isnan(second.ptr<float>()[15]));
  volatile float* outside = second.ptr<float>() + 16;
  EXPECT_DEATH((void)*outside, "use-after-poison");
  EXPECT_EQ(a.zeros(DType::f32, {16}, "third").ptr<float>()[15], 0.0f);
  a.release(mark);
  volatile float* released = second.ptr<float>();
  EXPECT_DEATH((void)*released, "use-after-poison");
  EXPECT_EQ(first[99], 1);
}

TEST(ArenaDeath, SealedArenaNamesTheAllocationThatGrows) {
  Arena a("steady", 1 << 20);
  a.allocate(64, "warm-up");
  a.seal();
  EXPECT_DEATH(a.allocate(64, "surprise"), "arena steady is sealed.*surprise");
}

TEST(ArenaDeath, FullArenaNamesItself) {
  Arena a("small", 4096);
  EXPECT_DEATH(a.allocate(5000, "big"), "arena small.*'big' do not fit");
}

TEST(TensorView, SlicesColumnsAndRowsShareMemory) {
  float x[12];
  for (int i = 0; i < 12; ++i) x[i] = static_cast<float>(i);
  const TensorView v(x, DType::f32, {3, 4});
  EXPECT_EQ(v.slice(1, 2).row<float>(1)[0], 8.0f);
  EXPECT_EQ(v.cols(2, 2).row<float>(2)[1], 11.0f);
  EXPECT_FALSE(v.cols(2, 2).contiguous());
  EXPECT_EQ(v.at(1).ptr<float>()[3], 7.0f);
  EXPECT_EQ(v.reshape({2, 6}).row<float>(1)[0], 6.0f);
}

TEST(TensorViewDeath, WrongDtypeIsACheck) {
  float x[4] = {};
  EXPECT_DEATH((void)TensorView(x, DType::f32, {4}).ptr<bf16>(), "f32 view of shape \\[4\\] was read as bf16");
}

TEST(ThreadPool, EveryItemRunsOnceForAnyThreadCount) {
  for (int threads : {1, 2, 3, 4, 7}) {
    CpuContext c(threads, 1 << 20);
    for (int64_t n : {0, 1, 2, 5, 100, 1003}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
      for (int repeat = 0; repeat < 50; ++repeat)
        parallel_for(c, n, 1'000'000, [&](int64_t b, int64_t e, int) {
          for (int64_t i = b; i < e; ++i) hits[static_cast<size_t>(i)]++;
        });
      for (auto& h : hits) EXPECT_EQ(h.load(), 50);
    }
  }
}

TEST(Check, TheHandlerIsToldBeforeTheEnd) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        set_check_handler([](const char* message) { _exit(std::strstr(message, "CHECK failed: 2 + 2 == 5 four") != nullptr ? 7 : 8); });
        CHECK(2 + 2 == 5, "{}", "four");
      },
      ::testing::ExitedWithCode(7), "core_test.cc:[0-9]+: CHECK failed");
  EXPECT_DEATH(CHECK(2 + 2 == 5), "CHECK failed: 2 \\+ 2 == 5");
}

TEST(Divisor, IsDivision) {
  std::vector<uint32_t> numbers;
  for (uint32_t bit = 0; bit < 31; ++bit)
    for (const uint32_t d : {0u, 1u, 2u, 3u}) numbers.push_back((1u << bit) + d), numbers.push_back((1u << bit) - d);
  for (uint32_t n = 0; n < 3000; ++n) numbers.push_back(n);
  std::erase_if(numbers, [](uint32_t n) { return n >= 1u << 31; });
  for (const uint32_t d : numbers) {
    if (d == 0) continue;
    const Divisor divisor(d);
    for (const uint32_t n : numbers) ASSERT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
    const uint32_t most = 0x7fffffffu / d;  // where quotients turn
    for (const uint32_t q : {1u, most / 2 + 1, most})
      for (const uint32_t n : {q * d, q * d - 1}) ASSERT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
  }
}

}  // namespace
}  // namespace lockstep
