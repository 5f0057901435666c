#pragma once
// attention in bf16 on Hopper's tensor cores. CUDA builds only.

#include "ops/attention/attention_gpu.h"

namespace lockstep::gpu {

// Whether the kernels take these: bf16 with 128, 256 or 512 channels, rows at multiples of 16 bytes. Nothing else decides which kernel runs.
bool attention_sm90_takes(ConstTensorView o, ConstTensorView q, const AttentionKeys& keys);
void attention_sm90(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                    const AttentionShape& shape);
// All but the sink's gradient, for which it leaves `terms` [T, H]. No list has more rows than `longest`; scratch_bytes bounds what is kept of the rows' gradients.
void attention_backward_sm90(Context& c, const AttentionBackward& v, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                             const AttentionShape& shape, AttentionSinkTerm* terms, int64_t longest, int64_t scratch_bytes);

}  // namespace lockstep::gpu
