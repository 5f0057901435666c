#include "parallel/grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

namespace lockstep {
namespace {

LayoutLimits limits_of(int ranks) { return {.ranks = ranks, .layers = 61, .experts = 256, .output_groups = 16}; }

std::vector<Layout> layouts_to_try() {
  std::vector<Layout> all;
  for (int ranks : {1, 2, 3, 6, 8, 16, 24, 64})
    for (const Layout& l : possible_layouts(limits_of(ranks))) all.push_back(l);
  return all;
}

// The groups that `group_of` gives must cut the ranks into classes: each rank in its own group, every member naming the same
// group.
void expect_partition(const Grid& grid, auto group_of, int size) {
  std::set<std::vector<int>> groups;
  for (int r = 0; r < grid.ranks(); ++r) {
    const std::vector<int> group = group_of(r);
    ASSERT_EQ(static_cast<int>(group.size()), size);
    ASSERT_TRUE(std::is_sorted(group.begin(), group.end()));
    ASSERT_NE(std::find(group.begin(), group.end(), r), group.end());
    for (int member : group) ASSERT_EQ(group_of(member), group);
    groups.insert(group);
  }
  ASSERT_EQ(static_cast<int>(groups.size()) * size, grid.ranks());
}

TEST(Parts, CoverEverythingOnceAndEvenly) {
  for (int64_t count : {0, 1, 2, 7, 16, 61, 256, 1000}) {
    for (int parts : {1, 2, 3, 8, 16, 300}) {
      int64_t at = 0;
      for (int p = 0; p < parts; ++p) {
        const Range r = part_of(count, parts, p);
        EXPECT_EQ(r.begin, at);
        EXPECT_TRUE(r.size() == count / parts || r.size() == count / parts + 1);
        for (int64_t i = r.begin; i < r.end; ++i) EXPECT_EQ(part_holding(count, parts, i), p);
        at = r.end;
      }
      EXPECT_EQ(at, count);
    }
  }
}

TEST(Grid, PublishedLayout) {
  const Grid grid({.tp = 1, .pp = 4, .ep = 4, .dp = 4});
  EXPECT_EQ(grid.ranks(), 16);
  EXPECT_EQ(grid.ep_group(6), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(grid.dp_group(6), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(grid.pp_chain(6), (std::vector<int>{2, 6, 10, 14}));
  EXPECT_EQ(grid.expert_replicas(6), (std::vector<int>{6}));
  EXPECT_EQ(grid.embedding_group(2), (std::vector<int>{2, 14}));
  EXPECT_TRUE(grid.embedding_group(6).empty());
  EXPECT_EQ(grid.previous_stage(6), 2);
  EXPECT_EQ(grid.next_stage(6), 10);
  EXPECT_EQ(grid.previous_stage(2), -1);
  EXPECT_EQ(grid.next_stage(14), -1);
  EXPECT_EQ(grid.experts_of(6, 256), (Range{128, 192}));
}

TEST(Grid, PictureInTheHeader) {
  const Grid grid({.tp = 1, .pp = 2, .ep = 2, .dp = 4});
  EXPECT_EQ(grid.dp_group(0), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(grid.ep_group(0), (std::vector<int>{0, 1}));
  EXPECT_EQ(grid.ep_group(2), (std::vector<int>{2, 3}));
  EXPECT_EQ(grid.expert_replicas(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(grid.pp_chain(0), (std::vector<int>{0, 4}));
}

TEST(Grid, RanksAndCoordinatesAreOneToOne) {
  for (const Layout& l : layouts_to_try()) {
    const Grid grid(l);
    std::set<int> seen;
    for (int pp = 0; pp < l.pp; ++pp)
      for (int dp = 0; dp < l.dp; ++dp)
        for (int tp = 0; tp < l.tp; ++tp) {
          const Coordinates at{tp, pp, dp};
          const int rank = grid.rank_of(at);
          EXPECT_EQ(grid.coordinates(rank), at);
          EXPECT_TRUE(seen.insert(rank).second);
          EXPECT_EQ(grid.first_stage(rank), pp == 0);
          EXPECT_EQ(grid.last_stage(rank), pp == l.pp - 1);
        }
    EXPECT_EQ(static_cast<int>(seen.size()), grid.ranks());
    EXPECT_EQ(*seen.rbegin(), grid.ranks() - 1);
  }
}

TEST(Grid, GroupsCutTheRanks) {
  for (const Layout& l : layouts_to_try()) {
    SCOPED_TRACE(l.str());
    const Grid grid(l);
    expect_partition(
        grid, [&](int r) { return grid.tp_group(r); }, l.tp);
    expect_partition(
        grid, [&](int r) { return grid.pp_chain(r); }, l.pp);
    expect_partition(
        grid, [&](int r) { return grid.dp_group(r); }, l.dp);
    expect_partition(
        grid, [&](int r) { return grid.ep_group(r); }, l.ep);
    expect_partition(
        grid, [&](int r) { return grid.expert_replicas(r); }, l.dp / l.ep);
    for (int r = 0; r < grid.ranks(); ++r) {
      // An ep group and a replica group of one rank meet in that rank alone, and both lie in its dp group.
      const std::vector<int> ep = grid.ep_group(r), replicas = grid.expert_replicas(r), dp = grid.dp_group(r);
      std::vector<int> both;
      std::set_intersection(ep.begin(), ep.end(), replicas.begin(), replicas.end(), std::back_inserter(both));
      EXPECT_EQ(both, std::vector<int>{r});
      EXPECT_TRUE(std::includes(dp.begin(), dp.end(), ep.begin(), ep.end()));
      EXPECT_TRUE(std::includes(dp.begin(), dp.end(), replicas.begin(), replicas.end()));
      if (const int next = grid.next_stage(r); next >= 0) {
        EXPECT_EQ(grid.previous_stage(next), r);
      }
    }
  }
}

TEST(Grid, EveryExpertHasOneOwnerInEachEpGroup) {
  for (const Layout& l : layouts_to_try()) {
    const Grid grid(l);
    for (int64_t experts : {l.ep, l.ep + 1, 256}) {
      for (int r = 0; r < grid.ranks(); ++r) {
        const std::vector<int> group = grid.ep_group(r);
        std::vector<int> owners(experts, 0);
        for (int member : group) {
          const Range mine = grid.experts_of(member, experts);
          for (int64_t e = mine.begin; e < mine.end; ++e) {
            ++owners[e];
            EXPECT_EQ(group[grid.expert_owner(e, experts)], member);
          }
        }
        EXPECT_TRUE(std::all_of(owners.begin(), owners.end(), [](int n) { return n == 1; }));
      }
      for (int r = 0; r < grid.ranks(); ++r)
        for (int twin : grid.expert_replicas(r)) EXPECT_EQ(grid.experts_of(twin, experts), grid.experts_of(r, experts));
    }
  }
}

TEST(ResolveLayout, FillsDpAndAcceptsWhatFits) {
  const Result<Layout> open = resolve_layout({.tp = 1, .pp = 4, .ep = 4}, limits_of(16));
  ASSERT_TRUE(open.is_ok()) << open.message();
  EXPECT_EQ(open.value(), (Layout{1, 4, 4, 4}));
  for (int ranks : {1, 2, 12, 16})
    for (const Layout& l : possible_layouts(limits_of(ranks))) {
      const Result<Layout> r = resolve_layout(l, limits_of(ranks));
      ASSERT_TRUE(r.is_ok()) << r.message();
      EXPECT_EQ(r.value(), l);
    }
}

TEST(ResolveLayout, PossibleLayoutsAreAllThatFit) {
  for (int ranks : {1, 4, 12, 16}) {
    const LayoutLimits limits{.ranks = ranks, .layers = 3, .experts = 5, .output_groups = 4};
    const std::vector<Layout> all = possible_layouts(limits);
    size_t fitting = 0;
    for (int tp = 1; tp <= ranks; ++tp)
      for (int pp = 1; pp <= ranks; ++pp)
        for (int ep = 1; ep <= ranks; ++ep)
          for (int dp = 1; dp <= ranks; ++dp) {
            const bool fits = tp * pp * dp == ranks && dp % ep == 0 && pp <= 3 && ep <= 5 && 4 % tp == 0;
            fitting += fits;
            EXPECT_EQ(fits, std::find(all.begin(), all.end(), Layout{tp, pp, ep, dp}) != all.end());
          }
    EXPECT_EQ(fitting, all.size());
  }
}

TEST(ResolveLayout, ErrorsSayWhatIsWrongAndListTheNearest) {
  const auto message = [](Layout l, LayoutLimits limits) {
    const Result<Layout> r = resolve_layout(l, limits);
    return r ? std::string("accepted") : r.message();
  };
  const std::string m = message({1, 4, 4, 3}, limits_of(16));
  EXPECT_NE(m.find("tp 1 x pp 4 x dp 3 is 12 ranks, but 16 were started"), std::string::npos) << m;
  EXPECT_NE(m.find(":\n  tp 1, pp 4, ep 4, dp 4\n"), std::string::npos) << m;  // the nearest stands first
  EXPECT_NE(message({1, 3, 1, 0}, limits_of(16)).find("tp 1 x pp 3 = 3 does not divide the 16 ranks"), std::string::npos);
  EXPECT_NE(message({1, 2, 3, 8}, limits_of(16)).find("ep 3 does not divide dp 8"), std::string::npos);
  EXPECT_NE(message({1, 4, 1, 1}, {.ranks = 4, .layers = 3, .experts = 8}).find("pp 4 stages for 3 layers"), std::string::npos);
  EXPECT_NE(message({1, 1, 4, 4}, {.ranks = 4, .layers = 3, .experts = 2}).find("ep 4 ranks for 2 experts"), std::string::npos);
  EXPECT_NE(message({4, 1, 1, 1}, {.ranks = 4, .layers = 3, .experts = 2, .output_groups = 2})
                .find("tp 4 does not divide the 2 output groups"),
            std::string::npos);
  EXPECT_NE(message({0, 1, 1, 1}, limits_of(1)).find("must be at least 1"), std::string::npos);
  // 46341 squared is past 32 bits: the product must not wrap round into something that fits.
  EXPECT_NE(message({46341, 46341, 1, 2}, limits_of(1)).find("ranks, but 1 was started"), std::string::npos);
}

TEST(SplitLayers, ByList) {
  const std::vector<int64_t> counts = {2, 3, 1};
  const Result<StageLayers> split = split_layers(counts, 3, 6);
  ASSERT_TRUE(split.is_ok()) << split.message();
  EXPECT_EQ(split.value(), (StageLayers{{0, 2}, {2, 5}, {5, 6}}));
  EXPECT_TRUE(split_layers(std::vector<int64_t>{0, 6, 0}, 3, 6).is_ok());
  const auto message = [](std::vector<int64_t> c, int pp, int64_t layers) {
    return split_layers(c, pp, layers).status().message();
  };
  EXPECT_NE(message({2, 3}, 3, 5).find("[2, 3] names 2 stages, but pp is 3"), std::string::npos);
  EXPECT_NE(message({2, 3, 2}, 3, 6).find("[2, 3, 2] has more than the 6 layers of the model"), std::string::npos);
  EXPECT_NE(message({2, 1, 2}, 3, 6).find("adds up to 5 layers, the model has 6"), std::string::npos);
  EXPECT_NE(message({INT64_MAX, INT64_MAX, 8}, 3, 6).find("more than the 6 layers"), std::string::npos) << "their sum wraps around to 6";
  EXPECT_NE(message({3, 0, 3}, 3, 6).find("stage 1 would hold nothing"), std::string::npos);
  EXPECT_NE(message({3, -1, 4}, 3, 6).find("below 0"), std::string::npos);
}

double dearest_stage(const StageCosts& costs, const StageLayers& stages, double* squares) {
  double worst = 0;
  *squares = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    double sum = s == 0 ? costs.embedding : 0.0;
    for (int64_t l = stages[s].begin; l < stages[s].end; ++l) sum += costs.layers[l];
    if (s + 1 == stages.size()) sum += costs.head;
    worst = std::max(worst, sum);
    *squares += sum * sum;
  }
  return worst;
}

// Every way to cut, by recursion.
void all_splits(int pp, int64_t begin, int64_t layers, StageLayers* stages, auto visit) {
  if (pp == 1) {
    stages->push_back({begin, layers});
    visit(*stages);
    stages->pop_back();
    return;
  }
  for (int64_t end = begin + 1; end <= layers - (pp - 1); ++end) {
    stages->push_back({begin, end});
    all_splits(pp - 1, end, layers, stages, visit);
    stages->pop_back();
  }
}

TEST(BalanceLayers, NoSplitIsBetter) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const int layers = 1 + static_cast<int>(random() % 9), pp = 1 + static_cast<int>(random() % layers);
    StageCosts costs;
    // Small integers: ties are frequent and sums exact.
    for (int l = 0; l < layers; ++l) costs.layers.push_back(static_cast<double>(1 + random() % 4));
    costs.embedding = static_cast<double>(random() % 3);
    costs.head = static_cast<double>(random() % 6);
    const StageLayers found = balance_layers(costs, pp);
    ASSERT_EQ(static_cast<int>(found.size()), pp);
    int64_t at = 0;
    for (const Range& r : found) {
      EXPECT_EQ(r.begin, at);
      EXPECT_GT(r.size(), 0);
      at = r.end;
    }
    EXPECT_EQ(at, layers);
    double squares = 0;
    const double worst = dearest_stage(costs, found, &squares);
    StageLayers stages;
    all_splits(pp, 0, layers, &stages, [&](const StageLayers& other) {
      double other_squares = 0;
      const double other_worst = dearest_stage(costs, other, &other_squares);
      EXPECT_GE(other_worst, worst);
      if (other_worst == worst) {
        EXPECT_GE(other_squares, squares);
      }
    });
  }
}

TEST(BalanceLayers, HeadTakesRoomOnTheLastStage) {
  StageCosts costs;
  costs.layers.assign(12, 1.0);
  costs.head = 3.0;
  EXPECT_EQ(balance_layers(costs, 3), (StageLayers{{0, 5}, {5, 10}, {10, 12}}));
}

}  // namespace
}  // namespace lockstep
