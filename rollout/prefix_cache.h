#pragma once
// Snapshots of prompts' state that later prompts continue from. Bookkeeping alone, like Pages: an entry is a sequence of its own (a slot, and the
// pages shared by reference count), and the caller copies the slots.
//
// An entry covers whole pages, so no page is written after it was shared, and its slot was copied when the prompt had been run exactly so far: a
// prompt that continues from it finds the state it would have made itself. A prompt matches when its tokens are those of the entry, compared one
// by one; the tokens decide, no hash. Entries know no weights: the owner clears the cache before weights of another version are used.
//
// Entries are few (their slots are reserved) and never keep anybody waiting: pages that only entries hold can be had by dropping, least recently
// used first.

#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "rollout/pages.h"

namespace lockstep {

class PrefixCache {
 public:
  // `pages` outlives the cache and has `capacity` slots more than its other users ever take together. 0: off.
  PrefixCache(Pages& pages, int64_t capacity);

  struct Match {
    int32_t slot = -1;   // -1: none
    int64_t tokens = 0;  // that the entry covers
  };
  // The longest entry that `prompt` begins with, leaving at least one token to run; used from now on.
  Match find(std::span<const int32_t> prompt);
  // How far, in whole pages and short of the last token, `prompt` agrees with any entry's tokens: where prompts part. 0: nowhere.
  int64_t common(std::span<const int32_t> prompt) const;
  // A new entry that shares the pages of `from`, which must cover `tokens`, whole pages; the caller copies slot `from` to the slot returned once
  // all of them have been run. -1: there is such an entry already, or the cache is off. A full cache drops its oldest entry.
  int32_t add(std::span<const int32_t> tokens, int32_t from);

  int64_t freeable() const;  // pages that nobody else holds
  bool drop_oldest();        // false: empty
  void clear();
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

 private:
  struct Entry {
    std::vector<int32_t> tokens;
    int32_t slot = -1;
  };
  int64_t most(std::span<const int32_t> prompt) const;

  Pages& pages_;
  const int64_t capacity_;
  std::list<Entry> entries_;             // most recently used first
  mutable std::vector<int32_t> holders_;  // by page; zero between calls
};

}  // namespace lockstep
