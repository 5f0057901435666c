#pragma once
// One layout as one of its ranks sees it: the grid, its own place, and the groups that it belongs to there. Trainer and sampler may each have one, over
// the same ranks or over different ones.

#include <optional>
#include <string>

#include "parallel/collective.h"
#include "parallel/grid.h"

namespace lockstep {

struct Groups {
  Grid grid;
  int rank = 0;                        // in the grid and in `all`
  RankGroup* all = nullptr;            // the grid's ranks
  RankGroup tp;                        // heads and vocabulary
  RankGroup pp;                        // by stage: neighbours send to each other
  RankGroup dp;                        // gradients of dense weights
  RankGroup ep;                        // tokens of routed layers
  RankGroup expert_replicas;           // gradients of experts
  std::optional<RankGroup> embedding;  // first and last stage; none on stages between

  Coordinates at() const { return grid.coordinates(rank); }
};

// All members of `all`, which has grid.ranks() of them and outlives what is made. `use` sets the groups of two layouts apart: "train", "rollout".
Groups make_groups(RankWorld& world, RankGroup& all, const Grid& grid, const std::string& use);
inline Groups make_groups(RankWorld& world, const Grid& grid, const std::string& use) { return make_groups(world, world.all(), grid, use); }

// The MPI that ranks talk through, name and version, or that the program has none.
std::string mpi_library();

}  // namespace lockstep
