#include "rollout/decode_graphs.h"

#include <algorithm>
#include <bit>

namespace lockstep {

int64_t padded_rows(int64_t n) {
  const auto step = static_cast<int64_t>(std::max<uint64_t>(std::bit_floor(static_cast<uint64_t>(n)) / 4, 1));
  return (n + step - 1) / step * step;
}
int64_t padded_positions(int64_t n) { return std::max<int64_t>(1024, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)))); }

void DecodeShape::add(ConstTensorView v) {
  add(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(v.data)));
  add(static_cast<uint64_t>(v.rows()));
  add(static_cast<uint64_t>(v.row_stride));
}
void DecodeShape::add(const SequenceBatch& batch) {
  const SequenceView& q = batch.seq;
  for (const int64_t n : {q.num_tokens, q.num_sequences, q.page_tokens, q.longest}) add(static_cast<uint64_t>(n));
  for (const ConstTensorView& v : {q.token_seq, q.token_pos, q.seq_row, q.seq_pos, q.seq_slot, q.page_table, batch.tokens, batch.wanted}) add(v);
  for (const EntryView& e : batch.entries) {
    add(static_cast<uint64_t>(e.num_entries));
    for (const ConstTensorView& v : {e.seq, e.idx, e.pos, e.seq_first}) add(v);
  }
}

DecodeGraphs::Known& DecodeGraphs::find(const DecodeShape& shape, bool* is_new) {
  auto known = std::find_if(known_.begin(), known_.end(), [&](const Known& k) { return k.shape == shape; });
  *is_new = known == known_.end();
  if (*is_new) {
    if (known_.size() == kDecodeGraphsMax) known_.erase(std::min_element(known_.begin(), known_.end(), [](const Known& a, const Known& b) { return a.used < b.used; }));
    known = known_.insert(known_.end(), {.shape = shape, .graph = {}});
  }
  known->used = ++steps_;
  return *known;
}

}  // namespace lockstep
