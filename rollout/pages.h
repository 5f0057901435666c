#pragma once
// Who owns which slot and which page of sequence state. Bookkeeping alone: the storage is model/state.h's, and the caller does
// the copies that a fork asks for.
//
// A sequence is named by its slot. It takes all the pages it will ever need when it is opened, forked or extended, so nothing can
// run out later. A fork continues from the first `shared` positions of another sequence: pages that lie fully below `shared` have
// no writer any more and are shared by reference count; the page that `shared` cuts gets a copy, because both sequences go on
// writing into it. Every call takes everything it needs or nothing.

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

struct PageCopy {
  int32_t from = -1, to = -1;  // -1: nothing to copy
};

struct Fork {
  int32_t slot = -1;  // -1: does not fit
  PageCopy page;
};

class Pages {
 public:
  // max_positions: the most a sequence may cover.
  Pages(int64_t num_slots, int64_t num_pages, int64_t page_tokens, int64_t max_positions);

  // A slot and pages for `positions` positions; -1 when they are not free.
  int32_t open(int64_t positions);
  // Like open, but continuing from the first `shared` (<= positions) positions of `from`, which must cover them.
  Fork fork(int32_t from, int64_t shared, int64_t positions);
  // Pages up to `positions` in all; false when they are not free.
  bool extend(int32_t slot, int64_t positions);
  void close(int32_t slot);

  std::span<const int32_t> pages(int32_t slot) const;  // in order of position; changed by the next call on this slot
  int64_t pages_for(int64_t positions) const { return (positions + page_tokens_ - 1) / page_tokens_; }
  int64_t page_tokens() const { return page_tokens_; }
  int64_t num_slots() const { return static_cast<int64_t>(page_count_.size()); }
  int64_t num_pages() const { return static_cast<int64_t>(references_.size()); }
  int64_t free_slots() const { return static_cast<int64_t>(free_slots_.size()); }
  int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }
  int32_t references(int32_t page) const { return references_[static_cast<size_t>(page)]; }

 private:
  bool is_open(int32_t slot) const;
  void check_open(int32_t slot) const;
  int32_t take_slot();
  int32_t take_page();
  int32_t* row(int32_t slot) { return table_.data() + slot * max_pages_; }

  int64_t page_tokens_;
  int64_t max_pages_;                             // of one sequence
  std::vector<int32_t> table_;                    // [num_slots, max_pages]
  std::vector<int64_t> page_count_;               // by slot; -1: the slot is free
  std::vector<int32_t> references_;               // by page; 0: the page is free
  std::vector<int32_t> free_slots_, free_pages_;  // stacks
};

}  // namespace lockstep
