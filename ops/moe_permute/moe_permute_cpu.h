#pragma once
// Internal to ops/moe_permute: the implementations, without argument checks. device: on the GPU, moe_permute_gpu.cu. On the CPU, copies and sums of whole
// rows, which the compiler turns into vectors by itself: element by element, so no bit depends on their width.

#include "core/context.h"

namespace lockstep::reference {

void moe_plan(Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, ConstTensorView ids);
void moe_gather(Context& c, TensorView rows, ConstTensorView x, ConstTensorView row_token);
void moe_combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared);
void moe_gather_backward(Context& c, TensorView dx_accum, ConstTensorView drows, ConstTensorView slot_row);
void moe_spread(Context& c, TensorView row_value, ConstTensorView value, ConstTensorView slot_row);
void moe_collect(Context& c, TensorView value, ConstTensorView row_value, ConstTensorView slot_row);

}  // namespace lockstep::reference

namespace lockstep::device {

void moe_plan(Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, ConstTensorView ids);
void moe_gather(Context& c, TensorView rows, ConstTensorView x, ConstTensorView row_token);
void moe_combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared);
void moe_gather_backward(Context& c, TensorView dx_accum, ConstTensorView drows, ConstTensorView slot_row);
void moe_spread(Context& c, TensorView row_value, ConstTensorView value, ConstTensorView slot_row);
void moe_collect(Context& c, TensorView value, ConstTensorView row_value, ConstTensorView slot_row);

}  // namespace lockstep::device
