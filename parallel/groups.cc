#include "parallel/groups.h"

#include "parallel/channel.h"

namespace lockstep {

Groups make_groups(RankWorld& world, RankGroup& all, const Grid& grid, const std::string& use) {
  CHECK_EQ(grid.ranks(), all.size());
  const int me = all.rank();
  const Coordinates at = grid.coordinates(me);
  const auto make = [&](const std::string& name, std::vector<int> members) {
    for (int& r : members) r = all.members()[static_cast<size_t>(r)];
    return world.make_group(name, std::move(members));
  };
  // A name says what the members have in common.
  Groups groups{
      .grid = grid,
      .rank = me,
      .all = &all,
      .tp = make(fmt::format("{} tp of pp {} dp {}", use, at.pp, at.dp), grid.tp_group(me)),
      .pp = make(fmt::format("{} pp of tp {} dp {}", use, at.tp, at.dp), grid.pp_chain(me)),
      .dp = make(fmt::format("{} dp of tp {} pp {}", use, at.tp, at.pp), grid.dp_group(me)),
      .ep = make(fmt::format("{} ep of tp {} pp {} block {}", use, at.tp, at.pp, grid.ep_block(me)), grid.ep_group(me)),
      .expert_replicas = make(fmt::format("{} replicas of tp {} pp {} ep {}", use, at.tp, at.pp, grid.ep_index(me)), grid.expert_replicas(me)),
      .embedding = std::nullopt,
  };
  if (const std::vector<int> members = grid.embedding_group(me); !members.empty())
    groups.embedding.emplace(make(fmt::format("{} embedding of tp {} dp {}", use, at.tp, at.dp), members));
  return groups;
}

std::string mpi_library() { return Channel::library(); }

}  // namespace lockstep
