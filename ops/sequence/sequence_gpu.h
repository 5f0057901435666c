#pragma once
// What kernels see of a SequenceView and an EntryView: pointers to device memory, made on the host without reading them.

#include "core/gpu.h"
#include "ops/sequence/sequence.h"

namespace lockstep::gpu {

struct SequenceArrays {
  const int32_t *token_seq, *token_pos, *seq_row, *seq_pos, *seq_slot, *page_table;
  int64_t page_stride;  // of a sequence's pages
};
struct EntryArrays {
  const int32_t *seq, *idx, *seq_first;
};

inline SequenceArrays arrays(const SequenceView& q) {
  return {q.token_seq.ptr<int32_t>(), q.token_pos.ptr<int32_t>(), q.seq_row.ptr<int32_t>(), q.seq_pos.ptr<int32_t>(), q.seq_slot.ptr<int32_t>(),
          q.page_table.empty() ? nullptr : q.page_table.ptr<int32_t>(), q.page_table.row_stride};
}
inline EntryArrays arrays(const EntryView& e) { return {e.seq.ptr<int32_t>(), e.idx.ptr<int32_t>(), e.seq_first.ptr<int32_t>()}; }

// Row of entry `idx` of sequence `s` in a paged store, as lockstep::entry_row.
GPU_INLINE int64_t entry_row(const SequenceArrays& q, int per_page, int s, int idx) {
  return static_cast<int64_t>(q.page_table[s * q.page_stride + idx / per_page]) * per_page + idx % per_page;
}

}  // namespace lockstep::gpu
