#pragma once
// Which part of the model a rank holds, and boxes, in which every part of a tensor is described.
//
// A tensor is cut as a matrix: [n] as [n, 1], [N, K] as it is, stacked experts [E, N, K] as [E * N, K]. A Box is a range of rows by a range
// of columns of the whole tensor, whoever holds it: shards, optimizer pieces, checkpoint entries and the copies of a weight update are boxes.
//
//   stages   layers of a range; the first stage also holds the embedding, the last one the final site and the head
//   ep       of every layer held, the experts of a range; what is dense is replicated
//   tp       query heads by output group (wq_b, sink and wo_a by rows, wo_b by columns) and the vocabulary of embedding and head by whole
//            chunks of its log-softmax; everything else is replicated
//
// Source: design section 5.

#include <cstdint>
#include <functional>

#include "core/status.h"
#include "core/tensor.h"
#include "model/config.h"
#include "parallel/grid.h"

namespace lockstep {

struct TensorSpec;

// Along what a tensor is cut besides its layer.
enum class Cut : uint8_t { none, experts, group_rows, group_columns, vocabulary };

struct Box {
  Range rows, columns;
  int64_t elements() const { return rows.size() * columns.size(); }
  bool empty() const { return elements() == 0; }
  bool operator==(const Box&) const = default;
};
Box intersect(const Box& a, const Box& b);  // empty boxes are all zero
// Rows and columns of a shape seen as a matrix.
Box whole_box(const Shape& shape);
// A contiguous tensor seen as a matrix.
TensorView matrix_view(const TensorView& v);
ConstTensorView matrix_view(const ConstTensorView& v);

struct Shard {
  Range layers;            // of the whole model
  bool embedding = true;
  bool head = true;        // final site, norm and head
  Range experts;           // of every routed layer held
  int tp = 1, tp_index = 0;
  bool operator==(const Shard&) const = default;

  Range groups(const ModelConfig& m) const { return part_of(m.o_groups, tp, tp_index); }
  Range heads(const ModelConfig& m) const { return scaled(groups(m), m.num_heads / m.o_groups); }
  Range vocabulary(const ModelConfig& m) const;
  static Range scaled(const Range& r, int64_t factor) { return {r.begin * factor, r.end * factor}; }
};
// All of it.
Shard whole_shard(const ModelConfig& config);
// What `rank` of the grid holds. REQUIRES: a layout that resolve_layout accepted for this config, and its stages.
Shard shard_of(const ModelConfig& config, const Grid& grid, const StageLayers& stages, int rank);

// Where tensors come from, box by box: writes the box's numbers to out [rows, columns], f32 (i32 for hash tables). `spec` is of a whole or a
// sharded table, `box` in the whole tensor.
using ReadBox = std::function<Status(const TensorSpec& spec, const Box& box, TensorView out)>;

}  // namespace lockstep
