#include "rollout/pages.h"

#include "core/status.h"

namespace lockstep {

Pages::Pages(int64_t num_slots, int64_t num_pages, int64_t page_tokens, int64_t max_positions) : page_tokens_(page_tokens) {
  CHECK(num_slots >= 1 && num_pages >= 0 && page_tokens >= 1 && max_positions >= 1,
        "{} slots, {} pages of {} positions, sequences of {} positions", num_slots, num_pages, page_tokens, max_positions);
  max_pages_ = pages_for(max_positions);
  table_.resize(static_cast<size_t>(num_slots * max_pages_), -1);
  page_count_.resize(static_cast<size_t>(num_slots), -1);
  references_.resize(static_cast<size_t>(num_pages), 0);
  // Stacks, lowest id on top.
  for (int64_t s = num_slots; s-- > 0;) free_slots_.push_back(static_cast<int32_t>(s));
  for (int64_t p = num_pages; p-- > 0;) free_pages_.push_back(static_cast<int32_t>(p));
}

bool Pages::is_open(int32_t slot) const { return slot >= 0 && slot < num_slots() && page_count_[static_cast<size_t>(slot)] >= 0; }

void Pages::check_open(int32_t slot) const { CHECK(is_open(slot), "slot {} of {} is not open", slot, num_slots()); }

int32_t Pages::take_slot() {
  const int32_t slot = free_slots_.back();
  free_slots_.pop_back();
  page_count_[static_cast<size_t>(slot)] = 0;
  return slot;
}

int32_t Pages::take_page() {
  const int32_t page = free_pages_.back();
  free_pages_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

int32_t Pages::open(int64_t positions) {
  CHECK(positions >= 0 && pages_for(positions) <= max_pages_, "{} positions in a table of {} pages of {}", positions, max_pages_,
        page_tokens_);
  if (free_slots() < 1 || free_pages() < pages_for(positions)) return -1;
  const int32_t slot = take_slot();
  extend(slot, positions);
  return slot;
}

bool Pages::extend(int32_t slot, int64_t positions) {
  check_open(slot);
  CHECK(pages_for(positions) <= max_pages_, "{} positions in a table of {} pages of {}", positions, max_pages_, page_tokens_);
  int64_t& count = page_count_[static_cast<size_t>(slot)];
  if (free_pages() < pages_for(positions) - count) return false;
  while (count < pages_for(positions)) row(slot)[count++] = take_page();
  return true;
}

Fork Pages::fork(int32_t from, int64_t shared, int64_t positions) {
  check_open(from);
  CHECK(shared >= 0 && shared <= positions && pages_for(positions) <= max_pages_,
        "a fork of {} shared of {} positions in a table of {} pages of {}", shared, positions, max_pages_, page_tokens_);
  CHECK(pages_for(shared) <= page_count_[static_cast<size_t>(from)],
        "slot {} has {} pages, a fork wants the first {} positions of it", from, page_count_[static_cast<size_t>(from)], shared);
  const int64_t full = shared / page_tokens_;
  if (free_slots() < 1 || free_pages() < pages_for(positions) - full) return {};
  const int32_t slot = take_slot();
  for (int64_t i = 0; i < full; ++i) {
    const int32_t page = row(from)[i];
    row(slot)[i] = page;
    ++references_[static_cast<size_t>(page)];
  }
  page_count_[static_cast<size_t>(slot)] = full;
  extend(slot, positions);
  Fork f{.slot = slot, .page = {}};
  if (shared % page_tokens_ != 0) f.page = {.from = row(from)[full], .to = row(slot)[full]};
  return f;
}

void Pages::close(int32_t slot) {
  check_open(slot);
  int64_t& count = page_count_[static_cast<size_t>(slot)];
  for (int64_t i = count; i-- > 0;) {
    const int32_t page = row(slot)[i];
    if (--references_[static_cast<size_t>(page)] == 0) free_pages_.push_back(page);
  }
  count = -1;
  free_slots_.push_back(slot);
}

std::span<const int32_t> Pages::pages(int32_t slot) const {
  check_open(slot);
  return {table_.data() + slot * max_pages_, static_cast<size_t>(page_count_[static_cast<size_t>(slot)])};
}

}  // namespace lockstep
