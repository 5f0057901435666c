#pragma once
// The embedding of a stage's first streams. Ranks of a tp group hold rows of the vocabulary each: whoever holds a token brings its row.
// REQUIRES: a shard with the embedding.

#include "model/stack.h"

namespace lockstep {

// x [T, n, D] = n copies of each token's row, in storage dtype; tokens [T] i32. Scratch with tp: [T, D].
void embedding_forward(Context& c, const Model& model, TensorView x, ConstTensorView tokens);
// dtable_accum: of the shard's rows, which get the gradients of their tokens from dx [T, n, D] f32. Nothing travels.
void embedding_backward(Context& c, const Model& model, TensorView dtable_accum, ConstTensorView dx, ConstTensorView tokens);

}  // namespace lockstep
