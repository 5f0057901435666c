#include "parallel/device_channel.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <vector>

namespace lockstep {

namespace {

// The part of the libraries' interface that is used here, as all versions since 2.18 have it.
struct Comm;
using Answer = int;
constexpr Answer kSuccess = 0, kInProgress = 7;
constexpr int kBytes = 1;  // the data type of unsigned bytes
constexpr int kUndefined = INT_MIN;
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cluster_size = kUndefined;
  int blocks_min = kUndefined;
  int blocks_max = kUndefined;
  const char* network = nullptr;
  int split_share = kUndefined;
  int behind = kUndefined;  // newer versions have a member where this would be padding
};
constexpr int kVersionMin = 21800;

#if defined(LOCKSTEP_RCCL)
constexpr const char* kLibrary = "librccl.so.1";
constexpr const char* kName = "RCCL";
#else
constexpr const char* kLibrary = "libnccl.so.2";
constexpr const char* kName = "NCCL";
#endif

struct Library {
  Answer (*GetVersion)(int*);
  Answer (*GetUniqueId)(DeviceChannel::Id*);
  Answer (*CommInitRankConfig)(Comm**, int, DeviceChannel::Id, int, Config*);
  Answer (*CommGetAsyncError)(Comm*, Answer*);
  Answer (*CommAbort)(Comm*);
  Answer (*GroupStart)();
  Answer (*GroupEnd)();
  Answer (*Send)(const void*, size_t, int, int, Comm*, void*);
  Answer (*Recv)(void*, size_t, int, int, Comm*, void*);
  Answer (*Broadcast)(const void*, void*, size_t, int, int, Comm*, void*);
  const char* (*GetErrorString)(Answer);
  const char* (*GetLastError)(Comm*);
  int version = 0;
  const Status status;  // of looking for it; the last member, since load() sets the others

  Library() : status(load()) {}

 private:
  Status load() {
    void* const handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return errorf("{} cannot be loaded ({})", kLibrary, dlerror());
    const char* missing = nullptr;
    const auto find = [&](const char* name, auto*& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr && missing == nullptr) missing = name;
    };
    find("ncclGetVersion", GetVersion);
    find("ncclGetUniqueId", GetUniqueId);
    find("ncclCommInitRankConfig", CommInitRankConfig);
    find("ncclCommGetAsyncError", CommGetAsyncError);
    find("ncclCommAbort", CommAbort);
    find("ncclGroupStart", GroupStart);
    find("ncclGroupEnd", GroupEnd);
    find("ncclSend", Send);
    find("ncclRecv", Recv);
    find("ncclBroadcast", Broadcast);
    find("ncclGetErrorString", GetErrorString);
    find("ncclGetLastError", GetLastError);
    if (missing != nullptr) return errorf("{} has no {}; version 2.18 or newer is wanted", kLibrary, missing);
    if (GetVersion(&version) != kSuccess || version < kVersionMin)
      return errorf("{} is {}; version 2.18 or newer is wanted", kLibrary, DeviceChannel::version_text(version));
    return Status::ok();
  }
};
const Library& library() {
  static const Library* l = new Library;
  return *l;
}

std::timed_mutex mutex;  // held during every call of the library
std::atomic<bool> aborted{false};
std::vector<Comm*>& communicators() {
  static auto* all = new std::vector<Comm*>;
  return *all;
}

class Calling {
 public:
  Calling() : lock_(mutex) {
    while (aborted.load()) {
      lock_.unlock();
      for (;;) ::sleep(1);  // the watchdog's thread ends the process
    }
  }

 private:
  std::unique_lock<std::timed_mutex> lock_;
};

Status check(Answer answer, const char* call, Comm* comm = nullptr) {
  if (answer == kSuccess || answer == kInProgress) return Status::ok();
  const char* last = library().GetLastError(comm);
  return errorf("{}: {}{}{}", call, library().GetErrorString(answer), last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last);
}

}  // namespace

const char* DeviceChannel::library_name() { return kLibrary; }

Result<int> DeviceChannel::library_version() {
  if (!library().status) return library().status;
  return library().version;
}

std::string DeviceChannel::version_text(int version) { return fmt::format("{} {}.{}.{}", kName, version / 10000, version / 100 % 100, version % 100); }

struct DeviceChannel::Communicator {
  Comm* comm = nullptr;
};

DeviceChannel::DeviceChannel(std::unique_ptr<Communicator> c) : communicator_(std::move(c)) {}
DeviceChannel::DeviceChannel(DeviceChannel&&) noexcept = default;
DeviceChannel::~DeviceChannel() = default;  // communicators live as long as the process: freeing one could wait for others

Status DeviceChannel::make_id(Id* id) {
  const Calling calling;
  return check(library().GetUniqueId(id), "ncclGetUniqueId");
}

Result<DeviceChannel> DeviceChannel::join(const Id& id, int rank, int size, int blocks_max) {
  const Calling calling;
  auto c = std::make_unique<Communicator>();
  Config config;
  config.blocks_max = blocks_max;
  LOCKSTEP_RETURN_IF_ERROR(check(library().CommInitRankConfig(&c->comm, size, id, rank, &config), "ncclCommInitRankConfig"));
  communicators().push_back(c->comm);
  return DeviceChannel(std::move(c));
}

Status DeviceChannel::exchange(void* stream, std::span<const BytePiece> sends, std::span<const BytePiece> recvs) {
  const Calling calling;
  const Library& l = library();
  Comm* const comm = communicator_->comm;
  LOCKSTEP_RETURN_IF_ERROR(check(l.GroupStart(), "ncclGroupStart"));
  for (int r = 0; r < static_cast<int>(sends.size()); ++r) {
    const BytePiece &out = sends[static_cast<size_t>(r)], &in = recvs[static_cast<size_t>(r)];
    if (out.bytes > 0) LOCKSTEP_RETURN_IF_ERROR(check(l.Send(out.data, static_cast<size_t>(out.bytes), kBytes, r, comm, stream), "ncclSend", comm));
    if (in.bytes > 0) LOCKSTEP_RETURN_IF_ERROR(check(l.Recv(in.data, static_cast<size_t>(in.bytes), kBytes, r, comm, stream), "ncclRecv", comm));
  }
  return check(l.GroupEnd(), "ncclGroupEnd", comm);
}

Status DeviceChannel::send(void* stream, BytePiece piece, int to) {
  const Calling calling;
  return check(library().Send(piece.data, static_cast<size_t>(piece.bytes), kBytes, to, communicator_->comm, stream), "ncclSend", communicator_->comm);
}

Status DeviceChannel::recv(void* stream, BytePiece piece, int from) {
  const Calling calling;
  return check(library().Recv(piece.data, static_cast<size_t>(piece.bytes), kBytes, from, communicator_->comm, stream), "ncclRecv", communicator_->comm);
}

Status DeviceChannel::broadcast(void* stream, BytePiece piece, int root) {
  const Calling calling;
  return check(library().Broadcast(piece.data, piece.data, static_cast<size_t>(piece.bytes), kBytes, root, communicator_->comm, stream), "ncclBroadcast",
               communicator_->comm);
}

Status DeviceChannel::test(bool* done) {
  const Calling calling;
  Answer answer = kSuccess;
  LOCKSTEP_RETURN_IF_ERROR(check(library().CommGetAsyncError(communicator_->comm, &answer), "ncclCommGetAsyncError", communicator_->comm));
  *done = answer != kInProgress;
  return check(answer, "between GPUs", communicator_->comm);
}

void DeviceChannel::abort_all() {
  aborted.store(true);
  // A call that is being made is let through, unless it is the one that is stuck; aborting beside it is allowed.
  std::unique_lock lock(mutex, std::defer_lock);
  static_cast<void>(lock.try_lock_for(std::chrono::seconds(1)));
  for (Comm* comm : communicators()) static_cast<void>(library().CommAbort(comm));
}

}  // namespace lockstep
