#pragma once
// Notices that a job of many ranks cannot go on, says why, and ends all of it.
//
// Each rank has one watchdog: a thread, and a ring with the last operations ("flight recorder"). Every wait for another rank is
// registered before it begins, with a deadline. The job ends when
//   an operation misses its deadline                        (a rank is stopped, lost, busy, or in another operation)
//   fail() is called, a CHECK fails, an exception escapes or memory is misused on any rank
//   the process of a rank on the same host is gone          (seen within a second, whatever the deadline)
//   SIGTERM arrives                                         (the launcher saw a rank die, or a person stops the job)
// The rank that notices writes its record and then the file `stop`, which every watchdog looks for ten times a second; all write
// their records; the first writes diagnosis.txt and prints it; all leave with kExitStalled. Ranks of the same host that are
// stopped are killed at the end, since they cannot leave by themselves. Files carry all of this because a stuck or dead rank
// leaves MPI unusable; where a host does not see the directory, the launcher's SIGTERM does the same a little later.
//
//   from cause to exit, at most: 0.6 s to notice + grace_s for the records of others + grace_s for the diagnosis
//
// An operation may go on in a stream of the GPU after the rank has left it. It is then open until the stream writes a word of the host's memory: the watchdog
// never asks the driver, which may be what is stuck.
//
// Threading: begin, waiting, in_stream and end come from one thread, fail from any. One Watchdog a process, since signals belong to the
// process. In a world of one rank it is inert: no thread, no handlers, no records.

#include <semaphore.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "parallel/flight.h"

namespace lockstep {

// Exit code of every rank of a job that could not go on (EX_TEMPFAIL: try again). Starting again with --resume is right; a
// launcher script should stop trying when two starts in a row complete no further checkpoint. A launcher may report another code
// for the job if it saw a rank die first (137 from mpirun for SIGKILL).
inline constexpr int kExitStalled = 75;
// After SIGTERM with nothing else wrong.
inline constexpr int kExitTerminated = 128 + 15;

struct WatchdogOptions {
  // Longest legitimate wait: how much one rank may be behind another, not how long the transfer takes. Operations may have their
  // own.
  double deadline_s = 600;
  // How long ranks wait for each other's records once the job is ending. A launcher that kills soon after SIGTERM (mpirun: 1 s)
  // cuts it short.
  double grace_s = 4;
};

// A process, so that it can be told from a later one with the same id.
struct ProcessId {
  char host[64] = "";
  int64_t pid = 0;
  int64_t start_ticks = 0;
};
ProcessId this_process();

class Watchdog {
 public:
  Watchdog(int rank, int world, WatchdogOptions options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  double deadline_s() const { return options_.deadline_s; }

  // The processes of all ranks, by rank: from now on those of this host are looked at.
  void watch_processes(std::vector<ProcessId> processes);
  // The ranks are about to leave one by one: processes that go are no longer news.
  void stop_watching_processes();

  // Where records go; without it they are not written, and ranks learn of each other's end from the launcher alone.
  void record_in(std::string directory);

  int add_group(std::string name, std::vector<int> members);  // returns its id

  struct Operation {
    const char* kind;  // a literal
    const char* name;  // copied, cut at 47 characters
    int group;
    int64_t seq;
    int peer = -1;  // rank of the world
    int tag = -1;
    int64_t bytes = 0;
    const char* file = "";
    int line = 0;
    double deadline_s = 0;    // 0: the watchdog's
    bool background = false;  // no deadline until waiting()
  };
  // Registers an operation and returns its ticket. At most kPendingMax may be open; for those in a stream it waits.
  int begin(const Operation& operation);
  void waiting(int ticket);  // a background operation is now waited for
  void end(int ticket);
  // Instead of end(): the operation has ended once *word >= mark.
  void in_stream(int ticket, const uint64_t* word, uint64_t mark);
  bool streams_ended();  // of all that was left to them

  // Called in a thread of its own when the job is about to be ended, and not waited for.
  void before_end(void (*f)()) { before_end_.store(f); }

  // Ends the job: `message` becomes the diagnosis. In a world of one, prints it and exits with code 1.
  [[noreturn]] void fail(const std::string& message);

  static constexpr int kPendingMax = 256;
  static constexpr int kHistory = 512;  // completed operations that are kept

 private:
  struct Entry {
    const char* kind = "";
    char name[48] = "";
    char caller[48] = "";
    int group = 0;
    int64_t seq = 0;
    int peer = -1;
    int tag = -1;
    int64_t bytes = 0;
    double start_s = 0;
    double end_s = -1;
    double deadline_s = 0;  // on the watchdog's clock; 0: none yet
    double limit_s = 0;     // the deadline's length
    bool open = false;
    const uint64_t* word = nullptr;  // of a stream, which ends the operation by writing `mark`
    uint64_t mark = 0;
  };
  struct Cause {
    FlightCause cause;
    std::string text;
  };

  double now_s() const;
  void run();
  bool look(Cause* cause);
  void blame_the_gone(Cause* cause);
  bool missed_deadline(Cause* cause);
  void close(Entry& e, double now);
  void close_passed(double now);
  [[noreturn]] void stop(const Cause& cause);
  FlightRecord record(const Cause& cause);
  std::vector<int> ranks_in_state(char wanted);
  bool all_records_are_in();

  const int rank_;
  const int world_;
  const WatchdogOptions options_;
  const double origin_s_;
  std::thread thread_;

  // Written once, before watched_ is set.
  std::vector<ProcessId> processes_;
  std::vector<bool> local_;  // by rank: its process can be looked at from here

  std::mutex mutex_;  // guards what follows; held for moments
  std::string directory_;
  int watched_ = -1;  // the next local rank, in a ring
  std::vector<FlightGroup> groups_;
  std::vector<Entry> pending_;
  int pending_hint_ = 0;
  std::vector<Entry> history_;  // a ring
  int64_t num_history_ = 0;
  bool failed_ = false;
  std::string failure_;

  std::atomic<bool> quit_{false};
  std::atomic<void (*)()> before_end_{nullptr};
  // Of the watchdog's thread.
  int ticks_ = 0;
  double last_look_s_ = 0;
};

}  // namespace lockstep
