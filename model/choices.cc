#include "model/choices.h"

#include <algorithm>
#include <numeric>

namespace lockstep {

ChoiceLayout::ChoiceLayout(const ModelConfig& config, ReplayKind kind)
    : kind_(kind), layers_(config.num_layers()), per_layer_(config.experts_per_token), sparse_(static_cast<size_t>(layers_)) {
  CHECK(config.num_experts <= 65536, "{} experts do not fit into 16 bits", config.num_experts);
  for (size_t i = 0; i < sparse_.size(); ++i) {
    const LayerConfig& l = config.layers[i];
    if (kind != ReplayKind::routing_index || l.attention != AttentionKind::csa) continue;
    const int64_t columns = config.selected_columns(l.ratio);
    sparse_[i] = {.ratio = l.ratio, .columns = columns, .first = (columns + 1) * l.ratio - 1};  // row p sees (p + 1) / ratio entries
  }
}

int64_t ChoiceLayout::entries_of(int64_t rows) const {
  int64_t n = 0;
  for (const Sparse& s : sparse_) n += s.columns * std::max<int64_t>(0, rows - s.first);
  return n;
}

int64_t ChoiceLayout::entry_place(int64_t row, int layer) const {
  int64_t n = entries_of(row);
  for (int i = 0; i < layer; ++i)
    if (const Sparse& s = sparse_[static_cast<size_t>(i)]; row >= s.first) n += s.columns;
  return n;
}

bool ChoiceLayout::holds(const ChoiceLog& log, int64_t rows) const {
  return static_cast<int64_t>(log.experts.size()) == experts_of(rows) && static_cast<int64_t>(log.entries.size()) == entries_of(rows);
}

void ChoiceLayout::resize(ChoiceLog& log, int64_t rows) const {
  log.experts.resize(static_cast<size_t>(experts_of(rows)));
  log.entries.resize(static_cast<size_t>(entries_of(rows)));
}

void ChoiceLayout::put_experts(ChoiceLog& log, int64_t first, int layer, ConstTensorView ids) const {
  for (int64_t r = 0; r < ids.rows(); ++r) {
    uint16_t* const to = log.experts.data() + experts_of(first + r) + layer * per_layer_;
    for (int64_t k = 0; k < per_layer_; ++k) to[k] = static_cast<uint16_t>(ids.ptr<int32_t>()[r * per_layer_ + k]);
  }
}

void ChoiceLayout::get_experts(const ChoiceLog& log, int64_t first, int layer, TensorView ids) const {
  for (int64_t r = 0; r < ids.rows(); ++r) {
    const uint16_t* const from = log.experts.data() + experts_of(first + r) + layer * per_layer_;
    std::copy_n(from, per_layer_, ids.ptr<int32_t>() + r * per_layer_);
  }
}

void ChoiceLayout::put_entries(ChoiceLog& log, int64_t first, int layer, ConstTensorView selected) const {
  const Sparse& s = sparse_[static_cast<size_t>(layer)];
  CHECK_EQ(selected.dim(1), s.columns);
  for (int64_t r = std::max<int64_t>(0, s.first - first); r < selected.rows(); ++r)
    std::copy_n(selected.ptr<int32_t>() + r * s.columns, s.columns, log.entries.data() + entry_place(first + r, layer));
}

void ChoiceLayout::get_entries(const ChoiceLog& log, int64_t first, int layer, TensorView selected) const {
  const Sparse& s = sparse_[static_cast<size_t>(layer)];
  CHECK_EQ(selected.dim(1), s.columns);
  for (int64_t r = 0; r < selected.rows(); ++r) {
    int32_t* const to = selected.ptr<int32_t>() + r * s.columns;
    if (first + r >= s.first) {
      std::copy_n(log.entries.data() + entry_place(first + r, layer), s.columns, to);
      continue;
    }
    const int64_t visible = (first + r + 1) / s.ratio;  // all of them
    std::iota(to, to + visible, 0);
    std::fill(to + visible, to + s.columns, -1);
  }
}

}  // namespace lockstep
