// Ranks that share the prompts and samples of every step, against one process alone. Run by any number of ranks: all of them make
// each run together, and rank 0 makes the same run alone beside it.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io/checked_line.h"
#include "io/json.h"
#include "model/checkpoint_boxes.h"
#include "parallel/testing.h"
#include "rl/checkpoint.h"
#include "rl/layouts.h"
#include "rl/peers.h"
#include "tests/tiny_run.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

RankWorld* world = nullptr;

bool first() { return world->rank() == 0; }

class DataParallel : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string root = fs::temp_directory_path() / fmt::format("lockstep_dp_{}", ::getpid());
    world->all().broadcast(&root, 0, "directory");
    root_ = root;
    if (first()) {
      fs::create_directories(root_);
      make_tiny_task(root_);
    }
    world->all().barrier("task");
  }
  void TearDown() override {
    world->all().barrier("test");
    if (first()) fs::remove_all(root_);
  }
  std::string path(const std::string& name) const { return root_ / name; }
  LoopConfig loop_config(const std::string& run, int64_t steps) const { return tiny_loop_config(root_, run, steps); }

  LoopReport run(const LoopConfig& config, bool resume, RankWorld* ranks) {
    Result<LoopReport> report = run_loop(config, resume, Hooks(), ranks);
    EXPECT_TRUE(report.is_ok()) << (report ? "" : report.message());
    return report ? report.take() : LoopReport();
  }

  fs::path root_;
};

TEST_F(DataParallel, SamplesAndMetricsOfGivenWeightsAreThoseOfOneRank) {
  LoopConfig config = loop_config("together", 1);
  config.rollout.prompts_per_step = 5;  // unequal shares, and of evaluations too
  config.eval.problems = 7;
  const LoopReport together = run(config, false, world);
  EXPECT_GT(together.compared_tokens, 0);
  EXPECT_EQ(together.max_gap, 0);
  if (!first()) return;
  config.run.dir = path("alone");
  const LoopReport alone = run(config, false, nullptr);
  EXPECT_EQ(together.compared_tokens, alone.compared_tokens);
  for (const char* file : {"/rollouts/step_000001.jsonl", "/evals/step_000000.jsonl"})
    EXPECT_TRUE(contents(path("together") + file) == contents(path("alone") + file)) << file;

  // Everything that is computed under the first weights, but for the order in which gradients are added and the packing.
  const std::set<std::string> other = {"train/grad_norm", "train/microbatches"};
  const auto step_one = [&](const std::string& run) {
    const std::string text = contents(path(run) + "/metrics.jsonl");
    Result<JsonValue> line = parse_json(std::string_view(text).substr(text.find('\n') + 1));
    EXPECT_TRUE(line.is_ok());
    return line.take();
  };
  const JsonValue a = step_one("together"), b = step_one("alone");
  ASSERT_EQ(a.members.size(), b.members.size());
  int compared = 0;
  for (const auto& [name, value] : a.members) {
    if (other.contains(name)) continue;
    ASSERT_NE(b.find(name), nullptr) << name;
    EXPECT_EQ(value.text, b.find(name)->text) << name;
    ++compared;
  }
  EXPECT_GT(compared, 40);
}

TEST_F(DataParallel, RunsRepeatAndResumeToTheBit) {
  LoopConfig config = loop_config("straight", 6);
  config.run.checkpoint_every = 3;
  config.run.eval_every = 2;
  config.rollout.prompts_per_step = 3;
  config.train.steps_per_rollout = 2;
  config.train.loss.kl = KlKind::k3;
  config.train.loss.kl_coef = 0.05f;
  EXPECT_EQ(run(config, false, world).max_gap, 0);
  LoopConfig again = config;
  again.run.dir = path("again");
  run(again, false, world);

  LoopConfig resumed = config;
  resumed.run.dir = path("resumed");
  resumed.run.steps = 4;
  run(resumed, false, world);
  if (first()) {
    fs::remove(path("resumed/checkpoints/step_000004/COMPLETE"));
    fs::copy(path("resumed"), path("fewer"), fs::copy_options::recursive);
  }
  resumed.run.steps = 6;
  const LoopReport report = run(resumed, true, world);  // rank 0 is the first to look at the directory
  EXPECT_EQ(report.first_step, 3);
  EXPECT_EQ(report.last_step, 6);
  if (!first()) return;
  expect_same_runs(path("straight"), path("again"), 6);
  expect_same_runs(path("straight"), path("resumed"), 6);
  const std::string masters = box_file(kMastersStem, 0, world->size());
  EXPECT_FALSE(contents(path("straight/checkpoints/step_000003/" + masters)) == contents(path("straight/checkpoints/step_000006/" + masters)))
      << "the weights did move";

  // The same checkpoint goes on with one rank: the next samples are the same.
  LoopConfig fewer = resumed;
  fewer.run.dir = path("fewer");
  fewer.run.steps = 4;
  EXPECT_EQ(run(fewer, true, nullptr).first_step, 3);
  EXPECT_TRUE(contents(path("fewer/rollouts/step_000004.jsonl")) == contents(path("straight/rollouts/step_000004.jsonl")));
}

// A run that fails in a step leaves what it had finished to whoever resumes it, however many ranks these are.
TEST_F(DataParallel, FinishedRolloutsAreTakenFromEveryRanksLog) {
  LoopConfig config = loop_config("straight", 6);
  config.run.checkpoint_every = 3;
  config.rollout.prompts_per_step = 3;
  const int64_t a_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt;
  EXPECT_EQ(run(config, false, world).samples_drawn, 6 * a_step);

  config.run.dir = path("broken");
  Hooks hooks;
  hooks.line = [&](const std::string& text) {  // the records of step 5 will find a directory in their place
    if (first() && text.starts_with("step 4/6")) fs::create_directories(path("broken/rollouts/step_000005.jsonl/x"));
  };
  const Result<LoopReport> broken = run_loop(config, false, hooks, world);
  ASSERT_FALSE(broken.is_ok());
  EXPECT_NE(broken.message().find("step_000005.jsonl"), std::string::npos) << broken.message();
  if (first()) {
    EXPECT_FALSE(fs::exists(rollout_log_path(path("broken"), 3)));
    int logs = 0;
    for (const auto& entry : fs::directory_iterator(rollout_log_path(path("broken"), 5))) logs += entry.path().extension() == ".jsonl";
    EXPECT_EQ(logs, world->size());
    fs::remove_all(path("broken/rollouts/step_000005.jsonl"));
    // Of one rank's samples of step 5 all but the first two are lost.
    const std::string file = rollout_log_path(path("broken"), 5) + "/rank_0.jsonl";
    std::string text = contents(file);
    size_t end = 0;
    for (int lines = 0; lines < 4; ++lines) end = text.find('\n', end) + 1;  // an empty one and the header before them
    std::ofstream(file) << text.substr(0, end + 7);
    fs::copy(path("broken"), path("fewer"), fs::copy_options::recursive);
  }
  const int64_t lost = part_of(a_step, world->size(), 0).size() - 2;
  const LoopReport report = run(config, true, world);
  EXPECT_EQ(report.first_step, 3);
  EXPECT_EQ(report.samples_logged, 2 * a_step - lost);
  EXPECT_EQ(report.samples_drawn, a_step + lost);
  EXPECT_EQ(report.max_gap, 0);
  if (!first()) return;
  expect_same_runs(path("straight"), path("broken"), 6);

  LoopConfig fewer = config;
  fewer.run.dir = path("fewer");
  fewer.run.steps = 4;
  const LoopReport alone = run(fewer, true, nullptr);
  EXPECT_EQ(alone.samples_logged, a_step) << "weights of the checkpoint are the same with one rank";
  EXPECT_EQ(alone.samples_drawn, 0);
  EXPECT_TRUE(contents(path("fewer/rollouts/step_000004.jsonl")) == contents(path("straight/rollouts/step_000004.jsonl")));
}

// A command need not answer the same twice, so ranks that each asked their own would train on different rewards: only rank 0 asks.
TEST_F(DataParallel, ACommandJudgesOnceForAllRanks) {
  LoopConfig config = loop_config("judged", 3);
  config.run.eval_every = 2;
  config.task.reward.grader = GraderKind::command;
  config.task.reward.command = fmt::format("echo started >> {}; ", path("started")) +
      "while IFS= read -r line; do id=${line#*:}; id=${id%%,*}; echo \"{\\\"id\\\":$id,\\\"score\\\":$(((id + 1) * $$ % 11))}\"; done";
  config.task.reward.workers = 1;
  EXPECT_EQ(run(config, false, world).last_step, 3);
  world->all().barrier("judged");
  // One program for training, one for each evaluation, before the first step and after the second.
  EXPECT_EQ(contents(path("started")), "started\nstarted\nstarted\n");
}

// The sampler under every layout of the ranks, the trainer under one: the run's files have the same bytes, and the two sides' log-probs the
// same bits, though the sampler's weights are copies.
TEST_F(DataParallel, TheSamplersLayoutChangesNothing) {
  LoopConfig config = loop_config("shared", 3);
  config.run.eval_every = 3;
  config.rollout.prompts_per_step = 3;
  run(config, false, world);
  EXPECT_FALSE(first() && fs::exists(path("shared/sync.jsonl"))) << "engine and actor read the same weights";
  const ModelConfig model = find_model_config(config.model).value();
  for (const Layout& layout : possible_layouts({.ranks = world->size(), .layers = 1, .experts = model.num_experts, .output_groups = model.o_groups})) {
    if (layout.tp == 1 && layout.ep == 1) continue;
    SCOPED_TRACE(layout.str());
    config.run.dir = path(fmt::format("tp{}_ep{}", layout.tp, layout.ep));
    config.parallel.rollout_tp = layout.tp;
    config.parallel.rollout_ep = layout.ep;
    const LoopReport report = run(config, false, world);
    EXPECT_GT(report.compared_tokens, 0);
    EXPECT_EQ(report.max_gap, 0);
    if (!first()) continue;
    expect_same_runs(path("shared"), config.run.dir, 3);
    // A receipt for the weights of the start and of every step, each of other weights.
    const std::string text = contents(config.run.dir + "/sync.jsonl");
    std::set<std::string> checksums;
    int64_t version = 0;
    for (size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) {
      Result<JsonValue> line = parse_json(std::string_view(text).substr(begin, text.find('\n', begin) - begin));
      ASSERT_TRUE(line.is_ok());
      int64_t seen = -1;
      EXPECT_TRUE(line.value().find("version")->as_int64(&seen));
      EXPECT_EQ(seen, version++);
      checksums.insert(line.value().find("checksum")->text);
    }
    EXPECT_EQ(version, 4);
    EXPECT_EQ(checksums.size(), 4u);
  }
}

// Samplers on ranks of their own, one rank that trains: the run's files have the bytes of one process alone, checkpoints included, and either goes on
// where the other stopped.
TEST_F(DataParallel, SamplersOnOtherRanksChangeNothing) {
  LoopConfig config = loop_config("alone", 4);
  config.run.checkpoint_every = 2;
  config.run.eval_every = 2;
  config.rollout.prompts_per_step = 3;
  config.train.steps_per_rollout = 2;
  config.train.loss.kl = KlKind::k3;
  config.train.loss.kl_coef = 0.05f;
  if (first()) run(config, false, nullptr);
  LoopConfig half = config;
  half.run.steps = 2;
  config.parallel.rollout_ranks = world->size() - 1;
  const ModelConfig model = find_model_config(config.model).value();
  for (const Layout& layout : possible_layouts({.ranks = world->size() - 1, .layers = 1, .experts = model.num_experts, .output_groups = model.o_groups})) {
    SCOPED_TRACE(layout.str());
    config.parallel.rollout_tp = layout.tp;
    config.parallel.rollout_ep = layout.ep;
    for (const bool resumed : {false, true}) {
      config.run.dir = half.run.dir = path(fmt::format("apart_tp{}_ep{}{}", layout.tp, layout.ep, resumed ? "_resumed" : ""));
      if (resumed && first()) run(half, false, nullptr);
      const LoopReport report = run(config, resumed, world);
      EXPECT_EQ(report.last_step, 4);
      if (!first()) continue;
      EXPECT_GT(report.compared_tokens, 0);
      EXPECT_EQ(report.max_gap, 0);
      expect_same_runs(path("alone"), config.run.dir, 4);
    }
  }
}

// One step ahead: batch k + 1 comes from the weights that step k began with. Its tokens were compared under these, the run has the same bytes wherever the
// samplers are, and a checkpoint has the batch in flight.
TEST_F(DataParallel, AheadIsTheSameWhereverTheSamplersAre) {
  LoopConfig config = loop_config("alone", 6);
  config.run.checkpoint_every = 3;
  config.run.eval_every = 2;
  config.rollout.prompts_per_step = 3;
  config.rollout.ahead = 1;
  config.train.loss.tis = TisKind::token;
  const int64_t a_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt;
  for (const int64_t steps_per_rollout : {1, 2}) {
    SCOPED_TRACE(steps_per_rollout);
    config.parallel = {};
    config.sync = {};
    config.train.steps_per_rollout = steps_per_rollout;
    config.run.dir = path(fmt::format("alone{}", steps_per_rollout));
    const std::string alone = config.run.dir;
    LoopReport straight;
    if (first()) {
      straight = run(config, false, nullptr);
      EXPECT_EQ(straight.samples_drawn, 7 * a_step) << "the batch that the last checkpoint holds";
      EXPECT_EQ(straight.max_gap, 0);
      const std::string metrics = contents(alone + "/metrics.jsonl");
      EXPECT_NE(metrics.find("\"staleness/lag/max\":0"), std::string::npos) << "of the first step";
      EXPECT_NE(metrics.find(fmt::format("\"staleness/lag_{}/tokens\":", steps_per_rollout)), std::string::npos);
      EXPECT_EQ(metrics.find(fmt::format("\"staleness/lag_{}/tokens\":", steps_per_rollout + 1)), std::string::npos);
      LoopConfig half = config;
      half.run.dir = path(fmt::format("resumed{}", steps_per_rollout));
      half.run.steps = 3;
      run(half, false, nullptr);
    }
    config.parallel.rollout_ranks = world->size() - 1;
    config.sync.delta = steps_per_rollout == 2;  // moves less, and nothing else
    config.run.dir = path(fmt::format("apart{}", steps_per_rollout));
    const LoopReport apart = run(config, false, world);
    if (first()) {
      EXPECT_EQ(apart.compared_tokens, straight.compared_tokens);
      EXPECT_EQ(apart.samples_drawn, 7 * a_step);
      EXPECT_EQ(apart.max_gap, 0);
      expect_same_runs(alone, config.run.dir, 6);
    }
    config.run.dir = path(fmt::format("resumed{}", steps_per_rollout));
    const LoopReport resumed = run(config, true, world);
    if (first()) {
      EXPECT_EQ(resumed.samples_logged, a_step) << "from the checkpoint";
      EXPECT_EQ(resumed.samples_drawn, 3 * a_step);
      expect_same_runs(alone, config.run.dir, 6);
      EXPECT_TRUE(contents(alone + "/checkpoints/step_000006/in_flight.jsonl") == contents(config.run.dir + "/checkpoints/step_000006/in_flight.jsonl"));
    }
    world->all().barrier("compared");
  }
}

// Who is complete first is agreed upon at engine steps, so that a layout's run repeats and can be resumed, wherever the samplers are. With a sampler of other
// numerics, choices of finished samples wait with them, and those of others are recorded again.
TEST_F(DataParallel, OverSamplingRepeatsWithAsManyRanks) {
  for (const bool replay : {false, true}) {
    for (const int64_t rollout_ranks : std::set<int64_t>{0, world->size() - 1}) {
      const std::string name = fmt::format("{}_{}", replay ? "replay" : "exact", rollout_ranks);
      SCOPED_TRACE(name);
      LoopConfig config = loop_config(name, 6);
      config.run.checkpoint_every = 3;
      config.run.eval_every = 0;
      config.rollout.prompts_per_step = 3;
      config.rollout.over_sample = 1.5f;
      config.rollout.max_new_tokens = 24;
      config.rollout.max_running = 3;
      config.rollout.order = RolloutOrder::longest;
      config.train.loss.tis = TisKind::token;
      config.parallel.rollout_ranks = rollout_ranks;
      if (rollout_ranks == 0 && world->size() % 2 == 0) {  // several engines that need each other in every step, of several ranks
        config.parallel.rollout_ep = 2;
        config.parallel.rollout_tp = world->size() / 2;
      }
      if (replay) {
        config.model.sampler = SamplerNumerics::fp8;
        config.train.replay = ReplayKind::routing;
      }
      const LoopReport straight = run(config, false, world);
      LoopConfig half = config;
      half.run.dir = path(name + "_resumed");
      half.run.steps = 3;
      run(half, false, world);
      half.run.steps = 6;
      EXPECT_EQ(run(half, true, world).first_step, 3);
      EXPECT_EQ(straight.samples_drawn, 6 * 3 * config.rollout.samples_per_prompt);
      if (!first()) continue;
      EXPECT_EQ(straight.max_gap == 0, !replay);
      expect_same_runs(config.run.dir, half.run.dir, 6);
      const std::string tail = contents(config.run.dir + "/checkpoints/step_000006/long_tail.jsonl");
      EXPECT_NE(tail.find("\"versions\""), std::string::npos) << "samples wait";
      EXPECT_TRUE(tail == contents(half.run.dir + "/checkpoints/step_000006/long_tail.jsonl"));
      EXPECT_NE(contents(config.run.dir + "/metrics.jsonl").find("\"rollout/over_sample/prompts\":5"), std::string::npos);
    }
  }
}

// Choices recorded by samplers in any layout are repeated by trainers in any, stages included: what a first step measures under them is what one process
// measures alone.
TEST_F(DataParallel, ReplayIsTheSameInEveryLayout) {
  LoopConfig config = loop_config("alone", 1);
  config.run.eval_every = 0;
  config.model.sampler = SamplerNumerics::fp8;
  config.rollout.prompts_per_step = 3;
  config.rollout.max_new_tokens = 16;
  config.train.loss.tis = TisKind::token;
  config.train.steps_per_rollout = 2;
  const auto measured = [&](const std::string& run) {
    std::map<std::string, std::string> values;
    Result<JsonValue> line = parse_json(contents(path(run) + "/metrics.jsonl"));
    EXPECT_TRUE(line.is_ok()) << run;
    for (const auto& [name, value] : line.value().members)
      if (name.starts_with("gap/") || name == "rollout/log_probs" || name == "rollout/entropy") values[name] = value.text;
    EXPECT_GT(values.size(), 30u);
    return values;
  };
  std::map<std::string, std::string> routing, both;
  if (first()) {
    run(config, false, nullptr);
    config.run.dir = path("routing_alone");
    config.train.replay = ReplayKind::routing;
    run(config, false, nullptr);
    config.run.dir = path("both_alone");
    config.train.replay = ReplayKind::routing_index;
    run(config, false, nullptr);
    routing = measured("routing_alone");
    both = measured("both_alone");
    EXPECT_NE(measured("alone"), routing);
    EXPECT_NE(routing, both);
  }
  config.train.replay = ReplayKind::routing_index;
  const ModelConfig model = find_model_config(config.model).value();
  const auto all_layouts = [&](int ranks, int64_t rollout_ranks) {
    for (const Layout& layout : possible_layouts({.ranks = ranks, .layers = model.num_layers(), .experts = model.num_experts, .output_groups = model.o_groups})) {
      SCOPED_TRACE(layout.str());
      const std::string name = fmt::format("tp{}_pp{}_ep{}_{}", layout.tp, layout.pp, layout.ep, rollout_ranks);
      config.run.dir = path(name);
      config.parallel = {.tp = layout.tp, .pp = layout.pp, .ep = layout.ep, .rollout_ranks = rollout_ranks};
      const int samplers = rollout_ranks > 0 ? static_cast<int>(rollout_ranks) : ranks;
      config.parallel.rollout_tp = layout.tp == 1 && samplers % 2 == 0 ? 2 : 1;
      config.parallel.rollout_ep = 1;
      run(config, false, world);
      if (!first()) continue;
      EXPECT_EQ(measured(name), both);
    }
  };
  all_layouts(world->size(), 0);
  if (world->size() > 1) all_layouts(world->size() / 2, world->size() - world->size() / 2);
}

// The samplers draw while the trainers work: here the trainers' reward waits for a sample of the next step, which would never come if each side waited for
// the other.
TEST_F(DataParallel, SamplersDrawWhileTrainersTrain) {
  if (world->size() == 1) GTEST_SKIP() << "one rank is both";
  LoopConfig config = loop_config("run", 3);
  config.run.eval_every = 0;
  config.rollout.ahead = 1;
  config.parallel.rollout_ranks = world->size() - 1;
  config.task.reward.grader = GraderKind::command;
  config.task.reward.workers = 1;
  config.task.reward.command = fmt::format("while [ ! -e '{}' ]; do sleep 0.01; done; while IFS= read -r line; do id=${{line#*:}}; id=${{id%%,*}}; "
                                           "echo \"{{\\\"id\\\":$id,\\\"score\\\":1}}\"; done", path("drawing"));
  Hooks hooks;
  hooks.progress = [&](const std::string& label, int64_t, int64_t, double, const std::string&) {
    if (!first() && label == "step 2/3 rollout") std::ofstream(path("drawing")) << "";
  };
  const Result<LoopReport> report = run_loop(config, false, hooks, world);
  ASSERT_TRUE(report.is_ok()) << report.message();
  if (!first()) return;
  EXPECT_EQ(contents(path("run/metrics.jsonl")).find("\"rollout/failed\":8"), std::string::npos);
}

class DataParallelErrors : public DataParallel, public ::testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ahead, DataParallelErrors, ::testing::Values(0, 1));

TEST_P(DataParallelErrors, SamplersAndTrainersHaveTheSame) {
  LoopConfig config = loop_config("run", 3);
  config.parallel.rollout_ranks = world->size() - 1;
  config.rollout.ahead = GetParam();
  const int64_t step = 1 + config.rollout.ahead;
  Hooks hooks;
  hooks.line = [&](const std::string& text) {  // the records of step 3 will find a directory in their place
    if (first() && text.starts_with("step 2/3")) fs::create_directories(path("run/rollouts/step_000003.jsonl/x"));
  };
  const Result<LoopReport> broken = run_loop(config, false, hooks, world);
  ASSERT_FALSE(broken.is_ok());
  EXPECT_NE(broken.message().find("step_000003.jsonl"), std::string::npos) << broken.message();
  world->all().barrier("broken");

  // A log-prob of a finished sample is not what the sampler recorded: the trainer notices, and the samplers look for the reason.
  const std::string log = rollout_log_path(path("run"), step);
  if (first()) {
    fs::remove_all(path("run/rollouts/step_000003.jsonl"));
    int changed = 0;
    for (const auto& entry : fs::directory_iterator(log)) {
      std::string text;
      for_each_checked_line(contents(entry.path()), [&](const JsonValue* line) {
        if (line == nullptr || line->find("key") == nullptr) return;
        JsonLine other;
        for (const auto& [name, value] : line->members) {
          if (name == "sum") continue;
          std::vector<int32_t> numbers;
          for (const JsonValue& v : value.items) {
            int64_t n = 0;
            EXPECT_TRUE(v.as_int64(&n));
            numbers.push_back(static_cast<int32_t>(n));
          }
          if (name == "logprob_bits" && changed++ == 0) numbers[0] ^= 1;
          int64_t number = 0;
          if (value.is(JsonValue::Kind::array)) {
            other.add(name, std::span<const int32_t>(numbers));
          } else if (value.as_int64(&number)) {
            other.add(name, number);
          } else {
            other.add(name, value.text);
          }
        }
        text += checked_line(other) + "\n";
      });
      std::ofstream(entry.path()) << text;
    }
    EXPECT_EQ(changed, 8) << "samples of that step";
  }
  world->all().barrier("changed");
  const Result<LoopReport> unequal = run_loop(config, true, Hooks(), world);
  ASSERT_FALSE(unequal.is_ok());
  EXPECT_TRUE(unequal.message().starts_with(fmt::format("step {}: sample ", step))) << unequal.message();
  EXPECT_NE(unequal.message().find("response token 0"), std::string::npos) << unequal.message();
  EXPECT_NE(unequal.message().find("gives equal bits everywhere when it is alone"), std::string::npos) << unequal.message();
  EXPECT_EQ(unequal.message().find('\n', unequal.message().find('\n') + 1), std::string::npos) << "nobody else spoke: " << unequal.message();
}

// Trainer and sampler both cut: the weights must travel. The first step's samples are drawn from the weights of the start, so they are those of
// one rank alone; later ones follow gradients that were added in another order, but their log-probs agree as ever.
TEST_F(DataParallel, WeightsFollowBetweenAnyTwoLayouts) {
  LoopConfig config = loop_config("alone", 2);
  if (first()) run(config, false, nullptr);
  const ModelConfig model = find_model_config(config.model).value();
  const LayoutLimits limits{.ranks = world->size(), .layers = model.num_layers(), .experts = model.num_experts, .output_groups = model.o_groups};
  for (const Layout& layout : possible_layouts(limits)) {
    if (layout.tp * layout.pp * layout.ep == 1) continue;
    SCOPED_TRACE(layout.str());
    config.run.dir = path(fmt::format("tp{}_pp{}_ep{}", layout.tp, layout.pp, layout.ep));
    config.parallel = {.tp = layout.tp, .pp = layout.pp, .ep = layout.ep};
    config.parallel.rollout_tp = layout.tp == 2 ? 1 : 2;
    config.parallel.rollout_ep = layout.ep > 1 ? 1 : world->size() / static_cast<int>(config.parallel.rollout_tp);
    const LoopReport report = run(config, false, world);
    EXPECT_EQ(report.last_step, 2);
    EXPECT_GT(report.compared_tokens, 0);
    EXPECT_EQ(report.max_gap, 0);
    if (!first()) continue;
    EXPECT_TRUE(contents(config.run.dir + "/rollouts/step_000001.jsonl") == contents(path("alone/rollouts/step_000001.jsonl")));
    EXPECT_TRUE(fs::exists(config.run.dir + "/sync.jsonl"));
  }
}

// A checkpoint in as many files as there are ranks.
class ShardedSave : public DataParallel {
 protected:
  static constexpr int64_t kRows = 4000, kColumns = 8;
  void SetUp() override {
    DataParallel::SetUp();
    Result<RunDir> opened = first() ? RunDir::open(path("run"), RunDir::Mode::start) : Result<RunDir>(Status::error("not here"));
    if (opened) dir_ = std::make_unique<RunDir>(opened.take());
    ASSERT_EQ(dir_ != nullptr, first());
    world->all().barrier("run directory");
  }
  static std::vector<float> numbers(int64_t step) {
    std::vector<float> x(kRows * kColumns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) + static_cast<float>(step) / 8;
    return x;
  }
  // This rank's rows, and rank 0 a file that is nobody's.
  static Status write_own(const std::string& directory, int64_t step) {
    std::vector<float> x = numbers(step);
    const Range rows = part_of(kRows, world->size(), world->rank());
    const BoxView box = {"x", {kRows, kColumns}, {rows, {0, kColumns}}, TensorView(&x[static_cast<size_t>(rows.begin * kColumns)], DType::f32, {rows.size(), kColumns})};
    if (first()) LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/config.json", "{}"));
    for (const char* stem : {kMastersStem, kOptimizerStem})
      LOCKSTEP_RETURN_IF_ERROR(write_boxes(directory + "/" + box_file(stem, world->rank(), world->size()), {&box, 1}, {}));
    return Status::ok();
  }
  Status save(int64_t step, const WriteFiles& write, int64_t keep = 2) {
    const RunState state = {.kind = "train", .step = step, .rows = "r", .cursor = {}};
    return save_run(dir_.get(), Peers(world), write, state, "settings", keep);
  }
  Status save(int64_t step) {
    return save(step, [&](const std::string& directory) { return write_own(directory, step); });
  }
  std::string checkpoints() const {
    std::string s;
    const Result<std::vector<Checkpoint>> complete = complete_checkpoints(path("run"));
    for (const Checkpoint& c : complete.value()) s += fmt::format("{} ", c.step);
    return s;
  }
  int64_t num_entries() const { return std::distance(fs::directory_iterator(path("run/checkpoints")), fs::directory_iterator()); }

  std::unique_ptr<RunDir> dir_;  // of rank 0
};

TEST_F(ShardedSave, HoldsEveryRanksFilesAndTheirChecksums) {
  for (int64_t step = 1; step <= 3; ++step) ASSERT_TRUE(save(step).is_ok());
  ASSERT_TRUE(save(3, [](const std::string&) { return Status::error("it is there already"); }).is_ok());
  EXPECT_EQ(checkpoints(), "2 3 ");
  EXPECT_EQ(num_entries(), 2);
  const std::string newest = path("run/checkpoints/step_000003");
  Result<BoxFiles> files = BoxFiles::open(newest, kMastersStem);
  ASSERT_TRUE(files.is_ok()) << files.message();
  std::vector<float> x(kRows * kColumns);
  ASSERT_TRUE(files.value().read("x", whole_box({kRows, kColumns}), TensorView(x.data(), DType::f32, {kRows, kColumns})).is_ok());
  EXPECT_EQ(x, numbers(3));
  const Result<JsonValue> sums = parse_json(contents(newest + "/checksums.json"));
  ASSERT_TRUE(sums.is_ok());
  EXPECT_EQ(sums.value().members.size(), static_cast<size_t>(2 * world->size() + 3)) << "config.json, settings, state";
  EXPECT_TRUE(check_checkpoint(newest, world->rank(), world->size()).is_ok());
  world->all().barrier("checked");

  // A byte of the last rank's file: whoever has to read it says so.
  const std::string file = box_file(kMastersStem, world->size() - 1, world->size());
  if (first()) {
    std::string bytes = contents(newest + "/" + file);
    bytes.back() ^= 1;
    std::ofstream(newest + "/" + file, std::ios::binary) << bytes;
  }
  world->all().barrier("damaged");
  const Status damaged = Peers(world).agree(check_checkpoint(newest, world->rank(), world->size()), "checksums");
  EXPECT_NE(damaged.message().find(file + " is damaged"), std::string::npos) << damaged.message();

  // A list without the file's name does not count as a list that the file agrees with.
  world->all().barrier("read");
  if (first()) std::ofstream(newest + "/checksums.json") << "{}\n";
  world->all().barrier("emptied");
  const Status unnamed = Peers(world).agree(check_checkpoint(newest, world->rank(), world->size()), "checksums");
  EXPECT_NE(unnamed.message().find("checksums.json has no checksum of masters"), std::string::npos) << unnamed.message();
}

TEST_F(ShardedSave, AFullDiskOfOneRankLeavesNoHalfCheckpoint) {
  ASSERT_TRUE(save(1).is_ok());
  const int last = world->size() - 1;
  const Status full = save(2, [&](const std::string& directory) {
    if (world->rank() != last) return write_own(directory, 2);
    rlimit before{};  // a limit of the process stands in for the disk
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small = {4096, before.rlim_max};
    const auto handler = ::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &small);
    const Status s = write_own(directory, 2);
    ::setrlimit(RLIMIT_FSIZE, &before);
    ::signal(SIGXFSZ, handler);
    return s;
  });
  ASSERT_FALSE(full.is_ok());
  EXPECT_NE(full.message().find(box_file(kMastersStem, last, world->size())), std::string::npos) << full.message();
  EXPECT_TRUE(last == 0 || full.message().starts_with(fmt::format("rank {}: cannot write", last))) << full.message();
  world->all().barrier("failed");
  EXPECT_EQ(checkpoints(), "1 ");
  EXPECT_EQ(num_entries(), 1);
  world->all().barrier("looked");
  ASSERT_TRUE(save(2).is_ok());
  EXPECT_EQ(checkpoints(), "1 2 ");

  // A directory in the way of the name is rank 0's error, and everyone's.
  if (first()) fs::create_directories(path("run/checkpoints/step_000003.partial"));
  world->all().barrier("leftover");
  const Status in_the_way = save(3, [&](const std::string& directory) {
    if (first()) fs::create_directories(directory + "/state.json/x");
    return write_own(directory, 3);
  });
  EXPECT_NE(in_the_way.message().find("state.json"), std::string::npos) << in_the_way.message();
  world->all().barrier("failed");
  EXPECT_EQ(checkpoints(), "1 2 ");
  EXPECT_EQ(num_entries(), 2);
}

TEST_F(DataParallel, AnErrorOfOneRankIsAnErrorOfAll) {
  LoopConfig config = loop_config("run", 1);
  const int last = world->size() - 1;
  if (world->rank() == last) config.task.train_file = path("missing.jsonl");
  const Result<LoopReport> report = run_loop(config, false, Hooks(), world);
  ASSERT_FALSE(report.is_ok());
  EXPECT_NE(report.message().find("missing.jsonl"), std::string::npos) << report.message();
  EXPECT_TRUE(last == 0 || report.message().starts_with(fmt::format("rank {}: ", last))) << report.message();
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(DataParallel, RanksThatDifferAreNamed) {
  const int last = world->size() - 1;
  const Status same = Peers(world).same(world->rank() == last ? 1 : 2, "weights");
  EXPECT_EQ(same.is_ok(), last == 0);
  if (last == 0) return;
  EXPECT_TRUE(same.message().starts_with(fmt::format("rank {} has other weights than rank 0", last))) << same.message();

  LoopConfig config = loop_config("run", 1);
  config.resolved = world->rank() == 0 ? "[run]\nseed = 1\n[optimizer]\nlr = 1\n" : "[run]\nseed = 1\n[optimizer]\nlr = 2\n";
  const Result<LoopReport> report = run_loop(config, false, Hooks(), world);
  ASSERT_FALSE(report.is_ok());
  EXPECT_EQ(report.message(), "rank 1: other settings than rank 0: [optimizer] lr = 2, there lr = 1");
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
