#pragma once
// Carries out a plan over all ranks: the trainer's weights into the sampler's, all of them or none.
//
//   quiesce   the caller says that its forwards have ended; no rank goes on before all have said so
//   begin     every rank announces the manifest, its versions and what it sent last; each is compared with the destination's own list and with the other ranks'.
//             The first vote: nothing has moved yet
//   transfer  where the sampler's numerics quantise and the trainer's do not, codes and scales are made from the f32 masters, by the routine and in the blocks
//             of Weights::load. Then buckets: boxes are packed, rounded to the destination's dtype, exchanged, and land where the sampler does not read.
//             What is not finite is refused by name
//   verify    of every copy the rows that landed are read back: all are there, and their ops/checksum is that of the rows as they were packed, on the rank that sent them
//   commit    the second vote. An error of any rank is the error of all, and the sampler is put back to what it was, byte for byte
//   finalise  behind the vote, on every rank: panels are packed from the rows, and the version becomes the trainer's. It asks for no memory, no file and no other
//             rank, so it cannot fail; a rank that dies in it ends the job, as one does anywhere (parallel/watchdog.h)
//
// Where boxes land. Where the forward reads a matrix from its panels, which finalise packs from its rows, its rows are free until then; a refused update
// restores them from the panels. What is read from where it lies (tensors without panels, scales, on a GPU everything) lands in a copy. Memory beside the two
// Weights: that copy (on a CPU the sampler's part of the embedding; hash tables, gains, sinks, biases and scales are small; on a GPU the sampler's weights once
// more), two buckets, where numerics quantise the trainer's shard in codes, and with `delta` what this rank sends to others, once more.
//
// On a GPU all of this memory is the device's, on all ranks, and rows never leave it but between GPUs, by RankGroup's way (parallel/collective.h). In order:
//   the stream   codes and scales of masters, then for each bucket: rows are packed, looked at and summed, all_to_all, and what came is copied to where it
//                lands. A bucket is used again behind that. Then all that landed is summed
//   the host     enqueues, and waits for the stream twice: for marks and sums of what left, and for sums of what landed. Both come before the vote, so no
//                rank agrees while something of the update has not yet happened on its GPU
//   behind it    finalise enqueues the copies to where the forward reads, ahead of every forward that follows
// Manifests, sums and votes are the host's. A rank that hangs or dies inside an exchange is noticed as in any other (parallel/watchdog.h). What landed, the
// receipt but for its time, and the counters are those of the host's way. Deltas are made on the host.
//
// The first update copies every tensor. Later ones leave out those that no step changes.
//
// Delta (rl spec 20.4): only blocks of 8 bytes that changed travel and are written (sync/delta.h), found by comparing with what was sent last. An update is one if the
// last was not refused, every rank's sampler is still at the version that it brought, and fewer than full_every - 1 were since the last full one. Otherwise it is full:
// where a rank's sampler was loaded by others meanwhile, of every tensor. Verification is the same: whole copies are read back, not what travelled.
//
// A call takes its scratch at construction; update() allocates nothing large. Call between steps: no forward may run.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ops/checksum/checksum.h"
#include "sync/manifest.h"
#include "sync/route.h"

namespace lockstep {

enum class SyncStage : uint8_t { quiesce, begin, transfer, verify, commit, finalise };
const char* sync_stage_name(SyncStage stage);

// Where an update meets the world, for tests of its failures. The program leaves them empty. Views are of the transfer's memory.
struct TransferHooks {
  std::function<Status(SyncStage stage, int64_t bucket)> enter;      // an error is that of this rank; in finalise it ends the process. bucket: of transfer, else -1
  std::function<void(Manifest& announced)> announce;                 // before it is looked at
  std::function<void(const TensorSpec& spec, TensorView rows)> pack;  // rows of a tensor as they are about to leave, before they are looked at
  std::function<void(int64_t bucket, TensorView bytes)> arrive;      // u8 [n]: what came from others, or a piece that stays within the rank
  std::function<bool(const TensorSpec& spec)> lose;                  // true: rows of this tensor that came do not land
};

struct SyncOptions {
  bool delta = false;
  int64_t full_every = 16;  // with delta: one update in so many is full; 1: all
  TransferHooks hooks = {};
};

struct SyncReceipt {
  int64_t version = 0;
  bool delta = false;
  int64_t copies = 0;        // of the plan, local ones included
  int64_t rounds = 0;
  int64_t moved_bytes = 0;   // between ranks, all of them together
  int64_t full_bytes = 0;    // what a full update of these tensors moves; without delta the same
  int64_t local_bytes = 0;   // copied, or with delta compared, within a rank, all together
  int64_t changed_bytes = 0;  // written, of full_bytes + local_bytes
  QuantStats quantized;      // of the tensors that were copied and are quantised, each number once
  double seconds = 0;
  uint64_t checksum = 0;     // of everything that was copied, as it landed; the same on all ranks, and for a layout a function of the weights
  double density() const { return full_bytes + local_bytes == 0 ? 0 : static_cast<double>(changed_bytes) / static_cast<double>(full_bytes + local_bytes); }
};

// The f32 master of a tensor, in the shape of this rank's shard of the trainer, in the memory of update()'s context; valid until the context's workspace is released. Ranks that hold the same
// tensors ask for the same ones in the same order.
using ReadMaster = std::function<ConstTensorView(int id)>;

class Transfer {
 public:
  static constexpr int64_t kBucketBytes = int64_t{16} << 20;
  static constexpr int64_t kBeginBytes = 6 * sizeof(int64_t);  // of what a rank tells the others at the beginning
  static constexpr int64_t kTotals = 5;                        // sums over the ranks at the end of a delta, or of what is quantised

  // All ranks of the group (null: alone), with the same arguments but for `from` and `to`, which hold this rank's shards of the two placements. `changes`:
  // which tensors an optimizer step may change. Buckets and copies are taken from `arena`, of the device of both weights and of update()'s context; with
  // options.delta the CPU. All outlive this.
  Transfer(RankGroup* ranks, const Weights& from, Weights& to, const Placement& source, const Placement& destination, const WantedTensors& changes,
           Arena& arena, SyncOptions options = {}, int64_t bucket_bytes = kBucketBytes);

  // All ranks. An error (a number that is not finite, a damaged transfer, ranks at different versions) names the stage, the rank and, where there is one, the
  // tensor; `to` is then what it was. `quiet`: whether this rank's forwards have ended. `master` REQUIRED where quantizes().
  Result<SyncReceipt> update(Context& c, const ReadMaster& master = {}, const Status& quiet = Status::ok());
  bool quantizes() const { return is_quantized(to_.numerics()) && !is_quantized(from_.numerics()); }

  // The next update copies every tensor: the masters were replaced.
  void forget() { committed_ = -1; }

  // Of the next update, unless it is a delta or a rank's sampler was loaded by others: what this rank's counters will show under "weights" and "weights check".
  CommBytes bytes() const;
  CommBytes check_bytes() const;

 private:
  using Piece = Route::Piece;
  struct Quantized {
    TensorView codes, scales;  // empty: the trainer's own are sent
    QuantStats stats;          // of the last update
    bool used = false, changes = false;
    bool counts = false;       // this rank is the first that holds this part
  };
  struct Choice {
    const Route* route;
    bool delta;
  };
  const Route& route() const { return committed_ < 0 ? all_ : changing_; }
  bool reads_panels(int id) const { return !to_.view(id).panels.empty(); }  // the forward: its rows are free until finalise
  int rank() const { return ranks_ == nullptr ? 0 : ranks_->rank(); }
  std::string name_of(const Copy& copy) const;
  void enter(SyncStage stage);
  void refuse(SyncStage stage, const Status& why);  // does nothing if `why` is ok, or an error is known
  Status vote(const char* purpose);

  Choice begin();
  bool quantizes(const Route& route, int id) const {
    const Quantized& q = quantized_[static_cast<size_t>(id)];
    return q.used && (&route == &all_ || q.changes);
  }
  void quantize_masters(Context& c, const Route& route, const ReadMaster& master);
  QuantStats check_quantized(const Route& route);
  TensorView rows_at(const Route& route, const Piece& piece, void* at) const;
  TensorView landing(const Route& route, const Piece& piece) const;
  char* last_sent(const Route& route, const Piece& piece) const;
  void pack(Context& c, const Route& route, const Piece& piece, TensorView out) const;
  TensorView leave(Context& c, const Route& route, const Piece& piece, void* at);
  void sum_left(Context& c);
  void check_left(Context& c, const Route& route);
  ChecksumItem item_of(const Route& route, const Piece& piece, ConstTensorView rows) const;
  bool loses(const Route& route, const Piece& piece) const;
  void keep(Context& c, const Route& route, int64_t bucket);
  void exchange(Context& c, const Route& route, int64_t bucket);
  bool land(Context& c, const Route& route, const Piece& piece, std::span<const char>* bytes);
  void verify(Context& c, const Route& route);
  void restore(Context& c);
  void finalise(Context& c);
  void remember_sent(Context& c);

  RankGroup* const ranks_;
  const Weights& from_;
  Weights& to_;
  const SyncOptions options_;
  const Manifest announced_, wanted_;
  const Route all_, changing_;
  std::vector<TensorView> landing_, landing_scales_;  // [rows, columns] by tensor id; of what this rank holds
  std::vector<Quantized> quantized_;     // by tensor id; used: this rank's source holds it, and the destination quantises it
  std::vector<TensorView> last_sent_;    // with delta: by copy of changing_, u8 [bytes]; empty where this rank sends nothing to others
  TensorView outgoing_;                  // u8 [bucket]
  TensorView incoming_, delta_;          // u8 [bucket, and what deltas may add]; with others

  int64_t committed_ = -1;   // version of the last update; -1: the next is of all tensors
  bool knows_sent_ = false;  // last_sent_ is what all ranks have at version committed_
  int64_t deltas_ = 0;       // since the last full update

  // Of the update at hand.
  bool is_delta_ = false;
  Status bad_;  // the first error of this rank
  std::vector<Piece> left_;           // what was packed, in order; by its places:
  TensorView marks_, sums_;           // i32, i64 [pieces]: whether something is not finite, and the checksum
  std::vector<ChecksumItem> items_;   // of which the last ones are still to be summed
  std::vector<int64_t> sent_sums_, landed_sums_;  // by copy: checksums of what this rank sends and of what it received
  std::vector<int64_t> landed_rows_;              // by copy
  int64_t moved_ = 0, changed_ = 0;               // bytes: sent to others, and of what was sent or kept, written
};

}  // namespace lockstep
