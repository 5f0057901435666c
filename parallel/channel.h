#pragma once
// Internal to this room: the few things that are asked of MPI, in types that do not need its header. A program without MPI links
// no_mpi_channel.cc instead of mpi_channel.cc; it can only be a world of one.
//
// Every call starts an operation and returns at once; Pending::test says when all that was started with it is complete. Buffers
// must stay as they are until then. Failures are Status: the caller ends the job.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"

namespace lockstep {

enum class Reduction : uint8_t { sum, max, min };

// Bytes that lie together.
struct BytePiece {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Operations that were started and are completed together. Reused: after a complete test() it is empty.
class Pending {
 public:
  explicit Pending(int capacity);
  ~Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  // Sets *done when all are complete, which for receives includes that exactly the expected bytes came.
  Status test(bool* done);

 private:
  friend class Channel;
  struct Requests;
  std::unique_ptr<Requests> requests_;
};

// A communicator. Ranks are those of the channel.
class Channel {
 public:
  // Whether a launcher of MPI started this process. An error if one started it without telling it about the others.
  static Result<bool> launched();
  // Joins the other processes. Once a process.
  static Result<Channel> join();
  static Status leave();
  static std::string library();  // its name and version, or that there is none; at any time

  Channel(Channel&&) noexcept;
  ~Channel();
  int rank() const;
  int size() const;
  // A channel of the listed ranks of this one, ascending, this rank among them. All of them call it, and nobody else; `tag` tells
  // apart groups that are made at the same time. Waits.
  Result<Channel> subset(const std::vector<int>& ranks, int tag);

  Status send(Pending& p, const void* data, size_t bytes, int to, int tag);
  Status recv(Pending& p, void* data, size_t bytes, int from, int tag);
  Status barrier(Pending& p);
  Status broadcast(Pending& p, void* data, size_t bytes, int root);
  Status all_reduce(Pending& p, int64_t* data, int count, Reduction reduction);
  Status progress();  // of what was started, for a rank that waits for something else than Pending::test

  static constexpr int kTagMax = 32767;  // what MPI promises

 private:
  struct Communicator;
  explicit Channel(std::unique_ptr<Communicator> c);
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace lockstep
