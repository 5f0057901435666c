#pragma once
// For tests of ops that read sequences: a set of sequences with their slots and pages, the packed call that brings all of them at
// once, and random schedules of calls that bring the same rows in pieces.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops/sequence/sequence.h"
#include "ops/testing.h"

namespace lockstep::testing {

inline void shuffle(Philox& rng, std::vector<int32_t>& v) {
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[rng.below(static_cast<uint32_t>(i))]);
}

// Sequence i has rows offset[i] .. offset[i] + length[i] - 1 of every "global" tensor.
struct SequenceSet {
  std::vector<int64_t> length, offset;
  std::vector<int32_t> slot;                // out of num_slots, in random order
  std::vector<std::vector<int32_t>> pages;  // out of num_pages, in random order
  int64_t page_tokens = 0;
  int64_t num_slots = 0, num_pages = 0, num_rows = 0, table_width = 1;
};

inline SequenceSet make_sequence_set(uint64_t seed, const std::vector<int64_t>& length, int64_t page_tokens) {
  Philox rng(seed, RngPurpose::test, 77);
  SequenceSet set;
  set.length = length;
  set.page_tokens = page_tokens;
  set.num_slots = static_cast<int64_t>(length.size()) + 2;
  std::vector<int32_t> slots(static_cast<size_t>(set.num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  shuffle(rng, slots);
  set.slot.assign(slots.begin(), slots.begin() + static_cast<int64_t>(length.size()));
  for (const int64_t n : length) {
    set.offset.push_back(set.num_rows);
    set.num_rows += n;
    set.num_pages += (n + page_tokens - 1) / page_tokens;
    set.table_width = std::max(set.table_width, (n + page_tokens - 1) / page_tokens);
  }
  set.num_pages += 2;
  std::vector<int32_t> pages(static_cast<size_t>(set.num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  shuffle(rng, pages);
  size_t next = 0;
  for (const int64_t n : length) {
    const size_t count = static_cast<size_t>((n + page_tokens - 1) / page_tokens);
    set.pages.emplace_back(pages.begin() + static_cast<int64_t>(next), pages.begin() + static_cast<int64_t>(next + count));
    next += count;
  }
  return set;
}

// Rows [pos, pos + rows) of sequence `id` of a set.
struct SequencePart {
  int64_t id = 0, pos = 0, rows = 0;
};

// One call: owns what its views point at.
class Call {
 public:
  Call(const SequenceSet& set, const std::vector<SequencePart>& parts, bool with_slots = true) {
    std::vector<int32_t> token_seq, token_pos, seq_row = {0}, seq_pos, seq_slot;
    const int64_t num = static_cast<int64_t>(parts.size());
    int64_t longest = 0;
    page_table_ = Tensor(DType::i32, {num, set.table_width});
    for (int64_t s = 0; s < num; ++s) {
      const SequencePart& part = parts[static_cast<size_t>(s)];
      const size_t id = static_cast<size_t>(part.id);
      longest = std::max(longest, part.pos + part.rows);
      for (int64_t i = 0; i < part.rows; ++i) {
        token_seq.push_back(static_cast<int32_t>(s));
        token_pos.push_back(static_cast<int32_t>(part.pos + i));
        global_row_.push_back(set.offset[id] + part.pos + i);
      }
      seq_row.push_back(static_cast<int32_t>(token_seq.size()));
      seq_pos.push_back(static_cast<int32_t>(part.pos));
      seq_slot.push_back(with_slots ? set.slot[id] : -1);
      for (size_t i = 0; i < set.pages[id].size(); ++i)
        page_table_.ptr<int32_t>()[static_cast<size_t>(s * set.table_width) + i] = set.pages[id][i];
    }
    token_seq_ = int_tensor(token_seq);
    token_pos_ = int_tensor(token_pos);
    seq_row_ = int_tensor(seq_row);
    seq_pos_ = int_tensor(seq_pos);
    seq_slot_ = int_tensor(seq_slot);
    view_ = {static_cast<int64_t>(token_seq.size()),
             num,
             token_seq_,
             token_pos_,
             seq_row_,
             seq_pos_,
             seq_slot_,
             page_table_,
             set.page_tokens,
             longest};
  }
  const SequenceView& view() const { return view_; }
  int64_t global_row(int64_t i) const { return global_row_[static_cast<size_t>(i)]; }

  // The entries of `ratio` that complete in this call; valid while the call lives.
  EntryView entries(int64_t ratio) {
    std::vector<int32_t> seq, idx, pos, first = {0};
    for (int64_t s = 0; s < view_.num_sequences; ++s) {
      for (int64_t e = seq_pos_.ptr<int32_t>()[s] / ratio; e < (last_position(view_, s) + 1) / ratio; ++e) {
        seq.push_back(static_cast<int32_t>(s));
        idx.push_back(static_cast<int32_t>(e));
        pos.push_back(static_cast<int32_t>(e * ratio));
      }
      first.push_back(static_cast<int32_t>(seq.size()));
    }
    for (const auto* v : {&seq, &idx, &pos, &first}) kept_.push_back(int_tensor(*v));
    const size_t n = kept_.size();
    return {static_cast<int64_t>(seq.size()), kept_[n - 4], kept_[n - 3], kept_[n - 2], kept_[n - 1]};
  }

  // The call's rows of a global tensor (row i of the result is row global_row(i)), and the way back.
  Tensor take(ConstTensorView global) const {
    Shape shape = global.shape;
    shape.dims[0] = view_.num_tokens;
    Tensor rows(global.dtype, shape);
    for (int64_t i = 0; i < view_.num_tokens; ++i) copy_row(rows.view(), i, global, global_row_[static_cast<size_t>(i)]);
    return rows;
  }
  void put(TensorView global, ConstTensorView rows) const {
    for (int64_t i = 0; i < view_.num_tokens; ++i) copy_row(global, global_row_[static_cast<size_t>(i)], rows, i);
  }

 private:
  static void copy_row(TensorView to, int64_t i, ConstTensorView from, int64_t j) {
    const size_t element = dtype_bytes(to.dtype);
    std::memcpy(static_cast<char*>(to.data) + static_cast<size_t>(i * to.row_stride) * element,
                static_cast<const char*>(from.data) + static_cast<size_t>(j * from.row_stride) * element,
                static_cast<size_t>(to.shape.row_elements()) * element);
  }

  Tensor token_seq_, token_pos_, seq_row_, seq_pos_, seq_slot_, page_table_;
  std::vector<Tensor> kept_;
  std::vector<int64_t> global_row_;
  SequenceView view_;
};

inline std::vector<SequencePart> packed_parts(const SequenceSet& set) {
  std::vector<SequencePart> parts;
  for (size_t i = 0; i < set.length.size(); ++i) parts.push_back({static_cast<int64_t>(i), 0, set.length[i]});
  return parts;
}

// Calls that together bring every row once, positions of a sequence in order: each call a random choice of unfinished sequences
// in random order, with up to `max_rows` rows of each.
inline std::vector<std::vector<SequencePart>> random_schedule(Philox& rng, const SequenceSet& set, int64_t max_rows) {
  std::vector<std::vector<SequencePart>> calls;
  std::vector<int64_t> done(set.length.size());
  for (;;) {
    std::vector<int32_t> open;
    for (size_t i = 0; i < done.size(); ++i)
      if (done[i] < set.length[i]) open.push_back(static_cast<int32_t>(i));
    if (open.empty()) return calls;
    shuffle(rng, open);
    open.resize(1 + rng.below(static_cast<uint32_t>(open.size())));
    std::vector<SequencePart> parts;
    for (const int32_t id : open) {
      int64_t& at = done[static_cast<size_t>(id)];
      const int64_t left = set.length[static_cast<size_t>(id)] - at;
      const int64_t rows = 1 + rng.below(static_cast<uint32_t>(std::min(left, max_rows)));
      parts.push_back({id, at, rows});
      at += rows;
    }
    calls.push_back(parts);
  }
}

}  // namespace lockstep::testing
