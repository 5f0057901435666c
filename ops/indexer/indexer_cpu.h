#pragma once
// Internal to ops/indexer: the two CPU implementations.

#include "ops/indexer/indexer.h"

namespace lockstep {

namespace reference {
void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape);
}  // namespace reference

namespace simd {
void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape);
}  // namespace simd

}  // namespace lockstep
