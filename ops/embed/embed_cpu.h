#pragma once
// Internal to ops/embed: the implementations, without argument checks. Same bits. device: on the GPU, embed_gpu.cu.

#include "ops/embed/embed.h"

namespace lockstep {

namespace reference {
void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens);
void embed_backward(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens);
}  // namespace reference

namespace device {
void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens);
void embed_backward(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens);
}  // namespace device

}  // namespace lockstep
