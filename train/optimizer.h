#pragma once
// AdamW over the tensor table: global norm, clip, step, and the rule for gradients that are not finite (rl spec 18.1, 18.4).
//
// Holds the two moments of every trained tensor and the counters; masters and gradients belong to the caller.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "model/weights.h"
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
  // `table` must outlive the optimizer.
  Optimizer(const std::vector<TensorSpec>& table, const OptimizerConfig& config);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Moments to zero, counters to zero.
  void reset();
  // One step on `masters`, whose views are those of the whole table; `gradients` has one for every trained tensor. A gradient
  // with an element that is not finite changes nothing but skipped_in_a_row.
  OptimizerStep step(Context& c, TensorSet& masters, const TensorSet& gradients);
  // sqrt of the sum of squares over distinct tensors, added in id order.
  double global_norm(Context& c, const TensorSet& gradients) const;

  TensorSet& first_moments() { return m_; }
  TensorSet& second_moments() { return v_; }
  const TensorSet& first_moments() const { return m_; }
  const TensorSet& second_moments() const { return v_; }
  int64_t steps_applied() const { return steps_applied_; }
  int64_t skipped_in_a_row() const { return skipped_in_a_row_; }
  void set_counters(int64_t steps_applied, int64_t skipped_in_a_row);
  size_t high_bytes() const { return arena_.high_bytes(); }

 private:
  const std::vector<TensorSpec>& table_;
  OptimizerConfig config_;
  Arena arena_;
  TensorSet m_, v_;
  TensorView square_;  // [1] f64
  int64_t steps_applied_ = 0;
  int64_t skipped_in_a_row_ = 0;
};

}  // namespace lockstep
