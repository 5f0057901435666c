#include "train/pipeline.h"

#include <algorithm>

#include "core/status.h"

namespace lockstep {

std::vector<PipelineStep> pipeline_schedule(int stage, int stages, int64_t micro_batches) {
  CHECK(stage >= 0 && stage < stages && micro_batches >= 0, "stage {} of {}, {} micro-batches", stage, stages, micro_batches);
  const int64_t ahead = std::min<int64_t>(in_flight_max(stage, stages) - 1, micro_batches);
  std::vector<PipelineStep> steps;
  steps.reserve(static_cast<size_t>(2 * micro_batches));
  for (int64_t m = 0; m < ahead; ++m) steps.push_back({true, m});
  for (int64_t m = 0; m < micro_batches; ++m) {
    if (m + ahead < micro_batches) steps.push_back({true, m + ahead});
    steps.push_back({false, m});
  }
  return steps;
}

}  // namespace lockstep
