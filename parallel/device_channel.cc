#include "parallel/device_channel.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <future>
#include <mutex>
#include <vector>

#include "core/device.h"

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
  int blocking = 1;
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

std::mutex mutex;  // of the list
std::atomic<bool> aborted{false};
std::vector<Comm*>& communicators() {
  static auto* all = new std::vector<Comm*>;
  return *all;
}

// Before every call of the library, and after one that waited.
void stop_if_aborted() {
  while (aborted.load()) ::sleep(1);  // the watchdog's thread ends the process
}

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
  std::vector<bool> sent, received;  // by rank: whether anything was, so that the two are connected
  std::future<Status> waiting;       // what runs in a thread of its own
};

DeviceChannel::DeviceChannel(std::unique_ptr<Communicator> c) : communicator_(std::move(c)) {}
DeviceChannel::DeviceChannel(DeviceChannel&&) noexcept = default;
DeviceChannel::~DeviceChannel() = default;  // communicators live as long as the process: freeing one could wait for others

template <typename Call>
Status DeviceChannel::start(bool may_wait, Call call) {
  stop_if_aborted();
  if (!may_wait) return call();
  communicator_->waiting = std::async(std::launch::async, [call, device = device_selected()] {
    device_select(device);
    Status status = call();
    stop_if_aborted();
    return status;
  });
  return Status::ok();
}

Status DeviceChannel::make_id(Id* id) {
  stop_if_aborted();
  return check(library().GetUniqueId(id), "ncclGetUniqueId");
}

Result<DeviceChannel> DeviceChannel::join(const Id& id, int rank, int size, int blocks_max) {
  auto c = std::make_unique<Communicator>();
  c->sent.resize(static_cast<size_t>(size));
  c->received.resize(static_cast<size_t>(size));
  DeviceChannel channel(std::move(c));
  LOCKSTEP_RETURN_IF_ERROR(channel.start(true, [&comm = channel.communicator_->comm, id, rank, size, blocks_max] {
    Config config;
    config.blocks_max = blocks_max;
    LOCKSTEP_RETURN_IF_ERROR(check(library().CommInitRankConfig(&comm, size, id, rank, &config), "ncclCommInitRankConfig"));
    const std::lock_guard lock(mutex);
    communicators().push_back(comm);
    return Status::ok();
  }));
  return channel;
}

Status DeviceChannel::exchange(void* stream, std::span<const BytePiece> sends, std::span<const BytePiece> recvs) {
  bool fresh = false;
  for (size_t r = 0; r < sends.size(); ++r) {
    Communicator& c = *communicator_;
    fresh = fresh || (sends[r].bytes > 0 && !c.sent[r]) || (recvs[r].bytes > 0 && !c.received[r]);
    c.sent[r] = c.sent[r] || sends[r].bytes > 0;
    c.received[r] = c.received[r] || recvs[r].bytes > 0;
  }
  // The pieces stay as they are until test() says that this is done.
  return start(fresh, [comm = communicator_->comm, stream, sends, recvs] {
    const Library& l = library();
    LOCKSTEP_RETURN_IF_ERROR(check(l.GroupStart(), "ncclGroupStart"));
    for (size_t r = 0; r < sends.size(); ++r) {
      const BytePiece &out = sends[r], &in = recvs[r];
      const int rank = static_cast<int>(r);
      if (out.bytes > 0) LOCKSTEP_RETURN_IF_ERROR(check(l.Send(out.data, static_cast<size_t>(out.bytes), kBytes, rank, comm, stream), "ncclSend", comm));
      if (in.bytes > 0) LOCKSTEP_RETURN_IF_ERROR(check(l.Recv(in.data, static_cast<size_t>(in.bytes), kBytes, rank, comm, stream), "ncclRecv", comm));
    }
    return check(l.GroupEnd(), "ncclGroupEnd", comm);
  });
}

Status DeviceChannel::broadcast(void* stream, BytePiece piece, int root) {
  return start(true, [comm = communicator_->comm, stream, piece, root] {
    return check(library().Broadcast(piece.data, piece.data, static_cast<size_t>(piece.bytes), kBytes, root, comm, stream), "ncclBroadcast", comm);
  });
}

Status DeviceChannel::test(bool* done) {
  stop_if_aborted();
  *done = false;
  if (std::future<Status>& waiting = communicator_->waiting; waiting.valid()) {
    if (waiting.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return Status::ok();
    LOCKSTEP_RETURN_IF_ERROR(waiting.get());
  }
  *done = true;
  Answer answer = kSuccess;
  Comm* const comm = communicator_->comm;
  LOCKSTEP_RETURN_IF_ERROR(check(library().CommGetAsyncError(comm, &answer), "ncclCommGetAsyncError", comm));
  return check(answer, "between GPUs", comm);
}

void DeviceChannel::abort_all() {
  aborted.store(true);
  const std::lock_guard lock(mutex);
  for (Comm* comm : communicators()) static_cast<void>(library().CommAbort(comm));
}

}  // namespace lockstep
