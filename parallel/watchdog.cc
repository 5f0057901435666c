#include "parallel/watchdog.h"

#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "io/file.h"
#include "parallel/diagnosis.h"

namespace lockstep {

namespace {

constexpr double kPollS = 0.1;         // how often the stop file and deadlines are looked at
constexpr int kProcessTicks = 5;       // the neighbour's process: every fifth time
constexpr double kRecordPollS = 0.02;  // while waiting for the records of others
constexpr double kGapS = 0.5;          // looks that are this much late mean that the process did not run

double clock_s(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Safe in a signal handler.
void sleep_s(double seconds) {
  timespec t{static_cast<time_t>(seconds),
             static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
  nanosleep(&t, nullptr);
}

// Straight to the descriptor: the thread that holds a lock of the logger may be the one that is stuck or has crashed.
void say(const std::string& text) {
  const std::string line = text.ends_with('\n') ? text : text + "\n";
  const Status ignored = write_fully(STDERR_FILENO, line, "standard error");
  static_cast<void>(ignored);
}

// State letter and start time of a process of this machine: 'R', 'S', 'T', 'Z' and so on; 'X' if there is none, '?' if that
// cannot be told (no descriptor left, say).
char process_state(int64_t pid, int64_t* start_ticks) {
  const FileDescriptor fd(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_open()) return errno == ENOENT || errno == ESRCH ? 'X' : '?';
  char text[1024];
  const ssize_t n = ::read(fd.get(), text, sizeof text - 1);
  if (n < 0) return errno == ESRCH ? 'X' : '?';
  text[n] = '\0';
  // "4711 (name, which may hold anything) S ...": fields count from the last parenthesis. The state is the 3rd, the start time
  // the 22nd.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == '\0' || at[2] == '\0') return '?';
  const char state = at[2];
  for (int field = 2; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return '?';
  *start_ticks = std::strtoll(at, nullptr, 10);
  return state;
}

// 'G' if the process is gone (a zombie is), 'T' if stopped, else 'R'.
char state_of(const ProcessId& p) {
  int64_t start_ticks = p.start_ticks;
  const char state = process_state(p.pid, &start_ticks);
  if (state == 'Z' || state == 'X' || start_ticks != p.start_ticks) return 'G';
  return state == 'T' ? 'T' : 'R';
}

// What a signal handler may touch. There is one watchdog a process, because there is one set of handlers.
struct SignalState {
  std::atomic<bool> in_use{false};
  sem_t wake;                          // posted to make the watchdog look at once
  std::atomic<int> crash{0};           // the signal of a crash
  std::atomic<bool> terminate{false};  // SIGTERM came
  std::atomic<pid_t> watchdog_thread{0};
  double patience_s = 0;  // how long a crashing thread waits for the watchdog to end the process
  // Of the first CHECK that failed; it aborts next.
  std::atomic<bool> check_failed{false}, check_known{false};
  char check_message[1024];
};
SignalState signals;

void on_crash(int signal) {
  if (gettid() == signals.watchdog_thread.load()) _exit(kExitStalled);  // nobody is left to write records
  int none = 0;
  signals.crash.compare_exchange_strong(none, signal);
  sem_post(&signals.wake);
  for (double waited = 0; waited < signals.patience_s; waited += 0.1) sleep_s(0.1);
  _exit(kExitStalled);
}

void on_terminate(int) {
  signals.terminate.store(true);
  sem_post(&signals.wake);
}

// Sanitizers say more about a bad access than we could; an abort is ours all the same.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCrashSignals[] = {SIGABRT};
#else
constexpr int kCrashSignals[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#endif

// "/a/b/model/moe_layer.cc" is "model/moe_layer.cc".
std::string_view room_and_file(std::string_view path) {
  size_t slash = path.rfind('/');
  if (slash != std::string_view::npos && slash > 0) slash = path.rfind('/', slash - 1);
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

void copy_cut(char* to, size_t size, std::string_view from) {
  const size_t n = std::min(size - 1, from.size());
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

// "FILE:LINE: CHECK failed: ..."
void on_failed_check(const char* message) {
  if (signals.check_failed.exchange(true)) return;
  const std::string_view text = message, file = text.substr(0, text.find(": CHECK failed"));
  copy_cut(signals.check_message, sizeof signals.check_message, text.substr(file.size() - room_and_file(file).size()));
  signals.check_known.store(true);
}

std::string stop_path(const std::string& directory) { return directory + "/stop"; }
std::string diagnosis_path(const std::string& directory) { return directory + "/diagnosis.txt"; }

bool exists(const std::string& path) {
  // By opening rather than stat: network file systems answer stat from a cache.
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return fd.is_open();
}

// True for the one rank that makes the file.
bool claim_stop(const std::string& directory, int rank, FlightCause cause) {
  const std::string path = stop_path(directory);
  const FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd.is_open()) return false;
  if (const Status s = write_fully(fd.get(), fmt::format("{} {}\n", flight_cause_name(cause), rank), path); !s) say(s.message());
  return true;
}

}  // namespace

ProcessId this_process() {
  ProcessId p;
  ::gethostname(p.host, sizeof p.host - 1);
  p.pid = ::getpid();
  process_state(p.pid, &p.start_ticks);
  return p;
}

Watchdog::Watchdog(int rank, int world, WatchdogOptions options)
    : rank_(rank),
      world_(world),
      options_(options),
      origin_s_(clock_s(CLOCK_MONOTONIC)),
      pending_(kPendingMax),
      history_(kHistory) {
  CHECK(rank >= 0 && rank < world, "rank {} of {}", rank, world);
  CHECK(options.deadline_s > 0 && options.grace_s > 0, "deadline {} s, grace {} s", options.deadline_s, options.grace_s);
  if (world_ == 1) return;
  CHECK(!signals.in_use.exchange(true), "a second watchdog in one process");
  sem_init(&signals.wake, 0, 0);
  signals.crash.store(0);
  signals.terminate.store(false);
  signals.check_failed.store(false);
  signals.check_known.store(false);
  signals.patience_s = 2 * options.grace_s + 2;
  for (int s : kCrashSignals) handle(s, on_crash);
  handle(SIGTERM, on_terminate);
  set_check_handler(on_failed_check);
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  if (world_ == 1) return;
  quit_.store(true);
  sem_post(&signals.wake);
  thread_.join();
  for (int s : kCrashSignals) handle(s, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
  set_check_handler(nullptr);
  signals.in_use.store(false);
}

double Watchdog::now_s() const { return clock_s(CLOCK_MONOTONIC) - origin_s_; }

void Watchdog::watch_processes(std::vector<ProcessId> processes) {
  CHECK_EQ(static_cast<int>(processes.size()), world_);
  const std::lock_guard lock(mutex_);
  processes_ = std::move(processes);
  local_.assign(world_, false);
  // Same name and a process with that id and start time: two containers may share a host name but not see each other's processes.
  for (int r = 0; r < world_; ++r)
    local_[r] = r != rank_ && std::strcmp(processes_[r].host, processes_[rank_].host) == 0 && state_of(processes_[r]) != 'G';
  watched_ = -1;
  for (int step = 1; step < world_ && watched_ < 0; ++step)
    if (const int r = (rank_ + step) % world_; local_[r]) watched_ = r;
}

void Watchdog::stop_watching_processes() {
  const std::lock_guard lock(mutex_);
  watched_ = -1;
}

void Watchdog::record_in(std::string directory) {
  const std::lock_guard lock(mutex_);
  directory_ = std::move(directory);
}

int Watchdog::add_group(std::string name, std::vector<int> members) {
  const std::lock_guard lock(mutex_);
  groups_.push_back({std::move(name), std::move(members), 0});
  return static_cast<int>(groups_.size()) - 1;
}

int Watchdog::begin(const Operation& o) {
  double now = now_s();
  std::unique_lock lock(mutex_);
  close_passed(now);
  int slot = pending_hint_;
  for (int tries = 0; pending_[slot].open; ++tries) {
    if (tries == kPendingMax) {
      const bool some_pass = std::any_of(pending_.begin(), pending_.end(), [](const Entry& e) { return e.word != nullptr; });
      CHECK(some_pass, "over {} operations are pending; the last is {} \"{}\"", kPendingMax, o.kind, o.name);
      lock.unlock();
      sleep_s(20e-6);
      lock.lock();
      now = now_s();
      close_passed(now);
      tries = 0;
    }
    slot = (slot + 1) % kPendingMax;
  }
  Entry& e = pending_[slot];
  e.kind = o.kind;
  copy_cut(e.name, sizeof e.name, o.name);
  const auto written = fmt::format_to_n(e.caller, sizeof e.caller - 1, "{}:{}", room_and_file(o.file), o.line);
  *written.out = '\0';
  e.group = o.group;
  e.seq = o.seq;
  e.peer = o.peer;
  e.tag = o.tag;
  e.bytes = o.bytes;
  e.start_s = now;
  e.end_s = -1;
  e.limit_s = o.deadline_s > 0 ? o.deadline_s : options_.deadline_s;
  e.deadline_s = o.background ? 0 : now + e.limit_s;
  e.open = true;
  if (o.peer < 0) groups_[o.group].started = o.seq;
  return slot;
}

void Watchdog::waiting(int ticket) {
  const double now = now_s();
  const std::lock_guard lock(mutex_);
  pending_[ticket].deadline_s = now + pending_[ticket].limit_s;
}

void Watchdog::end(int ticket) {
  const double now = now_s();
  const std::lock_guard lock(mutex_);
  close(pending_[ticket], now);
}

void Watchdog::in_stream(int ticket, const uint64_t* word, uint64_t mark) {
  const std::lock_guard lock(mutex_);
  pending_[ticket].word = word;
  pending_[ticket].mark = mark;
}

bool Watchdog::streams_ended() {
  const double now = now_s();
  const std::lock_guard lock(mutex_);
  close_passed(now);
  return std::none_of(pending_.begin(), pending_.end(), [](const Entry& e) { return e.word != nullptr; });
}

void Watchdog::close(Entry& e, double now) {
  e.end_s = now;
  e.open = false;
  e.word = nullptr;
  history_[num_history_++ % kHistory] = e;
  pending_hint_ = static_cast<int>(&e - pending_.data());
}

void Watchdog::close_passed(double now) {
  for (Entry& e : pending_)
    if (e.word != nullptr && __atomic_load_n(e.word, __ATOMIC_ACQUIRE) >= e.mark) close(e, now);
}

void Watchdog::fail(const std::string& message) {
  if (world_ == 1) {
    say(message);
    _exit(1);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) failure_ = message;
    failed_ = true;
  }
  sem_post(&signals.wake);
  for (;;) sleep_s(1);  // the watchdog's thread ends the process
}

void Watchdog::run() {
  signals.watchdog_thread.store(gettid());
  Cause cause;
  while (!quit_.load()) {
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += static_cast<long>(kPollS * 1e9);
    if (until.tv_nsec >= 1'000'000'000) {
      until.tv_nsec -= 1'000'000'000;
      ++until.tv_sec;
    }
    while (sem_timedwait(&signals.wake, &until) != 0 && errno == EINTR) {
    }
    if (quit_.load()) break;
    if (look(&cause)) stop(cause);
  }
  signals.watchdog_thread.store(0);
}

bool Watchdog::look(Cause* cause) {
  ++ticks_;
  if (const int signal = signals.crash.load(); signal != 0) {
    const bool check = signal == SIGABRT && signals.check_known.load();
    const char* what = signal == SIGABRT ? "an exception escaped; standard error of this rank says which" : "see its standard error";
    *cause = {FlightCause::crash, check ? signals.check_message : fmt::format("{} ({})", strsignal(signal), what)};
    const std::unique_lock lock(mutex_, std::try_to_lock);  // the thread that crashed may hold it
    if (lock.owns_lock() && watched_ >= 0) blame_the_gone(cause);
    return true;
  }
  // Files are looked at without the lock: a slow file system must not slow the rank.
  std::string directory;
  int watched = -1;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      *cause = {FlightCause::error, failure_};
      if (watched_ >= 0) blame_the_gone(cause);
      return true;
    }
    directory = directory_;
    watched = watched_;
  }
  if (!directory.empty() && exists(stop_path(directory))) {
    *cause = {FlightCause::told, ""};
    return true;
  }
  const bool terminate = signals.terminate.load();
  if (watched >= 0 && terminate) {
    // The launcher may have ended the job because of a rank that is not this one's neighbour.
    if (const std::vector<int> gone = ranks_in_state('G'); !gone.empty()) watched = gone.front();
  }
  if (watched >= 0 && (terminate || ticks_ % kProcessTicks == 0) && state_of(processes_[watched]) == 'G') {
    *cause = {FlightCause::peer_gone, fmt::format("the process {} of rank {} is gone", processes_[watched].pid, watched)};
    return true;
  }
  if (missed_deadline(cause)) return true;
  if (terminate) {
    *cause = {FlightCause::terminated, "SIGTERM"};
    return true;
  }
  return false;
}

// A rank that is gone before this one has told anybody went first: what it left behind, memory that a GPU reads or a connection, is why this one fails.
void Watchdog::blame_the_gone(Cause* cause) {
  const std::vector<int> gone = ranks_in_state('G');
  if (gone.empty()) return;
  cause->text = fmt::format("the process {} of rank {} is gone; here: {}", processes_[gone.front()].pid, gone.front(), cause->text);
  cause->cause = FlightCause::peer_gone;
}

bool Watchdog::missed_deadline(Cause* cause) {
  const double now = now_s(), gap = now - last_look_s_ - kPollS;
  last_look_s_ = now;
  const std::lock_guard lock(mutex_);
  close_passed(now);
  // A rank that was itself stopped for a while (Ctrl-Z, a debugger) cannot blame others for that time.
  if (gap > kGapS)
    for (Entry& e : pending_)
      if (e.open && e.deadline_s > 0) e.deadline_s += gap;
  for (const Entry& e : pending_) {
    if (!e.open || e.deadline_s == 0 || now <= e.deadline_s) continue;
    *cause = {FlightCause::stall, fmt::format("{} \"{}\" of {}, sequence {}, missed its deadline of {} s", e.kind, e.name,
                                              groups_[e.group].name, e.seq, e.limit_s)};
    return true;
  }
  return false;
}

std::vector<int> Watchdog::ranks_in_state(char wanted) {
  std::vector<int> ranks;
  for (int r = 0; r < static_cast<int>(local_.size()); ++r)
    if (local_[r] && state_of(processes_[r]) == wanted) ranks.push_back(r);
  return ranks;
}

FlightRecord Watchdog::record(const Cause& cause) {
  FlightRecord record;
  record.rank = rank_;
  record.world = world_;
  const ProcessId me = this_process();
  record.host = me.host;
  record.pid = me.pid;
  record.cause = cause.cause;
  record.text = cause.text;
  record.wall_s = clock_s(CLOCK_REALTIME);
  record.age_s = now_s();
  record.groups = groups_;
  for (const auto& [letter, word] : {std::pair{'G', "gone"}, std::pair{'T', "stopped"}})
    for (int r : ranks_in_state(letter)) record.peers.push_back({r, processes_[r].pid, word});
  const auto add = [&](const Entry& e) {
    FlightOp op;
    op.kind = e.kind;
    op.name = e.name;
    op.group = groups_[e.group].name;
    op.seq = e.seq;
    op.peer = e.peer;
    op.tag = e.tag;
    op.bytes = e.bytes;
    op.caller = e.caller;
    op.start_s = e.start_s;
    op.end_s = e.end_s;
    op.waited = !e.open || e.deadline_s > 0;
    record.ops.push_back(std::move(op));
  };
  for (int64_t i = std::max<int64_t>(0, num_history_ - kHistory); i < num_history_; ++i) add(history_[i % kHistory]);
  for (const Entry& e : pending_)
    if (e.open) add(e);
  std::stable_sort(record.ops.begin(), record.ops.end(),
                   [](const FlightOp& a, const FlightOp& b) { return a.start_s < b.start_s; });
  return record;
}

// Every rank that can still write has written.
bool Watchdog::all_records_are_in() {
  for (int r = 0; r < world_; ++r) {
    if (exists(directory_ + "/" + flight_record_name(r))) continue;
    if (!local_.empty() && local_[r] && state_of(processes_[r]) != 'R') continue;
    return false;
  }
  return true;
}

void Watchdog::stop(const Cause& cause) {
  // A thread that crashed inside begin() or end() holds the lock for ever; the record is then read without it. From here on this
  // thread alone decides when the process ends, so the lock is never given back.
  for (int tries = 0; tries < 20 && !mutex_.try_lock(); ++tries) sleep_s(0.01);
  close_passed(now_s());
  if (void (*const f)() = before_end_.load(); f != nullptr) std::thread(f).detach();
  int code = cause.cause == FlightCause::terminated ? kExitTerminated : kExitStalled;
  if (directory_.empty()) {
    if (cause.cause == FlightCause::peer_gone || cause.cause == FlightCause::stall || cause.cause == FlightCause::error) {
      const FlightRecord mine[] = {record(cause)};
      say(fmt::format("rank {}: {}\n{}", rank_, cause.text, diagnose(world_, mine).text));
    }
    _exit(code);
  }
  const std::string path = directory_ + "/" + flight_record_name(rank_);
  if (const Status s = atomic_write(path, format_flight_record(record(cause)), Durability::later); !s) say(s.message());
  const bool first = claim_stop(directory_, rank_, cause.cause);

  // Everyone writes a record, then the first to notice reads them all.
  for (const double until = now_s() + options_.grace_s; now_s() < until && !all_records_are_in();) sleep_s(kRecordPollS);
  if (first) {
    std::string text;
    if (const Result<std::vector<FlightRecord>> records = load_flight(directory_); records)
      text = diagnose(world_, records.value()).text;
    else
      text = records.message() + "\n";
    if (const Status s = atomic_write(diagnosis_path(directory_), text, Durability::later); !s) say(s.message());
    say(fmt::format("rank {} ends the job: {}records: {}", rank_, text, directory_));
  } else {
    for (const double until = now_s() + options_.grace_s; now_s() < until && !exists(diagnosis_path(directory_));)
      sleep_s(kRecordPollS);
    if (const Result<std::string> why = read_file(stop_path(directory_)); why)
      code = why.value().starts_with(flight_cause_name(FlightCause::terminated)) ? kExitTerminated : kExitStalled;
  }
  // A stopped rank cannot leave. By id and start time it is one of ours.
  for (int r : ranks_in_state('T')) ::kill(static_cast<pid_t>(processes_[r].pid), SIGKILL);
  _exit(code);
}

}  // namespace lockstep
