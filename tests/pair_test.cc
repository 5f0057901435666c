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
  c.rollout.max_new_tokens = 16;  // long enough for entries to be chosen
  c.train.loss.tis = TisKind::token;
  c.train.replay = ReplayKind::routing_index;  // of the weights that drew, not of those that the sampler has by then
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
}

// What a forward of `model` over whole samples chooses: run again, packed, under the sampler's weights, it is what the engine chose while it drew.
std::vector<ChoiceLog> choices_of(Context& c, Model model, std::span<const TrainSample> samples) {
  const ModelConfig& m = model.weights->config();
  const ChoiceLayout layout(m, ReplayKind::routing_index);
  std::vector<ChoiceLog> logs(samples.size());
  MicroBatch micro;
  for (size_t i = 0; i < samples.size(); ++i) {
    layout.resize(logs[i], trained_rows(samples[i]));
    micro.samples.push_back(static_cast<int32_t>(i));
    micro.rows += trained_rows(samples[i]);
  }
  const Probe probe = [&](int layer, std::string_view point, ConstTensorView rows) {
    int64_t row = 0;
    for (size_t i = 0; i < samples.size(); row += trained_rows(samples[i++])) {
      if (point == "ffn.ids") layout.put_experts(logs[i], 0, layer, rows.slice(row, trained_rows(samples[i])));
      if (point == "attn.selected") layout.put_entries(logs[i], 0, layer, rows.slice(row, trained_rows(samples[i])));
    }
  };
  model.probe = &probe;
  MicroBatchPlace place(c, *model.weights, {.max_tokens_per_microbatch = 64});
  const ArenaScope scope(*c.workspace);
  place.forward(c, model, samples, micro, /*keep=*/false, {});
  return logs;
}

template <typename T>
int64_t differing(const std::vector<T>& a, const std::vector<T>& b) {
  EXPECT_EQ(a.size(), b.size());
  int64_t n = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) n += a[i] != b[i];
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
  Model trainer, sampler;
  trainer.weights = &trained;
  sampler.weights = &sampled;
  trainer.rope = sampler.rope = make_rope_tables(m, m.max_positions, arena);

  // Chunks of prompts beside decoding samples, some of which share a prompt, wait for their turn, or begin again in the middle.
  const EngineOptions options = {.max_running = 2, .max_batch_tokens = 4, .max_context = m.max_positions};
  Engine engine(c, sampler, options, arena);
  std::vector<Request> requests(2);
  requests[0].prompt = {1, 4, 5, 6, 7, 8, 9};
  requests[0].num_samples = 3;
  requests[1].prompt_id = 1;
  requests[1].prompt = {1, 9, 9};
  for (Request& r : requests) {
    r.sampling.max_new_tokens = 50;
    r.record = ReplayKind::routing_index;
    ASSERT_TRUE(engine.submit(r).is_ok());
  }
  for (int64_t steps = 0; engine.step(); ++steps)
    if (steps == 30) engine.retract_all();
  std::vector<TrainSample> samples;
  for (const Completion& done : engine.take_finished()) {
    TrainSample& s = samples.emplace_back();
    s.tokens = requests[done.prompt_id].prompt;
    s.prompt_length = static_cast<int64_t>(s.tokens.size());
    s.tokens.insert(s.tokens.end(), done.tokens.begin(), done.tokens.end());
    s.choices = done.choices;
  }
  ASSERT_EQ(samples.size(), 4u);
  const std::vector<ChoiceLog> again = choices_of(c, sampler, samples), other = choices_of(c, trainer, samples);
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_GT(samples[i].choices.entries.size(), 0u);
    EXPECT_TRUE(samples[i].choices == again[i]) << "sample " << i;
    EXPECT_GT(differing(other[i].experts, again[i].experts), 0);
  }

  // The trainer's forward then takes them. Entries change what is seen of experts, and the other way round, but not what is repeated.
  for (const ReplayKind kind : {ReplayKind::routing, ReplayKind::routing_index}) {
    std::vector<TrainSample> repeated = samples;
    if (kind == ReplayKind::routing)
      for (TrainSample& s : repeated) s.choices.entries.clear();
    const ChoiceLayout layout(m, ReplayKind::routing_index);
    for (size_t i = 0; i < samples.size(); ++i) {
      ChoiceLog seen;
      layout.resize(seen, trained_rows(samples[i]));
      const Probe probe = [&](int layer, std::string_view point, ConstTensorView rows) {
        if (point == "ffn.ids") layout.put_experts(seen, 0, layer, rows);
        if (point == "attn.selected") layout.put_entries(seen, 0, layer, rows);
      };
      Model model = trainer;
      model.probe = &probe;
      MicroBatchPlace place(c, trained, {.max_tokens_per_microbatch = 64, .replay = kind});
      const ArenaScope scope(c.workspace());
      place.forward(c, model, repeated, {.samples = {static_cast<int32_t>(i)}, .rows = trained_rows(samples[i])}, false, {});
      EXPECT_EQ(differing(seen.experts, samples[i].choices.experts), 0);
      EXPECT_EQ(differing(seen.entries, samples[i].choices.entries) == 0, kind == ReplayKind::routing_index);
    }
  }

  // Of rows that a cache has, the engine sees no choices.
  EngineOptions cached = options;
  cached.cache_slots = 1;
  EXPECT_NE(Engine(c, sampler, cached, arena).check(requests[0]).message().find("prefix cache"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
