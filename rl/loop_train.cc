#include <bit>
#include <set>

#include "core/log.h"
#include "rl/advantage.h"
#include "rl/diagnose.h"
#include "rl/loop_steps.h"

namespace lockstep {

namespace {

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

}  // namespace

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

}  // namespace lockstep
