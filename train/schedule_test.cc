#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep {
namespace {

constexpr double kLr = 0.125;  // exact in f32

TEST(Schedule, ConstantFromTheFirstStep) {
  const OptimizerConfig config{.lr = kLr};
  for (int64_t s : {0, 1, 1000000}) EXPECT_EQ(learning_rate(config, s), kLr);
}

TEST(Schedule, WarmUpIsLinearAndEndsAtTheFullRate) {
  const OptimizerConfig config{.lr = kLr, .warmup_steps = 4};
  EXPECT_EQ(learning_rate(config, 0), kLr / 4);
  EXPECT_EQ(learning_rate(config, 1), kLr / 2);
  EXPECT_EQ(learning_rate(config, 3), kLr);
  EXPECT_EQ(learning_rate(config, 4), kLr);
}

TEST(Schedule, CosineMeetsItsEnds) {
  const OptimizerConfig config{
      .lr = kLr, .schedule = ScheduleKind::cosine, .warmup_steps = 10, .total_steps = 110, .min_lr_ratio = 0.25f};
  EXPECT_EQ(learning_rate(config, 9), kLr);
  EXPECT_EQ(learning_rate(config, 10), kLr);
  EXPECT_NEAR(learning_rate(config, 60), kLr * (0.25 + 0.75 / 2), 1e-15);
  EXPECT_NEAR(learning_rate(config, 35), kLr * (0.25 + 0.75 * (1 + std::sqrt(0.5)) / 2), 1e-15);  // cos(pi / 4)
  EXPECT_NEAR(learning_rate(config, 110), kLr * 0.25, 1e-15);
  EXPECT_EQ(learning_rate(config, 111), learning_rate(config, 110));
  for (int64_t s = 10; s < 110; ++s) EXPECT_GT(learning_rate(config, s), learning_rate(config, s + 1));
}

TEST(ScheduleDeath, CosineWithoutRoom) {
  const OptimizerConfig config{.schedule = ScheduleKind::cosine, .warmup_steps = 5, .total_steps = 5};
  EXPECT_DEATH((void)learning_rate(config, 5), "cosine schedule of 5 steps has no room after 5");
}

}  // namespace
}  // namespace lockstep
