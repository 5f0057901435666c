#include "parallel/grid.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep {

namespace {

constexpr size_t kLayoutsListed = 5;

// Why `l` cannot be; empty if it can.
std::string misfit(const Layout& l, const LayoutLimits& limits) {
  const int64_t ranks = int64_t{l.tp} * l.pp * l.dp;
  const char* p = limits.prefix;
  if (ranks != limits.ranks) {
    return fmt::format("{}tp {} x {}pp {} x {}dp {} is {} ranks, but {} {} started", p, l.tp, p, l.pp, p, l.dp, ranks, limits.ranks,
                       limits.ranks == 1 ? "was" : "were");
  }
  if (l.dp % l.ep != 0) return fmt::format("{}ep {} does not divide {}dp {}", p, l.ep, p, l.dp);
  if (l.pp > limits.layers) return fmt::format("{}pp {} stages for {} layers", p, l.pp, limits.layers);
  if (l.ep > limits.experts) return fmt::format("{}ep {} ranks for {} experts", p, l.ep, limits.experts);
  if (limits.output_groups % l.tp != 0)
    return fmt::format("{}tp {} does not divide the {} output groups of attention", p, l.tp, limits.output_groups);
  return {};
}

// How far apart two layouts are: doublings and halvings that lead from one to the other. A dp left open costs nothing.
double distance(const Layout& a, const Layout& b) {
  const auto steps = [](int x, int y) { return std::abs(std::log2(static_cast<double>(x) / y)); };
  return steps(a.tp, b.tp) + steps(a.pp, b.pp) + steps(a.ep, b.ep) + (a.dp == 0 ? 0.0 : steps(a.dp, b.dp));
}

std::string nearest(const Layout& wanted, const LayoutLimits& limits) {
  std::vector<Layout> all = possible_layouts(limits);
  std::stable_sort(all.begin(), all.end(),
                   [&](const Layout& a, const Layout& b) { return distance(wanted, a) < distance(wanted, b); });
  if (all.size() > kLayoutsListed) all.resize(kLayoutsListed);
  std::string text;
  const char* p = limits.prefix;
  for (const Layout& l : all) text += fmt::format("\n  {}tp {}, {}pp {}, {}ep {}, {}dp {}", p, l.tp, p, l.pp, p, l.ep, p, l.dp);
  return text;
}

}  // namespace

Range part_of(int64_t count, int parts, int index) {
  CHECK(count >= 0 && parts >= 1 && index >= 0 && index < parts, "part {} of {} parts of {}", index, parts, count);
  const int64_t size = count / parts, longer = count % parts;
  const int64_t begin = index * size + std::min<int64_t>(index, longer);
  return {begin, begin + size + (index < longer ? 1 : 0)};
}

int part_holding(int64_t count, int parts, int64_t i) {
  CHECK(parts >= 1 && i >= 0 && i < count, "thing {} of {}", i, count);
  const int64_t size = count / parts, longer = count % parts;
  const int64_t in_longer = longer * (size + 1);
  return static_cast<int>(i < in_longer ? i / (size + 1) : longer + (i - in_longer) / size);
}

std::string Layout::str() const { return fmt::format("tp {}, pp {}, ep {}, dp {}", tp, pp, ep, dp); }

std::vector<Layout> possible_layouts(const LayoutLimits& limits) {
  std::vector<Layout> found;
  const auto consider = [&](Layout l) {
    if (misfit(l, limits).empty()) found.push_back(l);
  };
  for (int tp = 1; tp <= limits.ranks; ++tp) {
    if (limits.ranks % tp != 0) continue;
    for (int pp = 1; pp <= limits.ranks / tp; ++pp) {
      if (limits.ranks / tp % pp != 0) continue;
      const int dp = limits.ranks / tp / pp;
      for (int ep = 1; ep <= dp; ++ep) consider({tp, pp, ep, dp});
    }
  }
  return found;
}

Result<Layout> resolve_layout(const Layout& wanted, const LayoutLimits& limits) {
  CHECK_GE(limits.ranks, 1);
  const char* p = limits.prefix;
  if (wanted.tp < 1 || wanted.pp < 1 || wanted.ep < 1 || wanted.dp < 0)
    return errorf("parallel: {}: {}tp, {}pp and {}ep must be at least 1, {}dp at least 1 or 0 for what the ranks allow", wanted.str(), p, p, p, p);
  Layout layout = wanted;
  std::string why;
  if (layout.dp == 0) {
    const int64_t others = int64_t{layout.tp} * layout.pp;
    if (limits.ranks % others != 0)
      why = fmt::format("{}tp {} x {}pp {} = {} does not divide the {} ranks that were started", p, layout.tp, p, layout.pp, others,
                        limits.ranks);
    else
      layout.dp = static_cast<int>(limits.ranks / others);
  }
  if (why.empty()) why = misfit(layout, limits);
  if (why.empty()) return layout;
  return errorf("parallel: {}; nearest layouts for {} rank{}:{}", why, limits.ranks, limits.ranks == 1 ? "" : "s",
                nearest(wanted, limits));
}

Grid::Grid(const Layout& layout) : layout_(layout) {
  CHECK(layout.tp >= 1 && layout.pp >= 1 && layout.ep >= 1 && layout.dp >= 1 && layout.dp % layout.ep == 0, "{}", layout.str());
}

int Grid::rank_of(Coordinates at) const {
  CHECK(at.tp >= 0 && at.tp < layout_.tp && at.pp >= 0 && at.pp < layout_.pp && at.dp >= 0 && at.dp < layout_.dp,
        "tp {}, pp {}, dp {} in {}", at.tp, at.pp, at.dp, layout_.str());
  return at.tp + layout_.tp * (at.dp + layout_.dp * at.pp);
}

Coordinates Grid::coordinates(int rank) const {
  CHECK(rank >= 0 && rank < ranks(), "rank {} of {}", rank, ranks());
  return {rank % layout_.tp, rank / (layout_.tp * layout_.dp), rank / layout_.tp % layout_.dp};
}

std::vector<int> Grid::tp_group(int rank) const {
  Coordinates at = coordinates(rank);
  std::vector<int> members;
  for (at.tp = 0; at.tp < layout_.tp; ++at.tp) members.push_back(rank_of(at));
  return members;
}

std::vector<int> Grid::pp_chain(int rank) const {
  Coordinates at = coordinates(rank);
  std::vector<int> members;
  for (at.pp = 0; at.pp < layout_.pp; ++at.pp) members.push_back(rank_of(at));
  return members;
}

std::vector<int> Grid::dp_group(int rank) const {
  Coordinates at = coordinates(rank);
  std::vector<int> members;
  for (at.dp = 0; at.dp < layout_.dp; ++at.dp) members.push_back(rank_of(at));
  return members;
}

std::vector<int> Grid::ep_group(int rank) const {
  Coordinates at = coordinates(rank);
  const int first = ep_block(rank) * layout_.ep;
  std::vector<int> members;
  for (at.dp = first; at.dp < first + layout_.ep; ++at.dp) members.push_back(rank_of(at));
  return members;
}

std::vector<int> Grid::expert_replicas(int rank) const {
  Coordinates at = coordinates(rank);
  std::vector<int> members;
  for (at.dp = ep_index(rank); at.dp < layout_.dp; at.dp += layout_.ep) members.push_back(rank_of(at));
  return members;
}

std::vector<int> Grid::embedding_group(int rank) const {
  if (!first_stage(rank) && !last_stage(rank)) return {};
  const std::vector<int> chain = pp_chain(rank);
  if (chain.size() == 1) return chain;
  return {chain.front(), chain.back()};
}

int Grid::previous_stage(int rank) const {
  Coordinates at = coordinates(rank);
  return --at.pp < 0 ? -1 : rank_of(at);
}

int Grid::next_stage(int rank) const {
  Coordinates at = coordinates(rank);
  return ++at.pp == layout_.pp ? -1 : rank_of(at);
}

Result<StageLayers> split_layers(std::span<const int64_t> counts, int pp, int64_t layers) {
  const std::string list = fmt::format("[{}]", [&] {
    std::string s;
    for (int64_t c : counts) s += (s.empty() ? "" : ", ") + std::to_string(c);
    return s;
  }());
  if (static_cast<int64_t>(counts.size()) != pp)
    return errorf("{} names {} stages, but pp is {}", list, counts.size(), pp);
  StageLayers stages;
  int64_t begin = 0;
  for (int s = 0; s < pp; ++s) {
    if (counts[s] < 0) return errorf("{}: a count below 0", list);
    if (counts[s] == 0 && s > 0 && s < pp - 1)
      return errorf("{}: stage {} would hold nothing; only the first and the last may be without layers",
                    list, s);
    if (counts[s] > layers - begin) return errorf("{} has more than the {} layers of the model", list, layers);
    stages.push_back({begin, begin + counts[s]});
    begin += counts[s];
  }
  if (begin != layers) return errorf("{} adds up to {} layers, the model has {}", list, begin, layers);
  return stages;
}

StageLayers balance_layers(const StageCosts& costs, int pp) {
  const int layers = static_cast<int>(costs.layers.size());
  CHECK(pp >= 1 && pp <= layers, "{} stages for {} layers", pp, layers);
  const auto stage_cost = [&](int stage, int begin, int end) {
    double sum = stage == 0 ? costs.embedding : 0.0;
    for (int l = begin; l < end; ++l) sum += costs.layers[l];
    return stage == pp - 1 ? sum + costs.head : sum;
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // value[s][i]: the best for stages s.. when stage s begins with layer i. First the least dearest stage, then, with no stage
  // dearer than that, the least sum of squares.
  const auto solve = [&](auto combine, double cap, std::vector<std::vector<int>>* cut) {
    std::vector<std::vector<double>> value(pp + 1, std::vector<double>(layers + 1, kInfinity));
    cut->assign(pp, std::vector<int>(layers + 1, -1));
    value[pp][layers] = 0.0;
    for (int s = pp - 1; s >= 0; --s) {
      for (int i = 0; i < layers; ++i) {
        for (int end = i + 1; end <= layers; ++end) {
          const double cost = stage_cost(s, i, end);
          if (cost > cap || value[s + 1][end] == kInfinity) continue;
          const double total = combine(cost, value[s + 1][end]);
          if (total < value[s][i]) {
            value[s][i] = total;
            (*cut)[s][i] = end;
          }
        }
      }
    }
    return value[0][0];
  };
  std::vector<std::vector<int>> cut;
  const double dearest = solve([](double a, double b) { return std::max(a, b); }, kInfinity, &cut);
  solve([](double a, double b) { return a * a + b; }, dearest, &cut);
  StageLayers stages;
  for (int s = 0, i = 0; s < pp; ++s) {
    stages.push_back({i, cut[s][i]});
    i = cut[s][i];
  }
  return stages;
}

}  // namespace lockstep
