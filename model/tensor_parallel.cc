#include "model/tensor_parallel.h"

#include <algorithm>
#include <numeric>

#include "core/device.h"
#include "ops/cast/cast.h"
#include "ops/logprob/logprob.h"

namespace lockstep {

namespace {

// Rows of a block of the output projection: the same on all ranks, which hold as many groups each.
int64_t output_block_rows(int64_t groups, int64_t width, int size) {
  return std::max<int64_t>(size, kTpOutputScratchBytes / (groups * width * static_cast<int64_t>(sizeof(float))));
}

// partials [ranks * n, groups * width]: n rows of each rank in turn. The sum over ranks and their groups, in order from zero, of row t is left in
// the first columns of row t.
void add_groups(Context& c, TensorView partials, int64_t n, int64_t groups, int64_t width) {
  const int64_t ranks = n == 0 ? 0 : partials.rows() / n;
  if (c.on_gpu()) {
    const ArenaScope scope(*c.workspace);
    const TensorView sum = zeros(c, DType::f32, {n, width}, "attn.sums");
    for (int64_t g = 0; g < ranks * groups; ++g) add(c, sum, partials.slice(g / groups * n, n).cols(g % groups * width, width));
    if (n > 0) cast(c, partials.slice(0, n).cols(0, width), sum);
    return;
  }
  parallel_for(c, n, ranks * groups * width / 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* sum = partials.row<float>(t);
      for (int64_t i = 0; i < width; ++i) sum[i] = 0.0f + sum[i];  // turns -0 into 0
      for (int64_t g = 1; g < ranks * groups; ++g) {
        const float* next = partials.row<float>(g / groups * n + t) + g % groups * width;
        for (int64_t i = 0; i < width; ++i) sum[i] += next[i];
      }
    }
  });
}

std::vector<int64_t> parts_of(int64_t count, int size) {
  std::vector<int64_t> parts;
  for (int r = 0; r < size; ++r) parts.push_back(part_of(count, size, r).size());
  return parts;
}

void add_to(CommBytes& sum, const CommBytes& bytes) {
  sum.sent += bytes.sent;
  sum.received += bytes.received;
}

// Rows of `columns` f32 each from every rank, in blocks as the head takes them.
CommBytes head_gather_bytes(std::span<const int64_t> columns, int64_t R, int rank) {
  return all_gather_bytes(columns, R * static_cast<int64_t>(sizeof(float)), rank);
}

}  // namespace

RankGroup* tp_group(const Model& model) {
  const Shard& shard = model.weights->shard();
  if (shard.tp == 1) return nullptr;
  CHECK(model.tp != nullptr && model.tp->size() == shard.tp && model.tp->rank() == shard.tp_index, "weights of rank {} of {} in a tp group of {}",
        shard.tp_index, shard.tp, model.tp == nullptr ? 1 : model.tp->size());
  return model.tp;
}

Range tp_vocabulary(const ModelConfig& m, int size, int index) {
  Shard shard;
  shard.tp = size;
  shard.tp_index = index;
  return shard.vocabulary(m);
}

Range tp_chunks(const ModelConfig& m, int size, int index) {
  const Range ids = tp_vocabulary(m, size, index);
  const int64_t chunk = vocab_chunk(m.vocab_size);
  return {ids.begin / chunk, (ids.end + chunk - 1) / chunk};
}

void tp_output_projection(Context& c, RankGroup& tp, TensorView y, ConstTensorView a, const WeightView& wo_b, int64_t o_rank) {
  const int64_t T = y.rows(), D = y.dim(1), groups = a.dim(1) / o_rank, block = std::min(T, output_block_rows(groups, D, tp.size()));
  ArenaScope scope(*c.workspace);
  const TensorView partials = c.workspace->tensor(DType::f32, {block, groups * D}, "attn.partials");
  const TensorView received = c.workspace->tensor(DType::f32, {part_of(block, tp.size(), 0).size() * tp.size(), groups * D}, "attn.received");
  for (int64_t first = 0; first < T; first += block) {
    const TensorView rows = y.slice(first, std::min(block, T - first)), mine = partials.slice(0, rows.rows());
    for (int64_t g = 0; g < groups; ++g)
      matmul(c, mine.cols(g * D, D), a.slice(first, rows.rows()).cols(g * o_rank, o_rank), columns_of(wo_b, g * o_rank, o_rank));
    // Every rank sums and rounds its share of the rows.
    const std::vector<int64_t> shares = parts_of(rows.rows(), tp.size());
    const Range own = part_of(rows.rows(), tp.size(), tp.rank());
    const std::vector<int64_t> own_of_each(static_cast<size_t>(tp.size()), own.size());
    const TensorView all = received.slice(0, own.size() * tp.size()), own_rows = rows.slice(own.begin, own.size());
    tp.all_to_all(c, all, own_of_each, mine, shares, kTpAttentionOutput);
    add_groups(c, all, own.size(), groups, D);
    cast(c, own_rows, all.slice(0, own.size()).cols(0, D));
    tp.all_gather(c, rows, own_rows, shares, kTpAttentionOutput);
  }
}

void tp_gather_columns(Context& c, RankGroup& tp, TensorView y, ConstTensorView x, std::span<const int64_t> columns, Purpose p) {
  const int64_t R = y.rows(), W = y.dim(1);
  CHECK(std::accumulate(columns.begin(), columns.end(), int64_t{0}) == W && x.shape == (Shape{R, columns[static_cast<size_t>(tp.rank())]}),
        "{} columns of rank {} for {}", x.shape.str(), tp.rank(), y.shape.str());
  if (R == 0) return;
  ArenaScope scope(*c.workspace);
  const TensorView flat = R == 1 ? y.reshape({W}) : c.workspace->tensor(DType::f32, {R * W}, "tp.columns");
  std::vector<int64_t> counts(columns.begin(), columns.end());
  for (int64_t& n : counts) n *= R;
  tp.all_gather(c, flat, x.reshape({x.shape.elements()}), counts, p);
  if (R == 1) return;
  int64_t at = 0;
  for (const int64_t n : columns) {
    if (n > 0) cast(c, y.cols(at, n), TensorView(flat.ptr<float>() + at * R, DType::f32, {R, n}));
    at += n;
  }
}

CommBytes tp_embedding_bytes(const ModelConfig& m, DType dtype, std::span<const int64_t> tokens, int rank) {
  return all_gather_bytes(tokens, m.hidden_size * static_cast<int64_t>(dtype_bytes(dtype)), rank);
}

CommBytes tp_entries_bytes(const ModelConfig& m, int64_t ratio, int64_t T, int size, int rank) {
  return all_gather_bytes(parts_of(T, size), m.selected_columns(ratio) * static_cast<int64_t>(sizeof(int32_t)), rank);
}

CommBytes tp_attention_output_bytes(const ModelConfig& m, DType dtype, int64_t T, int size, int rank) {
  CommBytes bytes;
  if (size == 1) return bytes;
  const int64_t D = m.hidden_size, groups = m.o_groups / size, block = output_block_rows(groups, D, size);
  for (int64_t first = 0; first < T; first += block) {
    const std::vector<int64_t> shares = parts_of(std::min(block, T - first), size);
    const std::vector<int64_t> own(static_cast<size_t>(size), shares[static_cast<size_t>(rank)]);
    add_to(bytes, all_to_all_bytes(own, shares, groups * D * static_cast<int64_t>(sizeof(float)), rank));
    add_to(bytes, all_gather_bytes(shares, D * static_cast<int64_t>(dtype_bytes(dtype)), rank));
  }
  return bytes;
}

int64_t tp_attention_output_calls(const ModelConfig& m, int64_t T, int size) {
  if (size == 1) return 0;
  const int64_t block = output_block_rows(m.o_groups / size, m.hidden_size, size);
  return 2 * ((T + block - 1) / block);
}

CommBytes tp_attention_gradient_bytes(const ModelConfig& m, int64_t T, int64_t entries, int size, int rank) {
  return size == 1 ? CommBytes() : all_reduce_bytes(T * (m.q_rank + m.head_dim) + entries * m.head_dim, DType::f32, size, rank);
}

CommBytes tp_logits_bytes(const ModelConfig& m, int64_t R, int size, int rank) {
  std::vector<int64_t> columns;
  for (int r = 0; r < size; ++r) columns.push_back(tp_vocabulary(m, size, r).size());
  return head_gather_bytes(columns, R, rank);
}

CommBytes tp_logprob_bytes(const ModelConfig& m, int64_t R, bool entropy, int size, int rank) {
  std::vector<int64_t> columns;
  for (int r = 0; r < size; ++r) columns.push_back(tp_chunks(m, size, r).size() * (kChunkPartials + (entropy ? 1 : 0)));
  return head_gather_bytes(columns, R, rank);
}

CommBytes tp_logprob_gradient_bytes(const ModelConfig& m, int64_t R, int size, int rank) {
  return size == 1 ? CommBytes() : all_reduce_bytes(R * m.hidden_size, DType::f32, size, rank);
}

}  // namespace lockstep
