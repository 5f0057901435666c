#include "rl/metrics.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep {
namespace {

Trajectory trajectory(float reward, int64_t length, TrajectoryStatus status = TrajectoryStatus::completed) {
  Trajectory t;
  t.prompt_length = 1;
  t.tokens.assign(static_cast<size_t>(1 + length), 3);
  t.mask.assign(static_cast<size_t>(length), 1);
  t.logprobs.assign(static_cast<size_t>(length), -0.5f);
  t.versions.assign(static_cast<size_t>(length), 4);
  t.advantage.assign(static_cast<size_t>(length), reward - 0.5f);
  t.score = t.reward = reward;
  t.correct = reward == 1;
  t.status = status;
  return t;
}

TEST(Metrics, Rollout) {
  std::vector<Group> groups(3);
  groups[0].trajectories = {trajectory(1, 2), trajectory(0, 4, TrajectoryStatus::truncated)};
  groups[1].trajectories = {trajectory(0, 3), trajectory(0, 3)};
  groups[2].trajectories = {trajectory(1, 1), trajectory(1, 1, TrajectoryStatus::failed)};
  Metrics m;
  add_rollout_metrics(m, groups);
  EXPECT_EQ(find_metric(m, "rollout/failed"), 1);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/raw_reward"), 2.0 / 5);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/accuracy"), 2.0 / 5);
  EXPECT_DOUBLE_EQ(find_metric(m, "passrate/pass@1"), (0.5 + 0 + 1) / 3);
  EXPECT_DOUBLE_EQ(find_metric(m, "passrate/pass@2"), 0.5);  // the third group has one usable sample
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/response_len/mean"), 13.0 / 5);
  EXPECT_EQ(find_metric(m, "rollout/response_len/median"), 3);
  EXPECT_EQ(find_metric(m, "rollout/response_len/max"), 4);
  EXPECT_EQ(find_metric(m, "rollout/response_len/min"), 1);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/truncated_ratio"), 1.0 / 5);
  EXPECT_EQ(find_metric(m, "rollout/zero_std/count"), 2);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/zero_std/all_zero_percentage"), 100.0 / 3);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/zero_std/all_one_percentage"), 100.0 / 3);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/rollout_log_probs"), -0.5);
  EXPECT_DOUBLE_EQ(find_metric(m, "rollout/advantages"), (2 * 0.5 - 4 * 0.5 - 6 * 0.5 + 0.5) / 13);
  EXPECT_EQ(find_metric(m, "rollout/weight_version/mean"), 4);
  EXPECT_EQ(find_metric(m, "rollout/weight_version/mixed_version_ratio"), 0);
}

TEST(Metrics, WithoutDataIsAbsent) {
  Metrics m;
  add_rollout_metrics(m, {});
  EXPECT_EQ(m.size(), 1u);  // rollout/failed is a count, which needs no sample
  EXPECT_TRUE(std::isnan(find_metric(m, "rollout/raw_reward")));
}

TEST(Metrics, OptimizerStepsOfOneRollout) {
  const std::vector<StepMetrics> steps = {{.values = {{"loss", 1.0}, {"tokens", 10}, {"lr", 0.5}}},
                                          {.values = {{"loss", 2.0}, {"tokens", 20}, {"lr", 0.5}}}};
  Metrics m;
  add_train_metrics(m, steps);
  EXPECT_EQ(metrics_line(3, m), "{\"step\":3,\"train/loss\":1.5,\"train/tokens\":30,\"train/lr-pg_0\":0.5}");
}

TEST(Metrics, GapOfEqualLogProbsIsZeroAndOfOneBitIsNot) {
  std::vector<float> rollout = {-0.5f, -1.0f}, old = rollout;
  const std::vector<uint8_t> mask = {1, 1};
  Metrics m;
  add_gap_metrics(m, std::vector<GapSample>{{.index = 0, .rollout = rollout, .old = old, .mask = mask}});
  EXPECT_EQ(find_metric(m, "gap/exact_mismatch"), 0);
  EXPECT_EQ(find_metric(m, "train/train_rollout_logprob_abs_diff"), 0);
  EXPECT_EQ(find_metric(m, "gap/logprob_abs_diff_max"), 0);
  old[1] = std::nextafter(old[1], 0.0f);
  m.clear();
  add_gap_metrics(m, std::vector<GapSample>{{.index = 0, .rollout = rollout, .old = old, .mask = mask}});
  EXPECT_EQ(find_metric(m, "gap/exact_mismatch"), 1);
  EXPECT_GT(find_metric(m, "gap/rest/logprob_abs_diff_tok"), 0);
  EXPECT_EQ(find_metric(m, "gap/first_token/logprob_abs_diff_tok"), 0);
}

TEST(Metrics, StalenessOfATokenIsThatOfItsVersion) {
  const std::vector<float> rollout = {-0.5f, -1.0f, -2.0f}, old = {-0.75f, -1.0f, -2.0f};
  const std::vector<uint8_t> mask = {1, 1, 1};
  const std::vector<int32_t> continued = {4, 5, 6}, fresh = {6, 6, 6};
  const std::vector<GapSample> samples(2, {.index = 0, .rollout = rollout, .old = old, .mask = mask});
  Metrics m;
  add_staleness_metrics(m, samples, std::vector<std::span<const int32_t>>{continued, fresh}, 6);
  EXPECT_EQ(find_metric(m, "staleness/lag/mean"), 1) << "2 and 0";
  EXPECT_EQ(find_metric(m, "staleness/lag/max"), 2);
  EXPECT_EQ(find_metric(m, "staleness/lag_0/tokens"), 4);
  EXPECT_EQ(find_metric(m, "staleness/lag_1/tokens"), 1);
  EXPECT_EQ(find_metric(m, "staleness/lag_2/tokens"), 1);
  EXPECT_EQ(find_metric(m, "staleness/lag_2/logprob_abs_diff_tok"), 0.25);
  EXPECT_EQ(find_metric(m, "staleness/lag_1/logprob_abs_diff_tok"), 0);
}

}  // namespace
}  // namespace lockstep
