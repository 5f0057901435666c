#pragma once
// The process grid: which rank stands where, who belongs to which group, which experts and layers are whose. Pure arithmetic.
//
//   tp   ranks that share one copy of a layer's attention heads and vocabulary
//   pp   stages, each with its own layers
//   dp   ranks that hold the same stage and see different samples; dense weights are replicated over them
//   ep   ranks among which a stage's experts are spread; divides dp, so the dp ranks fall into dp / ep blocks of ep
//
// ranks = tp x pp x dp, and rank = tp_index + tp * (dp_index + dp * pp_index). The busiest exchanges (heads, then experts) are
// between neighbouring ranks, which launchers put on one machine; stages, which exchange least, are farthest apart.
//
//   tp 1, pp 2, ep 2, dp 4:      stage 0:  ranks 0 1 | 2 3     dp group 0 1 2 3, ep groups {0 1} {2 3},
//                                stage 1:  ranks 4 5 | 6 7     replicas of rank 0's experts {0 2}, chain of rank 0 {0 4}

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace lockstep {

// [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool contains(int64_t i) const { return i >= begin && i < end; }
  bool operator==(const Range&) const = default;
};

// Part `index` when `count` things are cut into `parts` contiguous parts that differ by at most one; the longer ones come first.
Range part_of(int64_t count, int parts, int index);
// The part that holds thing `i`.
int part_holding(int64_t count, int parts, int64_t i);

struct Layout {
  int tp = 1;
  int pp = 1;
  int ep = 1;
  int dp = 0;  // 0: as many as the ranks allow
  int ranks() const { return tp * pp * dp; }
  std::string str() const;  // "tp 1, pp 4, ep 4, dp 4"
  bool operator==(const Layout&) const = default;
};

// What a layout must fit.
struct LayoutLimits {
  int ranks = 1;              // that were started
  int64_t layers = 1;         // at least one a stage
  int64_t experts = 1;        // at least one a rank of an ep group
  int64_t output_groups = 1;  // of the attention's output projection; tp divides them
  const char* prefix = "";    // of the settings' names in errors: "rollout_"
};

// Every layout that fits, by tp, then pp, then ep.
std::vector<Layout> possible_layouts(const LayoutLimits& limits);

// `wanted` with dp filled in. Otherwise an error that says what does not fit and lists the nearest layouts that would.
Result<Layout> resolve_layout(const Layout& wanted, const LayoutLimits& limits);

struct Coordinates {
  int tp = 0;
  int pp = 0;
  int dp = 0;
  bool operator==(const Coordinates&) const = default;
};

class Grid {
 public:
  explicit Grid(const Layout& layout);  // a resolved one

  const Layout& layout() const { return layout_; }
  int ranks() const { return layout_.ranks(); }
  int rank_of(Coordinates at) const;
  Coordinates coordinates(int rank) const;

  // Members of the group of `rank`, ascending; `rank` is one of them.
  std::vector<int> tp_group(int rank) const;         // by tp index
  std::vector<int> pp_chain(int rank) const;         // by stage
  std::vector<int> dp_group(int rank) const;         // by dp index: reduces gradients of dense weights
  std::vector<int> ep_group(int rank) const;         // by ep index: exchanges tokens
  std::vector<int> expert_replicas(int rank) const;  // the same experts in every block: reduces gradients of experts
  // First and last stage of the chain: both hold the embedding when a draft layer behind the head reads it. Empty for ranks
  // between.
  std::vector<int> embedding_group(int rank) const;

  bool first_stage(int rank) const { return coordinates(rank).pp == 0; }              // owns the embedding
  bool last_stage(int rank) const { return coordinates(rank).pp == layout_.pp - 1; }  // owns final norm and head
  int previous_stage(int rank) const;  // the rank before this one in its chain; -1 for the first
  int next_stage(int rank) const;      // the rank behind; -1 for the last

  int ep_index(int rank) const { return coordinates(rank).dp % layout_.ep; }
  int ep_block(int rank) const { return coordinates(rank).dp / layout_.ep; }
  // Experts of every routed layer of its stage that `rank` owns, of `experts`.
  Range experts_of(int rank, int64_t experts) const { return part_of(experts, layout_.ep, ep_index(rank)); }
  // The ep index that owns an expert.
  int expert_owner(int64_t expert, int64_t experts) const { return part_holding(experts, layout_.ep, expert); }

 private:
  Layout layout_;
};

// Layers of each stage, in order, covering all.
using StageLayers = std::vector<Range>;

// From a list of layer counts, one a stage. A stage between the first and the last must hold a layer; those two hold embedding
// and head.
Result<StageLayers> split_layers(std::span<const int64_t> counts, int pp, int64_t layers);

struct StageCosts {
  std::vector<double> layers;  // one each, in any common unit
  double embedding = 0;        // on the first stage
  double head = 0;             // on the last: final norm, head and draft layers
};

// The split whose dearest stage is cheapest; among those the most even one (least sum of squares), then the one whose earlier
// stages are shortest. Every stage gets a layer. O(pp x layers^2).
StageLayers balance_layers(const StageCosts& costs, int pp);

}  // namespace lockstep
