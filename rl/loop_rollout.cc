#include <set>

#include "core/log.h"
#include "rl/loop_steps.h"
#include "rl/sampling.h"

namespace lockstep {

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
  std::sort(all.begin(), all.end(), by_prompt_and_sample);

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
             std::move_iterator(drawn.value().end()), all.begin(), by_prompt_and_sample);
  return all;
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

}  // namespace lockstep
