#include "ops/sequence/sequence.h"

#include <algorithm>

#include "ops/sequence/sequence_cpu.h"

namespace lockstep {
namespace {

void check_ints(const char* what, ConstTensorView v, int64_t n) {
  CHECK(v.dtype == DType::i32 && v.shape.rank == 1 && v.dim(0) == n, "{} is {} {}, wanted i32 [{}]", what, dtype_name(v.dtype),
        v.shape.str(), n);
}

void check_store(const Context& c, ConstTensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq, int64_t per_page) {
  CHECK(per_page > 0 && seq.page_tokens % per_page == 0, "{} entries a page of {} positions", per_page, seq.page_tokens);
  if (!c.on_gpu()) {
    check_sequences(seq);
    check_entries(entries, seq, seq.page_tokens / per_page);
  }
  CHECK(store.shape.rank == 2 && x.shape.rank == 2 && store.dtype == x.dtype && store.dim(1) == x.dim(1) &&
            x.dim(0) == entries.num_entries,
        "store {} {}, entries {} {} for {} entries", dtype_name(store.dtype), store.shape.str(), dtype_name(x.dtype),
        x.shape.str(), entries.num_entries);
  if (!c.on_gpu()) check_pages(seq, seq.page_tokens / per_page, per_page, store.rows());
}

}  // namespace

SequenceView slice_rows(Context& c, const SequenceView& seq, int64_t begin, int64_t count, Arena& arena) {
  CHECK(begin >= 0 && count >= 0 && begin + count <= seq.num_tokens, "rows [{}, {}) of {}", begin, begin + count, seq.num_tokens);
  if (c.on_gpu()) return device::slice_rows(c, seq, begin, count, arena);
  const int32_t* of = seq.token_seq.ptr<int32_t>();
  const int64_t first = count == 0 ? 0 : of[begin], sequences = count == 0 ? 0 : of[begin + count - 1] + 1 - first;
  const TensorView token_seq = arena.tensor(DType::i32, {count}, "rows.token_seq");
  const TensorView seq_row = arena.tensor(DType::i32, {sequences + 1}, "rows.seq_row");
  const TensorView seq_pos = arena.tensor(DType::i32, {sequences}, "rows.seq_pos");
  for (int64_t t = 0; t < count; ++t) token_seq.ptr<int32_t>()[t] = static_cast<int32_t>(of[begin + t] - first);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t row = std::max<int64_t>(seq.seq_row.ptr<int32_t>()[first + s], begin);
    seq_row.ptr<int32_t>()[s] = static_cast<int32_t>(row - begin);
    seq_pos.ptr<int32_t>()[s] = seq.token_pos.ptr<int32_t>()[row];
  }
  seq_row.ptr<int32_t>()[sequences] = static_cast<int32_t>(count);
  SequenceView rows = seq;
  rows.num_tokens = count;
  rows.num_sequences = sequences;
  rows.token_seq = token_seq;
  rows.token_pos = seq.token_pos.slice(begin, count);
  rows.seq_row = seq_row;
  rows.seq_pos = seq_pos;
  rows.seq_slot = seq.seq_slot.slice(first, sequences);
  if (seq.page_table.rows() == seq.num_sequences) rows.page_table = seq.page_table.slice(first, sequences);
  return rows;
}

void check_sequences(const SequenceView& seq) {
  const int64_t num_tokens = seq.num_tokens, num_sequences = seq.num_sequences;
  CHECK(num_tokens >= 0 && num_sequences >= 0 && num_sequences <= num_tokens, "{} tokens in {} sequences", num_tokens,
        num_sequences);
  check_ints("token_seq", seq.token_seq, num_tokens);
  check_ints("token_pos", seq.token_pos, num_tokens);
  check_ints("seq_row", seq.seq_row, num_sequences + 1);
  check_ints("seq_pos", seq.seq_pos, num_sequences);
  check_ints("seq_slot", seq.seq_slot, num_sequences);
  const int32_t* row = seq.seq_row.ptr<int32_t>();
  const int32_t* pos = seq.seq_pos.ptr<int32_t>();
  const int32_t* token_seq = seq.token_seq.ptr<int32_t>();
  const int32_t* token_pos = seq.token_pos.ptr<int32_t>();
  CHECK(row[0] == 0 && row[num_sequences] == num_tokens, "seq_row runs from {} to {}, wanted 0 to {}", row[0], row[num_sequences],
        num_tokens);
  for (int64_t s = 0; s < num_sequences; ++s) {
    CHECK(row[s] < row[s + 1], "sequence {} has rows [{}, {})", s, row[s], row[s + 1]);
    CHECK(pos[s] >= 0, "sequence {} starts at position {}", s, pos[s]);
    const int64_t first = row[s], last = row[s + 1] - 1;
    CHECK(token_seq[first] == s && token_seq[last] == s, "rows {} and {} of sequence {} name sequences {} and {}", first, last, s,
          token_seq[first], token_seq[last]);
    CHECK(token_pos[first] == pos[s] && token_pos[last] == last_position(seq, s),
          "rows {} and {} of sequence {} are at positions {} and {}, wanted {} and {}", first, last, s, token_pos[first],
          token_pos[last], pos[s], last_position(seq, s));
    CHECK(token_pos[last] < seq.longest, "sequence {} has position {}, and longest is {}", s, token_pos[last], seq.longest);
  }
}

void check_slots(const SequenceView& seq, int64_t slots, bool needs_past) {
  const int32_t* pos = seq.seq_pos.ptr<int32_t>();
  const int32_t* slot = seq.seq_slot.ptr<int32_t>();
  for (int64_t s = 0; s < seq.num_sequences; ++s) {
    const bool reads = needs_past && pos[s] > 0;
    if (!needs_past || reads) CHECK(slot[s] < slots, "slot {} of sequence {} in a ring of {} slots", slot[s], s, slots);
    CHECK(slot[s] >= (reads ? 0 : -1), "sequence {} starts at position {} with slot {}", s, pos[s], slot[s]);
  }
}

void check_entries(const EntryView& entries, const SequenceView& seq, int64_t ratio) {
  CHECK(ratio > 0, "ratio {}", ratio);
  CHECK(entries.num_entries >= 0, "{} entries", entries.num_entries);
  check_ints("entries.seq", entries.seq, entries.num_entries);
  check_ints("entries.idx", entries.idx, entries.num_entries);
  check_ints("entries.pos", entries.pos, entries.num_entries);
  check_ints("entries.seq_first", entries.seq_first, seq.num_sequences + 1);
  const int32_t* first = entries.seq_first.ptr<int32_t>();
  const int32_t* pos = seq.seq_pos.ptr<int32_t>();
  CHECK(first[0] == 0 && first[seq.num_sequences] == entries.num_entries, "seq_first runs from {} to {}, wanted 0 to {}",
        first[0], first[seq.num_sequences], entries.num_entries);
  for (int64_t s = 0; s < seq.num_sequences; ++s) {
    const int64_t begin = pos[s] / ratio, end = (last_position(seq, s) + 1) / ratio;
    CHECK(first[s + 1] - first[s] == end - begin, "sequence {} completes {} entries of ratio {}, the list has {}", s, end - begin,
          ratio, first[s + 1] - first[s]);
    if (begin == end) continue;
    const int64_t e = first[s], l = first[s + 1] - 1;
    CHECK(entries.seq.ptr<int32_t>()[e] == s && entries.seq.ptr<int32_t>()[l] == s,
          "entries {} and {} belong to sequences {} and {}, wanted {}", e, l, entries.seq.ptr<int32_t>()[e],
          entries.seq.ptr<int32_t>()[l], s);
    CHECK(entries.idx.ptr<int32_t>()[e] == begin && entries.idx.ptr<int32_t>()[l] == end - 1,
          "entries {} and {} of sequence {} have indices {} and {}, wanted {} and {}", e, l, s, entries.idx.ptr<int32_t>()[e],
          entries.idx.ptr<int32_t>()[l], begin, end - 1);
  }
}

void check_pages(const SequenceView& seq, int64_t ratio, int64_t per_page, int64_t rows) {
  CHECK(ratio > 0 && per_page > 0 && per_page * ratio == seq.page_tokens, "{} entries of ratio {} a page of {} positions",
        per_page, ratio, seq.page_tokens);
  for (int64_t s = 0; s < seq.num_sequences; ++s) {
    const int64_t pages = ((last_position(seq, s) + 1) / ratio + per_page - 1) / per_page;
    if (pages == 0) continue;
    CHECK(seq.page_table.dtype == DType::i32 && seq.page_table.shape.rank == 2 && seq.page_table.rows() == seq.num_sequences &&
              pages <= seq.page_table.dim(1),
          "sequence {} needs {} pages, the page table is {}", s, pages, seq.page_table.shape.str());
    const int32_t* page = seq.page_table.row<int32_t>(s);
    for (int64_t i = 0; i < pages; ++i)
      CHECK(page[i] >= 0 && (page[i] + 1) * per_page <= rows, "page {} of sequence {} is {}, the store has {} rows of {} a page",
            i, s, page[i], rows, per_page);
  }
}

void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq) {
  if (!c.on_gpu()) check_sequences(seq);
  CHECK(x.shape.rank == 2 && x.rows() == seq.num_tokens, "x {} for {} tokens", x.shape.str(), seq.num_tokens);
  CHECK(ring.shape.rank == 3 && ring.dtype == x.dtype && ring.dim(1) > 0 && ring.dim(2) == x.dim(1), "ring {} {}, x {} {}",
        dtype_name(ring.dtype), ring.shape.str(), dtype_name(x.dtype), x.shape.str());
  if (!c.on_gpu()) check_slots(seq, ring.rows(), /*needs_past=*/false);
  if (seq.num_tokens > 0) c.on_gpu() ? device::ring_update(c, ring, x, seq) : reference::ring_update(c, ring, x, seq);
}

void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq,
                     int64_t per_page) {
  check_store(c, store, x, entries, seq, per_page);
  c.on_gpu() ? device::entries_scatter(c, store, x, entries, seq, per_page) : reference::entries_scatter(c, store, x, entries, seq, per_page);
}

void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq,
                    int64_t per_page) {
  check_store(c, store, x, entries, seq, per_page);
  c.on_gpu() ? device::entries_gather(c, x, store, entries, seq, per_page) : reference::entries_gather(c, x, store, entries, seq, per_page);
}

}  // namespace lockstep
