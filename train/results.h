#pragma once
// What the last stage computed, to all ranks of a layout. Called by all of them; the first rank of a dp index's last stage speaks for its samples.

#include <span>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "parallel/groups.h"
#include "train/loss.h"
#include "train/pack.h"
#include "train/types.h"

namespace lockstep {

// In: results of the samples of this dp index, on its last stage. Out: of all samples of the work. `scratch` is given back.
void gather_logprobs(Context& c, Groups& groups, Arena& scratch, std::span<const TrainSample> samples, const Work& work,
                     std::span<TokenLogprobs> results);
void gather_sums(Context& c, Groups& groups, Arena& scratch, const Work& work, std::span<LossSums> sums);

}  // namespace lockstep
