#pragma once
// Bringing rows to experts and back. R = T * K: every (token, slot) is its own row, rows sorted by expert, then token, then slot.
// moe_plan:    offsets [E + 1] i32 (rows of expert e are [offsets[e], offsets[e+1])), row_token [R] i32, slot_row [T, K] i32,
//              from ids [T, K] i32 in [0, E) (CHECK, on the CPU)
// moe_gather:  rows[r, :] = x[row_token[r], :]                       rows [R, D], x [T, D] of one dtype (f32 | bf16)
// moe_combine: y[t, :] = round(((0 + rows[slot_row[t, 0]]) + rows[slot_row[t, 1]] + ...) + shared[t, :])   all of one dtype
// moe_gather_backward: dx_accum[t, :] += sum over slots in order of drows[slot_row[t, k], :]   f32; the sum from zero, then added
// moe_spread / moe_collect: row_value[slot_row[t, k]] = value[t, k] and back   f32 (routing weights, their gradient)
// The backward of moe_combine is drows = moe_gather(dy), dshared = dy.
// Numerics: f32 accumulation from zero in slot order (= ascending expert id), then the shared expert, one rounding. The row
// contract holds.
// Every matrix may be a view of a wider one. Indices are trusted to come from moe_plan.
// Scratch: moe_plan takes E counters, on the GPU up to 256 E. Source: V4 spec 2.8; design "MoE" row of the row contract.

#include "core/context.h"

namespace lockstep {

void moe_plan(Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, ConstTensorView ids);
void moe_gather(Context& c, TensorView rows, ConstTensorView x, ConstTensorView row_token);
void moe_combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared);
void moe_gather_backward(Context& c, TensorView dx_accum, ConstTensorView drows, ConstTensorView slot_row);
void moe_spread(Context& c, TensorView row_value, ConstTensorView value, ConstTensorView slot_row);
void moe_collect(Context& c, TensorView value, ConstTensorView row_value, ConstTensorView slot_row);

}  // namespace lockstep
