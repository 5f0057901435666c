#pragma once
// Internal to ops/sequence: the copies behind the checked entry points.

#include "ops/sequence/sequence.h"

namespace lockstep::reference {

void ring_update(Context& c, TensorView ring, ConstTensorView x, const SequenceView& seq);
void entries_scatter(Context& c, TensorView store, ConstTensorView x, const EntryView& entries, const SequenceView& seq,
                     int64_t per_page);
void entries_gather(Context& c, TensorView x, ConstTensorView store, const EntryView& entries, const SequenceView& seq,
                    int64_t per_page);

}  // namespace lockstep::reference
