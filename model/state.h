#pragma once
// Layout and storage of sequence state. A slot holds what has constant size per sequence: for each layer the window ring, the compressor ring and
// the indexer's compressor ring. A page holds the compressed and index entries of page_tokens positions, for all layers. Who owns which slot and
// page is the caller's business (rollout/pages.h); training uses pages alone, with slot -1.

#include <vector>

#include "core/context.h"
#include "model/config.h"

namespace lockstep {

struct LayerState {
  TensorView window;           // [slots, w, d]                      storage dtype
  TensorView compressor_ring;  // [slots, c*m, 2*c*d]                f32; csa, hca
  TensorView entries;          // [pages * per_page, d]              storage dtype; csa, hca
  TensorView index_ring;       // [slots, 2*m, 4*di]                 f32; csa
  TensorView index_entries;    // [pages * per_page, di]             storage dtype; csa
  int64_t per_page = 0;        // entries a page
};

struct StateSize {
  size_t slot_bytes = 0;
  size_t page_bytes = 0;
};

class StatePool {
 public:
  // page_tokens: a multiple of config.page_unit().
  StatePool(const ModelConfig& config, Numerics numerics, int64_t num_slots, int64_t num_pages, int64_t page_tokens, Arena& arena);
  const LayerState& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }
  int64_t num_slots() const { return num_slots_; }
  int64_t num_pages() const { return num_pages_; }
  int64_t page_tokens() const { return page_tokens_; }
  int64_t pages_for(int64_t positions) const { return (positions + page_tokens_ - 1) / page_tokens_; }
  void copy_slot(Context& c, int64_t to, int64_t from);  // a sample that continues from a shared prompt starts with copies
  void copy_page(Context& c, int64_t to, int64_t from);
  static StateSize size(const ModelConfig& config, Numerics numerics, int64_t page_tokens);

 private:
  int64_t num_slots_, num_pages_, page_tokens_;
  std::vector<LayerState> layers_;
};

// A usual page size: the least multiple of the config's unit that is at least 64 positions.
int64_t default_page_tokens(const ModelConfig& config);

}  // namespace lockstep
