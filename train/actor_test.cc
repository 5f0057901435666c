// The actor on a model with one layer of every kind: it learns, its numbers do not depend on packing, threads, recompute or a
// restart, on-policy is exact, and a steady state takes no memory.

#include "train/actor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <new>
#include <numeric>

#include "core/rng.h"
#include "io/file.h"
#include "model/testing.h"
#include "ops/testing.h"
#include "train/loss.h"
#include "train/optimizer.h"
#include "train/testing.h"

namespace {
std::atomic<int64_t> allocations{0};
}

// Every allocation of this program counts itself. Not inlined: the compiler would see free() meet a new-expression and warn.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace lockstep {
namespace {

using testing::random_samples;

ModelConfig tiny_config() {
  ModelConfig m = testing::tiny_config();
  m.num_experts = 6;
  m.routed_scale = 1.5f;
  m.max_positions = 256;
  m.sinkhorn_iters = 20;
  return m;
}

struct ActorSetup {
  ModelConfig config = tiny_config();
  Numerics numerics = Numerics::f32;
  OptimizerConfig optimizer;
  ActorOptions options;
  int threads = 2;
};

// An actor and all it needs.
struct World {
  explicit World(const ActorSetup& s)
      : context(s.threads, size_t{1} << 30), weights(s.config, s.numerics, arena),
        rope(make_rope_tables(s.config, s.config.max_positions, arena)), actor(context, weights, rope, s.optimizer, s.options) {
    actor.initialize(11);
  }
  StepMetrics step(std::span<const TrainSample> samples, const LossConfig& loss, std::vector<TokenLogprobs>* seen = nullptr) {
    Result<StepMetrics> r = actor.step(samples, loss, seen);
    CHECK(r.is_ok(), "{}", r.message());
    return r.take();
  }

  CpuContext context;
  // Copies of all masters, by id; and back, which also resets moments and counters.
  TensorSet masters() {
    TensorSet set = make_tensor_set(weights.table(), arena, [](const TensorSpec&) { return true; });
    actor.visit_owned(Owned::masters, [&](const BoxView& b) {
      for (const TensorSpec& spec : weights.table())
        if (spec.name == b.name) std::memcpy(set.views[static_cast<size_t>(spec.id)].data, b.values.data, b.values.bytes());
    });
    return set;
  }
  void load(const TensorSet& set) {
    const Status loaded = actor.load_masters([&](const TensorSpec& spec, const Box&, TensorView out) {
      std::memcpy(out.data, set.views[static_cast<size_t>(spec.id)].data, out.bytes());
      return Status::ok();
    });
    CHECK(loaded.is_ok(), "{}", loaded.message());
  }

  Arena arena{"weights", size_t{1} << 30};
  Weights weights;
  RopeTables rope;
  Actor actor;
};

const double* find_value(const StepMetrics& m, std::string_view name) {
  for (const auto& [key, value] : m.values)
    if (key == name) return &value;
  return nullptr;
}
double value_of(const StepMetrics& m, std::string_view name) {
  const double* v = find_value(m, name);
  CHECK(v != nullptr, "no metric {}", name);
  return *v;
}

LossConfig sft() {
  LossConfig c;
  c.kind = LossKind::sft;
  return c;
}

std::vector<TrainSample> mixed_samples() { return random_samples(3, {2, 40, 17, 3, 33, 8, 2, 70, 21, 9, 16, 5}); }

LossConfig full_policy_loss() {
  LossConfig c;
  c.kl = KlKind::k3;
  c.kl_coef = 0.1f;
  c.entropy_coef = 0.01f;
  c.dual_clip = 3.0f;
  return c;
}

int64_t differing_bits(const TensorSet& a, const TensorSet& b) {
  int64_t n = 0;
  for (size_t i = 0; i < a.views.size(); ++i) {
    EXPECT_EQ(a.views[i].empty(), b.views[i].empty());
    if (!a.views[i].empty()) n += testing::count_bit_differences(a.views[i], b.views[i]);
  }
  return n;
}

bool same_bits(const std::vector<TokenLogprobs>& a, const std::vector<TokenLogprobs>& b) {
  const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
  };
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!same(a[i].logprob, b[i].logprob) || !same(a[i].entropy, b[i].entropy)) return false;
  return true;
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_(std::filesystem::temp_directory_path() / fmt::format("actor_test_{}_{}", getpid(), count_++)) {}
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  static inline int count_ = 0;
  std::filesystem::path path_;
};

std::string file_bytes(const std::string& path) {
  Result<std::string> r = read_file(path);
  CHECK(r.is_ok(), "{}", r.message());
  return r.take();
}

TEST(Actor, SftLowersTheLoss) {
  ActorSetup setup;
  setup.optimizer.lr = 0.01f;
  World w(setup);
  std::vector<TrainSample> samples;
  for (int32_t i = 0; i < 8; ++i) {  // counting in steps of i + 1
    TrainSample s;
    s.index = i;
    for (int32_t t = 0; t < 24; ++t) s.tokens.push_back((i + t * (i + 1)) % 40);
    s.prompt_length = 3;
    s.mask.assign(21, 1);
    samples.push_back(std::move(s));
  }
  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) losses.push_back(value_of(w.step(samples, sft()), "loss"));
  EXPECT_NEAR(losses.front(), std::log(40.0), 0.6);  // an untrained model knows little more than the vocabulary's size
  EXPECT_LT(losses.back(), 0.25 * losses.front());
  EXPECT_EQ(w.actor.steps_done(), 30);
  EXPECT_EQ(w.weights.version(), 30);
}

// For every tensor, the slope of the loss along its own gradient is that gradient's norm. All experts and all entries are
// selected and no ratio is clipped, so that the loss has neither jumps nor kinks. It is formed in f64 from f32 log-probs off by
// some 1e-6 each, in the mean over 100 tokens by 1e-7; divided by 2 h with h = 2e-3 that is 3e-5 of slope. The third derivative
// along a direction of length 1 is of the order of the loss: h^2 / 6 of it is below 1e-5. The bound has room for three times
// both.
TEST(Actor, GradientIsTheSlopeOfTheLoss) {
  LossConfig unclipped = full_policy_loss();
  unclipped.clip_low = 1.0f;
  unclipped.clip_high = 1e6f;
  unclipped.dual_clip = 0.0f;
  for (const LossConfig& loss : {sft(), unclipped}) {
    ActorSetup setup;
    setup.config.experts_per_token = setup.config.num_experts;
    setup.config.index_topk = 64;
    setup.optimizer.lr = 0.0f;
    setup.optimizer.freeze_router = false;
    World w(setup);
    const std::vector<TrainSample> samples = random_samples(5, {2, 40, 17, 70});
    const StepMetrics m = w.step(samples, loss);
    if (loss.kind == LossKind::policy) {
      EXPECT_EQ(value_of(m, "pg_clipfrac"), 0.0);
    }
    const Denominators d = count_denominators(samples, loss);
    const TensorSet masters = w.masters();
    for (const TensorSpec& spec : w.weights.table()) {
      const TensorView master = masters.views[static_cast<size_t>(spec.id)],
                       g = w.actor.gradients().set.views[static_cast<size_t>(spec.id)];
      if (g.empty()) continue;
      const std::vector<float> center(master.ptr<float>(), master.ptr<float>() + spec.shape.elements());
      double norm = 0;
      for (size_t k = 0; k < center.size(); ++k) norm += static_cast<double>(g.ptr<float>()[k]) * g.ptr<float>()[k];
      norm = std::sqrt(norm);
      EXPECT_GT(norm, 0) << spec.name;
      const auto loss_at = [&](double h) {
        for (size_t k = 0; k < center.size(); ++k)
          master.ptr<float>()[k] = center[k] + static_cast<float>(h / norm) * g.ptr<float>()[k];
        w.load(masters);
        const std::vector<TokenLogprobs> now = w.actor.logprobs(samples);
        double sum = 0;
        for (size_t i = 0; i < samples.size(); ++i) {
          std::vector<float> dl(now[i].logprob.size()), de(dl.size());
          sum += sample_loss(samples[i], now[i].logprob, now[i].entropy, d, loss, dl, de).loss;
        }
        return sum;
      };
      const double h = 2e-3, slope = (loss_at(h) - loss_at(-h)) / (2 * h);
      EXPECT_NEAR(slope, norm, 1e-4 + 1e-3 * norm) << spec.name;
      std::copy(center.begin(), center.end(), master.ptr<float>());
    }
  }
}

TEST(Actor, NumbersDoNotDependOnTheTokenBudget) {
  std::vector<TrainSample> samples = mixed_samples();
  struct Outcome {
    StepMetrics metrics;
    std::vector<TokenLogprobs> seen;
    std::vector<std::vector<float>> gradients;
  };
  const auto run = [&](int64_t budget) {
    ActorSetup setup;
    setup.options.max_tokens_per_microbatch = budget;
    World w(setup);
    Outcome o;
    o.metrics = w.step(samples, full_policy_loss(), &o.seen);
    for (const TensorView& g : w.actor.gradients().set.views)
      o.gradients.emplace_back(g.ptr<float>(), g.ptr<float>() + (g.empty() ? 0 : g.shape.elements()));
    return o;
  };
  const Outcome whole = run(4096);
  EXPECT_EQ(value_of(whole.metrics, "microbatches"), 1);
  for (const int64_t budget : {1, 30, 75, 120}) {
    const Outcome parts = run(budget);
    EXPECT_GT(value_of(parts.metrics, "microbatches"), 1);
    if (budget == 1) {
      EXPECT_EQ(value_of(parts.metrics, "microbatches"), static_cast<double>(samples.size()));
    }
    for (const char* name : {"loss", "pg_loss", "kl_loss", "entropy", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "tokens"})
      EXPECT_EQ(value_of(parts.metrics, name), value_of(whole.metrics, name)) << name;
    EXPECT_TRUE(same_bits(parts.seen, whole.seen));
    double difference = 0, norm = 0;
    for (size_t i = 0; i < whole.gradients.size(); ++i)
      for (size_t k = 0; k < whole.gradients[i].size(); ++k) {
        const double a = parts.gradients[i][k], b = whole.gradients[i][k];
        difference += (a - b) * (a - b);
        norm += b * b;
      }
    EXPECT_LE(std::sqrt(difference), 1e-6 * std::sqrt(norm)) << budget;
  }
  // Nor on the order in which samples are given.
  Philox rng(1, RngPurpose::test);
  for (int shuffle = 0; shuffle < 5; ++shuffle) {
    for (size_t i = samples.size() - 1; i > 0; --i) std::swap(samples[i], samples[rng.below(static_cast<uint32_t>(i + 1))]);
    const Outcome shuffled = run(75);
    for (const char* name : {"loss", "pg_loss", "kl_loss", "entropy", "ppo_kl"})
      EXPECT_EQ(value_of(shuffled.metrics, name), value_of(whole.metrics, name)) << name;
  }
}

TEST(Actor, MetricsAreMeansOverTrainedTokens) {
  World w({});
  const std::vector<TrainSample> samples = mixed_samples();
  std::vector<TokenLogprobs> seen;
  const LossConfig loss = full_policy_loss();
  const StepMetrics m = w.step(samples, loss, &seen);
  double tokens = 0, kl = 0, clipped = 0, entropy = 0;
  for (size_t i = 0; i < samples.size(); ++i)
    for (size_t t = 0; t < samples[i].mask.size(); ++t) {
      if (!samples[i].mask[t]) continue;
      const double d = static_cast<double>(seen[i].logprob[t]) - samples[i].old_logprob[t], a = samples[i].advantage[t];
      tokens += 1;
      kl -= d;
      clipped += (a > 0 && std::exp(d) > 1.28) || (a < 0 && std::exp(d) < 0.8);
      entropy += seen[i].entropy[t];
    }
  EXPECT_GT(clipped, 0);
  EXPECT_EQ(value_of(m, "tokens"), tokens);
  EXPECT_NEAR(value_of(m, "ppo_kl"), kl / tokens, 1e-12);
  EXPECT_EQ(value_of(m, "pg_clipfrac"), clipped / tokens);
  EXPECT_NEAR(value_of(m, "entropy"), entropy / tokens, 1e-12);
  EXPECT_NEAR(value_of(m, "loss"),
              value_of(m, "pg_loss") + loss.kl_coef * value_of(m, "kl_loss") - loss.entropy_coef * value_of(m, "entropy"), 1e-12);
}

// Dividing logits by 1/2 and doubling the head's weights are the same numbers, and each sample has its own temperature.
TEST(Actor, LogprobsAreAtTheTemperatureOfTheirSample) {
  World w({});
  std::vector<TrainSample> samples = random_samples(6, {20, 12});
  samples[0].temperature = 0.5f;
  samples[1].temperature = 1.0f;
  const std::vector<TokenLogprobs> halved = w.actor.logprobs(samples);
  const TensorSet masters = w.masters();
  const TensorView head = masters.views.back();
  ASSERT_EQ(w.weights.table().back().name, "head.weight");
  for (int64_t k = 0; k < head.shape.elements(); ++k) head.ptr<float>()[k] *= 2;
  w.load(masters);
  samples[0].temperature = 1.0f;
  samples[1].temperature = 2.0f;
  EXPECT_TRUE(same_bits(halved, w.actor.logprobs(samples)));
}

TEST(Actor, BitsDoNotDependOnThreads) {
  const std::vector<TrainSample> samples = mixed_samples();
  ActorSetup setup;
  setup.threads = 1;
  World one(setup);
  for (int step = 0; step < 2; ++step) one.step(samples, full_policy_loss());
  for (const int threads : {2, 3}) {
    setup.threads = threads;
    World many(setup);
    for (int step = 0; step < 2; ++step) many.step(samples, full_policy_loss());
    EXPECT_EQ(differing_bits(one.actor.gradients().set, many.actor.gradients().set), 0);
    EXPECT_EQ(differing_bits(one.masters(), many.masters()), 0);
  }
}

TEST(Actor, OnPolicyRatioIsExactlyOne) {
  for (const Numerics numerics : kAllNumerics) {
    ActorSetup setup;
    setup.numerics = numerics;
    setup.options.max_tokens_per_microbatch = 60;
    World w(setup);
    std::vector<TrainSample> samples = mixed_samples();
    for (int step = 0; step < 3; ++step) {
      const std::vector<TokenLogprobs> old = w.actor.logprobs(samples);
      for (size_t i = 0; i < samples.size(); ++i) samples[i].old_logprob = old[i].logprob;
      std::vector<TokenLogprobs> seen;
      LossConfig loss;
      loss.dual_clip = 3.0f;
      const StepMetrics m = w.step(samples, loss, &seen);
      EXPECT_EQ(value_of(m, "ppo_kl"), 0.0);
      EXPECT_EQ(value_of(m, "pg_clipfrac"), 0.0);
      EXPECT_EQ(value_of(m, "pg_clipfrac_lower"), 0.0);
      EXPECT_TRUE(same_bits(old, seen));
    }
    // The step that follows without new log-probs is off-policy: the gate above can fail.
    EXPECT_NE(value_of(w.step(samples, LossConfig()), "ppo_kl"), 0.0);
  }
}

// What the quantised forward's straight-through gradient is worth, beside f32's. To first order the error of a gradient is linear in the unit of rounding,
// which is 2^-4 in E4M3 and 2^-2 in E2M1 where it is 2^-8 in bf16: fp8 may be 2^4 times as far from f32 as bf16 is, fp4 2^6 times. Less in fact, because not
// all places are quantised.
TEST(Actor, QuantizedGradientsAreNearAndPointDownhill) {
  std::vector<TrainSample> samples = mixed_samples();
  const auto flat = [](const World& w) {
    std::vector<double> g;
    for (const TensorView& v : w.actor.gradients().set.views)
      for (int64_t i = 0; !v.empty() && i < v.shape.elements(); ++i) g.push_back(v.ptr<float>()[i]);
    return g;
  };
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); };
  ActorSetup setup;
  setup.optimizer.clip_norm = 0;  // gradients as they are
  World f32(setup);
  f32.step(samples, sft());
  const std::vector<double> truth = flat(f32);
  const auto distance = [&](std::vector<double> g) {
    for (size_t i = 0; i < g.size(); ++i) g[i] -= truth[i];
    return std::sqrt(dot(g, g) / dot(truth, truth));
  };
  setup.numerics = Numerics::bf16;
  World bf16(setup);
  bf16.step(samples, sft());
  const double unit = distance(flat(bf16));
  std::printf("bf16: gradient within %.4f of f32's\n", unit);
  for (const auto& [numerics, units] : {std::pair{Numerics::fp8, 16.0}, {Numerics::fp4, 64.0}}) {
    setup.numerics = numerics;
    World w(setup), again(setup);
    const double before = value_of(w.step(samples, sft()), "loss");
    const std::vector<double> g = flat(w);
    const double relative = distance(g), cosine = dot(g, truth) / std::sqrt(dot(g, g) * dot(truth, truth));
    std::printf("%s: gradient within %.3f of f32's, cosine %.4f\n", numerics_name(numerics), relative, cosine);
    EXPECT_GT(relative, unit);  // something was quantised
    EXPECT_LT(relative, units * unit);
    EXPECT_GT(cosine, 0.8);

    // A step of masters against the gradient lowers the quantised loss by about what the gradient promises: 3 % of the loss, a step far over the codes'
    // grain and still nearly straight.
    const double step = 0.03 * before / dot(g, g);
    const ReadBox drawn = random_boxes(setup.config, 11);
    const Status moved = again.actor.load_masters([&](const TensorSpec& spec, const Box& box, TensorView out) {
      LOCKSTEP_RETURN_IF_ERROR(drawn(spec, box, out));
      const TensorView& gradient = w.actor.gradients().set.views[static_cast<size_t>(spec.id)];
      for (int64_t r = 0, i = 0; !gradient.empty() && r < out.rows(); ++r)
        for (int64_t k = 0; k < out.dim(1); ++k) out.row<float>(r)[k] -= static_cast<float>(step) * gradient.ptr<float>()[i++];
      return Status::ok();
    });
    ASSERT_TRUE(moved.is_ok());
    const double after = value_of(again.step(samples, sft()), "loss");
    std::printf("%s: loss %.5f to %.5f, %.5f promised\n", numerics_name(numerics), before, after, 0.97 * before);
    EXPECT_LT(after, before - 0.5 * 0.03 * before);
    EXPECT_GT(after, before - 1.5 * 0.03 * before);
  }
}

TEST(Actor, RecomputeGivesEqualBits) {
  for (const Numerics numerics : kAllNumerics) {
    ActorSetup setup;
    setup.numerics = numerics;
    World kept(setup);
    setup.options.recompute = true;
    World again(setup);
    const std::vector<TrainSample> samples = mixed_samples();
    for (int step = 0; step < 3; ++step) {
      const StepMetrics a = kept.step(samples, full_policy_loss()), b = again.step(samples, full_policy_loss());
      EXPECT_EQ(a.values, b.values);
      EXPECT_EQ(differing_bits(kept.actor.gradients().set, again.actor.gradients().set), 0);
    }
    EXPECT_EQ(differing_bits(kept.masters(), again.masters()), 0);
  }
}

TEST(Actor, ContinuesAfterARestartBitForBit) {
  TemporaryDirectory dir;
  ActorSetup setup;
  setup.numerics = Numerics::bf16;
  setup.optimizer.warmup_steps = 4;
  setup.optimizer.weight_decay = 0.1f;
  const auto samples = [](int step) { return random_samples(static_cast<uint64_t>(20 + step), {12, 30, 7, 19}); };
  World through(setup), before(setup);
  for (int step = 0; step < 6; ++step) through.step(samples(step), sft());
  for (int step = 0; step < 3; ++step) before.step(samples(step), sft());
  ASSERT_TRUE(before.actor.save(dir / "half").is_ok());

  World after(setup);
  after.actor.initialize(99);  // everything must come from the files
  after.step(samples(50), sft());
  const Status loaded = after.actor.load(dir / "half");
  ASSERT_TRUE(loaded.is_ok()) << loaded.message();
  EXPECT_EQ(after.actor.steps_done(), 3);
  EXPECT_EQ(after.weights.version(), 3);
  EXPECT_TRUE(same_bits(after.actor.logprobs(samples(0)), before.actor.logprobs(samples(0))));
  for (int step = 3; step < 6; ++step) after.step(samples(step), sft());
  ASSERT_TRUE(through.actor.save(dir / "through").is_ok());
  ASSERT_TRUE(after.actor.save(dir / "after").is_ok());
  for (const char* name : {"/masters.safetensors", "/optimizer.safetensors"})
    EXPECT_TRUE(file_bytes(dir / "through" + name) == file_bytes(dir / "after" + name)) << name;
  EXPECT_TRUE(same_bits(after.actor.logprobs(samples(0)), through.actor.logprobs(samples(0))));
}

TEST(Actor, LoadRefusesWhatDoesNotFitAndChangesNothing) {
  TemporaryDirectory dir;
  ActorSetup setup;
  World w(setup);
  const std::vector<TrainSample> samples = random_samples(1, {12, 9});
  w.step(samples, sft());
  ASSERT_TRUE(w.actor.save(dir / "good").is_ok());
  w.step(samples, sft());
  ASSERT_TRUE(w.actor.save(dir / "later").is_ok());
  const auto expect_refused = [&](const ActorSetup& other, const std::string& name, const std::string& part) {
    World o(other);
    const std::vector<TokenLogprobs> was = o.actor.logprobs(samples);
    const Status s = o.actor.load(dir / name);
    EXPECT_FALSE(s.is_ok());
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
    EXPECT_NE(s.message().find(dir / name), std::string::npos) << s.message();
    EXPECT_EQ(o.weights.version(), 0);
    EXPECT_EQ(o.actor.steps_done(), 0);
    EXPECT_TRUE(same_bits(o.actor.logprobs(samples), was));
  };
  expect_refused(setup, "absent", "cannot list");

  ActorSetup wider = setup;
  wider.config.expert_dim = 24;
  expect_refused(
      wider, "good",
      "masters.safetensors: tensor layers.0.ffn.experts.*.w1.weight has shape [6, 16, 32], the config asks for [6, 24, 32]");
  ActorSetup deeper = setup;
  deeper.config.layers.push_back({AttentionKind::swa, 0, false});
  expect_refused(deeper, "good", "tensor layers.3.hc_attn_fn [24, 128] is missing");
  ActorSetup shallower = setup;
  shallower.config.layers.pop_back();
  expect_refused(shallower, "good", "tensor layers.2.");
  ActorSetup thawed = setup;
  thawed.optimizer.freeze_router = false;
  expect_refused(thawed, "good", "tensor m.layers.0.ffn.gate.weight [6, 32] is missing");

  // Half of one save and half of another.
  std::filesystem::create_directories(dir / "torn");
  std::filesystem::copy(dir / "good/masters.safetensors", dir / "torn/masters.safetensors");
  std::filesystem::copy(dir / "later/optimizer.safetensors", dir / "torn/optimizer.safetensors");
  expect_refused(setup, "torn", "masters is of step 1, optimizer of step 2");

  std::filesystem::create_directories(dir / "cut");
  std::string cut = file_bytes(dir / "good/masters.safetensors");
  cut.resize(cut.size() - 4);
  ASSERT_TRUE(atomic_write(dir / "cut/masters.safetensors", cut).is_ok());
  std::filesystem::copy(dir / "good/optimizer.safetensors", dir / "cut/optimizer.safetensors");
  expect_refused(setup, "cut", "masters.safetensors");
}

TEST(Actor, FrozenTensorsStayAndHaveNoGradient) {
  for (const bool freeze_router : {true, false}) {
    ActorSetup setup;
    setup.optimizer.freeze_router = freeze_router;
    setup.optimizer.freeze_indexer = false;
    World w(setup), untouched(setup);
    const std::vector<TrainSample> samples = mixed_samples();
    for (int step = 0; step < 2; ++step) w.step(samples, sft());
    const std::vector<TensorSpec>& table = w.weights.table();
    const TensorSet trained_masters = w.masters(), first_masters = untouched.masters();
    bool learned_gate = false;
    for (size_t i = 0; i < table.size(); ++i) {
      const bool trained = is_trained(table[i], setup.optimizer);
      EXPECT_EQ(!w.actor.gradients().set.views[i].empty(), trained) << table[i].name;
      const int64_t changed = testing::count_bit_differences(trained_masters.views[i], first_masters.views[i]);
      EXPECT_EQ(changed > 0, trained) << table[i].name;
      learned_gate |= table[i].role == TensorRole::router && changed > 0;
    }
    EXPECT_EQ(learned_gate, !freeze_router);
  }
}

TEST(Actor, MaskedTokensAndSamplesDoNotCount) {
  ActorSetup setup;
  World a(setup), b(setup);
  std::vector<TrainSample> samples = mixed_samples();
  std::vector<TokenLogprobs> seen_a, seen_b;
  const StepMetrics ma = a.step(samples, full_policy_loss(), &seen_a);
  for (TrainSample& s : samples)
    for (size_t t = 0; t < s.mask.size(); ++t)
      if (!s.mask[t]) s.advantage[t] = s.old_logprob[t] = s.ref_logprob[t] = std::numeric_limits<float>::quiet_NaN();
  TrainSample empty = samples[1];
  empty.index = 1;  // first in canonical order
  empty.mask.assign(empty.mask.size(), 0);
  samples.insert(samples.begin(), empty);
  const StepMetrics mb = b.step(samples, full_policy_loss(), &seen_b);
  EXPECT_EQ(ma.values, mb.values);
  EXPECT_EQ(differing_bits(a.actor.gradients().set, b.actor.gradients().set), 0);
  ASSERT_EQ(seen_b.size(), samples.size());
  EXPECT_EQ(seen_b[0].logprob.size(), empty.mask.size());
  for (float x : seen_b[0].logprob) EXPECT_TRUE(std::isnan(x));
  seen_b.erase(seen_b.begin());
  EXPECT_TRUE(same_bits(seen_a, seen_b));
}

TEST(Actor, StepWithoutATrainedTokenIsSkipped) {
  World w({});
  std::vector<TrainSample> samples = random_samples(2, {9, 5});
  for (TrainSample& s : samples) s.mask.assign(s.mask.size(), 0);
  const StepMetrics m = w.step(samples, sft());
  EXPECT_TRUE(m.skipped);
  EXPECT_EQ(value_of(m, "tokens"), 0);
  EXPECT_EQ(find_value(m, "loss"), nullptr);
  EXPECT_EQ(w.weights.version(), 0);
  EXPECT_EQ(w.actor.steps_done(), 0);
}

TEST(Actor, NonFiniteGradientsSkipThenStop) {
  ActorSetup setup;
  setup.optimizer.max_skipped = 3;
  World w(setup);
  std::vector<TrainSample> samples = random_samples(2, {9, 5});
  samples[0].advantage[0] = std::numeric_limits<float>::infinity();
  const std::vector<TokenLogprobs> before = w.actor.logprobs(samples);
  for (int step = 0; step < 2; ++step) {
    const StepMetrics m = w.step(samples, LossConfig());
    EXPECT_TRUE(m.skipped);
    EXPECT_EQ(value_of(m, "skipped"), 1);
    EXPECT_FALSE(std::isfinite(value_of(m, "grad_norm")));
    EXPECT_EQ(w.weights.version(), 0);
  }
  const Result<StepMetrics> third = w.actor.step(samples, LossConfig(), nullptr);
  ASSERT_FALSE(third.is_ok());
  EXPECT_NE(third.message().find("not finite 3 times in a row (the limit is max_skipped = 3)"), std::string::npos)
      << third.message();
  EXPECT_TRUE(same_bits(before, w.actor.logprobs(samples)));
}

TEST(Actor, MetricsWithoutDataAreAbsent) {
  World w({});
  std::vector<TrainSample> samples = random_samples(2, {9, 5});
  const StepMetrics s = w.step(samples, sft());
  for (const char* name : {"kl_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"})
    EXPECT_EQ(find_value(s, name), nullptr) << name;
  for (const char* name : {"loss", "pg_loss", "entropy", "grad_norm", "lr", "skipped", "tokens", "microbatches"})
    EXPECT_NE(find_value(s, name), nullptr) << name;
  const StepMetrics p = w.step(samples, full_policy_loss());
  for (const char* name : {"kl_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"})
    EXPECT_NE(find_value(p, name), nullptr) << name;
}

// After one step of the largest size, steps take no arena memory, and the heap sees only the results: as many allocations each
// time, and no more for long sequences than for short ones.
TEST(Actor, SteadyStateTakesNoMemory) {
  for (const bool recompute : {false, true}) {
    ActorSetup setup;
    setup.options.max_tokens_per_microbatch = 200;
    setup.options.recompute = recompute;
    World w(setup);
    const std::vector<TrainSample> longest = random_samples(1, {100, 90, 100, 80}), shorter = random_samples(1, {20, 18, 20, 16});
    const LossConfig loss = full_policy_loss();
    const auto count = [&](const std::vector<TrainSample>& samples) {
      const int64_t before = allocations;
      const StepMetrics m = w.step(samples, loss);
      EXPECT_FALSE(m.skipped);
      return allocations - before;
    };
    count(longest);
    count(shorter);
    w.context.workspace().seal();
    const size_t high = w.actor.high_bytes();
    const int64_t first = count(longest);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(count(longest), first);
    const int64_t short_first = count(shorter);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(count(shorter), short_first);
    EXPECT_LE(short_first, first);  // one micro-batch instead of two
    EXPECT_LT(first, 100);
    EXPECT_EQ(w.actor.high_bytes(), high);
  }
}

TEST(Actor, ManyShortSequencesFitOneMicroBatch) {  // more pages than the budget's tokens alone would need
  ActorSetup setup;
  setup.options.max_tokens_per_microbatch = 128;
  World w(setup);
  const std::vector<TrainSample> samples = random_samples(8, std::vector<int64_t>(64, 3));
  const StepMetrics m = w.step(samples, sft());
  EXPECT_EQ(value_of(m, "microbatches"), 1);
  const std::vector<TrainSample> overlong = random_samples(9, {200, 4});
  EXPECT_EQ(value_of(w.step(overlong, sft()), "microbatches"), 2);
}

TEST(ActorDeath, MalformedSamplesNameThemselves) {
  World w({});
  std::vector<TrainSample> samples = random_samples(2, {9});
  samples[0].mask.pop_back();
  EXPECT_DEATH((void)w.actor.logprobs(samples), "sample 100: .* mask entries for .* response tokens");
  samples = random_samples(2, {9});
  samples[0].prompt_length = 9;
  EXPECT_DEATH((void)w.actor.logprobs(samples), "sample 100: a prompt of 9 and 9 tokens in all");
}

}  // namespace
}  // namespace lockstep
