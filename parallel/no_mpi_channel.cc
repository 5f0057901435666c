// The program without MPI: a world of one, whose groups never come to a channel.

#include <cstdlib>

#include "parallel/channel.h"

namespace lockstep {

struct Pending::Requests {};
Pending::Pending(int) {}
Pending::~Pending() = default;
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Status Pending::test(bool*) { return Status::error("built without MPI"); }

struct Channel::Communicator {};
Channel::Channel(std::unique_ptr<Communicator> c) : communicator_(std::move(c)) {}
Channel::Channel(Channel&&) noexcept = default;
Channel::~Channel() = default;
int Channel::rank() const { return 0; }
int Channel::size() const { return 1; }

std::string Channel::library() { return "none: built for one process"; }

Result<bool> Channel::launched() {
  // As in mpi_channel.cc: N copies that each believe to be alone would write over each other's files.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* size = std::getenv(name);
    if (size != nullptr && std::atoi(size) > 1)
      return errorf(
          "started as {} processes, but built without MPI; install libopenmpi-dev and build again, or start one process", size);
  }
  return false;
}

Result<Channel> Channel::join() { return Status::error("built without MPI"); }
Status Channel::leave() { return Status::ok(); }
Result<Channel> Channel::subset(const std::vector<int>&, int) { return Status::error("built without MPI"); }
Status Channel::send(Pending&, const void*, size_t, int, int) { return Status::error("built without MPI"); }
Status Channel::recv(Pending&, void*, size_t, int, int) { return Status::error("built without MPI"); }
Status Channel::progress() { return Status::error("built without MPI"); }
Status Channel::barrier(Pending&) { return Status::error("built without MPI"); }
Status Channel::broadcast(Pending&, void*, size_t, int) { return Status::error("built without MPI"); }
Status Channel::all_reduce(Pending&, int64_t*, int, Reduction) { return Status::error("built without MPI"); }

}  // namespace lockstep
