#pragma once
// Carries out a plan over all ranks: the trainer's weights into the sampler's, all of them or none.
//
//   0 quantise if the sampler's numerics do and the trainer's do not: from the f32 masters, by the routine and in the blocks of Weights::load, so that
//              the sampler has the codes and scales that it would have loaded, whatever the two layouts
//   1 rounds   boxes are packed, rounded to the destination's dtype, exchanged in buckets, and land where the sampler does not read
//   2 verify   sender and receiver of every pair compare bytes, version and XXH64 of what travelled; what is not finite is refused by name
//   3 agree    an error of any rank is the error of all, and nothing has changed
//   4 commit   on every rank; it cannot fail any more. The sampler's version is now the trainer's
//
// Where boxes land. The forward reads a matrix from its panels, which commit packs from its rows, so its rows are free until then. Tensors
// without panels are read from their rows; they land in a copy. Memory beside the two Weights: that copy (the sampler's part of the
// embedding; hash tables, gains, sinks and biases are small), two buckets and, where step 0 is needed, the trainer's shard in codes. After a refused
// update the sampler's panels, and with them all it says, are those of the version it reports, but rows and scales of its matrices may be newer.
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
  QuantStats quantized;      // of the tensors that were copied and are quantised, each number once
  double seconds = 0;
  uint64_t checksum = 0;     // of everything that was copied, as it landed; the same on all ranks, and for a layout a function of the weights
};

// The f32 master of a tensor, in the shape of this rank's shard of the trainer; valid until the context's workspace is released. Ranks that hold the same
// tensors ask for the same ones in the same order.
using ReadMaster = std::function<ConstTensorView(int id)>;

class Transfer {
 public:
  static constexpr int64_t kBucketBytes = int64_t{16} << 20;

  // All ranks of the group (null: alone), with the same arguments but for `from` and `to`, which hold this rank's shards of the two placements. `changes`:
  // which tensors an optimizer step may change. Buckets and copies are taken from `arena`. All outlive this.
  Transfer(RankGroup* ranks, const Weights& from, Weights& to, const Placement& source, const Placement& destination, const WantedTensors& changes,
           Arena& arena, int64_t bucket_bytes = kBucketBytes);

  // All ranks. An error (a number that is not finite, a damaged transfer, ranks at different versions) leaves `to` serving what it served.
  // `master` REQUIRED where quantizes().
  Result<SyncReceipt> update(Context& c, const ReadMaster& master = {});
  bool quantizes() const { return is_quantized(to_.numerics()) && !is_quantized(from_.numerics()); }

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
    std::vector<int> quantized;  // tensors of it that this rank's source holds and the destination quantises, ascending
    int64_t moved_bytes = 0, local_bytes = 0;  // of all ranks
  };
  Route make_route(const ModelConfig& config, const Placement& source, const Placement& destination, const WantedTensors& wanted) const;
  const Route& route() const { return complete_ ? changing_ : all_; }
  int rank() const { return ranks_ == nullptr ? 0 : ranks_->rank(); }
  void quantize_masters(Context& c, const Route& route, const ReadMaster& master);
  QuantStats count(const Route& route) const;
  TensorView landing(const Copy& copy, const Range& rows) const;
  void read(Context& c, const Copy& copy, const Range& rows, TensorView out);
  void run_round(Context& c, const Route& route, const Round& round);
  Status verify();

  RankGroup* const ranks_;
  const Weights& from_;
  Weights& to_;
  const int64_t bucket_bytes_;
  Route all_, changing_;
  bool complete_ = false;  // every tensor arrived once
  std::vector<TensorView> landing_;  // [rows, columns] by tensor id; of what this rank holds
  struct Quantized {
    TensorView codes, scales;  // empty: the trainer's own are sent
    QuantStats stats;          // of the last update
    bool counts = false;       // this rank is the first that holds this part
  };
  std::vector<Quantized> quantized_;  // by tensor id; of what this rank's source holds
  TensorView outgoing_, incoming_;   // [bucket_bytes] u8
  // Of the update at hand, by rank: bytes, version, running XXH64.
  using Tally = std::array<int64_t, 3>;
  std::vector<Tally> sent_, received_;
  Status bad_;  // the first tensor that is not finite
};

}  // namespace lockstep
