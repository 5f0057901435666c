#include "rl/layouts.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "model/cost.h"

namespace lockstep {

namespace {

Result<std::vector<int64_t>> parse_counts(const std::string& text) {
  std::vector<int64_t> counts;
  const char *at = text.data(), *const end = at + text.size();
  while (true) {
    while (at != end && *at == ' ') ++at;
    const auto [behind, error] = std::from_chars(at, end, counts.emplace_back());
    at = behind;
    while (at != end && *at == ' ') ++at;
    if (error != std::errc() || (at != end && *at != ','))
      return errorf("parallel.stages is \"{}\"; wanted the number of layers of each stage, as in \"12,11,11,9\"", text);
    if (at == end) return counts;
    ++at;
  }
}

Result<StageLayers> stages_of(const ParallelOptions& options, const ModelConfig& config, int64_t length, int pp) {
  if (options.stages.empty()) return balance_layers(stage_costs(config, length), pp);
  return listed_stages(options.stages, pp, config.num_layers());
}

}  // namespace

Result<StageLayers> listed_stages(const std::string& text, int pp, int64_t layers) {
  const Result<std::vector<int64_t>> counts = parse_counts(text);
  if (!counts) return counts.status();
  Result<StageLayers> stages = split_layers(counts.value(), pp, layers);
  if (!stages) return errorf("parallel.stages is \"{}\": {}", text, stages.message());
  return stages;
}

Result<Layouts> resolve_layouts(const ParallelOptions& o, const ModelConfig& config, int64_t length, int ranks) {
  if (o.rollout_ranks > 0 && o.rollout_ranks >= ranks)
    return errorf("parallel.rollout_ranks is {} of {} ranks, which leaves none to train; start more, or set it to 0, where all ranks train and sample", o.rollout_ranks,
                  ranks);
  const int samplers = static_cast<int>(o.rollout_ranks);
  Layouts layouts{.train = {}, .rollout = {}, .stages = {}, .rollout_stages = {}, .apart = samplers > 0};
  LayoutLimits limits{.ranks = ranks - samplers, .layers = config.num_layers(), .experts = config.num_experts, .output_groups = config.o_groups};
  Result<Layout> train = resolve_layout(
      {.tp = static_cast<int>(o.tp), .pp = static_cast<int>(o.pp), .ep = static_cast<int>(o.ep), .dp = static_cast<int>(o.dp)}, limits);
  if (!train) return train.status();
  layouts.train = train.value();
  Result<StageLayers> stages = stages_of(o, config, length, layouts.train.pp);
  if (!stages) return stages.status();
  layouts.stages = stages.take();

  limits.layers = 1;  // the sampler has no stages
  if (layouts.apart) limits.ranks = samplers;
  limits.prefix = "rollout_";
  Layout wanted{.tp = o.rollout_tp == 0 ? 1 : static_cast<int>(o.rollout_tp), .ep = o.rollout_ep == 0 ? layouts.train.ep : static_cast<int>(o.rollout_ep)};
  Result<Layout> rollout = resolve_layout(wanted, limits);
  if (!rollout) return errorf("the sampler's layout: {}", rollout.message());
  layouts.rollout = rollout.value();
  layouts.rollout_stages = {{0, config.num_layers()}};
  return layouts;
}

int64_t RunGroups::trainer_twin() const {
  return std::find(trainer.shards.begin(), trainer.shards.end(), trainer_shard()) - trainer.shards.begin();
}

RunGroups make_run_groups(RankWorld& world, const Layouts& layouts, const ModelConfig& config, Numerics train_numerics,
                          Numerics rollout_numerics) {
  const Grid train(layouts.train), rollout(layouts.rollout);
  RunGroups groups{.layouts = layouts,
                   .trainer = placement_of(config, train, layouts.stages, train_numerics),
                   .sampler = placement_of(config, rollout, layouts.rollout_stages, rollout_numerics),
                   .all = &world.all(),
                   .side = nullptr,
                   .train = std::nullopt,
                   .rollout = std::nullopt};
  bool trains = true, samples = true;
  if (layouts.apart) {
    CHECK_EQ(train.ranks() + rollout.ranks(), world.size());
    place_apart(groups.trainer, groups.sampler);
    trains = world.rank() < train.ranks();
    samples = !trains;
    std::vector<int> members(static_cast<size_t>(trains ? train.ranks() : rollout.ranks()));
    std::iota(members.begin(), members.end(), trains ? 0 : train.ranks());
    groups.side = std::make_unique<RankGroup>(world.make_group(trains ? "trainers" : "samplers", std::move(members)));
  }
  RankGroup& mine = groups.side ? *groups.side : world.all();
  if (trains) groups.train.emplace(make_groups(world, mine, train, "train"));
  if (samples) groups.rollout.emplace(make_groups(world, mine, rollout, "rollout"));
  return groups;
}

}  // namespace lockstep
