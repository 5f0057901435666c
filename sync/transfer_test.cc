// Weight updates between layouts, by any number of ranks: what arrives, how many bytes it took, and that a refused update changes nothing
// that the sampler reads. The exchange is wrapped at link time, so that a test can damage what travels.

#include "parallel/testing.h"
#include "sync/testing.h"
#include "sync/transfer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string_view>

namespace lockstep {
namespace {

RankWorld* world = nullptr;
bool flip_a_bit = false;  // of the next bucket that this rank receives

}  // namespace
}  // namespace lockstep

// RankGroup::all_to_all
#define ALL_TO_ALL(prefix) \
  prefix##_ZN8lockstep9RankGroup10all_to_allERNS_7ContextENS_15BasicTensorViewIvEESt4spanIKlLm18446744073709551615EENS3_IKvEES7_NS_7PurposeE
extern "C" {
void ALL_TO_ALL(__real_)(lockstep::RankGroup*, lockstep::Context&, lockstep::TensorView, std::span<const int64_t>, lockstep::ConstTensorView,
                         std::span<const int64_t>, lockstep::Purpose);
void ALL_TO_ALL(__wrap_)(lockstep::RankGroup* group, lockstep::Context& c, lockstep::TensorView y, std::span<const int64_t> recv_rows,
                         lockstep::ConstTensorView x, std::span<const int64_t> send_rows, lockstep::Purpose p) {
  ALL_TO_ALL(__real_)(group, c, y, recv_rows, x, send_rows, p);
  if (!lockstep::flip_a_bit || y.empty()) return;
  y.ptr<uint8_t>()[y.rows() / 2] ^= 1;
  lockstep::flip_a_bit = false;
}
}

namespace lockstep {
namespace {

using testing::small_config;

// Blocks of quantisers end within its widths, and at groups of 40 and experts of 80.
ModelConfig wide_config() {
  ModelConfig m = small_config();
  m.hidden_size = 144;
  m.q_rank = 136;
  m.o_rank = 40;
  m.expert_dim = 80;
  return m;
}

// random_boxes, drawn once.
ReadBox masters(const ModelConfig& config, uint64_t seed) {
  using Drawn = std::vector<std::vector<uint32_t>>;  // by tensor: f32, or i32
  static std::map<std::pair<int64_t, uint64_t>, Drawn> all;
  Drawn& drawn = all[{config.hidden_size, seed}];
  if (drawn.empty()) {
    for (const TensorSpec& spec : tensor_table(config)) {
      std::vector<uint32_t>& numbers = drawn.emplace_back(static_cast<size_t>(spec.whole.elements()));
      const Box box = whole_box(spec.whole);
      const TensorView out(numbers.data(), spec.master_dtype(), {box.rows.size(), box.columns.size()});
      EXPECT_TRUE(random_boxes(config, seed)(spec, box, out).is_ok());
    }
  }
  return [&drawn](const TensorSpec& spec, const Box& box, TensorView out) {
    const int64_t columns = whole_box(spec.whole).columns.size();
    for (int64_t r = 0; r < box.rows.size(); ++r) {
      const uint32_t* from = drawn[static_cast<size_t>(spec.id)].data() + (box.rows.begin + r) * columns + box.columns.begin;
      std::memcpy(static_cast<char*>(out.data) + static_cast<size_t>(r * out.row_stride) * sizeof(uint32_t), from, static_cast<size_t>(box.columns.size()) * sizeof(uint32_t));
    }
    return Status::ok();
  };
}

bool changing(const TensorSpec& spec) { return !spec.is_buffer() && spec.role != TensorRole::router; }

constexpr int64_t kSmallBucket = 3000;  // bytes: many rounds, and tensors cut between them

struct Case {
  Layout from, to;
  Numerics from_numerics, to_numerics;
};

// Some pairs of layouts for the ranks that were started, the plainest and the most mixed among them.
std::vector<Case> cases() {
  const int ranks = world->size();
  std::vector<Layout> trainers = possible_layouts({.ranks = ranks, .layers = 4, .experts = 4, .output_groups = 4});
  std::vector<Layout> samplers = possible_layouts({.ranks = ranks, .layers = 1, .experts = 4, .output_groups = 4});
  std::mt19937 random(5);
  std::vector<Case> list = {{trainers.front(), samplers.back(), Numerics::f32, Numerics::bf16}, {trainers.back(), samplers.front(), Numerics::bf16, Numerics::bf16}};
  for (int i = 0; i < 4; ++i) {
    const Numerics n = i % 2 == 0 ? Numerics::f32 : Numerics::bf16;
    list.push_back({trainers[random() % trainers.size()], samplers[random() % samplers.size()], n, i == 0 ? Numerics::f32 : Numerics::bf16});
  }
  for (const auto& [from, to] : {std::pair{Numerics::bf16, Numerics::fp8}, {Numerics::f32, Numerics::fp8}, {Numerics::fp8, Numerics::fp8},
                                 {Numerics::bf16, Numerics::fp4}, {Numerics::fp4, Numerics::fp4}})
    list.push_back({trainers[random() % trainers.size()], samplers[random() % samplers.size()], from, to});
  return list;
}

class TransferTest : public ::testing::Test {
 protected:
  struct Sides {
    Sides(const ModelConfig& m, const Case& k, int64_t bucket_bytes, Arena& arena)
        : source(place(m, k.from, k.from_numerics)), destination(place(m, k.to, k.to_numerics)),
          from(m, k.from_numerics, source.shards[static_cast<size_t>(world->rank())], arena),
          to(m, k.to_numerics, destination.shards[static_cast<size_t>(world->rank())], arena),
          transfer(&world->all(), from, to, source, destination, changing, arena, bucket_bytes) {}
    static Placement place(const ModelConfig& m, const Layout& layout, Numerics numerics) {
      const StageCosts costs{.layers = std::vector<double>(static_cast<size_t>(m.num_layers()), 1.0)};
      return placement_of(m, Grid(layout), balance_layers(costs, layout.pp), numerics);
    }
    Placement source, destination;
    Weights from, to;
    Transfer transfer;
  };

  // With masters(seed), of which that of `spoilt` ends in infinity.
  Result<SyncReceipt> update(Sides& sides, uint64_t seed, std::string_view spoilt = "") {
    return sides.transfer.update(context_, [&, seed, spoilt](int id) -> ConstTensorView {
      const TensorSpec& spec = sides.from.table()[static_cast<size_t>(id)];
      const TensorView master = context_.workspace().tensor(DType::f32, spec.shape, "master");
      EXPECT_TRUE(masters(config_, seed)(spec, spec.box, matrix_view(master)).is_ok());
      if (spec.name == spoilt) master.ptr<float>()[spec.shape.elements() - 1] = std::numeric_limits<float>::infinity();
      return master;
    });
  }
  void use_config(const Case& k) { config_ = is_quantized(k.to_numerics) ? wide_config() : small_config(); }

  void load(Weights& w, uint64_t seed, int64_t version) { ASSERT_TRUE(w.load(context_, masters(config_, seed), version).is_ok()); }

  // What the forward reads of `w` is what random_boxes(seed) rounds to, for tensors that `which` accepts.
  void expect_serves(const Weights& w, uint64_t seed, const WantedTensors& which = [](const TensorSpec&) { return true; }) {
    const size_t mark = arena_.mark();
    Weights wanted(config_, w.numerics(), w.shard(), arena_);
    load(wanted, seed, 0);
    for (const TensorSpec& spec : w.table()) {
      if (!spec.held() || !which(spec)) continue;
      const WeightView &a = w.view(spec.id), &b = wanted.view(spec.id);
      const ConstTensorView &x = spec.has_panels() ? a.panels : a.rows, &y = spec.has_panels() ? b.panels : b.rows;
      EXPECT_EQ(std::memcmp(x.data, y.data, x.bytes()), 0) << spec.name << " on rank " << world->rank();
      if (!a.quantized()) continue;
      EXPECT_EQ(std::memcmp(a.panel_scales.data, b.panel_scales.data, a.panel_scales.bytes()), 0) << "scales of " << spec.name << " on rank " << world->rank();
    }
    arena_.release(mark);
  }
  // What a load of the whole model counts in the tensors that `which` accepts.
  QuantStats whole_stats(Numerics numerics, uint64_t seed, const WantedTensors& which) {
    const size_t mark = arena_.mark();
    Weights whole(config_, numerics, arena_);
    load(whole, seed, 0);
    QuantStats sum;
    for (const TensorSpec& spec : whole.table())
      if (which(spec)) sum += whole.quant_stats(spec.id);
    arena_.release(mark);
    return sum;
  }
  void expect_rows(Weights& w, uint64_t seed) {
    const size_t mark = arena_.mark();
    Weights wanted(config_, w.numerics(), w.shard(), arena_);
    load(wanted, seed, 0);
    for (const TensorSpec& spec : w.table())
      if (spec.held()) {
        EXPECT_EQ(std::memcmp(w.rows(spec.id).data, wanted.rows(spec.id).data, w.rows(spec.id).bytes()), 0) << spec.name << " on rank " << world->rank();
        if (!w.scales(spec.id).empty()) {
          EXPECT_EQ(std::memcmp(w.scales(spec.id).data, wanted.scales(spec.id).data, w.scales(spec.id).bytes()), 0) << spec.name << " on rank " << world->rank();
        }
      }
    arena_.release(mark);
  }

  // Every rank must hear of the same refusal, and `sides` must serve `seed` and `version` as before.
  void expect_refused(Sides& sides, const char* why, uint64_t seed, int64_t version, std::string_view spoilt = "") {
    const Result<SyncReceipt> refused = update(sides, seed + 1, spoilt);
    const bool all_refused = world->all().every(!refused.is_ok(), "test");
    ASSERT_TRUE(all_refused);
    EXPECT_NE(refused.message().find(why), std::string::npos) << "'" << refused.message() << "' instead of '" << why << "'";
    EXPECT_EQ(sides.to.version(), version);
    expect_serves(sides.to, seed);
  }

  ModelConfig config_ = small_config();
  CpuContext context_;
  Arena arena_{"test weights", size_t{1} << 32};
};

TEST_F(TransferTest, RowsPanelsAndBytesAreThoseOfTheDestinationAndThePlan) {
  for (const Case& k : cases()) {
    for (const int64_t bucket_bytes : {kSmallBucket, Transfer::kBucketBytes}) {
      SCOPED_TRACE(fmt::format("{} {} to {} {} by {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics), bucket_bytes));
      use_config(k);
      const size_t mark = arena_.mark();
      Sides sides(config_, k, bucket_bytes, arena_);
      uint64_t checksum = 0;
      for (int64_t version = 1; version <= 3; ++version) {
        const auto seed = static_cast<uint64_t>(version == 2 ? 12 : 11);
        load(sides.from, seed, version);
        const CommBytes predicted = sides.transfer.bytes();
        world->reset_traffic();
        const Result<SyncReceipt> receipt = update(sides, seed);
        ASSERT_TRUE(receipt.is_ok()) << receipt.message();
        const auto counted = [&](const char* name) {
          const auto at = world->traffic().find(name);
          return at == world->traffic().end() ? CommBytes{} : at->second.bytes;
        };
        EXPECT_EQ(counted("weights"), predicted);
        EXPECT_EQ(counted("weights check"), sides.transfer.check_bytes());
        int64_t received = predicted.received;
        world->all().all_reduce(std::span(&received, 1), Reduction::sum, "test");
        EXPECT_EQ(receipt.value().moved_bytes, received);
        EXPECT_EQ(receipt.value().version, version);
        const QuantStats counted_once = whole_stats(k.to_numerics, seed, version == 1 ? [](const TensorSpec&) { return true; } : changing);
        EXPECT_EQ(receipt.value().quantized, counted_once);
        EXPECT_EQ(receipt.value().quantized.underflowed > 0, is_quantized(k.to_numerics));
        EXPECT_EQ(sides.to.version(), version);
        if (version == 1) expect_rows(sides.to, seed);
        // Frozen tensors came with the first update and stay.
        expect_serves(sides.to, seed, changing);
        expect_serves(sides.to, 11, [](const TensorSpec& spec) { return !changing(spec); });
        if (version == 2) checksum = receipt.value().checksum;
        EXPECT_EQ(receipt.value().checksum == checksum, version == 2);
      }
      arena_.release(mark);
    }
  }
}

TEST_F(TransferTest, WhatIsNotFiniteIsRefusedByName) {
  for (const Case& k : cases()) {
    SCOPED_TRACE(fmt::format("{} {} to {} {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics)));
    use_config(k);
    const size_t mark = arena_.mark();
    Sides sides(config_, k, kSmallBucket, arena_);
    load(sides.from, 11, 1);
    ASSERT_TRUE(update(sides, 11).is_ok());
    // In storage dtype, in f32, and a number that only rounding makes infinite. What is quantised: in the master, or in the trainer's scales.
    for (const char* name : {"layers.1.attn.wo_b.weight", "layers.1.ffn.experts.*.w2.weight", "layers.2.ffn_norm.weight", "embed.weight", "head.weight"}) {
      const bool overflow = std::string_view(name) == "head.weight" && k.from_numerics == Numerics::f32 && k.to_numerics != Numerics::f32;
      load(sides.from, 12, 2);
      for (const TensorSpec& spec : sides.from.table()) {
        if (spec.name != name || !spec.held()) continue;
        if (const TensorView scales = sides.from.scales(spec.id); !scales.empty()) {
          static_cast<uint8_t*>(scales.data)[scales.shape.elements() - 1] = 0xff;
          continue;
        }
        const TensorView rows = sides.from.rows(spec.id);
        const int64_t last = rows.shape.elements() - 1;
        if (rows.dtype == DType::f32) {
          static_cast<float*>(rows.data)[last] = overflow ? std::numeric_limits<float>::max() : std::numeric_limits<float>::quiet_NaN();
        } else {
          static_cast<bf16*>(rows.data)[last] = to_bf16(-std::numeric_limits<float>::infinity());
        }
      }
      expect_refused(sides, name, 11, 1, name);
    }
    load(sides.from, 12, 2);
    ASSERT_TRUE(update(sides, 12).is_ok());
    expect_serves(sides.to, 12, changing);
    arena_.release(mark);
  }
}

TEST_F(TransferTest, DamageOnTheWayIsRefusedEverywhere) {
  if (world->size() == 1) return;  // nothing travels
  for (const Case& k : cases()) {
    SCOPED_TRACE(k.from.str() + " to " + k.to.str());
    use_config(k);
    const size_t mark = arena_.mark();
    Sides sides(config_, k, kSmallBucket, arena_);
    load(sides.to, 10, 0);
    // One rank that receives something.
    const bool receives = sides.transfer.bytes().received > 0;
    int64_t victim = receives ? world->rank() : -1;
    world->all().all_reduce(std::span(&victim, 1), Reduction::max, "test");
    if (victim < 0) {
      arena_.release(mark);
      continue;
    }
    load(sides.from, 11, 1);
    flip_a_bit = world->rank() == victim;
    expect_refused(sides, "is damaged: XXH64", 10, 0);
    EXPECT_FALSE(flip_a_bit);
    // The first update was refused, so the next one is of all tensors again.
    ASSERT_TRUE(update(sides, 11).is_ok());
    expect_rows(sides.to, 11);
    load(sides.from, 12, 2);
    if (sides.transfer.bytes().received > 0) flip_a_bit = world->rank() == victim;
    if (world->all().any(flip_a_bit, "test")) expect_refused(sides, "is damaged: XXH64", 11, 1);
    ASSERT_TRUE(update(sides, 12).is_ok());
    expect_serves(sides.to, 12, changing);
    arena_.release(mark);
  }
}

TEST_F(TransferTest, RanksAtDifferentVersionsAreRefused) {
  if (world->size() == 1) return;
  const Case k = cases().front();
  Sides sides(config_, k, kSmallBucket, arena_);
  load(sides.to, 10, 0);
  load(sides.from, 11, world->rank() == world->size() - 1 ? 2 : 1);
  expect_refused(sides, "sends version", 10, 0);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
