// Pairs of numerics: whole runs whose sampler computes in another mode than the trainer, beside exact ones; and that replay repeats what the sampler's
// engine chose while it drew.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>

#include <unistd.h>

#include "io/json.h"
#include "model/stack.h"
#include "rl/loop.h"
#include "rollout/engine.h"
#include "tests/tiny_run.h"
#include "train/micro_batch.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class Pair : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("lockstep_pair_{}_{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
    fs::create_directories(root_);
    make_tiny_task(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  LoopConfig config(const std::string& run, Numerics trainer, SamplerNumerics sampler, int64_t steps) const {
    LoopConfig c = tiny_loop_config(root_, run, steps);
    c.run.eval_every = 0;
    c.model.numerics = trainer;
    c.model.sampler = sampler;
    c.optimizer.lr = 3e-3f;
    return c;
  }
  LoopReport run(const LoopConfig& c, bool resume = false) {
    Result<LoopReport> report = run_loop(c, resume, Hooks());
    EXPECT_TRUE(report.is_ok()) << (report ? "" : report.message());
    return report ? report.take() : LoopReport();
  }
  // metrics.jsonl of a run, a map a step.
  std::vector<std::map<std::string, double>> metrics(const std::string& run) const {
    std::vector<std::map<std::string, double>> steps;
    std::istringstream lines(contents(root_ / run / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const Result<JsonValue> value = parse_json(line);
      EXPECT_TRUE(value.is_ok());
      steps.emplace_back();
      for (const JsonMember& m : value.value().members) steps.back()[m.name] = std::strtod(m.value.text.c_str(), nullptr);
    }
    return steps;
  }
  std::string masters(const std::string& run, int64_t step) const { return contents(root_ / run / "checkpoints" / step_name(step) / "masters.safetensors"); }

  fs::path root_;
};

TEST_F(Pair, AnInexactOneMeasuresAnExactOneAsserts) {
  constexpr int64_t kSteps = 6;
  LoopConfig c = config("apart", Numerics::bf16, SamplerNumerics::fp8, kSteps);
  c.train.steps_per_rollout = 2;
  c.train.loss.tis = TisKind::token;
  EXPECT_GT(run(c).max_gap, 0);
  const auto apart = metrics("apart");
  ASSERT_EQ(apart.size(), static_cast<size_t>(kSteps));
  for (auto m : apart) {
    EXPECT_GT(m["gap/exact_mismatch"], 0);
    EXPECT_GT(m["gap/logprob_abs_diff"], 0);
    EXPECT_GT(m["gap/k3"], 0);
    EXPECT_GT(m["gap/decile_0/logprob_abs_diff_tok"], 0);
    EXPECT_GT(m["train/tis_abs"], 0);
    EXPECT_EQ(m["sync/saturated"], 0);
    EXPECT_GE(m["sync/underflowed"], 0);
    EXPECT_EQ(m.count("sync/underflowed"), 1u);
  }
  EXPECT_NE(contents(root_ / "apart/sync.jsonl").find("\"underflowed\":"), std::string::npos);

  for (const Numerics n : {Numerics::fp8, Numerics::fp4}) {
    const std::string name = numerics_name(n);
    LoopConfig exact = config(name, n, SamplerNumerics::same, kSteps);
    exact.train.loss.tis = TisKind::sequence;
    const LoopReport report = run(exact);
    EXPECT_GT(report.compared_tokens, 0);
    EXPECT_EQ(report.max_gap, 0);
    for (auto m : metrics(name)) {
      EXPECT_EQ(m["gap/exact_mismatch"], 0);
      EXPECT_EQ(m["train/tis"], 1);
    }
    // Importance sampling changed no bit of it.
    exact.run.dir = root_ / (name + "_plain");
    exact.train.loss.tis = TisKind::none;
    run(exact);
    EXPECT_TRUE(masters(name, kSteps) == masters(name + "_plain", kSteps));
  }
}

TEST_F(Pair, AnInexactRunResumesToTheSameBytes) {
  LoopConfig c = config("straight", Numerics::bf16, SamplerNumerics::fp4, 6);
  c.train.loss.tis = TisKind::token;
  c.train.replay = ReplayKind::routing_index;
  run(c);
  LoopConfig half = c;
  half.run.dir = root_ / "resumed";
  half.run.steps = 3;
  run(half);
  half.run.steps = 6;
  half.train.recompute = true;  // repeats the same choices in backward
  run(half, true);
  expect_same_runs(root_ / "straight", root_ / "resumed", 6);
  EXPECT_FALSE(masters("straight", 6) == masters("resumed", 3));
}

// What the numerics cost and what a step's age costs, apart: the first step's samples are of the weights that train on them.
TEST_F(Pair, AheadTheGapIsSplitByAge) {
  LoopConfig c = config("straight", Numerics::bf16, SamplerNumerics::fp8, 4);
  c.rollout.ahead = 1;
  c.train.loss.tis = TisKind::token;
  run(c);
  const auto steps = metrics("straight");
  ASSERT_EQ(steps.size(), 4u);
  for (size_t i = 0; i < steps.size(); ++i) {
    auto m = steps[i];
    EXPECT_EQ(m["staleness/lag/mean"], i == 0 ? 0 : 1);
    const std::string lag = fmt::format("staleness/lag_{}/", i == 0 ? 0 : 1);
    EXPECT_EQ(m[lag + "tokens"], m["train/tokens"]);
    EXPECT_EQ(m[lag + "logprob_abs_diff_tok"], m["gap/logprob_abs_diff_tok"]);
    EXPECT_GT(m[lag + "k3"], 0);
  }
  LoopConfig half = c;
  half.run.dir = root_ / "resumed";
  half.run.steps = 2;
  run(half);
  half.run.steps = 4;
  run(half, true);
  expect_same_runs(root_ / "straight", root_ / "resumed", 4);
}

TEST_F(Pair, WhatCannotBeMadeIsRefused) {
  const auto message = [&](LoopConfig c) {
    const Result<LoopReport> r = run_loop(c, false, Hooks());
    return r ? std::string() : r.message();
  };
  EXPECT_NE(message(config("a", Numerics::fp8, SamplerNumerics::bf16, 1)).find("cannot be made from"), std::string::npos);
  LoopConfig same = config("b", Numerics::bf16, SamplerNumerics::same, 1);
  same.train.replay = ReplayKind::routing;
  EXPECT_NE(message(same).find("train.replay"), std::string::npos);
  LoopConfig wide = config("c", Numerics::f32, SamplerNumerics::fp8, 1);
  wide.train.replay = ReplayKind::routing;
  EXPECT_NE(message(wide).find("another dtype"), std::string::npos);
}

// Rows of one point of the forward, by layer.
struct Recorder {
  std::map<int, std::vector<int32_t>> experts, entries;
  Probe probe = [this](int layer, std::string_view point, ConstTensorView rows) {
    if (point != "ffn.ids" && point != "attn.selected") return;
    std::vector<int32_t>& to = (point == "ffn.ids" ? experts : entries)[layer];
    to.insert(to.end(), rows.ptr<int32_t>(), rows.ptr<int32_t>() + rows.shape.elements());
  };
};

int64_t differing(const std::map<int, std::vector<int32_t>>& a, const std::map<int, std::vector<int32_t>>& b) {
  int64_t n = 0;
  for (const auto& [layer, rows] : a) {
    const std::vector<int32_t>& other = b.at(layer);
    EXPECT_EQ(rows.size(), other.size());
    for (size_t i = 0; i < rows.size(); ++i) n += rows[i] != other[i];
  }
  return n;
}

TEST_F(Pair, ReplayRepeatsWhatTheEngineChose) {
  const Result<ModelConfig> loaded = load_model_config(root_ / "config.json");
  ASSERT_TRUE(loaded.is_ok());
  const ModelConfig& m = loaded.value();
  CpuContext c(1);
  Arena arena("test", size_t{1} << 30);
  Weights trained(m, Numerics::bf16, arena), sampled(m, Numerics::fp4, arena);
  ASSERT_TRUE(trained.load(c, random_boxes(m, 3), 0).is_ok());
  ASSERT_TRUE(sampled.load(c, random_boxes(m, 3), 0).is_ok());
  Model trainer{.weights = &trained}, sampler{.weights = &sampled};
  trainer.rope = sampler.rope = make_rope_tables(m, m.max_positions, arena);

  // One sample, drawn token by token: its rows come in order of position.
  Recorder drawn;
  sampler.probe = &drawn.probe;
  Engine engine(c, sampler, {.max_running = 1, .max_batch_tokens = 4, .max_context = m.max_positions}, arena);
  Request request;
  request.prompt = {1, 4, 5, 6, 7, 8};
  request.sampling.max_new_tokens = 50;
  ASSERT_TRUE(engine.submit(request).is_ok());
  while (engine.step()) {
  }
  const std::vector<Completion> done = engine.take_finished();
  ASSERT_EQ(done.size(), 1u);
  TrainSample sample;
  sample.tokens = request.prompt;
  sample.prompt_length = static_cast<int64_t>(request.prompt.size());
  sample.tokens.insert(sample.tokens.end(), done.front().tokens.begin(), done.front().tokens.end());
  const MicroBatch micro{.samples = {0}, .rows = trained_rows(sample)};

  const auto trained_with = [&](ReplayKind kind) {
    Recorder seen;
    Model model = trainer;
    model.probe = &seen.probe;
    MicroBatchPlace place(trained, {.max_tokens_per_microbatch = 64, .replay = kind});
    const ArenaScope scope(c.workspace());
    place.forward(c, model, kind == ReplayKind::none ? nullptr : &sampler, std::span(&sample, 1), micro, false, {});
    return seen;
  };
  sampler.probe = nullptr;
  const Recorder alone = trained_with(ReplayKind::none), routing = trained_with(ReplayKind::routing), both = trained_with(ReplayKind::routing_index);
  EXPECT_GT(differing(alone.experts, drawn.experts), 0);
  EXPECT_EQ(differing(routing.experts, drawn.experts), 0);
  EXPECT_EQ(differing(both.experts, drawn.experts), 0);
  EXPECT_GT(differing(routing.entries, drawn.entries), 0);
  EXPECT_EQ(differing(both.entries, drawn.entries), 0);
}

}  // namespace
}  // namespace lockstep
