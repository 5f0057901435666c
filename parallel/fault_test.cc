// Jobs of several ranks in which one is killed, stopped or made to fail: the others must notice, name it, and end with
// kExitStalled, and nothing else on the machine may notice anything.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <random>

#include "io/testing.h"
#include "parallel/diagnosis.h"
#include "parallel/watchdog.h"

namespace lockstep {
namespace {

constexpr int kSigKilled = 128 + 9;

struct Trial {
  const char* operation;
  const char* fault;
  int victim;
  int ranks = 4;
  double deadline_s = 1.5;
  int seed = 1;
};

struct Outcome {
  int job_code = -1;       // mpirun's
  std::vector<int> codes;  // by rank; -1: no exit was noted
  double seconds = 0;      // from the fault to the end of the last rank
  std::string text;        // diagnosis.txt of the job
  Diagnosis diagnosis;     // made again from its records
  bool records = false;
  std::string output;
};

Outcome run(const Trial& t) {
  testing::TemporaryDirectory directory;
  const std::string command =
      fmt::format("{} -n {} {} {} {} {} {} {} {} > {} 2>&1", MPIRUN_COMMAND, t.ranks, FAULT_RANK, directory.path(), t.operation,
                  t.fault, t.victim, t.deadline_s, t.seed, directory.file("output"));
  const int status = std::system(command.c_str());
  Outcome o;
  o.job_code = WEXITSTATUS(status);
  o.output = testing::get(directory.file("output"));
  const double fault_time =
      std::filesystem::exists(directory.file("fault_time")) ? std::stod(testing::get(directory.file("fault_time"))) : 0.0;
  for (int r = 0; r < t.ranks; ++r) {
    const std::string path = directory.file(fmt::format("exit_{}", r));
    if (!std::filesystem::exists(path)) {
      o.codes.push_back(-1);
      continue;
    }
    const std::string text = testing::get(path);
    o.codes.push_back(std::stoi(text));
    o.seconds = std::max(o.seconds, std::stod(text.substr(text.find(' '))) - fault_time);
  }
  if (const Result<std::string> flight = newest_flight(directory.path()); flight) {
    o.records = true;
    if (const Result<std::string> text = read_file(flight.value() + "/diagnosis.txt"); text) o.text = text.value();
    if (const Result<std::vector<FlightRecord>> records = load_flight(flight.value()); records)
      o.diagnosis = diagnose(t.ranks, records.value());
  }
  return o;
}

class Fault : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string_view(MPIRUN_COMMAND).empty()) GTEST_SKIP() << "mpirun is missing (openmpi-bin)";
  }

  // The victim is named, the others leave with kExitStalled, all within the time given.
  static Outcome expect_diagnosis(const Trial& t, int victim_code, double within_s, const std::string& words) {
    const Outcome o = run(t);
    SCOPED_TRACE(fmt::format("{} during {}, rank {} of {}\n{}", t.fault, t.operation, t.victim, t.ranks, o.output));
    for (int r = 0; r < t.ranks; ++r) EXPECT_EQ(o.codes[r], r == t.victim ? victim_code : kExitStalled) << "rank " << r;
    EXPECT_NE(o.job_code, 0);
    EXPECT_LT(o.seconds, within_s);
    EXPECT_EQ(o.diagnosis.rank, t.victim) << o.diagnosis.text;
    EXPECT_EQ(o.text, o.diagnosis.text);
    EXPECT_NE(o.text.find(words), std::string::npos) << "wanted: " << words << "\nin: " << o.text;
    std::printf("  %s during %s: all ended after %.2f s (deadline %.1f s)\n", t.fault, t.operation, o.seconds, t.deadline_s);
    return o;
  }
};

// The deadline is far away: a process that is gone is seen without it. One second at most to notice, the rest is a busy machine.
TEST_F(Fault, KilledRank) {
  int seed = 10;
  for (const auto& [operation, victim] : {std::pair{"all_to_all", 2}, {"pipeline", 0}, {"all_reduce", 3}, {"compute", 1}})
    expect_diagnosis({.operation = operation, .fault = "kill", .victim = victim, .deadline_s = 60, .seed = ++seed}, kSigKilled, 6,
                     "is gone");
}

TEST_F(Fault, StoppedRank) {
  int seed = 20;
  for (const auto& [operation, victim] : {std::pair{"barrier", 0}, {"all_to_all", 3}, {"pipeline", 1}, {"broadcast", 2}})
    expect_diagnosis({.operation = operation, .fault = "stop", .victim = victim, .seed = ++seed}, kSigKilled, 1.5 + 6,
                     "is stopped");
}

// Through NCCL or RCCL where there are as many GPUs as ranks, otherwise by way of the host.
TEST_F(Fault, BetweenGpus) {
  int seed = 30;
  for (const char* operation : {"gpu_all_to_all", "gpu_pipeline", "gpu_all_reduce"}) {
    expect_diagnosis({.operation = operation, .fault = "kill", .victim = 1, .ranks = 2, .deadline_s = 60, .seed = ++seed}, kSigKilled, 10, "is gone");
    expect_diagnosis({.operation = operation, .fault = "stop", .victim = 0, .ranks = 2, .deadline_s = 4, .seed = ++seed}, kSigKilled, 4 + 10, "is stopped");
  }
  expect_diagnosis({.operation = "gpu_all_to_all", .fault = "busy", .victim = 1, .ranks = 2, .deadline_s = 4}, kExitStalled, 4 + 10, "it waits for nobody");
}

TEST_F(Fault, FailingRank) {
  expect_diagnosis({.operation = "all_to_all", .fault = "error", .victim = 1, .deadline_s = 60}, kExitStalled, 6,
                   "rank 1 failed: model.safetensors: cannot read, as the test wants");
  expect_diagnosis({.operation = "pipeline", .fault = "throw", .victim = 0, .deadline_s = 60}, kExitStalled, 6,
                   "rank 0 crashed: Aborted");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the process in their own way
  expect_diagnosis({.operation = "all_reduce", .fault = "segv", .victim = 3, .deadline_s = 60}, kExitStalled, 6,
                   "rank 3 crashed: Segmentation");
#endif
  expect_diagnosis({.operation = "barrier", .fault = "leave", .victim = 2, .deadline_s = 60}, kExitStalled, 6,
                   "rank 2 left without finishing");
  expect_diagnosis({.operation = "barrier", .fault = "exit", .victim = 2, .deadline_s = 60}, 3, 6, "is gone");
}

// Also in the gate, where the machine may be busy: the time given is far below the deadline all the same.
TEST_F(Fault, FailedCheckIsTheDiagnosisOfAllRanks) {
  const Outcome o = expect_diagnosis({.operation = "all_to_all", .fault = "check", .victim = 2, .ranks = 3, .deadline_s = 300}, kExitStalled, 60,
                                     "rank 2 crashed: parallel/fault_rank.cc:");
  EXPECT_NE(o.text.find("CHECK failed: job.victim < 0 victim 2"), std::string::npos) << o.text;
}

TEST_F(Fault, RankThatNeverComes) {
  const Outcome busy =
      expect_diagnosis({.operation = "all_to_all", .fault = "busy", .victim = 2}, kExitStalled, 1.5 + 6, "it waits for nobody");
  EXPECT_EQ(busy.diagnosis.operation, "all_to_all \"expert dispatch\"");
  EXPECT_NE(busy.text.find("rank 0 waited"), std::string::npos);
  EXPECT_NE(busy.text.find("parallel/fault_rank.cc:"), std::string::npos) << "the caller is named";
}

TEST_F(Fault, RankInAnotherOperation) {
  expect_diagnosis({.operation = "all_to_all", .fault = "other", .victim = 2}, kExitStalled, 1.5 + 6,
                   "barrier \"another operation\" on rank 2");
}

TEST_F(Fault, LauncherIsTerminated) {
  const Outcome o = run({.operation = "pipeline", .fault = "terminate", .victim = 0, .deadline_s = 60});
  EXPECT_EQ(o.codes, std::vector<int>(4, kExitTerminated)) << o.output;
  EXPECT_EQ(o.diagnosis.rank, -1);
  EXPECT_NE(o.text.find("terminated from outside"), std::string::npos) << o.text;
}

TEST_F(Fault, MoreRanks) {
  expect_diagnosis({.operation = "all_to_all", .fault = "stop", .victim = 5, .ranks = 8, .deadline_s = 3}, kSigKilled, 3 + 6,
                   "is stopped");
}

TEST_F(Fault, CleanRunsLeaveNothingAndNoticeNothing) {
  // A healthy job beside a dying one, and a second healthy one beside both.
  const Trial healthy{.operation = "all_to_all", .fault = "none", .victim = -1, .ranks = 2, .deadline_s = 30};
  std::future<Outcome> first = std::async(std::launch::async, [&] { return run(healthy); });
  std::future<Outcome> second = std::async(std::launch::async, [&] { return run(healthy); });
  expect_diagnosis({.operation = "all_to_all", .fault = "kill", .victim = 1, .ranks = 3, .deadline_s = 60}, kSigKilled, 6,
                   "is gone");
  for (std::future<Outcome>* f : {&first, &second}) {
    const Outcome o = f->get();
    EXPECT_EQ(o.job_code, 0) << o.output;
    EXPECT_EQ(o.codes, (std::vector<int>{0, 0}));
    EXPECT_FALSE(o.records);
  }
}

// Random faults on random ranks at random moments: fault_test --gtest_also_run_disabled_tests --gtest_filter='*Soak'
TEST_F(Fault, DISABLED_Soak) {
  constexpr int kTrials = 50;
  const char* const operations[] = {"barrier", "broadcast", "all_reduce", "all_to_all", "pipeline", "compute"};
  std::mt19937 random(std::random_device{}());
  int right = 0;
  double slowest = 0;
  for (int i = 0; i < kTrials; ++i) {
    Trial t{.operation = operations[random() % std::size(operations)], .fault = random() % 2 == 0 ? "kill" : "stop", .victim = 0};
    t.ranks = 2 << random() % 4;
    t.victim = static_cast<int>(random() % static_cast<unsigned>(t.ranks));
    t.deadline_s = 3;
    t.seed = static_cast<int>(random() % 100000);
    const Outcome o = run(t);
    bool ok = o.diagnosis.rank == t.victim && o.seconds < t.deadline_s + 10 && o.text == o.diagnosis.text;
    for (int r = 0; r < t.ranks; ++r) ok = ok && o.codes[r] == (r == t.victim ? kSigKilled : kExitStalled);
    right += ok;
    slowest = std::max(slowest, o.seconds);
    if (!ok)
      std::printf("%s during %s, rank %d of %d, seed %d:\n%s\n", t.fault, t.operation, t.victim, t.ranks, t.seed,
                  o.output.c_str());
  }
  std::printf("  %d of %d named the right rank; the slowest took %.2f s from the fault to the end (deadline 3 s)\n", right,
              kTrials, slowest);
  EXPECT_EQ(right, kTrials);
}

}  // namespace
}  // namespace lockstep
