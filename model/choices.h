#pragma once
// What a forward chose for a sequence, kept so that another may repeat it (rl spec 14): the experts of every row and, where sparse attention could not read
// all entries, those that it read.
//
//   experts   2 bytes each:  layers x K a row
//   entries   4 bytes each:  k a row and csa layer, of rows that see more than k; of the others it is known which
//
// Flash: 516 bytes a token; with entries 42 KB more, once it sees more than 2,048 tokens.

#include <cstdint>
#include <vector>

#include "core/tensor.h"
#include "model/config.h"

namespace lockstep {

// Which choices are kept and repeated.
enum class ReplayKind : uint8_t { none, routing, routing_index };

// Of rows 0, 1, ... of one sequence.
struct ChoiceLog {
  std::vector<uint16_t> experts;  // [rows, layers, K], ascending
  std::vector<int32_t> entries;   // by row, then csa layer: [k], ascending
  bool operator==(const ChoiceLog&) const = default;
};

class ChoiceLayout {
 public:
  ChoiceLayout(const ModelConfig& config, ReplayKind kind);
  ReplayKind kind() const { return kind_; }

  int64_t experts_of(int64_t rows) const { return kind_ == ReplayKind::none ? 0 : rows * layers_ * per_layer_; }  // numbers of so many rows
  int64_t entries_of(int64_t rows) const;
  bool holds(const ChoiceLog& log, int64_t rows) const;
  void resize(ChoiceLog& log, int64_t rows) const;

  // Rows first .. of the log, which has them: [n, K] and [n, selected columns] i32, as a layer of the forward has them.
  void put_experts(ChoiceLog& log, int64_t first, int layer, ConstTensorView ids) const;
  void get_experts(const ChoiceLog& log, int64_t first, int layer, TensorView ids) const;
  // csa layers alone. REQUIRES: ReplayKind::routing_index.
  void put_entries(ChoiceLog& log, int64_t first, int layer, ConstTensorView selected) const;
  void get_entries(const ChoiceLog& log, int64_t first, int layer, TensorView selected) const;

 private:
  int64_t entry_place(int64_t row, int layer) const;
  const ReplayKind kind_;
  const int64_t layers_, per_layer_;
  struct Sparse {
    int64_t ratio = 0, columns = 0;  // 0: not csa
    int64_t first = 0;               // row that sees more entries than columns
  };
  std::vector<Sparse> sparse_;  // by layer
};

}  // namespace lockstep
