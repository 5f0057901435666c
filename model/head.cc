#include "model/head.h"

#include <algorithm>

#include "core/device.h"
#include "model/tensor_parallel.h"
#include "ops/logprob/logprob.h"

namespace lockstep {

namespace {

// How the ranks share the vocabulary.
struct SharedVocabulary {
  Range ids;  // this rank's
  VocabPart part;
  std::vector<int64_t> sizes, chunks;  // of each rank
  int64_t own_chunks;
};
SharedVocabulary shared_vocabulary(const Model& model, const RankGroup& tp) {
  const ModelConfig& m = model.weights->config();
  SharedVocabulary v;
  for (int r = 0; r < tp.size(); ++r) {
    v.sizes.push_back(tp_vocabulary(m, tp.size(), r).size());
    v.chunks.push_back(tp_chunks(m, tp.size(), r).size());
  }
  v.ids = tp_vocabulary(m, tp.size(), tp.rank());
  v.part = {v.ids.begin, m.vocab_size};
  v.own_chunks = v.chunks[static_cast<size_t>(tp.rank())];
  return v;
}

// logits [R, ids of this rank]
void own_logits(Context& c, const Model& model, TensorView logits, ConstTensorView hidden) {
  if (logits.dim(1) > 0) matmul(c, logits, hidden, model.weights->tensors().head);
}

}  // namespace

void head_logits(Context& c, const Model& model, TensorView logits, ConstTensorView hidden) {
  RankGroup* tp = tp_group(model);
  if (tp == nullptr) return matmul(c, logits, hidden, model.weights->tensors().head);
  const SharedVocabulary v = shared_vocabulary(model, *tp);
  for (int64_t first = 0; first < hidden.rows(); first += kLogprobRowBlock) {
    const int64_t n = std::min(kLogprobRowBlock, hidden.rows() - first);
    ArenaScope scope(*c.workspace);
    const TensorView own = c.workspace->tensor(DType::f32, {n, v.ids.size()}, "head.logits");
    own_logits(c, model, own, hidden.slice(first, n));
    tp_gather_columns(c, *tp, logits.slice(first, n), own, v.sizes, kTpLogits);
  }
}

void head_logprob(Context& c, const Model& model, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                  ConstTensorView target, ConstTensorView temperature) {
  RankGroup* tp = tp_group(model);
  if (tp == nullptr) return select_logprob(c, logprob, lse, entropy, hidden, model.weights->tensors().head, target, temperature);

  // The steps of select_logprob, with what each rank found of its chunks put side by side in between.
  const SharedVocabulary v = shared_vocabulary(model, *tp);
  const int64_t vocab = v.part.vocab, chunks = vocab_chunks(vocab);
  std::vector<int64_t> columns = v.chunks;
  for (int64_t& n : columns) n *= kChunkPartials;
  for (int64_t first = 0; first < hidden.rows(); first += kLogprobRowBlock) {
    const int64_t n = std::min(kLogprobRowBlock, hidden.rows() - first);
    ArenaScope scope(*c.workspace);
    Arena& ws = *c.workspace;
    const ConstTensorView targets = target.slice(first, n), temperatures = temperature.slice(first, n);
    const TensorView logits = ws.tensor(DType::f32, {n, v.ids.size()}, "head.logits");
    own_logits(c, model, logits, hidden.slice(first, n));

    const TensorView own = ws.tensor(DType::f32, {n, kChunkPartials * v.own_chunks}, "head.own_partials");
    const TensorView partials = ws.tensor(DType::f32, {n, kChunkPartials * chunks}, "head.partials");
    logprob_partials(c, own, logits, targets, temperatures, v.part);
    tp_gather_columns(c, *tp, partials, own, columns, kTpLogprob);
    const TensorView row_lse = lse.data == nullptr ? ws.tensor(DType::f32, {n}, "head.lse") : lse.slice(first, n);
    logprob_merge(c, logprob.slice(first, n), row_lse, partials, targets, vocab);

    if (entropy.data == nullptr) continue;
    const TensorView own_means = ws.tensor(DType::f32, {n, v.own_chunks}, "head.own_means");
    const TensorView means = ws.tensor(DType::f32, {n, chunks}, "head.means");
    entropy_partials(c, own_means, logits, temperatures, row_lse, v.part);
    tp_gather_columns(c, *tp, means, own_means, v.chunks, kTpLogprob);
    entropy_merge(c, entropy.slice(first, n), means, row_lse);
  }
}

void head_logprob_backward(Context& c, const Model& model, TensorView dhidden, TensorView dhead_accum, ConstTensorView dlogprob,
                           ConstTensorView dentropy, ConstTensorView hidden, ConstTensorView target, ConstTensorView temperature,
                           ConstTensorView lse, ConstTensorView entropy) {
  RankGroup* tp = tp_group(model);
  const WeightView& head = model.weights->tensors().head;
  const VocabPart part = tp == nullptr ? VocabPart() : shared_vocabulary(model, *tp).part;
  if (head.rows.empty()) {  // more ranks than chunks
    set_zero(c, dhidden);
  } else {
    select_logprob_backward(c, dhidden, dhead_accum, dlogprob, dentropy, hidden, head, target, temperature, lse, entropy, part);
  }
  if (tp != nullptr) tp->all_reduce(c, dhidden, kTpLogprobGradient);
}

}  // namespace lockstep
