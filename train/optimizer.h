#pragma once
// AdamW on the pieces of the parameters that a rank owns: f32 masters, both moments, global norm, clip, step, and the rule for gradients that are not
// finite (rl spec 18.1, 18.4). The same loop serves one rank, whose pieces are whole tensors, and many.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/weights.h"
#include "train/partition.h"
#include "train/types.h"

namespace lockstep {

// Which tensors a run trains: no buffers, no router when frozen, and never the indexer, which a language-model loss does not
// reach.
bool is_trained(const TensorSpec& spec, const OptimizerConfig& config);

// Address space that make_tensor_set takes for the tensors that `wanted` accepts.
size_t tensor_set_bytes(const std::vector<TensorSpec>& table, const std::function<bool(const TensorSpec&)>& wanted);

// min(1, clip_norm / (norm + 1e-6)); 1 when clip_norm is 0.
double clip_coefficient(double norm, double clip_norm);

struct OptimizerStep {
  double grad_norm = 0;  // before clipping; not finite when the step was skipped
  double lr = 0;
  bool skipped = false;
};

class Optimizer {
 public:
  // A piece and what belongs to it, [rows, columns] each, f32.
  struct Owned {
    Piece piece;
    TensorView gradient, master, m, v;
  };
  // The master of a tensor that is held but not trained, in its own shape and dtype.
  struct Frozen {
    int id;
    TensorView master;
  };

  // `table` and `partition`, made from gradients of exactly the tensors that are trained, outlive the optimizer. `all` (null: alone): all ranks of the run.
  Optimizer(const std::vector<TensorSpec>& table, const OptimizerConfig& config, const Partition& partition, RankGroup* all, Device device = Device::cpu);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  const std::vector<Owned>& owned() const { return owned_; }
  const std::vector<Frozen>& frozen() const { return frozen_; }
  // All masters, of pieces and of frozen tensors. After an error they are unfit for use.
  Status read_masters(Context& c, const ReadBox& read) const;
  // Rounds the masters of own pieces into the rows of `weights`.
  void write_rows(Context& c, Weights& weights) const;
  ConstTensorView master(int id) const;  // of this rank's piece, [rows, columns]; empty: none

  // Moments to zero, counters to zero.
  void reset(Context& c);
  // All ranks, once gradients are summed: one step on the own masters. A gradient with an element that is not finite, on any rank, changes nothing
  // but skipped_in_a_row.
  OptimizerStep step(Context& c);
  // sqrt of the sum of squares over all distinct parameters: of own pieces in id order, then over ranks in order.
  double global_norm(Context& c) const;

  int64_t steps_applied() const { return steps_applied_; }
  int64_t skipped_in_a_row() const { return skipped_in_a_row_; }
  void set_counters(int64_t steps_applied, int64_t skipped_in_a_row);
  size_t high_bytes() const { return state_arena_.high_bytes() + frozen_arena_.high_bytes(); }
  size_t owned_bytes() const { return state_arena_.high_bytes(); }  // masters and moments of own pieces

 private:
  double squares(Context& c, const TensorView& gradient) const;

  const std::vector<TensorSpec>& table_;
  const OptimizerConfig config_;
  const Partition& partition_;
  RankGroup* const all_;
  Arena state_arena_, frozen_arena_;
  std::vector<Owned> owned_;
  std::vector<Frozen> frozen_;
  TensorView square_;  // [1] f64
  int64_t steps_applied_ = 0;
  int64_t skipped_in_a_row_ = 0;
};

}  // namespace lockstep
