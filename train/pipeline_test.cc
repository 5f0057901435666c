// The 1F1B order for every small number of stages and micro-batches.

#include "train/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

namespace lockstep {
namespace {

constexpr int kStagesMax = 9;
constexpr int64_t kMicroBatchesMax = 24;

template <typename F>
void for_every_size(F f) {
  for (int stages = 1; stages <= kStagesMax; ++stages)
    for (int64_t micro_batches = 0; micro_batches <= kMicroBatchesMax; ++micro_batches) f(stages, micro_batches);
}

std::vector<int64_t> micro_batches_of(const std::vector<PipelineStep>& steps, bool forward) {
  std::vector<int64_t> list;
  for (const PipelineStep& s : steps)
    if (s.forward == forward) list.push_back(s.micro_batch);
  return list;
}

TEST(Pipeline, EveryMicroBatchGoesForwardOnceThenBackwardOnceInOrder) {
  for_every_size([](int stages, int64_t n) {
    std::vector<int64_t> ascending;
    for (int64_t m = 0; m < n; ++m) ascending.push_back(m);
    for (int stage = 0; stage < stages; ++stage) {
      const std::vector<PipelineStep> steps = pipeline_schedule(stage, stages, n);
      // Neighbours exchange messages in the order of their schedules: one order for all stages, so they match.
      EXPECT_EQ(micro_batches_of(steps, true), ascending);
      EXPECT_EQ(micro_batches_of(steps, false), ascending);
      for (int64_t m = 0; m < n; ++m)
        EXPECT_LT(std::find(steps.begin(), steps.end(), PipelineStep{true, m}), std::find(steps.begin(), steps.end(), PipelineStep{false, m}));
    }
  });
}

TEST(Pipeline, NoMoreInFlightThanPlaces) {
  for_every_size([](int stages, int64_t n) {
    for (int stage = 0; stage < stages; ++stage) {
      const int places = in_flight_max(stage, stages);
      std::vector<int64_t> held(static_cast<size_t>(places), -1);
      int64_t most = 0;
      for (const PipelineStep& s : pipeline_schedule(stage, stages, n)) {
        int64_t& place = held[static_cast<size_t>(s.micro_batch % places)];
        EXPECT_EQ(place, s.forward ? -1 : s.micro_batch) << stage << " of " << stages << ", " << n;
        place = s.forward ? s.micro_batch : -1;
        most = std::max<int64_t>(most, std::count_if(held.begin(), held.end(), [](int64_t m) { return m >= 0; }));
      }
      EXPECT_EQ(most, std::min<int64_t>(places, n));
    }
  });
}

// Stages as processes: a forward waits for the one before it, a backward for the one behind, and a sender while `in_buffers` messages of its kind
// are on their way.
bool finishes(int stages, int64_t n, size_t in_buffers) {
  std::vector<std::vector<PipelineStep>> steps;
  for (int s = 0; s < stages; ++s) steps.push_back(pipeline_schedule(s, stages, n));
  std::vector<size_t> at(static_cast<size_t>(stages), 0);
  std::vector<std::deque<int64_t>> streams(static_cast<size_t>(stages)), gradients(static_cast<size_t>(stages));  // on their way to the stage
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 0; s < stages; ++s) {
      const size_t i = static_cast<size_t>(s);
      if (at[i] == steps[i].size()) continue;
      const PipelineStep& step = steps[i][at[i]];
      const bool last = s + 1 == stages;
      std::deque<int64_t>* from = step.forward ? (s > 0 ? &streams[i] : nullptr) : (last ? nullptr : &gradients[i]);
      std::deque<int64_t>* to = step.forward ? (last ? nullptr : &streams[i + 1]) : (s > 0 ? &gradients[i - 1] : nullptr);
      if (from != nullptr && from->empty()) continue;
      if (to != nullptr && to->size() >= in_buffers) continue;
      if (from != nullptr) {
        EXPECT_EQ(from->front(), step.micro_batch);
        from->pop_front();
      }
      if (to != nullptr) to->push_back(step.micro_batch);
      ++at[i];
      moved = true;
    }
  }
  for (size_t s = 0; s < steps.size(); ++s)
    if (at[s] != steps[s].size()) return false;
  return true;
}

TEST(Pipeline, BlockingReceivesNeverDeadlock) {
  for_every_size([](int stages, int64_t n) {
    EXPECT_TRUE(finishes(stages, n, SIZE_MAX)) << stages << " stages, " << n;
    EXPECT_TRUE(finishes(stages, n, 1)) << stages << " stages, " << n;  // one message of a kind on its way at most
  });
  EXPECT_FALSE(finishes(2, 2, 0));  // the simulation can see one
}

TEST(Pipeline, AsDrawn) {
  const auto text = [](int stage) {
    std::string s;
    for (const PipelineStep& step : pipeline_schedule(stage, 4, 6)) s += (step.forward ? " F" : " B") + std::to_string(step.micro_batch);
    return s;
  };
  EXPECT_EQ(text(0), " F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
  EXPECT_EQ(text(3), " F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
}

}  // namespace
}  // namespace lockstep
