// The contract of the whole project: what the sampler recorded token by token is what the trainer computes, bit for bit.

#include <gtest/gtest.h>

#include <cstdio>

#include "tests/parity_cases.h"

namespace lockstep {
namespace {

void expect_parity(Numerics numerics, uint64_t first_seed, uint64_t draws = 100, CacheRounding cache = {}) {
  int64_t tokens = 0;
  for (uint64_t seed = first_seed; seed < first_seed + draws; ++seed) {
    const ParityResult r = run_parity_case(seed, numerics, cache);
    EXPECT_EQ(r.different, 0) << r.where << ": " << r.different << " of " << r.tokens << " log-probs differ";
    tokens += r.tokens;
  }
  std::printf("%s: %llu draws, %lld tokens, all bits equal\n", numerics_name(numerics), static_cast<unsigned long long>(draws), static_cast<long long>(tokens));
  EXPECT_GT(tokens, 20 * static_cast<int64_t>(draws));
}

TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualInF32) { expect_parity(Numerics::f32, 1000); }
TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualInBf16) { expect_parity(Numerics::bf16, 2000); }
TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualInFp8) { expect_parity(Numerics::fp8, 5000, 30); }
TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualInFp4) { expect_parity(Numerics::fp4, 6000, 20); }
TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualWithKeysInFp8) {
  expect_parity(Numerics::bf16, 7000, 20, {.kv_fp8 = true});
  expect_parity(Numerics::f32, 7100, 10, {.kv_fp8 = true});
}
TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualWithTheIndexInFp4) {
  expect_parity(Numerics::bf16, 8000, 20, {.index_fp4 = true});
  expect_parity(Numerics::fp4, 8100, 10, {.kv_fp8 = true, .index_fp4 = true});
}

}  // namespace
}  // namespace lockstep
