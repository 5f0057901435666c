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

#include <cerrno>
#include <filesystem>

#include "core/log.h"
#include "io/file.h"
#include "rl/loop_steps.h"

namespace lockstep {

namespace {

constexpr const char* kInFlightFile = "in_flight.jsonl";  // of a checkpoint
constexpr const char* kLongTailFile = "long_tail.jsonl";  // likewise

}  // namespace

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
  if (config_.model.device == Device::gpu) {
    LOCKSTEP_RETURN_IF_ERROR(peers_.world()->use_devices(config_.parallel.transport));
    hooks_.say(fmt::format("between GPUs: {}", peers_.world()->device_way()));
  }
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
  use.engine.graphs = c.rollout.graphs;
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
  if (!prompts) return errorf("task.train_file: {}", prompts.message());
  const std::string rows = fingerprint(prompts.value());
  task_ = std::make_unique<Task>(prompts.take(), static_cast<uint64_t>(c.run.seed));
  hooks_.say(fmt::format("{}: {}", c.task.train_file, counts.str()));
  if (evaluates) {
    Result<std::vector<Prompt>> problems = load_prompts(c.task.eval_file, policy_->tokenizer(), c.task, &counts);
    if (!problems) return errorf("task.eval_file: {}", problems.message());
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
  Context host = policy_->context().on_host();
  peers_.group()->all_gather(host, TensorView(all.data(), DType::f32, {peers_.size()}),
                             TensorView(&mine, DType::f32, {1}), "waits");
  return all;
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

Result<LoopReport> run_loop(const LoopConfig& config, bool resume, const Hooks& hooks, RankWorld* world) {
  Loop loop(config, hooks, world);
  LOCKSTEP_RETURN_IF_ERROR(loop.open(resume));
  hooks.begin();
  LOCKSTEP_RETURN_IF_ERROR(loop.run());
  return loop.take_report();
}

}  // namespace lockstep
