#pragma once
// One run's two layouts, the trainer's and the sampler's, over the same ranks or each over its own: the trainers first, the samplers behind them. From
// settings to groups.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "model/config.h"
#include "parallel/groups.h"
#include "sync/plan.h"

namespace lockstep {

// How the ranks that a launcher starts are used.
struct ParallelOptions {
  int64_t tp = 1, pp = 1, ep = 1;  // of the trainer
  int64_t dp = 0;                  // 0: as many as were started
  std::string stages = {};         // layers of each stage, "12,11,11,9"; empty: balanced
  int64_t rollout_tp = 0;          // of the sampler, whose pp is 1; 0: 1
  int64_t rollout_ep = 0;          // 0: the trainer's ep
  int64_t rollout_ranks = 0;       // the last so many of all ranks sample, the others train; 0: all do both
  float deadline_s = 600;
  Transport transport = Transport::automatic;  // between GPUs
};

struct Layouts {
  Layout train, rollout;
  StageLayers stages;          // of the trainer
  StageLayers rollout_stages;  // one, of all layers
  bool apart = false;          // each has ranks of its own
};
// Pure. `length` is that of a sequence, for which stages are balanced; `ranks` are all. An error names the setting and lists the nearest layouts.
Result<Layouts> resolve_layouts(const ParallelOptions& options, const ModelConfig& config, int64_t length, int ranks);

// The stages that parallel.stages lists, of `layers` layers.
Result<StageLayers> listed_stages(const std::string& text, int pp, int64_t layers);

// What every rank of a run has.
struct RunGroups {
  Layouts layouts;
  Placement trainer, sampler;            // of all ranks; one that does not train, or sample, holds nothing there
  RankGroup* all = nullptr;              // everyone
  std::unique_ptr<RankGroup> side;       // layouts.apart: those that train, or sample, like this rank
  std::optional<Groups> train, rollout;  // this rank's; none where it has no part
  int rank() const { return all->rank(); }
  const Shard& trainer_shard() const { return trainer.shards[static_cast<size_t>(rank())]; }
  const Shard& sampler_shard() const { return sampler.shards[static_cast<size_t>(rank())]; }
  // The first rank that holds what this one does in training: equal for ranks whose weights must be equal.
  int64_t trainer_twin() const;
};
// All ranks, with the same arguments.
RunGroups make_run_groups(RankWorld& world, const Layouts& layouts, const ModelConfig& config, Numerics train, Numerics rollout);

}  // namespace lockstep
