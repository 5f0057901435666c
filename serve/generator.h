#pragma once
// The engine behind a door that any thread may knock at. One thread owns the engine and steps it; the others submit jobs, wait for their tokens, and
// ask for pauses, updates of the weights and numbers, all of which happen between two steps.
//
// What a job says is what the engine would say offline to the same requests: tokens, log-probs and text depend on nothing that runs beside it.
//
// Weights. update() reads a checkpoint into weights beside those that serve, while these go on serving. Only when that has succeeded, admission stops
// until no sample holds state of the old version: because all have finished (wait), were ended (abort) or gave up their state and will continue from
// their tokens under the new weights (retract). Then one pointer changes. A checkpoint that cannot be read changes nothing.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "rl/policy.h"
#include "rollout/stop_text.h"

namespace lockstep {

struct JobOptions {
  std::string name;                // for abort(name); may be empty
  std::vector<std::string> stops;  // texts that end a sample
  SpecialTokens special = SpecialTokens::hide;
  bool stream = false;             // its tokens are told as they come, not only at the end
};

// Requests that belong together, with the same sampling. Its samples are numbered request by request.
class Job {
 public:
  struct Sample {
    TokenLog log;
    std::string text;  // without stop ids, and up to a stop string
    bool ended = false;
    FinishReason reason = FinishReason::length;
    std::string matched;  // the stop string that ended it
  };

  using Clock = std::chrono::steady_clock;
  // Waits, but not beyond `limit`, until something happened since `seen` (an earlier result, or 0); before `quiet_until` only the end of the job counts.
  // Returns what to call `seen` next time. One thread at a time.
  uint64_t wait(uint64_t seen, Clock::time_point limit, Clock::time_point quiet_until = {});
  bool ended() const;
  // Calls f(sample index, sample) for every sample, under the job's lock.
  void look(const std::function<void(size_t, const Sample&)>& f) const;
  const std::vector<Request>& requests() const { return requests_; }
  const JobOptions& options() const { return options_; }

 private:
  friend class Generator;
  Job(std::vector<Request> requests, JobOptions options, const Tokenizer& tokenizer);

  const std::vector<Request> requests_;
  const JobOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Sample> samples_;  // and all below: under mutex_
  size_t unfinished_;
  uint64_t events_ = 1;
  bool awaited_ = false;  // somebody waits for more than the end
  std::vector<StopText> texts_;  // the engine's thread alone
};

enum class Quiesce : uint8_t { wait, abort, retract, in_place };  // in_place: for a pause alone; state is kept

struct GeneratorStats {
  EngineStats engine;
  EngineLoad load;
  int64_t unfinished = 0;  // samples of all jobs
  int64_t jobs = 0, refused = 0, updates = 0, failed_updates = 0;
  int64_t stopped = 0, truncated = 0, aborted = 0;  // samples, by how they ended
  bool paused = false;
  std::string weight_version;
};

class Generator {
 public:
  // `policy`, made to sample, outlives this, and nobody else uses its engine, context or weights meanwhile. max_samples: of unfinished jobs.
  Generator(Policy& policy, int64_t max_samples, std::string weight_version);
  ~Generator();  // aborts what is left; nobody is inside any call

  // Refused: what the engine says of a request (bad), too many samples (busy), or draining.
  enum class Refusal : uint8_t { none, bad, busy, draining };
  struct Submitted {
    std::shared_ptr<Job> job;  // null: refused
    Refusal refusal = Refusal::none;
    std::string message;
  };
  Submitted submit(std::vector<Request> requests, JobOptions options);
  void cancel(const std::shared_ptr<Job>& job);  // whoever waits for it is gone
  void abort(const std::string& name);           // every job of this name
  void abort_all();
  void flush_cache();

  // Steps no more until resume(). Jobs may be submitted, and wait.
  void pause(Quiesce how);
  void resume();
  // Blocks until the new version serves, or an error says why the old one goes on. One at a time. label: what weight_version() says from then on;
  // empty: the number of the version.
  Status update(const std::string& checkpoint, Quiesce how, const std::string& label);
  // Calls f with the weights that serve, and where they lie. Meanwhile no update begins, nor is one under way.
  void look_at_weights(const std::function<void(const Weights&, Device)>& f);
  // True if a token can be drawn within `deadline`, for a request of its own or, when the queue is long, for another one.
  Status health(std::chrono::milliseconds deadline);
  // No more submissions; waits for jobs that are unfinished, for `limit`. False: some are.
  bool drain(std::chrono::milliseconds limit);

  GeneratorStats stats() const;
  std::string weight_version() const;

 private:
  struct Place {
    std::shared_ptr<Job> job;
    size_t first = 0;  // its first sample in the job
    int32_t first_sample = 0;
  };
  struct Update {
    Quiesce how;
    std::string label;
    bool done = false;
    Status status;
  };
  void run();
  void on_engine(std::function<void()> command);  // and waits for it
  Submitted add(std::vector<Request> requests, JobOptions options, bool urgent);
  // On the engine's thread.
  void admit();
  void deliver();
  void end(const Completion& completion);
  void abort_job(const Job* job);  // null: all
  void try_swap();
  void publish();

  Policy& policy_;
  const int64_t max_samples_;
  mutable std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<std::function<void()>> commands_;   // and all to `published_`: under mutex_
  std::deque<std::shared_ptr<Job>> arrived_;
  int64_t unfinished_ = 0;
  bool draining_ = false, quit_ = false;
  std::string weight_version_;
  GeneratorStats published_;
  // The engine's thread alone.
  std::map<uint64_t, Place> places_;  // by tag
  uint64_t next_tag_ = 1;
  bool paused_ = false;
  Update* update_ = nullptr;  // that waits for quiet
  std::mutex updating_;
  std::shared_mutex weights_;  // unique: they are being replaced
  std::thread thread_;
};

}  // namespace lockstep
