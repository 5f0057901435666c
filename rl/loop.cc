// One step, on one thread of each rank. An arrow is a record; a stage is a function from one record to the next.
//
//   task ──Prompt──▶ rollout ──Trajectory──▶ reward ──Group──▶ advantage ──TrainSample──▶ actor
//    │                  ▲     tokens, log-      score,           [R] floats                 │ forward, loss, backward,
//    │ cursor           │     probs, version v  correct                                     │ optimizer
//    ▼                  │                                                                   ▼
//   checkpoint          └──────────────── weights, version v + 1, swapped whole ────────────┘
//
// There are no queues: P * n trajectories are made, then all are trained on, so every token is of the version that is trained
// (lag 0) and nothing waits for anything but the stage before it. With rollout.ahead = 1 there is one batch more: step k trains batch k, while batch k + 1
// is drawn from the weights that step k began with.
//
//   ahead 0    draw 1 | train 1 | draw 2 | train 2 | ...
//   ahead 1    draw 1 | train 1 | train 2 | ...         trainers
//                     | draw 2  | draw 3  | ...         samplers; where these are the same ranks, first the one, then the other
//
// Sampler and trainer read the same weights, or where their layouts or
// numerics differ copies of the same version, which are taken at the end of the step. In an exact pair, of equal numerics, the step checks that they
// also computed the same log-probs, bit for bit, for every token that is trained: with the weights that drew it, so that a batch drawn ahead is run once
// more by the trainer before these change. In another pair it measures how far they are apart, old log-probs are the
// trainer's own, and train.tis and train.replay say what is done about the rest.
//
// With rollout.over_sample above 1 more than P prompts are begun, the first P groups to be complete are trained, and the rest waits for the next step
// (rl/long_tail.h). What it has said by then is of an older version: the old log-probs of such a sample are the trainer's own, and only its tokens of the
// present version can be compared.
//
// Many ranks: rollout and actor each share their work and hand everything to everyone, so that the stages between see whole
// steps on every rank, and what they compute is the same everywhere. Only rank 0 writes. Where samplers and trainers are different ranks, the stages
// between are the trainers', and everyone meets when trajectories are handed over and at the end of the step: for its error, if it has one, and for the
// weights. A colocated run is the case where both sides are everyone.

#include "rl/loop.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>

#include "core/log.h"
#include "io/file.h"
#include "io/json.h"
#include "rl/advantage.h"
#include "rl/checkpoint.h"
#include "rl/diagnose.h"
#include "rl/metrics.h"
#include "rl/peers.h"
#include "rl/sampling.h"
#include "rl/rollout_log.h"

namespace lockstep {

namespace {

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

constexpr const char* kInFlightFile = "in_flight.jsonl";  // of a checkpoint
constexpr const char* kLongTailFile = "long_tail.jsonl";  // likewise

std::string trajectory_json(const Group& group, const Trajectory& t) {
  return JsonLine()
      .add("group_index", t.group_index)
      .add("index", t.index)
      .add("row", group.prompt.row)
      .add("status", trajectory_status_name(t.status))
      .add("prompt", group.prompt.text)
      .add("response", t.text)
      .add("label", group.prompt.label)
      .add("answer", t.answer)
      .add("score", t.score)
      .add("reward", t.reward)
      .add("correct", t.correct)
      .add("reason", t.usable() ? t.reason : t.failure)
      .add("advantage", t.advantage.empty() ? 0.0f : t.advantage.front())
      .add("prompt_length", t.prompt_length)
      .add("tokens", std::span<const int32_t>(t.tokens))
      .add("rollout_log_probs", std::span<const float>(t.logprobs))
      .add("weight_versions", std::span<const int32_t>(t.versions))
      .str();
}

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

Status Loop::open(bool resume) {
  LOCKSTEP_RETURN_IF_ERROR(peers_.same_settings(config_.resolved));
  LOCKSTEP_RETURN_IF_ERROR(make_layouts());
  LOCKSTEP_RETURN_IF_ERROR(peers_.agree(load_inputs(peers_.threads(config_.run.threads)), "inputs"));
  LOCKSTEP_RETURN_IF_ERROR(peers_.same(checksum(state_.rows), "data rows"));
  LOCKSTEP_RETURN_IF_ERROR(open_directory(resume));
  LOCKSTEP_RETURN_IF_ERROR(record_sync(policy_->publish()));
  LOCKSTEP_RETURN_IF_ERROR(same_weights());
  task_->restore(state_.cursor);
  report_.first_step = report_.last_step = state_.step;
  hooks_.say(fmt::format("{}{} threads, {} numerics{}; {}", peers_.alone() ? "" : fmt::format("{} ranks of ", peers_.size()),
                         policy_->context().num_threads(), numerics_name(config_.model.numerics),
                         config_.model.exact() ? "" : fmt::format(", sampler in {}", numerics_name(config_.model.sampler_numerics())), policy_->memory_report()));
  return Status::ok();
}

int64_t Loop::max_context() const {
  const LoopConfig& c = config_;
  return c.task.max_prompt_tokens + std::max(c.rollout.max_new_tokens, c.run.eval_every > 0 ? c.eval.max_new_tokens : 0);
}

Status Loop::make_layouts() {
  Layouts layouts;
  const Result<ModelConfig> config = find_model_config(config_.model);
  const auto resolve = [&] {
    if (!config) return config.status();
    Result<Layouts> resolved = resolve_layouts(config_.parallel, config.value(), max_context(), peers_.size());
    if (!resolved) return resolved.status();
    layouts = resolved.take();
    if (!peers_.alone())
      hooks_.say(fmt::format("trainer: {}; sampler{}: {}", layouts.train.str(), layouts.apart ? ", on ranks of its own" : "", layouts.rollout.str()));
    return Status::ok();
  };
  LOCKSTEP_RETURN_IF_ERROR(peers_.agree(resolve(), "layouts"));
  LOCKSTEP_RETURN_IF_ERROR(peers_.same(checksum(model_config_json(config.value())), "model configs"));
  if (peers_.alone()) return Status::ok();
  groups_.emplace(make_run_groups(*peers_.world(), layouts, config.value(), config_.model.numerics, config_.model.sampler_numerics()));
  peers_ = Peers(peers_.world(), &*groups_);
  side_ = peers_.side();
  return Status::ok();
}

Status Loop::load_inputs(int threads) {
  const LoopConfig& c = config_;
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = threads, .sample = true, .train = true};
  const bool evaluates = c.run.eval_every > 0;
  use.engine.max_running = c.rollout.max_running;
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.max_context = max_context();
  use.optimizer = c.optimizer;
  if (use.optimizer.total_steps == 0) use.optimizer.total_steps = c.run.steps * c.train.steps_per_rollout;
  use.actor = {.max_tokens_per_microbatch = c.train.microbatch_tokens, .recompute = c.train.recompute, .cache = {}, .replay = c.train.replay};
  use.sync = c.sync;
  use.ranks = groups_ ? &*groups_ : nullptr;
  Result<std::unique_ptr<Policy>> policy = Policy::make(c.model, use);
  if (!policy) return policy.status();
  policy_ = policy.take();
  if (c.train.loss.kl != KlKind::none && peers_.trains()) {
    Result<std::unique_ptr<ReferencePolicy>> reference = ReferencePolicy::make(*policy_, c.model, use);
    if (!reference) return reference.status();
    reference_ = reference.take();
  }

  Result<std::unique_ptr<Judge>> judge = Judge::make(c.task.reward);
  if (!judge) return judge.status();
  judge_ = judge.take();
  TaskCounts counts;
  Result<std::vector<Prompt>> prompts = load_prompts(c.task.train_file, policy_->tokenizer(), c.task, &counts);
  if (!prompts) return prompts.status();
  const std::string rows = fingerprint(prompts.value());
  task_ = std::make_unique<Task>(prompts.take(), static_cast<uint64_t>(c.run.seed));
  hooks_.say(fmt::format("{}: {}", c.task.train_file, counts.str()));
  if (evaluates) {
    Result<std::vector<Prompt>> problems = load_prompts(c.task.eval_file, policy_->tokenizer(), c.task, &counts);
    if (!problems) return problems.status();
    hooks_.say(fmt::format("{}: {}", c.task.eval_file, counts.str()));
    eval_problems_ = problems.take();
    eval_name_ = std::filesystem::path(c.task.eval_file).stem().string();
  }

  state_ = {.kind = "train", .step = 0, .seed = c.run.seed, .num_rows = task_->num_prompts(), .rows = rows, .cursor = {}};
  return Status::ok();
}

Status Loop::open_directory(bool resume) {
  Result<OpenedRun> opened = open_run(config_.run.dir, resume, config_.resolved, peers_, *policy_, state_, hooks_);
  if (!opened) return opened.status();
  dir_ = std::move(opened.value().dir);
  last_logged_step_ = opened.value().last_logged_step;
  if (const std::string file = opened.value().checkpoint + "/" + kInFlightFile; !opened.value().checkpoint.empty()) {
    LOCKSTEP_RETURN_IF_ERROR(peers_.by_first("batch in flight", [&] {
      std::error_code error;
      if (!std::filesystem::exists(file, error)) return Status::ok();
      if (config_.rollout.ahead == 0) {
        hooks_.say(fmt::format("rollout.ahead is 0: {} is left out, and its batch drawn anew", file));
        return Status::ok();
      }
      Result<std::string> text = read_file(file);
      if (text) in_flight_ = text.take();
      return text.status();
    }));
    peers_.tell(&in_flight_, "batch in flight");
  }
  if (const std::string file = opened.value().checkpoint + "/" + kLongTailFile; !opened.value().checkpoint.empty()) {
    std::string text;
    LOCKSTEP_RETURN_IF_ERROR(peers_.by_first("long tail", [&] {
      std::error_code error;
      if (!std::filesystem::exists(file, error)) return Status::ok();
      Result<std::string> read = read_file(file);
      if (read) text = read.take();
      return read.status();
    }));
    peers_.tell(&text, "long tail");
    if (const Status s = restore_long_tail(text); !s) return errorf("{}: {}", file, s.message());
  }
  LOCKSTEP_RETURN_IF_ERROR(peers_.by_first("run directory", [&] {
    LOCKSTEP_RETURN_IF_ERROR(make_directories(dir_->path() + "/evals"));
    // Times are kept apart from metrics.jsonl, whose bytes do not depend on the machine.
    timing_.open(dir_->path() + "/timing.jsonl", std::ios::app);
    return timing_ ? Status::ok() : errno_status("cannot open", dir_->path() + "/timing.jsonl", errno);
  }));
  return peers_.alone() ? Status::ok() : peers_.world()->record_in(config_.run.dir);
}

std::vector<float> Loop::take_waits() {
  if (peers_.alone()) return {};
  double waited_s = 0;
  for (const auto& [name, traffic] : peers_.world()->traffic()) waited_s += traffic.wait_s;
  peers_.world()->reset_traffic();
  std::vector<float> all(static_cast<size_t>(peers_.size()));
  float mine = static_cast<float>(waited_s);
  peers_.group()->all_gather(policy_->context(), TensorView(all.data(), DType::f32, {peers_.size()}),
                             TensorView(&mine, DType::f32, {1}), "waits");
  return all;
}

Request Loop::request(const Prompt& prompt) const {
  const RolloutOptions& o = config_.rollout;
  Request r;
  r.prompt_id = static_cast<uint64_t>(prompt.id);
  r.prompt = prompt.tokens;
  r.num_samples = static_cast<int32_t>(o.samples_per_prompt);
  r.seed = static_cast<uint64_t>(config_.run.seed);
  r.sampling.temperature = o.temperature;
  r.sampling.max_new_tokens = o.max_new_tokens;
  r.sampling.stop_ids = {policy_->tokenizer().eos_id()};
  r.record = config_.train.replay;
  if (o.order == RolloutOrder::longest) {
    const auto longest = tail_.longest.find(prompt.row);
    r.expected_tokens = longest != tail_.longest.end() ? longest->second : o.max_new_tokens;
  }
  return r;
}

Status Loop::restore_long_tail(const std::string& text) {
  Result<LongTailRows> rows = read_long_tail_rows(text);
  if (!rows) return rows.status();
  if (const size_t n = rows.value().waiting.size(); n > 0 && config_.rollout.ahead > 0)
    return errorf("{} prompts wait there for a step of rollout.over_sample, which rollout.ahead = 1 does not know; set rollout.ahead = 0", n);
  tail_.longest = std::move(rows.value().longest);
  std::vector<Request> requests;
  for (const auto& [id, row] : rows.value().waiting) {
    if (row < 0 || row >= task_->num_prompts()) return errorf("a prompt of row {}, where the data has {}; resume from an earlier checkpoint", row, task_->num_prompts());
    tail_.waiting.push_back({.prompt = task_->again(row, id), .samples = {}});
    requests.push_back(request(tail_.waiting.back().prompt));
  }
  if (config_.rollout.partial == PartialKind::drop) return Status::ok();
  size_t at = 0;
  for (Completion& c : read_long_tail_samples(text, requests, numerics_sum())) {
    while (tail_.waiting[at].prompt.id != static_cast<int64_t>(c.prompt_id)) ++at;
    tail_.waiting[at].samples.push_back(std::move(c));
  }
  return Status::ok();
}

void Loop::choose_prompts(Batch& batch) {
  const int64_t submitted = submitted_prompts(config_.rollout.prompts_per_step, config_.rollout.over_sample);
  for (const LongTail::Waiting& w : tail_.waiting)
    if (std::ssize(batch.groups) < submitted) batch.groups.push_back({.prompt = w.prompt, .trajectories = {}});
  while (std::ssize(batch.groups) < submitted) batch.groups.push_back({.prompt = task_->next(), .trajectories = {}});
  for (const Group& g : batch.groups) {
    batch.requests.push_back(request(g.prompt));
    const bool waited = std::ssize(batch.requests) <= std::ssize(tail_.waiting);
    if (waited && config_.rollout.order == RolloutOrder::longest) batch.requests.back().expected_tokens = config_.rollout.max_new_tokens;
  }
  batch.cursor = task_->cursor();
}

Status Loop::draw_first(Batch& batch, std::span<const LongTail::Waiting> waiting) {
  const RolloutOptions& o = config_.rollout;
  std::vector<Completion> have;
  std::vector<Request> requests;
  std::set<uint64_t> chosen;
  int64_t continued = 0;
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    const std::span<const Completion> samples = i < waiting.size() ? std::span(waiting[i].samples) : std::span<const Completion>();
    for (const Completion& c : samples) (c.reason == FinishReason::abort ? void(++continued) : have.push_back(c));
    const std::vector<Request> rest = continued_requests(batch.requests[i], samples);
    if (rest.empty() && std::ssize(chosen) < o.prompts_per_step) chosen.insert(batch.requests[i].prompt_id);
    requests.insert(requests.end(), rest.begin(), rest.end());
  }
  const int64_t missing = o.prompts_per_step - std::ssize(chosen);
  Result<Peers::FirstGroups> drawn =
      peers_.run_first(policy_->own_engine(), policy_->context(), requests, missing, hooks_, label(batch.step, "rollout"));
  if (!drawn) return drawn.status();
  for (const int64_t id : drawn.value().complete) chosen.insert(static_cast<uint64_t>(id));
  std::vector<Completion> all = std::move(drawn.value().completions);
  all.insert(all.end(), std::make_move_iterator(have.begin()), std::make_move_iterator(have.end()));
  std::sort(all.begin(), all.end(), [](const Completion& a, const Completion& b) { return std::pair(a.prompt_id, a.sample_idx) < std::pair(b.prompt_id, b.sample_idx); });

  std::vector<Group> groups = std::exchange(batch.groups, {});
  std::vector<LongTail::Waiting> still;
  int64_t left_tokens = 0;
  auto at = all.begin();
  for (Group& g : groups) {
    const auto first = at;
    while (at != all.end() && at->prompt_id == static_cast<uint64_t>(g.prompt.id)) ++at;
    if (chosen.contains(static_cast<uint64_t>(g.prompt.id))) {
      batch.completions.insert(batch.completions.end(), std::make_move_iterator(first), std::make_move_iterator(at));
      batch.groups.push_back(std::move(g));
      continue;
    }
    still.push_back({.prompt = std::move(g.prompt), .samples = {}});
    for (auto c = first; c != at; ++c) {
      left_tokens += std::ssize(c->tokens);
      if (o.partial == PartialKind::drop || c->tokens.empty()) continue;
      if (c->reason == FinishReason::abort) c->choices = {};  // the rows are run again
      still.back().samples.push_back(std::move(*c));
    }
  }
  tail_.waiting.insert(tail_.waiting.begin(), std::make_move_iterator(still.begin()), std::make_move_iterator(still.end()));
  batch.metrics.emplace_back("rollout/over_sample/prompts", static_cast<double>(groups.size()));
  batch.metrics.emplace_back("rollout/over_sample/continued_samples", static_cast<double>(continued));
  batch.metrics.emplace_back(o.partial == PartialKind::keep ? "rollout/over_sample/kept_tokens" : "rollout/over_sample/dropped_tokens",
                             static_cast<double>(left_tokens));
  return Status::ok();
}

Result<Loop::Batch> Loop::rollout(int64_t step) {
  const RolloutOptions& o = config_.rollout;
  Batch batch{.step = step, .requests = {}, .completions = {}, .groups = {}, .cursor = {}, .metrics = {}};
  choose_prompts(batch);
  const auto first_left = tail_.waiting.begin() + std::min(std::ssize(tail_.waiting), std::ssize(batch.groups));
  const std::vector<LongTail::Waiting> waiting(std::make_move_iterator(tail_.waiting.begin()), std::make_move_iterator(first_left));
  tail_.waiting.erase(tail_.waiting.begin(), first_left);
  std::set<std::pair<uint64_t, int32_t>> older;  // than the weights as they are, in part
  if (over_samples() || std::any_of(waiting.begin(), waiting.end(), [](const LongTail::Waiting& w) { return !w.samples.empty(); })) {
    for (const LongTail::Waiting& w : waiting)
      for (const Completion& c : w.samples) older.emplace(c.prompt_id, c.sample_idx);
    LOCKSTEP_RETURN_IF_ERROR(draw_first(batch, waiting));
    num_logged_ = 0;
  } else {
    std::vector<Completion> have;
    if (!in_flight_.empty()) {
      have = in_flight_log(batch).read_text(in_flight_).completions;
      in_flight_.clear();
      hooks_.say(fmt::format("{} samples of step {}, drawn ahead, taken from the checkpoint", have.size(), step));
    }
    for (const Completion& c : have) older.emplace(c.prompt_id, c.sample_idx);
    Result<std::vector<Completion>> completions = peers_.share(peers_.samples() ? draw(batch, std::move(have)) : std::vector<Completion>());
    if (!completions) return completions.status();
    batch.completions = completions.take();
    if (peers_.apart()) peers_.group()->broadcast(std::span(&num_logged_, 1), peers_.first_sampler(), "rollout");
  }
  report_.samples_logged += num_logged_;
  report_.samples_drawn += static_cast<int64_t>(batch.completions.size()) - num_logged_;
  for (size_t i = 0; i < batch.completions.size(); ++i) {
    const Completion& c = batch.completions[i];
    Group& g = batch.groups[i / static_cast<size_t>(o.samples_per_prompt)];
    g.trajectories.push_back(make_trajectory(g.prompt, c, o.samples_per_prompt, policy_->tokenizer(), policy_->config().vocab_size));
    const Trajectory& t = g.trajectories.back();
    report_.rollout_tokens += t.response_length();
    if (o.order == RolloutOrder::longest) {
      int64_t& longest = tail_.longest[g.prompt.row];
      longest = std::max(longest, t.response_length());
    }
    if (!t.usable()) log_warn("sample {} is {} and not trained: {}", t.index, trajectory_status_name(t.status), t.failure);
    if (older.contains({c.prompt_id, c.sample_idx})) continue;
    for (const int32_t v : t.versions) {
      CHECK(v == policy_->weights().version(), "sample {} was drawn by version {}, the weights are version {}", t.index, v,
            policy_->weights().version());
    }
  }
  return batch;
}

RolloutLog Loop::in_flight_log(const Batch& batch) const {
  return RolloutLog("", batch.step, numerics_sum(), batch.requests, 0);
}

Result<std::vector<Completion>> Loop::draw(const Batch& batch, std::vector<Completion> have) {
  const int64_t step = batch.step;
  const std::vector<Request>& requests = batch.requests;
  const std::string weights = fmt::format("{:016x} {} {}", weights_sum_, numerics_name(config_.model.sampler_numerics()), policy_->weights().version());
  RolloutLog log(rollout_log_path(config_.run.dir, step), step, checksum(weights), requests, peers_.rank());
  std::vector<Completion> logged = std::move(have);
  if (logged.empty() && step <= last_logged_step_) {
    LOCKSTEP_RETURN_IF_ERROR(side_.by_first("rollout log", [&] {
      Result<LoggedRollout> read = log.read();
      if (!read) return read.status();
      logged = std::move(read.value().completions);
      hooks_.say(fmt::format("{} finished rollouts of step {} taken from the log{}{}", logged.size(), step,
                             read.value().foreign_lines > 0 ? fmt::format(", {} of other weights or settings left there", read.value().foreign_lines) : "",
                             read.value().damaged_lines > 0 ? fmt::format(", {} damaged lines passed over", read.value().damaged_lines) : ""));
      return Status::ok();
    }));
    side_.broadcast(logged, "rollout log");
  }
  const std::vector<Request> missing = missing_requests(requests, logged);
  Result<std::vector<Completion>> drawn = side_.run(policy_->own_engine(), policy_->context(), missing, hooks_, label(step, "rollout"),
                                                    [&](std::span<const Completion> finished) { return log.append(finished); });
  if (!drawn) return drawn.status();
  num_logged_ = static_cast<int64_t>(logged.size());
  std::vector<Completion> all(logged.size() + drawn.value().size());
  std::merge(std::move_iterator(logged.begin()), std::move_iterator(logged.end()), std::move_iterator(drawn.value().begin()),
             std::move_iterator(drawn.value().end()), all.begin(), [](const Completion& a, const Completion& b) {
               return std::pair(a.prompt_id, a.sample_idx) < std::pair(b.prompt_id, b.sample_idx);
             });
  return all;
}

Status Loop::reward(std::vector<Group>& groups) {
  std::vector<Trajectory*> judged;
  std::vector<GradeRow> rows;
  for (Group& g : groups) {
    for (Trajectory& t : g.trajectories) {
      if (!t.usable()) continue;
      judged.push_back(&t);
      rows.push_back({g.prompt.text, t.text, g.prompt.label});
    }
  }
  Result<std::vector<RewardResult>> verdicts = side_.grade(*judge_, rows);
  if (!verdicts) return verdicts.status();
  std::set<float> scores;
  for (size_t i = 0; i < judged.size(); ++i) {
    Trajectory& t = *judged[i];
    RewardResult& r = verdicts.value()[i];
    t.reason = reward_reason_name(r.reason);
    if (!r.scored()) {
      t.status = TrajectoryStatus::failed;
      t.failure = "not judged: " + r.error;
      log_warn("sample {} is not trained; {}", t.index, t.failure);
      continue;
    }
    t.score = r.score;
    t.reward = r.score + length_penalty(t.response_length(), config_.rollout.max_new_tokens, config_.train.overlong_buffer,
                                        config_.train.overlong_factor);
    t.correct = r.correct;
    t.answer = std::move(r.pred);
    scores.insert(t.reward);
  }
  equal_steps_ = scores.size() == 1 ? equal_steps_ + 1 : 0;
  if (equal_steps_ > 0) {
    log_warn("step {}: all rewards are {} ({} in a row): there is nothing to learn; do the prompt's answer format and task.reward agree?",
             state_.step + 1, *scores.begin(), equal_steps_);
  }
  return Status::ok();
}

Status Loop::advantage(std::vector<Group>& groups) {
  const AdvantageKind kind = config_.train.advantage;
  // The pure functions take plain arrays: groups, then samples, then tokens.
  std::vector<Trajectory*> samples;
  std::vector<float> rewards;
  std::vector<int64_t> group_offsets = {0}, token_offsets = {0};
  std::vector<int32_t> mask;
  for (Group& g : groups) {
    const auto num_usable =
        std::count_if(g.trajectories.begin(), g.trajectories.end(), [](const Trajectory& t) { return t.usable(); });
    for (Trajectory& t : g.trajectories) {
      if (!t.usable()) continue;
      if (num_usable < 2 && kind != AdvantageKind::reinforce_pp) {
        t.status = TrajectoryStatus::failed;
        t.failure = "it is the only usable sample of its group";
        continue;
      }
      if (config_.train.mask_truncated && t.status == TrajectoryStatus::truncated)
        std::fill(t.mask.begin(), t.mask.end(), uint8_t{0});
      samples.push_back(&t);
      rewards.push_back(t.reward);
      mask.insert(mask.end(), t.mask.begin(), t.mask.end());
      token_offsets.push_back(static_cast<int64_t>(mask.size()));
    }
    if (static_cast<int64_t>(samples.size()) > group_offsets.back())
      group_offsets.push_back(static_cast<int64_t>(samples.size()));
  }

  std::vector<float> advantages(mask.size());
  const auto by_group = [&](GroupEstimator estimator) {
    std::vector<float> of_sample(samples.size());
    LOCKSTEP_RETURN_IF_ERROR(group_advantages(estimator, rewards, group_offsets, of_sample));
    broadcast_to_tokens(of_sample, token_offsets, mask, advantages);
    return Status::ok();
  };
  switch (kind) {
    case AdvantageKind::grpo: LOCKSTEP_RETURN_IF_ERROR(by_group(GroupEstimator::grpo)); break;
    case AdvantageKind::dr_grpo: LOCKSTEP_RETURN_IF_ERROR(by_group(GroupEstimator::dr_grpo)); break;
    case AdvantageKind::rloo: LOCKSTEP_RETURN_IF_ERROR(by_group(GroupEstimator::rloo)); break;
    case AdvantageKind::batch_std: LOCKSTEP_RETURN_IF_ERROR(by_group(GroupEstimator::batch_std)); break;
    case AdvantageKind::reinforce_pp:
      LOCKSTEP_RETURN_IF_ERROR(reinforce_pp_returns(rewards, token_offsets, mask, {}, 0.0, 1.0, advantages));
      LOCKSTEP_RETURN_IF_ERROR(whiten(advantages, mask, advantages));
      break;
    case AdvantageKind::reinforce_pp_baseline:
      LOCKSTEP_RETURN_IF_ERROR(reinforce_pp_baseline(rewards, group_offsets, token_offsets, mask, {}, 0.0, advantages));
      LOCKSTEP_RETURN_IF_ERROR(whiten(advantages, mask, advantages));
      break;
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i]->advantage.assign(advantages.begin() + token_offsets[i], advantages.begin() + token_offsets[i + 1]);
  }
  return Status::ok();
}

Status Loop::fetch_ahead() {
  if (config_.rollout.ahead == 0 || fetched_) return fetch_status_;
  const Stopwatch watch;
  fetched_ = true;
  Result<Batch> next = rollout(state_.step + 2);
  fetch_status_ = next.status();
  if (next) ahead_ = next.take();
  fetch_seconds_ += watch.seconds();
  return fetch_status_;
}

Status Loop::rescore_ahead() {
  if (config_.rollout.ahead == 0 || !config_.model.exact() || rescored_) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(fetch_ahead());
  const Stopwatch watch;
  rescored_ = true;
  std::vector<TrainSample> samples;
  for (const Group& g : ahead_->groups)
    for (const Trajectory& t : g.trajectories)
      if (t.usable()) samples.push_back(train_sample(t));
  if (samples.empty()) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(compare(ahead_->step, samples, policy_->actor().logprobs(samples), {}));
  rescore_seconds_ += watch.seconds();
  return Status::ok();
}

TrainSample Loop::train_sample(const Trajectory& t) const {
  TrainSample s;
  s.index = t.index;
  s.tokens = t.tokens;
  s.prompt_length = t.prompt_length;
  s.mask = t.mask;
  s.advantage = t.advantage;
  s.rollout_logprob = t.logprobs;
  s.temperature = config_.rollout.temperature;
  s.choices = t.choices;
  return s;
}

Status Loop::train(std::vector<Group>& groups, Metrics& metrics) {
  const TrainOptions& o = config_.train;
  std::vector<TrainSample> samples;
  const int64_t now = policy_->trained_version();
  std::vector<int64_t> lags;
  std::vector<std::span<const int32_t>> versions;
  std::vector<std::vector<uint8_t>> current;  // masks: the tokens that the weights as they are have drawn
  for (Group& g : groups) {
    for (Trajectory& t : g.trajectories) {
      if (!t.usable()) continue;
      samples.push_back(train_sample(t));
      lags.push_back(lag(t));
      versions.push_back(t.versions);
      current.push_back(t.mask);
      for (size_t i = 0; i < t.versions.size(); ++i)
        if (t.versions[i] != now) current.back()[i] = 0;
      // The trainer's own, bit for bit: compare() below says so or the run stops. Of weights that have changed since, the trainer computes its own.
      if (config_.model.exact() && lags.back() == 0) samples.back().old_logprob = t.logprobs;
      report_.train_tokens += static_cast<int64_t>(t.tokens.size());
    }
  }
  if (samples.empty()) {
    return errorf("step {}: none of the samples can be trained on; the first: {}", state_.step + 1,
                  groups.front().trajectories.front().failure);
  }

  const Stopwatch logprob_watch;
  if (reference_) {
    const std::vector<TokenLogprobs> reference = reference_->logprobs(samples);
    for (size_t i = 0; i < samples.size(); ++i) samples[i].ref_logprob = reference[i].logprob;
  }
  // The first optimizer step computes its samples' log-probs under the version that drew them; the others' are computed now.
  const size_t num_steps = std::min(static_cast<size_t>(o.steps_per_rollout), samples.size());
  const auto share = [&](size_t k) { return samples.size() * k / num_steps; };
  std::vector<TokenLogprobs> old;
  const std::span<TrainSample> later = std::span(samples).subspan(share(1));
  if (!later.empty()) {
    old = policy_->actor().logprobs(later);
    LOCKSTEP_RETURN_IF_ERROR(compare(state_.step + 1, later, old, std::span(current).subspan(share(1))));
    for (size_t i = 0; i < later.size(); ++i)
      if (later[i].old_logprob.empty()) later[i].old_logprob = old[i].logprob;
  }
  logprob_seconds_ = logprob_watch.seconds();

  std::vector<StepMetrics> steps;
  for (size_t k = 0; k < num_steps; ++k) {
    const std::span<const TrainSample> part = std::span(samples).subspan(share(k), share(k + 1) - share(k));
    std::vector<TokenLogprobs> seen;
    std::function<Status()> accept;  // before the weights change, so that a diagnosis runs under those that drew the samples
    if (k == 0) accept = [&] {
      LOCKSTEP_RETURN_IF_ERROR(compare(state_.step + 1, part, seen, std::span(current).first(part.size())));
      return rescore_ahead();
    };
    Result<StepMetrics> step = policy_->actor().step(part, o.loss, k == 0 ? &seen : nullptr, accept);
    if (!step) return step.status();
    LOCKSTEP_RETURN_IF_ERROR(rescore_ahead());  // of a step without a trained token, which accepts nothing and changes nothing
    steps.push_back(step.take());
    hooks_.report(label("train"), static_cast<int64_t>(k + 1), static_cast<int64_t>(num_steps));
    if (k == 0) old.insert(old.begin(), seen.begin(), seen.end());
  }

  add_train_metrics(metrics, steps);
  metrics.emplace_back("train/step", static_cast<double>(policy_->actor().steps_done()));
  std::vector<GapSample> gaps, drift;
  double logprob_sum = 0, entropy_sum = 0, count = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    drift.push_back({.index = samples[i].index, .rollout = samples[i].rollout_logprob, .old = old[i].logprob, .mask = samples[i].mask});
    gaps.push_back(drift.back());
    // Under the weights that drew them, an exact pair's trainer has computed the sampler's of a batch drawn ahead, or the run would have stopped. Those of a
    // sample that was continued it has not.
    if (config_.rollout.ahead == 0) {
      gaps.back().mask = current[i];
    } else if (config_.model.exact() && lags[i] > 0) {
      gaps.back().old = samples[i].rollout_logprob;
    }
    for (size_t t = 0; t < samples[i].mask.size(); ++t) {
      if (samples[i].mask[t] == 0) continue;
      logprob_sum += old[i].logprob[t];
      entropy_sum += old[i].entropy[t];
      ++count;
    }
  }
  if (count > 0) {
    metrics.emplace_back("rollout/log_probs", logprob_sum / count);
    metrics.emplace_back("rollout/entropy", entropy_sum / count);
  }
  add_gap_metrics(metrics, gaps);
  if (config_.rollout.ahead > 0 || over_samples()) add_staleness_metrics(metrics, drift, versions, now);
  if (!config_.model.exact()) {
    add_gap_deciles(metrics, gaps);
    for (const GapSample& g : gaps) report_.compared_tokens += std::ssize(g.mask) - std::count(g.mask.begin(), g.mask.end(), uint8_t{0});
    if (count > 0) report_.max_gap = std::max(report_.max_gap, find_metric(metrics, "gap/logprob_abs_diff_max"));
  }
  return Status::ok();
}

Status Loop::compare(int64_t step, std::span<const TrainSample> samples, std::span<const TokenLogprobs> seen, std::span<const std::vector<uint8_t>> masks) {
  if (!config_.model.exact()) return Status::ok();
  bool all = true;
  for (size_t i = 0; i < masks.size(); ++i) all = all && masks[i] == samples[i].mask;
  if (!all) {
    std::vector<TrainSample> fresh;
    std::vector<TokenLogprobs> fresh_seen;
    for (size_t i = 0; i < masks.size(); ++i) {
      if (std::none_of(masks[i].begin(), masks[i].end(), [](uint8_t m) { return m != 0; })) continue;
      fresh.push_back(samples[i]);
      fresh.back().mask = masks[i];
      fresh_seen.push_back(seen[i]);
    }
    return compare(step, fresh, fresh_seen, {});
  }
  const Comparison c = compare_logprobs(samples, seen);
  report_.compared_tokens += c.num_tokens;
  if (!c.first) return Status::ok();
  if (peers_.apart()) {
    unequal_ = {c.first->sample_index, c.first->response_token, std::bit_cast<int32_t>(c.first->train_logprob), step};
    return errorf("step {}: log-probs of sample {} differ", step, unequal_.sample);
  }
  return errorf("step {}: {}", step, diagnose_difference(policy_->context(), policy_->model(), *c.first));
}

Status Loop::meet(const Status& learnt, const Batch& batch) {
  if (!peers_.apart()) return learnt;
  int64_t found[] = {unequal_.sample, unequal_.token, unequal_.train_bits, unequal_.step};
  peers_.group()->broadcast(std::span(found), 0, "step");
  if (found[0] < 0) return peers_.told(learnt, "step", 0);
  std::string text;
  for (const Group& g : ahead_ && ahead_->step == found[3] ? ahead_->groups : batch.groups) {
    for (const Trajectory& t : g.trajectories) {
      if (t.index != found[0] || !peers_.samples()) continue;
      text = diagnose_difference(policy_->context(), policy_->model(),
                                 {.sample_index = t.index,
                                  .tokens = t.tokens,
                                  .prompt_length = t.prompt_length,
                                  .response_token = found[1],
                                  .temperature = config_.rollout.temperature,
                                  .rollout_logprob = t.logprobs[static_cast<size_t>(found[1])],
                                  .train_logprob = std::bit_cast<float>(static_cast<int32_t>(found[2]))});
    }
  }
  peers_.tell(&text, "diagnosis", peers_.first_sampler());
  return errorf("step {}: {}", found[3], text);
}

Status Loop::learn(std::vector<Group>& groups, Metrics& metrics, StepTimes& times) {
  Stopwatch watch;
  LOCKSTEP_RETURN_IF_ERROR(reward(groups));
  LOCKSTEP_RETURN_IF_ERROR(advantage(groups));
  times.reward = watch.lap();
  if (config_.run.save_rollouts) {
    LOCKSTEP_RETURN_IF_ERROR(side_.by_first("rollout records", [&] {
      std::string records;
      for (const Group& g : groups) {
        for (const Trajectory& t : g.trajectories) records += trajectory_json(g, t) + "\n";
      }
      return dir_->write_rollouts(state_.step + 1, records);
    }));
  }
  times.record = watch.lap();
  metrics.emplace_back("rollout/step", static_cast<double>(state_.step + 1));
  add_rollout_metrics(metrics, groups);
  return train(groups, metrics);
}

Status Loop::evaluate_now() {
  std::string records;
  Result<EvalReport> report = evaluate(*policy_, eval_problems_, config_.task.reward, config_.eval, hooks_,
                                       fmt::format("step {} eval", state_.step), &records, peers_);
  if (!report) return report.status();
  report_.eval_seconds += report.value().seconds;
  LOCKSTEP_RETURN_IF_ERROR(peers_.by_first("evaluation records", [&] {
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(fmt::format("{}/evals/{}.jsonl", dir_->path(), step_name(state_.step)), records));
    LOCKSTEP_RETURN_IF_ERROR(dir_->append_metrics(metrics_line(state_.step, report.value().values(eval_name_))));
    write_timing(JsonLine().add("step", state_.step).add("perf/eval_time", report.value().seconds));
    return Status::ok();
  }));
  hooks_.say(fmt::format("eval at step {}: {}", state_.step, report.value().str()));
  return Status::ok();
}

Status Loop::record_sync(const Result<std::optional<SyncReceipt>>& receipt) {
  if (!receipt) return receipt.status();
  if (!receipt.value()) return Status::ok();
  return peers_.by_first("sync record", [&] {
    const std::string path = dir_->path() + "/sync.jsonl";
    if (!sync_.is_open()) sync_.open(path, std::ios::app);
    const SyncReceipt& r = *receipt.value();
    sync_ << JsonLine()
                 .add("step", state_.step)
                 .add("version", r.version)
                 .add("delta", r.delta)
                 .add("copies", r.copies)
                 .add("rounds", r.rounds)
                 .add("moved_bytes", r.moved_bytes)
                 .add("full_bytes", r.full_bytes)
                 .add("local_bytes", r.local_bytes)
                 .add("changed_bytes", r.changed_bytes)
                 .add("quantized", r.quantized.elements)
                 .add("saturated", r.quantized.saturated)
                 .add("underflowed", r.quantized.underflowed)
                 .add("seconds", r.seconds)
                 .add("checksum", hex_digits(r.checksum))
                 .str()
          << '\n'
          << std::flush;
    return sync_ ? Status::ok() : errno_status("cannot append to", path, errno);
  });
}

Status Loop::save() {
  const Stopwatch watch;
  LOCKSTEP_RETURN_IF_ERROR(save_run(
      dir_.get(), peers_,
      [&](const std::string& directory) {
        LOCKSTEP_RETURN_IF_ERROR(policy_->save(directory));
        if (!peers_.first()) return Status::ok();
        if (!tail_.waiting.empty() || !tail_.longest.empty()) {
          std::vector<Request> requests;
          for (const LongTail::Waiting& w : tail_.waiting) requests.push_back(request(w.prompt));
          LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kLongTailFile, long_tail_text(tail_, requests, numerics_sum())));
        }
        if (!ahead_) return Status::ok();
        return atomic_write(directory + "/" + kInFlightFile, in_flight_log(*ahead_).text(ahead_->completions));
      },
      state_, config_.resolved, config_.run.keep_checkpoints));
  if (dir_) report_.checkpoint = dir_->checkpoint_path(state_.step);
  report_.save_seconds += watch.seconds();
  return Status::ok();
}

Status Loop::run() {
  const RunOptions& run = config_.run;
  const Stopwatch whole;
  if (state_.step == 0 && run.eval_every > 0) LOCKSTEP_RETURN_IF_ERROR(evaluate_now());
  while (state_.step < run.steps) {
    Stopwatch watch;
    StepTimes times;
    const ActorTimes actor_before = actor_times();
    const int64_t steps_before = policy_->own_engine() != nullptr ? policy_->own_engine()->stats().steps : 0;
    const int64_t rollout_before = report_.rollout_tokens, train_before = report_.train_tokens;

    Result<Batch> made = ahead_ ? std::move(*ahead_) : rollout(state_.step + 1);
    if (!made) return made.status();
    Batch& batch = made.value();
    ahead_.reset();
    fetched_ = rescored_ = false;
    fetch_seconds_ = rescore_seconds_ = 0;
    times.rollout = watch.lap();
    if (peers_.samples()) (void)fetch_ahead();  // its status is looked at when all ranks have it

    Metrics metrics;
    Status learnt = fetch_status_;
    if (learnt && peers_.trains()) learnt = learn(batch.groups, metrics, times);
    metrics.insert(metrics.end(), batch.metrics.begin(), batch.metrics.end());
    LOCKSTEP_RETURN_IF_ERROR(fetch_ahead());
    LOCKSTEP_RETURN_IF_ERROR(meet(learnt, batch));
    if (const Status same = same_weights(); !same) return errorf("step {}: {}", state_.step + 1, same.message());
    times.rollout += fetch_seconds_;
    times.train = watch.lap() - times.reward - times.record - fetch_seconds_;
    logprob_seconds_ += rescore_seconds_;

    ++state_.step;
    const Result<std::optional<SyncReceipt>> receipt = policy_->sync();
    if (const Status s = record_sync(receipt); !s) return errorf("step {}: {}", state_.step, s.message());
    if (receipt.value() && is_quantized(config_.model.sampler_numerics())) {
      metrics.emplace_back("sync/saturated", receipt.value()->quantized.saturated);
      metrics.emplace_back("sync/underflowed", receipt.value()->quantized.underflowed);
    }
    times.sync = watch.lap();
    state_.cursor = batch.cursor;
    report_.last_step = state_.step;
    report_.rollout_seconds += times.rollout;
    report_.reward_seconds += times.reward;
    report_.train_seconds += times.train;
    report_.save_seconds += times.record;
    LOCKSTEP_RETURN_IF_ERROR(peers_.by_first("metrics", [&] { return dir_->append_metrics(metrics_line(state_.step, metrics)); }));

    const double rollout_rate = static_cast<double>(report_.rollout_tokens - rollout_before) / times.rollout;
    const double train_rate = static_cast<double>(report_.train_tokens - train_before) / times.train;
    const double step_s = watch.seconds();
    const std::vector<float> waits = take_waits();
    const ActorTimes actor_now = actor_times();
    JsonLine timing;
    timing.add("step", state_.step)
        .add("perf/step_time", step_s)
        .add("perf/rollout_time", times.rollout)
        .add("perf/reward_time", times.reward)
        .add("perf/train_time", times.train)
        .add("perf/log_probs_time", logprob_seconds_)
        .add("perf/actor_train_time", times.train - logprob_seconds_)
        .add("perf/actor_forward_time", actor_now.forward - actor_before.forward)
        .add("perf/actor_backward_time", actor_now.backward - actor_before.backward)
        .add("perf/sync_time", times.sync)
        .add("perf/optimizer_time", actor_now.optimizer - actor_before.optimizer)
        .add("perf/rollout_tok_per_s", rollout_rate)
        .add("perf/actor_train_tok_per_s", train_rate);
    if (policy_->own_engine() != nullptr) timing.add("perf/rollout_engine_steps", policy_->own_engine()->stats().steps - steps_before);
    if (receipt.value() && receipt.value()->delta) timing.add("perf/update_weights_density", receipt.value()->density());
    if (!waits.empty()) {
      std::vector<float> shares;
      const double since_s = since_waits_.lap();
      for (const float wait_s : waits) shares.push_back(static_cast<float>(wait_s / since_s));
      timing.add("perf/wait_times", std::span<const float>(waits)).add("perf/wait_share", std::span<const float>(shares));
    }
    if (peers_.first()) write_timing(timing);
    const double left_s =
        whole.seconds() / static_cast<double>(state_.step - report_.first_step) * static_cast<double>(run.steps - state_.step);
    hooks_.say(
        fmt::format("step {}/{}  reward {:.3f}  acc {:.3f}  length {:.1f}  entropy {:.3f}  loss {:+.4f}  grad {:.3f}  gap {}  "
                    "rollout {:.0f} tok/s  train {:.0f} tok/s  {:.2f} s, {:.0f} s left",
                    state_.step, run.steps, find_metric(metrics, "rollout/raw_reward"), find_metric(metrics, "rollout/accuracy"),
                    find_metric(metrics, "rollout/response_len/mean"), find_metric(metrics, "rollout/entropy"),
                    find_metric(metrics, "train/loss"), find_metric(metrics, "train/grad_norm"),
                    find_metric(metrics, "gap/logprob_abs_diff_max"), rollout_rate, train_rate, step_s, left_s));

    if (run.eval_every > 0 && state_.step % run.eval_every == 0) LOCKSTEP_RETURN_IF_ERROR(evaluate_now());
    if (run.checkpoint_every > 0 && state_.step % run.checkpoint_every == 0) LOCKSTEP_RETURN_IF_ERROR(save());
  }
  LOCKSTEP_RETURN_IF_ERROR(save());
  hooks_.say(fmt::format("done: {}", policy_->memory_report()));
  return Status::ok();
}

}  // namespace

Result<LoopReport> run_loop(const LoopConfig& config, bool resume, const Hooks& hooks, RankWorld* world) {
  Loop loop(config, hooks, world);
  LOCKSTEP_RETURN_IF_ERROR(loop.open(resume));
  hooks.begin();
  LOCKSTEP_RETURN_IF_ERROR(loop.run());
  return loop.take_report();
}

}  // namespace lockstep
