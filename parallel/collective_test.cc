// Run by any number of ranks: every rank runs every test, and each knows what all the others put in, so it can say what must come
// out.

#include "parallel/collective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>

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

template <typename T>
TensorView view(std::vector<T>& v) {
  return TensorView(v.data(), DTypeOf<T>::value, {static_cast<int64_t>(v.size())});
}

class Collective : public ::testing::Test {
 protected:
  CpuContext context_{2, size_t{64} << 20};
  RankGroup& all_ = world->all();
};

TEST_F(Collective, WorldIsEveryone) {
  EXPECT_EQ(all_.size(), ranks());
  EXPECT_EQ(all_.rank(), me());
  for (int r = 0; r < ranks(); ++r) EXPECT_EQ(all_.members()[r], r);
  all_.barrier("test");
}

TEST_F(Collective, Broadcast) {
  for (int root = 0; root < ranks(); ++root) {
    for (int64_t n : {0, 1, 1000, 300000}) {
      std::vector<float> x = values<float>(1, me(), n);
      all_.broadcast(context_, view(x), root, "test");
      EXPECT_EQ(bit_differences(x, values<float>(1, root, n)), 0);
    }
    std::string text(static_cast<size_t>(me()) * 7, static_cast<char>('a' + me()));
    all_.broadcast(&text, root, "test");
    EXPECT_EQ(text, std::string(static_cast<size_t>(root) * 7, static_cast<char>('a' + root)));
  }
}

TEST_F(Collective, AllGather) {
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
    std::vector<float> x = values<float>(trial, me(), rows[me()] * kColumns);
    std::vector<float> y(total * kColumns, -1.0f);
    const TensorView to(y.data(), DType::f32, {total, kColumns});
    all_.all_gather(context_, to, ConstTensorView(x.data(), DType::f32, {rows[me()], kColumns}), rows, "test");
    EXPECT_EQ(bit_differences(y, want), 0);

    // In place: own rows already stand where they belong.
    const int64_t before = std::accumulate(rows.begin(), rows.begin() + me(), int64_t{0});
    std::fill(y.begin(), y.end(), -1.0f);
    std::copy(x.begin(), x.end(), y.begin() + before * kColumns);
    all_.all_gather(context_, to, to.slice(before, rows[me()]), rows, "test");
    EXPECT_EQ(bit_differences(y, want), 0);
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
  std::vector<float> y(want.size(), -1.0f);
  std::vector<int64_t> learned(n);
  group.exchange_counts(learned, send_rows, "test counts");
  EXPECT_EQ(learned, recv_rows);
  group.all_to_all(c, TensorView(y.data(), DType::f32, {static_cast<int64_t>(y.size()) / columns, columns}), recv_rows,
                   ConstTensorView(x.data(), DType::f32, {static_cast<int64_t>(x.size()) / columns, columns}), send_rows,
                   "test rows");
  EXPECT_EQ(bit_differences(y, want), 0);
}

TEST_F(Collective, AllToAllRandom) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<std::vector<int64_t>> counts(ranks(), std::vector<int64_t>(ranks()));
    for (auto& from : counts)
      for (int64_t& n : from) n = trial == 0 || random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 40);
    check_all_to_all(context_, all_, counts, 1 + trial % 5, trial);
  }
}

TEST_F(Collective, AllToAllWorstSkew) {
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
  std::vector<T> x = values<T>(seed, me(), n);
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
  std::vector<T> y(own.size());
  group.reduce_scatter(c, view(y), view(x), parts, "test");
  EXPECT_EQ(bit_differences(y, part_want), 0) << n;
  EXPECT_EQ(bit_differences(x, values<T>(seed, me(), n)), 0) << "x was changed";
  std::vector<T> in_place = x;
  group.reduce_scatter(c, TensorView(in_place.data() + own.begin, DTypeOf<T>::value, {own.size()}), view(in_place), parts,
                       "test");
  EXPECT_EQ(bit_differences(std::vector<T>(in_place.begin() + own.begin, in_place.begin() + own.end), part_want), 0) << n;

  group.all_reduce(c, view(x), "test");
  EXPECT_EQ(bit_differences(x, want), 0) << n;
}

TEST_F(Collective, SumsHaveTheBitsOfASerialSum) {
  // 1024 floats are kGatherSumBytes. At 1.2 million, a part is more than one round of scratch for every number of ranks up to 16.
  for (int64_t n : {0, 1, 2, 7, 1023, 1024, 1025, 5000}) check_sums<float>(context_, all_, n, 100 + n);
  for (int64_t n : {1, 511, 513, 4000}) check_sums<double>(context_, all_, n, 200 + n);
  check_sums<float>(context_, all_, 1'200'000, 300);
  EXPECT_LE(context_.workspace().high_bytes(), static_cast<size_t>(RankGroup::kSumScratchBytes) + 4096);
}

TEST_F(Collective, OrderMattersForTheseValues) {
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

TEST_F(Collective, IntegersAndVotes) {
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

TEST_F(Collective, AgreeGivesEveryoneTheFirstError) {
  EXPECT_TRUE(all_.agree(Status::ok(), "test").is_ok());
  const Status last = all_.agree(me() == ranks() - 1 ? Status::error("disk full") : Status::ok(), "test");
  EXPECT_NE(last.message().find("disk full"), std::string::npos);
  const Status every = all_.agree(errorf("of {}", me()), "test");
  EXPECT_NE(every.message().find("of 0"), std::string::npos) << every.message();
}

TEST_F(Collective, PointToPoint) {
  if (ranks() == 1) return;
  const int next = (me() + 1) % ranks(), previous = (me() + ranks() - 1) % ranks();
  for (int64_t n : {0, 1, 1000, 200000}) {
    std::vector<float> out = values<float>(n, me(), n), in(n);
    const RankGroup::Request sent = all_.start_send(context_, view(out), next, 3, "test");
    all_.recv(context_, view(in), previous, 3, "test");
    all_.wait(sent);
    EXPECT_EQ(bit_differences(in, values<float>(n, previous, n)), 0);
  }
  // Several in the air, received in another order than sent; of one tag in order.
  std::vector<std::vector<float>> out, in;
  std::vector<RankGroup::Request> requests;
  constexpr int kMessages = 12;
  for (int i = 0; i < kMessages; ++i) {
    out.push_back(values<float>(i, me(), 10 + i));
    in.emplace_back(10 + i);
  }
  for (int i = 0; i < kMessages; ++i) requests.push_back(all_.start_send(context_, view(out[i]), next, i % 3, "test"));
  for (int tag : {2, 0, 1})
    for (int i = tag; i < kMessages; i += 3) {
      const RankGroup::Request r = all_.start_recv(context_, view(in[i]), previous, tag, "test");
      while (!all_.test(r)) {
      }
    }
  for (const RankGroup::Request& r : requests) all_.wait(r);
  for (int i = 0; i < kMessages; ++i) EXPECT_EQ(bit_differences(in[i], values<float>(i, previous, 10 + i)), 0) << i;
}

TEST_F(Collective, CountedBytesAreThePredictedOnes) {
  RankWorld& w = *world;
  const int n = ranks();
  w.reset_traffic();
  std::vector<int64_t> rows(n);
  for (int r = 0; r < n; ++r) rows[r] = r + 1;
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  std::vector<float> x = values<float>(1, me(), rows[me()] * 2), y(total * 2);
  all_.all_gather(context_, TensorView(y.data(), DType::f32, {total, 2}), ConstTensorView(x.data(), DType::f32, {rows[me()], 2}),
                  rows, "gather");
  std::vector<int64_t> send_rows(n), recv_rows(n);
  for (int r = 0; r < n; ++r) {
    send_rows[r] = (me() + 2 * r) % 5;
    recv_rows[r] = (r + 2 * me()) % 5;
  }
  std::vector<double> a(std::accumulate(send_rows.begin(), send_rows.end(), int64_t{0})),
      b(std::accumulate(recv_rows.begin(), recv_rows.end(), int64_t{0}));
  all_.all_to_all(context_, view(b), recv_rows, view(a), send_rows, "dispatch");
  std::vector<int64_t> from(3 * n), to(3 * n);
  all_.exchange_counts(from, to, "counts");
  const std::vector<int64_t> sizes = {1, 7, 1024, 1025, 100001};
  for (int64_t size : sizes) {
    std::vector<float> g(size);
    all_.all_reduce(context_, view(g), "grad");
    std::vector<Range> parts;
    for (int r = 0; r < n; ++r) parts.push_back(part_of(size, n, n - 1 - r));
    std::vector<float> part(parts[me()].size());
    all_.reduce_scatter(context_, view(part), view(g), parts, "scatter");
  }
  std::vector<float> weights(321);
  all_.broadcast(context_, view(weights), n - 1, "weights");
  int64_t counts[5] = {};
  all_.all_reduce(counts, Reduction::sum, "int");
  if (n > 1) {
    std::vector<float> hop(50);
    if (me() == 0) all_.send(context_, view(hop), 1, 0, "hop");
    if (me() == 1) all_.recv(context_, view(hop), 0, 0, "hop");
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

TEST_F(Collective, GroupsOfEveryLayout) {
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

TEST_F(Collective, GroupsWorkSideBySide) {
  // Halves of the world, each with its own traffic, ragged in number.
  if (ranks() < 4) return;
  const bool low = me() < ranks() / 2;
  std::vector<int> members;
  for (int r = 0; r < ranks(); ++r)
    if ((r < ranks() / 2) == low) members.push_back(r);
  RankGroup half = world->make_group(low ? "low half" : "high half", members);
  const int size = half.size();
  for (int trial = 0; trial < (low ? 20 : 7); ++trial) {
    std::vector<std::vector<int64_t>> counts(size, std::vector<int64_t>(size));
    for (int a = 0; a < size; ++a)
      for (int b = 0; b < size; ++b) counts[a][b] = (a * 3 + b * 5 + trial) % 7;
    check_all_to_all(context_, half, counts, 2, trial);
  }
}

TEST_F(Collective, WrongUseIsNamed) {
  if (Channel::launched().value()) return;  // a death test starts this program again, which a rank must not
  std::vector<float> x(4), y(5);
  const std::vector<int64_t> rows = {4}, wrong = {3};
  EXPECT_DEATH(all_.all_gather(context_, view(y), view(x), rows, "test"), "counts of 4 rows for a view of 5");
  EXPECT_DEATH(all_.all_to_all(context_, view(x), rows, view(x), wrong, "test"), "counts of 3 rows for a view of 4");
  std::vector<int64_t> ints(3);
  EXPECT_DEATH(all_.all_reduce(context_, view(ints), "test"), "all_reduce: i64");
  EXPECT_DEATH(world->make_group("other", {0, 1}), "ascending ranks below 1");
  EXPECT_DEATH(all_.start_send(context_, view(x), 0, 0, "test"), "with itself or outside");
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world, 60);
}
