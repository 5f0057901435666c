#include "model/head.h"

#include "ops/logprob/logprob.h"

namespace lockstep {

void head_logits(Context& c, const Model& model, TensorView logits, ConstTensorView hidden) {
  matmul(c, logits, hidden, model.weights->tensors().head);
}

void head_logprob(Context& c, const Model& model, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                  ConstTensorView target, ConstTensorView temperature) {
  select_logprob(c, logprob, lse, entropy, hidden, model.weights->tensors().head, target, temperature);
}

void head_logprob_backward(Context& c, const Model& model, TensorView dhidden, TensorView dhead_accum, ConstTensorView dlogprob,
                           ConstTensorView dentropy, ConstTensorView hidden, ConstTensorView target, ConstTensorView temperature,
                           ConstTensorView lse, ConstTensorView entropy) {
  select_logprob_backward(c, dhidden, dhead_accum, dlogprob, dentropy, hidden, model.weights->tensors().head, target, temperature, lse, entropy);
}

}  // namespace lockstep
