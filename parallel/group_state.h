#pragma once
// Internal to this room: what a group of ranks has, for its operations (collective.cc), its messages (messages.cc) and the world that makes it (rank_world.cc).

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>

#include "parallel/collective.h"
#include "parallel/device_channel.h"
#include "parallel/device_links.h"

namespace lockstep {

inline double now_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Between two looks at something another rank has to do, or a thread beside this one.
class Backoff {
 public:
  // bytes: may be on their way through the host's memory, where MPI moves them on only when it is asked: no sleep while that lasts.
  explicit Backoff(int64_t bytes = 0, int yields = kYields) : yields_(yields), moving_s_(static_cast<double>(bytes) / kBytesPerSecond) {}
  void pause() {
    if (++tries_ <= yields_) {
      ::sched_yield();
      return;
    }
    const double now = now_s();
    if (since_ == 0) since_ = now;
    if (now - since_ < moving_s_) {
      ::sched_yield();
      return;
    }
    const double sleep = std::clamp((now - since_) / 8, 20e-6, 1e-3);
    const timespec t{0, static_cast<long>(sleep * 1e9)};
    nanosleep(&t, nullptr);
  }

 private:
  static constexpr int kYields = 16;  // about as long as the shortest sleep
  static constexpr double kBytesPerSecond = 1e9;  // somewhat less than a core copies twice
  const int yields_;
  const double moving_s_;
  int tries_ = 0;
  double since_ = 0;
};

template <typename View>
void check_contiguous(const char* op, const View& x) {
  CHECK(x.contiguous(), "{}: a view {} with row stride {}", op, x.shape.str(), x.row_stride);
}

struct RankGroup::Impl {
  RankWorld* world = nullptr;
  std::string name;
  std::vector<int> members;
  int rank = 0;
  int id = -1;                       // of the watchdog
  std::unique_ptr<Channel> channel;  // none in a group of one
  int64_t seq = 0;                   // collectives entered

  // Of the exchange that is being made, by rank.
  std::vector<BytePiece> sends, recvs;
  std::vector<int64_t> equal_rows;
  std::vector<Range> equal_parts;
  Pending pending{0};

  // Between GPUs; made by the first operation there.
  std::optional<DeviceChannel> device_channel;
  std::optional<DeviceLinks> device_links;

  // Point to point.
  struct Slot {
    explicit Slot() : pending(1) {}
    Pending pending;
    int ticket = -1;  // -1: free
    const char* name = nullptr;
    CommBytes bytes;
    int peer = -1, tag = -1;
    DeviceMessage message;  // of one between GPUs; its state is none for others
    // Of a message between GPUs that goes by way of the host.
    std::vector<char> staged;
    Context* context = nullptr;  // of a receive, whose bytes go up when they have come
    void* device = nullptr;
  };
  std::vector<Slot> slots;
  Slot& open(Request request) {
    CHECK(request.slot >= 0 && request.slot < kRequestsMax && slots[request.slot].ticket >= 0, "request {} is not open", request.slot);
    return slots[request.slot];
  }
  std::map<std::array<int, 3>, int64_t> messages;  // (peer, tag, 0 for send) to how many were started

  ~Impl() {
    if (device_links) std::erase(world->links_, &*device_links);
  }
  int size() const { return static_cast<int>(members.size()); }
  Traffic& traffic(const char* name) {
    auto& all = world->traffic_;
    const auto it = all.find(std::string_view(name));
    return it != all.end() ? it->second : all[name];
  }
};

// A collective from before its first message to after its last: registered with the watchdog, then counted.
class RankGroup::Registered {
 public:
  Registered(Impl& impl, const char* kind, const Purpose& p, CommBytes expected) : impl_(impl), name_(p.name), start_s_(now_s()) {
    ticket_ = impl.world->watchdog_->begin({.kind = kind,
                                            .name = p.name,
                                            .group = impl.id,
                                            .seq = ++impl.seq,
                                            .bytes = expected.sent + expected.received,
                                            .file = p.file,
                                            .line = p.line,
                                            .deadline_s = p.deadline_s});
  }
  ~Registered() {
    RankWorld& world = *impl_.world;
    if (in_stream_) {
      uint64_t* const word = &world.words_[ticket_];
      device_memory::write_word(stream_, word, ++world.last_mark_);
      world.watchdog_->in_stream(ticket_, word, world.last_mark_);
    } else {
      world.watchdog_->end(ticket_);
    }
    Traffic& t = impl_.traffic(name_);
    ++t.calls;
    t.bytes.sent += moved.sent;
    t.bytes.received += moved.received;
    t.wait_s += now_s() - start_s_;
  }
  Registered(const Registered&) = delete;
  // The operation is complete when what is in the stream at its end is done.
  void goes_on_in(void* stream) {
    in_stream_ = true;
    stream_ = stream;
  }

  CommBytes moved;  // so far

 private:
  Impl& impl_;
  const char* name_;
  double start_s_;
  int ticket_;
  bool in_stream_ = false;
  void* stream_ = nullptr;
};

// A Pending or a DeviceChannel.
template <typename Started>
void RankGroup::wait_for(Started& started, int64_t bytes) {
  constexpr int kDeviceYields = 200;  // the library's own thread needs tens of microseconds
  Backoff backoff = std::is_same_v<Started, Pending> ? Backoff(bytes) : Backoff(0, kDeviceYields);
  for (;;) {
    bool done = false;
    require(started.test(&done));
    if (done) return;
    if (!std::is_same_v<Started, Pending>) require(impl_->channel->progress());
    progress();
    backoff.pause();
  }
}

}  // namespace lockstep
