// One watchdog alone, in a process that the test starts for it: the other ranks of its world do not exist. What several do
// together is in fault_test.

#include "parallel/watchdog.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "io/testing.h"
#include "parallel/diagnosis.h"

namespace lockstep {
namespace {

using ::testing::ExitedWithCode;

constexpr WatchdogOptions kQuick{.deadline_s = 0.2, .grace_s = 0.2};

Watchdog::Operation operation(int group, const char* name, int64_t seq) {
  return {.kind = "barrier", .name = name, .group = group, .seq = seq, .file = "/somewhere/parallel/x.cc", .line = 12};
}

void wait_for_the_end() { sleep(20); }

class WatchdogTest : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
  // A death test runs this test again in another process, so the directory has a name that both know.
  const std::string directory_ =
      (std::filesystem::temp_directory_path() /
       fmt::format("lockstep_watchdog_{}_{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getuid()))
          .string();
  void fresh_directory() {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  FlightRecord only_record() {
    Result<std::vector<FlightRecord>> records = load_flight(directory_);
    EXPECT_TRUE(records.is_ok()) << (records ? "" : records.message());
    return records && records.value().size() == 1 ? records.value()[0] : FlightRecord();
  }
};

TEST_F(WatchdogTest, MissedDeadline) {
  fresh_directory();
  EXPECT_EXIT(
      {
        Watchdog dog(1, 3, kQuick);
        dog.record_in(directory_);
        const int group = dog.add_group("some ranks", {0, 1});
        dog.end(dog.begin(operation(group, "first", 1)));
        dog.begin(operation(group, "second", 2));
        wait_for_the_end();
      },
      ExitedWithCode(kExitStalled), "rank 0 did not arrive at barrier \"second\" \\(some ranks, sequence 2, parallel/x.cc:12\\)");
  const FlightRecord r = only_record();
  EXPECT_EQ(r.rank, 1);
  EXPECT_EQ(r.world, 3);
  EXPECT_EQ(r.cause, FlightCause::stall);
  EXPECT_EQ(r.text, "barrier \"second\" of some ranks, sequence 2, missed its deadline of 0.2 s");
  ASSERT_EQ(r.groups.size(), 1u);
  EXPECT_EQ(r.groups[0].started, 2);
  ASSERT_EQ(r.ops.size(), 2u);
  EXPECT_FALSE(r.ops[0].pending());
  EXPECT_TRUE(r.ops[1].pending());
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/diagnosis.txt"));
}

TEST_F(WatchdogTest, OperationsInTimeAndInTheBackgroundAreLeftAlone) {
  EXPECT_EXIT(
      {
        {
          Watchdog dog(0, 2, kQuick);
          const int group = dog.add_group("pair", {0, 1});
          Watchdog::Operation patient = operation(group, "patient", 1);
          Watchdog::Operation background = operation(group, "background", 1);
          patient.deadline_s = 60;
          background.background = true;
          background.peer = 1;
          dog.begin(patient);
          dog.begin(background);
          for (int64_t i = 2; i < 8; ++i) {
            const int ticket = dog.begin(operation(group, "short", i));
            usleep(100'000);
            dog.end(ticket);
          }
        }
        _exit(9);
      },
      ExitedWithCode(9), "");
  EXPECT_EXIT(
      {
        Watchdog dog(0, 2, kQuick);
        const int group = dog.add_group("pair", {0, 1});
        Watchdog::Operation background = operation(group, "background", 1);
        background.background = true;
        dog.waiting(dog.begin(background));
        wait_for_the_end();
      },
      ExitedWithCode(kExitStalled), "missed its deadline");
}

TEST_F(WatchdogTest, OperationsInAStreamAreOpenUntilItPasses) {
  EXPECT_EXIT(
      {
        {
          Watchdog dog(0, 2, kQuick);
          const int group = dog.add_group("pair", {0, 1});
          std::vector<uint64_t> words(Watchdog::kPendingMax);
          // More than may be open, of which a thread lets the last pass only when all places are taken.
          std::thread stream([&] {
            usleep(100'000);
            for (uint64_t& word : words) __atomic_store_n(&word, 100'000, __ATOMIC_RELEASE);
          });
          for (int i = 1; i <= Watchdog::kPendingMax + 10; ++i) {
            const int ticket = dog.begin(operation(group, "enqueued", i));
            dog.in_stream(ticket, &words[static_cast<size_t>(ticket)], static_cast<uint64_t>(i));
          }
          stream.join();
          if (!dog.streams_ended()) _exit(1);
          usleep(500'000);  // beyond the deadline, which nothing is open to miss
        }
        _exit(9);
      },
      ExitedWithCode(9), "");
  EXPECT_EXIT(
      {
        Watchdog dog(0, 2, kQuick);
        const int group = dog.add_group("pair", {0, 1});
        const uint64_t word = 4;
        const int passed = dog.begin(operation(group, "passed", 1));
        const int stuck = dog.begin(operation(group, "stuck", 2));
        dog.in_stream(passed, &word, 4);
        dog.in_stream(stuck, &word, 5);
        if (dog.streams_ended()) _exit(1);
        wait_for_the_end();
      },
      ExitedWithCode(kExitStalled), "\"stuck\" of pair, sequence 2, missed its deadline");
}

// As when a GPU reads what a rank that is gone had in its memory: the first to fail is not the one to blame.
TEST_F(WatchdogTest, ErrorAfterAnotherRankIsGoneIsThatRanks) {
  EXPECT_EXIT(
      {
        int ends[2];
        if (pipe(ends) != 0) _exit(1);
        const pid_t child = fork();
        ProcessId other = this_process();
        if (child == 0) _exit(write(ends[1], &other, sizeof other) > 0 && pause() == 0 ? 0 : 1);
        if (read(ends[0], &other, sizeof other) != sizeof other) _exit(1);
        Watchdog dog(0, 2, {.deadline_s = 60, .grace_s = 0.2});
        dog.begin(operation(dog.add_group("pair", {0, 1}), "weights", 1));
        dog.watch_processes({this_process(), other});
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        dog.fail("an illegal memory access");
      },
      ExitedWithCode(kExitStalled), "rank 1 is gone; here: an illegal memory access(.|\n)*rank 1 did not arrive at barrier \"weights\"");
}

TEST_F(WatchdogTest, TimeInWhichTheRankItselfWasStoppedDoesNotCount) {
  EXPECT_EXIT(
      {
        Watchdog dog(0, 2, {.deadline_s = 0.6, .grace_s = 0.2});
        const pid_t me = getpid();
        if (fork() == 0) {
          usleep(1'700'000);
          kill(me, SIGCONT);
          _exit(0);
        }
        const int ticket = dog.begin(operation(dog.add_group("pair", {0, 1}), "barrier", 1));
        usleep(300'000);
        raise(SIGSTOP);
        usleep(200'000);  // 0.5 s of its own
        dog.end(ticket);
        _exit(9);
      },
      ExitedWithCode(9), "");
}

TEST_F(WatchdogTest, KeepsTheLastOperationsAndAllPendingOnes) {
  fresh_directory();
  constexpr int kMore = 100;
  EXPECT_EXIT(
      {
        Watchdog dog(0, 2, kQuick);
        dog.record_in(directory_);
        const int group = dog.add_group("pair", {0, 1});
        Watchdog::Operation old = operation(group, "old and pending", 1);
        old.deadline_s = 60;
        dog.begin(old);
        for (int64_t i = 2; i < 2 + Watchdog::kHistory + kMore; ++i) dog.end(dog.begin(operation(group, "step", i)));
        dog.fail("enough");
      },
      ExitedWithCode(kExitStalled), "rank 0 failed: enough");
  const FlightRecord r = only_record();
  EXPECT_EQ(r.cause, FlightCause::error);
  ASSERT_EQ(r.ops.size(), static_cast<size_t>(Watchdog::kHistory + 1));
  EXPECT_EQ(r.ops[0].name, "old and pending");
  EXPECT_EQ(r.ops[1].seq, 2 + kMore);
  EXPECT_EQ(r.ops.back().seq, 1 + Watchdog::kHistory + kMore);
}

TEST_F(WatchdogTest, AnotherRankSaysStop) {
  fresh_directory();
  EXPECT_EXIT(
      {
        Watchdog dog(0, 2, {.deadline_s = 60, .grace_s = 0.2});
        dog.record_in(directory_);
        testing::put(directory_ + "/stop", "stall 1\n");
        wait_for_the_end();
      },
      ExitedWithCode(kExitStalled), "");
  EXPECT_EQ(only_record().cause, FlightCause::told);
}

TEST_F(WatchdogTest, Signals) {
  fresh_directory();
  const auto after = [&](int signal) {
    Watchdog dog(0, 2, {.deadline_s = 60, .grace_s = 0.2});
    dog.record_in(directory_);
    raise(signal);
    wait_for_the_end();
  };
  EXPECT_EXIT(after(SIGTERM), ExitedWithCode(kExitTerminated), "terminated from outside");
  EXPECT_EQ(only_record().cause, FlightCause::terminated);
  fresh_directory();
  EXPECT_EXIT(after(SIGABRT), ExitedWithCode(kExitStalled), "rank 0 crashed: Aborted");
  EXPECT_EQ(only_record().cause, FlightCause::crash);
}

TEST_F(WatchdogTest, FailedChecks) {
  fresh_directory();
  const auto fail = [&] {
    Watchdog dog(0, 2, {.deadline_s = 60, .grace_s = 0.2});
    dog.record_in(directory_);
    const int rows = 3;
    std::thread([&] { CHECK(rows == 4, "{} rows", rows); }).join();  // on any thread
  };
  EXPECT_EXIT(fail(), ExitedWithCode(kExitStalled), "rank 0 crashed: parallel/watchdog_test.cc:[0-9]+: CHECK failed: rows == 4 3 rows");
  EXPECT_EQ(only_record().cause, FlightCause::crash);
}

TEST_F(WatchdogTest, DirectoryThatCannotBeWritten) {
  EXPECT_EXIT(
      {
        Watchdog dog(0, 2, kQuick);
        dog.record_in("/proc/no/such/place");
        dog.begin(operation(dog.add_group("pair", {0, 1}), "second", 2));
        wait_for_the_end();
      },
      ExitedWithCode(kExitStalled), "/proc/no/such/place");
}

TEST_F(WatchdogTest, WorldOfOneIsLeftAlone) {
  const struct sigaction before = [] {
    struct sigaction a {};
    sigaction(SIGABRT, nullptr, &a);
    return a;
  }();
  Watchdog dog(0, 1, kQuick);
  struct sigaction now {};
  sigaction(SIGABRT, nullptr, &now);
  EXPECT_EQ(before.sa_handler, now.sa_handler);
  EXPECT_EXIT(dog.fail("alone"), ExitedWithCode(1), "alone");
}

TEST_F(WatchdogTest, HandlersGoAwayWithIt) {
  { Watchdog dog(0, 2, kQuick); }
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
  Watchdog again(1, 2, kQuick);  // one at a time is fine
  EXPECT_DEATH(Watchdog(0, 2, kQuick), "a second watchdog");
}

}  // namespace
}  // namespace lockstep
