// Run by any number of ranks: every rank runs every test, and each knows what all the others put in, so it can say what must come
// out.

#include "parallel/collective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>

#include "core/device.h"
#include "core/rng.h"
#include "parallel/groups.h"
#include "parallel/testing.h"

namespace lockstep {
namespace {

RankWorld* world = nullptr;

int ranks() { return world->size(); }
int me() { return world->rank(); }

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What rank `rank` holds at place i: either sign and 24 binary orders of magnitude, so that sums in another order have other
// bits.
template <typename T>
T value(uint64_t seed, int rank, int64_t i) {
  const uint64_t h = mix(seed * 1000003 + mix(static_cast<uint64_t>(rank) << 40 | static_cast<uint64_t>(i)));
  const T mantissa = static_cast<T>(1) + static_cast<T>(h >> 40) / static_cast<T>(1 << 24);
  return std::ldexp((h & 1) != 0 ? mantissa : -mantissa, static_cast<int>((h >> 8) % 24));
}

template <typename T>
std::vector<T> values(uint64_t seed, int rank, int64_t n) {
  std::vector<T> v(n);
  for (int64_t i = 0; i < n; ++i) v[i] = value<T>(seed, rank, i);
  return v;
}

template <typename T>
std::vector<T> serial_sum(uint64_t seed, int64_t n) {
  std::vector<T> sum(n);
  for (int64_t i = 0; i < n; ++i) {
    T s = value<T>(seed, 0, i);
    for (int r = 1; r < ranks(); ++r) s += value<T>(seed, r, i);
    sum[i] = s;
  }
  return sum;
}

template <typename T>
int64_t bit_differences(const std::vector<T>& a, const std::vector<T>& b) {
  EXPECT_EQ(a.size(), b.size());
  int64_t n = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) n += std::memcmp(&a[i], &b[i], sizeof(T)) != 0;
  return n;
}

// Numbers in the memory of a context.
template <typename T>
class Held {
 public:
  Held(Context& c, const std::vector<T>& values) : c_(c), scope_(*c.workspace), view_(c.workspace->tensor(DTypeOf<T>::value, {size(values)}, "held")) {
    set(values);
  }
  void set(const std::vector<T>& values) { upload(c_, view_, ConstTensorView(values.data(), view_.dtype, view_.shape)); }
  TensorView view() const { return view_; }
  TensorView rows(int64_t columns) const { return view_.reshape({view_.rows() / columns, columns}); }
  std::vector<T> get() const {
    std::vector<T> values(static_cast<size_t>(view_.rows()));
    download(c_, TensorView(values.data(), view_.dtype, view_.shape), view_);
    return values;
  }

 private:
  static int64_t size(const std::vector<T>& values) { return static_cast<int64_t>(values.size()); }
  Context& c_;
  ArenaScope scope_;
  TensorView view_;
};

class World : public ::testing::Test {
 protected:
  RankGroup& all_ = world->all();
};

// On the GPU there are two ways, of which RankWorld takes one: from GPU to GPU where it can.
class Collective : public ::testing::TestWithParam<Device> {
 protected:
  DeviceContext context_{GetParam(), 2, size_t{1} << 30};
  RankGroup& all_ = world->all();
  int64_t sum_scratch() const {
    return GetParam() == Device::gpu && world->device_way().find("host") == std::string::npos ? RankGroup::kDeviceSumScratchBytes : RankGroup::kSumScratchBytes;
  }
};
INSTANTIATE_TEST_SUITE_P(, Collective, ::testing::Values(Device::cpu, Device::gpu), [](const auto& info) { return std::string(device_name(info.param)); });

TEST_F(World, WorldIsEveryone) {
  EXPECT_EQ(all_.size(), ranks());
  EXPECT_EQ(all_.rank(), me());
  for (int r = 0; r < ranks(); ++r) EXPECT_EQ(all_.members()[r], r);
  all_.barrier("test");
}

TEST_P(Collective, Broadcast) {
  for (int root = 0; root < ranks(); ++root) {
    for (int64_t n : {0, 1, 1000, 300000}) {
      const Held<float> x(context_, values<float>(1, me(), n));
      all_.broadcast(context_, x.view(), root, "test");
      EXPECT_EQ(bit_differences(x.get(), values<float>(1, root, n)), 0);
    }
    std::string text(static_cast<size_t>(me()) * 7, static_cast<char>('a' + me()));
    all_.broadcast(&text, root, "test");
    EXPECT_EQ(text, std::string(static_cast<size_t>(root) * 7, static_cast<char>('a' + root)));
  }
}

TEST_P(Collective, AllGather) {
  std::mt19937 random(7);  // the same on every rank
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<int64_t> rows(ranks());
    for (int64_t& r : rows) r = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 50);
    if (trial == 0) std::fill(rows.begin(), rows.end(), 0);
    const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    constexpr int64_t kColumns = 3;
    std::vector<float> want;
    for (int r = 0; r < ranks(); ++r) {
      const std::vector<float> v = values<float>(trial, r, rows[r] * kColumns);
      want.insert(want.end(), v.begin(), v.end());
    }
    const std::vector<float> mine = values<float>(trial, me(), rows[me()] * kColumns);
    std::vector<float> fill(total * kColumns, -1.0f);
    const Held<float> x(context_, mine);
    Held<float> y(context_, fill);
    const TensorView to = y.rows(kColumns);
    all_.all_gather(context_, to, x.rows(kColumns), rows, "test");
    EXPECT_EQ(bit_differences(y.get(), want), 0);

    // In place: own rows already stand where they belong.
    const int64_t before = std::accumulate(rows.begin(), rows.begin() + me(), int64_t{0});
    std::copy(mine.begin(), mine.end(), fill.begin() + before * kColumns);
    y.set(fill);
    all_.all_gather(context_, to, to.slice(before, rows[me()]), rows, "test");
    EXPECT_EQ(bit_differences(y.get(), want), 0);
  }
  std::vector<int64_t> counts(2 * ranks());
  const int64_t mine[] = {me(), 10 * me()};
  all_.all_gather(std::span(counts), mine, "test");
  for (int r = 0; r < ranks(); ++r) {
    EXPECT_EQ(counts[2 * r], r);
    EXPECT_EQ(counts[2 * r + 1], 10 * r);
  }
}

// Sends rows by a matrix of counts that every rank knows, and checks every row.
void check_all_to_all(Context& c, RankGroup& group, const std::vector<std::vector<int64_t>>& counts, int64_t columns,
                      uint64_t seed) {
  const int n = group.size(), rank = group.rank();
  std::vector<int64_t> send_rows = counts[rank], recv_rows(n);
  for (int r = 0; r < n; ++r) recv_rows[r] = counts[r][rank];
  const auto row = [&](int from, int to) { return seed * 100 + static_cast<uint64_t>(from) * 64 + static_cast<uint64_t>(to); };
  std::vector<float> x, want;
  for (int r = 0; r < n; ++r) {
    const std::vector<float> out = values<float>(row(rank, r), 0, send_rows[r] * columns),
                             in = values<float>(row(r, rank), 0, recv_rows[r] * columns);
    x.insert(x.end(), out.begin(), out.end());
    want.insert(want.end(), in.begin(), in.end());
  }
  const Held<float> from(c, x), to(c, std::vector<float>(want.size(), -1.0f));
  std::vector<int64_t> learned(n);
  group.exchange_counts(learned, send_rows, "test counts");
  EXPECT_EQ(learned, recv_rows);
  group.all_to_all(c, to.rows(columns), recv_rows, from.rows(columns), send_rows, "test rows");
  EXPECT_EQ(bit_differences(to.get(), want), 0);
}

TEST_P(Collective, AllToAllRandom) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<std::vector<int64_t>> counts(ranks(), std::vector<int64_t>(ranks()));
    for (auto& from : counts)
      for (int64_t& n : from) n = trial == 0 || random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 40);
    check_all_to_all(context_, all_, counts, 1 + trial % 5, trial);
  }
}

TEST_P(Collective, AllToAllWorstSkew) {
  // Everything of everyone to one rank, then everything of one rank to everyone.
  for (int one : {0, ranks() - 1}) {
    std::vector<std::vector<int64_t>> to_one(ranks(), std::vector<int64_t>(ranks())), from_one = to_one;
    for (int r = 0; r < ranks(); ++r) to_one[r][one] = 4000;
    for (int r = 0; r < ranks(); ++r) from_one[one][r] = 4000;
    check_all_to_all(context_, all_, to_one, 64, 1);
    check_all_to_all(context_, all_, from_one, 64, 2);
  }
}

template <typename T>
void check_sums(Context& c, RankGroup& group, int64_t n, uint64_t seed) {
  const std::vector<T> want = serial_sum<T>(seed, n);
  const std::vector<T> mine = values<T>(seed, me(), n);
  const Held<T> x(c, mine);
  // reduce_scatter over uneven parts: one empty, one long, some of x in no part.
  std::vector<Range> parts;
  std::mt19937 random(static_cast<unsigned>(seed));
  int64_t at = 0;
  for (int r = 0; r < ranks(); ++r) {
    const int64_t room = (n - at) / (ranks() - r);
    const int64_t size = r == 1 || room <= 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(room + 1));
    parts.push_back({at, at + size});
    at += size + (at + size < n ? 1 : 0);
  }
  const Range own = parts[me()];
  const std::vector<T> part_want(want.begin() + own.begin, want.begin() + own.end);
  const Held<T> y(c, std::vector<T>(own.size()));
  group.reduce_scatter(c, y.view(), x.view(), parts, "test");
  EXPECT_EQ(bit_differences(y.get(), part_want), 0) << n;
  EXPECT_EQ(bit_differences(x.get(), mine), 0) << "x was changed";
  const Held<T> in_place(c, mine);
  group.reduce_scatter(c, in_place.view().slice(own.begin, own.size()), in_place.view(), parts, "test");
  const std::vector<T> all = in_place.get();
  EXPECT_EQ(bit_differences(std::vector<T>(all.begin() + own.begin, all.begin() + own.end), part_want), 0) << n;

  group.all_reduce(c, x.view(), "test");
  EXPECT_EQ(bit_differences(x.get(), want), 0) << n;
}

TEST_P(Collective, SumsHaveTheBitsOfASerialSum) {
  // 1024 floats are kGatherSumBytes. The last is longer than a round of scratch.
  for (int64_t n : {0, 1, 2, 7, 1023, 1024, 1025, 5000}) check_sums<float>(context_, all_, n, 100 + n);
  for (int64_t n : {1, 511, 513, 4000}) check_sums<double>(context_, all_, n, 200 + n);
  const int64_t long_enough = sum_scratch() / 4 + 150'000;
  check_sums<float>(context_, all_, long_enough, 300);
  const int64_t held = 3 * long_enough * static_cast<int64_t>(sizeof(float));  // x, y and a copy
  EXPECT_LE(context_.workspace().high_bytes(), static_cast<size_t>(sum_scratch() + held) + 16384);
}

TEST_F(World, OrderMattersForTheseValues) {
  // The negative control of the test above: the same sum from the last rank to the first differs.
  if (ranks() < 3) return;
  int64_t differ = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    float up = value<float>(100, 0, i), down = value<float>(100, ranks() - 1, i);
    for (int r = 1; r < ranks(); ++r) up += value<float>(100, r, i);
    for (int r = ranks() - 2; r >= 0; --r) down += value<float>(100, r, i);
    differ += std::bit_cast<uint32_t>(up) != std::bit_cast<uint32_t>(down);
  }
  EXPECT_GT(differ, 100);
}

TEST_F(World, IntegersAndVotes) {
  int64_t sum[] = {me(), 1}, most[] = {me(), -me()}, least[] = {me() + 5};
  all_.all_reduce(sum, Reduction::sum, "test");
  all_.all_reduce(most, Reduction::max, "test");
  all_.all_reduce(least, Reduction::min, "test");
  EXPECT_EQ(sum[0], ranks() * (ranks() - 1) / 2);
  EXPECT_EQ(sum[1], ranks());
  EXPECT_EQ(most[0], ranks() - 1);
  EXPECT_EQ(most[1], 0);
  EXPECT_EQ(least[0], 5);
  EXPECT_TRUE(all_.any(me() == ranks() - 1, "test"));
  EXPECT_FALSE(all_.any(false, "test"));
  EXPECT_TRUE(all_.every(true, "test"));
  EXPECT_FALSE(all_.every(me() != 0, "test"));
}

TEST_F(World, AgreeGivesEveryoneTheFirstError) {
  EXPECT_TRUE(all_.agree(Status::ok(), "test").is_ok());
  const Status last = all_.agree(me() == ranks() - 1 ? Status::error("disk full") : Status::ok(), "test");
  EXPECT_NE(last.message().find("disk full"), std::string::npos);
  const Status every = all_.agree(errorf("of {}", me()), "test");
  EXPECT_NE(every.message().find("of 0"), std::string::npos) << every.message();
}

TEST_P(Collective, PointToPoint) {
  if (ranks() == 1) return;
  const int next = (me() + 1) % ranks(), previous = (me() + ranks() - 1) % ranks();
  for (int64_t n : {0, 1, 1000, 200000}) {
    const Held<float> out(context_, values<float>(n, me(), n)), in(context_, std::vector<float>(n));
    const RankGroup::Request sent = all_.start_send(context_, out.view(), next, 3, "test");
    all_.recv(context_, in.view(), previous, 3, "test");
    all_.wait(sent);
    EXPECT_EQ(bit_differences(in.get(), values<float>(n, previous, n)), 0);
  }
  // Several in the air, received in another order than sent; of one tag in order.
  std::vector<std::unique_ptr<Held<float>>> out, in;
  std::vector<RankGroup::Request> requests;
  constexpr int kMessages = 12;
  for (int i = 0; i < kMessages; ++i) {
    out.push_back(std::make_unique<Held<float>>(context_, values<float>(i, me(), 10 + i)));
    in.push_back(std::make_unique<Held<float>>(context_, std::vector<float>(10 + i)));
  }
  for (int i = 0; i < kMessages; ++i) requests.push_back(all_.start_send(context_, out[i]->view(), next, i % 3, "test"));
  for (int tag : {2, 0, 1})
    for (int i = tag; i < kMessages; i += 3) {
      const RankGroup::Request r = all_.start_recv(context_, in[i]->view(), previous, tag, "test");
      while (!all_.test(r)) {
      }
    }
  for (const RankGroup::Request& r : requests) all_.wait(r);
  for (int i = 0; i < kMessages; ++i) EXPECT_EQ(bit_differences(in[i]->get(), values<float>(i, previous, 10 + i)), 0) << i;
  for (; !in.empty(); out.pop_back()) in.pop_back();  // the last first: each gives its memory back to where it was
}

TEST_P(Collective, CountedBytesAreThePredictedOnes) {
  RankWorld& w = *world;
  const int n = ranks();
  w.reset_traffic();
  std::vector<int64_t> rows(n);
  for (int r = 0; r < n; ++r) rows[r] = r + 1;
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const Held<float> x(context_, values<float>(1, me(), rows[me()] * 2)), y(context_, std::vector<float>(total * 2));
  all_.all_gather(context_, y.rows(2), x.rows(2), rows, "gather");
  std::vector<int64_t> send_rows(n), recv_rows(n);
  for (int r = 0; r < n; ++r) {
    send_rows[r] = (me() + 2 * r) % 5;
    recv_rows[r] = (r + 2 * me()) % 5;
  }
  const Held<double> a(context_, std::vector<double>(std::accumulate(send_rows.begin(), send_rows.end(), int64_t{0}))),
      b(context_, std::vector<double>(std::accumulate(recv_rows.begin(), recv_rows.end(), int64_t{0})));
  all_.all_to_all(context_, b.view(), recv_rows, a.view(), send_rows, "dispatch");
  std::vector<int64_t> from(3 * n), to(3 * n);
  all_.exchange_counts(from, to, "counts");
  const std::vector<int64_t> sizes = {1, 7, 1024, 1025, 100001};
  for (int64_t size : sizes) {
    const Held<float> g(context_, std::vector<float>(size));
    all_.all_reduce(context_, g.view(), "grad");
    std::vector<Range> parts;
    for (int r = 0; r < n; ++r) parts.push_back(part_of(size, n, n - 1 - r));
    const Held<float> part(context_, std::vector<float>(parts[me()].size()));
    all_.reduce_scatter(context_, part.view(), g.view(), parts, "scatter");
  }
  const Held<float> weights(context_, std::vector<float>(321));
  all_.broadcast(context_, weights.view(), n - 1, "weights");
  int64_t counts[5] = {};
  all_.all_reduce(counts, Reduction::sum, "int");
  if (n > 1) {
    const Held<float> hop(context_, std::vector<float>(50));
    if (me() == 0) all_.send(context_, hop.view(), 1, 0, "hop");
    if (me() == 1) all_.recv(context_, hop.view(), 0, 0, "hop");
  }
  all_.barrier("end");

  if (n == 1) {
    EXPECT_TRUE(w.traffic().empty());  // a group of one moves and counts nothing
    return;
  }
  const auto counted = [&](const char* name) { return w.traffic().at(name).bytes; };
  EXPECT_EQ(counted("gather"), all_gather_bytes(rows, 8, me()));
  EXPECT_EQ(counted("dispatch"), all_to_all_bytes(recv_rows, send_rows, 8, me()));
  EXPECT_EQ(counted("counts"), exchange_counts_bytes(3, n));
  CommBytes grad, scatter;
  for (int64_t size : sizes) {
    const CommBytes g = all_reduce_bytes(size, DType::f32, n, me());
    std::vector<Range> parts;
    for (int r = 0; r < n; ++r) parts.push_back(part_of(size, n, n - 1 - r));
    const CommBytes s = reduce_scatter_bytes(parts, DType::f32, me());
    grad = {grad.sent + g.sent, grad.received + g.received};
    scatter = {scatter.sent + s.sent, scatter.received + s.received};
  }
  EXPECT_EQ(counted("grad"), grad);
  EXPECT_EQ(counted("scatter"), scatter);
  EXPECT_EQ(w.traffic().at("grad").calls, static_cast<int64_t>(sizes.size()));
  EXPECT_EQ(counted("weights"), broadcast_bytes(321 * 4, n, me() == n - 1));
  EXPECT_EQ(counted("int"), all_reduce_int_bytes(5, n));
  EXPECT_EQ(counted("end"), CommBytes{});
  if (me() == 0) {
    EXPECT_EQ(counted("hop"), (CommBytes{200, 0}));
  }
  if (me() == 1) {
    EXPECT_EQ(counted("hop"), (CommBytes{0, 200}));
  }
  // What is sent is received.
  int64_t balance = 0;
  for (const auto& [name, t] : w.traffic()) balance += t.bytes.sent - t.bytes.received;
  all_.all_reduce(std::span(&balance, 1), Reduction::sum, "balance");
  EXPECT_EQ(balance, 0);
}

TEST_F(World, GroupsOfEveryLayout) {
  for (const Layout& layout : possible_layouts({.ranks = ranks(), .layers = 8, .experts = 8, .output_groups = 8})) {
    SCOPED_TRACE(layout.str());
    const Grid grid(layout);
    Groups groups = make_groups(*world, grid, "test " + layout.str());
    const auto check = [&](RankGroup& g, const std::vector<int>& members) {
      ASSERT_EQ(g.members(), members);
      ASSERT_EQ(members[g.rank()], me());
      std::vector<int64_t> seen(g.size());
      const int64_t mine = me();
      g.all_gather(std::span(seen), std::span(&mine, 1), "members");
      EXPECT_TRUE(std::equal(seen.begin(), seen.end(), members.begin()));
    };
    check(groups.tp, grid.tp_group(me()));
    check(groups.pp, grid.pp_chain(me()));
    check(groups.dp, grid.dp_group(me()));
    check(groups.ep, grid.ep_group(me()));
    check(groups.expert_replicas, grid.expert_replicas(me()));
    EXPECT_EQ(groups.embedding.has_value(), grid.first_stage(me()) || grid.last_stage(me()));
    if (groups.embedding) check(*groups.embedding, grid.embedding_group(me()));
  }
}

TEST_P(Collective, GroupsWorkSideBySide) {
  // Halves of the world, each with its own traffic, ragged in number.
  if (ranks() < 4) return;
  const bool low = me() < ranks() / 2;
  std::vector<int> members;
  for (int r = 0; r < ranks(); ++r)
    if ((r < ranks() / 2) == low) members.push_back(r);
  RankGroup half = world->make_group(fmt::format("{} half {}", low ? "low" : "high", device_name(GetParam())), members);
  const int size = half.size();
  for (int trial = 0; trial < (low ? 20 : 7); ++trial) {
    std::vector<std::vector<int64_t>> counts(size, std::vector<int64_t>(size));
    for (int a = 0; a < size; ++a)
      for (int b = 0; b < size; ++b) counts[a][b] = (a * 3 + b * 5 + trial) % 7;
    check_all_to_all(context_, half, counts, 2, trial);
  }
}

TEST_F(World, WrongUseIsNamed) {
  if (Channel::launched().value()) return;  // a death test starts this program again, which a rank must not
  CpuContext context(1);
  std::vector<float> x(4), y(5);
  const auto view = [](auto& v) { return TensorView(v.data(), DTypeOf<std::decay_t<decltype(v[0])>>::value, {static_cast<int64_t>(v.size())}); };
  const std::vector<int64_t> rows = {4}, wrong = {3};
  EXPECT_DEATH(all_.all_gather(context, view(y), view(x), rows, "test"), "counts of 4 rows for a view of 5");
  EXPECT_DEATH(all_.all_to_all(context, view(x), rows, view(x), wrong, "test"), "counts of 3 rows for a view of 4");
  std::vector<int64_t> ints(3);
  EXPECT_DEATH(all_.all_reduce(context, view(ints), "test"), "all_reduce: i64");
  EXPECT_DEATH(world->make_group("other", {0, 1}), "ascending ranks below 1");
  EXPECT_DEATH(all_.start_send(context, view(x), 0, 0, "test"), "with itself or outside");
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world, 60);
}
