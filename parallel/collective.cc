#include "parallel/collective.h"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <type_traits>

#include "core/device.h"
#include "io/file.h"
#include "ops/sum/sum.h"
#include "parallel/device_channel.h"
#include "parallel/device_links.h"
#include "parallel/diagnosis.h"

namespace lockstep {

namespace {

constexpr int kExchangeTag = Channel::kTagMax;  // of messages inside collectives
constexpr int kBlocksMax = 16;                  // of a GPU in an operation between GPUs; each costs about 18 MiB of its memory

double now_s() {
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

void check_rows(const char* op, std::span<const int64_t> rows, int size, int64_t view_rows) {
  CHECK(static_cast<int>(rows.size()) == size, "{}: {} counts for {} ranks", op, rows.size(), size);
  int64_t sum = 0;
  for (int64_t r : rows) {
    CHECK(r >= 0, "{}: a count of {}", op, r);
    sum += r;
  }
  CHECK(sum == view_rows, "{}: counts of {} rows for a view of {}", op, sum, view_rows);
}

int64_t row_bytes_of(const ConstTensorView& x) { return x.shape.row_elements() * static_cast<int64_t>(dtype_bytes(x.dtype)); }

// Without a context: host memory.
void copy_own(Context* c, char* to, const char* from, int64_t bytes) {
  if (to == from || bytes == 0) return;
  if (c != nullptr) return copy_bytes(*c, to, from, static_cast<size_t>(bytes));
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

template <typename View>
void check_contiguous(const char* op, const View& x) {
  CHECK(x.contiguous(), "{}: a view {} with row stride {}", op, x.shape.str(), x.row_stride);
}

}  // namespace

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

RankGroup::RankGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankGroup::RankGroup(RankGroup&&) noexcept = default;
RankGroup& RankGroup::operator=(RankGroup&&) noexcept = default;
RankGroup::~RankGroup() = default;
const std::string& RankGroup::name() const { return impl_->name; }
int RankGroup::rank() const { return impl_->rank; }
int RankGroup::size() const { return impl_->size(); }
const std::vector<int>& RankGroup::members() const { return impl_->members; }

void RankGroup::require(const Status& status) {
  if (!status) impl_->world->fail(fmt::format("{} on rank {}: {}", impl_->name, impl_->world->rank_, status.message()));
}

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

// What messages of any group between GPUs can do, they do now.
void RankGroup::progress() {
  for (DeviceLinks* links : impl_->world->links_) require(links->progress());
}

bool RankGroup::between_gpus(const Context& c) const { return c.on_gpu() && impl_->world->devices_; }

DeviceChannel& RankGroup::device_channel() {
  Impl& g = *impl_;
  if (g.device_channel) return *g.device_channel;
  DeviceChannel::Id id{};
  if (rank() == 0) require(DeviceChannel::make_id(&id));
  require(g.channel->broadcast(g.pending, &id, sizeof id, 0));
  wait_for(g.pending);
  Result<DeviceChannel> joined = DeviceChannel::join(id, rank(), size(), kBlocksMax);
  require(joined.status());
  g.device_channel.emplace(joined.take());
  wait_for(*g.device_channel);
  return *g.device_channel;
}

// Sends impl_->sends[r] to every rank r and receives impl_->recvs[r] from it; own parts are copied. Nothing goes where there is
// nothing.
void RankGroup::exchange(Context* c, Registered& op) {
  Impl& g = *impl_;
  CHECK_EQ(g.sends[rank()].bytes, g.recvs[rank()].bytes);
  copy_own(c, g.recvs[rank()].data, g.sends[rank()].data, g.sends[rank()].bytes);
  if (c == nullptr || !c->on_gpu()) return exchange_host(op);
  if (between_gpus(*c)) return exchange_device(*c, op);

  // By way of the host: what is sent goes down first, and what came goes up last.
  const ArenaScope scope(*c->host);
  const std::vector<BytePiece> ours = g.recvs;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    if (g.sends[r].bytes > 0) {
      char* const staged = static_cast<char*>(c->host->allocate(static_cast<size_t>(g.sends[r].bytes), "sent"));
      download_bytes(*c, staged, g.sends[r].data, static_cast<size_t>(g.sends[r].bytes));
      g.sends[r].data = staged;
    }
    if (g.recvs[r].bytes > 0) g.recvs[r].data = static_cast<char*>(c->host->allocate(static_cast<size_t>(g.recvs[r].bytes), "received"));
  }
  exchange_host(op);
  for (int r = 0; r < size(); ++r)
    if (r != rank() && ours[r].bytes > 0) upload_bytes(*c, ours[r].data, g.recvs[r].data, static_cast<size_t>(ours[r].bytes));
}

// The same between buffers of the host, without own parts.
void RankGroup::exchange_host(Registered& op) {
  Impl& g = *impl_;
  int64_t bytes = 0;
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || g.recvs[r].bytes == 0) continue;
    require(g.channel->recv(g.pending, g.recvs[r].data, g.recvs[r].bytes, r, kExchangeTag));
    op.moved.received += g.recvs[r].bytes;
    bytes += g.recvs[r].bytes;
  }
  for (int step = 1; step < size(); ++step) {
    const int r = (rank() + step) % size();  // not everyone to rank 0 first
    if (g.sends[r].bytes == 0) continue;
    require(g.channel->send(g.pending, g.sends[r].data, g.sends[r].bytes, r, kExchangeTag));
    op.moved.sent += g.sends[r].bytes;
    bytes += g.sends[r].bytes;
  }
  wait_for(g.pending, bytes);
}

// The same from GPU to GPU.
void RankGroup::exchange_device(Context& c, Registered& op) {
  Impl& g = *impl_;
  DeviceChannel& channel = device_channel();
  g.sends[rank()] = g.recvs[rank()] = {};
  int64_t sent = 0, received = 0;
  for (int r = 0; r < size(); ++r) {
    sent += g.sends[r].bytes;
    received += g.recvs[r].bytes;
  }
  if (sent + received == 0) return;
  require(channel.exchange(c.stream, g.sends, g.recvs));
  wait_for(channel);
  op.goes_on_in(c.stream);
  op.moved.sent += sent;
  op.moved.received += received;
}

void RankGroup::barrier(Purpose p) {
  if (size() == 1) return;
  Registered op(*impl_, "barrier", p, {});
  require(impl_->channel->barrier(impl_->pending));
  wait_for(impl_->pending);
}

void RankGroup::broadcast(Context& c, TensorView x, int root, Purpose p) {
  check_contiguous("broadcast", x);
  CHECK(root >= 0 && root < size(), "broadcast from {} in {} with {} ranks", root, name(), size());
  if (size() == 1 || x.bytes() == 0) return;
  const CommBytes bytes = broadcast_bytes(static_cast<int64_t>(x.bytes()), size(), rank() == root);
  Registered op(*impl_, "broadcast", p, bytes);
  if (between_gpus(c)) {
    DeviceChannel& channel = device_channel();
    require(channel.broadcast(c.stream, {static_cast<char*>(x.data), static_cast<int64_t>(x.bytes())}, root));
    wait_for(channel);
    op.goes_on_in(c.stream);
  } else if (c.on_gpu()) {  // by way of the host
    const ArenaScope scope(*c.host);
    const TensorView staged = c.host->tensor(x.dtype, x.shape, "broadcast");
    if (rank() == root) download(c, staged, x);
    require(impl_->channel->broadcast(impl_->pending, staged.data, x.bytes(), root));
    wait_for(impl_->pending, static_cast<int64_t>(x.bytes()));
    if (rank() != root) upload(c, x, staged);
  } else {
    require(impl_->channel->broadcast(impl_->pending, x.data, x.bytes(), root));
    wait_for(impl_->pending, static_cast<int64_t>(x.bytes()));
  }
  op.moved = bytes;
}

void RankGroup::broadcast(std::span<int64_t> x, int root, Purpose p) {
  Context host;
  broadcast(host, TensorView(x.data(), DType::i64, {static_cast<int64_t>(x.size())}), root, p);
}

void RankGroup::broadcast(std::string* text, int root, Purpose p) {
  int64_t bytes = static_cast<int64_t>(text->size());
  broadcast(std::span(&bytes, 1), root, p);
  text->resize(static_cast<size_t>(bytes));
  Context host;
  broadcast(host, TensorView(text->data(), DType::u8, {bytes}), root, p);
}

void RankGroup::gather(Context* c, char* y, const char* x, std::span<const int64_t> rows, int64_t row_bytes,
                       const Purpose& p) {
  int64_t before = 0;
  for (int r = 0; r < rank(); ++r) before += rows[r];
  char* own = y + before * row_bytes;
  if (size() == 1) return copy_own(c, own, x, rows[0] * row_bytes);
  Registered op(*impl_, "all_gather", p, all_gather_bytes(rows, row_bytes, rank()));
  for (int r = 0; r < size(); ++r) {
    impl_->sends[r] = {const_cast<char*>(x), rows[rank()] * row_bytes};
    impl_->recvs[r] = {y, rows[r] * row_bytes};
    y += rows[r] * row_bytes;
  }
  exchange(c, op);
}

void RankGroup::all_gather(Context& c, TensorView y, ConstTensorView x, std::span<const int64_t> rows, Purpose p) {
  check_contiguous("all_gather", x);
  check_contiguous("all_gather", y);
  check_rows("all_gather", rows, size(), y.rows());
  CHECK(x.dtype == y.dtype && x.rows() == rows[rank()] && row_bytes_of(x) == row_bytes_of(y),
        "all_gather: {} {} into {} {}, {} rows of it", dtype_name(x.dtype), x.shape.str(), dtype_name(y.dtype), y.shape.str(),
        rows[rank()]);
  gather(&c, static_cast<char*>(y.data), static_cast<const char*>(x.data), rows, row_bytes_of(x), p);
}

void RankGroup::all_gather(Context& c, TensorView y, ConstTensorView x, Purpose p) {
  check_contiguous("all_gather", x);
  check_contiguous("all_gather", y);
  CHECK(x.dtype == y.dtype && x.rows() * size() == y.rows() && row_bytes_of(x) == row_bytes_of(y),
        "all_gather: {} {} into {} {} over {} ranks", dtype_name(x.dtype), x.shape.str(), dtype_name(y.dtype), y.shape.str(),
        size());
  for (int64_t& r : impl_->equal_rows) r = x.rows();
  gather(&c, static_cast<char*>(y.data), static_cast<const char*>(x.data), impl_->equal_rows, row_bytes_of(x), p);
}

void RankGroup::all_gather(std::span<int64_t> y, std::span<const int64_t> x, Purpose p) {
  CHECK(y.size() == x.size() * size(), "all_gather: {} counts into {} over {} ranks", x.size(), y.size(), size());
  for (int64_t& r : impl_->equal_rows) r = static_cast<int64_t>(x.size());
  gather(nullptr, reinterpret_cast<char*>(y.data()), reinterpret_cast<const char*>(x.data()), impl_->equal_rows, sizeof(int64_t),
         p);
}

void RankGroup::all_to_all(Context& c, TensorView y, std::span<const int64_t> recv_rows, ConstTensorView x,
                           std::span<const int64_t> send_rows, Purpose p) {
  check_contiguous("all_to_all", x);
  check_contiguous("all_to_all", y);
  check_rows("all_to_all", recv_rows, size(), y.rows());
  check_rows("all_to_all", send_rows, size(), x.rows());
  CHECK(x.dtype == y.dtype && row_bytes_of(x) == row_bytes_of(y), "all_to_all: {} {} into {} {}", dtype_name(x.dtype),
        x.shape.str(), dtype_name(y.dtype), y.shape.str());
  const int64_t row_bytes = row_bytes_of(x);
  char* to = static_cast<char*>(y.data);
  const char* from = static_cast<const char*>(x.data);
  if (size() == 1) return copy_own(&c, to, from, x.rows() * row_bytes);
  Registered op(*impl_, "all_to_all", p, all_to_all_bytes(recv_rows, send_rows, row_bytes, rank()));
  for (int r = 0; r < size(); ++r) {
    impl_->sends[r] = {const_cast<char*>(from), send_rows[r] * row_bytes};
    impl_->recvs[r] = {to, recv_rows[r] * row_bytes};
    from += send_rows[r] * row_bytes;
    to += recv_rows[r] * row_bytes;
  }
  exchange(&c, op);
}

void RankGroup::exchange_counts(std::span<int64_t> from, std::span<const int64_t> to, Purpose p) {
  CHECK(from.size() == to.size() && to.size() % size() == 0, "exchange_counts: {} into {} over {} ranks", to.size(), from.size(),
        size());
  const int64_t each = static_cast<int64_t>(to.size()) / size();
  char* in = reinterpret_cast<char*>(from.data());
  char* out = reinterpret_cast<char*>(const_cast<int64_t*>(to.data()));
  const int64_t bytes = each * static_cast<int64_t>(sizeof(int64_t));
  if (size() == 1) return copy_own(nullptr, in, out, bytes);
  Registered op(*impl_, "all_to_all", p, exchange_counts_bytes(each, size()));
  for (int r = 0; r < size(); ++r) {
    impl_->sends[r] = {out + r * bytes, bytes};
    impl_->recvs[r] = {in + r * bytes, bytes};
  }
  exchange(nullptr, op);
}

// y = own part of the sum, in rounds of bounded scratch. All ranks know all parts, so they agree on the number of rounds.
template <typename T>
void RankGroup::sum_parts(Context& c, Registered& op, T* y, const T* x, std::span<const Range> parts) {
  Impl& g = *impl_;
  int64_t longest = 0;
  for (const Range& r : parts) longest = std::max(longest, r.size());
  const int64_t most = between_gpus(c) ? kDeviceSumScratchBytes : kSumScratchBytes;
  const int64_t piece = std::clamp<int64_t>(longest, 1, std::max<int64_t>(1, most / static_cast<int64_t>(sizeof(T)) / size()));
  ArenaScope scope(*c.workspace);
  T* scratch = static_cast<T*>(c.workspace->allocate(static_cast<size_t>(piece) * size() * sizeof(T), "ordered sum"));
  for (int64_t at = 0; at < longest; at += piece) {
    const auto clip = [&](const Range& r) { return std::clamp<int64_t>(r.size() - at, 0, piece); };
    const int64_t own = clip(parts[rank()]);
    for (int r = 0; r < size(); ++r) {
      const bool me = r == rank();
      T* slot = scratch + r * piece;
      const T* mine = x + parts[r].begin + at;
      g.sends[r] = {me ? nullptr : reinterpret_cast<char*>(const_cast<T*>(mine)),
                    me ? 0 : clip(parts[r]) * static_cast<int64_t>(sizeof(T))};
      g.recvs[r] = {me ? nullptr : reinterpret_cast<char*>(slot), me ? 0 : own * static_cast<int64_t>(sizeof(T))};
    }
    exchange(&c, op);
    const DType dtype = DTypeOf<T>::value;
    sum_in_order(c, TensorView(y + at, dtype, {own}), ConstTensorView(x + parts[rank()].begin + at, dtype, {own}),
                 ConstTensorView(scratch, dtype, {size(), piece}), rank());
  }
}

template <typename T>
void RankGroup::sum_whole(Context& c, Registered& op, T* x, int64_t count) {
  Impl& g = *impl_;
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  ArenaScope scope(*c.workspace);
  if (bytes <= kGatherSumBytes) {
    T* scratch = static_cast<T*>(c.workspace->allocate(static_cast<size_t>(bytes) * size(), "ordered sum"));
    for (int r = 0; r < size(); ++r) {
      const bool me = r == rank();
      T* slot = scratch + r * count;
      g.sends[r] = {reinterpret_cast<char*>(x), me ? 0 : bytes};
      g.recvs[r] = {reinterpret_cast<char*>(slot), me ? 0 : bytes};
    }
    exchange(&c, op);
    const TensorView all(x, DTypeOf<T>::value, {count});
    sum_in_order(c, all, all, ConstTensorView(scratch, all.dtype, {size(), count}), rank());
    return;
  }
  for (int r = 0; r < size(); ++r) g.equal_parts[r] = part_of(count, size(), r);
  const Range own = g.equal_parts[rank()];
  sum_parts(c, op, x + own.begin, x, g.equal_parts);
  for (int r = 0; r < size(); ++r) {
    const bool me = r == rank();
    g.sends[r] = {reinterpret_cast<char*>(x + own.begin), me ? 0 : own.size() * static_cast<int64_t>(sizeof(T))};
    g.recvs[r] = {reinterpret_cast<char*>(x + g.equal_parts[r].begin),
                  me ? 0 : g.equal_parts[r].size() * static_cast<int64_t>(sizeof(T))};
  }
  exchange(&c, op);
}

void RankGroup::reduce_scatter(Context& c, TensorView y, ConstTensorView x, std::span<const Range> parts, Purpose p) {
  check_contiguous("reduce_scatter", x);
  check_contiguous("reduce_scatter", y);
  CHECK(static_cast<int>(parts.size()) == size(), "reduce_scatter: {} parts for {} ranks", parts.size(), size());
  for (const Range& r : parts)
    CHECK(r.begin >= 0 && r.end >= r.begin && r.end <= x.shape.elements(), "reduce_scatter: part [{}, {}) of {}", r.begin, r.end,
          x.shape.str());
  CHECK(x.dtype == y.dtype && (x.dtype == DType::f32 || x.dtype == DType::f64), "reduce_scatter: {} into {}", dtype_name(x.dtype),
        dtype_name(y.dtype));
  CHECK(y.shape.elements() == parts[rank()].size(), "reduce_scatter: y is {}, its part has {}", y.shape.str(),
        parts[rank()].size());
  if (size() == 1) {
    const auto width = static_cast<int64_t>(dtype_bytes(x.dtype));
    return copy_own(&c, static_cast<char*>(y.data), static_cast<const char*>(x.data) + parts[0].begin * width,
                    parts[0].size() * width);
  }
  Registered op(*impl_, "reduce_scatter", p, reduce_scatter_bytes(parts, x.dtype, rank()));
  if (x.dtype == DType::f32)
    sum_parts(c, op, y.ptr<float>(), x.ptr<float>(), parts);
  else
    sum_parts(c, op, y.ptr<double>(), x.ptr<double>(), parts);
}

void RankGroup::all_reduce(Context& c, TensorView x, Purpose p) {
  check_contiguous("all_reduce", x);
  CHECK(x.dtype == DType::f32 || x.dtype == DType::f64, "all_reduce: {}", dtype_name(x.dtype));
  if (size() == 1 || x.empty()) return;
  Registered op(*impl_, "all_reduce", p, all_reduce_bytes(x.shape.elements(), x.dtype, size(), rank()));
  if (x.dtype == DType::f32)
    sum_whole(c, op, x.ptr<float>(), x.shape.elements());
  else
    sum_whole(c, op, x.ptr<double>(), x.shape.elements());
}

void RankGroup::all_reduce(std::span<int64_t> x, Reduction reduction, Purpose p) {
  if (size() == 1 || x.empty()) return;
  CHECK(x.size() <= (size_t{1} << 20), "all_reduce: {} integers; counts are meant, not data", x.size());
  const CommBytes bytes = all_reduce_int_bytes(static_cast<int64_t>(x.size()), size());
  Registered op(*impl_, "all_reduce", p, bytes);
  require(impl_->channel->all_reduce(impl_->pending, x.data(), static_cast<int>(x.size()), reduction));
  wait_for(impl_->pending);
  op.moved = bytes;
}

bool RankGroup::any(bool mine, Purpose p) {
  int64_t x = mine ? 1 : 0;
  all_reduce(std::span(&x, 1), Reduction::max, p);
  return x != 0;
}

bool RankGroup::every(bool mine, Purpose p) { return !any(!mine, p); }

Status RankGroup::agree(const Status& mine, Purpose p) {
  int64_t first = mine ? size() : rank();
  all_reduce(std::span(&first, 1), Reduction::min, p);
  if (first == size()) return Status::ok();
  if (size() == 1) return mine;
  std::string message = fmt::format("rank {}: {}", impl_->world->rank_, mine.message());
  broadcast(&message, static_cast<int>(first), p);
  return Status::error(message);
}

RankGroup::Request RankGroup::start(const char* kind, Context& c, void* data, int64_t bytes, int peer, int tag, const Purpose& p) {
  Impl& g = *impl_;
  CHECK(peer >= 0 && peer < size() && peer != rank(), "{} \"{}\": rank {} with itself or outside: {} of {}", kind, p.name, rank(),
        peer, size());
  CHECK(tag >= 0 && tag <= kTagMax, "{} \"{}\": tag {}", kind, p.name, tag);
  const bool sending = kind[0] == 's';
  int slot = 0;
  while (slot < kRequestsMax && g.slots[slot].ticket >= 0) ++slot;
  CHECK(slot < kRequestsMax, "{} \"{}\": {} requests are open in {}", kind, p.name, kRequestsMax, name());
  Impl::Slot& s = g.slots[slot];
  s.name = p.name;
  s.bytes = sending ? CommBytes{bytes, 0} : CommBytes{0, bytes};
  s.ticket = g.world->watchdog_->begin({.kind = kind,
                                        .name = p.name,
                                        .group = g.id,
                                        .seq = ++g.messages[{peer, tag, sending ? 0 : 1}],
                                        .peer = g.members[peer],
                                        .tag = tag,
                                        .bytes = bytes,
                                        .file = p.file,
                                        .line = p.line,
                                        .deadline_s = p.deadline_s,
                                        .background = true});
  s.peer = peer;
  s.tag = tag;
  if (between_gpus(c) && bytes > 0) {
    if (!g.device_links) g.world->links_.push_back(&g.device_links.emplace(*g.channel));
    DeviceMessage& m = s.message;
    m.piece = {static_cast<char*>(data), bytes};
    m.stream = c.stream;
    m.word = &g.world->words_[s.ticket];
    m.mark = ++g.world->last_mark_;
    require(g.device_links->start(m, peer, tag, sending));
    return {slot};
  }
  if (c.on_gpu()) {
    s.staged.resize(static_cast<size_t>(bytes));
    if (sending) {
      download_bytes(c, s.staged.data(), data, s.staged.size());
    } else {
      s.context = &c;
      s.device = data;
    }
    data = s.staged.data();
  }
  if (sending)
    require(g.channel->send(s.pending, data, static_cast<size_t>(bytes), peer, tag));
  else
    require(g.channel->recv(s.pending, data, static_cast<size_t>(bytes), peer, tag));
  return {slot};
}

RankGroup::Request RankGroup::start_send(Context& c, ConstTensorView x, int to, int tag, Purpose p) {
  check_contiguous("send", x);
  return start("send", c, const_cast<void*>(x.data), static_cast<int64_t>(x.bytes()), to, tag, p);
}

RankGroup::Request RankGroup::start_recv(Context& c, TensorView x, int from, int tag, Purpose p) {
  check_contiguous("recv", x);
  return start("recv", c, x.data, static_cast<int64_t>(x.bytes()), from, tag, p);
}

bool RankGroup::test(Request request) {
  Impl::Slot& s = impl_->open(request);
  if (s.message.state != DeviceMessage::State::none) {
    impl_->device_links->want(s.message, s.peer, s.tag, s.bytes.sent > 0);
    progress();
    if (s.message.state != DeviceMessage::State::in_stream || !device_event::done(s.message.behind)) return false;
  } else {
    bool done = false;
    require(s.pending.test(&done));
    if (!done) {
      progress();
      return false;
    }
    if (s.context != nullptr) upload_bytes(*s.context, s.device, s.staged.data(), s.staged.size());
    s.context = nullptr;
  }
  impl_->world->watchdog_->end(s.ticket);
  leave(request);
  return true;
}

// Counts a request that is complete, or in a stream, and frees its place.
void RankGroup::leave(Request request) {
  Impl::Slot& s = impl_->slots[request.slot];
  s.ticket = -1;
  s.message.state = DeviceMessage::State::none;
  Traffic& t = impl_->traffic(s.name);
  ++t.calls;
  t.bytes.sent += s.bytes.sent;
  t.bytes.received += s.bytes.received;
}

void RankGroup::wait(Request request) {
  Impl::Slot& s = impl_->open(request);
  DeviceMessage& m = s.message;
  const bool between_gpus = m.state != DeviceMessage::State::none;
  if (!between_gpus && test(request)) return;
  impl_->world->watchdog_->waiting(s.ticket);
  const char* name = s.name;
  const double start = now_s();
  if (between_gpus) {
    impl_->device_links->want(m, s.peer, s.tag, s.bytes.sent > 0);
    progress();
    for (Backoff backoff; m.state != DeviceMessage::State::in_stream; backoff.pause()) progress();
    device_event::wait(m.stream, m.behind);
    impl_->world->watchdog_->in_stream(s.ticket, m.word, m.mark);
    leave(request);
  } else {
    for (Backoff backoff(s.bytes.sent + s.bytes.received); !test(request);) backoff.pause();
  }
  impl_->traffic(name).wait_s += now_s() - start;
}

void RankGroup::send(Context& c, ConstTensorView x, int to, int tag, Purpose p) { wait(start_send(c, x, to, tag, p)); }
void RankGroup::recv(Context& c, TensorView x, int from, int tag, Purpose p) { wait(start_recv(c, x, from, tag, p)); }

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

CommBytes broadcast_bytes(int64_t bytes, int size, bool root) {
  if (size == 1) return {};
  return root ? CommBytes{(size - 1) * bytes, 0} : CommBytes{0, bytes};
}

CommBytes all_gather_bytes(std::span<const int64_t> rows, int64_t row_bytes, int rank) {
  CommBytes b;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    b.sent += rows[rank] * row_bytes;
    b.received += rows[r] * row_bytes;
  }
  return b;
}

CommBytes all_to_all_bytes(std::span<const int64_t> recv_rows, std::span<const int64_t> send_rows, int64_t row_bytes, int rank) {
  CommBytes b;
  for (size_t r = 0; r < recv_rows.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    b.sent += send_rows[r] * row_bytes;
    b.received += recv_rows[r] * row_bytes;
  }
  return b;
}

CommBytes exchange_counts_bytes(int64_t counts_per_rank, int size) {
  const int64_t bytes = 8 * counts_per_rank * (size - 1);
  return {bytes, bytes};
}

CommBytes reduce_scatter_bytes(std::span<const Range> parts, DType dtype, int rank) {
  const auto width = static_cast<int64_t>(dtype_bytes(dtype));
  CommBytes b;
  for (size_t r = 0; r < parts.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    b.sent += parts[r].size() * width;
    b.received += parts[rank].size() * width;
  }
  return b;
}

CommBytes all_reduce_bytes(int64_t elements, DType dtype, int size, int rank) {
  const int64_t bytes = elements * static_cast<int64_t>(dtype_bytes(dtype));
  if (size == 1) return {};
  if (bytes <= RankGroup::kGatherSumBytes) return {(size - 1) * bytes, (size - 1) * bytes};
  const int64_t own = part_of(elements, size, rank).size() * static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t moved = bytes + (size - 2) * own;
  return {moved, moved};
}

CommBytes all_reduce_int_bytes(int64_t count, int size) {
  const int64_t bytes = 8 * count * (size - 1);
  return {bytes, bytes};
}

}  // namespace lockstep
