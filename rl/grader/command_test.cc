// The command grader against real programs: sh, awk and what they do when they are ill.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "rl/grader/judge.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class Command : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("lockstep_command_{}_{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
    fs::create_directories(root_);
    for (int i = 0; i < 100; ++i) {
      responses_.push_back(fmt::format("response {}", i));
      labels_.push_back(std::to_string(i));
    }
  }
  void TearDown() override { fs::remove_all(root_); }

  std::vector<RewardResult> grade(const std::string& command, size_t count, int64_t workers = 2, float deadline_s = 20) {
    RewardOptions options;
    options.grader = GraderKind::command;
    options.command = command;
    options.workers = workers;
    options.deadline_s = deadline_s;
    std::vector<GradeRow> rows;
    for (size_t i = 0; i < count; ++i) rows.push_back({"", responses_[i], labels_[i]});
    return Judge::make(options).value()->grade(rows);
  }
  // Answers a row with its id as the score; `also` runs first, with the row in $line and its id in $id.
  std::string echo(const std::string& also = "") const {
    std::ofstream(root_ / "grader.sh") << "while IFS= read -r line; do id=${line#*:}; id=${id%%,*}; " << also
                                       << " printf '{\"id\":%s,\"score\":%s.5,\"pred\":\"p%s\",\"correct\":false}\\n' $id $id $id; done\n";
    return "sh " + (root_ / "grader.sh").string();
  }

  fs::path root_;
  std::vector<std::string> responses_, labels_;
};

TEST_F(Command, ResultsAreInTheOrderOfTheRows) {
  for (const int64_t workers : {1, 3}) {
    const std::vector<RewardResult> r = grade(echo(), 100, workers);
    ASSERT_EQ(r.size(), 100u);
    for (size_t i = 0; i < r.size(); ++i) {
      EXPECT_EQ(r[i].score, static_cast<float>(i) + 0.5f) << r[i].error;
      EXPECT_EQ(r[i].pred, fmt::format("p{}", i));
      EXPECT_FALSE(r[i].correct);
    }
  }
}

TEST_F(Command, ARowThatCrashesItTwiceIsAnErrorAndOthersGoOn) {
  const std::vector<RewardResult> r = grade(echo("if [ $id = 3 ]; then exit 7; fi;"), 6);
  for (size_t i = 0; i < r.size(); ++i) EXPECT_EQ(r[i].scored(), i != 3) << i << r[i].error;
  EXPECT_NE(r[3].error.find("failed 2 times"), std::string::npos) << r[3].error;
  EXPECT_NE(r[3].error.find("exit code 7"), std::string::npos) << r[3].error;
}

TEST_F(Command, OneCrashIsForgiven) {
  const std::string mark = (root_ / "mark").string();
  const std::vector<RewardResult> r = grade(echo("if [ $id = 3 ] && ! [ -e " + mark + " ]; then : > " + mark + "; kill -9 $$; fi;"), 6);
  for (const RewardResult& v : r) EXPECT_TRUE(v.scored()) << v.error;
  EXPECT_TRUE(fs::exists(mark));
}

TEST_F(Command, TheDeadlineEndsARowThatHangs) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<RewardResult> r = grade(echo("if [ $id = 1 ]; then echo $$ >> " + (root_ / "pids").string() + "; sleep 1000; fi;"), 3, 1, 0.5f);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(500));  // it did not wait for the sleep
  EXPECT_TRUE(r[0].scored());
  EXPECT_NE(r[1].error.find("no answer within 0.5 s"), std::string::npos) << r[1].error;
  EXPECT_TRUE(r[2].scored()) << r[2].error;
  std::ifstream pids(root_ / "pids");
  int count = 0;
  for (pid_t pid; pids >> pid; ++count) {
    char state = 0;
    for (int wait = 0; wait < 1000 && state != 'Z' && state != 'X'; ++wait) {  // killed, and perhaps not yet waited for by its new parent
      std::ifstream stat(fmt::format("/proc/{}/stat", pid));
      std::string field;
      if (!(stat >> field >> field >> state)) state = 'X';
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_TRUE(state == 'Z' || state == 'X') << "process " << pid << " was left";
  }
  EXPECT_EQ(count, 2);
}

TEST_F(Command, MalformedAnswersAreErrorsAndNotZeros) {
  const struct {
    const char *answer, *error;
  } cases[] = {
      {"nonsense", "which is no JSON"},
      {"[1]", "an object is wanted"},
      {"{\"id\":77,\"score\":1}", "has not the id"},
      {"{\"id\":0}", "no \\\"score\\\""},
      {"{\"id\":0,\"score\":\"1\"}", "no \\\"score\\\""},
      {"{\"id\":0,\"score\":null}", "no \\\"score\\\""},
      {"{\"id\":0,\"score\":1,\"correct\":1}", "true or false is wanted"},
      {"{\"id\":0,\"error\":\"label unreadable\"}", "label unreadable"},
  };
  for (const auto& c : cases) {
    std::string wanted = c.error;
    std::erase(wanted, '\\');
    const std::vector<RewardResult> r = grade(fmt::format("while read -r line; do echo '{}'; done", c.answer), 1);
    EXPECT_FALSE(r[0].scored()) << c.answer;
    EXPECT_NE(r[0].error.find(wanted), std::string::npos) << c.answer << ": " << r[0].error;
  }
  EXPECT_NE(grade("true", 1)[0].error.find("it ended (exit code 0)"), std::string::npos);
  EXPECT_NE(grade("lockstep-no-such-program 2>/dev/null", 1)[0].error.find("exit code 127"), std::string::npos);
}

TEST_F(Command, LongRowsPassInBothDirections) {
  responses_[0] = std::string(3 << 20, 'x');
  const std::vector<RewardResult> r = grade(echo(), 1);
  EXPECT_TRUE(r[0].scored()) << r[0].error;
}

TEST(CommandOptions, NeedACommand) {
  RewardOptions options;
  options.grader = GraderKind::command;
  EXPECT_NE(Judge::make(options).message().find("needs a command"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
