#include "parallel/collective.h"

#include <cstring>

#include "core/device.h"
#include "ops/sum/sum.h"
#include "parallel/group_state.h"

namespace lockstep {

namespace {

constexpr int kExchangeTag = Channel::kTagMax;  // of messages inside collectives
constexpr int kBlocksMax = 16;                  // of a GPU in an operation between GPUs; each costs about 18 MiB of its memory

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

}  // namespace

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

// What messages of any group between GPUs can do, they do now.
void RankGroup::progress() {
  for (DeviceLinks* links : impl_->world->links_) require(links->progress());
}

bool RankGroup::between_gpus() const { return impl_->world->devices_; }
bool RankGroup::between_gpus(const Context& c) const { return c.on_gpu() && between_gpus(); }

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
}  // namespace lockstep
