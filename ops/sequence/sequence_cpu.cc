#include "ops/sequence/sequence_cpu.h"

#include <algorithm>
#include <cstring>

namespace lockstep::reference {
namespace {

char* byte_row(TensorView v, int64_t i) {
  return static_cast<char*>(v.data) + i * v.row_stride * static_cast<int64_t>(dtype_bytes(v.dtype));
}
const char* byte_row(ConstTensorView v, int64_t i) {
  return static_cast<const char*>(v.data) + i * v.row_stride * static_cast<int64_t>(dtype_bytes(v.dtype));
}

}  // namespace

void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq) {
  const int64_t ring_rows = ring.dim(1), width = x.dim(1);
  const size_t row_bytes = static_cast<size_t>(width) * dtype_bytes(x.dtype);
  const int32_t* seq_row = seq.seq_row.ptr<int32_t>();
  const int32_t* seq_pos = seq.seq_pos.ptr<int32_t>();
  const int32_t* seq_slot = seq.seq_slot.ptr<int32_t>();
  const int64_t rows_each = std::min(ring_rows, seq.num_tokens / seq.num_sequences + 1);
  parallel_for(c, seq.num_sequences, rows_each * (width / 8 + 16), [&](int64_t begin, int64_t end, int) {
    for (int64_t s = begin; s < end; ++s) {
      if (seq_slot[s] < 0) continue;
      char* slot = byte_row(ring, seq_slot[s]);
      const int64_t first = std::max<int64_t>(seq_row[s], seq_row[s + 1] - ring_rows);
      int64_t at = (seq_pos[s] + first - seq_row[s]) % ring_rows;
      for (int64_t t = first; t < seq_row[s + 1]; ++t) {
        std::memcpy(slot + static_cast<size_t>(at) * row_bytes, byte_row(x, t), row_bytes);
        at = at + 1 == ring_rows ? 0 : at + 1;
      }
    }
  });
}

void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq,
                     int64_t per_page) {
  const size_t row_bytes = static_cast<size_t>(x.dim(1)) * dtype_bytes(x.dtype);
  const int32_t* entry_seq = entries.seq.ptr<int32_t>();
  const int32_t* entry_idx = entries.idx.ptr<int32_t>();
  parallel_for(c, entries.num_entries, x.dim(1) / 8 + 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t e = begin; e < end; ++e)
      std::memcpy(byte_row(store, entry_row(seq, per_page, entry_seq[e], entry_idx[e])), byte_row(x, e), row_bytes);
  });
}

void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq,
                    int64_t per_page) {
  const size_t row_bytes = static_cast<size_t>(x.dim(1)) * dtype_bytes(x.dtype);
  const int32_t* entry_seq = entries.seq.ptr<int32_t>();
  const int32_t* entry_idx = entries.idx.ptr<int32_t>();
  parallel_for(c, entries.num_entries, x.dim(1) / 8 + 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t e = begin; e < end; ++e)
      std::memcpy(byte_row(x, e), byte_row(store, entry_row(seq, per_page, entry_seq[e], entry_idx[e])), row_bytes);
  });
}

}  // namespace lockstep::reference
