#pragma once
// Which rows of which sequences the next forward runs, and which samples draw a token from it. Pure: it knows lengths, not
// tokens, and touches no state; it owns slots and pages through Pages.
//
// A request's prompt is a sequence with a slot of its own. Its samples fork from it in order; the last one to be admitted takes
// the prompt's sequence over instead of copying it. A request whose samples do not all fit therefore keeps its prompt until they
// did: the prompt is never run twice. Requests are admitted one after the other, so at most one prompt waits for its samples, and
// max_running + 1 slots are enough.
//
// Why nothing can wait for ever: an admitted sample holds all it needs. The one prompt that waits holds its own pages and no
// sample waits for them, so at the latest when every admitted sample has finished the next one fits, provided that there is one
// page more than a sequence of the greatest length needs (the copy of the page in which the prompt ends).
//
// Rows: one of every running sample, oldest first, then the prompts' rows, oldest first, as far as max_batch_tokens reaches.

#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/pages.h"

namespace lockstep {

// What the scheduler must know about a request.
struct Work {
  int64_t request = 0;  // the caller's name for it
  int64_t prompt_tokens = 0;
  int64_t max_new_tokens = 0;
  int32_t num_samples = 1;
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
  std::vector<PlannedRows> rows;
  std::vector<PlannedDraw> draws;  // in the order of `rows`; the copies of all of them come before anything drawn is run
  int32_t keep = -1;               // the last row of rows[keep] is needed again by later plans, until the next `keep`
};

class Scheduler {
 public:
  // `pages` outlives the scheduler, has at least max_running + 1 slots and is used by nobody else.
  Scheduler(Pages& pages, int64_t max_running, int64_t max_batch_tokens);

  void submit(const Work& work);
  // Admits what fits and plans one forward, which the caller then runs. Unless idle() there are rows or draws. Valid until the
  // next call.
  const Plan& next();
  // A sample that drew its last token; its slot and pages are free from now on.
  void finish(int32_t slot);
  // Forgets everything and frees all slots and pages.
  void clear();
  bool idle() const { return waiting_.empty() && prompts_.empty() && samples_.empty(); }

 private:
  struct Prompt {
    Work work;
    int32_t slot = -1;
    int64_t done = 0;      // rows already run
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
  bool admit_sample(Prompt& prompt);

  Pages& pages_;
  const int64_t max_running_, max_batch_tokens_;
  std::deque<Work> waiting_;
  std::vector<Prompt> prompts_;  // oldest first; only the last one may be incomplete
  std::vector<Sample> samples_;  // oldest first; those that have started come first
  Plan plan_;
};

}  // namespace lockstep
