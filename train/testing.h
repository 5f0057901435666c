#pragma once
// Samples for tests of the trainer.

#include <algorithm>
#include <vector>

#include "core/rng.h"
#include "train/types.h"

namespace lockstep::testing {

// Random sequences with a policy's arrays; about a fifth of the response tokens masked.
inline std::vector<TrainSample> random_samples(uint64_t seed, const std::vector<int64_t>& lengths) {
  std::vector<TrainSample> samples;
  Philox rng(seed, RngPurpose::test);
  for (const int64_t length : lengths) {
    TrainSample s;
    s.index = 100 + static_cast<int64_t>(samples.size());
    for (int64_t t = 0; t < length; ++t) s.tokens.push_back(static_cast<int32_t>(rng.below(40)));
    s.prompt_length = 1 + static_cast<int64_t>(rng.below(static_cast<uint32_t>(std::min<int64_t>(length - 1, 6))));
    s.temperature = 0.8f;
    for (int64_t t = 0; t < s.response_length(); ++t) {
      s.mask.push_back(t == 0 || rng.below(5) != 0);
      s.advantage.push_back(2.0f * rng.uniform() - 1.0f);
      s.old_logprob.push_back(-3.6f + 0.6f * rng.uniform());
      s.ref_logprob.push_back(-3.6f + 0.6f * rng.uniform());
    }
    samples.push_back(std::move(s));
  }
  return samples;
}

}  // namespace lockstep::testing
