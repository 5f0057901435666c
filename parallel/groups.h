#pragma once
// One layout of all ranks as one of them sees it: the grid, its own place, and the groups that it belongs to there. Trainer and sampler
// may each have one over the same ranks.

#include <optional>
#include <string>

#include "parallel/collective.h"
#include "parallel/grid.h"

namespace lockstep {

struct Groups {
  Grid grid;
  int rank = 0;                        // in the grid and in the world
  RankGroup* all = nullptr;            // everyone
  RankGroup tp;                        // heads and vocabulary
  RankGroup pp;                        // by stage: neighbours send to each other
  RankGroup dp;                        // gradients of dense weights
  RankGroup ep;                        // tokens of routed layers
  RankGroup expert_replicas;           // gradients of experts
  std::optional<RankGroup> embedding;  // first and last stage; none on stages between

  Coordinates at() const { return grid.coordinates(rank); }
};

// All ranks of the world, which has grid.ranks() of them. `use` sets the groups of two layouts apart: "train", "rollout".
Groups make_groups(RankWorld& world, const Grid& grid, const std::string& use);

}  // namespace lockstep
