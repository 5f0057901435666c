#pragma once
// Samples to micro-batches: which sequences run together in one forward. Pure; the same input always gives the same packing.
//
// A sample of T tokens costs T - 1 rows, because the forward of its last token predicts nothing that is trained (rl spec 2).

#include <cstdint>
#include <span>
#include <vector>

#include "train/types.h"

namespace lockstep {

struct MicroBatch {
  std::vector<int32_t> samples;  // places in the packed list, ascending
  int64_t rows = 0;
};

// Longest first, each into the first micro-batch where it still fits (ties by place in the list). A sample longer than max_rows
// forms its own.
std::vector<MicroBatch> pack(std::span<const int64_t> rows, int64_t max_rows);

inline int64_t trained_rows(const TrainSample& sample) { return static_cast<int64_t>(sample.tokens.size()) - 1; }

// Which part works on which samples: longest first, each to the part with the fewest rows so far (ties: the first of them).
// Places in `rows`, ascending within a part. One part has them all.
std::vector<std::vector<int32_t>> share_out(std::span<const int64_t> rows, int parts);

// Places of `samples` in canonical order: ascending index, equal ones by place.
std::vector<int32_t> canonical_order(std::span<const TrainSample> samples);

// One call's micro-batches.
struct Work {
  std::vector<std::vector<int32_t>> shares;  // by part: places of samples, in the order of `chosen`
  std::vector<MicroBatch> micro_batches;     // of this part; those beyond its own, up to as many as any part has, are empty
  int64_t total = 0;                         // of all parts, without empty ones
};
// `chosen` places of `samples` cut for `parts` that work side by side, as part `part` sees it.
Work plan_work(std::span<const TrainSample> samples, std::span<const int32_t> chosen, int parts, int part, int64_t max_rows);

}  // namespace lockstep
