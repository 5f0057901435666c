// Rows copied to where the sequences keep them: one word of a row a thread, 16 bytes wide where the rows allow it. Floor: twice the rows' bytes / 4 TB/s.

#include "ops/sequence/sequence_cpu.h"
#include "ops/sequence/sequence_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 256;

// Row r of the packed rows and where it is kept: bytes from the two tensors' starts. false: the row is not kept.
struct Place {
  int64_t packed, kept;
};
struct InRing {
  SequenceArrays seq;
  int64_t row_bytes, kept_bytes, slot_bytes;  // between packed rows, rows of a slot, slots
  int ring_rows;
  GPU_INLINE bool operator()(int64_t r, Place* p) const {
    const int s = seq.token_seq[r], slot = seq.seq_slot[s];
    *p = {r * row_bytes, slot * slot_bytes + seq.token_pos[r] % ring_rows * kept_bytes};
    return slot >= 0 && r >= seq.seq_row[s + 1] - ring_rows;
  }
  int64_t strides() const { return row_bytes | kept_bytes | slot_bytes; }
};
struct InStore {
  SequenceArrays seq;
  EntryArrays entries;
  int64_t row_bytes, kept_bytes;
  int per_page;
  GPU_INLINE bool operator()(int64_t e, Place* p) const {
    const int s = entries.seq[e];
    if (s < 0) return false;  // padding
    *p = {e * row_bytes, entry_row(seq, per_page, s, entries.idx[e]) * kept_bytes};
    return true;
  }
  int64_t strides() const { return row_bytes | kept_bytes; }
};

template <typename Word, bool kKeep, typename Where>
GPU_KERNEL copy_rows_kernel(char* to, const char* from, int64_t num_rows, int words, Where where) {
  const int64_t at = static_cast<int64_t>(block_x()) * kThreads + thread_x(), r = at / words;
  if (r >= num_rows) return;
  Place p;
  if (!where(r, &p)) return;
  const int64_t i = at - r * words;
  reinterpret_cast<Word*>(to + (kKeep ? p.kept : p.packed))[i] = reinterpret_cast<const Word*>(from + (kKeep ? p.packed : p.kept))[i];
}

// kKeep: from packed rows to where they are kept; otherwise back.
template <bool kKeep, typename Where>
void copy_rows(Context& c, const char* name, TensorView to, ConstTensorView from, int64_t num_rows, int64_t width, Where where) {
  const int64_t row_bytes = width * static_cast<int64_t>(dtype_bytes(from.dtype));
  const auto run = [&](auto word) {
    using Word = decltype(word);
    const int words = static_cast<int>(row_bytes / static_cast<int64_t>(sizeof(Word)));
    launch(c, name, {.blocks = blocks_for(num_rows * words, kThreads), .threads = kThreads}, copy_rows_kernel<Word, kKeep, Where>, static_cast<char*>(to.data),
           static_cast<const char*>(from.data), num_rows, words, where);
  };
  const auto multiple = reinterpret_cast<uintptr_t>(to.data) | reinterpret_cast<uintptr_t>(from.data) | static_cast<uintptr_t>(where.strides() | row_bytes);
  if (multiple % 16 == 0) run(Vector<uint32_t, 4>{});
  else if (multiple % 4 == 0) run(uint32_t{});
  else if (multiple % 2 == 0) run(uint16_t{});
  else run(uint8_t{});
}

int64_t stride_bytes(ConstTensorView v) { return v.row_stride * static_cast<int64_t>(dtype_bytes(v.dtype)); }

// Rows of each sequence inside [begin, begin + count), and the position of the first.
GPU_KERNEL slice_kernel(int32_t* seq_row, int32_t* seq_pos, SequenceArrays seq, int num_sequences, int begin, int count) {
  const int s = block_x() * kThreads + thread_x();
  if (s > num_sequences) return;
  const int row = seq.seq_row[s], inside = row < begin ? 0 : (row > begin + count ? count : row - begin);
  seq_row[s] = inside;
  if (s < num_sequences) seq_pos[s] = seq.seq_pos[s] + (row < begin ? begin - row : 0);
}

}  // namespace

void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq) {
  const int64_t kept_bytes = x.dim(1) * static_cast<int64_t>(dtype_bytes(x.dtype));
  copy_rows<true>(c, "ring_update", ring, x, x.rows(), x.dim(1), InRing{arrays(seq), stride_bytes(x), kept_bytes, stride_bytes(ring), static_cast<int>(ring.dim(1))});
}
void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq, int64_t per_page) {
  copy_rows<true>(c, "entries_scatter", store, x, x.rows(), x.dim(1),
                  InStore{arrays(seq), arrays(entries), stride_bytes(x), stride_bytes(store), static_cast<int>(per_page)});
}
void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq, int64_t per_page) {
  copy_rows<false>(c, "entries_gather", x, store, x.rows(), x.dim(1),
                   InStore{arrays(seq), arrays(entries), stride_bytes(x), stride_bytes(store), static_cast<int>(per_page)});
}

SequenceView slice_rows(Context& c, const SequenceView& seq, int64_t begin, int64_t count, Arena& arena) {
  const TensorView seq_row = arena.tensor(DType::i32, {seq.num_sequences + 1}, "rows.seq_row");
  const TensorView seq_pos = arena.tensor(DType::i32, {seq.num_sequences}, "rows.seq_pos");
  launch(c, "slice_rows", {.blocks = blocks_for(seq.num_sequences + 1, kThreads), .threads = kThreads}, slice_kernel, seq_row.ptr<int32_t>(),
         seq_pos.ptr<int32_t>(), arrays(seq), static_cast<int>(seq.num_sequences), static_cast<int>(begin), static_cast<int>(count));
  SequenceView rows = seq;
  rows.num_tokens = count;
  rows.token_seq = seq.token_seq.slice(begin, count);
  rows.token_pos = seq.token_pos.slice(begin, count);
  rows.seq_row = seq_row;
  rows.seq_pos = seq_pos;
  return rows;
}

}  // namespace lockstep::device
