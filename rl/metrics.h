#pragma once
// Numbers of a step under the names of rl spec 16, from records alone: the same records give the same bits. Times are kept apart
// (timing.jsonl). A metric without data is absent.

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rl/records.h"
#include "train/actor.h"
#include "train/gap.h"

namespace lockstep {

using Metrics = std::vector<std::pair<std::string, double>>;

// train/: what the optimizer steps of one rollout reported, averaged over them (tokens and micro-batches are summed).
void add_train_metrics(Metrics& metrics, std::span<const StepMetrics> steps);
// rollout/ and passrate/, over all generated groups.
void add_rollout_metrics(Metrics& metrics, std::span<const Group> groups);
// train/train_rollout_* and gap/: trainer against sampler.
void add_gap_metrics(Metrics& metrics, std::span<const GapSample> samples);
void add_gap_deciles(Metrics& metrics, std::span<const GapSample> samples);  // gap/decile_0 to 9: tenths of responses

// How old the samples were when they were trained by version `now`: of a sample the versions since its oldest token, and for each lag of tokens how far the
// trainer's log-probs have moved from the sampler's since. versions[i] are those of the tokens of samples[i].
void add_staleness_metrics(Metrics& metrics, std::span<const GapSample> samples, std::span<const std::span<const int32_t>> versions, int64_t now);

double find_metric(const Metrics& metrics, const std::string& name);  // NaN when absent
// One line of metrics.jsonl.
std::string metrics_line(int64_t step, const Metrics& metrics);

}  // namespace lockstep
