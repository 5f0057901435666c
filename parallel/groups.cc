#include "parallel/groups.h"

namespace lockstep {

Groups make_groups(RankWorld& world, const Grid& grid, const std::string& use) {
  CHECK_EQ(grid.ranks(), world.size());
  const int me = world.rank();
  const Coordinates at = grid.coordinates(me);
  // A name says what the members have in common.
  Groups groups{
      .grid = grid,
      .rank = me,
      .all = &world.all(),
      .tp = world.make_group(fmt::format("{} tp of pp {} dp {}", use, at.pp, at.dp), grid.tp_group(me)),
      .pp = world.make_group(fmt::format("{} pp of tp {} dp {}", use, at.tp, at.dp), grid.pp_chain(me)),
      .dp = world.make_group(fmt::format("{} dp of tp {} pp {}", use, at.tp, at.pp), grid.dp_group(me)),
      .ep = world.make_group(fmt::format("{} ep of tp {} pp {} block {}", use, at.tp, at.pp, grid.ep_block(me)), grid.ep_group(me)),
      .expert_replicas = world.make_group(fmt::format("{} replicas of tp {} pp {} ep {}", use, at.tp, at.pp, grid.ep_index(me)),
                                          grid.expert_replicas(me)),
      .embedding = std::nullopt,
  };
  if (const std::vector<int> members = grid.embedding_group(me); !members.empty())
    groups.embedding.emplace(world.make_group(fmt::format("{} embedding of tp {} dp {}", use, at.tp, at.dp), members));
  return groups;
}

}  // namespace lockstep
