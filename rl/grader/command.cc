// The command grader: a pool of child processes that are asked one row a line on standard input and answer one line on standard
// output. A child that dies, misses the deadline or answers out of turn is killed with its process group and started anew; a row
// that this happened to twice is an error.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

#include "io/file.h"
#include "io/utf8.h"
#include "rl/grader/judge.h"

extern char** environ;

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMaxLine = 1 << 20;  // of an answer
constexpr int kAttempts = 2;

Status make_pipe(FileDescriptor* read, FileDescriptor* write) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return errno_status("cannot make a pipe for", "the command grader", errno);
  *read = FileDescriptor(fds[0]);
  *write = FileDescriptor(fds[1]);
  return Status::ok();
}

// One child process. Not thread-safe.
class Child {
 public:
  Child(const std::string& command, float deadline_s) : command_(command), deadline_s_(deadline_s) {}
  ~Child() { stop(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // The line that answers `line`. After an error the child is gone; the next call starts another.
  Result<std::string> ask(const std::string& line) {
    if (pid_ < 0) LOCKSTEP_RETURN_IF_ERROR(start());
    Result<std::string> answer = exchange(line + "\n");
    if (!answer) stop();
    return answer;
  }

  // Ends the child and what it started. Says how it ended, if it had by itself.
  std::string stop() {
    if (pid_ < 0) return "";
    int status = 0;
    // One that has closed its output is mostly about to end: its exit code says more than our signal.
    for (int i = 0; i < 20 && ::waitpid(pid_, &status, WNOHANG) == 0; ++i) {
      if (!closed_ || i == 19) {
        ::kill(-pid_, SIGKILL);
        ::waitpid(pid_, &status, 0);
        break;
      }
      ::poll(nullptr, 0, 10);
    }
    ::kill(-pid_, SIGKILL);  // what it left behind
    pid_ = -1;
    in_.reset();
    out_.reset();
    buffer_.clear();
    if (WIFEXITED(status)) return fmt::format("exit code {}", WEXITSTATUS(status));
    return fmt::format("signal {}", WTERMSIG(status));
  }

 private:
  Status start() {
    FileDescriptor child_in, child_out;
    LOCKSTEP_RETURN_IF_ERROR(make_pipe(&child_in, &in_));
    LOCKSTEP_RETURN_IF_ERROR(make_pipe(&out_, &child_out));
    for (const int fd : {in_.get(), out_.get()}) ::fcntl(fd, F_SETFL, O_NONBLOCK);
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, child_in.get(), STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, child_out.get(), STDOUT_FILENO);
    ::posix_spawnattr_init(&attributes);
    sigset_t none, defaults;
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &defaults);
    ::posix_spawnattr_setpgroup(&attributes, 0);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    char shell[] = "/bin/sh", flag[] = "-c";
    char* argv[] = {shell, flag, command_.data(), nullptr};
    const int error = ::posix_spawn(&pid_, shell, &actions, &attributes, argv, environ);
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
    closed_ = false;
    if (error == 0) return Status::ok();
    pid_ = -1;
    return errno_status("cannot start", "/bin/sh", error);
  }

  Result<std::string> exchange(std::string_view line) {
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(deadline_s_));
    char chunk[65536];
    for (;;) {
      if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
        std::string answer = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        if (!line.empty()) return errorf("it answered before it had read the row");
        return answer;
      }
      if (buffer_.size() > kMaxLine) return errorf("its answer is longer than {} bytes", kMaxLine);
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return errorf("no answer within {} s", deadline_s_);
      pollfd fds[2] = {{out_.get(), POLLIN, 0}, {line.empty() ? -1 : in_.get(), POLLOUT, 0}};
      if (::poll(fds, 2, static_cast<int>(std::min<int64_t>(left + 1, 60000))) < 0 && errno != EINTR)
        return errno_status("cannot wait for", "the command grader", errno);
      if (fds[1].revents != 0) {
        const ssize_t n = ::write(in_.get(), line.data(), line.size());
        if (n > 0) line.remove_prefix(static_cast<size_t>(n));
        if (n < 0 && errno == EPIPE) return ended();
      }
      if (fds[0].revents != 0) {
        const ssize_t n = ::read(out_.get(), chunk, sizeof chunk);
        if (n > 0) buffer_.append(chunk, static_cast<size_t>(n));
        if (n == 0) return ended();
      }
    }
  }

  Status ended() {
    closed_ = true;
    return errorf("it ended ({})", stop());
  }

  std::string command_;
  float deadline_s_;
  pid_t pid_ = -1;
  FileDescriptor in_, out_;  // our ends: what the child reads, what it writes
  std::string buffer_;       // read and not yet a line
  bool closed_ = false;      // the child's output is at its end
};

class CommandJudge : public Judge {
 public:
  explicit CommandJudge(const RewardOptions& options) : options_(options) {}

  std::vector<RewardResult> grade(std::span<const GradeRow> rows) override {
    std::vector<RewardResult> verdicts(rows.size());
    for_each_row(rows.size(), options_.workers, [&](size_t i) {
      // A write to a child that is gone must fail, not end the process. A signal that is pending goes with the mask's thread or
      // is taken here.
      sigset_t pipe, before;
      sigemptyset(&pipe);
      sigaddset(&pipe, SIGPIPE);
      ::pthread_sigmask(SIG_BLOCK, &pipe, &before);
      std::unique_ptr<Child> child = take();
      verdicts[i] = judge(*child, i, rows[i]);
      give_back(std::move(child));
      const timespec at_once{};
      while (::sigtimedwait(&pipe, nullptr, &at_once) > 0) {
      }
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    });
    return verdicts;
  }
  bool is_pure() const override { return false; }

 private:
  RewardResult judge(Child& child, size_t id, const GradeRow& row) {
    const std::string question = grade_row_json(id, row);
    std::string why;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      Result<std::string> line = child.ask(question);
      if (!line) {
        why = line.message();
        continue;
      }
      Result<JsonValue> answer = parse_json(line.value());
      if (!answer) {
        why = fmt::format("it answered {}, which is no JSON: {}", in_quotes(line.value()), answer.message());
        child.stop();
        continue;
      }
      bool answers = false;
      RewardResult verdict = verdict_from_json(answer.value(), id, &answers);
      if (answers) return verdict;
      why = verdict.error;  // whatever it answers, it is not in step with us
      child.stop();
    }
    return reward_error(fmt::format("the command grader failed {} times on this row: {}", kAttempts, why));
  }

  // Children that wait for rows; there are never more of them than workers.
  std::unique_ptr<Child> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Child>(options_.command, options_.deadline_s);
    std::unique_ptr<Child> child = std::move(idle_.back());
    idle_.pop_back();
    return child;
  }
  void give_back(std::unique_ptr<Child> child) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(child));
  }

  RewardOptions options_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Child>> idle_;
};

}  // namespace

Result<std::unique_ptr<Judge>> make_command_judge(const RewardOptions& options) {
  if (options.command.empty()) return errorf("the command grader needs a command that reads and answers JSON lines");
  return std::unique_ptr<Judge>(std::make_unique<CommandJudge>(options));
}

}  // namespace lockstep
