#pragma once
// embed: x[t, j, :] = table[tokens[t], :] for j in [0, n): n identical residual streams.
//   table  [V, D]     f32 | bf16
//   tokens [T]        i32, every id in [0, V) (CHECK on the CPU)
//   x      [T, n, D]  dtype of table
// embed_backward: dtable_accum[tokens[t], :] += sum_j dx[t, j, :], rows of one token added in ascending t.
//   dx [T, n, D] f32; dtable_accum [V, D] f32
// embed_backward_part: the same for a table that is the rows [first, first + dtable_accum.rows()) of the vocabulary; other tokens are
//   passed over.
// Numerics: copies; backward adds in f32 in row order (deterministic). Scratch: none; on the GPU the backward's is 2 T i32.
// Source: V4 spec 2.1.

#include "core/context.h"

namespace lockstep {

void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens);
void embed_backward(Context& c, TensorView dtable_accum, ConstTensorView dx, ConstTensorView tokens);
void embed_backward_part(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens);

}  // namespace lockstep
