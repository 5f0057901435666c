#pragma once
// Internal to the loop (rl/loop.h): one run in one process, and its step, whose stages lie in three files.
//   loop.cc          from settings to a run that can begin, the step as a whole, evaluation, checkpoints
//   loop_rollout.cc  what is drawn for a step, what waits for the next one, what is drawn ahead
//   loop_train.cc    the trainers' stages: rewards, advantages, the promise, the optimizer's step

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/json.h"
#include "rl/checkpoint.h"
#include "rl/long_tail.h"
#include "rl/loop.h"
#include "rl/metrics.h"
#include "rl/peers.h"
#include "rl/rollout_log.h"

namespace lockstep {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  // Seconds since the last lap.
  double lap() {
    const auto now = Clock::now();
    const double s = std::chrono::duration<double>(now - lap_).count();
    lap_ = now;
    return s;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now(), lap_ = start_;
};

// Of a step, in seconds.
struct StepTimes {
  double rollout = 0, reward = 0, record = 0, train = 0, sync = 0;
};

class Loop {
 public:
  Loop(const LoopConfig& config, const Hooks& hooks, RankWorld* world) : config_(config), hooks_(hooks), peers_(world), side_(peers_) {}

  Status open(bool resume);
  Status run();
  LoopReport take_report() { return std::move(report_); }

 private:
  Status make_layouts();
  Status load_inputs(int threads);
  Status open_directory(bool resume);

  // What is drawn for a step.
  struct Batch {
    int64_t step = 0;
    std::vector<Request> requests;
    std::vector<Completion> completions;
    std::vector<Group> groups;
    OrderCursor cursor;  // behind its prompts
    Metrics metrics;     // of over-sampling
  };
  // Stages of a step, in order.
  Result<Batch> rollout(int64_t step);
  Request request(const Prompt& prompt) const;
  // What the batch is drawn for, prompts that wait first.
  void choose_prompts(Batch& batch);
  // The groups that are complete first stay in the batch, the others wait, with what they have said or without. `waiting`: its first prompts.
  Status draw_first(Batch& batch, std::span<const LongTail::Waiting> waiting);
  bool over_samples() const { return config_.rollout.over_sample > 1; }
  Status restore_long_tail(const std::string& text);
  // Completions of all requests of the batch, drawn now or finished by an earlier start of this run; `have` are there already.
  Result<std::vector<Completion>> draw(const Batch& batch, std::vector<Completion> have);  // by the samplers
  // The next step's batch, once a step. Samplers draw it at the step's begin; trainers get it when they have no more use for the time.
  Status fetch_ahead();
  // The promise for the batch that was drawn ahead, before the weights that drew it change.
  Status rescore_ahead();
  // The trainers' stages.
  Status learn(std::vector<Group>& groups, Metrics& metrics, StepTimes& times);
  Status reward(std::vector<Group>& groups);
  Status advantage(std::vector<Group>& groups);
  Status train(std::vector<Group>& groups, Metrics& metrics);
  // The promise: what the trainer's forward saw is what the sampler recorded, or the run stops with a diagnosis.
  // masks[i] are the tokens of samples[i] that the weights of the comparison drew; none: all.
  Status compare(int64_t step, std::span<const TrainSample> samples, std::span<const TokenLogprobs> seen, std::span<const std::vector<uint8_t>> masks);
  // For training under the weights as they are, without advantage and old log-probs.
  TrainSample train_sample(const Trajectory& t) const;
  int64_t lag(const Trajectory& t) const { return policy_->trained_version() - *std::min_element(t.versions.begin(), t.versions.end()); }
  // What is verified, or measured, depends on both sides' numerics.
  uint64_t numerics_sum() const {
    return checksum(fmt::format("{} {}", numerics_name(config_.model.numerics), numerics_name(config_.model.sampler_numerics())));
  }
  // The batch drawn ahead as a file of the checkpoint.
  RolloutLog in_flight_log(const Batch& batch) const;
  // All ranks: the error of the trainers' stages. Where log-probs differ the samplers, who have the weights that drew them, say why.
  Status meet(const Status& learnt, const Batch& batch);
  Status evaluate_now();
  Status save();
  // What a weight update came to, and its line in sync.jsonl.
  Status record_sync(const Result<std::optional<SyncReceipt>>& receipt);
  int64_t max_context() const;
  struct ActorTimes {
    double forward = 0, backward = 0, optimizer = 0;
  };
  ActorTimes actor_times() {
    if (!peers_.trains()) return {};
    const Actor& a = policy_->actor();
    return {a.forward_seconds(), a.backward_seconds(), a.optimizer_seconds()};
  }

  std::string label(const char* stage) const { return label(state_.step + 1, stage); }
  std::string label(int64_t step, const char* stage) const { return fmt::format("step {}/{} {}", step, config_.run.steps, stage); }
  void write_timing(const JsonLine& line) { timing_ << line.str() << '\n' << std::flush; }
  // Ranks that hold the same parts hold the same numbers.
  Status same_weights() {
    const Policy::WeightsSum sum = policy_->weights_sum();
    weights_sum_ = peers_.sum(sum.share, "weights");
    return peers_.alone() ? Status::ok() : peers_.same(sum.held, "weights", groups_->trainer_twin());
  }
  // Seconds that each rank waited for others since the last call, transfers included.
  std::vector<float> take_waits();

  const LoopConfig& config_;
  const Hooks& hooks_;
  Peers peers_;
  Peers side_;  // who does what this rank does: everyone, or the trainers, or the samplers
  std::optional<RunGroups> groups_;  // none: alone
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<ReferencePolicy> reference_;  // only with a KL term
  std::unique_ptr<Task> task_;
  std::unique_ptr<Judge> judge_;
  std::vector<Prompt> eval_problems_;
  std::string eval_name_;
  std::unique_ptr<RunDir> dir_;  // of rank 0
  std::ofstream timing_, sync_;  // likewise
  RunState state_;
  int64_t last_logged_step_ = -1;  // of the steps whose rollout an earlier start logged
  uint64_t weights_sum_ = 0;       // WeightsSum::share over all ranks, of the weights as they are
  LoopReport report_;
  LongTail tail_;
  int64_t num_logged_ = 0;  // of the last batch: samples that did not have to be drawn
  int64_t equal_steps_ = 0;      // in a row, up to now, in which all rewards were equal
  Stopwatch since_waits_;
  double logprob_seconds_ = 0;  // of this step: trainer forwards besides the one that is differentiated
  struct Unequal {              // the first token whose two log-probs differ
    int64_t sample = -1, token = 0, train_bits = 0, step = 0;
  };
  Unequal unequal_;

  // rollout.ahead = 1.
  std::optional<Batch> ahead_;  // the next step's batch
  bool fetched_ = false;        // it, or the reason why there is none, in this step
  bool rescored_ = false;
  Status fetch_status_;
  double fetch_seconds_ = 0, rescore_seconds_ = 0;  // of this step
  std::string in_flight_;       // the text of the batch that an earlier start had drawn ahead of the checkpoint; until it is taken
};

}  // namespace lockstep
