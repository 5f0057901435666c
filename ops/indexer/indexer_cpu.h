#pragma once
// Internal to ops/indexer: the implementations. device: on the GPU, indexer_gpu.cu, with the same bits.

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

namespace device {
void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape);
}  // namespace device

}  // namespace lockstep
