#pragma once
// The groups of a grid that one rank belongs to, made together in one order on all ranks.

#include <optional>

#include "parallel/collective.h"
#include "parallel/grid.h"

namespace lockstep {

struct Groups {
  RankGroup tp;
  RankGroup pp;                        // by stage: neighbours send to each other
  RankGroup dp;                        // gradients of dense weights
  RankGroup ep;                        // tokens of routed layers
  RankGroup expert_replicas;           // gradients of experts
  std::optional<RankGroup> embedding;  // first and last stage; none on stages between
};

// All ranks of the world, which has grid.ranks() of them.
Groups make_groups(RankWorld& world, const Grid& grid);

}  // namespace lockstep
