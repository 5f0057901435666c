// AdamW over the tensor table against the formulas in f64: norm, clip, decay rule, what is frozen, what a lost step leaves alone.

#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/rng.h"

namespace lockstep {
namespace {

TensorSpec spec(std::string name, Shape shape, TensorRole role, bool indexer = false) {
  TensorSpec s;
  s.name = std::move(name);
  s.shape = shape;
  s.role = role;
  s.indexer = indexer;
  return s;
}

// One tensor of every kind the rules tell apart.
std::vector<TensorSpec> test_table() {
  std::vector<TensorSpec> table = {
      spec("matrix", {5, 7}, TensorRole::matrix),         spec("norm", {9}, TensorRole::norm),
      spec("experts", {3, 2, 4}, TensorRole::expert),     spec("gate", {3, 4}, TensorRole::router),
      spec("gate.bias", {3}, TensorRole::router_bias),    spec("tid2eid", {6, 2}, TensorRole::hash_table),
      spec("index.wq", {4, 4}, TensorRole::matrix, true), spec("sink", {2}, TensorRole::sink)};
  for (size_t i = 0; i < table.size(); ++i) table[i].id = static_cast<int>(i);
  return table;
}

struct Fixture {
  explicit Fixture(const OptimizerConfig& config) : config(config), optimizer(table, config) {
    masters = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
    gradients = make_tensor_set(table, arena, [&](const TensorSpec& s) { return is_trained(s, config); });
    Philox rng(1, RngPurpose::test);
    for (const TensorView& v : masters.views)
      if (v.dtype == DType::f32)
        for (int64_t i = 0; i < v.shape.elements(); ++i) v.ptr<float>()[i] = 2.0f * rng.uniform() - 1.0f;
  }
  void random_gradients(uint64_t seed, float magnitude) {
    Philox rng(seed, RngPurpose::test);
    for (const TensorView& v : gradients.views)
      for (int64_t i = 0; i < (v.empty() ? 0 : v.shape.elements()); ++i)
        v.ptr<float>()[i] = (2.0f * rng.uniform() - 1.0f) * magnitude;
  }
  std::vector<std::vector<float>> values(const TensorSet& set) const {
    std::vector<std::vector<float>> out;
    for (const TensorView& v : set.views)
      out.push_back(v.empty() || v.dtype != DType::f32 ? std::vector<float>()
                                                       : std::vector<float>(v.ptr<float>(), v.ptr<float>() + v.shape.elements()));
    return out;
  }

  const OptimizerConfig config;
  const std::vector<TensorSpec> table = test_table();
  CpuContext context{2, 1 << 20};
  Arena arena{"test", 1 << 20};
  TensorSet masters, gradients;
  Optimizer optimizer;
};

TEST(Optimizer, FrozenTensorsHaveNoMoments) {
  for (const bool freeze : {true, false}) {
    OptimizerConfig config;
    config.freeze_router = freeze;
    config.freeze_indexer = freeze;
    Fixture f(config);
    const std::vector<bool> wanted = {true,  true,  true,  !freeze,
                                      false, false, false, true};  // the indexer never: no gradient reaches it
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(is_trained(f.table[i], config), wanted[i]) << f.table[i].name;
      EXPECT_EQ(!f.optimizer.first_moments().views[i].empty(), wanted[i]) << f.table[i].name;
      EXPECT_EQ(!f.optimizer.second_moments().views[i].empty(), wanted[i]) << f.table[i].name;
    }
  }
}

TEST(Optimizer, ClipCoefficient) {
  EXPECT_EQ(clip_coefficient(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_coefficient(0.0, 1.0), 1.0);
  EXPECT_EQ(clip_coefficient(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_LT(clip_coefficient(1.0, 1.0), 1.0);  // the epsilon acts at the bound itself
  EXPECT_EQ(clip_coefficient(1e9, 0.0), 1.0);  // 0: off
}

// Ten steps with clipping active in some, against f64. A weight of size up to 1 is rounded twice a step, 20 * 2^-25 in ten steps;
// an update is at most about lr = 0.01 and good to some 10 * 2^-24 of that. Both together stay below 1e-6.
TEST(Optimizer, MatchesTheFormulas) {
  OptimizerConfig config;
  config.lr = 0.01f;
  config.beta1 = 0.9f;
  config.beta2 = 0.95f;
  config.eps = 1e-8f;
  config.weight_decay = 0.1f;
  config.clip_norm = 1.0f;
  config.warmup_steps = 3;
  Fixture f(config);
  std::vector<std::vector<double>> w, m, v;
  for (const auto& x : f.values(f.masters)) {
    w.emplace_back(x.begin(), x.end());
    m.emplace_back(x.size(), 0.0);
    v.emplace_back(x.size(), 0.0);
  }
  bool clipped = false, unclipped = false;
  for (int step = 1; step <= 10; ++step) {
    f.random_gradients(static_cast<uint64_t>(step), step % 2 == 0 ? 2.0f : 0.05f);
    const auto g = f.values(f.gradients);
    double norm = 0;
    for (const auto& t : g)
      for (float x : t) norm += static_cast<double>(x) * x;
    norm = std::sqrt(norm);
    const double coef = std::min(1.0, 1.0 / (norm + 1e-6)), lr = static_cast<double>(config.lr) * std::min(1.0, step / 3.0);
    (coef < 1 ? clipped : unclipped) = true;
    for (size_t i = 0; i < g.size(); ++i)
      for (size_t k = 0; k < g[i].size(); ++k) {
        const double b1 = config.beta1, b2 = config.beta2, x = g[i][k] * coef;
        m[i][k] = b1 * m[i][k] + (1 - b1) * x;
        v[i][k] = b2 * v[i][k] + (1 - b2) * x * x;
        const double decay = f.table[i].shape.rank > 1 ? static_cast<double>(config.weight_decay) : 0.0;
        w[i][k] -= lr * decay * w[i][k] +
                   lr * (m[i][k] / (1 - std::pow(b1, step))) / (std::sqrt(v[i][k] / (1 - std::pow(b2, step))) + config.eps);
      }
    const OptimizerStep s = f.optimizer.step(f.context, f.masters, f.gradients);
    EXPECT_FALSE(s.skipped);
    EXPECT_NEAR(s.grad_norm, norm, 1e-6 * norm);
    EXPECT_NEAR(s.lr, lr, 1e-12);
    EXPECT_EQ(f.optimizer.steps_applied(), step);
  }
  EXPECT_TRUE(clipped && unclipped);
  const auto got = f.values(f.masters);
  for (size_t i = 0; i < got.size(); ++i)
    for (size_t k = 0; k < got[i].size(); ++k) EXPECT_NEAR(got[i][k], w[i][k], 1e-6) << f.table[i].name << " " << k;
}

TEST(Optimizer, NoDecayOnVectorsAndNothingOnFrozenTensors) {
  OptimizerConfig config;
  config.lr = 0.5f;
  config.weight_decay = 0.5f;
  Fixture f(config);  // gradients are zero: decay alone moves weights
  const auto before = f.values(f.masters);
  f.optimizer.step(f.context, f.masters, f.gradients);
  const auto after = f.values(f.masters);
  for (size_t i = 0; i < before.size(); ++i) {
    const bool decays = is_trained(f.table[i], config) && f.table[i].shape.rank > 1;
    for (size_t k = 0; k < before[i].size(); ++k)
      EXPECT_EQ(after[i][k], decays ? before[i][k] * 0.75f : before[i][k]) << f.table[i].name;
  }
}

TEST(Optimizer, LostStepChangesNothingAndDoesNotAdvanceTheSchedule) {
  OptimizerConfig config;
  config.warmup_steps = 10;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    Fixture f(config), clean(config);
    f.random_gradients(1, 0.1f);
    clean.random_gradients(1, 0.1f);
    const OptimizerStep first = f.optimizer.step(f.context, f.masters, f.gradients);
    clean.optimizer.step(clean.context, clean.masters, clean.gradients);
    const auto masters = f.values(f.masters), m = f.values(f.optimizer.first_moments()),
               v = f.values(f.optimizer.second_moments());
    f.gradients.views[2].ptr<float>()[5] = bad;
    for (int n = 1; n <= 2; ++n) {
      const OptimizerStep lost = f.optimizer.step(f.context, f.masters, f.gradients);
      EXPECT_TRUE(lost.skipped);
      EXPECT_FALSE(std::isfinite(lost.grad_norm));
      EXPECT_EQ(f.optimizer.skipped_in_a_row(), n);
      EXPECT_EQ(f.optimizer.steps_applied(), 1);
    }
    EXPECT_EQ(f.values(f.masters), masters);
    EXPECT_EQ(f.values(f.optimizer.first_moments()), m);
    EXPECT_EQ(f.values(f.optimizer.second_moments()), v);
    // The next good step is what it would have been without the lost ones.
    f.random_gradients(2, 0.1f);
    clean.random_gradients(2, 0.1f);
    const OptimizerStep second = f.optimizer.step(f.context, f.masters, f.gradients);
    clean.optimizer.step(clean.context, clean.masters, clean.gradients);
    EXPECT_EQ(second.lr, 2 * first.lr);
    EXPECT_EQ(f.optimizer.skipped_in_a_row(), 0);
    EXPECT_EQ(f.values(f.masters), clean.values(clean.masters));
  }
}

TEST(Optimizer, NormCountsEveryTensorOnce) {
  Fixture f({});
  double squares = 0;
  for (const TensorView& g : f.gradients.views) {
    if (g.empty()) continue;
    g.ptr<float>()[0] = 3.0f;
    squares += 9;
  }
  EXPECT_EQ(f.optimizer.global_norm(f.context, f.gradients), std::sqrt(squares));
}

TEST(OptimizerDeath, MissingGradientNamesItsTensor) {
  Fixture f({});
  f.gradients.views[1] = TensorView();
  EXPECT_DEATH(f.optimizer.step(f.context, f.masters, f.gradients), "norm is trained but has no gradient");
}

}  // namespace
}  // namespace lockstep
