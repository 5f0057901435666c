// The scheduler against a simulated model: every row that is run must find in its slot and pages exactly the rows before it,
// whatever the workload. And: budgets hold, order is kept, all finishes, nothing leaks.

#include "rollout/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace lockstep {
namespace {

// Who wrote a position: the prompt (sample -1) or a sample of a request.
struct Written {
  int64_t request = -1;
  int32_t sample = -1;
  int64_t position = -1;
  bool operator==(const Written&) const = default;
};

// State as the model keeps it: a slot knows its last row (constant size), pages know every position.
struct FakeState {
  FakeState(const Pages& p)
      : pages(p), slots(static_cast<size_t>(p.num_slots())), store(static_cast<size_t>(p.num_pages() * p.page_tokens())) {}
  Written& at(int32_t slot, int64_t position) {
    const int32_t page = pages.pages(slot)[static_cast<size_t>(position / pages.page_tokens())];
    return store[static_cast<size_t>(page * pages.page_tokens() + position % pages.page_tokens())];
  }
  void copy_page(const PageCopy& copy) {
    const int64_t n = pages.page_tokens();
    std::copy_n(store.begin() + copy.from * n, n, store.begin() + copy.to * n);
  }
  const Pages& pages;
  std::vector<Written> slots, store;
};

struct Driver {
  Driver(int64_t max_running, int64_t max_batch_tokens, int64_t num_pages, int64_t page_tokens, int64_t max_positions)
      : max_running(max_running),
        max_batch_tokens(max_batch_tokens),
        pages(max_running + 1, num_pages, page_tokens, max_positions),
        state(pages),
        scheduler(pages, max_running, max_batch_tokens) {}

  void submit(int64_t prompt_tokens, int64_t max_new_tokens, int32_t num_samples) {
    const Work w{
        .request = next_request++, .prompt_tokens = prompt_tokens, .max_new_tokens = max_new_tokens, .num_samples = num_samples};
    work.push_back(w);
    scheduler.submit(w);
    for (int32_t s = 0; s < num_samples; ++s) waiting.emplace_back(w.request, s);
  }

  // One step; `length` says how many tokens a sample will draw in all.
  template <typename F>
  void step(F length) {
    ASSERT_FALSE(scheduler.idle());
    const Plan& plan = scheduler.next();
    ASSERT_FALSE(plan.rows.empty() && plan.draws.empty()) << "no progress";
    run_rows(plan);
    if (::testing::Test::HasFatalFailure()) return;

    // Copies first, then draws.
    for (const PlannedDraw& d : plan.draws) {
      const Work& w = work[static_cast<size_t>(d.request)];
      if (!d.first) continue;
      ASSERT_EQ(std::make_pair(d.request, d.sample), waiting[started]) << "samples start in the order they were asked for";
      ++started;
      if (d.copy_from >= 0) {
        ASSERT_NE(d.copy_from, d.slot);
        state.slots[static_cast<size_t>(d.slot)] = state.slots[static_cast<size_t>(d.copy_from)];
        if (d.page.to >= 0) state.copy_page(d.page);
        ++copies;
      }
      ASSERT_EQ(d.copy_from < 0, d.sample + 1 == w.num_samples) << "the last sample alone takes the prompt over";
      live[d.slot] = {d.request, d.sample, 0};
    }
    ASSERT_LE(static_cast<int64_t>(live.size()), max_running);
    std::vector<int32_t> ended;
    std::set<int32_t> drawn;
    for (const PlannedDraw& d : plan.draws) {
      ASSERT_TRUE(drawn.insert(d.slot).second) << "one draw a sample";
      auto& [request, sample, count] = live.at(d.slot);
      ASSERT_EQ(std::make_pair(request, sample), std::make_pair(d.request, d.sample));
      if (d.rows >= 0) {
        const PlannedRows& r = plan.rows[static_cast<size_t>(d.rows)];
        ASSERT_EQ(r.request, d.request);
        ASSERT_EQ(r.first_position + r.count, work[static_cast<size_t>(d.request)].prompt_tokens + count);
        ASSERT_EQ(r.prompt, d.first);
        if (!r.prompt) {
          ASSERT_EQ(r.slot, d.slot);
        }
      } else {
        ASSERT_TRUE(d.first);
        ASSERT_EQ(kept_request, d.request) << "drawn from a prompt whose last row was not kept";
      }
      if (++count == length(request, sample)) ended.push_back(d.slot);
    }
    if (plan.keep >= 0) {
      const PlannedRows& r = plan.rows[static_cast<size_t>(plan.keep)];
      ASSERT_TRUE(r.prompt);
      ASSERT_EQ(r.first_position + r.count, work[static_cast<size_t>(r.request)].prompt_tokens);
      kept_request = r.request;
    }
    for (int32_t slot : ended) {
      scheduler.finish(slot);
      live.erase(slot);
      ++finished;
    }
    ++steps;
  }

  void run_rows(const Plan& plan) {
    int64_t rows = 0;
    std::set<int32_t> seen;
    bool prompts = false;
    std::pair<int64_t, int32_t> last_decoded{-1, 0};
    int64_t last_prompt = -1;
    for (const PlannedRows& r : plan.rows) {
      ASSERT_TRUE(seen.insert(r.slot).second) << "a sequence twice in one forward";
      ASSERT_GE(r.count, 1);
      rows += r.count;
      const Work& w = work[static_cast<size_t>(r.request)];
      int32_t sample = -1;
      if (r.prompt) {
        prompts = true;
        ASSERT_GT(r.request, last_prompt) << "prompts are run in order";
        last_prompt = r.request;
        ASSERT_LE(r.first_position + r.count, w.prompt_tokens);
        prompt_rows += r.count;
      } else {
        ASSERT_FALSE(prompts) << "rows of running samples come first";
        ASSERT_EQ(r.count, 1);
        const auto& [request, s, count] = live.at(r.slot);
        ASSERT_EQ(request, r.request);
        sample = s;
        ASSERT_EQ(r.first_position, w.prompt_tokens + count - 1);
        ASSERT_GT(std::make_pair(request, s), last_decoded);
        last_decoded = {request, s};
      }
      // What the row reads.
      const auto writer = [&](int64_t p) { return Written{r.request, p < w.prompt_tokens ? -1 : sample, p}; };
      if (r.first_position > 0) {
        ASSERT_EQ(state.slots[static_cast<size_t>(r.slot)], writer(r.first_position - 1));
      }
      for (int64_t p = 0; p < r.first_position; ++p)
        ASSERT_EQ(state.at(r.slot, p), writer(p)) << "position " << p << " of slot " << r.slot;
      // What it writes; a page that another sequence reads has no writer.
      for (int64_t p = r.first_position; p < r.first_position + r.count; ++p) {
        if (!r.prompt) {
          ASSERT_EQ(pages.references(pages.pages(r.slot)[static_cast<size_t>(p / pages.page_tokens())]), 1);
        }
        state.at(r.slot, p) = writer(p);
      }
      state.slots[static_cast<size_t>(r.slot)] = writer(r.first_position + r.count - 1);
    }
    ASSERT_LE(rows, max_batch_tokens);
    // The budget is used up before any started sample is left out.
    if (rows < max_batch_tokens) {
      const auto decoded = std::count_if(plan.rows.begin(), plan.rows.end(), [](const PlannedRows& r) { return !r.prompt; });
      ASSERT_EQ(decoded, static_cast<int64_t>(live.size()));
    }
  }

  void expect_empty() {
    EXPECT_TRUE(scheduler.idle());
    EXPECT_EQ(pages.free_slots(), pages.num_slots());
    EXPECT_EQ(pages.free_pages(), pages.num_pages());
  }

  struct Live {
    int64_t request;
    int32_t sample;
    int64_t count;
  };
  const int64_t max_running, max_batch_tokens;
  Pages pages;
  FakeState state;
  Scheduler scheduler;
  std::vector<Work> work;
  std::vector<std::pair<int64_t, int32_t>> waiting;  // every sample, in order of asking
  std::map<int32_t, Live> live;                      // by slot
  size_t started = 0;
  int64_t next_request = 0, kept_request = -1, finished = 0, steps = 0, prompt_rows = 0, copies = 0;
};

TEST(Scheduler, RandomWorkloadsFinishInOrderWithinBudgetAndLeakNothing) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Philox rng(seed, RngPurpose::test);
    const int64_t max_running = 1 + rng.below(6), budget = 1 + rng.below(seed % 2 ? 6 : 60), page_tokens = 1 + rng.below(6);
    const int64_t max_positions = 2 + rng.below(30);
    // From the fewest pages that are allowed to more than enough.
    const int64_t num_pages = (max_positions + page_tokens - 1) / page_tokens + 1 + rng.below(40);
    Driver d(max_running, budget, num_pages, page_tokens, max_positions);
    const int requests = 1 + static_cast<int>(rng.below(12));
    const auto length = [&](int64_t request, int32_t sample) {
      const int64_t most = d.work[static_cast<size_t>(request)].max_new_tokens;
      const PhiloxBlock r =
          philox(seed, RngPurpose::test, static_cast<uint64_t>(request) + 1000, static_cast<uint32_t>(sample), 0);
      return r[0] % 2 ? most : 1 + static_cast<int64_t>(r[1] % static_cast<uint32_t>(most));  // half end early
    };
    int64_t tokens = 0, prompt_tokens = 0, samples = 0, forks = 0;
    for (int submitted = 0; submitted < requests || !d.scheduler.idle();) {
      if (submitted < requests && (d.scheduler.idle() || rng.below(3) == 0)) {
        const int64_t prompt = 1 + rng.below(static_cast<uint32_t>(max_positions - 1));
        const int64_t max_new = 1 + rng.below(static_cast<uint32_t>(max_positions - prompt));
        const int32_t n = 1 + static_cast<int32_t>(rng.below(rng.below(2) ? 10 : 2));
        d.submit(prompt, max_new, n);
        ++submitted;
        prompt_tokens += prompt;
        tokens += prompt + n * max_new;
        samples += n;
        forks += n - 1;
        continue;
      }
      d.step(length);
      if (HasFatalFailure()) return;
      ASSERT_LE(d.steps, tokens) << "every step runs a row or starts a sample";
    }
    EXPECT_EQ(d.finished, samples);
    EXPECT_EQ(d.prompt_rows, prompt_tokens) << "a prompt is run once";
    EXPECT_EQ(d.copies, forks);
    d.expect_empty();
  }
}

TEST(Scheduler, ClearAtAnyTimeFreesEverything) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Philox rng(seed, RngPurpose::test, 1);
    Driver d(1 + rng.below(4), 1 + rng.below(20), 8 + rng.below(10), 4, 24);
    for (int i = 0; i < 6; ++i) d.submit(1 + rng.below(16), 1 + rng.below(8), 1 + static_cast<int32_t>(rng.below(6)));
    const uint32_t steps = rng.below(20);
    for (uint32_t i = 0; i < steps && !d.scheduler.idle(); ++i)
      d.step([&](int64_t r, int32_t) { return d.work[static_cast<size_t>(r)].max_new_tokens; });
    if (HasFatalFailure()) return;
    d.scheduler.clear();
    d.expect_empty();
  }
}

TEST(Scheduler, DecodeFirstThenPromptChunksWithTheRest) {
  Driver d(4, 6, 100, 4, 32);
  d.submit(4, 20, 2);
  d.submit(9, 20, 1);
  const auto rows = [&](const Plan& p) {
    std::vector<std::tuple<int64_t, int64_t, int64_t>> v;
    for (const PlannedRows& r : p.rows) v.emplace_back(r.request, r.first_position, r.count);
    return v;
  };
  using Rows = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
  const Plan* plan = &d.scheduler.next();
  EXPECT_EQ(rows(*plan), (Rows{{0, 0, 4}, {1, 0, 2}}));
  ASSERT_EQ(plan->draws.size(), 2u);  // both samples of request 0
  EXPECT_EQ(plan->draws[0].copy_from, plan->rows[0].slot);
  EXPECT_EQ(plan->draws[1].slot, plan->rows[0].slot);
  plan = &d.scheduler.next();
  EXPECT_EQ(rows(*plan), (Rows{{0, 4, 1}, {0, 4, 1}, {1, 2, 4}}));
  EXPECT_EQ(plan->draws.size(), 2u);
  plan = &d.scheduler.next();
  EXPECT_EQ(rows(*plan), (Rows{{0, 5, 1}, {0, 5, 1}, {1, 6, 3}}));
  EXPECT_EQ(plan->draws.size(), 3u);
  plan = &d.scheduler.next();
  EXPECT_EQ(rows(*plan), (Rows{{0, 6, 1}, {0, 6, 1}, {1, 9, 1}}));
}

TEST(Scheduler, APromptWaitsForItsSamplesWithoutBeingRunAgain) {
  Driver d(2, 100, 100, 4, 32);
  d.submit(5, 3, 5);
  d.submit(6, 3, 1);
  const Plan* plan = &d.scheduler.next();
  ASSERT_EQ(plan->rows.size(), 1u);  // the second request waits until the first one's samples are all in
  EXPECT_EQ(plan->draws.size(), 2u);
  EXPECT_EQ(plan->keep, 0);
  const int32_t first = plan->draws[0].slot, second = plan->draws[1].slot;
  d.scheduler.finish(first);
  plan = &d.scheduler.next();
  ASSERT_EQ(plan->rows.size(), 1u);
  ASSERT_EQ(plan->draws.size(), 2u);
  EXPECT_EQ(plan->draws[1].rows, -1);
  EXPECT_EQ(plan->draws[1].sample, 2);
  EXPECT_EQ(plan->keep, -1);
  d.scheduler.finish(second);
  d.scheduler.finish(plan->draws[1].slot);
  plan = &d.scheduler.next();
  EXPECT_TRUE(plan->rows.size() == 1 && plan->rows[0].request == 1) << "samples 3 and 4 draw while the next prompt is run ahead";
  ASSERT_EQ(plan->draws.size(), 2u);
  EXPECT_EQ(plan->draws[0].sample, 3);
  EXPECT_EQ(plan->draws[1].sample, 4);
  EXPECT_EQ(plan->draws[1].copy_from, -1);
  EXPECT_EQ(plan->keep, 0);
}

TEST(Scheduler, FewestPagesThatAreAllowedSuffice) {
  // 9 + 7 positions are four pages of 4; the prompt's own last page is the fifth.
  Driver d(3, 8, 5, 4, 16);
  d.submit(9, 7, 4);
  d.submit(15, 1, 2);
  while (!d.scheduler.idle() && !HasFatalFailure())
    d.step([&](int64_t r, int32_t) { return d.work[static_cast<size_t>(r)].max_new_tokens; });
  EXPECT_EQ(d.finished, 6);
  d.expect_empty();
}

// Twelve requests of 8 tokens and one of 64 behind them, four at once.
TEST(Scheduler, TheLongestGoFirstAndFewerStepsSuffice) {
  constexpr int64_t kShort = 8, kLong = 64, kRequests = 13;
  const auto length = [](int64_t request) { return request + 1 == kRequests ? kLong : kShort; };
  const auto run = [&](bool expected, std::vector<int64_t>* begun) {
    Pages pages(5, 200, 4, 128);
    Scheduler scheduler(pages, 4, 100);
    for (int64_t r = 0; r < kRequests; ++r)
      scheduler.submit({.request = r, .prompt_tokens = 5, .max_new_tokens = kLong, .expected_tokens = expected ? length(r) : 0});
    std::map<int64_t, int64_t> drawn;
    int64_t steps = 0;
    for (; !scheduler.idle(); ++steps) {
      const Plan plan = scheduler.next();
      for (const PlannedDraw& d : plan.draws) {
        if (d.first) begun->push_back(d.request);
        if (++drawn[d.request] == length(d.request)) scheduler.finish(d.slot);
      }
    }
    for (int64_t r = 0; r < kRequests; ++r) EXPECT_EQ(drawn[r], length(r));
    EXPECT_EQ(pages.free_pages(), pages.num_pages());
    return steps;
  };
  std::vector<int64_t> given, longest;
  const int64_t steps_given = run(false, &given), steps_longest = run(true, &longest);
  EXPECT_EQ(given, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  EXPECT_EQ(longest, (std::vector<int64_t>{12, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})) << "among equals the first in";
  // Given: three rounds of 8 steps, then the long one alone, whose prompt is run one step ahead. Longest: the short ones all fit beside it.
  EXPECT_EQ(steps_longest, kLong);
  EXPECT_GE(steps_given, 3 * kShort + kLong - 1);
}

TEST(SchedulerDeathTest, MisuseIsNamed) {
  Pages pages(3, 4, 4, 16);
  EXPECT_DEATH(Scheduler(pages, 3, 8), "need 4 slots");
  EXPECT_DEATH(Scheduler(pages, 2, 0), "0 rows a forward");
  Scheduler s(pages, 2, 8);
  EXPECT_DEATH(s.submit({.request = 3, .prompt_tokens = 9, .max_new_tokens = 7}), "request 3 .* may need 5 pages");
  EXPECT_DEATH(s.submit({.request = 3, .prompt_tokens = 0, .max_new_tokens = 7}), "0 prompt tokens");
  EXPECT_DEATH(s.finish(0), "no running sample");
}

}  // namespace
}  // namespace lockstep
