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

}  // namespace lockstep::testing
