#include "rl/layouts.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

ModelConfig demo_config() { return load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/demo.config.json").value(); }  // 4 layers, 8 experts, 2 groups

void expect_error(const ParallelOptions& options, int ranks, std::initializer_list<const char*> parts) {
  const Result<Layouts> layouts = resolve_layouts(options, demo_config(), 64, ranks);
  ASSERT_FALSE(layouts.is_ok());
  for (const char* part : parts) EXPECT_NE(layouts.message().find(part), std::string::npos) << layouts.message() << "\nlacks " << part;
}

TEST(Layouts, ThePublishedOneAndItsSampler) {
  const Result<Layouts> l = resolve_layouts({.pp = 4, .ep = 4}, demo_config(), 64, 16);
  ASSERT_TRUE(l.is_ok()) << l.message();
  EXPECT_EQ(l.value().train, (Layout{1, 4, 4, 4}));
  EXPECT_EQ(l.value().rollout, (Layout{1, 1, 4, 16}));
  EXPECT_EQ(l.value().stages.size(), 4u);
  EXPECT_EQ(l.value().rollout_stages, (StageLayers{{0, 4}}));
}

TEST(Layouts, WithoutSettingsBothAreTheSame) {
  const ModelConfig m = demo_config();
  const Layouts l = resolve_layouts({.ep = 2}, m, 64, 4).value();
  EXPECT_EQ(l.train, l.rollout);
  EXPECT_EQ(placement_of(m, Grid(l.train), l.stages, Numerics::bf16), placement_of(m, Grid(l.rollout), l.rollout_stages, Numerics::bf16));
}

TEST(Layouts, SamplersWithRanksOfTheirOwn) {
  const Layouts l = resolve_layouts({.pp = 2, .ep = 2, .rollout_tp = 2, .rollout_ep = 1, .rollout_ranks = 2}, demo_config(), 64, 6).value();
  EXPECT_TRUE(l.apart);
  EXPECT_EQ(l.train, (Layout{1, 2, 2, 2}));
  EXPECT_EQ(l.rollout, (Layout{2, 1, 1, 1}));
  expect_error({.rollout_ranks = 4}, 4, {"parallel.rollout_ranks is 4 of 4 ranks"});
  expect_error({.rollout_ranks = 1}, 1, {"parallel.rollout_ranks is 1 of 1 ranks"});
  expect_error({.ep = 2, .rollout_ranks = 1}, 3, {"the sampler's layout", "rollout_ep 2 does not divide", "nearest layouts"});
}

TEST(Layouts, StagesByList) {
  EXPECT_EQ(resolve_layouts({.pp = 2, .stages = " 1, 3"}, demo_config(), 64, 2).value().stages, (StageLayers{{0, 1}, {1, 4}}));
  expect_error({.pp = 2, .stages = "1,2"}, 2, {"parallel.stages is \"1,2\"", "4"});
  for (const char* text : {"1,", ",1", "1;3", "one", "1 3"}) expect_error({.pp = 2, .stages = text}, 2, {"parallel.stages is", "12,11,11,9"});
}

TEST(Layouts, ImpossibleOnesListTheNearest) {
  expect_error({.tp = 4}, 4, {"output groups", "tp 2, pp 1, ep 1, dp 2"});
  expect_error({.ep = 3}, 4, {"ep 3 does not divide dp 4", "nearest layouts"});
  expect_error({.rollout_tp = 4}, 4, {"parallel: rollout_tp 4 does not divide", "output groups", "\n  rollout_tp 2, rollout_pp 1, rollout_ep 1, rollout_dp 2"});
  expect_error({.rollout_ep = 16}, 16, {"parallel: rollout_ep 16 ranks for 8 experts"});
}

}  // namespace
}  // namespace lockstep
