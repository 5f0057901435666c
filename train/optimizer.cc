#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/log.h"
#include "ops/adamw/adamw.h"
#include "train/schedule.h"

namespace lockstep {

bool is_trained(const TensorSpec& spec, const OptimizerConfig& config) {
  return !spec.is_buffer() && !spec.indexer && !(config.freeze_router && spec.role == TensorRole::router);
}

size_t tensor_set_bytes(const std::vector<TensorSpec>& table, const std::function<bool(const TensorSpec&)>& wanted) {
  size_t bytes = 0;
  for (const TensorSpec& spec : table)
    if (wanted(spec)) bytes += Arena::footprint(static_cast<size_t>(spec.shape.elements()) * sizeof(float));
  return bytes;
}

double clip_coefficient(double norm, double clip_norm) { return clip_norm > 0 ? std::min(1.0, clip_norm / (norm + 1e-6)) : 1.0; }

Optimizer::Optimizer(const std::vector<TensorSpec>& table, const OptimizerConfig& config)
    : table_(table), config_(config),
      arena_("optimizer", 2 * tensor_set_bytes(table, [&](const TensorSpec& s) { return is_trained(s, config); }) + 4096) {
  const auto trained = [&](const TensorSpec& s) { return is_trained(s, config_); };
  m_ = make_tensor_set(table_, arena_, trained);
  v_ = make_tensor_set(table_, arena_, trained);
  square_ = arena_.tensor(DType::f64, {1}, "sum of squares");
  arena_.seal();
}

void Optimizer::reset() {
  for (const TensorSet* set : {&m_, &v_})
    for (const TensorView& view : set->views)
      if (!view.empty()) std::memset(view.data, 0, view.bytes());
  set_counters(0, 0);
}

void Optimizer::set_counters(int64_t steps_applied, int64_t skipped_in_a_row) {
  CHECK(steps_applied >= 0 && skipped_in_a_row >= 0, "{} steps, {} skipped", steps_applied, skipped_in_a_row);
  steps_applied_ = steps_applied;
  skipped_in_a_row_ = skipped_in_a_row;
}

double Optimizer::global_norm(Context& c, const TensorSet& gradients) const {
  double sum = 0;
  for (const TensorView& g : gradients.views) {
    if (g.empty()) continue;
    sum_squares(c, square_, g);
    sum += *square_.ptr<double>();
  }
  return std::sqrt(sum);
}

OptimizerStep Optimizer::step(Context& c, TensorSet& masters, const TensorSet& gradients) {
  CHECK(masters.views.size() == table_.size() && gradients.views.size() == table_.size(),
        "{} masters and {} gradients of {} tensors", masters.views.size(), gradients.views.size(), table_.size());
  OptimizerStep result{.grad_norm = global_norm(c, gradients), .lr = learning_rate(config_, steps_applied_)};

  // A sum of squares is finite only if every element is (one so large that its square overflows f32 counts as lost, too).
  if (!std::isfinite(result.grad_norm)) {
    result.skipped = true;
    ++skipped_in_a_row_;
    for (size_t i = 0; i < table_.size(); ++i) {
      if (gradients.views[i].empty()) continue;
      sum_squares(c, square_, gradients.views[i]);
      if (std::isfinite(*square_.ptr<double>())) continue;
      log_warn("optimizer: gradient of {} is not finite; step skipped, {} in a row", table_[i].name, skipped_in_a_row_);
      break;
    }
    return result;
  }

  skipped_in_a_row_ = 0;
  ++steps_applied_;
  const double t = static_cast<double>(steps_applied_);
  AdamWStep s{.lr = static_cast<float>(result.lr), .beta1 = config_.beta1, .beta2 = config_.beta2, .eps = config_.eps};
  s.bias1 = static_cast<float>(1.0 - std::pow(static_cast<double>(config_.beta1), t));
  s.bias2 = static_cast<float>(1.0 - std::pow(static_cast<double>(config_.beta2), t));
  s.grad_scale = static_cast<float>(clip_coefficient(result.grad_norm, config_.clip_norm));
  for (size_t i = 0; i < table_.size(); ++i) {
    if (m_.views[i].empty()) continue;
    CHECK(!gradients.views[i].empty(), "{} is trained but has no gradient", table_[i].name);
    s.weight_decay = table_[i].shape.rank > 1 ? config_.weight_decay : 0.0f;  // gains, biases, sinks and scales do not decay
    adamw(c, masters.views[i], m_.views[i], v_.views[i], gradients.views[i], s);
  }
  return result;
}

}  // namespace lockstep
