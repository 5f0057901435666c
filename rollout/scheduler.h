#pragma once
// Which rows of which sequences the next forward runs, and which samples draw a token from it. Pure: it touches no state and knows
// lengths, not tokens, which the prefix cache alone compares; it owns slots and pages through Pages.
//
// A request's prompt is a sequence with a slot of its own. Its samples fork from it in order; the last one to be admitted takes
// the prompt's sequence over instead of copying it. A request whose samples do not all fit therefore keeps its prompt until they
// did: the prompt is never run twice. Requests are admitted one after the other, so at most one prompt waits for its samples, and
// max_running + 1 slots are enough.
//
// Why nothing can wait for ever: an admitted sample holds all it needs. The one prompt that waits holds its own pages and no
// sample waits for them, so at the latest when every admitted sample has finished the next one fits, provided that there is one
// page more than a sequence of the greatest length needs (the copy of the page in which the prompt ends). What the prefix cache
// holds is dropped before anybody waits for it. For the same reason nothing is ever preempted for memory.
//
// Cached prefixes. A prompt continues from the longest snapshot that it begins with. Snapshots are taken of its last whole page, and of
// the page where it parts from an earlier prompt, so that the third prompt with a common beginning runs only what is its own. Its
// chunks end at these places. Prompts that are in work at the same time share nothing.
//
// Rows: one of every running sample, oldest first, then the prompts' rows, oldest first, as far as max_batch_tokens reaches.

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "rollout/pages.h"
#include "rollout/prefix_cache.h"

namespace lockstep {

// What the scheduler must know about a request.
struct Work {
  int64_t request = 0;  // the caller's name for it
  int64_t prompt_tokens = 0;
  int64_t max_new_tokens = 0;
  int32_t num_samples = 1;
  int64_t expected_tokens = 0;  // the order of admission, see submit()
  std::span<const int32_t> prompt = {};  // its tokens, valid until it has run; empty: neither looked up in the prefix cache nor kept there
};

struct SlotCopy {
  int32_t from = -1, to = -1;
};

struct PlannedRows {
  int64_t request = 0;
  int32_t slot = -1;
  bool prompt = false;  // rows of the prompt; else one row, the sample's last token
  int64_t first_position = 0;
  int64_t count = 0;
};

struct PlannedDraw {
  int64_t request = 0;
  int32_t sample = 0;  // 0 .. num_samples - 1
  int32_t slot = -1;
  int32_t rows = -1;       // drawn from the last row of Plan::rows[rows]; -1: of the kept prompt, which ran earlier
  bool first = false;      // the sample's first token
  int32_t copy_from = -1;  // after this forward `slot` becomes a copy of this slot and page.to of page.from; -1: nothing to copy
  PageCopy page;
};

struct Plan {
  std::vector<SlotCopy> restores;  // in this order, before the forward
  std::vector<SlotCopy> saves;     // after the forward, before the copies of `draws`
  std::vector<PlannedRows> rows;
  std::vector<PlannedDraw> draws;  // in the order of `rows`; the copies of all of them come before anything drawn is run
  int32_t keep = -1;               // the last row of rows[keep] is needed again by later plans, until the next `keep`
};

class Scheduler {
 public:
  // `pages` outlives the scheduler, has at least max_running + 1 + cache_slots slots and is used by nobody else.
  Scheduler(Pages& pages, int64_t max_running, int64_t max_batch_tokens, int64_t cache_slots = 0);

  // Waits behind all work that is expected to be as long or longer: what takes longest begins first, so that the others fill the slots beside it, and
  // no slot stands empty while one long sample that began last goes on alone. With equal expectations, such as none: first in, first out.
  void submit(const Work& work);
  // Admits what fits and plans one forward, which the caller then runs. Unless idle() there are rows or draws. Valid until the
  // next call.
  const Plan& next();
  // A sample that drew its last token; its slot and pages are free from now on.
  void finish(int32_t slot);
  // A request with all its samples, those that finished excepted: what they hold is free from now on. Not between next() and the forward.
  void abort(int64_t request);
  // Forgets every request and frees what they hold.
  void clear();
  void forget_prefixes() { cache_.clear(); }
  bool idle() const { return waiting_.empty() && holds_nothing(); }
  bool holds_nothing() const { return prompts_.empty() && samples_.empty(); }  // no request has any state
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_admitted() const { return static_cast<int64_t>(samples_.size()) + (!prompts_.empty() && !prompts_.back().complete()); }
  int64_t cached_tokens() const { return cached_tokens_; }                     // prompt tokens that snapshots saved, so far
  int64_t cached_prefixes() const { return cache_.size(); }

 private:
  struct Prompt {
    Work work;
    int32_t slot = -1;
    int64_t done = 0;      // rows already run, or found in the cache
    int64_t parts = 0;     // where a snapshot is to be taken when it ends a chunk, besides the last whole page; 0: nowhere
    int32_t admitted = 0;  // samples
    int32_t rows = -1;     // index of its rows in the plan that is being made
    bool ran() const { return done == work.prompt_tokens; }
    bool complete() const { return admitted == work.num_samples; }
  };
  struct Sample {
    int64_t request = 0;
    int32_t sample = 0;
    int32_t slot = -1;
    bool started = false;  // has drawn its first token
    int64_t position = 0;  // of the next row to run
    int32_t copy_from = -1;
    PageCopy page;
  };
  void admit();
  bool open_prompt(const Work& work);
  bool admit_sample(Prompt& prompt);
  bool make_room(int64_t pages);
  int64_t last_page(const Prompt& prompt) const;
  int64_t chunk_end(const Prompt& prompt) const;

  Pages& pages_;
  PrefixCache cache_;
  int64_t cached_tokens_ = 0;
  const int64_t max_running_, max_batch_tokens_;
  std::deque<Work> waiting_;
  std::vector<Prompt> prompts_;  // oldest first; only the last one may be incomplete
  std::vector<Sample> samples_;  // oldest first
  Plan plan_;
};

}  // namespace lockstep
