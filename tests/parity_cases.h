#pragma once
// Random models, batches and schedules, run by the rollout engine and by the packed forward; shared by the test that wants no difference and by the
// ones that plant a violation and want it found.

#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace lockstep {

struct ParityResult {
  int64_t tokens = 0;      // sampled tokens compared
  int64_t different = 0;   // log-probabilities whose bits differ
  std::string where;       // the case, for a failure message
};

// One draw (of quantised modes with widths of more than one block): a random config and weights; requests of random lengths through an engine with random batch, chunk, slot and thread limits; then every
// sequence again, whole, in packed micro-batches of random composition and another thread count.
ParityResult run_parity_case(uint64_t seed, Numerics numerics, CacheRounding cache = {});

}  // namespace lockstep
