#pragma once
// The views of a call (sequence_testing.h) with their arrays in device memory.

#include "ops/gpu_testing.h"
#include "ops/sequence/sequence_testing.h"

namespace lockstep::testing {

inline SequenceView put_sequences(Gpu& gpu, SequenceView q) {
  for (ConstTensorView* v : {&q.token_seq, &q.token_pos, &q.seq_row, &q.seq_pos, &q.seq_slot, &q.page_table}) *v = gpu.put(*v);
  return q;
}
inline EntryView put_entries(Gpu& gpu, EntryView e) {
  for (ConstTensorView* v : {&e.seq, &e.idx, &e.pos, &e.seq_first}) *v = gpu.put(*v);
  return e;
}
// With so much padding behind the entries.
inline EntryView put_padded_entries(Gpu& gpu, EntryView e, int64_t padding) {
  const auto padded = [&](ConstTensorView v, int32_t with) {
    Tensor t(DType::i32, {v.rows() + padding});
    for (int64_t i = 0; i < t.elements(); ++i) t.ptr<int32_t>()[i] = i < v.rows() ? v.ptr<int32_t>()[i] : with;
    return gpu.put(t);
  };
  return {e.num_entries + padding, padded(e.seq, -1), padded(e.idx, 0), padded(e.pos, 0), gpu.put(e.seq_first)};
}

}  // namespace lockstep::testing
