#include "serve/generator.h"

#include <algorithm>
#include <future>
#include <utility>

namespace lockstep {

Job::Job(std::vector<Request> requests, JobOptions options, const Tokenizer& tokenizer) : requests_(std::move(requests)), options_(std::move(options)) {
  size_t samples = 0;
  for (const Request& r : requests_) samples += static_cast<size_t>(r.num_samples);
  samples_.resize(samples);
  unfinished_ = samples;
  texts_.reserve(samples);
  for (size_t i = 0; i < samples; ++i) texts_.emplace_back(tokenizer, options_.stops, options_.special);
}

uint64_t Job::wait(uint64_t seen, Clock::time_point limit, Clock::time_point quiet_until) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return unfinished_ == 0 && events_ != seen; };
  const auto changed = [&] { return events_ != seen; };
  if (!changed_.wait_until(lock, std::min(limit, quiet_until), ended) && quiet_until < limit) {
    awaited_ = true;
    changed_.wait_until(lock, limit, changed);
    awaited_ = false;
  }
  return events_;
}

bool Job::ended() const {
  const std::lock_guard lock(mutex_);
  return unfinished_ == 0;
}

void Job::look(const std::function<void(size_t, const Sample&)>& f) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < samples_.size(); ++i) f(i, samples_[i]);
}

Generator::Generator(Policy& policy, int64_t max_samples, std::string weight_version)
    : policy_(policy), max_samples_(max_samples), weight_version_(std::move(weight_version)) {
  CHECK(max_samples >= 1, "{} samples at most", max_samples);
  published_.load = policy.engine().load();
  thread_ = std::thread([this] { run(); });
}

Generator::~Generator() {
  {
    const std::lock_guard lock(mutex_);
    quit_ = true;
  }
  work_.notify_all();
  thread_.join();
}

Generator::Submitted Generator::submit(std::vector<Request> requests, JobOptions options) { return add(std::move(requests), std::move(options), false); }

Generator::Submitted Generator::add(std::vector<Request> requests, JobOptions options, bool urgent) {
  int64_t samples = 0;
  for (const Request& r : requests) {
    if (const Status s = policy_.engine().check(r); !s) return {.job = nullptr, .refusal = Refusal::bad, .message = s.message()};
    samples += r.num_samples;
  }
  const auto refuse = [&](Refusal why, std::string message) {
    ++published_.refused;
    return Submitted{.job = nullptr, .refusal = why, .message = std::move(message)};
  };
  Submitted out;
  {
    const std::lock_guard lock(mutex_);
    if (draining_ || quit_) return refuse(Refusal::draining, "the server is shutting down");
    if (!urgent && samples > max_samples_)
      return Submitted{.job = nullptr, .refusal = Refusal::bad, .message = fmt::format("{} samples in one request, at most {} are taken", samples, max_samples_)};
    if (!urgent && unfinished_ + samples > max_samples_)
      return refuse(Refusal::busy, fmt::format("{} samples are unfinished and {} more would exceed the limit of {}; try again later", unfinished_, samples, max_samples_));
    unfinished_ += samples;
    ++published_.jobs;
    out.job = std::shared_ptr<Job>(new Job(std::move(requests), std::move(options), policy_.tokenizer()));
    arrived_.push_back(out.job);
  }
  work_.notify_all();
  return out;
}

void Generator::on_engine(std::function<void()> command) {
  std::promise<void> done;
  {
    const std::lock_guard lock(mutex_);
    CHECK(!quit_, "a command for an engine that stopped");
    commands_.push_back([&] {
      command();
      publish();  // before the caller asks
      done.set_value();
    });
  }
  work_.notify_all();
  done.get_future().wait();
}

void Generator::cancel(const std::shared_ptr<Job>& job) {
  if (!job->ended()) on_engine([&] { abort_job(job.get()); });
}

void Generator::abort(const std::string& name) {
  on_engine([&] {
    std::vector<std::shared_ptr<Job>> named;
    for (const auto& [tag, place] : places_)
      if (place.job->options().name == name) named.push_back(place.job);
    {
      const std::lock_guard lock(mutex_);
      for (const auto& job : arrived_)
        if (job->options().name == name) named.push_back(job);
    }
    for (const auto& job : named) abort_job(job.get());
  });
}

void Generator::abort_all() {
  on_engine([&] { abort_job(nullptr); });
}

void Generator::flush_cache() {
  on_engine([&] { policy_.engine().flush_cache(); });
}

void Generator::pause(Quiesce how) {
  on_engine([&] {
    paused_ = true;
    if (how == Quiesce::abort) abort_job(nullptr);
    if (how == Quiesce::retract) policy_.engine().retract_all();
  });
}

void Generator::resume() {
  on_engine([&] { paused_ = false; });
}

void Generator::look_at_weights(const std::function<void(const Weights&, Device)>& f) {
  const std::shared_lock kept(weights_);
  f(policy_.weights(), policy_.context().device);
}

Status Generator::update(const std::string& checkpoint, Quiesce how, const std::string& label) {
  std::unique_lock one(updating_, std::try_to_lock);
  if (!one) return Status::error("another update is under way");
  const std::unique_lock replaced(weights_);
  Update update{.how = how, .label = label, .done = false, .status = policy_.load_beside(checkpoint)};
  if (update.status) {
    on_engine([&] {
      if (how == Quiesce::wait && paused_ && policy_.engine().load().running > 0) {
        update.status = Status::error("generation is paused with samples that keep their state; continue it, or update with another policy: abort or retract");
        return;
      }
      if (how == Quiesce::abort) abort_job(nullptr);
      if (how == Quiesce::retract) policy_.engine().retract_all();
      update_ = &update;
      try_swap();
    });
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return update.done || !update.status; });
  }
  const std::lock_guard lock(mutex_);
  ++(update.status ? published_.updates : published_.failed_updates);
  return update.status;
}

void Generator::try_swap() {
  if (update_ == nullptr) return;
  const Engine& engine = policy_.engine();
  if (engine.load().running > 0 || (update_->how == Quiesce::wait && !paused_ && !engine.idle())) return;
  policy_.adopt();
  policy_.engine().flush_cache();
  {
    const std::lock_guard lock(mutex_);
    weight_version_ = update_->label.empty() ? std::to_string(policy_.weights().version()) : update_->label;
    update_->done = true;
  }
  update_ = nullptr;
  idle_.notify_all();
}

Status Generator::health(std::chrono::milliseconds deadline) {
  int64_t before = 0;
  {
    const std::lock_guard lock(mutex_);
    if (published_.paused) return Status::error("generation is paused");
    before = published_.engine.decode_tokens;
  }
  Request r;
  r.prompt = {std::max(0, policy_.tokenizer().bos_id())};
  r.sampling.temperature = 0;
  r.sampling.max_new_tokens = 1;
  Submitted s = add({r}, {}, true);
  if (s.job == nullptr) return Status::error(s.message);
  const auto until = std::chrono::steady_clock::now() + deadline;
  while (std::chrono::steady_clock::now() < until) {
    s.job->wait(1, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
    const bool ended = s.job->ended();
    const std::lock_guard lock(mutex_);
    if (ended || published_.engine.decode_tokens > before) break;
  }
  const bool ended = s.job->ended();
  bool drawn = false;
  s.job->look([&](size_t, const Job::Sample& sample) { drawn = !sample.log.tokens.empty(); });
  {
    const std::lock_guard lock(mutex_);
    drawn = drawn || published_.engine.decode_tokens > before;
    // Not cancel(): a step that does not return would keep this thread too.
    if (!ended && !quit_) commands_.push_back([this, job = s.job] { abort_job(job.get()); });
  }
  if (drawn) return Status::ok();
  return errorf("no token was drawn within {} ms", deadline.count());
}

bool Generator::drain(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  return idle_.wait_for(lock, limit, [&] { return unfinished_ == 0; });
}

GeneratorStats Generator::stats() const {
  const std::lock_guard lock(mutex_);
  GeneratorStats s = published_;
  s.unfinished = unfinished_;
  s.weight_version = weight_version_;
  return s;
}

std::string Generator::weight_version() const {
  const std::lock_guard lock(mutex_);
  return weight_version_;
}

void Generator::admit() {
  if (update_ != nullptr) return;
  std::deque<std::shared_ptr<Job>> jobs;
  {
    const std::lock_guard lock(mutex_);
    jobs.swap(arrived_);
  }
  for (const std::shared_ptr<Job>& job : jobs) {
    size_t first = 0;
    for (const Request& asked : job->requests()) {
      Request r = asked;
      r.tag = next_tag_++;
      places_[r.tag] = {.job = job, .first = first, .first_sample = r.first_sample};
      first += static_cast<size_t>(r.num_samples);
      const Status s = policy_.engine().submit(std::move(r));
      CHECK(s.is_ok(), "{}", s.message());  // add() asked
    }
  }
}

void Generator::end(const Completion& c) {
  const auto place = places_.find(c.tag);
  CHECK(place != places_.end(), "a completion of an unknown request {}", c.tag);
  Job& job = *place->second.job;
  const size_t i = place->second.first + static_cast<size_t>(c.sample_idx - place->second.first_sample);
  StopText& text = job.texts_[i];
  const std::string rest = text.finish();
  FinishReason reason = c.reason;
  bool last = false, awaited = false;
  {
    const std::lock_guard lock(job.mutex_);
    Job::Sample& s = job.samples_[i];
    s.text += rest;
    if (text.matched() != nullptr) {
      s.matched = *text.matched();
      reason = FinishReason::stop;
    }
    s.reason = reason;
    s.ended = true;
    ++job.events_;
    last = --job.unfinished_ == 0;
    awaited = std::exchange(job.awaited_, false);
  }
  if (last || awaited) job.changed_.notify_all();
  {
    const std::lock_guard lock(mutex_);
    ++(reason == FinishReason::stop ? published_.stopped : reason == FinishReason::length ? published_.truncated : published_.aborted);
    if (--unfinished_ == 0) idle_.notify_all();
  }
  // The request's last sample: its place is done with.
  bool left = false;
  const size_t first = place->second.first;
  const size_t count = static_cast<size_t>(
      std::find_if(job.requests_.begin(), job.requests_.end(), [&, at = size_t{0}](const Request& r) mutable {
        const bool here = at == first;
        at += static_cast<size_t>(r.num_samples);
        return here;
      })->num_samples);
  {
    const std::lock_guard lock(job.mutex_);
    for (size_t s = first; s < first + count; ++s) left = left || !job.samples_[s].ended;
  }
  if (!left) places_.erase(place);
}

void Generator::deliver() {
  Engine& engine = policy_.engine();
  std::vector<std::pair<uint64_t, int32_t>> stopped;
  std::vector<Job*> awaited;  // woken once, when all that they hear of is there
  for (const Drawn& d : engine.drawn()) {
    const auto found = places_.find(d.tag);
    CHECK(found != places_.end(), "a token of an unknown request {}", d.tag);
    const Place& place = found->second;
    Job& job = *place.job;
    const size_t i = place.first + static_cast<size_t>(d.sample_idx - place.first_sample);
    const std::vector<int32_t>& stop_ids = job.requests_[0].sampling.stop_ids;
    std::string text;
    if (std::find(stop_ids.begin(), stop_ids.end(), d.token) == stop_ids.end()) text = job.texts_[i].push(d.token);
    {
      const std::lock_guard lock(job.mutex_);
      Job::Sample& s = job.samples_[i];
      s.log.tokens.push_back(d.token);
      s.log.logprobs.push_back(d.logprob);
      s.log.versions.push_back(d.version);
      s.text += text;
      ++job.events_;
      if (std::exchange(job.awaited_, false)) awaited.push_back(&job);
    }
    if (job.texts_[i].matched() != nullptr) stopped.emplace_back(d.tag, d.sample_idx);
  }
  for (Job* job : awaited) job->changed_.notify_all();
  for (const auto& [tag, sample] : stopped) engine.stop(tag, sample);
  for (const Completion& c : engine.take_finished()) end(c);
}

void Generator::abort_job(const Job* job) {
  std::vector<uint64_t> tags;
  for (const auto& [tag, place] : places_)
    if (job == nullptr || place.job.get() == job) tags.push_back(tag);
  for (const uint64_t tag : tags) policy_.engine().abort(tag);
  for (const Completion& c : policy_.engine().take_finished()) end(c);
  // Those that the engine has not seen yet.
  std::vector<std::shared_ptr<Job>> unseen;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(arrived_, [&](const std::shared_ptr<Job>& j) {
      if (job != nullptr && j.get() != job) return false;
      unseen.push_back(j);
      return true;
    });
  }
  for (const std::shared_ptr<Job>& j : unseen) {
    {
      const std::lock_guard lock(j->mutex_);
      for (Job::Sample& s : j->samples_) {
        s.reason = FinishReason::abort;
        s.ended = true;
      }
      j->unfinished_ = 0;
      ++j->events_;
    }
    j->changed_.notify_all();
    const std::lock_guard lock(mutex_);
    published_.aborted += static_cast<int64_t>(j->samples_.size());
    if ((unfinished_ -= static_cast<int64_t>(j->samples_.size())) == 0) idle_.notify_all();
  }
}

void Generator::publish() {
  const std::lock_guard lock(mutex_);
  published_.engine = policy_.engine().stats();
  published_.load = policy_.engine().load();
  published_.paused = paused_;
}

void Generator::run() {
  Engine& engine = policy_.engine();
  for (;;) {
    std::deque<std::function<void()>> commands;
    publish();
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return quit_ || !commands_.empty() || (!paused_ && (!engine.idle() || (!arrived_.empty() && update_ == nullptr))); });
      commands.swap(commands_);
      if (quit_ && commands.empty()) break;
    }
    for (const auto& command : commands) command();
    if (paused_) {
      try_swap();
      continue;
    }
    admit();
    if (engine.step()) deliver();
    try_swap();
  }
  abort_job(nullptr);
  idle_.notify_all();
}

}  // namespace lockstep
