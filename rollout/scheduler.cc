#include "rollout/scheduler.h"

#include <algorithm>

#include "core/status.h"

namespace lockstep {

Scheduler::Scheduler(Pages& pages, int64_t max_running, int64_t max_batch_tokens, int64_t cache_slots)
    : pages_(pages), cache_(pages, cache_slots), max_running_(max_running), max_batch_tokens_(max_batch_tokens) {
  CHECK(max_running >= 1 && max_batch_tokens >= 1, "{} running samples, {} rows a forward", max_running, max_batch_tokens);
  CHECK(pages.num_slots() > max_running + cache_slots, "{} running samples and {} cached prefixes need {} slots, there are {}", max_running, cache_slots,
        max_running + 1 + cache_slots, pages.num_slots());
  const size_t sequences = static_cast<size_t>(max_running + 1);
  prompts_.reserve(sequences);
  samples_.reserve(sequences);
  plan_.rows.reserve(sequences);
  plan_.draws.reserve(sequences);
  plan_.restores.reserve(sequences);
  plan_.saves.reserve(sequences);
}

void Scheduler::submit(const Work& work) {
  const int64_t most = (work.prompt_tokens + work.max_new_tokens + pages_.page_tokens() - 1) / pages_.page_tokens() + 1;
  CHECK(work.prompt_tokens >= 1 && work.max_new_tokens >= 1 && work.num_samples >= 1,
        "request {}: {} prompt tokens, {} new tokens, {} samples", work.request, work.prompt_tokens, work.max_new_tokens,
        work.num_samples);
  CHECK(most <= pages_.num_pages(), "request {} of {} + {} tokens may need {} pages of {}, there are {}", work.request,
        work.prompt_tokens, work.max_new_tokens, most, pages_.page_tokens(), pages_.num_pages());
  const auto place = std::upper_bound(waiting_.begin(), waiting_.end(), work, [](const Work& a, const Work& b) { return a.expected_tokens > b.expected_tokens; });
  waiting_.insert(place, work);
}

// Drops snapshots until `pages` pages are free; if that cannot be, none.
bool Scheduler::make_room(int64_t pages) {
  if (pages_.free_pages() >= pages) return true;
  if (pages_.free_pages() + cache_.freeable() < pages) return false;
  while (pages_.free_pages() < pages) CHECK(cache_.drop_oldest(), "{} pages free of {}, the prefix cache is empty", pages_.free_pages(), pages);
  return true;
}

bool Scheduler::open_prompt(const Work& work) {
  const PrefixCache::Match match = cache_.find(work.prompt);
  // Holding the snapshot's pages first: it may be dropped to make room for the rest.
  const int32_t slot = match.slot >= 0 ? pages_.fork(match.slot, match.tokens, match.tokens).slot : pages_.open(0);
  if (slot < 0) return false;
  if (!make_room(pages_.pages_for(work.prompt_tokens) - match.tokens / pages_.page_tokens())) {
    pages_.close(slot);
    return false;
  }
  CHECK(pages_.extend(slot, work.prompt_tokens), "{} pages free for {} positions", pages_.free_pages(), work.prompt_tokens);
  if (match.slot >= 0) plan_.restores.push_back({.from = match.slot, .to = slot});
  cached_tokens_ += match.tokens;
  prompts_.push_back({.work = work, .slot = slot, .done = match.tokens, .parts = cache_.common(work.prompt)});
  return true;
}

int64_t Scheduler::last_page(const Prompt& p) const {
  return p.work.prompt.empty() ? 0 : (p.work.prompt_tokens - 1) / pages_.page_tokens() * pages_.page_tokens();
}

// Where the next chunk must end at the latest.
int64_t Scheduler::chunk_end(const Prompt& p) const {
  if (p.done < p.parts) return p.parts;
  return p.done < last_page(p) ? last_page(p) : p.work.prompt_tokens;
}

bool Scheduler::admit_sample(Prompt& prompt) {
  if (static_cast<int64_t>(samples_.size()) == max_running_) return false;
  const Work& work = prompt.work;
  const int64_t positions = work.prompt_tokens + work.max_new_tokens;
  const bool last = prompt.admitted + 1 == work.num_samples;
  const int64_t held = last ? static_cast<int64_t>(pages_.pages(prompt.slot).size()) : work.prompt_tokens / pages_.page_tokens();
  if (!make_room(pages_.pages_for(positions) - held)) return false;
  Sample s{.request = work.request, .sample = prompt.admitted, .position = work.prompt_tokens, .page = {}};
  if (last) {
    if (!pages_.extend(prompt.slot, positions)) return false;
    s.slot = prompt.slot;
  } else {
    const Fork fork = pages_.fork(prompt.slot, work.prompt_tokens, positions);
    if (fork.slot < 0) return false;
    s.slot = fork.slot;
    s.copy_from = prompt.slot;
    s.page = fork.page;
  }
  samples_.push_back(s);
  ++prompt.admitted;
  return true;
}

void Scheduler::admit() {
  for (;;) {
    if (prompts_.empty() || prompts_.back().complete()) {
      if (waiting_.empty()) return;
      if (!open_prompt(waiting_.front())) return;
      waiting_.pop_front();
    }
    while (!prompts_.back().complete())
      if (!admit_sample(prompts_.back())) return;
  }
}

const Plan& Scheduler::next() {
  plan_.restores.clear();
  plan_.saves.clear();
  admit();
  plan_.rows.clear();
  plan_.draws.clear();
  plan_.keep = -1;
  int64_t left = max_batch_tokens_;

  // Rows of running samples, then of prompts. When the budget is smaller than the number of running samples the oldest go first.
  for (Sample& s : samples_) {
    if (left == 0) break;
    if (!s.started) continue;
    const int32_t rows = static_cast<int32_t>(plan_.rows.size());
    plan_.rows.push_back({.request = s.request, .slot = s.slot, .prompt = false, .first_position = s.position, .count = 1});
    plan_.draws.push_back(
        {.request = s.request, .sample = s.sample, .slot = s.slot, .rows = rows, .first = false, .copy_from = -1, .page = {}});
    ++s.position;
    --left;
  }
  for (Prompt& p : prompts_) {
    p.rows = -1;
    const int64_t count = std::min(left, chunk_end(p) - p.done);
    if (count == 0) continue;
    p.rows = static_cast<int32_t>(plan_.rows.size());
    plan_.rows.push_back({.request = p.work.request, .slot = p.slot, .prompt = true, .first_position = p.done, .count = count});
    p.done += count;
    left -= count;
    if (p.done == p.parts || (p.done == last_page(p) && p.done > 0)) {
      const int32_t to = cache_.add(p.work.prompt.first(static_cast<size_t>(p.done)), p.slot);
      if (to >= 0) plan_.saves.push_back({.from = p.slot, .to = to});
    }
  }

  // First draws. Samples and prompts are in the same order. A prompt whose chunk ended at a snapshot lets later ones pass.
  auto prompt = prompts_.begin();
  for (Sample& s : samples_) {
    if (s.started) continue;
    while (prompt->work.request != s.request) ++prompt;
    if (!prompt->ran()) continue;
    plan_.draws.push_back({.request = s.request, .sample = s.sample, .slot = s.slot, .rows = prompt->rows, .first = true,
                           .copy_from = s.copy_from, .page = s.page});
    s.started = true;
  }
  if (!prompts_.empty() && prompts_.back().ran() && !prompts_.back().complete()) plan_.keep = prompts_.back().rows;
  std::erase_if(prompts_, [](const Prompt& p) { return p.ran() && p.complete(); });
  return plan_;
}

void Scheduler::finish(int32_t slot) {
  const auto s = std::find_if(samples_.begin(), samples_.end(), [&](const Sample& x) { return x.slot == slot; });
  CHECK(s != samples_.end() && s->started, "slot {} belongs to no running sample", slot);
  samples_.erase(s);
  pages_.close(slot);
}

void Scheduler::abort(int64_t request) {
  std::erase_if(waiting_, [&](const Work& w) { return w.request == request; });
  // A prompt that is complete is held by its last sample.
  std::erase_if(prompts_, [&](const Prompt& p) {
    if (p.work.request == request && !p.complete()) pages_.close(p.slot);
    return p.work.request == request;
  });
  std::erase_if(samples_, [&](const Sample& s) {
    if (s.request == request) pages_.close(s.slot);
    return s.request == request;
  });
}

void Scheduler::clear() {
  // A prompt that is complete is held by its last sample.
  for (const Sample& s : samples_) pages_.close(s.slot);
  for (const Prompt& p : prompts_)
    if (!p.complete()) pages_.close(p.slot);
  waiting_.clear();
  prompts_.clear();
  samples_.clear();
}

}  // namespace lockstep
