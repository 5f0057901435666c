// Actors over a layout against one alone in the same process. Run by any number of ranks, which try every layout below that has as many.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>

#include "core/rng.h"
#include "model/testing.h"
#include "ops/testing.h"
#include "parallel/testing.h"
#include "train/actor.h"
#include "train/optimizer.h"
#include "train/testing.h"

namespace lockstep {
namespace {

using testing::random_samples;

RankWorld* world = nullptr;

// A layout and the layers of its stages.
struct Case {
  Layout layout;
  std::vector<int64_t> layers;
};
const std::vector<Case> kCases = {
    {{.dp = 1}, {5}},
    {{.dp = 2}, {5}},
    {{.dp = 4}, {5}},
    {{.ep = 2, .dp = 2}, {5}},
    {{.ep = 2, .dp = 4}, {5}},
    {{.ep = 4, .dp = 4}, {5}},
    {{.tp = 2, .dp = 1}, {5}},
    {{.tp = 2, .dp = 2}, {5}},
    {{.tp = 2, .ep = 2, .dp = 2}, {5}},
    {{.pp = 2, .dp = 1}, {2, 3}},
    {{.pp = 2, .dp = 1}, {0, 5}},
    {{.pp = 2, .dp = 1}, {5, 0}},
    {{.pp = 2, .dp = 2}, {3, 2}},
    {{.pp = 2, .dp = 4}, {2, 3}},
    {{.pp = 2, .ep = 2, .dp = 2}, {3, 2}},
    {{.pp = 2, .ep = 2, .dp = 4}, {2, 3}},
    {{.tp = 2, .pp = 2, .dp = 1}, {3, 2}},
    {{.tp = 2, .pp = 2, .ep = 2, .dp = 2}, {3, 2}},
    {{.pp = 4, .dp = 1}, {1, 2, 1, 1}},
    {{.pp = 4, .dp = 1}, {0, 2, 2, 1}},
    {{.pp = 4, .dp = 2}, {0, 2, 3, 0}},
};

ModelConfig tiny_config() {
  ModelConfig m = testing::tiny_config();
  m.routed_scale = 1.5f;
  m.layers = {{AttentionKind::swa, 0, true},
              {AttentionKind::csa, 4, false},
              {AttentionKind::hca, 8, false},
              {AttentionKind::swa, 0, false},
              {AttentionKind::csa, 4, false}};
  return m;
}

// An actor and all it needs. groups == nullptr: alone, with the whole model.
struct Trainer {
  Trainer(Numerics numerics, Groups* groups, const Shard& shard, const OptimizerConfig& optimizer)
      : context(1, size_t{1} << 30), weights(config, numerics, shard, arena), rope(make_rope_tables(config, config.max_positions, arena)),
        actor(context, weights, rope, optimizer, {.max_tokens_per_microbatch = 40}, groups) {
    actor.initialize(11);
  }
  StepMetrics step(std::span<const TrainSample> samples, const LossConfig& loss, std::vector<TokenLogprobs>* seen = nullptr) {
    Result<StepMetrics> r = actor.step(samples, loss, seen);
    CHECK(r.is_ok(), "{}", r.message());
    return r.take();
  }

  const ModelConfig config = tiny_config();
  CpuContext context;
  Arena arena{"weights", size_t{1} << 30};
  Weights weights;
  RopeTables rope;
  Actor actor;
};

// Groups once for each layout: making them is a collective with a name of its own.
Groups* groups_of(const Layout& layout) {
  static std::map<std::string, Groups> all;
  const auto it = all.find(layout.str());
  if (it != all.end()) return &it->second;
  return &all.emplace(layout.str(), make_groups(*world, Grid(layout), layout.str())).first->second;
}

struct Place {
  Groups* groups;
  Shard shard;
};
Place place_of(const Case& c) {
  const ModelConfig config = tiny_config();
  const Result<StageLayers> stages = split_layers(c.layers, c.layout.pp, config.num_layers());
  CHECK(stages.is_ok(), "{}", stages.message());
  Groups* groups = groups_of(c.layout);
  return {groups, shard_of(config, groups->grid, stages.value(), world->rank())};
}

OptimizerConfig optimizer_config() {
  OptimizerConfig o;
  o.weight_decay = 0.1f;
  o.freeze_router = false;
  return o;
}

// Unequal lengths, one beyond the token budget, one without a trained token.
std::vector<TrainSample> mixed_samples() {
  std::vector<TrainSample> samples = random_samples(3, {2, 33, 17, 3, 25, 8, 2, 50, 21, 9, 16, 5, 28});
  samples[4].mask.assign(samples[4].mask.size(), 0);
  return samples;
}

LossConfig policy_loss(Aggregation aggregation, KlKind kl) {
  LossConfig c;
  c.aggregation = aggregation;
  c.norm_length = 20;
  c.kl = kl;
  c.kl_coef = 0.1f;
  c.entropy_coef = 0.01f;
  c.dual_clip = 3.0f;
  return c;
}

void expect_same_bits(const std::vector<TokenLogprobs>& a, const std::vector<TokenLogprobs>& b) {
  const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
  };
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same(a[i].logprob, b[i].logprob) && same(a[i].entropy, b[i].entropy)) << "sample " << i;
}

double value_of(const StepMetrics& m, std::string_view name) {
  for (const auto& [key, value] : m.values)
    if (key == name) return value;
  ADD_FAILURE() << "no metric " << name;
  return 0;
}

// Losses are added by sample and gradients by rank: the first have the bits of one rank alone, the norm has not.
void expect_same_metrics(const StepMetrics& one, const StepMetrics& many) {
  ASSERT_EQ(one.values.size(), many.values.size());
  for (const auto& [name, value] : one.values) {
    if (name == "microbatches") continue;
    if (name == "grad_norm") {
      EXPECT_NEAR(value_of(many, name), value, 1e-6 * value);
    } else {
      EXPECT_EQ(value_of(many, name), value) << name;
    }
  }
}

// Relative L2 distance of all that the ranks own together to what one alone has. Every number must be owned once.
double distance(const Trainer& one, const Trainer& many, Owned what) {
  std::map<std::string, ConstTensorView> whole;
  double numbers = 0;
  one.actor.visit_owned(what, [&](const BoxView& b) {
    whole[b.name] = b.values;
    numbers += static_cast<double>(b.values.shape.elements());
  });
  double sums[3] = {};  // squares of differences, of values, and how many
  many.actor.visit_owned(what, [&](const BoxView& b) {
    const ConstTensorView& w = whole.at(b.name);
    sums[2] += static_cast<double>(b.box.elements());
    for (int64_t r = 0; w.dtype == DType::f32 && r < b.box.rows.size(); ++r)
      for (int64_t k = 0; k < b.box.columns.size(); ++k) {
        const double x = w.row<float>(b.box.rows.begin + r)[b.box.columns.begin + k], y = b.values.row<float>(r)[k];
        sums[0] += (x - y) * (x - y);
        sums[1] += x * x;
      }
  });
  CpuContext context(1, size_t{1} << 20);
  world->all().all_reduce(context, TensorView(sums, DType::f64, {3}), "distance");
  EXPECT_EQ(sums[2], numbers);
  EXPECT_GT(sums[1], 0);
  return std::sqrt(sums[0] / sums[1]);
}

uint64_t hash(uint64_t h, ConstTensorView v) {
  const auto* p = static_cast<const uint8_t*>(v.data);
  for (size_t i = 0; i < v.bytes(); ++i) h = (h ^ p[i]) * 0x100000001b3;  // FNV-1a
  return h;
}
uint64_t hash_weights(const Weights& w, bool experts) {
  uint64_t h = 0xcbf29ce484222325;
  for (const TensorSpec& s : w.table())
    if (s.held() && (s.cut == Cut::experts) == experts) h = hash(h, w.view(s.id).rows);
  return h;
}
uint64_t hash_owned(const Actor& a) {
  uint64_t h = 0xcbf29ce484222325;
  for (const Owned what : {Owned::masters, Owned::gradients, Owned::first_moments, Owned::second_moments})
    a.visit_owned(what, [&](const BoxView& b) { h = hash(h, b.values); });
  return h;
}

void expect_equal_replicas(Groups& groups, const Weights& weights) {
  const std::pair<RankGroup*, bool> replicas[] = {{&groups.dp, false}, {&groups.expert_replicas, true}};
  for (const auto& [ranks, experts] : replicas) {
    std::vector<int64_t> all(static_cast<size_t>(ranks->size()));
    const auto mine = static_cast<int64_t>(hash_weights(weights, experts));
    ranks->all_gather(std::span(all), std::span(&mine, 1), "hashes");
    for (const int64_t h : all) EXPECT_EQ(h, mine);
  }
}

class ActorLayout : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Place s = place_of(GetParam());
    groups = s.groups;
    shard = s.shard;
  }
  Trainer together(Numerics numerics, const OptimizerConfig& o = optimizer_config()) { return {numerics, groups, shard, o}; }
  static Trainer alone(Numerics numerics, const OptimizerConfig& o = optimizer_config()) { return {numerics, nullptr, whole_shard(tiny_config()), o}; }

  Groups* groups = nullptr;
  Shard shard;
};

TEST_P(ActorLayout, LogprobsHaveTheBitsOfOneRank) {
  for (const Numerics numerics : kAllNumerics) {
    Trainer one = alone(numerics), many = together(numerics);
    for (const std::vector<TrainSample>& samples : {mixed_samples(), random_samples(4, {12}), std::vector<TrainSample>()})
      expect_same_bits(one.actor.logprobs(samples), many.actor.logprobs(samples));
  }
}

// What a step publishes is what a load of the same masters gives: with a learning rate of 0 they stay.
TEST_P(ActorLayout, PublishedWeightsAreTheRoundedMasters) {
  OptimizerConfig o = optimizer_config();
  o.lr = 0;
  for (const Numerics numerics : kAllNumerics) {
    Trainer one = alone(numerics, o), many = together(numerics, o);
    many.step(mixed_samples(), policy_loss(Aggregation::token_mean, KlKind::none));
    EXPECT_EQ(many.weights.version(), 1);
    expect_same_bits(one.actor.logprobs(mixed_samples()), many.actor.logprobs(mixed_samples()));
  }
}

TEST_P(ActorLayout, StepsAreThoseOfOneRank) {
  const LossConfig loss = policy_loss(Aggregation::token_mean, KlKind::k3);
  Trainer one = alone(Numerics::f32), many = together(Numerics::f32);
  // With one sample most dp ranks run empty micro-batches.
  for (const std::vector<TrainSample>& samples : {mixed_samples(), random_samples(4, {12}), random_samples(5, {30, 9, 41})}) {
    std::vector<TokenLogprobs> seen_one, seen_many;
    one.actor.initialize(11);
    many.actor.initialize(11);
    expect_same_metrics(one.step(samples, loss, &seen_one), many.step(samples, loss, &seen_many));
    expect_same_bits(seen_one, seen_many);
    EXPECT_LE(distance(one, many, Owned::gradients), 1e-5);
    expect_equal_replicas(*groups, many.weights);
  }
}

TEST_P(ActorLayout, EveryLossModeHasTheDenominatorsOfAllSamples) {
  OptimizerConfig o = optimizer_config();
  o.lr = 0;  // the weights stay
  Trainer one = alone(Numerics::f32, o), many = together(Numerics::f32, o);
  const std::vector<TrainSample> samples = random_samples(7, {3, 14, 8, 20, 6});
  std::vector<LossConfig> losses(1);
  losses[0].kind = LossKind::sft;
  for (const Aggregation a : {Aggregation::token_mean, Aggregation::seq_mean_token_mean, Aggregation::seq_mean_token_sum,
                              Aggregation::seq_mean_token_sum_norm, Aggregation::token_sum})
    for (const KlKind k : {KlKind::none, KlKind::k1, KlKind::k2, KlKind::k3}) losses.push_back(policy_loss(a, k));
  for (LossConfig& loss : losses) {
    loss.count_empty_sequences = loss.kl != KlKind::k2;
    expect_same_metrics(one.step(samples, loss), many.step(samples, loss));
    EXPECT_LE(distance(one, many, Owned::gradients), 1e-5) << static_cast<int>(loss.aggregation) << " " << static_cast<int>(loss.kl);
  }
}

TEST_P(ActorLayout, RepeatsToTheBit) {
  for (const Numerics numerics : kAllNumerics) {
    uint64_t first = 0;
    for (int run = 0; run < 2; ++run) {
      Trainer many = together(numerics);
      for (int step = 0; step < 2; ++step) many.step(mixed_samples(), policy_loss(Aggregation::seq_mean_token_mean, KlKind::none));
      expect_equal_replicas(*groups, many.weights);
      const uint64_t h = hash_owned(many.actor) ^ hash_weights(many.weights, false) ^ hash_weights(many.weights, true);
      if (run == 0) first = h;
      EXPECT_EQ(h, first);
    }
  }
}

TEST_P(ActorLayout, RanksOwnEqualPartsOfMastersAndMoments) {
  Trainer one = alone(Numerics::f32), many = together(Numerics::f32);
  const auto own = static_cast<int64_t>(many.actor.owned_bytes()), whole = static_cast<int64_t>(one.actor.owned_bytes());
  int64_t dp = own, all = own;
  groups->dp.all_reduce(std::span(&dp, 1), Reduction::sum, "owned");
  world->all().all_reduce(std::span(&all, 1), Reduction::sum, "owned");
  // Three numbers each: a row of the longest at either end, and what the arena rounds up for each of some hundred pieces of this small model.
  constexpr int64_t kSlack = 3 * (2 * 4 * 4 * 32 + 100 * 64);
  EXPECT_NEAR(static_cast<double>(own), static_cast<double>(dp) / groups->dp.size(), kSlack);
  EXPECT_LE(own, whole / groups->dp.size() + kSlack);
  // Together the model once, or with tp what it replicates once for each index.
  EXPECT_GE(all, whole);
  EXPECT_LE(all, groups->tp.size() * whole + world->size() * kSlack);
}

TEST_P(ActorLayout, SavesForAnyLayout) {
  std::string root = std::filesystem::temp_directory_path() / fmt::format("lockstep_layout_{}", ::getpid());
  world->all().broadcast(&root, 0, "directory");
  const std::vector<TrainSample> samples = mixed_samples();
  const LossConfig loss = policy_loss(Aggregation::token_mean, KlKind::none);
  Trainer through = together(Numerics::bf16);
  through.step(samples, loss);
  const Status saved = through.actor.save(root);
  EXPECT_TRUE(saved.is_ok()) << saved.message();
  world->all().barrier("saved");

  // One rank alone continues from it, and so does the same layout, as if it had not stopped.
  Trainer one = alone(Numerics::bf16), again = together(Numerics::bf16);
  for (Trainer* t : {&one, &again}) {
    const Status loaded = t->actor.load(root);
    EXPECT_TRUE(loaded.is_ok()) << loaded.message();
    EXPECT_EQ(t->actor.steps_done(), 1);
    EXPECT_EQ(t->weights.version(), 1);
    expect_same_bits(through.actor.logprobs(samples), t->actor.logprobs(samples));
  }
  for (const Owned what : {Owned::masters, Owned::first_moments, Owned::second_moments}) EXPECT_EQ(distance(one, through, what), 0);
  // Weights that were loaded are those that ranks gave each other.
  EXPECT_EQ(hash_weights(again.weights, false), hash_weights(through.weights, false));
  EXPECT_EQ(hash_weights(again.weights, true), hash_weights(through.weights, true));
  through.step(samples, loss);
  again.step(samples, loss);
  EXPECT_EQ(hash_owned(again.actor), hash_owned(through.actor));
  world->all().barrier("read");
  if (world->rank() == 0) std::filesystem::remove_all(root);
}

TEST_P(ActorLayout, AnErrorOrALostStepOfOneRankIsOneOfAll) {
  OptimizerConfig o = optimizer_config();
  o.max_skipped = 2;
  Trainer many = together(Numerics::f32, o);
  std::vector<TrainSample> samples = mixed_samples();
  const LossConfig loss = policy_loss(Aggregation::token_mean, KlKind::none);
  const uint64_t before = hash_owned(many.actor) ^ hash_weights(many.weights, false);
  const int last = world->size() - 1;
  const Result<StepMetrics> refused =
      many.actor.step(samples, loss, nullptr, [&] { return world->rank() == last ? errorf("not these") : Status::ok(); });
  ASSERT_FALSE(refused.is_ok());
  EXPECT_TRUE(refused.message().ends_with("not these")) << refused.message();
  EXPECT_EQ(many.weights.version(), 0);

  samples[1].advantage[0] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(many.step(samples, loss).skipped);
  const Result<StepMetrics> stopped = many.actor.step(samples, loss, nullptr);
  ASSERT_FALSE(stopped.is_ok());
  EXPECT_NE(stopped.message().find("not finite 2 times in a row"), std::string::npos) << stopped.message();
  zero_gradients(many.context.get(), const_cast<Gradients&>(many.actor.gradients()));  // all that may have changed
  EXPECT_EQ(hash_owned(many.actor) ^ hash_weights(many.weights, false), before);
}

std::vector<Case> cases_of_this_world() {
  std::vector<Case> cases;
  for (const Case& c : kCases)
    if (c.layout.ranks() == world->size()) cases.push_back(c);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Layouts, ActorLayout, ::testing::ValuesIn(cases_of_this_world()), [](const auto& info) {
  const Layout& l = info.param.layout;
  std::string name = fmt::format("tp{}pp{}ep{}dp{}_layers", l.tp, l.pp, l.ep, l.dp);
  for (const int64_t n : info.param.layers) name += fmt::format("_{}", n);
  return name;
});

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
