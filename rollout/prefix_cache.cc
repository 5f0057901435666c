#include "rollout/prefix_cache.h"

#include <algorithm>

#include "core/status.h"

namespace lockstep {

PrefixCache::PrefixCache(Pages& pages, int64_t capacity) : pages_(pages), capacity_(capacity), holders_(static_cast<size_t>(pages.num_pages()), 0) {
  CHECK(capacity >= 0, "a cache of {} entries", capacity);
}

// Whole pages, and one token left to run: the first draw needs its hidden row.
int64_t PrefixCache::most(std::span<const int32_t> prompt) const {
  return prompt.empty() ? 0 : (static_cast<int64_t>(prompt.size()) - 1) / pages_.page_tokens() * pages_.page_tokens();
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> prompt) {
  const size_t limit = static_cast<size_t>(most(prompt));
  auto best = entries_.end();
  for (auto e = entries_.begin(); e != entries_.end(); ++e) {
    if (e->tokens.size() > limit || (best != entries_.end() && e->tokens.size() <= best->tokens.size())) continue;
    if (std::equal(e->tokens.begin(), e->tokens.end(), prompt.begin())) best = e;
  }
  if (best == entries_.end()) return {};
  entries_.splice(entries_.begin(), entries_, best);
  return {.slot = best->slot, .tokens = static_cast<int64_t>(best->tokens.size())};
}

int64_t PrefixCache::common(std::span<const int32_t> prompt) const {
  const int64_t limit = most(prompt);
  int64_t longest = 0;
  for (const Entry& e : entries_) {
    const auto end = prompt.begin() + std::min(limit, static_cast<int64_t>(e.tokens.size()));
    longest = std::max(longest, std::mismatch(prompt.begin(), end, e.tokens.begin()).first - prompt.begin());
  }
  return longest / pages_.page_tokens() * pages_.page_tokens();
}

int32_t PrefixCache::add(std::span<const int32_t> tokens, int32_t from) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  CHECK(count > 0 && count % pages_.page_tokens() == 0, "an entry of {} tokens in pages of {}", count, pages_.page_tokens());
  if (capacity_ == 0) return -1;
  for (const Entry& e : entries_)
    if (std::ranges::equal(e.tokens, tokens)) return -1;
  if (size() == capacity_) drop_oldest();
  const Fork fork = pages_.fork(from, count, count);
  CHECK(fork.slot >= 0, "no slot is left for an entry of the prefix cache; its {} slots are reserved", capacity_);
  entries_.push_front({.tokens = {tokens.begin(), tokens.end()}, .slot = fork.slot});
  return fork.slot;
}

int64_t PrefixCache::freeable() const {
  int64_t count = 0;
  for (const Entry& e : entries_)
    for (const int32_t page : pages_.pages(e.slot)) count += ++holders_[static_cast<size_t>(page)] == pages_.references(page);
  for (const Entry& e : entries_)
    for (const int32_t page : pages_.pages(e.slot)) holders_[static_cast<size_t>(page)] = 0;
  return count;
}

bool PrefixCache::drop_oldest() {
  if (entries_.empty()) return false;
  pages_.close(entries_.back().slot);
  entries_.pop_back();
  return true;
}

void PrefixCache::clear() {
  while (drop_oldest()) {
  }
}

}  // namespace lockstep
