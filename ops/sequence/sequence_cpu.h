#pragma once
// Internal to ops/sequence: the copies behind the checked entry points. device: on the GPU, sequence_gpu.cu.

#include "ops/sequence/sequence.h"

namespace lockstep {

namespace reference {

void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq);
void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq,
                     int64_t per_page);
void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq,
                    int64_t per_page);

}  // namespace reference

namespace device {
void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq);
void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq, int64_t per_page);
void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq, int64_t per_page);
SequenceView slice_rows(Context& c, const SequenceView& seq, int64_t begin, int64_t count, Arena& arena);
}  // namespace device

}  // namespace lockstep
