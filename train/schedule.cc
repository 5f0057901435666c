#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/status.h"

namespace lockstep {

double learning_rate(const OptimizerConfig& config, int64_t steps_applied) {
  CHECK_GE(steps_applied, 0);
  const double lr = config.lr;
  if (steps_applied < config.warmup_steps)
    return lr * static_cast<double>(steps_applied + 1) / static_cast<double>(config.warmup_steps);
  if (config.schedule == ScheduleKind::constant) return lr;
  CHECK(config.total_steps > config.warmup_steps, "a cosine schedule of {} steps has no room after {} steps of warm-up",
        config.total_steps, config.warmup_steps);
  const double progress =
      static_cast<double>(steps_applied - config.warmup_steps) / static_cast<double>(config.total_steps - config.warmup_steps);
  const double floor = config.min_lr_ratio;
  return lr * (floor + (1.0 - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(progress, 1.0))));
}

}  // namespace lockstep
