#pragma once
// How packed rows belong to sequences, and the per-sequence stores that rows are written to and read from.
//
// Packed rows: T tokens of S sequences, each sequence's new rows consecutive and in ascending position. A sequence may
// bring any number of rows >= 1, starting at any position; prefill, decode and training differ only in these numbers.
//
// Slots and pages: what has constant size per sequence (the window ring, the compressor ring) lives in a slot; what grows
// (compressed entries) lives in pages that each cover `page_tokens` positions. A layer of ratio m stores
// page_tokens / m entries a page, so entry s lies in page s / (page_tokens / m). The model owns the layout, callers the storage.

#include "core/context.h"

namespace lockstep {

struct SequenceView {
  int64_t num_tokens = 0;      // T
  int64_t num_sequences = 0;   // S
  ConstTensorView token_seq;   // [T] i32  sequence of each row
  ConstTensorView token_pos;   // [T] i32  position of each row in its sequence
  ConstTensorView seq_row;     // [S + 1] i32  first row of each sequence, then T
  ConstTensorView seq_pos;     // [S] i32  position of each sequence's first row
  ConstTensorView seq_slot;    // [S] i32  state slot; -1: rings are neither read (first position is 0) nor kept
  ConstTensorView page_table;  // [S, max_pages] i32  page ids in order; may be empty when no layer compresses
  int64_t page_tokens = 0;     // positions covered by a page, a multiple of every ratio
};

// The entries that complete inside this call, for one ratio m: entry e covers positions [idx*m, idx*m + m) of its sequence.
// Ordered by sequence, then by index.
struct EntryView {
  int64_t num_entries = 0;   // E, may be 0
  ConstTensorView seq;       // [E] i32
  ConstTensorView idx;       // [E] i32  index within the sequence
  ConstTensorView pos;       // [E] i32  idx * m: the position the entry is rotated at
  ConstTensorView seq_first; // [S + 1] i32  first entry of each sequence in this call, then E
};

// Row of entry `idx` of sequence `s` in a paged store with `per_page` entries a page.
inline int64_t entry_row(const SequenceView& q, int64_t per_page, int64_t s, int64_t idx) {
  return static_cast<int64_t>(q.page_table.row<int32_t>(s)[idx / per_page]) * per_page + idx % per_page;
}

// ring[slot, p mod R, :] = x[row, :] for the last min(rows, R) rows of every sequence whose slot is not -1.
//   ring [slots, R, W]   dtype of x
//   x    [T, W]          f32 | bf16; row_stride may exceed W
void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq);

// store[entry_row, :] = x[e, :] for every entry of the call.
//   store [pages * per_page, W], x [E, W], same dtype
void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq,
                     int64_t per_page);
// x[e, :] = store[entry_row, :]: the way gradients of entries come back.
void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq,
                    int64_t per_page);

}  // namespace lockstep
