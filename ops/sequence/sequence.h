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

// The arrays lie in the context's memory; the host reads the scalars alone (on the GPU they are in device memory).
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
  int64_t longest = 0;         // no position is this or beyond: what launches and scratch are sized by
};

// The entries that complete inside this call, for one ratio m: entry e covers positions [idx*m, idx*m + m) of its sequence.
// Ordered by sequence, then by index. On the GPU padding of sequence -1 may follow, so that calls with fewer entries have the same shape: it is stored nowhere.
struct EntryView {
  int64_t num_entries = 0;   // E, may be 0; padding included
  ConstTensorView seq;       // [E] i32
  ConstTensorView idx;       // [E] i32  index within the sequence
  ConstTensorView pos;       // [E] i32  idx * m: the position the entry is rotated at
  ConstTensorView seq_first; // [S + 1] i32  first entry of each sequence in this call, then E without padding
};

// Position of the last row of sequence `s`.
inline int64_t last_position(const SequenceView& q, int64_t s) {
  const int32_t* row = q.seq_row.ptr<int32_t>();
  return q.seq_pos.ptr<int32_t>()[s] + row[s + 1] - row[s] - 1;
}

// Row of entry `idx` of sequence `s` in a paged store with `per_page` entries a page.
inline int64_t entry_row(const SequenceView& q, int64_t per_page, int64_t s, int64_t idx) {
  return static_cast<int64_t>(q.page_table.row<int32_t>(s)[idx / per_page]) * per_page + idx % per_page;
}

// Rows [begin, begin + count) as a call of their own, for ops that read earlier rows from pages alone (rings would lack the rows
// before `begin`). Small arrays in `arena`, the rest shared. On the GPU all sequences stay, those without a row in the range with none:
// the host does not know which.
SequenceView slice_rows(Context& c, const SequenceView& seq, int64_t begin, int64_t count, Arena& arena);

// What every op that takes these views checks first, with values in the message; O(S + pages). On the CPU: they read the arrays, which on
// the GPU are as the batch's builder checked them.
// check_sequences: dtypes and shapes, rows consecutive and covering [0, T), every sequence with at least one row.
// check_slots: slots lie in [-1, slots); with `needs_past`, only a sequence that starts at position 0 may have none.
// check_entries: the entries are exactly those of `ratio` whose last position lies inside the call.
// check_pages: the pages of every sequence's entries [0, (last position + 1) / ratio) are in the table and in a store of `rows` rows.
void check_sequences(const SequenceView& seq);
void check_slots(const SequenceView& seq, int64_t slots, bool needs_past);
void check_entries(const EntryView& entries, const SequenceView& seq, int64_t ratio);
void check_pages(const SequenceView& seq, int64_t ratio, int64_t per_page, int64_t rows);

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
