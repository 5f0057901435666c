// The program as its user meets it: exit codes, and what it says when something is wrong.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include <fmt/core.h>

namespace {

namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;  // 128 and more: a signal
  std::string said;    // on both streams
};

class CommandLine : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("lockstep_command_line_{}_{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string path(const std::string& name) const { return root_ / name; }

  // `before` and `after` are shell: limits and redirections.
  Outcome lockstep(const std::string& arguments, const std::string& before = "", const std::string& after = "2>&1") const {
    const std::string line = fmt::format("cd '{}'; {} {} {} {}", root_.string(), before, LOCKSTEP_PROGRAM, arguments, after);
    FILE* pipe = ::popen(line.c_str(), "r");
    Outcome outcome;
    char buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.said.append(buffer, n);
    const int status = ::pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
  }
  void expect(const Outcome& outcome, int exit_code, const std::string& said) const {
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.said;
    EXPECT_NE(outcome.said.find(said), std::string::npos) << outcome.said << "\nwanted: " << said;
  }
  // A task and settings for one short run in run/.
  void prepare() const {
    expect(lockstep("make-task data --train 20 --eval 5 --sft 20 --difficulty-max 1"), 0, "20 worked examples");
    std::ofstream(path("run.toml")) << "[run]\ndir = \"run\"\nsteps = 1\nthreads = 1\n[model]\nconfig = \"" LOCKSTEP_SOURCE_DIR
                                       "/configs/demo.config.json\"\ntokenizer = \"data\"\n[task]\ntrain_file = \"data/train.jsonl\"\n"
                                       "eval_file = \"data/eval.jsonl\"\nmax_prompt_tokens = 24\n[rollout]\nprompts_per_step = 2\n"
                                       "samples_per_prompt = 2\nmax_new_tokens = 4\n[eval]\nsamples = 2\nmax_new_tokens = 4\n";
  }

  fs::path root_;
};

TEST_F(CommandLine, WrongUsageIsTwo) {
  expect(lockstep(""), 2, "lockstep: ");
  expect(lockstep("trian run.toml"), 2, "did you mean train?");
  expect(lockstep("train run.toml --resum"), 2, "did you mean --resume?");
  expect(lockstep("train none.toml"), 2, "none.toml: No such file or directory");
  expect(lockstep("train /dev/zero"), 2, "not a regular file");
  expect(lockstep("make-task data --train 0"), 2, "not in range 1 to 1000000");
  expect(lockstep("make-task data --train 9223372036854775807 --sft 9223372036854775807"), 2, "not in range");
  expect(lockstep("make-task data --seed 99999999999999999999"), 2, "not in range");
  expect(lockstep("verify --golden none.safetensors"), 2, "none.safetensors");
  std::ofstream(path("run.toml")) << "[run]\ndir = \"a\\u0000b\"\n";
  expect(lockstep("train run.toml"), 2, "run.toml:2: run.dir is \"a\\x00b\", expected a text without NUL bytes");
  EXPECT_FALSE(fs::exists(path("a")));
}

TEST_F(CommandLine, AFullDiskFailsTheWorkAndResumes) {
  prepare();
  // A limit on the size of files stands for the full disk: the checkpoint does not fit.
  expect(lockstep("train run.toml", "ulimit -f 200;"), 1, "File too large");
  EXPECT_FALSE(fs::exists(path("run/checkpoints/step_000001/COMPLETE")));
  for (const auto& entry : fs::recursive_directory_iterator(path("run")))
    EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos) << entry.path();
  expect(lockstep("train run.toml --resume"), 0, "checkpoint run/checkpoints/step_000001");
}

TEST_F(CommandLine, OutputThatIsLostIsNotSuccess) {
  prepare();
  EXPECT_EQ(lockstep("train run.toml").exit_code, 0);
  expect(lockstep("eval run.toml --json"), 0, "\"problems\":5,\"samples\":2");
  expect(lockstep("eval run.toml --json", "", "2>&1 >/dev/full"), 1, "cannot write to standard output");
  expect(lockstep("settings", "", "2>&1 >/dev/full"), 1, "cannot write to standard output");
}

TEST_F(CommandLine, DamagedWeightsAnswerNothing) {
  prepare();
  EXPECT_EQ(lockstep("train run.toml").exit_code, 0);
  expect(lockstep("generate run '1+1:' --set eval.temperature=1e-30"), 2, "use 0 for greedy");
  expect(lockstep("inspect run"), 0, "every tensor of the model is there");
  const std::string weights = path("run/checkpoints/step_000001/masters.safetensors");
  std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-2, std::ios::end);
  file.put('\x41');
  file.close();
  for (const char* command : {"generate run '1+1:'", "eval run.toml", "inspect run", "export run out"})
    expect(lockstep(command), 2, "masters.safetensors is damaged");
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(CommandLine, Ranks) {
  prepare();
  expect(lockstep("train run.toml --set parallel.pp=2"), 2, "--set parallel.pp: parallel.pp is 2; not yet");
  expect(lockstep("train run.toml --set parallel.dp=2"), 2, "tp 1 x pp 1 x dp 2 is 2 ranks, but 1 was started");
  EXPECT_FALSE(fs::exists(path("run")));
  expect(lockstep("train run.toml --set parallel.dp=1"), 0, "steps 0 to 1");
  expect(lockstep("stall run"), 2, "run holds no flight records");
}

}  // namespace
