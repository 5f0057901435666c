#pragma once
// What ranks do together: the world of a run's processes, groups of them, and the operations of a group.
//
// Started by mpirun or srun, RankWorld::start joins the other processes; started alone, it is rank 0 of 1 and no MPI is touched.
// Groups are made once, at the start, in the same order on all their members. All members of a group call its operations in the
// same order; a rank without work calls with zero counts. Ranks below are those of the group unless said otherwise.
//
// Failure. An operation returns when it is complete, or between GPUs when it is in the context's stream. If it cannot complete (a rank is
// stopped, lost or failed; see watchdog.h for how it is noticed) it does not, and the watchdog ends the process with kExitStalled. Nothing is ever thrown or returned
// through a collective, because the other members could not follow. For failures of the world outside (files, user text) ranks
// agree() first.
//
// Order. Sums of floats are formed rank by rank, ((x_0 + x_1) + x_2) + ..., on the rank that needs them: the same bits in every
// run and with every MPI library. A reduction inside the network is never asked for floats; integers, where order cannot matter,
// use the library's.
//
// Waiting. Operations are started without blocking and polled: a few yields, and as many as a transfer of that size may need, then
// sleeps of an eighth of the time waited so far, 20 us to 1 ms. Many more ranks than cores work, and a waiting rank leaves its core to
// the others.
//
// Cost is given in bytes that a rank sends (S) and receives (V) for R ranks; own parts do not count. Traffic counts them as they
// happen, the *_bytes functions predict them, and they are equal.
//
// Devices. Data operations take the context of their buffers, on the GPU on all members or on none. Spans of int64 and text are always host memory. What
// lies on a GPU takes one of two ways, under the same contracts and with the same bits:
//   device  NCCL or RCCL (device_channel.h) moves it from GPU to GPU; sums are ordered sums on the GPU, of what was moved. An operation returns once it is in
//           the context's stream, so what follows there may use the result, and the host may be ahead; its deadline runs until it is complete on
//           the GPU. Tests of requests are true when the GPU has done it; wait() is done when the stream waits for it
//   host    downloaded, sent by MPI, uploaded, summed on the GPU; an operation returns when it is complete
// RankWorld::use_devices() decides. The first operation of a group, and the first message of a peer and tag, join the ranks concerned, which takes tenths
// of a second.
//
// Threading: one thread of a process at a time.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"
#include "parallel/channel.h"
#include "parallel/grid.h"
#include "parallel/watchdog.h"

namespace lockstep {

// What an operation is for: the name under which it is counted and reported (a literal), its deadline if not the world's, and who
// called.
//   group.barrier("step end");
//   group.barrier({"checkpoint", 1800});
struct Purpose {
  const char* name;
  double deadline_s;
  const char* file;  // the caller's; std::source_location would ask for clang 15, and the fuzz targets are built with 14
  int line;
  Purpose(const char* name, const char* file = __builtin_FILE(), int line = __builtin_LINE()) : Purpose(name, 0.0, file, line) {}
  Purpose(const char* name, double deadline_s, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : name(name), deadline_s(deadline_s), file(file), line(line) {}
};

struct CommBytes {
  int64_t sent = 0;
  int64_t received = 0;
  bool operator==(const CommBytes&) const = default;
};

struct Traffic {
  int64_t calls = 0;
  CommBytes bytes;
  double wait_s = 0;  // from entering an operation to leaving it: transfer, local sums, and waiting for others; not what a stream goes on with
};

// The way of what lies on GPUs. automatic: device where it can be.
enum class Transport : uint8_t { automatic, host, device };

class RankWorld;
class DeviceChannel;
class DeviceLinks;

class RankGroup {
 public:
  RankGroup(RankGroup&&) noexcept;
  RankGroup& operator=(RankGroup&&) noexcept;
  ~RankGroup();

  const std::string& name() const;
  int rank() const;
  int size() const;
  const std::vector<int>& members() const;  // ranks of the world, ascending
  bool between_gpus() const;                // whether what lies on GPUs takes the way "device"

  // In a group of one, every operation returns at once, copies own parts where asked to, and is not registered or counted.
  // Views are contiguous.

  // S = V = 0.
  void barrier(Purpose p);

  // x of `root` to x of all. Root: S = (R - 1) bytes(x), whatever route the library takes; others: V = bytes(x).
  void broadcast(Context& c, TensorView x, int root, Purpose p);
  void broadcast(std::span<int64_t> x, int root, Purpose p);
  void broadcast(std::string* text, int root, Purpose p);  // of any length; counts 8 bytes more

  // y = x_0, x_1, ... one behind the other; `rows` says how many rows each rank brings. x may be its own rows of y.
  // S = (R - 1) bytes(x), V = bytes(y) - bytes(x).
  void all_gather(Context& c, TensorView y, ConstTensorView x, std::span<const int64_t> rows, Purpose p);
  void all_gather(Context& c, TensorView y, ConstTensorView x, Purpose p);  // as many rows each
  void all_gather(std::span<int64_t> y, std::span<const int64_t> x, Purpose p);

  // Rows of x, one behind the other, go to rank 0, 1, ... (send_rows of them each); y gets what came from rank 0, 1, ... Any
  // counts, all to one rank included; both sides know them (exchange_counts first, where not). No buffer grows here: x and y are
  // the caller's. S and V = the rows that leave and come.
  void all_to_all(Context& c, TensorView y, std::span<const int64_t> recv_rows, ConstTensorView x,
                  std::span<const int64_t> send_rows, Purpose p);
  // from[r * k + i] here = to[me * k + i] on rank r, k = to.size() / R. S = V = 8 k (R - 1).
  void exchange_counts(std::span<int64_t> from, std::span<const int64_t> to, Purpose p);

  // y = elements parts[rank()] of x_0 + x_1 + ... in rank order. f32 or f64. Parts are the same on every rank and may be empty,
  // overlap nothing, and need not cover x. y may be that part of x itself. Moves at most kSumScratchBytes at a time (between GPUs
  // kDeviceSumScratchBytes), which is also its scratch.
  // S = bytes(parts of others), V = (R - 1) bytes(own part).
  void reduce_scatter(Context& c, TensorView y, ConstTensorView x, std::span<const Range> parts, Purpose p);

  // x = x_0 + x_1 + ... in rank order, on all ranks. f32 or f64. Up to kGatherSumBytes: everything to everyone, S = V = (R - 1)
  // bytes(x). Beyond: reduce_scatter of equal parts, then all_gather, S = V = bytes(x) + (R - 2) bytes(own part). The bits are
  // the same.
  void all_reduce(Context& c, TensorView x, Purpose p);
  // Counted as S = V = 8 n (R - 1), what sending everything to everyone would move.
  void all_reduce(std::span<int64_t> x, Reduction reduction, Purpose p);
  bool any(bool mine, Purpose p);
  bool every(bool mine, Purpose p);
  // Ok if all are. Otherwise the error of the lowest rank that has one, the same on all: "rank 3: ...".
  Status agree(const Status& mine, Purpose p);

  // Point to point, at most kRequestsMax open at a time. Of one sender, tag and receiver, messages arrive in order. Sizes on both
  // sides are equal. Tags from 0 to kTagMax. Sender: S = bytes(x); receiver: V = bytes(x).
  static constexpr int kRequestsMax = 64;
  static constexpr int kTagMax = Channel::kTagMax - 1;
  struct Request {
    int slot = -1;
  };
  void send(Context& c, ConstTensorView x, int to, int tag, Purpose p);
  void recv(Context& c, TensorView x, int from, int tag, Purpose p);
  // In the background: x stays as it is until wait() or a true test(). The deadline counts from wait() on. A send to a rank that
  // is busy may not leave before this rank comes back here.
  Request start_send(Context& c, ConstTensorView x, int to, int tag, Purpose p);
  Request start_recv(Context& c, TensorView x, int from, int tag, Purpose p);
  void wait(Request request);
  bool test(Request request);  // true once, then the request is gone

  static constexpr int64_t kGatherSumBytes = 4096;
  static constexpr int64_t kSumScratchBytes = int64_t{4} << 20;
  static constexpr int64_t kDeviceSumScratchBytes = int64_t{64} << 20;

 private:
  friend class RankWorld;
  struct Impl;
  class Registered;
  explicit RankGroup(std::unique_ptr<Impl> impl);
  void exchange(Context* c, Registered& op);
  void exchange_host(Registered& op);
  void exchange_device(Context& c, Registered& op);
  bool between_gpus(const Context& c) const;
  DeviceChannel& device_channel();
  template <typename Started>
  void wait_for(Started& started, int64_t bytes = 0);
  void require(const Status& status);
  void gather(Context* c, char* y, const char* x, std::span<const int64_t> rows, int64_t row_bytes, const Purpose& p);
  template <typename T>
  void sum_parts(Context& c, Registered& op, T* y, const T* x, std::span<const Range> parts);
  template <typename T>
  void sum_whole(Context& c, Registered& op, T* x, int64_t count);
  Request start(const char* kind, Context& c, void* data, int64_t bytes, int peer, int tag, const Purpose& p);
  void progress();
  void leave(Request request);
  std::unique_ptr<Impl> impl_;
};

class RankWorld {
 public:
  // An error if a launcher started several processes in a way that keeps them from finding each other.
  static Result<std::unique_ptr<RankWorld>> start(WatchdogOptions options = {});
  // Without finish() before, this rank is leaving early: the job ends. In a world of one nothing happens.
  ~RankWorld();

  int rank() const { return rank_; }
  int size() const { return size_; }
  RankGroup& all() { return *all_; }
  Watchdog& watchdog() { return *watchdog_; }

  // All ranks, before they make groups or touch a GPU, where tensors will lie on GPUs: gives this thread the GPU that has among its host's the number
  // that the rank has among its host's ranks (in turn, where there are fewer), and decides the way of what lies there: device if every rank
  // has a GPU of its own and the same library. An error, the same on all ranks, says why `device` cannot be.
  Status use_devices(Transport transport);
  const std::string& device_way() const { return device_way_; }  // in words, with the reason where it is the host

  // A group of the listed ranks, ascending, this one among them. The members call it, and nobody else. `name` is the same on all
  // of them and unlike that of any other group.
  RankGroup make_group(std::string name, std::vector<int> members);

  // All ranks: keep flight records of this start in a new directory below RUN_DIR/flight. It goes away at finish() if nothing was
  // recorded.
  Status record_in(const std::string& run_dir);

  // Ends the job with this message as the diagnosis, on all ranks.
  [[noreturn]] void fail(const std::string& message) { watchdog_->fail(message); }

  // All ranks: waits for each other and leaves MPI. No operation may follow.
  void finish(Purpose p = "finish");

  // By name of the operation, since the last reset.
  const std::map<std::string, Traffic, std::less<>>& traffic() const { return traffic_; }
  void reset_traffic() { traffic_.clear(); }

 private:
  friend class RankGroup;
  RankWorld() = default;
  RankGroup group(std::string name, std::vector<int> members, std::unique_ptr<Channel> channel);

  int rank_ = 0;
  int size_ = 1;
  bool launched_ = false;  // by a launcher: MPI is in use, even if the world is one rank
  bool finished_ = false;
  std::string flight_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<RankGroup> all_;
  std::map<std::string, Traffic, std::less<>> traffic_;

  // Between GPUs.
  bool devices_ = false;
  std::string device_way_ = "not decided";
  std::vector<DeviceLinks*> links_;  // of all groups
  uint64_t* words_ = nullptr;        // by ticket of the watchdog: what streams write
  uint64_t last_mark_ = 0;
};

// What would move bytes from GPU to GPU, "NCCL 2.28.9"; an error says what is missing.
Result<std::string> device_library();

// Predictions of the counters, for plans and tests. `rank` is the rank that counts.
CommBytes broadcast_bytes(int64_t bytes, int size, bool root);
CommBytes all_gather_bytes(std::span<const int64_t> rows, int64_t row_bytes, int rank);
CommBytes all_to_all_bytes(std::span<const int64_t> recv_rows, std::span<const int64_t> send_rows, int64_t row_bytes, int rank);
CommBytes exchange_counts_bytes(int64_t counts_per_rank, int size);
CommBytes reduce_scatter_bytes(std::span<const Range> parts, DType dtype, int rank);
CommBytes all_reduce_bytes(int64_t elements, DType dtype, int size, int rank);
CommBytes all_reduce_int_bytes(int64_t count, int size);

}  // namespace lockstep
