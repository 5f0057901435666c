#pragma once
// Learning rate of a step: linear warm-up, then constant or a half cosine down to min_lr_ratio. Counts applied steps only (rl
// spec 18.3): a skipped step is taken again at the same rate.

#include <cstdint>

#include "train/types.h"

namespace lockstep {

// steps_applied: optimizer steps already applied, so 0 for the first. Warm-up step s of W runs at (s + 1) / W of the rate: the
// first is not lost.
double learning_rate(const OptimizerConfig& config, int64_t steps_applied);

}  // namespace lockstep
