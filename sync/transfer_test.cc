// Weight updates between layouts, by any number of ranks, in the host's memory and in a GPU's: what arrives, how many bytes it took, that updates of what changed give the same as whole ones, and
// that a refused update, whatever went wrong at which stage, leaves the sampler as it was.

#include "core/device.h"
#include "parallel/testing.h"
#include "sync/testing.h"
#include "sync/transfer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string_view>

namespace lockstep {
namespace {

RankWorld* world = nullptr;

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

// On a CPU and on a GPU, by whatever way RankWorld::use_devices found.
class TransferTest : public ::testing::TestWithParam<Device> {
 protected:
  struct Sides {
    Sides(const ModelConfig& m, const Case& k, int64_t bucket_bytes, Arena& arena, SyncOptions options = {})
        : source(place(m, k.from, k.from_numerics)), destination(place(m, k.to, k.to_numerics)),
          from(m, k.from_numerics, source.shards[static_cast<size_t>(world->rank())], arena),
          to(m, k.to_numerics, destination.shards[static_cast<size_t>(world->rank())], arena),
          transfer(world->size() == 1 ? nullptr : &world->all(), from, to, source, destination, changing, arena, std::move(options), bucket_bytes) {}
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
      fill_on_host(context_, master, [&](TensorView v) {
        EXPECT_TRUE(masters(config_, seed)(spec, spec.box, matrix_view(v)).is_ok());
        if (spec.name == spoilt) v.ptr<float>()[spec.shape.elements() - 1] = std::numeric_limits<float>::infinity();
        return 0;
      });
      return master;
    });
  }
  void use_config(const Case& k) { config_ = is_quantized(k.to_numerics) ? wide_config() : small_config(); }

  // What a contiguous tensor holds.
  std::string bytes_of(ConstTensorView v) {
    std::string bytes(v.bytes(), 0);
    if (!v.empty()) download_bytes(context_, bytes.data(), v.data, bytes.size());
    return bytes;
  }
  bool same(ConstTensorView a, ConstTensorView on_host) { return bytes_of(a) == std::string_view(static_cast<const char*>(on_host.data), on_host.bytes()); }
  // Bytes: many rounds, and tensors cut between them.
  static int64_t small_bucket() { return GetParam() == Device::gpu ? 20'000 : 3000; }
  std::vector<Case> some_cases() const {
    std::vector<Case> list = cases();
    if (GetParam() == Device::gpu) list = {list[0], list[7], list[1]}, list.resize(world->size() == 1 ? 3 : 2);  // the executor is slow
    return list;
  }

  void load(Weights& w, uint64_t seed, int64_t version) { ASSERT_TRUE(w.load(context_, masters(config_, seed), version).is_ok()); }
  void load_wanted(Weights& w, uint64_t seed) { ASSERT_TRUE(w.load(host_, masters(config_, seed), 0).is_ok()); }

  // What the forward reads of `w` is what random_boxes(seed) rounds to, for tensors that `which` accepts.
  void expect_serves(const Weights& w, uint64_t seed, const WantedTensors& which = [](const TensorSpec&) { return true; }) {
    const size_t mark = host_arena_.mark();
    Weights wanted(config_, w.numerics(), w.shard(), host_arena_);
    load_wanted(wanted, seed);
    for (const TensorSpec& spec : w.table()) {
      if (!spec.held() || !which(spec)) continue;
      const WeightView &a = w.view(spec.id), &b = wanted.view(spec.id);
      const bool panels = !a.panels.empty();
      EXPECT_TRUE(panels ? same(a.panels, b.panels) : same(a.rows, b.rows)) << spec.name << " on rank " << world->rank();
      if (!a.quantized()) continue;
      EXPECT_TRUE(panels ? same(a.panel_scales, b.panel_scales) : same(a.scales, b.scales)) << "scales of " << spec.name << " on rank " << world->rank();
    }
    host_arena_.release(mark);
  }
  // What a load of the whole model counts in the tensors that `which` accepts.
  QuantStats whole_stats(Numerics numerics, uint64_t seed, const WantedTensors& which) {
    const size_t mark = host_arena_.mark();
    Weights whole(config_, numerics, host_arena_);
    load_wanted(whole, seed);
    QuantStats sum;
    for (const TensorSpec& spec : whole.table())
      if (which(spec)) sum += whole.quant_stats(spec.id);
    host_arena_.release(mark);
    return sum;
  }
  void expect_rows(Weights& w, uint64_t seed) {
    const size_t mark = host_arena_.mark();
    Weights wanted(config_, w.numerics(), w.shard(), host_arena_);
    load_wanted(wanted, seed);
    for (const TensorSpec& spec : w.table())
      if (spec.held()) {
        EXPECT_TRUE(same(w.rows(spec.id), wanted.rows(spec.id))) << spec.name << " on rank " << world->rank();
        EXPECT_TRUE(same(w.scales(spec.id), wanted.scales(spec.id))) << spec.name << " on rank " << world->rank();
      }
    host_arena_.release(mark);
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

  // All bytes of it, those that the forward does not read as well.
  std::string bits(const Weights& w) {
    std::string all;
    for (const TensorSpec& spec : w.table()) {
      const WeightView& v = w.view(spec.id);
      for (const ConstTensorView& part : {v.rows, v.panels, v.scales, v.panel_scales})
        all += bytes_of(part);
    }
    return all;
  }

  ModelConfig config_ = small_config();
  CpuContext host_{1};
  Arena host_arena_{"wanted weights", size_t{1} << 32};
  DeviceContext context_{GetParam()};
  Arena arena_{"test weights", size_t{1} << 32, GetParam()};
};

class PlanTest : public TransferTest {};

TEST_P(PlanTest, RowsPanelsAndBytesAreThoseOfTheDestinationAndThePlan) {
  for (const Case& k : some_cases()) {
    for (const int64_t bucket_bytes : {small_bucket(), Transfer::kBucketBytes}) {
      SCOPED_TRACE(fmt::format("{} {} to {} {} by {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics), bucket_bytes));
      use_config(k);
      const size_t mark = arena_.mark();
      Sides sides(config_, k, bucket_bytes, arena_);
      uint64_t checksum = 0;
      for (int64_t version = 1; version <= 3; ++version) {
        const auto seed = static_cast<uint64_t>(version == 2 ? 12 : 11);
        load(sides.from, seed, version);
        const CommBytes predicted = sides.transfer.bytes(), predicted_check = sides.transfer.check_bytes();
        world->reset_traffic();
        const Result<SyncReceipt> receipt = update(sides, seed);
        ASSERT_TRUE(receipt.is_ok()) << receipt.message();
        const auto counted = [&](const char* name) {
          const auto at = world->traffic().find(name);
          return at == world->traffic().end() ? CommBytes{} : at->second.bytes;
        };
        EXPECT_EQ(counted("weights"), predicted);
        EXPECT_EQ(counted("weights check"), predicted_check);
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

TEST_P(TransferTest, WhatIsNotFiniteIsRefusedByName) {
  std::vector<Case> list = some_cases();
  if (GetParam() == Device::gpu) list.resize(1);
  for (const Case& k : list) {
    SCOPED_TRACE(fmt::format("{} {} to {} {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics)));
    use_config(k);
    const size_t mark = arena_.mark();
    Sides sides(config_, k, small_bucket(), arena_);
    load(sides.from, 11, 1);
    ASSERT_TRUE(update(sides, 11).is_ok());
    // In storage dtype, in f32, and a number that only rounding makes infinite. What is quantised: in the master, or in the trainer's scales.
    for (const char* name : {"layers.1.attn.wo_b.weight", "layers.1.ffn.experts.*.w2.weight", "layers.2.ffn_norm.weight", "embed.weight", "head.weight"}) {
      const bool overflow = std::string_view(name) == "head.weight" && k.from_numerics == Numerics::f32 && k.to_numerics != Numerics::f32;
      load(sides.from, 12, 2);
      for (const TensorSpec& spec : sides.from.table()) {
        if (spec.name != name || !spec.held()) continue;
        const auto end_in = [&](const TensorView& v, auto number) {
          upload_bytes(context_, static_cast<char*>(v.data) + v.bytes() - sizeof(number), &number, sizeof(number));
        };
        const TensorView rows = sides.from.rows(spec.id), scales = sides.from.scales(spec.id);
        if (!scales.empty()) end_in(scales, uint8_t{0xff});
        else if (rows.dtype == DType::f32) end_in(rows, overflow ? std::numeric_limits<float>::max() : std::numeric_limits<float>::quiet_NaN());
        else end_in(rows, to_bf16(-std::numeric_limits<float>::infinity()));
      }
      expect_refused(sides, name, 11, 1, name);
    }
    load(sides.from, 12, 2);
    ASSERT_TRUE(update(sides, 12).is_ok());
    expect_serves(sides.to, 12, changing);
    arena_.release(mark);
  }
}

TEST_P(TransferTest, RanksAtDifferentVersionsAreRefused) {
  if (world->size() == 1) return;
  const Case k = cases().front();
  Sides sides(config_, k, small_bucket(), arena_);
  load(sides.to, 10, 0);
  load(sides.from, 11, world->rank() == world->size() - 1 ? 2 : 1);
  expect_refused(sides, "sends version", 10, 0);
}

// One thing that goes wrong on one rank, and whether it came to it.
struct Fault {
  enum Kind { none, error, flip, lose, not_finite, missing, unexpected, other_dtype, other_shape, other_scales };
  Kind kind = none;
  SyncStage stage = SyncStage::transfer;
  int64_t bucket = -1;
  std::string tensor = {};
  bool happened = false;
};

TransferHooks hooks_of(Context& c, Fault& fault) {
  TransferHooks hooks;
  hooks.enter = [&](SyncStage stage, int64_t bucket) {
    if (fault.kind != Fault::error || stage != fault.stage || bucket != fault.bucket) return Status::ok();
    fault.happened = true;
    return errorf("connection lost");
  };
  hooks.announce = [&](Manifest& manifest) {
    const auto entry = std::find_if(manifest.begin(), manifest.end(), [&](const ManifestEntry& e) { return e.name == fault.tensor; });
    if (entry == manifest.end() || fault.kind < Fault::missing) return;
    fault.happened = true;
    switch (fault.kind) {
      case Fault::missing: manifest.erase(entry); break;
      case Fault::unexpected: manifest.push_back(*entry), manifest.back().name += ".extra"; break;
      case Fault::other_dtype: entry->dtype = entry->dtype == DType::f32 ? DType::bf16 : DType::f32; break;
      case Fault::other_shape: ++entry->shape.dims[0]; break;
      default: entry->block_cols += 1; break;
    }
  };
  hooks.pack = [&](const TensorSpec& spec, TensorView packed) {
    if (fault.kind != Fault::not_finite || spec.name != fault.tensor || packed.empty()) return;
    const ArenaScope scope(*c.host);
    const TensorView rows = host_copy(c, packed);
    const int64_t last = rows.shape.elements() - 1;
    switch (rows.dtype) {
      case DType::f32: static_cast<float*>(rows.data)[last] = -std::numeric_limits<float>::infinity(); break;
      case DType::bf16: static_cast<bf16*>(rows.data)[last] = to_bf16(std::numeric_limits<float>::quiet_NaN()); break;
      case DType::e4m3:
      case DType::ue8m0: static_cast<uint8_t*>(rows.data)[last] = 0xff; break;
      default: return;
    }
    upload(c, packed, rows);
    fault.happened = true;
  };
  hooks.arrive = [&](int64_t bucket, TensorView bytes) {
    if (fault.kind != Fault::flip || bucket != fault.bucket || fault.happened) return;
    uint8_t* const at = bytes.ptr<uint8_t>() + bytes.rows() / 2;
    uint8_t byte = 0;
    download_bytes(c, &byte, at, 1);
    byte ^= 4;
    upload_bytes(c, at, &byte, 1);
    fault.happened = true;
  };
  hooks.lose = [&](const TensorSpec& spec) {
    if (fault.kind != Fault::lose || spec.name != fault.tensor) return false;
    return fault.happened = true;
  };
  return hooks;
}

// Numbers of which one in 50, or so, is multiplied by a power of two from version to version.
ReadBox drifting_masters(const ModelConfig& config, int64_t version) {
  const ReadBox first = masters(config, 11);
  return [&config, first, version](const TensorSpec& spec, const Box& box, TensorView out) {
    EXPECT_TRUE(first(spec, box, out).is_ok());
    if (!changing(spec)) return Status::ok();
    const uint64_t columns = static_cast<uint64_t>(whole_box(spec.whole).columns.size());
    for (int64_t r = 0; r < box.rows.size(); ++r)
      for (int64_t k = 0; k < box.columns.size(); ++k) {
        const uint64_t place = (static_cast<uint64_t>(spec.id) << 40) + static_cast<uint64_t>(box.rows.begin + r) * columns + static_cast<uint64_t>(box.columns.begin + k);
        const auto mixed = [](uint64_t x) { return (x ^ x >> 31) * 0x9e3779b97f4a7c15u >> 20; };
        const uint64_t changes = (static_cast<uint64_t>(version) + mixed(place)) % (uint64_t{1} << 40) / 50;  // one more at every 50th version
        out.row<float>(r)[k] = std::ldexp(out.row<float>(r)[k] + 1e-3f, static_cast<int>(mixed(place + changes * 77) % 5) - 2);
      }
    return Status::ok();
  };
}

class FaultTest : public TransferTest {
 protected:
  void load_version(Weights& w, int64_t version) { ASSERT_TRUE(w.load(context_, drifting_masters(config_, version), version).is_ok()); }
  Result<SyncReceipt> update_to(Sides& sides, int64_t version, const Status& quiet = Status::ok()) {
    load_version(sides.from, version);
    return sides.transfer.update(context_, [&](int id) -> ConstTensorView {
      const TensorSpec& spec = sides.from.table()[static_cast<size_t>(id)];
      const TensorView master = context_.workspace().tensor(DType::f32, spec.shape, "master");
      EXPECT_TRUE(fill_on_host(context_, master, [&](TensorView v) { return drifting_masters(config_, version)(spec, spec.box, matrix_view(v)); }).is_ok());
      return master;
    }, quiet);
  }
  bool any(bool mine) { return world->all().any(mine, "test"); }
  static std::string stage_of(char letter) {
    for (const SyncStage s : {SyncStage::quiesce, SyncStage::begin, SyncStage::transfer, SyncStage::verify, SyncStage::commit})
      if (sync_stage_name(s)[0] == letter) return fmt::format(": {}: ", sync_stage_name(s));
    return "?";
  }
};

// Of some pairs of layouts and numerics: something goes wrong on the first rank, or on the last.
TEST_P(FaultTest, WhateverGoesWrongTheSamplerServesWhatItServed) {
  const int64_t bucket_bytes = 160'000 / world->size();  // a few buckets
  int64_t trials = 0;
  const bool deltas = GetParam() == Device::cpu;
  if (world->size() > (deltas ? 4 : 2)) return;  // takes long where ranks are many more than cores
  const std::vector<Case> list = cases();
  bool first = false;
  std::vector<Case> some = {list[0], list[1], list[6], list[9]};  // f32 to bf16, bf16 to bf16, fp8 and fp4
  int64_t buckets = std::numeric_limits<int64_t>::max();
  if (GetParam() == Device::gpu) some.resize(1), buckets = 1;  // the executor is slow
  for (const Case& k : some) {
    first = !first;
    const int victim = first ? 0 : world->size() - 1;
    use_config(k);
    const size_t mark = arena_.mark();
    Fault fault;
    Sides sides(config_, k, bucket_bytes, arena_, {.delta = deltas, .full_every = 100, .hooks = hooks_of(context_, fault)});
    int64_t version = 1;
    ASSERT_TRUE(update_to(sides, version).is_ok());
    // Returns whether it happened at all.
    const auto trial = [&](Fault what, std::string_view stage) {
      SCOPED_TRACE(fmt::format("{} {} to {} {}, rank {}, fault {}, bucket {}, {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics),
                               victim, static_cast<int>(what.kind), what.bucket, what.tensor));
      const std::string before = bits(sides.to);
      fault = world->rank() == victim ? what : Fault();
      const Result<SyncReceipt> refused = update_to(sides, version + 1);
      const bool happened = any(fault.happened);
      fault = Fault();
      if (!happened) {
        EXPECT_TRUE(refused.is_ok()) << refused.message();
        ++version;
        return false;
      }
      ++trials;
      EXPECT_FALSE(any(refused.is_ok()));
      if (refused) return true;
      EXPECT_EQ(sides.to.version(), version);
      EXPECT_TRUE(bits(sides.to) == before);
      const std::string& message = refused.message();
      EXPECT_NE(message.find(fmt::format("rank {}: ", victim)), std::string::npos) << message;
      EXPECT_TRUE(std::any_of(stage.begin(), stage.end(), [&](char c) { return message.find(stage_of(c)) != std::string::npos; })) << message;
      EXPECT_NE(message.find(what.tensor), std::string::npos) << message;
      if (what.kind == Fault::flip || (what.kind == Fault::error && what.bucket >= 0)) {  // some tensor
        EXPECT_TRUE(std::any_of(sides.to.table().begin(), sides.to.table().end(), [&](const TensorSpec& t) { return message.find(t.name) != std::string::npos; })) << message;
      }
      EXPECT_NE(message.find(fmt::format("stays at version {}", version)), std::string::npos) << message;
      // A good update follows: a whole one first, then a delta.
      for (const bool delta : {false, true}) {
        const Result<SyncReceipt> good = update_to(sides, ++version);
        EXPECT_TRUE(good.is_ok()) << good.message();
        if (!good) return true;
        EXPECT_EQ(good.value().delta, delta && deltas);
      }
      return true;
    };
    for (const auto& [stage, letter] : {std::pair{SyncStage::quiesce, "q"}, {SyncStage::begin, "b"}, {SyncStage::verify, "v"}, {SyncStage::commit, "c"}})
      EXPECT_TRUE(trial({.kind = Fault::error, .stage = stage}, letter));
    for (int64_t bucket = 0; bucket < buckets && trial({.kind = Fault::error, .bucket = bucket}, "t"); ++bucket) continue;
    for (int64_t bucket = 0; bucket < buckets && trial({.kind = Fault::flip, .bucket = bucket}, "tv"); ++bucket) continue;
    for (const auto& [kind, tensor] : {std::pair{Fault::missing, "layers.0.ffn.gate.tid2eid"}, {Fault::missing, "layers.1.ffn.gate.bias"}, {Fault::unexpected, "embed.weight"},
                                       {Fault::other_dtype, "layers.1.attn.attn_sink"}, {Fault::other_shape, "layers.2.ffn.experts.*.w2.weight"},
                                       {Fault::other_scales, "layers.1.attn.wo_b.weight"}})
      EXPECT_TRUE(trial({.kind = kind, .tensor = tensor}, "b"));
    for (const char* tensor : {"embed.weight", "layers.1.attn.wo_b.weight", "layers.1.attn.attn_sink", "layers.2.ffn.experts.*.w2.weight", "layers.3.ffn_norm.weight"}) {
      if (!deltas && std::string_view(tensor).starts_with("layers.1")) continue;
      trial({.kind = Fault::not_finite, .tensor = tensor}, "t");
      trial({.kind = Fault::lose, .tensor = tensor}, "v");
    }
    Weights wanted(config_, k.to_numerics, sides.to.shard(), arena_);
    load_version(wanted, version);
    EXPECT_TRUE(bits(sides.to) == bits(wanted));
    arena_.release(mark);
  }
  if (world->rank() == 0) std::printf("%d rank(s): %lld faults, none of them seen by the sampler\n", world->size(), static_cast<long long>(trials));
}

// Ten updates by what changed give the bits of whole ones, rows and panels, and their receipts say how much that was.
class DeltaTest : public FaultTest {};

TEST_P(DeltaTest, DeltasGiveTheSameAsWholeUpdates) {
  const std::vector<Case> list = cases();
  for (const Case& k : {list[0], list[1], list[6], list[8], list[9]}) {
    SCOPED_TRACE(fmt::format("{} {} to {} {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics)));
    use_config(k);
    const size_t mark = arena_.mark();
    Sides whole(config_, k, small_bucket(), arena_), changes(config_, k, small_bucket(), arena_, {.delta = true, .full_every = 4});
    int64_t deltas = 0;
    for (int64_t version = 1; version <= 14; ++version) {
      const Result<SyncReceipt> a = update_to(whole, version);
      ASSERT_TRUE(a.is_ok()) << a.message();
      world->reset_traffic();
      const Result<SyncReceipt> b = update_to(changes, version);
      ASSERT_TRUE(b.is_ok()) << b.message();
      const SyncReceipt &full = a.value(), &delta = b.value();
      EXPECT_TRUE(bits(whole.to) == bits(changes.to)) << "version " << version;
      EXPECT_EQ(delta.checksum, full.checksum);
      EXPECT_EQ(delta.full_bytes, full.moved_bytes);
      EXPECT_EQ(delta.local_bytes, full.local_bytes);
      EXPECT_EQ(delta.quantized, full.quantized);
      EXPECT_EQ(delta.delta, version % 4 != 1);
      deltas += delta.delta;
      const auto counted = world->traffic().find("weights");
      int64_t received = counted == world->traffic().end() ? 0 : counted->second.bytes.received;
      world->all().all_reduce(std::span(&received, 1), Reduction::sum, "test");
      EXPECT_EQ(delta.moved_bytes, received);
      if (!delta.delta) {
        EXPECT_EQ(delta.moved_bytes, delta.full_bytes);
        EXPECT_EQ(delta.density(), 1);
        continue;
      }
      EXPECT_LE(delta.moved_bytes, delta.full_bytes * 3 / 4);
      EXPECT_GT(delta.density(), 0);
      EXPECT_LT(delta.density(), 0.5);
    }
    EXPECT_EQ(deltas, 10);
    // Nothing changed: bitmaps travel.
    load_version(changes.from, 14);
    const Result<SyncReceipt> same = update_to(changes, 14);
    ASSERT_TRUE(same.is_ok());
    EXPECT_TRUE(same.value().delta);
    EXPECT_EQ(same.value().changed_bytes, 0);
    arena_.release(mark);
  }
}

// A sampler that someone else loaded is given everything, tensors that no step changes as well; so are all, if one needs it.
TEST_P(DeltaTest, ASamplerThatMissedAVersionIsGivenAllOfIt) {
  for (const Case& k : some_cases()) {
    use_config(k);
    const size_t mark = arena_.mark();
    Sides sides(config_, k, small_bucket(), arena_, {.delta = true, .full_every = 100});
    for (int64_t version = 1; version <= 3; ++version) {
      const Result<SyncReceipt> receipt = update_to(sides, version);
      ASSERT_TRUE(receipt.is_ok()) << receipt.message();
      EXPECT_EQ(receipt.value().delta, version > 1);
    }
    // Versions that the trainer skips do not matter.
    Result<SyncReceipt> receipt = update_to(sides, 6);
    ASSERT_TRUE(receipt.is_ok() && receipt.value().delta);
    // Other weights, of an older version, on one rank.
    if (world->rank() == world->size() - 1) load(sides.to, 12, 2);
    receipt = update_to(sides, 7);
    ASSERT_TRUE(receipt.is_ok()) << receipt.message();
    EXPECT_FALSE(receipt.value().delta);
    EXPECT_EQ(receipt.value().copies, static_cast<int64_t>(make_plan(config_, sides.source, sides.destination, [](const TensorSpec&) { return true; }).copies.size()));
    Weights wanted(config_, k.to_numerics, sides.to.shard(), arena_);
    load_version(wanted, 7);
    EXPECT_TRUE(bits(sides.to) == bits(wanted));
    // Other weights under the same version: a delta from another rank is not right over them, so the checksum says no, and then everything that changes is sent.
    const bool receives = any(world->rank() == 0 && sides.transfer.bytes().received > 0);
    if (world->rank() == 0) load(sides.to, 12, 7);
    receipt = update_to(sides, 8);
    EXPECT_NE(any(receipt.is_ok()), receives);
    if (receives) {
      EXPECT_NE(receipt.message().find("rank 0: verify: "), std::string::npos) << receipt.message();
      receipt = update_to(sides, 8);
      ASSERT_TRUE(receipt.is_ok()) << receipt.message();
      EXPECT_FALSE(receipt.value().delta);
    }
    load_version(wanted, 8);
    if (world->rank() != 0) {  // there, what no step changes is still what was loaded
      EXPECT_TRUE(bits(sides.to) == bits(wanted));
    }
    receipt = update_to(sides, 9);
    ASSERT_TRUE(receipt.is_ok() && receipt.value().delta);
    arena_.release(mark);
  }
}

TEST_P(FaultTest, ForwardsThatStillRunAreWaitedFor) {
  const Case k = cases().front();
  Sides sides(config_, k, small_bucket(), arena_);
  const bool last = world->rank() == world->size() - 1;
  const Result<SyncReceipt> refused = update_to(sides, 1, last ? errorf("3 samples are running") : Status::ok());
  ASSERT_FALSE(refused.is_ok());
  EXPECT_NE(refused.message().find(fmt::format("rank {}: quiesce: 3 samples are running", world->size() - 1)), std::string::npos) << refused.message();
  ASSERT_TRUE(update_to(sides, 1).is_ok());
}

// Between GPUs, however that goes, a sampler gets what it gets between hosts, and the receipts and counters are the same.
TEST_P(FaultTest, AGpuGivesWhatTheHostGives) {
  if (GetParam() == Device::cpu || world->size() > 4) return;
  for (const Case& k : some_cases()) {
    SCOPED_TRACE(fmt::format("{} {} to {} {}", k.from.str(), numerics_name(k.from_numerics), k.to.str(), numerics_name(k.to_numerics)));
    use_config(k);
    const size_t mark = arena_.mark(), host_mark = host_arena_.mark();
    Sides there(config_, k, small_bucket(), arena_), here(config_, k, small_bucket(), host_arena_);
    for (int64_t version = 1; version <= 2; ++version) {
      load_version(there.from, version);
      ASSERT_TRUE(here.from.load(host_, drifting_masters(config_, version), version).is_ok());
      world->reset_traffic();
      const Result<SyncReceipt> a = update_to(there, version);
      ASSERT_TRUE(a.is_ok()) << a.message();
      const auto traffic = world->traffic();
      world->reset_traffic();
      const Result<SyncReceipt> b = here.transfer.update(host_, [&](int id) -> ConstTensorView {
        const TensorSpec& spec = here.from.table()[static_cast<size_t>(id)];
        const TensorView master = host_.workspace().tensor(DType::f32, spec.shape, "master");
        EXPECT_TRUE(drifting_masters(config_, version)(spec, spec.box, matrix_view(master)).is_ok());
        return master;
      });
      ASSERT_TRUE(b.is_ok()) << b.message();
      for (const TensorSpec& spec : here.to.table()) {
        EXPECT_TRUE(same(there.to.rows(spec.id), here.to.rows(spec.id))) << spec.name;
        EXPECT_TRUE(same(there.to.scales(spec.id), here.to.scales(spec.id))) << "scales of " << spec.name;
      }
      const SyncReceipt &x = a.value(), &y = b.value();
      EXPECT_EQ(x.checksum, y.checksum);
      EXPECT_EQ(x.quantized, y.quantized);
      EXPECT_EQ(std::tuple(x.version, x.delta, x.copies, x.rounds, x.moved_bytes, x.full_bytes, x.local_bytes, x.changed_bytes),
                std::tuple(y.version, y.delta, y.copies, y.rounds, y.moved_bytes, y.full_bytes, y.local_bytes, y.changed_bytes));
      for (const auto& [name, t] : world->traffic()) {
        ASSERT_TRUE(traffic.contains(name)) << name;
        EXPECT_EQ(traffic.at(name).calls, t.calls) << name;
        EXPECT_EQ(traffic.at(name).bytes, t.bytes) << name;
      }
    }
    arena_.release(mark);
    host_arena_.release(host_mark);
  }
}

const auto name_of_device = [](const auto& info) { return std::string(info.param == Device::gpu ? "gpu" : "cpu"); };
INSTANTIATE_TEST_SUITE_P(Memory, TransferTest, ::testing::Values(Device::cpu, Device::gpu), name_of_device);
INSTANTIATE_TEST_SUITE_P(Memory, PlanTest, ::testing::Values(Device::cpu), name_of_device);
INSTANTIATE_TEST_SUITE_P(Memory, FaultTest, ::testing::Values(Device::cpu, Device::gpu), name_of_device);
INSTANTIATE_TEST_SUITE_P(Memory, DeltaTest, ::testing::Values(Device::cpu), name_of_device);

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
