#pragma once
// Carries out a plan over all ranks: the trainer's weights into the sampler's, all of them or none.
//
//   1 rounds   boxes are packed, rounded to the destination's dtype, exchanged in buckets, and land where the sampler does not read
//   2 verify   sender and receiver of every pair compare bytes, version and XXH64 of what travelled; what is not finite is refused by name
//   3 agree    an error of any rank is the error of all, and nothing has changed
//   4 commit   on every rank; it cannot fail any more. The sampler's version is now the trainer's
//
// Where boxes land. The forward reads a matrix from its panels, which commit packs from its rows, so its rows are free until then. Tensors
// without panels are read from their rows; they land in a copy. Memory beside the two Weights: that copy (the sampler's part of the
// embedding; hash tables, gains, sinks and biases are small) and two buckets. After a refused update the sampler's panels, and with them
// all it says, are those of the version it reports, but rows of its matrices may be newer.
//
// The first update copies every tensor. Later ones leave out those that no step changes, if the first was not refused.
//
// A call takes its scratch at construction; update() allocates nothing large. Call between steps: no forward may run. Device seam: packing and
// hashing move to the device with the buffers.

#include <array>
#include <cstdint>
#include <vector>

#include "sync/plan.h"

namespace lockstep {

struct SyncReceipt {
  int64_t version = 0;
  int64_t copies = 0;        // of the plan, local ones included
  int64_t rounds = 0;
  int64_t moved_bytes = 0;   // between ranks, all of them together
  int64_t local_bytes = 0;   // copied within a rank, all together
  double seconds = 0;
  uint64_t checksum = 0;     // of everything that was copied, as it landed; the same on all ranks, and for a layout a function of the weights
};

class Transfer {
 public:
  static constexpr int64_t kBucketBytes = int64_t{16} << 20;

  // All ranks of the group, with the same arguments but for `from` and `to`, which hold this rank's shards of the two placements. `changes`:
  // which tensors an optimizer step may change. Buckets and copies are taken from `arena`. All outlive this.
  Transfer(RankGroup& ranks, const Weights& from, Weights& to, const Placement& source, const Placement& destination, const WantedTensors& changes,
           Arena& arena, int64_t bucket_bytes = kBucketBytes);

  // All ranks. An error (a number that is not finite, a damaged transfer, ranks at different versions) leaves `to` serving what it served.
  Result<SyncReceipt> update(Context& c);

  // The next update copies every tensor: the masters were replaced.
  void forget() { complete_ = false; }

  // Of the next update: what this rank's counters will show under "weights" and "weights check".
  CommBytes bytes() const;
  CommBytes check_bytes() const;

 private:
  // Rows of a copy's box that travel in one round.
  struct Piece {
    size_t copy;
    Range rows;  // of the tensor
  };
  struct Round {
    std::vector<Piece> sends, receives;  // of this rank, by the other rank; between two ranks in the same order
    std::vector<int64_t> send_bytes, receive_bytes;  // by rank
  };
  struct Route {
    SyncPlan plan;
    std::vector<Round> rounds;
    std::vector<size_t> local;  // copies within this rank
    int64_t moved_bytes = 0, local_bytes = 0;  // of all ranks
  };
  Route make_route(const ModelConfig& config, const Placement& source, const Placement& destination, const WantedTensors& wanted) const;
  const Route& route() const { return complete_ ? changing_ : all_; }
  TensorView landing(const Copy& copy, const Range& rows) const;
  void read(Context& c, const Copy& copy, const Range& rows, TensorView out);
  void run_round(Context& c, const Route& route, const Round& round);
  Status verify();

  RankGroup& ranks_;
  const Weights& from_;
  Weights& to_;
  const int64_t bucket_bytes_;
  Route all_, changing_;
  bool complete_ = false;  // every tensor arrived once
  std::vector<TensorView> landing_;  // [rows, columns] by tensor id; of what this rank holds
  TensorView outgoing_, incoming_;   // [bucket_bytes] u8
  // Of the update at hand, by rank: bytes, version, running XXH64.
  using Tally = std::array<int64_t, 3>;
  std::vector<Tally> sent_, received_;
  Status bad_;  // the first tensor that is not finite
};

}  // namespace lockstep
