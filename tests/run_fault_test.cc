// Whole runs of four ranks in a pipeline with spread experts, of which one rank is killed or stopped at a random moment. The others must end in
// time and name it; a restart with --resume must end with the bytes of a run that nothing disturbed, without drawing a finished rollout again.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "io/testing.h"
#include "parallel/diagnosis.h"
#include "tests/tiny_run.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 4;
constexpr int64_t kSteps = 12, kSamples = 24;  // of a step
constexpr double kDeadline = 8;  // seconds; the slowest honest wait of this run takes a fraction of one, or a few when the machine is very busy

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// One `mpirun ... lockstep train`, in the background.
class Job {
 public:
  Job(const std::string& config, const std::string& run, bool resume, const std::string& output) {
    std::vector<std::string> words;
    std::istringstream launch(MPIRUN_COMMAND);
    for (std::string w; launch >> w;) words.push_back(w);
    for (const std::string& w : {std::string("-n"), std::to_string(kRanks), std::string(LOCKSTEP_PROGRAM), std::string("train"), config, std::string("--set"),
                                 "run.dir=" + run})
      words.push_back(w);
    if (resume) words.emplace_back("--resume");
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    const int out = open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    dup2(out, 1);
    dup2(out, 2);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  ~Job() {
    if (!ended_) kill(pid_, SIGKILL), wait_for(60);
  }
  // Exit code, or -1 if it still runs.
  int wait_for(double seconds) {
    for (const double until = now() + seconds; !ended_ && now() < until; sleep(0.02)) poll();
    return ended_ ? code_ : -1;
  }
  bool running() {
    poll();
    return !ended_;
  }
  // Process of a rank: a child of the launcher with this number in its environment; 0 if there is none.
  pid_t rank_process(int rank) const {
    const std::string wanted = fmt::format("OMPI_COMM_WORLD_RANK={}", rank);
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; })) continue;
      std::ifstream stat(entry.path() / "stat"), environment(entry.path() / "environ");
      std::string line;
      std::getline(stat, line);
      std::istringstream after(line.substr(std::min(line.size(), line.rfind(')') + 1)));
      char state = 0;
      pid_t parent = 0;
      after >> state >> parent;
      if (parent != pid_) continue;
      for (std::string word; std::getline(environment, word, '\0');)
        if (word == wanted) return std::stoi(name);
    }
    return 0;
  }

 private:
  void poll() {
    int status = 0;
    if (ended_ || waitpid(pid_, &status, WNOHANG) != pid_) return;
    ended_ = true;
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  pid_t pid_ = 0;
  bool ended_ = false;
  int code_ = -1;
};

// All that a run leaves behind but what measures time, names directories or tells of the way there.
std::map<std::string, std::string> left_behind(const fs::path& run) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(run)) {
    const std::string name = fs::relative(entry.path(), run);
    const bool told = name == "metrics.jsonl" || name.starts_with("rollouts/") || name.starts_with("evals/") || name.starts_with("checkpoints/" + step_name(kSteps));
    if (entry.is_regular_file() && told && !name.ends_with("config.resolved.toml") && !name.ends_with("checksums.json")) files[name] = contents(entry.path());
  }
  return files;
}

// Lines of the rollout log, which are finished samples, of the steps after `step`.
int64_t logged_samples(const fs::path& run, int64_t step) {
  int64_t lines = 0;
  if (!fs::exists(run / "rollout_log")) return 0;
  for (const auto& entry : fs::recursive_directory_iterator(run / "rollout_log")) {
    if (!entry.is_regular_file() || entry.path().parent_path().filename() <= step_name(step)) continue;
    std::istringstream text(contents(entry.path()));
    for (std::string line; std::getline(text, line);) lines += line.find("\"prompt_id\"") != std::string::npos && line.ends_with('}');
  }
  return lines;
}

struct Trial {
  bool noticed = false, in_time = false, named = false, resumed = false, same = false;
  bool kept = false;  // every finished sample was taken from the log, and no other left out
  double seconds = 0;  // from the fault to the end of the job
  int64_t logged = 0;
  std::string operation;
  bool ok() const { return noticed && in_time && named && resumed && same && kept; }
};

class RunFault : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string_view(MPIRUN_COMMAND).empty()) GTEST_SKIP() << "mpirun is missing (openmpi-bin)";
    make_tiny_task(directory_.path());
    std::ofstream(path("run.toml")) << fmt::format(R"([run]
dir = "unset"
seed = 7
threads = 1
steps = {}
checkpoint_every = 3
[model]
config = "{}"
tokenizer = "{}"
init = "random"
[parallel]
pp = 2
ep = 2
deadline_s = {}
[task]
train_file = "{}"
reward = "math"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 6
samples_per_prompt = 4
max_new_tokens = 24
[train]
entropy_coef = 0.01
microbatch_tokens = 64
[optimizer]
freeze_router = false
)",
                                                   kSteps, path("config.json"), directory_.path(), kDeadline, path("train.jsonl"));
    const double start = now();
    Job job(path("run.toml"), path("undisturbed"), false, path("undisturbed.log"));
    ASSERT_EQ(job.wait_for(300), 0) << contents(path("undisturbed.log"));
    seconds_ = now() - start;
    reference_ = left_behind(path("undisturbed"));
    ASSERT_GT(reference_.size(), static_cast<size_t>(kSteps)) << "metrics, rollouts of every step, the last checkpoint";
  }

  Trial disturb(int number, int signal, int victim, double moment) {
    const std::string run = path(fmt::format("run_{}", number)), log = run + ".log";
    Trial t;
    {
      Job job(path("run.toml"), run, false, log);
      while (job.running() && !fs::exists(run + "/flight")) sleep(0.01);
      sleep(moment * seconds_);
      const pid_t process = job.rank_process(victim);
      if (process == 0 || !job.running()) return t;  // the run was over
      const double fault = now();
      kill(process, signal);
      const int code = job.wait_for(kDeadline + 20);
      if (contents(log).find("samples drawn") != std::string::npos) return t;  // likewise: it had said so
      t.seconds = now() - fault;
      t.noticed = code == kExitStalled || code == 128 + SIGKILL;  // the launcher reports the rank that died, if it saw one
      t.in_time = t.seconds < kDeadline + 10;
    }
    if (const Result<std::string> flight = newest_flight(run); flight) {
      if (const Result<std::vector<FlightRecord>> records = load_flight(flight.value()); records) {
        const Diagnosis d = diagnose(kRanks, records.value());
        t.named = d.rank == victim;
        t.operation = d.operation;
      }
    }
    const int64_t checkpoint = newest_step(run), logged = logged_samples(run, checkpoint);
    int starts = 0;
    for (; starts < 3 && !t.resumed; ++starts) t.resumed = Job(path("run.toml"), run, true, log).wait_for(300) == 0;  // the loop of docs/operations.md
    t.kept = starts > 1 ||  // a busy machine missed the deadline again, and part of the work is told of in another start's words
              contents(log).find(fmt::format("steps {} to {}; {} samples drawn, {} taken from the log", checkpoint, kSteps,
                                            (kSteps - checkpoint) * kSamples - logged, logged)) != std::string::npos;
    t.logged = logged;
    const std::map<std::string, std::string> files = left_behind(run);
    t.same = files == reference_;
    if (!t.ok()) {
      std::printf("%s\n", contents(log).c_str());
      for (const auto& [name, text] : reference_)
        if (!files.contains(name) || files.at(name) != text) std::printf("  %s %s\n", name.c_str(), files.contains(name) ? "differs" : "is missing");
    }
    fs::remove_all(run);
    return t;
  }

  // Of the newest complete checkpoint; 0 without one.
  static int64_t newest_step(const std::string& run) {
    const Result<std::optional<Checkpoint>> newest = newest_complete_checkpoint(run);
    return newest && newest.value() ? newest.value()->step : 0;
  }
  std::string path(const std::string& name) const { return directory_.file(name); }

  testing::TemporaryDirectory directory_;
  double seconds_ = 0;
  std::map<std::string, std::string> reference_;
};

TEST_F(RunFault, FiftyTrials) {
  constexpr int kTrials = 50;
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  int right = 0, made = 0;
  double slowest = 0;
  std::map<std::string, int> operations;
  for (int i = 0; made < kTrials && i < 3 * kTrials; ++i) {
    const int signal = random() % 2 == 0 ? SIGKILL : SIGSTOP, victim = static_cast<int>(random() % kRanks);
    const double moment = 0.8 * static_cast<double>(random() % 1000) / 1000;
    const Trial t = disturb(i, signal, victim, moment);
    if (t.seconds == 0) continue;
    ++made;
    right += t.ok();
    slowest = std::max(slowest, t.seconds);
    ++operations[t.operation];
    std::printf("trial %d of seed %u: %s of rank %d at %.2f of the run, in %s: ended after %.2f s; noticed %d, in time %d, named %d, resumed %d, same bytes %d, %ld finished samples kept %d\n", made,
                seed, signal == SIGKILL ? "SIGKILL" : "SIGSTOP", victim, moment, t.operation.c_str(), t.seconds, t.noticed, t.in_time, t.named, t.resumed, t.same, t.logged, t.kept);
    std::fflush(stdout);
  }
  std::printf("  %d of %d trials right; the slowest ended %.2f s after the fault (deadline %.0f s); the others waited in:\n", right, made, slowest, kDeadline);
  for (const auto& [name, count] : operations) std::printf("    %3d %s\n", count, name.c_str());
  EXPECT_EQ(made, kTrials);
  EXPECT_EQ(right, made);
}

}  // namespace
}  // namespace lockstep
