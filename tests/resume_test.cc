// A run that stopped and was resumed leaves the same bytes behind as one that never stopped: weights, optimizer state, metrics,
// rollouts and evaluations. Whole runs through the loop, on a tiny model with one layer of every kind.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io/checked_line.h"
#include "io/file.h"
#include "io/json.h"
#include "io/run_dir.h"
#include "io/safetensors.h"
#include "model/checkpoint_boxes.h"
#include "rl/arithmetic.h"
#include "rl/loop.h"
#include "rl/sft.h"
#include "tests/tiny_run.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class Resume : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("lockstep_resume_{}_{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
    fs::create_directories(root_);
    make_tiny_task(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string path(const std::string& name) const { return root_ / name; }

  LoopConfig loop_config(const std::string& run, int64_t steps) const { return tiny_loop_config(root_, run, steps); }

  LoopReport run(const LoopConfig& config, bool resume) {
    Result<LoopReport> report = run_loop(config, resume, Hooks());
    EXPECT_TRUE(report.is_ok()) << (report ? "" : report.message());
    return report ? report.take() : LoopReport();
  }

  void expect_same_runs(const std::string& a, const std::string& b, int64_t last_step) const {
    lockstep::expect_same_runs(path(a), path(b), last_step);
  }

  fs::path root_;
};

TEST_F(Resume, ThirtyAndThirtyStepsAreSixty) {
  const LoopReport straight = run(loop_config("straight", 60), false);
  EXPECT_EQ(straight.last_step, 60);
  EXPECT_GT(straight.compared_tokens, 60 * 8);
  EXPECT_EQ(straight.max_gap, 0);

  run(loop_config("resumed", 30), false);
  LoopConfig second = loop_config("resumed", 60);
  second.run.threads = 2;  // nothing depends on how many
  const LoopReport resumed = run(second, true);
  EXPECT_EQ(resumed.first_step, 30);
  EXPECT_EQ(resumed.last_step, 60);
  expect_same_runs("straight", "resumed", 60);

  // The comparison can fail: the weights did move.
  EXPECT_NE(contents(path("straight/checkpoints/step_000030/masters.safetensors")),
            contents(path("straight/checkpoints/step_000060/masters.safetensors")));
}

// Killed between checkpoints: later metrics, rollouts and half a checkpoint are there, and the work since the checkpoint is done
// again.
TEST_F(Resume, AfterBeingKilled) {
  LoopConfig config = loop_config("straight", 12);
  config.run.checkpoint_every = 4;
  config.run.eval_every = 3;
  config.train.steps_per_rollout = 2;
  config.train.loss.kl = KlKind::k3;
  config.train.loss.kl_coef = 0.05f;
  config.train.recompute = true;
  run(config, false);

  LoopConfig first = config;
  first.run.dir = path("killed");
  first.run.steps = 7;
  run(first, false);
  fs::remove(path("killed/checkpoints/step_000007/COMPLETE"));
  std::ofstream(path("killed/metrics.jsonl"), std::ios::app) << "{\"step\":8,\"cut o";

  LoopConfig second = config;
  second.run.dir = path("killed");
  const LoopReport resumed = run(second, true);
  EXPECT_EQ(resumed.first_step, 4);
  expect_same_runs("straight", "killed", 12);
}

// SIGKILL in the middle of a rollout, twice: what had finished is taken from the log, in the step that was cut short and in those since the
// checkpoint, and the rest is drawn.
TEST_F(Resume, KilledInARolloutNothingFinishedIsDrawnAgain) {
  LoopConfig config = loop_config("straight", 8);
  config.run.checkpoint_every = 3;
  config.run.eval_every = 4;
  config.rollout.max_running = 3;  // samples finish a few at a time
  config.train.steps_per_rollout = 2;
  const int64_t a_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt;
  EXPECT_EQ(run(config, false).samples_drawn, 8 * a_step);

  LoopConfig killed = config;
  killed.run.dir = path("killed");
  // Ends this process when `count` samples of the step have finished.
  const auto run_until = [&](int64_t step, int64_t count, bool resume) {
    const pid_t child = fork();
    if (child == 0) {
      Hooks hooks;
      const std::string rollout = fmt::format("step {}/8 rollout", step);
      hooks.progress = [&](const std::string& label, int64_t done, int64_t, double, const std::string&) {
        if (label == rollout && done >= count) ::kill(::getpid(), SIGKILL);
      };
      const Result<LoopReport> report = run_loop(killed, resume, hooks);
      _exit(1);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  };
  const auto logged_lines = [&](int64_t step) {
    const std::string text = contents(rollout_log_path(path("killed"), step) + "/rank_0.jsonl");
    int64_t lines = 0;
    for (size_t at = text.find("\"key\""); at != std::string::npos; at = text.find("\"key\"", at + 1)) ++lines;
    return lines;
  };
  run_until(5, 3, false);
  EXPECT_EQ(logged_lines(4), a_step);
  const int64_t first = logged_lines(5);
  EXPECT_TRUE(first >= 3 && first < a_step) << first;
  run_until(5, 2, true);  // goes on from step 3, and is killed after two more
  const int64_t second = logged_lines(5);
  EXPECT_TRUE(second >= first + 2 && second < a_step) << second;
  EXPECT_EQ(logged_lines(4), a_step) << "step 4 was trained again and drawn once";

  std::string said;
  Hooks hooks;
  hooks.line = [&](const std::string& text) { said += text + "\n"; };
  Result<LoopReport> resumed = run_loop(killed, true, hooks);
  ASSERT_TRUE(resumed.is_ok()) << resumed.message();
  EXPECT_EQ(resumed.value().first_step, 3);
  EXPECT_EQ(resumed.value().samples_logged, a_step + second);
  EXPECT_EQ(resumed.value().samples_drawn, 5 * a_step - a_step - second);
  EXPECT_EQ(resumed.value().max_gap, 0);
  EXPECT_NE(said.find(fmt::format("{} finished rollouts of step 5 taken from the log\n", second)), std::string::npos) << said;
  expect_same_runs("straight", "killed", 8);
  EXPECT_TRUE(fs::is_empty(path("killed/rollout_log"))) << "every step has its checkpoint";

  // The same with other weights and with other settings: nothing is taken.
  fs::remove_all(path("killed"));
  run_until(5, 3, false);
  said.clear();
  killed.rollout.temperature = 0.9f;
  ASSERT_TRUE(run_loop(killed, true, hooks).is_ok());
  EXPECT_NE(said.find(fmt::format("0 finished rollouts of step 4 taken from the log, {} of other weights or settings left there", a_step)),
            std::string::npos)
      << said;
}

// The same one step ahead, where a batch is in flight: of the checkpoint it is a file, of later steps it is in the log.
TEST_F(Resume, KilledOneStepAheadNothingIsDrawnTwice) {
  LoopConfig config = loop_config("straight", 8);
  config.run.checkpoint_every = 3;
  config.run.eval_every = 4;
  config.rollout.ahead = 1;
  config.rollout.max_running = 3;
  config.train.steps_per_rollout = 2;
  config.train.loss.tis = TisKind::sequence;
  const int64_t a_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt;
  EXPECT_EQ(run(config, false).samples_drawn, 9 * a_step);

  LoopConfig killed = config;
  killed.run.dir = path("killed");
  const pid_t child = fork();
  if (child == 0) {
    Hooks hooks;
    hooks.progress = [](const std::string& label, int64_t done, int64_t, double, const std::string&) {  // in step 5
      if (label == "step 6/8 rollout" && done >= 3) ::kill(::getpid(), SIGKILL);
    };
    const Result<LoopReport> report = run_loop(killed, false, hooks);
    _exit(1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  fs::copy(path("killed"), path("other"), fs::copy_options::recursive);
  fs::copy(path("killed"), path("without"), fs::copy_options::recursive);

  const LoopReport resumed = run(killed, true);
  EXPECT_EQ(resumed.first_step, 3);
  EXPECT_EQ(resumed.samples_drawn + resumed.samples_logged, 6 * a_step) << "steps 4 to 9";
  EXPECT_GE(resumed.samples_logged, 2 * a_step + 3) << "step 4 of the checkpoint, 5 and a part of 6 of the log";
  EXPECT_LT(resumed.samples_logged, 3 * a_step);
  EXPECT_EQ(resumed.max_gap, 0);
  expect_same_runs("straight", "killed", 8);

  // Under another temperature what was drawn ahead is not wanted any more; it is drawn anew, from the newest weights.
  LoopConfig other = config;
  other.run.dir = path("other");
  other.rollout.temperature = 0.9f;
  EXPECT_EQ(run(other, true).samples_logged, 0);
  EXPECT_NE(contents(path("other/metrics.jsonl")).find("{\"step\":4"), std::string::npos);
  // And without it the run goes on in step.
  other = config;
  other.run.dir = path("without");
  other.rollout.ahead = 0;
  std::string said;
  Hooks hooks;
  hooks.line = [&](const std::string& text) { said += text + "\n"; };
  const Result<LoopReport> in_step = run_loop(other, true, hooks);
  ASSERT_TRUE(in_step.is_ok()) << in_step.message();
  EXPECT_EQ(in_step.value().max_gap, 0);
  EXPECT_NE(said.find("rollout.ahead is 0: "), std::string::npos) << said;
}

// More prompts are begun than trained; the others wait, with their tokens or without. Killed in a rollout and resumed, the run leaves the same bytes, and no
// prompt is lost or trained twice.
TEST_F(Resume, OverSamplingLosesNothingAndRepeats) {
  for (const PartialKind partial : {PartialKind::drop, PartialKind::keep}) {
    SCOPED_TRACE(partial == PartialKind::keep ? "keep" : "drop");
    const std::string name = partial == PartialKind::keep ? "keep" : "drop";
    LoopConfig config = loop_config(name, 9);
    config.run.checkpoint_every = 3;
    config.run.eval_every = 4;
    config.rollout.over_sample = 2;
    config.rollout.partial = partial;
    config.rollout.order = RolloutOrder::longest;
    config.rollout.max_running = 5;
    config.rollout.max_new_tokens = 24;
    config.train.steps_per_rollout = 2;
    config.train.loss.tis = TisKind::token;
    const int64_t prompts = config.rollout.prompts_per_step, n = config.rollout.samples_per_prompt;
    const LoopReport straight = run(config, false);
    EXPECT_EQ(straight.max_gap, 0);
    EXPECT_EQ(straight.samples_drawn, 9 * prompts * n);

    std::set<int64_t> trained, waiting;
    int64_t tokens = 0, current = 0, mixed = 0;
    for (int64_t step = 1; step <= 9; ++step) {
      std::istringstream lines(contents(path(name + "/rollouts/" + step_name(step) + ".jsonl")));
      std::map<int64_t, int64_t> groups;
      for (std::string text; std::getline(lines, text);) {
        const Result<JsonValue> line = parse_json(text);
        ASSERT_TRUE(line.is_ok());
        int64_t group = 0;
        ASSERT_TRUE(line.value().find("group_index")->as_int64(&group));
        ++groups[group];
        std::set<int64_t> versions;
        for (const JsonValue& v : line.value().find("weight_versions")->items) {
          int64_t version = 0;
          ASSERT_TRUE(v.as_int64(&version));
          versions.insert(version);
          ++tokens;
          current += version == 2 * (step - 1);
        }
        EXPECT_LE(*versions.rbegin(), 2 * (step - 1));
        mixed += versions.size() > 1;
      }
      EXPECT_EQ(std::ssize(groups), prompts) << step;
      for (const auto& [group, samples] : groups) {
        EXPECT_EQ(samples, n);
        EXPECT_TRUE(trained.insert(group).second) << "prompt " << group << " twice";
      }
    }
    const std::string tail = contents(path(name + "/checkpoints/step_000009/long_tail.jsonl"));
    for_each_checked_line(tail, [&](const JsonValue* line) {
      int64_t id = 0;
      ASSERT_NE(line, nullptr);
      if (line->find("key") == nullptr && line->find("prompt_id") != nullptr && line->find("prompt_id")->as_int64(&id)) waiting.insert(id);
    });
    EXPECT_EQ(std::ssize(waiting), prompts);
    std::set<int64_t> issued = trained;
    issued.insert(waiting.begin(), waiting.end());
    EXPECT_EQ(std::ssize(issued), 10 * prompts);
    EXPECT_EQ(*issued.rbegin(), 10 * prompts - 1) << "each prompt is trained or waits";
    EXPECT_EQ(mixed > 0, partial == PartialKind::keep);
    EXPECT_EQ(tail.find("\"key\"") != std::string::npos, partial == PartialKind::keep);
    const std::string metrics = contents(path(name + "/metrics.jsonl"));
    EXPECT_EQ(metrics.find("\"staleness/lag_2/tokens\"") != std::string::npos, partial == PartialKind::keep);
    EXPECT_EQ(straight.compared_tokens, current) << "tokens of the trained version, of " << tokens;

    LoopConfig killed = config;
    killed.run.dir = path("killed_" + name);
    const pid_t child = fork();
    if (child == 0) {
      Hooks hooks;
      hooks.progress = [](const std::string& label, int64_t done, int64_t, double, const std::string&) {
        if (label == "step 5/9 rollout" && done >= 3) ::kill(::getpid(), SIGKILL);
      };
      const Result<LoopReport> report = run_loop(killed, false, hooks);
      _exit(1);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    EXPECT_EQ(run(killed, true).first_step, 3);
    expect_same_runs(config.run.dir, killed.run.dir, 9);
    EXPECT_TRUE(tail == contents(killed.run.dir + "/checkpoints/step_000009/long_tail.jsonl"));

    // Without over-sampling the prompts that wait are trained first, and then nobody waits.
    killed.run.steps = 10;
    killed.rollout.over_sample = 1;
    EXPECT_EQ(run(killed, true).max_gap, 0);
    const std::string last = contents(killed.run.dir + "/rollouts/step_000010.jsonl");
    for (const int64_t id : waiting) EXPECT_NE(last.find(fmt::format("\"group_index\":{},", id)), std::string::npos);
    EXPECT_EQ(contents(killed.run.dir + "/checkpoints/step_000010/long_tail.jsonl").find("prompt_id"), std::string::npos);
    fs::remove_all(killed.run.dir + "/checkpoints/step_000010");
    killed.rollout.ahead = 1;
    const Result<LoopReport> refused = run_loop(killed, true, Hooks());
    EXPECT_NE(refused.message().find("long_tail.jsonl: 2 prompts wait there for a step of rollout.over_sample"), std::string::npos) << refused.message();
  }
}

// Who goes first changes no byte but of the engine's own times.
TEST_F(Resume, TheOrderOfAdmissionChangesNothing) {
  LoopConfig config = loop_config("given", 12);
  config.rollout.max_running = 3;
  config.rollout.max_new_tokens = 24;
  run(config, false);
  config.run.dir = path("longest");
  config.rollout.order = RolloutOrder::longest;
  run(config, false);
  expect_same_runs(path("given"), path("longest"), 12);
  EXPECT_NE(contents(path("longest/checkpoints/step_000012/long_tail.jsonl")).find("\"longest\":"), std::string::npos);
}

TEST_F(Resume, BeforeTheFirstCheckpointBeginsAgain) {
  LoopConfig config = loop_config("straight", 3);
  run(config, false);
  config.run.dir = path("killed");
  run(config, false);
  fs::remove_all(path("killed/checkpoints"));
  EXPECT_EQ(run(config, true).first_step, 0);
  expect_same_runs("straight", "killed", 3);
}

TEST_F(Resume, RefusesAnotherRun) {
  LoopConfig config = loop_config("run", 2);
  run(config, false);
  EXPECT_FALSE(run_loop(config, false, Hooks()).is_ok()) << "a fresh run over an old one";
  config.run.seed = 8;
  EXPECT_FALSE(run_loop(config, true, Hooks()).is_ok()) << "another seed";
  config = loop_config("run", 4);
  config.task.train_file = path("eval.jsonl");
  EXPECT_FALSE(run_loop(config, true, Hooks()).is_ok()) << "other data";
  config = loop_config("run", 4);
  const std::string all = contents(path("train.jsonl"));
  const size_t first = all.find('\n') + 1;
  std::ofstream(path("turned.jsonl")) << all.substr(first) << all.substr(0, first);  // as many rows, in another order
  config.task.train_file = path("turned.jsonl");
  EXPECT_NE(run_loop(config, true, Hooks()).message().find("other data rows"), std::string::npos);
  config = loop_config("nothing", 4);
  EXPECT_FALSE(run_loop(config, true, Hooks()).is_ok()) << "nothing to resume";
  EXPECT_EQ(run(loop_config("run", 2), true).last_step, 2) << "nothing left to do is no error";
}

TEST_F(Resume, RefusesADamagedCheckpoint) {
  run(loop_config("run", 2), false);
  const std::string file = path("run/checkpoints/step_000002/optimizer.safetensors");
  std::string bytes = contents(file);
  bytes.back() ^= 1;
  std::ofstream(file, std::ios::binary) << bytes;
  const Result<LoopReport> resumed = run_loop(loop_config("run", 4), true, Hooks());
  ASSERT_FALSE(resumed.is_ok());
  EXPECT_NE(resumed.message().find("optimizer.safetensors is damaged"), std::string::npos) << resumed.message();
}

TEST_F(Resume, RefusesAnotherTokenizerThanTheCheckpoints) {
  run(loop_config("first", 2), false);
  LoopConfig second = loop_config("second", 2);
  second.model.init = path("first/checkpoints/step_000002");
  run(second, false);
  second.run.dir = path("third");
  fs::create_directories(path("other"));
  ASSERT_TRUE(ByteTokenizer(std::string(kArithmeticAlphabet.rbegin(), kArithmeticAlphabet.rend())).save(path("other")).is_ok());
  second.model.tokenizer = path("other");
  const Result<LoopReport> refused = run_loop(second, false, Hooks());
  ASSERT_FALSE(refused.is_ok());
  EXPECT_NE(refused.message().find("was trained with another tokenizer"), std::string::npos) << refused.message();
}

// Masters in as many files as there were ranks are initial weights like any others.
TEST_F(Resume, MastersInManyFilesAreInitialWeights) {
  run(loop_config("first", 2), false);
  LoopConfig next = loop_config("whole", 2);
  next.model.init = path("first/checkpoints/step_000002");
  next.model.config = next.model.tokenizer = "";
  run(next, false);

  fs::copy(next.model.init, path("pieces"));
  fs::remove(path("pieces/checksums.json"));
  fs::remove(path("pieces/masters.safetensors"));
  {
    Result<SafetensorsFile> whole = SafetensorsFile::open(next.model.init + "/masters.safetensors");
    ASSERT_TRUE(whole.is_ok()) << whole.message();
    constexpr int kRanks = 3;
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<BoxView> boxes;
      for (const SafetensorsEntry& e : whole.value().tensors()) {
        const ConstTensorView values = matrix_view(whole.value().view(e.name).value());
        const Range rows = part_of(values.rows(), kRanks, rank);
        Shape shape;
        for (const int64_t d : e.shape) shape.dims[static_cast<size_t>(shape.rank++)] = d;
        boxes.push_back({e.name, shape, {rows, {0, values.dim(1)}}, values.slice(rows.begin, rows.size())});
      }
      ASSERT_TRUE(write_boxes(path("pieces") + "/" + box_file(kMastersStem, rank, kRanks), boxes, whole.value().metadata()).is_ok());
    }
  }
  next.run.dir = path("of_pieces");
  next.model.init = path("pieces");
  run(next, false);
  expect_same_runs("whole", "of_pieces", 2);
  fs::remove(path("pieces/masters-00002-of-00003.safetensors"));
  next.run.dir = path("none");
  EXPECT_NE(run_loop(next, false, Hooks()).message().find("masters-00002-of-00003.safetensors is missing; 3 ranks wrote this checkpoint"), std::string::npos);
}

TEST_F(Resume, RefusesACheckpointUnderAnotherName) {
  run(loop_config("run", 2), false);
  fs::copy(path("run/checkpoints/step_000002"), path("run/checkpoints/step_000003"), fs::copy_options::recursive);
  const Result<LoopReport> resumed = run_loop(loop_config("run", 4), true, Hooks());
  ASSERT_FALSE(resumed.is_ok());
  EXPECT_NE(resumed.message().find("the checkpoint is of step 2"), std::string::npos) << resumed.message();
}

TEST_F(Resume, SaysWhenMetricsAreMissing) {
  run(loop_config("run", 2), false);
  std::string said;
  Hooks hooks;
  hooks.line = [&](const std::string& text) { said += text + "\n"; };
  ASSERT_TRUE(run_loop(loop_config("run", 3), true, hooks).is_ok());
  EXPECT_EQ(said.find("stays incomplete"), std::string::npos) << said;
  fs::remove(path("run/metrics.jsonl"));
  ASSERT_TRUE(run_loop(loop_config("run", 4), true, hooks).is_ok());
  EXPECT_NE(said.find("metrics.jsonl does not reach step 3"), std::string::npos) << said;
}

// Weights come from what was written, not only when a run is resumed.
TEST_F(Resume, DamagedWeightsAreNoInitialWeights) {
  run(loop_config("run", 1), false);
  const std::string checkpoint = path("run/checkpoints/step_000001");
  LoopConfig config = loop_config("next", 1);
  config.model.init = checkpoint;
  run(config, false);
  std::string bytes = contents(checkpoint + "/masters.safetensors");
  bytes[bytes.size() - 2] ^= 1;  // a bit of the last weight's exponent
  std::ofstream(checkpoint + "/masters.safetensors", std::ios::binary) << bytes;
  config.run.dir = path("last");
  const Result<LoopReport> refused = run_loop(config, false, Hooks());
  ASSERT_FALSE(refused.is_ok());
  EXPECT_NE(refused.message().find("masters.safetensors is damaged"), std::string::npos) << refused.message();
  fs::remove(checkpoint + "/checksums.json");
  EXPECT_TRUE(run_loop(config, false, Hooks()).is_ok()) << "the user's own word for it";
}

TEST_F(Resume, WhatDoesNotFitIsAnErrorAtTheStart) {
  LoopConfig config = loop_config("run", 1);
  config.rollout.max_running = int64_t{1} << 40;
  const Result<LoopReport> large = run_loop(config, false, Hooks());
  ASSERT_FALSE(large.is_ok());
  EXPECT_NE(large.message().find("GiB of memory are needed"), std::string::npos) << large.message();

  SftConfig sft;
  sft.run = config.run;
  sft.model = config.model;
  sft.sft.file = path("long.jsonl");
  std::ofstream(path("long.jsonl")) << "{\"prompt\":\"1+1:\",\"completion\":\"2\"}\n{\"prompt\":\"1+1:\",\"completion\":\"" << std::string(60, '2')
                                    << "\"}\n";
  const Result<SftReport> long_row = run_sft(sft, false, Hooks());
  ASSERT_FALSE(long_row.is_ok());
  EXPECT_NE(long_row.message().find("long.jsonl:2: the example has 66 tokens"), std::string::npos) << long_row.message();
}

TEST_F(Resume, KeepsTheNewestCheckpoints) {
  LoopConfig config = loop_config("run", 5);
  config.run.eval_every = 0;
  config.run.checkpoint_every = 1;
  config.run.keep_checkpoints = 2;
  run(config, false);
  Result<std::vector<Checkpoint>> kept = complete_checkpoints(path("run"));
  ASSERT_TRUE(kept.is_ok());
  ASSERT_EQ(kept.value().size(), 2u);
  EXPECT_EQ(kept.value()[0].step, 4);
  EXPECT_EQ(kept.value()[1].step, 5);

  // Killed between the newest checkpoint and the deletion of the oldest: the resumed run deletes it, even with nothing else to do.
  fs::copy(path("run/checkpoints/step_000004"), path("run/checkpoints/step_000003"), fs::copy_options::recursive);
  run(config, true);
  kept = complete_checkpoints(path("run"));
  ASSERT_TRUE(kept.is_ok());
  EXPECT_EQ(kept.value().size(), 2u);
}

TEST_F(Resume, Sft) {
  SftConfig config;
  config.run = loop_config("straight", 0).run;
  config.run.checkpoint_every = 5;
  config.model = loop_config("straight", 0).model;
  config.sft = {.file = path("sft.jsonl"),
                .steps = 12,
                .batch_size = 6,
                .lr = 3e-3f,
                .schedule = ScheduleKind::constant,
                .warmup_steps = 2};
  const Result<SftReport> straight = run_sft(config, false, Hooks());
  ASSERT_TRUE(straight.is_ok()) << straight.message();
  EXPECT_LT(straight.value().last_loss, straight.value().first_loss);

  config.run.dir = path("resumed");
  config.sft.steps = 7;
  ASSERT_TRUE(run_sft(config, false, Hooks()).is_ok());
  fs::remove(path("resumed/checkpoints/step_000007/COMPLETE"));
  config.sft.steps = 12;
  ASSERT_TRUE(run_sft(config, true, Hooks()).is_ok());
  expect_same_runs("straight", "resumed", 12);
}

}  // namespace
}  // namespace lockstep
