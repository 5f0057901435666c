#include "model/state.h"

#include "core/device.h"

namespace lockstep {

namespace {

struct LayerShape {
  int64_t window_row = 0, compressor_row = 0, compressor_rows = 0, entry_row = 0;
  int64_t index_row = 0, index_rows = 0, index_entry_row = 0, per_page = 0;
};

LayerShape layer_shape(const ModelConfig& m, const LayerConfig& l, int64_t page_tokens) {
  LayerShape s;
  s.window_row = m.head_dim;
  if (!l.compressed()) return s;
  const int64_t halves = l.overlap() ? 2 : 1;
  s.compressor_rows = halves * l.ratio;
  s.compressor_row = 2 * halves * m.head_dim;
  s.entry_row = m.head_dim;
  s.per_page = page_tokens / l.ratio;
  if (l.attention == AttentionKind::csa) {
    s.index_rows = halves * l.ratio;
    s.index_row = 2 * halves * m.index_head_dim;
    s.index_entry_row = m.index_head_dim;
  }
  return s;
}

void copy_rows(Context& c, const TensorView& v, int64_t to, int64_t from, int64_t count) {
  if (!v.empty()) copy(c, v.slice(to * count, count), v.slice(from * count, count));
}

}  // namespace

StatePool::StatePool(const ModelConfig& config, Numerics numerics, int64_t num_slots, int64_t num_pages, int64_t page_tokens, Arena& arena)
    : num_slots_(num_slots), num_pages_(num_pages), page_tokens_(page_tokens) {
  CHECK(page_tokens > 0 && page_tokens % config.page_unit() == 0, "page of {} positions, unit {}", page_tokens, config.page_unit());
  const DType dtype = storage_dtype(numerics);
  for (const LayerConfig& l : config.layers) {
    const LayerShape s = layer_shape(config, l, page_tokens);
    LayerState state;
    state.per_page = s.per_page;
    state.window = arena.tensor(dtype, {num_slots, config.window, s.window_row}, "state.window");
    if (l.compressed()) state.compressor_ring = arena.tensor(DType::f32, {num_slots, s.compressor_rows, s.compressor_row}, "state.compressor_ring");
    if (s.index_rows > 0) state.index_ring = arena.tensor(DType::f32, {num_slots, s.index_rows, s.index_row}, "state.index_ring");
    if (l.compressed()) state.entries = arena.tensor(dtype, {num_pages * s.per_page, s.entry_row}, "state.entries");
    if (s.index_entry_row > 0) state.index_entries = arena.tensor(dtype, {num_pages * s.per_page, s.index_entry_row}, "state.index_entries");
    layers_.push_back(state);
  }
}

void StatePool::copy_slot(Context& c, int64_t to, int64_t from) {
  for (const LayerState& l : layers_) {
    copy_rows(c, l.window, to, from, 1);
    copy_rows(c, l.compressor_ring, to, from, 1);
    copy_rows(c, l.index_ring, to, from, 1);
  }
}

void StatePool::copy_page(Context& c, int64_t to, int64_t from) {
  for (const LayerState& l : layers_) {
    copy_rows(c, l.entries, to, from, l.per_page);
    copy_rows(c, l.index_entries, to, from, l.per_page);
  }
}

StateSize StatePool::size(const ModelConfig& config, Numerics numerics, int64_t page_tokens) {
  const size_t element = dtype_bytes(storage_dtype(numerics));
  StateSize size;
  for (const LayerConfig& l : config.layers) {
    const LayerShape s = layer_shape(config, l, page_tokens);
    size.slot_bytes += static_cast<size_t>(config.window * s.window_row) * element +
                       static_cast<size_t>(s.compressor_rows * s.compressor_row + s.index_rows * s.index_row) * sizeof(float);
    size.page_bytes += static_cast<size_t>(s.per_page * (s.entry_row + s.index_entry_row)) * element;
  }
  return size;
}

int64_t default_page_tokens(const ModelConfig& config) {
  const int64_t unit = config.page_unit();
  return (64 + unit - 1) / unit * unit;
}

}  // namespace lockstep
