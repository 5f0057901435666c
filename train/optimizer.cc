#include "train/optimizer.h"

#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "core/log.h"
#include "ops/adamw/adamw.h"
#include "ops/cast/cast.h"
#include "train/schedule.h"

namespace lockstep {

bool is_trained(const TensorSpec& spec, const OptimizerConfig& config) {
  return !spec.is_buffer() && !spec.indexer && !(config.freeze_router && spec.role == TensorRole::router);
}

size_t tensor_set_bytes(const std::vector<TensorSpec>& table, const std::function<bool(const TensorSpec&)>& wanted) {
  size_t bytes = 0;
  for (const TensorSpec& spec : table)
    if (spec.held() && wanted(spec)) bytes += Arena::footprint(static_cast<size_t>(spec.shape.elements()) * sizeof(float));
  return bytes;
}

double clip_coefficient(double norm, double clip_norm) { return clip_norm > 0 ? std::min(1.0, clip_norm / (norm + 1e-6)) : 1.0; }

namespace {

size_t owned_footprint(const Partition& partition) {
  size_t bytes = Arena::footprint(sizeof(double));
  for (const Piece& p : partition.own()) bytes += 3 * Arena::footprint(static_cast<size_t>(p.elements.size()) * sizeof(float));
  return bytes;
}

}  // namespace

Optimizer::Optimizer(const std::vector<TensorSpec>& table, const OptimizerConfig& config, const Partition& partition, RankGroup* all, Device device)
    : table_(table), config_(config), partition_(partition), all_(all), state_arena_("masters and moments", owned_footprint(partition), device),
      frozen_arena_("frozen masters", tensor_set_bytes(table, [&](const TensorSpec& s) { return !is_trained(s, config); }), device) {
  std::vector<bool> owned(table.size());
  for (const Piece& piece : partition.own()) {
    const TensorSpec& spec = table_[static_cast<size_t>(piece.id)];
    CHECK(is_trained(spec, config_), "{} has a gradient but is not trained", spec.name);
    const TensorView gradient = partition.gradient(piece);
    const auto zeros = [&] { return state_arena_.zeros(DType::f32, gradient.shape, spec.name); };
    owned_.push_back({.piece = piece, .gradient = gradient, .master = zeros(), .m = zeros(), .v = zeros()});
  }
  square_ = state_arena_.tensor(DType::f64, {1}, "sum of squares");
  for (const TensorSpec& spec : table_)
    if (spec.held() && !is_trained(spec, config_)) frozen_.push_back({spec.id, frozen_arena_.zeros(spec.master_dtype(), spec.shape, spec.name)});
  state_arena_.seal();
  frozen_arena_.seal();
}

Status Optimizer::read_masters(Context& c, const ReadBox& read) const {
  for (const Owned& o : owned_)
    LOCKSTEP_RETURN_IF_ERROR(fill_on_host(c, o.master, [&](TensorView v) { return read(table_[static_cast<size_t>(o.piece.id)], o.piece.box, v); }));
  for (const Frozen& f : frozen_) {
    const TensorSpec& spec = table_[static_cast<size_t>(f.id)];
    LOCKSTEP_RETURN_IF_ERROR(fill_on_host(c, f.master, [&](TensorView v) { return read(spec, spec.box, matrix_view(v)); }));
  }
  return Status::ok();
}

void Optimizer::write_rows(Context& c, Weights& weights) const {
  for (const Owned& o : owned_) {
    if (!weights.scales(o.piece.id).empty()) continue;
    const TensorView rows = matrix_view(weights.rows(o.piece.id));
    cast(c, rows.slice(o.piece.rows.begin, o.piece.rows.size()), o.master);
  }
}

ConstTensorView Optimizer::master(int id) const {
  for (const Owned& o : owned_)
    if (o.piece.id == id) return o.master;
  return {};
}

void Optimizer::reset(Context& c) {
  for (const Owned& o : owned_)
    for (const TensorView& moment : {o.m, o.v}) set_zero(c, moment);
  set_counters(0, 0);
}

void Optimizer::set_counters(int64_t steps_applied, int64_t skipped_in_a_row) {
  CHECK(steps_applied >= 0 && skipped_in_a_row >= 0, "{} steps, {} skipped", steps_applied, skipped_in_a_row);
  steps_applied_ = steps_applied;
  skipped_in_a_row_ = skipped_in_a_row;
}

double Optimizer::squares(Context& c, const TensorView& gradient) const {
  const ConstTensorView one = gradient;
  sum_squares(c, square_, {&one, 1});
  double sum = 0;
  download(c, TensorView(&sum, DType::f64, {1}), square_);
  return sum;
}

double Optimizer::global_norm(Context& c) const {
  // Each piece's sum has its own place, so that a GPU is waited for once.
  const ArenaScope scope(*c.workspace), host_scope(*c.host);
  std::vector<ConstTensorView> gradients;
  for (const Owned& o : owned_)
    if (partition_.counts(table_[static_cast<size_t>(o.piece.id)])) gradients.push_back(o.gradient);
  const auto n = static_cast<int64_t>(gradients.size());
  const TensorView sums = c.workspace->tensor(DType::f64, {n}, "sums of squares");
  sum_squares(c, sums, gradients);
  const ConstTensorView found = on_host(c, sums);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += found.ptr<double>()[i];
  Context host = c.on_host();
  if (all_ != nullptr) all_->all_reduce(host, TensorView(&sum, DType::f64, {1}), "gradient norm");
  return std::sqrt(sum);
}

OptimizerStep Optimizer::step(Context& c) {
  OptimizerStep result{.grad_norm = global_norm(c), .lr = learning_rate(config_, steps_applied_)};

  // A sum of squares is finite only if every element is (one so large that its square overflows f32 counts as lost, too).
  if (!std::isfinite(result.grad_norm)) {
    result.skipped = true;
    ++skipped_in_a_row_;
    const auto lost = std::find_if(owned_.begin(), owned_.end(), [&](const Owned& o) { return !std::isfinite(squares(c, o.gradient)); });
    if (lost != owned_.end()) {
      log_warn("optimizer: gradient of {} is not finite; step skipped, {} in a row", table_[static_cast<size_t>(lost->piece.id)].name,
               skipped_in_a_row_);
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
  for (const Owned& o : owned_) {
    // Gains, biases, sinks and scales do not decay.
    s.weight_decay = table_[static_cast<size_t>(o.piece.id)].shape.rank > 1 ? config_.weight_decay : 0.0f;
    adamw(c, o.master, o.m, o.v, o.gradient, s);
  }
  return result;
}

}  // namespace lockstep
