#include "model/embedding.h"

#include "core/device.h"
#include "model/tensor_parallel.h"
#include "ops/embed/embed.h"

namespace lockstep {

void embedding_forward(Context& c, const Model& model, TensorView x, ConstTensorView tokens) {
  const ModelConfig& m = model.weights->config();
  const ConstTensorView table = model.weights->tensors().embed.rows;
  RankGroup* tp = tp_group(model);
  if (tp == nullptr) return embed(c, x, table, tokens);

  // Rows of the tokens that each rank holds, in order, rank by rank; row[t] says where token t's came to lie.
  ArenaScope scope(*c.workspace);
  const int64_t T = tokens.rows(), D = m.hidden_size;
  const TensorView rows = c.workspace->tensor(table.dtype, {T, D}, "embed.rows");
  const ArenaScope host_scope(*c.host);
  const ConstTensorView ids_of = on_host(c, tokens);
  TensorView row = c.host->tensor(DType::i32, {T}, "embed.row"), own_id = c.host->tensor(DType::i32, {T}, "embed.own_id");
  std::vector<int64_t> held;
  int64_t filled = 0, own_first = 0;
  for (int r = 0; r < tp->size(); ++r) {
    const Range ids = tp_vocabulary(m, tp->size(), r);
    const int64_t first = filled;
    if (r == tp->rank()) own_first = first;
    for (int64_t t = 0; t < T; ++t) {
      const int32_t id = ids_of.ptr<int32_t>()[t];
      if (!ids.contains(id)) continue;
      if (r == tp->rank()) own_id.ptr<int32_t>()[filled - first] = static_cast<int32_t>(id - ids.begin);
      row.ptr<int32_t>()[t] = static_cast<int32_t>(filled++);
    }
    held.push_back(filled - first);
  }
  CHECK(filled == T, "{} of {} tokens are in a vocabulary of {}", filled, T, m.vocab_size);
  row = on_device(c, row, *c.workspace);
  own_id = on_device(c, own_id, *c.workspace);
  const int64_t own = held[static_cast<size_t>(tp->rank())];
  const TensorView mine = rows.slice(own_first, own);
  if (own > 0) embed(c, mine.reshape({own, 1, D}), table, own_id.slice(0, own));
  tp->all_gather(c, rows, mine, held, kTpEmbedding);
  embed(c, x, rows, row);
}

void embedding_backward(Context& c, const Model& model, TensorView dtable_accum, ConstTensorView dx, ConstTensorView tokens) {
  if (tp_group(model) == nullptr) {
    embed_backward(c, dtable_accum, dx, tokens);
  } else {
    embed_backward_part(c, dtable_accum, model.weights->shard().vocabulary(model.weights->config()).begin, dx, tokens);
  }
}

}  // namespace lockstep
