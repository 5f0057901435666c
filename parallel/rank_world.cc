#include <sys/prctl.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/device.h"
#include "io/file.h"
#include "parallel/diagnosis.h"
#include "parallel/group_state.h"

namespace lockstep {

Result<std::unique_ptr<RankWorld>> RankWorld::start(WatchdogOptions options) {
  const Result<bool> launched = Channel::launched();
  if (!launched) return launched.status();
  std::unique_ptr<RankWorld> world(new RankWorld);
  std::unique_ptr<Channel> channel;
  if (launched.value()) {
    Result<Channel> joined = Channel::join();
    if (!joined) return joined.status();
    channel = std::make_unique<Channel>(joined.take());
    world->rank_ = channel->rank();
    world->size_ = channel->size();
  }
  world->launched_ = launched.value();
  world->watchdog_ = std::make_unique<Watchdog>(world->rank_, world->size_, options);
  std::vector<int> members(world->size_);
  for (int r = 0; r < world->size_; ++r) members[r] = r;
  world->all_ = std::make_unique<RankGroup>(world->group("world", std::move(members), std::move(channel)));
  if (world->size_ == 1) return world;

  // By default the system rounds sleeps up by 50 us, more than the shortest of ours.
  ::prctl(PR_SET_TIMERSLACK, 1000UL);
  // Everyone meets everyone: connections are made now, and the watchdogs learn whom to look after.
  const ProcessId me = this_process();
  std::vector<ProcessId> processes(world->size_);
  Context host;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(ProcessId));
  world->all_->all_gather(host, TensorView(processes.data(), DType::u8, {world->size_, kBytes}),
                          ConstTensorView(&me, DType::u8, {1, kBytes}), "processes");
  world->watchdog_->watch_processes(std::move(processes));
  world->reset_traffic();
  return world;
}

RankWorld::~RankWorld() {
  if (size_ > 1 && !finished_ && watchdog_ != nullptr) fail(fmt::format("rank {} left without finishing", rank_));
}

RankGroup RankWorld::group(std::string name, std::vector<int> members, std::unique_ptr<Channel> channel) {
  auto g = std::make_unique<RankGroup::Impl>();
  const size_t size = members.size();
  g->world = this;
  g->name = name;
  g->members = members;
  g->rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  g->channel = std::move(channel);
  if (size > 1) {
    g->id = watchdog_->add_group(std::move(name), std::move(members));
    g->sends.resize(size);
    g->recvs.resize(size);
      g->equal_parts.resize(size);
    g->pending = Pending(static_cast<int>(2 * size));
    g->slots.resize(RankGroup::kRequestsMax);
  }
  g->equal_rows.resize(size);
  return RankGroup(std::move(g));
}

namespace {

// What ranks tell each other of their GPUs.
struct GpuOfRank {
  char id[16] = {};
  int64_t known = 0;    // whether the GPU has an id
  int64_t version = 0;  // of the library; 0: none
};

}  // namespace

Status RankWorld::use_devices(Transport transport) {
  device_load_early();
  LOCKSTEP_RETURN_IF_ERROR(all_->agree(device_available(), "devices"));
  const ProcessId me = this_process();
  std::vector<ProcessId> processes(static_cast<size_t>(size_), me);
  Context host;
  const auto gather = [&](auto& all, const auto& mine) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(mine));
    all_->all_gather(host, TensorView(all.data(), DType::u8, {size_, kBytes}), ConstTensorView(&mine, DType::u8, {1, kBytes}), "devices");
  };
  gather(processes, me);
  const auto same_host = [&](const ProcessId& p) { return std::strcmp(p.host, me.host) == 0; };
  device_select(static_cast<int>(std::count_if(processes.begin(), processes.begin() + rank_, same_host)) % device_count());

  GpuOfRank mine;
  const Result<int> version = DeviceChannel::library_version();
  if (version) mine.version = version.value();
  const std::string id = device_info().id;
  mine.known = id.size() == sizeof mine.id ? 1 : 0;
  std::copy_n(id.begin(), mine.known == 1 ? sizeof mine.id : 0, mine.id);
  std::vector<GpuOfRank> gpus(static_cast<size_t>(size_), mine);
  gather(gpus, mine);

  const auto why_not = [&]() -> std::string {
    if (transport == Transport::host) return "as parallel.transport says";
    for (int r = 0; r < size_; ++r) {
      const GpuOfRank& g = gpus[static_cast<size_t>(r)];
      if (g.known == 0) return "this program was built without a GPU's compiler";
      if (g.version == 0) return r == rank_ ? version.message() : fmt::format("rank {} has no {}", r, DeviceChannel::library_name());
      if (g.version != gpus[0].version)
        return fmt::format("ranks 0 and {} have {} and {}", r, DeviceChannel::version_text(static_cast<int>(gpus[0].version)),
                           DeviceChannel::version_text(static_cast<int>(g.version)));
      for (int other = 0; other < r; ++other)
        if (std::memcmp(g.id, gpus[static_cast<size_t>(other)].id, sizeof g.id) == 0) return fmt::format("ranks {} and {} share a GPU", other, r);
    }
    return "";
  }();
  devices_ = size_ > 1 && why_not.empty();
  device_way_ = devices_ ? DeviceChannel::version_text(static_cast<int>(mine.version)) : fmt::format("by way of the host ({})", why_not);
  if (devices_ && words_ == nullptr) {
    words_ = device_memory::host_words(Watchdog::kPendingMax);
    watchdog_->before_end(DeviceChannel::abort_all);
  }
  if (transport == Transport::device && size_ > 1 && !devices_)
    return all_->agree(errorf("parallel.transport is device, but {}; set it to auto, which goes by way of the host then", why_not), "devices");
  return Status::ok();
}

RankGroup RankWorld::make_group(std::string name, std::vector<int> members) {
  CHECK(!members.empty() && std::is_sorted(members.begin(), members.end()) && members.front() >= 0 && members.back() < size_ &&
            std::adjacent_find(members.begin(), members.end()) == members.end(),
        "{}: {} members, which must be ascending ranks below {}", name, members.size(), size_);
  CHECK(std::binary_search(members.begin(), members.end(), rank_), "{}: rank {} is no member", name, rank_);
  if (members.size() == 1) return group(std::move(name), std::move(members), nullptr);
  // The channel comes after the group, so that waiting for it is already a registered operation of the group.
  RankGroup g = group(name, members, nullptr);
  RankGroup::Registered op(*g.impl_, "make_group", Purpose(name.c_str()), {});
  uint32_t tag = 0;  // the same on all members
  for (char ch : name) tag = tag * 31 + static_cast<unsigned char>(ch);
  Result<Channel> channel = all_->impl_->channel->subset(members, static_cast<int>(tag % Channel::kTagMax));
  g.require(channel.status());
  g.impl_->channel = std::make_unique<Channel>(channel.take());
  return g;
}

namespace {

// Makes RUN_DIR/flight/000007, one past the highest number there.
Result<std::string> make_flight_directory(const std::string& run_dir) {
  namespace fs = std::filesystem;
  const std::string root = flight_root(run_dir);
  LOCKSTEP_RETURN_IF_ERROR(make_directories(root));
  int last = 0;
  std::error_code error;
  for (fs::directory_iterator it(root, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    int number = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), number).ptr == name.data() + name.size())
      last = std::max(last, number);
  }
  if (error) return errorf("cannot list {}: {}", root, error.message());
  std::string path = fmt::format("{}/{:06}", root, last + 1);
  // Fails if another job has just made it: two jobs do not share one run directory.
  if (!fs::create_directory(path, error)) return errorf("cannot make {}: {}", path, error ? error.message() : "it exists");
  return path;
}

}  // namespace

Status RankWorld::record_in(const std::string& run_dir) {
  if (size_ == 1) return Status::ok();
  Status status;
  if (rank_ == 0) {
    Result<std::string> made = make_flight_directory(run_dir);
    if (made)
      flight_ = made.take();
    else
      status = made.status();
  }
  LOCKSTEP_RETURN_IF_ERROR(all_->agree(status, "flight directory"));
  all_->broadcast(&flight_, 0, "flight directory");
  watchdog_->record_in(flight_);
  return Status::ok();
}

void RankWorld::finish(Purpose p) {
  if (finished_) return;
  finished_ = true;
  if (size_ > 1) {
    if (devices_)  // what others still read here
      for (Backoff backoff; !watchdog_->streams_ended(); backoff.pause()) {
      }
    watchdog_->stop_watching_processes();
    all_->barrier(p);
    if (rank_ == 0 && !flight_.empty()) {
      std::error_code ignored;
      std::filesystem::remove(flight_, ignored);  // stays if it holds anything
    }
  }
  if (!launched_) return;
  const int ticket = size_ == 1 ? -1
                                : watchdog_->begin({.kind = "finalize",
                                                    .name = p.name,
                                                    .group = all_->impl_->id,
                                                    .seq = ++all_->impl_->seq,
                                                    .file = p.file,
                                                    .line = p.line,
                                                    .deadline_s = p.deadline_s});
  const Status left = Channel::leave();
  if (!left) fail(left.message());
  if (ticket >= 0) watchdog_->end(ticket);
}

Result<std::string> device_library() {
  const Result<int> version = DeviceChannel::library_version();
  if (!version) return version.status();
  return DeviceChannel::version_text(version.value());
}
}  // namespace lockstep
