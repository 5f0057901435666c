// The contract of the whole project: what the sampler recorded token by token is what the trainer computes, bit for bit.

#include <gtest/gtest.h>

#include <cstdio>

#include "tests/parity_cases.h"

namespace lockstep {
namespace {

void expect_parity(Numerics numerics, uint64_t first_seed) {
  int64_t tokens = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 100; ++seed) {
    const ParityResult r = run_parity_case(seed, numerics);
    EXPECT_EQ(r.different, 0) << r.where << ": " << r.different << " of " << r.tokens << " log-probs differ";
    tokens += r.tokens;
  }
  std::printf("%s: 100 draws, %lld tokens, all bits equal\n", numerics_name(numerics), static_cast<long long>(tokens));
  EXPECT_GT(tokens, 2000);
}

TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualInF32) { expect_parity(Numerics::f32, 1000); }
TEST(Parity, RolloutAndTrainingLogprobsAreBitEqualInBf16) { expect_parity(Numerics::bf16, 2000); }

}  // namespace
}  // namespace lockstep
