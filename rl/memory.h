#pragma once
// What a rank's memory holds in a run, by owner. Counted from the tables and shapes that the program allocates by; tests/traffic_test.cc compares with
// the arenas of real steps. Pure.

#include <cstdint>
#include <string>
#include <vector>

#include "rl/traffic.h"
#include "rollout/engine.h"

namespace lockstep {

struct OwnerBytes {
  std::string owner;
  int64_t bytes = 0;
};
using MemoryByOwner = std::vector<OwnerBytes>;
int64_t total_bytes(const MemoryByOwner& memory);

// Owners: gradients, masters and moments, frozen masters, activations, expert rows (of the activations, what grows with the rows that this rank's
// experts meet), training state, stage links, results. Together exactly what Actor::high_bytes() is after these calls.
MemoryByOwner actor_bytes(const TrainerShape& trainer, const TrainStepCalls& calls, const ActorOptions& options, int rank);

// Arena bytes of a shard's weights, with the CPU's panels apart.
struct WeightBytes {
  int64_t rows = 0, panels = 0;
};
WeightBytes weights_arena_bytes(const std::vector<TensorSpec>& table, Numerics numerics);

// Sequence state of a sampler: what its arena reaches.
int64_t engine_state_bytes(const ModelConfig& config, Numerics numerics, const EngineOptions& options);
// What a weight update takes beside the two weights: copies of what does not land in its place (sync/transfer.h), buckets, the trainer's part in codes. sync.delta
// takes more.
struct TransferSide {
  const std::vector<TensorSpec>& table;  // of the rank's shard
  Numerics numerics;
};
int64_t transfer_bytes(const TransferSide& trainer, const TransferSide& sampler, int ranks, int64_t bucket_bytes, Device device);

// The largest pieces that a forward or backward of `tokens` has in the workspace at once; operators' own scratch comes on top.
int64_t trainer_scratch_bytes(const ModelConfig& config, Numerics numerics, const Shard& shard, int ep, int64_t exchange_rows, int64_t tokens, int64_t wanted);
int64_t sampler_scratch_bytes(const ModelConfig& config, Numerics numerics, const Shard& shard, int ep, int64_t exchange_rows, int64_t tokens, int64_t draws);

}  // namespace lockstep
