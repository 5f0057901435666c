#pragma once
// The order in which a pipeline stage works on micro-batches. Pure.
//
// One forward, one backward (1F1B, PipeDream-Flush): a stage first runs as many forwards as there are stages behind it, then one forward and one backward
// by turns, then the backwards that are left. Gradients of every micro-batch are added in ascending order, as one rank alone adds them. Source:
// Narayanan et al. 2021, section 2.2.
//
//   4 stages, 6 micro-batches; stage 0:  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
//                              stage 3:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

#include <cstdint>
#include <vector>

namespace lockstep {

struct PipelineStep {
  bool forward = true;  // else backward
  int64_t micro_batch = 0;
  bool operator==(const PipelineStep&) const = default;
};

// Micro-batches between their forward and the end of their backward that `stage` of `stages` has at most. These are consecutive, so micro-batch m
// may use place m % in_flight_max.
constexpr int in_flight_max(int stage, int stages) { return stages - stage; }

// Every forward and backward of `micro_batches` on `stage`, in order.
std::vector<PipelineStep> pipeline_schedule(int stage, int stages, int64_t micro_batches);

}  // namespace lockstep
