// AdamW over the tensor table against the formulas in f64: norm, clip, decay rule, what is frozen, what a lost step leaves alone.

#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

#include "core/rng.h"

namespace lockstep {
namespace {

TensorSpec spec(std::string name, Shape shape, TensorRole role, bool indexer = false) {
  TensorSpec s;
  s.name = std::move(name);
  s.shape = s.whole = shape;
  s.box = whole_box(shape);
  s.cut = role == TensorRole::expert ? Cut::experts : Cut::none;
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

// Gradients of what is trained, in two runs with padding as make_gradients lays them out.
Gradients make_test_gradients(const std::vector<TensorSpec>& table, const OptimizerConfig& config, Arena& arena) {
  Gradients g;
  g.table = table;
  g.dense = arena.zeros(DType::f32, {160}, "dense");
  g.experts = arena.zeros(DType::f32, {32}, "experts");
  int64_t filled[2] = {0, 0};
  for (const TensorSpec& s : table) {
    TensorView& view = g.set.views.emplace_back();
    if (!is_trained(s, config)) continue;
    const bool expert = s.cut == Cut::experts;
    view = TensorView((expert ? g.experts : g.dense).ptr<float>() + filled[expert], DType::f32, s.shape);
    filled[expert] += (s.shape.elements() + 15) / 16 * 16;
  }
  return g;
}

struct Fixture {
  explicit Fixture(const OptimizerConfig& config)
      : config(config), gradients(make_test_gradients(table, config, arena)), partition(gradients, nullptr),
        optimizer(table, config, partition, nullptr) {
    Philox rng(1, RngPurpose::test);
    const Status read = optimizer.read_masters(context, [&](const TensorSpec&, const Box&, TensorView out) {
      if (out.dtype == DType::f32)
        for (int64_t i = 0; i < out.shape.elements(); ++i) out.ptr<float>()[i] = 2.0f * rng.uniform() - 1.0f;
      return Status::ok();
    });
    CHECK(read.is_ok(), "{}", read.message());
  }
  void random_gradients(uint64_t seed, float magnitude) {
    Philox rng(seed, RngPurpose::test);
    for (const TensorView& v : gradients.set.views)
      for (int64_t i = 0; i < (v.empty() ? 0 : v.shape.elements()); ++i)
        v.ptr<float>()[i] = (2.0f * rng.uniform() - 1.0f) * magnitude;
  }
  // By id; empty where there are none.
  std::vector<std::vector<float>> values(const TensorSet& set) const {
    std::vector<std::vector<float>> out;
    for (const TensorView& v : set.views)
      out.push_back(v.empty() || v.dtype != DType::f32 ? std::vector<float>()
                                                       : std::vector<float>(v.ptr<float>(), v.ptr<float>() + v.shape.elements()));
    return out;
  }
  std::vector<std::vector<float>> owned(TensorView Optimizer::Owned::*what) const {
    TensorSet set;
    set.views.resize(table.size());
    for (const Optimizer::Owned& o : optimizer.owned()) set.views[static_cast<size_t>(o.piece.id)] = o.*what;
    return values(set);
  }
  std::vector<std::vector<float>> masters() const {
    TensorSet set;
    set.views.resize(table.size());
    for (const Optimizer::Owned& o : optimizer.owned()) set.views[static_cast<size_t>(o.piece.id)] = o.master;
    for (const Optimizer::Frozen& m : optimizer.frozen()) set.views[static_cast<size_t>(m.id)] = m.master;
    return values(set);
  }

  const OptimizerConfig config;
  const std::vector<TensorSpec> table = test_table();
  CpuContext context{2, 1 << 20};
  Arena arena{"test", 1 << 20};
  Gradients gradients;
  Partition partition;
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
      EXPECT_EQ(!f.owned(&Optimizer::Owned::m)[i].empty(), wanted[i]) << f.table[i].name;
      EXPECT_EQ(!f.owned(&Optimizer::Owned::v)[i].empty(), wanted[i]) << f.table[i].name;
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
  for (const auto& x : f.masters()) {
    w.emplace_back(x.begin(), x.end());
    m.emplace_back(x.size(), 0.0);
    v.emplace_back(x.size(), 0.0);
  }
  bool clipped = false, unclipped = false;
  for (int step = 1; step <= 10; ++step) {
    f.random_gradients(static_cast<uint64_t>(step), step % 2 == 0 ? 2.0f : 0.05f);
    const auto g = f.values(f.gradients.set);
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
    const OptimizerStep s = f.optimizer.step(f.context);
    EXPECT_FALSE(s.skipped);
    EXPECT_NEAR(s.grad_norm, norm, 1e-6 * norm);
    EXPECT_NEAR(s.lr, lr, 1e-12);
    EXPECT_EQ(f.optimizer.steps_applied(), step);
  }
  EXPECT_TRUE(clipped && unclipped);
  const auto got = f.masters();
  for (size_t i = 0; i < got.size(); ++i)
    for (size_t k = 0; k < got[i].size(); ++k) EXPECT_NEAR(got[i][k], w[i][k], 1e-6) << f.table[i].name << " " << k;
}

TEST(Optimizer, NoDecayOnVectorsAndNothingOnFrozenTensors) {
  OptimizerConfig config;
  config.lr = 0.5f;
  config.weight_decay = 0.5f;
  Fixture f(config);  // gradients are zero: decay alone moves weights
  const auto before = f.masters();
  f.optimizer.step(f.context);
  const auto after = f.masters();
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
    const OptimizerStep first = f.optimizer.step(f.context);
    clean.optimizer.step(clean.context);
    const auto masters = f.masters(), m = f.owned(&Optimizer::Owned::m),
               v = f.owned(&Optimizer::Owned::v);
    f.gradients.set.views[2].ptr<float>()[5] = bad;
    for (int n = 1; n <= 2; ++n) {
      const OptimizerStep lost = f.optimizer.step(f.context);
      EXPECT_TRUE(lost.skipped);
      EXPECT_FALSE(std::isfinite(lost.grad_norm));
      EXPECT_EQ(f.optimizer.skipped_in_a_row(), n);
      EXPECT_EQ(f.optimizer.steps_applied(), 1);
    }
    EXPECT_EQ(f.masters(), masters);
    EXPECT_EQ(f.owned(&Optimizer::Owned::m), m);
    EXPECT_EQ(f.owned(&Optimizer::Owned::v), v);
    // The next good step is what it would have been without the lost ones.
    f.random_gradients(2, 0.1f);
    clean.random_gradients(2, 0.1f);
    const OptimizerStep second = f.optimizer.step(f.context);
    clean.optimizer.step(clean.context);
    EXPECT_EQ(second.lr, 2 * first.lr);
    EXPECT_EQ(f.optimizer.skipped_in_a_row(), 0);
    EXPECT_EQ(f.masters(), clean.masters());
  }
}

TEST(Optimizer, NormCountsEveryTensorOnce) {
  Fixture f({});
  double squares = 0;
  for (const TensorView& g : f.gradients.set.views) {
    if (g.empty()) continue;
    g.ptr<float>()[0] = 3.0f;
    squares += 9;
  }
  EXPECT_EQ(f.optimizer.global_norm(f.context), std::sqrt(squares));
}

TEST(OptimizerDeath, AGradientOfAFrozenTensorNamesIt) {
  OptimizerConfig thawed, frozen;
  thawed.freeze_router = false;
  Fixture f(thawed);
  EXPECT_DEATH(Optimizer(f.table, frozen, f.partition, nullptr), "gate has a gradient but is not trained");
}

// For any number of parts: pieces cover every number of a run once, in order, as boxes; parts differ from equal ones by half a row at most.
TEST(Partition, PiecesCoverTheRunOnce) {
  OptimizerConfig config;
  config.freeze_router = false;
  Fixture f(config);
  for (int parts = 1; parts <= 40; ++parts) {
    for (const TensorView& run : {f.gradients.dense, f.gradients.experts}) {
      const CutRun cut = cut_run(f.table, f.gradients.set, run, parts);
      ASSERT_EQ(cut.parts.size(), static_cast<size_t>(parts));
      std::vector<std::vector<int>> seen;  // by tensor and element
      for (const TensorSpec& s : f.table) seen.emplace_back(static_cast<size_t>(s.shape.elements()), 0);
      int64_t end = 0;
      for (int p = 0; p < parts; ++p) {
        const Range part = cut.parts[static_cast<size_t>(p)];
        EXPECT_EQ(part.begin, end);
        end = part.end;
        EXPECT_LE(std::abs(part.end - part_of(run.rows(), parts, p).end), 4) << "rows have 7 numbers at most";
        for (const Piece& piece : cut.pieces[static_cast<size_t>(p)]) {
          const TensorSpec& s = f.table[static_cast<size_t>(piece.id)];
          const int64_t columns = whole_box(s.shape).columns.size();
          EXPECT_EQ(piece.box, (Box{piece.rows, {0, columns}}));
          EXPECT_EQ(piece.elements, (Range{piece.rows.begin * columns, piece.rows.end * columns}));
          EXPECT_TRUE(piece.flat.begin >= part.begin && piece.flat.end <= part.end);
          EXPECT_EQ(run.ptr<float>() + piece.flat.begin, f.gradients.set.views[static_cast<size_t>(piece.id)].ptr<float>() + piece.elements.begin);
          for (int64_t i = piece.elements.begin; i < piece.elements.end; ++i) ++seen[static_cast<size_t>(piece.id)][static_cast<size_t>(i)];
        }
      }
      EXPECT_EQ(end, run.rows());
      for (const TensorSpec& s : f.table) {
        const bool here = is_trained(s, config) && (s.cut == Cut::experts) == (run.data == f.gradients.experts.data);
        for (const int times : seen[static_cast<size_t>(s.id)]) EXPECT_EQ(times, here ? 1 : 0) << s.name << ", " << parts;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
