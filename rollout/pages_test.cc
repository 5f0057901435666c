// Slots and pages: everything or nothing, shared by count, never lost.

#include "rollout/pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <vector>

#include "core/rng.h"

namespace lockstep {
namespace {

std::vector<int32_t> list(const Pages& p, int32_t slot) { return {p.pages(slot).begin(), p.pages(slot).end()}; }

TEST(Pages, OpenTakesWhatItNeedsOrNothing) {
  Pages p(3, 5, 4, 16);
  const int32_t a = p.open(9);  // three pages
  ASSERT_GE(a, 0);
  EXPECT_EQ(p.pages(a).size(), 3u);
  EXPECT_EQ(p.free_pages(), 2);
  EXPECT_EQ(p.open(9), -1);
  EXPECT_EQ(p.free_pages(), 2);
  EXPECT_EQ(p.free_slots(), 2);
  const int32_t b = p.open(8);
  const int32_t c = p.open(0);  // a slot without pages
  ASSERT_GE(b, 0);
  ASSERT_GE(c, 0);
  EXPECT_EQ(p.open(0), -1) << "no slot is left";
  p.close(a);
  EXPECT_EQ(p.free_pages(), 3);
  EXPECT_EQ(p.open(1), a);
}

TEST(Pages, ExtendKeepsWhatIsThere) {
  Pages p(2, 4, 4, 16);
  const int32_t a = p.open(5);
  const auto before = list(p, a);
  EXPECT_TRUE(p.extend(a, 8));
  EXPECT_EQ(list(p, a), before);
  EXPECT_TRUE(p.extend(a, 9));
  EXPECT_EQ(p.pages(a).size(), 3u);
  EXPECT_EQ(list(p, a)[1], before[1]);
  ASSERT_GE(p.open(4), 0);
  EXPECT_FALSE(p.extend(a, 13));
  EXPECT_EQ(p.pages(a).size(), 3u);
  EXPECT_TRUE(p.extend(a, 3)) << "a sequence never shrinks";
  EXPECT_EQ(p.pages(a).size(), 3u);
}

TEST(Pages, ForkSharesFullPagesAndCopiesTheCutOne) {
  Pages p(4, 10, 4, 20);
  const int32_t a = p.open(10);  // pages 0, 1 full and 2 cut
  const Fork f = p.fork(a, 10, 17);
  ASSERT_GE(f.slot, 0);
  const auto of_a = list(p, a), of_f = list(p, f.slot);
  ASSERT_EQ(of_f.size(), 5u);
  EXPECT_EQ(of_f[0], of_a[0]);
  EXPECT_EQ(of_f[1], of_a[1]);
  EXPECT_NE(of_f[2], of_a[2]);
  EXPECT_EQ(f.page.from, of_a[2]);
  EXPECT_EQ(f.page.to, of_f[2]);
  EXPECT_EQ(p.references(of_a[0]), 2);
  EXPECT_EQ(p.references(of_a[2]), 1);
  EXPECT_EQ(p.free_pages(), 10 - 3 - 3);

  p.close(a);  // the fork keeps what it shares
  EXPECT_EQ(p.references(of_f[0]), 1);
  EXPECT_EQ(p.free_pages(), 10 - 5);
  p.close(f.slot);
  EXPECT_EQ(p.free_pages(), 10);
  EXPECT_EQ(p.free_slots(), 4);
}

TEST(Pages, ForkAtAPageBoundaryCopiesNothing) {
  Pages p(2, 4, 4, 16);
  const int32_t a = p.open(8);
  const Fork f = p.fork(a, 8, 9);
  ASSERT_GE(f.slot, 0);
  EXPECT_EQ(f.page.from, -1);
  EXPECT_EQ(p.free_pages(), 1);
}

TEST(Pages, ForkThatDoesNotFitTakesNothing) {
  Pages p(3, 4, 4, 16);
  const int32_t a = p.open(6);
  EXPECT_EQ(p.fork(a, 6, 16).slot, -1);  // needs three more
  EXPECT_EQ(p.free_pages(), 2);
  EXPECT_EQ(p.free_slots(), 2);
  EXPECT_EQ(p.references(p.pages(a)[0]), 1);
}

TEST(PagesDeathTest, MisuseIsNamed) {
  Pages p(2, 4, 4, 8);
  EXPECT_DEATH(p.open(9), "9 positions");
  EXPECT_DEATH(p.close(0), "not open");
  EXPECT_DEATH(p.close(2), "slot 2 of 2");
  const int32_t a = p.open(4);
  EXPECT_DEATH((void)p.fork(a, 5, 8), "first 5 positions");
  EXPECT_DEATH(Pages(0, 4, 4, 8), "0 slots");
  p.close(a);
  EXPECT_DEATH(p.close(a), "not open");
}

// Random calls against a model that keeps plain lists and counts references from scratch.
TEST(Pages, RandomCallsNeverLoseOrDoubleAPage) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Philox rng(seed, RngPurpose::test);
    const int64_t num_slots = 1 + rng.below(6), num_pages = rng.below(24), page_tokens = 1 + rng.below(5);
    const int64_t max_positions = 1 + rng.below(30);
    Pages p(num_slots, num_pages, page_tokens, max_positions);
    std::map<int32_t, std::vector<int32_t>> model;
    const auto any = [&] { return std::next(model.begin(), rng.below(static_cast<uint32_t>(model.size())))->first; };
    const auto need = [&](int64_t positions) { return (positions + page_tokens - 1) / page_tokens; };
    for (int i = 0; i < 200; ++i) {
      const int64_t positions = rng.below(static_cast<uint32_t>(max_positions + 1));
      const int64_t free_pages = p.free_pages(), free_slots = p.free_slots();
      const uint32_t what = rng.below(4);
      if (what == 0) {
        const int32_t slot = p.open(positions);
        ASSERT_EQ(slot >= 0, free_slots >= 1 && free_pages >= need(positions));
        if (slot >= 0) {
          ASSERT_FALSE(model.contains(slot));
          ASSERT_EQ(p.pages(slot).size(), static_cast<size_t>(need(positions)));
          model[slot] = list(p, slot);
        }
      } else if (model.empty()) {
        continue;
      } else if (what == 1) {
        const int32_t from = any();
        const int64_t held = std::min<int64_t>(static_cast<int64_t>(model[from].size()) * page_tokens, positions);
        const int64_t shared = rng.below(static_cast<uint32_t>(held + 1));
        const Fork f = p.fork(from, shared, positions);
        const int64_t full = shared / page_tokens;
        ASSERT_EQ(f.slot >= 0, free_slots >= 1 && free_pages >= need(positions) - full);
        if (f.slot >= 0) {
          ASSERT_FALSE(model.contains(f.slot));
          model[f.slot] = list(p, f.slot);
          ASSERT_EQ(model[f.slot].size(), static_cast<size_t>(need(positions)));
          for (int64_t k = 0; k < full; ++k)
            ASSERT_EQ(model[f.slot][static_cast<size_t>(k)], model[from][static_cast<size_t>(k)]);
          ASSERT_EQ(f.page.from, shared % page_tokens ? model[from][static_cast<size_t>(full)] : -1);
          ASSERT_EQ(f.page.to, shared % page_tokens ? model[f.slot][static_cast<size_t>(full)] : -1);
        }
      } else if (what == 2) {
        const int32_t slot = any();
        const std::vector<int32_t> before = model[slot];
        const int64_t more = need(positions) - static_cast<int64_t>(before.size());
        ASSERT_EQ(p.extend(slot, positions), free_pages >= more);
        model[slot] = list(p, slot);
        ASSERT_EQ(std::vector<int32_t>(model[slot].begin(), model[slot].begin() + static_cast<int64_t>(before.size())), before);
      } else {
        const int32_t slot = any();
        p.close(slot);
        model.erase(slot);
      }
      std::vector<int32_t> references(static_cast<size_t>(num_pages), 0);
      for (const auto& [slot, pages] : model) {
        ASSERT_EQ(list(p, slot), pages) << "a call on one sequence changed another";
        for (int32_t page : pages) ++references[static_cast<size_t>(page)];
      }
      int64_t unused = 0;
      for (int64_t k = 0; k < num_pages; ++k) {
        ASSERT_EQ(p.references(static_cast<int32_t>(k)), references[static_cast<size_t>(k)]);
        unused += references[static_cast<size_t>(k)] == 0;
      }
      ASSERT_EQ(p.free_pages(), unused);
      ASSERT_EQ(p.free_slots(), num_slots - static_cast<int64_t>(model.size()));
    }
    while (!model.empty()) {
      p.close(model.begin()->first);
      model.erase(model.begin());
    }
    ASSERT_EQ(p.free_pages(), num_pages);
    ASSERT_EQ(p.free_slots(), num_slots);
  }
}

}  // namespace
}  // namespace lockstep
