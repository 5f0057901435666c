// Plans between random layouts, against what a count of every number says; and check_plan against plans that are wrong.

#include "sync/plan.h"
#include "sync/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace lockstep {
namespace {

using testing::small_config;

bool all(const TensorSpec&) { return true; }
bool changing(const TensorSpec& spec) { return !spec.is_buffer() && spec.role != TensorRole::router; }

// Layouts out of tp, pp, ep 1, 2, 4.
std::vector<Layout> layouts(int ranks, bool stages) {
  std::vector<Layout> found = possible_layouts({.ranks = ranks, .layers = stages ? 4 : 1, .experts = 4, .output_groups = 4});
  std::erase_if(found, [](const Layout& l) { return l.tp == 3 || l.pp == 3 || l.ep == 3; });
  return found;
}

Placement place(const ModelConfig& m, const Layout& layout, Numerics numerics, std::mt19937& random) {
  StageCosts costs;  // random, so that stages have unequal lengths
  for (int64_t i = 0; i < m.num_layers(); ++i) costs.layers.push_back(1.0 + static_cast<double>(random() % 5));
  return placement_of(m, Grid(layout), balance_layers(costs, layout.pp), numerics);
}

void expect_exact(const ModelConfig& m, const Placement& from, const Placement& to, const WantedTensors& wanted) {
  const SyncPlan plan = make_plan(m, from, to, wanted);
  const Status covered = check_plan(m, from, to, wanted, plan);
  EXPECT_TRUE(covered.is_ok()) << covered.message();

  const std::vector<TensorSpec> whole = tensor_table(m);
  std::vector<std::vector<TensorSpec>> sources, destinations;
  for (const Shard& s : from.shards) sources.push_back(tensor_table(m, s));
  for (const Shard& s : to.shards) destinations.push_back(tensor_table(m, s));
  const auto holds = [](const TensorSpec& spec, int64_t row, int64_t column) { return spec.box.rows.contains(row) && spec.box.columns.contains(column); };
  std::vector<CommBytes> moved(from.shards.size());
  for (size_t rank = 0; rank < to.shards.size(); ++rank) {
    std::vector<std::vector<int>> written(whole.size());
    for (const TensorSpec& t : whole) written[static_cast<size_t>(t.id)].resize(static_cast<size_t>(t.whole.elements()));
    for (const Copy& c : plan.copies) {
      if (c.to != static_cast<int>(rank)) continue;
      const auto id = static_cast<size_t>(c.tensor);
      const int64_t columns = whole_box(whole[id].whole).columns.size();
      for (int64_t r = c.box.rows.begin; r < c.box.rows.end; ++r) {
        for (int64_t k = c.box.columns.begin; k < c.box.columns.end; ++k) {
          ASSERT_TRUE(holds(sources[static_cast<size_t>(c.from)][id], r, k)) << whole[id].name;
          ++written[id][static_cast<size_t>(r * columns + k)];
        }
      }
      if (c.local()) continue;
      const int64_t bytes = c.box.elements() * static_cast<int64_t>(dtype_bytes(whole[id].weight_dtype(to.numerics)));
      moved[static_cast<size_t>(c.from)].sent += bytes;
      moved[rank].received += bytes;
    }
    int64_t missing_bytes = 0;  // needed here and not held here: what must come
    for (const TensorSpec& t : whole) {
      const auto id = static_cast<size_t>(t.id);
      const int64_t columns = whole_box(t.whole).columns.size();
      for (int64_t i = 0; i < t.whole.elements(); ++i) {
        const bool needed = wanted(t) && holds(destinations[rank][id], i / columns, i % columns);
        ASSERT_EQ(written[id][static_cast<size_t>(i)], needed ? 1 : 0) << t.name << " number " << i << " of rank " << rank;
        if (needed && !holds(sources[rank][id], i / columns, i % columns)) missing_bytes += static_cast<int64_t>(dtype_bytes(t.weight_dtype(to.numerics)));
      }
    }
    EXPECT_EQ(moved[rank].received, missing_bytes);
  }
  for (int rank = 0; rank < plan.ranks; ++rank) EXPECT_EQ(plan_bytes(plan, rank), moved[static_cast<size_t>(rank)]);
}

TEST(Plan, CoversEveryNumberOnceBetweenRandomLayouts) {
  const ModelConfig m = small_config();
  std::mt19937 random(1);
  for (const int ranks : {1, 2, 4, 8, 16}) {
    const std::vector<Layout> trainers = layouts(ranks, true), samplers = layouts(ranks, false);
    for (int trial = 0; trial < 12; ++trial) {
      const Layout from = trainers[random() % trainers.size()], to = samplers[random() % samplers.size()];
      SCOPED_TRACE(from.str() + " to " + to.str());
      const Placement source = place(m, from, trial % 2 == 0 ? Numerics::f32 : Numerics::bf16, random);
      expect_exact(m, source, place(m, to, Numerics::bf16, random), trial % 3 == 0 ? changing : all);
    }
  }
}

TEST(Plan, NothingTravelsBetweenEqualPlacements) {
  const ModelConfig m = small_config();
  std::mt19937 random(2);
  const Placement p = place(m, {1, 1, 4, 8}, Numerics::bf16, random);
  for (const Copy& c : make_plan(m, p, p, all).copies) EXPECT_TRUE(c.local());
}

TEST(Plan, ReplicasShareTheSending) {
  const ModelConfig m = small_config();
  std::mt19937 random(3);
  const Layout from{1, 4, 1, 4};
  const Placement source = place(m, from, Numerics::bf16, random);
  const SyncPlan plan = make_plan(m, source, place(m, {1, 1, 4, 16}, Numerics::bf16, random), all);
  int64_t largest = 0;
  for (const Copy& c : plan.copies) largest = std::max(largest, plan.bytes(c));
  // Each copy goes to the replica that sent least, so no two of a stage are further apart than one copy.
  const Grid grid(from);
  for (int rank = 0; rank < grid.ranks(); ++rank)
    for (const int other : grid.dp_group(rank)) EXPECT_LE(plan_bytes(plan, rank).sent, plan_bytes(plan, other).sent + largest);
}

TEST(Plan, WrongPlansAreRefused) {
  const ModelConfig m = small_config();
  std::mt19937 random(4);
  const Placement from = place(m, {2, 2, 1, 2}, Numerics::bf16, random), to = place(m, {1, 1, 2, 8}, Numerics::bf16, random);
  const SyncPlan good = make_plan(m, from, to, all);
  EXPECT_TRUE(check_plan(m, from, to, all, good).is_ok());
  const auto expect_refused = [&](const SyncPlan& plan, const char* why) {
    const Status s = check_plan(m, from, to, all, plan);
    EXPECT_NE(s.message().find(why), std::string::npos) << "'" << s.message() << "' instead of '" << why << "'";
  };
  for (size_t i = 0; i < good.copies.size(); i += 7) {
    SyncPlan bad = good;
    bad.copies.erase(bad.copies.begin() + static_cast<std::ptrdiff_t>(i));
    expect_refused(bad, "is given");
    bad = good;
    bad.copies.push_back(good.copies[i]);
    expect_refused(bad, "overlaps");
    bad = good;
    ++bad.copies[i].box.rows.end;
    expect_refused(bad, "is not of what rank");
    bad = good;
    --bad.copies[i].box.rows.end;
    expect_refused(bad, good.copies[i].box.rows.size() == 1 ? "is not of what" : "is given");
    bad = good;
    bad.copies[i].from = 99;
    expect_refused(bad, "do not exist");
  }
  // The stage without the head cannot give it away.
  SyncPlan bad = good;
  bad.copies.back().from = 0;
  expect_refused(bad, "is not of what rank 0 holds");
  EXPECT_FALSE(check_plan(m, from, to, changing, good).is_ok());
}

}  // namespace
}  // namespace lockstep
