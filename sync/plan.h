#pragma once
// From two placements of one tensor table (who holds what before, and who holds what after) to the list of copies between them. Pure.
//
// A copy is a box of one tensor that one rank has and another needs. Together they fill every box of every destination, each number once. Of a tensor
// that the destination quantises a second copy is of its scales. Layouts cut between blocks (TensorSpec), so the scales of a box are a box of blocks.
// Where several ranks hold what is needed:
//   the rank itself                   nothing travels
//   else the one that sends least     in bytes of the plan so far; of equals, the first
// Bytes travel in the destination's dtype, and are known before anything does: plan_bytes is what the counters of a transfer show.
//
// Source: rl spec 20.1, design section 5.

#include <cstdint>
#include <functional>
#include <vector>

#include "core/status.h"
#include "model/shard.h"
#include "model/weights.h"
#include "parallel/collective.h"
#include "sync/manifest.h"

namespace lockstep {

// The model spread over ranks.
struct Placement {
  std::vector<Shard> shards;  // by rank
  Numerics numerics = Numerics::bf16;
  bool operator==(const Placement&) const = default;
};
// That of a layout. REQUIRES: one that resolve_layout accepted for this config, and its stages.
Placement placement_of(const ModelConfig& config, const Grid& grid, const StageLayers& stages, Numerics numerics);

// Of placements over different ranks ones over all of these, the trainer's first: each side holds nothing where the other is.
void place_apart(Placement& trainer, Placement& sampler);

struct Copy {
  int tensor = 0;  // id
  Box box;         // in the whole tensor: of its numbers, or of its blocks
  int from = 0, to = 0;
  bool scales = false;  // of the blocks
  bool local() const { return from == to; }
  bool operator==(const Copy&) const = default;
};

struct SyncPlan {
  int ranks = 0;
  std::vector<DType> from_dtype, to_dtype;  // by tensor id
  std::vector<Copy> copies;                 // by tensor, then destination, then place in the tensor

  DType dtype(const Copy& c) const { return c.scales ? DType::ue8m0 : to_dtype[static_cast<size_t>(c.tensor)]; }  // as it travels
  int64_t row_bytes(const Copy& c) const;  // of one row of the box, as it travels
  int64_t bytes(const Copy& c) const { return c.box.rows.size() * row_bytes(c); }
};

// Whether weights in `to` can be made from those of a trainer in `from`: what is the same, rounded or quantised on the way.
constexpr bool can_follow(Numerics from, Numerics to) { return from == to || from == Numerics::f32 || (from == Numerics::bf16 && to != Numerics::f32); }

std::string box_str(const Box& box);

// The box of blocks that a box of numbers consists of. REQUIRES: spec.quant_format(n), and a box that ends between blocks.
Box blocks_of(const TensorSpec& spec, Numerics n, const Box& box);

// REQUIRES: as many shards in both, and a destination that can_follow(the source's numerics).
SyncPlan make_plan(const ModelConfig& config, const Placement& from, const Placement& to, const WantedTensors& wanted);

// Every number of every wanted box of every destination is written exactly once, by a rank that holds it. The error names the tensor.
Status check_plan(const ModelConfig& config, const Placement& from, const Placement& to, const WantedTensors& wanted, const SyncPlan& plan);

// What travels, cut into rounds in which no rank sends or receives more than `bucket_bytes`. A round fills buckets: every rank first with what goes to
// the next rank, then to the one behind it, so that in the ideal all send and all receive at once. Calls f(round, place in plan.copies, rows of the
// tensor) for every piece, round after round, and returns how many rounds there are. REQUIRES: a row of a copy fits into a bucket.
int64_t cut_into_rounds(const SyncPlan& plan, int64_t bucket_bytes, const std::function<void(int64_t round, size_t copy, const Range& rows)>& f);

// What a rank sends to and receives from others when the plan is carried out.
CommBytes plan_bytes(const SyncPlan& plan, int rank);
// And of a checksum for each copy.
CommBytes plan_check_bytes(const SyncPlan& plan, int rank);

}  // namespace lockstep
