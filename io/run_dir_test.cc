#include "io/run_dir.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::put;
using testing::succeeds;
using testing::TemporaryDirectory;

RunDir open_run(const std::string& path, RunDir::Mode mode) {
  Result<RunDir> r = RunDir::open(path, mode);
  CHECK(r.is_ok(), "{}", r.message());
  return r.take();
}
RunDir start(const std::string& path) { return open_run(path, RunDir::Mode::start); }
RunDir resume(const std::string& path) { return open_run(path, RunDir::Mode::resume); }

std::string line(int64_t step) { return fmt::format("{{\"step\":{},\"loss\":0.5}}", step); }

void write_checkpoint(RunDir& run, int64_t step) {
  Result<std::string> path = run.begin_checkpoint(step);
  ASSERT_TRUE(succeeds(path));
  put(path.value() + "/model.safetensors", "weights");
  ASSERT_TRUE(succeeds(run.finish_checkpoint(step)));
}

TEST(RunDir, StartsInANewEmptyOrAbandonedDirectory) {
  TemporaryDirectory d;
  { start(d.file("new/run")); }
  { start(d.file("new/run")); }  // nothing had begun
  ASSERT_TRUE(succeeds(make_directories(d.file("empty"))));
  { start(d.file("empty")); }
  EXPECT_TRUE(std::filesystem::is_directory(d.file("empty/rollouts")));
  EXPECT_TRUE(std::filesystem::is_directory(d.file("empty/checkpoints")));
}

TEST(RunDir, RolloutLogsStayUntilACheckpointHoldsTheirStep) {
  TemporaryDirectory d;
  const auto log = [&](int64_t step) {
    ASSERT_TRUE(succeeds(make_directories(rollout_log_path(d.path(), step))));
    put(rollout_log_path(d.path(), step) + "/rank_0.jsonl", "x");
  };
  const auto steps = [&] {
    std::string s;
    for (int64_t step = 0; step < 10; ++step)
      if (std::filesystem::exists(rollout_log_path(d.path(), step))) s += fmt::format("{} ", step);
    return s;
  };
  {
    RunDir run = start(d.path());
    for (int64_t step = 1; step < 4; ++step) log(step);
    write_checkpoint(run, 2);
    EXPECT_EQ(steps(), "3 ");
    log(2);  // as if this process had been killed before it was removed
    log(4);
  }
  {
    RunDir run = resume(d.path());
    EXPECT_EQ(steps(), "2 3 4 ");
    const Result<RunDir::Truncation> cut = run.truncate_after(2);
    ASSERT_TRUE(succeeds(cut));
    EXPECT_EQ(cut.value().last_logged_step, 4);
    EXPECT_EQ(steps(), "3 4 ");
    write_checkpoint(run, 4);
    EXPECT_EQ(steps(), "");
  }
  TemporaryDirectory other;
  { start(other.path()); }
  ASSERT_TRUE(succeeds(make_directories(rollout_log_path(other.path(), 1))));
  { start(other.path()); }  // it came no further than its first rollout, and is not resumed
  EXPECT_FALSE(std::filesystem::exists(rollout_log_path(other.path(), 1)));
}

TEST(RunDir, RefusesWhatIsNotARunDirectory) {
  TemporaryDirectory d;
  put(d.file("holiday.txt"), "x");
  EXPECT_TRUE(fails_with(RunDir::open(d.path(), RunDir::Mode::start),
                         d.path() + " is not empty (\"holiday.txt\" and 0 more) and is not a run directory"));
  EXPECT_EQ(d.count(), 1u);
  EXPECT_TRUE(fails_with(RunDir::open(d.path(), RunDir::Mode::resume),
                         d.path() + " is not a run directory (it has no run.lock)"));
  EXPECT_TRUE(fails_with(RunDir::open(d.file("none"), RunDir::Mode::resume), "there is nothing to resume"));
  EXPECT_TRUE(fails_with(RunDir::open(d.file("holiday.txt"), RunDir::Mode::start), d.file("holiday.txt")));
}

TEST(RunDir, ARunThatBeganIsResumedNotStartedAgain) {
  TemporaryDirectory d;
  {
    RunDir run = start(d.path());
    ASSERT_TRUE(succeeds(run.append_metrics(line(0))));
  }
  EXPECT_TRUE(fails_with(RunDir::open(d.path(), RunDir::Mode::start), d.path() + " already holds a run; resume it"));
  resume(d.path());
}

TEST(RunDir, OneWriterAtATime) {
  TemporaryDirectory d;
  {
    RunDir run = start(d.path());
    EXPECT_TRUE(fails_with(RunDir::open(d.path(), RunDir::Mode::resume),
                           fmt::format("the run directory {} is being written by process {} on ", d.path(), ::getpid())));
    RunDir moved = std::move(run);  // the lock moves along
    EXPECT_FALSE(RunDir::open(d.path(), RunDir::Mode::resume).is_ok());
  }
  resume(d.path());
}

TEST(RunDir, AKilledWriterLeavesNoLock) {
  TemporaryDirectory d;
  const pid_t child = ::fork();
  if (child == 0) {
    RunDir run = start(d.path());
    put(run.metrics_path() + ".tmp-1-1", "torn");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(std::filesystem::exists(d.file("metrics.jsonl.tmp-1-1")));
  RunDir run = resume(d.path());
  EXPECT_FALSE(std::filesystem::exists(d.file("metrics.jsonl.tmp-1-1")));
}

TEST(RunDir, MetricsLinesAreVisibleAtOnce) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  ASSERT_TRUE(succeeds(run.append_metrics(line(0))));
  EXPECT_EQ(get(run.metrics_path()), line(0) + "\n");
  ASSERT_TRUE(succeeds(run.append_metrics(line(1))));
  EXPECT_EQ(get(run.metrics_path()), line(0) + "\n" + line(1) + "\n");
}

TEST(RunDirDeath, MetricsLinesNeedAStep) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  EXPECT_DEATH((void)run.append_metrics("{\"loss\":1}"), "an integer \"step\", not");
  EXPECT_DEATH((void)run.append_metrics("{\"step\":1}\n"), "an integer \"step\", not");
}

TEST(RunDir, AFullDiskCostsTheLineAndNothingElse) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  ASSERT_TRUE(succeeds(run.append_metrics(line(0))));
  const std::string before = get(run.metrics_path());
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  auto* handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit tight = old;
  tight.rlim_cur = before.size() + 5;  // the line begins to go in, then the kernel refuses the rest
  ::setrlimit(RLIMIT_FSIZE, &tight);
  EXPECT_TRUE(fails_with(run.append_metrics(line(1)), "cannot write " + run.metrics_path() + ": File too large"));
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(get(run.metrics_path()), before);
  ASSERT_TRUE(succeeds(run.append_metrics(line(1))));
  EXPECT_EQ(get(run.metrics_path()), before + line(1) + "\n");
}

TEST(RunDir, ConfigAndRollouts) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  ASSERT_TRUE(succeeds(run.write_config("[train]\nlr = 1e-3\n")));
  EXPECT_EQ(get(d.file("config.resolved.toml")), "[train]\nlr = 1e-3\n");
  ASSERT_TRUE(succeeds(run.write_rollouts(7, "{}\n")));
  EXPECT_EQ(get(d.file("rollouts/step_000007.jsonl")), "{}\n");
  EXPECT_EQ(step_name(1234567), "step_1234567");
}

TEST(RunDir, OnlyCompleteCheckpointsCount) {
  TemporaryDirectory d;
  EXPECT_TRUE(complete_checkpoints(d.file("none")).value().empty());
  RunDir run = start(d.path());
  EXPECT_FALSE(newest_complete_checkpoint(d.path()).value().has_value());
  write_checkpoint(run, 10);
  write_checkpoint(run, 1000000);
  write_checkpoint(run, 999999);
  ASSERT_TRUE(succeeds(run.begin_checkpoint(2000000)));  // never finished
  for (const char* name : {"step_20", "step_00000x", "step_0000020", "latest", "step_-00001"}) {
    ASSERT_TRUE(succeeds(make_directories(d.file(std::string("checkpoints/") + name))));
    put(d.file(std::string("checkpoints/") + name + "/COMPLETE"), "");
  }
  const std::vector<Checkpoint> all = complete_checkpoints(d.path()).value();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].step, 10);
  EXPECT_EQ(all[1].step, 999999);
  EXPECT_EQ(all[2].step, 1000000);
  const Checkpoint newest = *newest_complete_checkpoint(d.path()).value();
  EXPECT_EQ(newest.step, 1000000);
  EXPECT_EQ(get(newest.path + "/model.safetensors"), "weights");
}

TEST(RunDir, BeginSweepsLeftoversAndProtectsCompleteOnes) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  ASSERT_TRUE(succeeds(run.begin_checkpoint(5)));
  put(run.checkpoint_path(5) + ".partial/half", "x");
  ASSERT_TRUE(succeeds(make_directories(run.checkpoint_path(5))));  // it got its name, but no marker
  Result<std::string> again = run.begin_checkpoint(5);
  ASSERT_TRUE(succeeds(again));
  EXPECT_TRUE(std::filesystem::is_empty(again.value()));
  ASSERT_TRUE(succeeds(run.abandon_checkpoint(5)));
  EXPECT_TRUE(std::filesystem::is_empty(d.file("checkpoints")));
  EXPECT_TRUE(fails_with(run.finish_checkpoint(5), ""));
  ASSERT_TRUE(succeeds(run.begin_checkpoint(5)));
  ASSERT_TRUE(succeeds(run.finish_checkpoint(5)));
  ASSERT_TRUE(succeeds(run.abandon_checkpoint(5)));
  EXPECT_TRUE(std::filesystem::exists(run.checkpoint_path(5) + "/COMPLETE")) << "complete is complete";
  EXPECT_TRUE(fails_with(run.begin_checkpoint(5), run.checkpoint_path(5) + " is a complete checkpoint"));
}

TEST(RunDir, AResumedRunEndsWithTheSameFiles) {
  // A run of steps 0..9 with a checkpoint after step 4: once without interruption, once killed during step 8.
  const auto do_step = [](RunDir& run, int64_t step) {
    ASSERT_TRUE(succeeds(run.append_metrics(line(step))));
    ASSERT_TRUE(succeeds(run.write_rollouts(step, line(step * 100) + "\n")));
    if (step == 4) write_checkpoint(run, step);
  };
  TemporaryDirectory whole, broken;
  {
    RunDir run = start(whole.path());
    for (int64_t step = 0; step < 10; ++step) do_step(run, step);
  }
  {
    RunDir run = start(broken.path());
    for (int64_t step = 0; step < 8; ++step) do_step(run, step);
    ASSERT_TRUE(succeeds(run.begin_checkpoint(8)));
    FILE* f = std::fopen(run.metrics_path().c_str(), "a");
    std::fputs("{\"step\":8,\"lo", f);  // the line that was being written
    std::fclose(f);
  }
  {
    RunDir run = resume(broken.path());
    const int64_t step = newest_complete_checkpoint(broken.path()).value()->step;
    ASSERT_EQ(step, 4);
    const Result<RunDir::Truncation> cut = run.truncate_after(step);
    ASSERT_TRUE(succeeds(cut));
    EXPECT_EQ(cut.value().metrics_kept, 5);
    EXPECT_EQ(cut.value().metrics_dropped, 3);
    EXPECT_EQ(cut.value().metrics_unreadable, 1);
    EXPECT_EQ(cut.value().rollouts_dropped, 3);
    EXPECT_EQ(cut.value().checkpoints_dropped, 1);
    for (int64_t s = step + 1; s < 10; ++s) do_step(run, s);
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(whole.path())) {
    const std::string relative = std::filesystem::relative(entry.path(), whole.path()).string();
    if (entry.is_regular_file()) {
      EXPECT_EQ(get(broken.file(relative)), get(whole.file(relative))) << relative;
    }
  }
  const auto count = [](const std::string& path) {
    return std::distance(std::filesystem::recursive_directory_iterator(path), std::filesystem::recursive_directory_iterator());
  };
  EXPECT_EQ(count(broken.path()), count(whole.path()));
}

TEST(RunDir, EvaluationsAreSweptAndDroppedLikeRollouts) {
  TemporaryDirectory d;
  {
    RunDir run = start(d.path());
    ASSERT_TRUE(succeeds(make_directories(d.file("evals"))));
    for (int64_t step = 0; step < 3; ++step) {
      ASSERT_TRUE(succeeds(run.append_metrics(line(step))));
      put(d.file("evals/" + step_name(step) + ".jsonl"), "{}\n");
    }
    put(d.file("evals/step_000003.jsonl.tmp-123-4"), "of a killed writer");
  }
  RunDir run = resume(d.path());
  const Result<RunDir::Truncation> cut = run.truncate_after(1);
  ASSERT_TRUE(succeeds(cut));
  EXPECT_EQ(cut.value().evals_dropped, 1);
  EXPECT_EQ(cut.value().last_metrics_step, 1);
  EXPECT_FALSE(std::filesystem::exists(d.file("evals/step_000002.jsonl")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(d.file("evals")), std::filesystem::directory_iterator()), 2);
  put(run.metrics_path(), "");
  EXPECT_EQ(run.truncate_after(1).value().last_metrics_step, -1);
}

TEST(RunDir, TruncationToTheVeryBeginning) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  ASSERT_TRUE(succeeds(run.append_metrics(line(0))));
  ASSERT_TRUE(succeeds(run.write_rollouts(0, "{}\n")));
  ASSERT_TRUE(succeeds(run.truncate_after(-1)));
  EXPECT_EQ(get(run.metrics_path()), "");
  EXPECT_TRUE(std::filesystem::is_empty(d.file("rollouts")));
  ASSERT_TRUE(succeeds(run.append_metrics(line(0))));
  EXPECT_EQ(get(run.metrics_path()), line(0) + "\n");
}

TEST(RunDir, UnreadableLinesInTheMiddleDoNotStopAResume) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  ASSERT_TRUE(succeeds(run.append_metrics(line(0))));
  put(run.metrics_path(), line(0) + "\n" + std::string(40, '\0') + "\n{\"loss\":1}\n" + line(1) + "\n");
  const Result<RunDir::Truncation> cut = run.truncate_after(1);
  ASSERT_TRUE(succeeds(cut));
  EXPECT_EQ(cut.value().metrics_unreadable, 2);
  EXPECT_EQ(get(run.metrics_path()), line(0) + "\n" + line(1) + "\n");
}

TEST(RunDir, TruncationDoesNotGoBehindACompleteCheckpoint) {
  TemporaryDirectory d;
  RunDir run = start(d.path());
  write_checkpoint(run, 20);
  EXPECT_TRUE(fails_with(run.truncate_after(10), run.checkpoint_path(20) + " is complete and later than step 10"));
  EXPECT_TRUE(succeeds(run.truncate_after(20)));
}

}  // namespace
}  // namespace lockstep
