#pragma once
// The vocabulary's side of the model: from final hidden rows to logits and log-probabilities. All ranks of a tp group call with the same
// rows; each holds whole chunks of the vocabulary, and all get the results of one rank alone, bit for bit. REQUIRES: a shard with the head.

#include "model/stack.h"

namespace lockstep {

// logits [R, V] f32 of hidden [R, D], the whole vocabulary on every rank.
void head_logits(Context& c, const Model& model, TensorView logits, ConstTensorView hidden);

// select_logprob and its backward (ops/logprob/logprob.h, which states shapes and order). dhead_accum is of the shard's rows.
void head_logprob(Context& c, const Model& model, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                  ConstTensorView target, ConstTensorView temperature);
void head_logprob_backward(Context& c, const Model& model, TensorView dhidden, TensorView dhead_accum, ConstTensorView dlogprob,
                           ConstTensorView dentropy, ConstTensorView hidden, ConstTensorView target, ConstTensorView temperature,
                           ConstTensorView lse, ConstTensorView entropy);

}  // namespace lockstep
