#include "model/shard.h"

#include <algorithm>

#include "ops/logprob/logprob.h"

namespace lockstep {

namespace {

Range overlap(const Range& a, const Range& b) {
  const Range r = {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return r.begin < r.end ? r : Range();
}

template <typename View>
View as_matrix(const View& v) {
  const Box box = whole_box(v.shape);
  return v.reshape({box.rows.size(), box.columns.size()});
}

}  // namespace

Box intersect(const Box& a, const Box& b) {
  const Box box = {overlap(a.rows, b.rows), overlap(a.columns, b.columns)};
  return box.empty() ? Box() : box;
}

Box whole_box(const Shape& shape) {
  if (shape.elements() == 0) return {};
  const int64_t columns = shape.rank == 1 ? 1 : shape[shape.rank - 1];
  return {{0, shape.elements() / columns}, {0, columns}};
}

TensorView matrix_view(const TensorView& v) { return as_matrix(v); }
ConstTensorView matrix_view(const ConstTensorView& v) { return as_matrix(v); }

Range Shard::vocabulary(const ModelConfig& m) const {
  const int64_t chunk = vocab_chunk(m.vocab_size);
  const Range chunks = part_of((m.vocab_size + chunk - 1) / chunk, tp, tp_index);
  return {chunks.begin * chunk, std::min(chunks.end * chunk, m.vocab_size)};
}

Shard whole_shard(const ModelConfig& config) {
  Shard s;
  s.layers = {0, config.num_layers()};
  s.experts = {0, config.num_experts};
  return s;
}

Shard shard_of(const ModelConfig& config, const Grid& grid, const StageLayers& stages, int rank) {
  const Coordinates at = grid.coordinates(rank);
  CHECK(static_cast<int>(stages.size()) == grid.layout().pp, "{} stages for {}", stages.size(), grid.layout().str());
  Shard s;
  s.layers = stages[static_cast<size_t>(at.pp)];
  s.embedding = grid.first_stage(rank);
  s.head = grid.last_stage(rank);
  s.experts = grid.experts_of(rank, config.num_experts);
  s.tp = grid.layout().tp;
  s.tp_index = at.tp;
  return s;
}

}  // namespace lockstep
