// What rl/traffic.h and rl/memory.h predict against what ranks count and arenas reach: a whole step of rollout, training and weight update under many layouts, with experts chosen by a
// real router. Run by any number of ranks, which try every case below that has as many.

#include <gtest/gtest.h>

#include <map>

#include "core/rng.h"
#include "model/stack.h"
#include "model/tensor_parallel.h"
#include "model/testing.h"
#include "parallel/testing.h"
#include "rl/memory.h"
#include "rl/peers.h"
#include "rl/traffic.h"
#include "sync/transfer.h"
#include "train/actor.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"

namespace lockstep {
namespace {

RankWorld* world = nullptr;

constexpr uint64_t kSeed = 11;
constexpr int64_t kMicroBatchTokens = 24, kContext = 24, kEngineExchangeRows = 3;  // few rows a round: many rounds

struct Case {
  Layout train, rollout;
  std::vector<int64_t> layers;  // of the trainer's stages
  bool recompute = false;
  Numerics numerics = Numerics::bf16;
  bool apart = false;  // the sampler has ranks of its own
  ReplayKind replay = ReplayKind::none;
  std::optional<Numerics> quantised = {};  // the sampler's, if not the trainer's
  Numerics sampler() const { return quantised.value_or(numerics); }
  int ranks() const { return train.ranks() + (apart ? rollout.ranks() : 0); }
};
const std::vector<Case> kCases = {
    {{.dp = 2}, {.dp = 2}, {5}},
    {{.pp = 2, .dp = 1}, {.dp = 2}, {2, 3}},
    {{.ep = 2, .dp = 2}, {.ep = 2, .dp = 2}, {5}, true},
    {{.tp = 2, .dp = 1}, {.dp = 2}, {5}, false, Numerics::f32},
    {{.dp = 2}, {.tp = 2, .dp = 1}, {5}, true},
    {{.pp = 2, .ep = 2, .dp = 2}, {.ep = 4, .dp = 4}, {3, 2}},
    {{.tp = 2, .pp = 2, .dp = 1}, {.tp = 2, .ep = 2, .dp = 2}, {3, 2}, true},
    {{.tp = 2, .ep = 2, .dp = 2}, {.ep = 2, .dp = 4}, {5}, true, Numerics::f32},
    {{.pp = 4, .dp = 1}, {.tp = 2, .dp = 2}, {0, 2, 2, 1}},
    {{.ep = 2, .dp = 4}, {.ep = 4, .dp = 4}, {5}},
    {{.tp = 2, .pp = 2, .ep = 2, .dp = 2}, {.tp = 2, .ep = 4, .dp = 4}, {3, 2}, true},
    {{.pp = 2, .ep = 2, .dp = 4}, {.ep = 2, .dp = 8}, {2, 3}},
    {{.pp = 4, .ep = 2, .dp = 2}, {.tp = 2, .ep = 2, .dp = 4}, {0, 2, 3, 0}, true, Numerics::f32},
    {{.ep = 4, .dp = 8}, {.dp = 8}, {5}, false, Numerics::f32},
    // Updates quantise masters, which ranks gather.
    {{.ep = 2, .dp = 2}, {.dp = 2}, {5}, false, Numerics::bf16, false, ReplayKind::none, Numerics::fp8},
    {{.ep = 2, .dp = 4}, {.tp = 2, .dp = 2}, {5}, false, Numerics::bf16, false, ReplayKind::none, Numerics::fp8},
    {{.tp = 2, .pp = 2, .dp = 2}, {.ep = 2, .dp = 8}, {2, 3}, false, Numerics::f32, false, ReplayKind::none, Numerics::fp4},
    // Samplers on ranks of their own.
    {{.dp = 1}, {.dp = 1}, {5}, false, Numerics::bf16, true, ReplayKind::routing_index},
    {{.pp = 2, .dp = 1}, {.tp = 2, .dp = 1}, {3, 2}, true, Numerics::bf16, false, ReplayKind::routing},
    {{.pp = 2, .dp = 1}, {.tp = 2, .dp = 1}, {2, 3}, false, Numerics::bf16, true},
    {{.dp = 2}, {.ep = 2, .dp = 2}, {5}, false, Numerics::bf16, true, ReplayKind::routing_index, Numerics::fp8},
    {{.dp = 1}, {.dp = 3}, {5}, true, Numerics::bf16, true},
    {{.pp = 2, .ep = 2, .dp = 2}, {.ep = 4, .dp = 4}, {3, 2}, false, Numerics::bf16, true},
};

ModelConfig tiny_config() {
  ModelConfig m = testing::tiny_config();
  m.vocab_size = 300;  // several chunks of the head
  m.num_experts = 6;   // unequal shares of 4
  m.layers = {{AttentionKind::swa, 0, true},
              {AttentionKind::csa, 4, false},
              {AttentionKind::hca, 8, false},
              {AttentionKind::swa, 0, false},
              {AttentionKind::csa, 4, false}};
  return m;
}

void count_experts(const ModelConfig& m, int layer, ConstTensorView ids, std::vector<int64_t>& counts) {
  counts.resize(static_cast<size_t>(m.num_layers() * m.num_experts));
  for (int64_t i = 0; i < ids.shape.elements(); ++i) ++counts[static_cast<size_t>(layer * m.num_experts + ids.ptr<int32_t>()[i])];
}

// Everything that a rank has in a run with these layouts.
struct WholeRun {
  explicit WholeRun(const Case& c)
      : layouts{.train = c.train, .rollout = c.rollout, .stages = split_layers(c.layers, c.train.pp, config.num_layers()).value(),
                .rollout_stages = {{0, config.num_layers()}}, .apart = c.apart},
        groups(groups_of(layouts, config, c.numerics, c.sampler())), apart(groups.trainer != groups.sampler),
        trainer(config, c.numerics, groups.trainer_shard(), arena), trainer_bytes(static_cast<int64_t>(arena.used_bytes())),
        rope(make_rope_tables(config, config.max_positions, arena)), options{.max_tokens_per_microbatch = kMicroBatchTokens, .recompute = c.recompute, .replay = c.replay} {
    if (groups.train) actor.emplace(context, trainer, rope, optimizer, options, &*groups.train).initialize(kSeed);
    follow_trainers();
    model.weights = &trainer;
    model.rope = rope;
    if (apart) {
      const size_t before = arena.used_bytes();
      sampler.emplace(config, c.sampler(), groups.sampler_shard(), arena);
      model.weights = &*sampler;
      transfer.emplace(&world->all(), trainer, *sampler, groups.trainer, groups.sampler, changes(), arena, SyncOptions(), kBucketBytes);
      sampler_bytes = static_cast<int64_t>(arena.used_bytes() - before);
      CHECK(transfer->update(context, master()).is_ok(), "the first update");
    }
    if (groups.rollout && groups.rollout->tp.size() > 1) model.tp = &groups.rollout->tp;
    if (groups.rollout && groups.rollout->ep.size() > 1) model.ep = &groups.rollout->ep;
    model.exchange_rows = kEngineExchangeRows;
  }
  ReadMaster master() const {
    return [this](int id) { return actor->master(id); };
  }
  // As Policy::sync.
  void follow_trainers() {
    if (!layouts.apart) return;
    int64_t version = trainer.version();
    world->all().broadcast(std::span(&version, 1), 0, "weights version");
    if (!groups.train) trainer.commit(context, version);
  }
  WantedTensors changes() const {
    return [this](const TensorSpec& t) { return is_trained(t, optimizer); };
  }
  // Groups once for each pair of layouts: making them is a collective with a name of its own.
  static RunGroups& groups_of(const Layouts& layouts, const ModelConfig& config, Numerics numerics, Numerics sampler) {
    static std::map<std::string, RunGroups> all;
    const std::string name = fmt::format("{} {} {} {}", layouts.train.str(), layouts.rollout.str(), layouts.apart, numerics_name(sampler));
    const auto it = all.find(name);
    return it != all.end() ? it->second : all.emplace(name, make_run_groups(*world, layouts, config, numerics, sampler)).first->second;
  }

  static constexpr int64_t kBucketBytes = 4096;
  const ModelConfig config = tiny_config();
  const OptimizerConfig optimizer = {};
  CpuContext context{1, size_t{1} << 30};
  Arena arena{"weights", size_t{1} << 30};
  Layouts layouts;
  RunGroups& groups;
  const bool apart;
  Weights trainer;
  const int64_t trainer_bytes;
  int64_t sampler_bytes = 0;  // with what the transfer takes
  std::optional<Weights> sampler;
  std::optional<Transfer> transfer;
  RopeTables rope;
  const ActorOptions options;
  std::optional<Actor> actor;  // of a trainer
  Model model;  // the sampler's
};

// Routing of micro-batches by one rank alone with the whole model: bit-equal to that of any layout.
class Router {
 public:
  Router(const ModelConfig& config, Numerics numerics, const ActorOptions& options)
      : config_(config), weights_(config, numerics, arena_), place_(context_, weights_, options) {
    CHECK(weights_.load(context_, random_boxes(config, kSeed), 0).is_ok(), "random weights");
    model_.weights = &weights_;
    model_.rope = make_rope_tables(config, config.max_positions, arena_);
    model_.probe = &probe_;
  }
  std::vector<int64_t> operator()(std::span<const TrainSample> samples, const MicroBatch& micro) {
    counts_.assign(static_cast<size_t>(config_.num_layers() * config_.num_experts), 0);
    const ArenaScope scope(*context_.get().workspace);
    place_.forward(context_, model_, samples, micro, /*keep=*/false, {});
    return counts_;
  }

 private:
  const ModelConfig& config_;
  CpuContext context_{1, size_t{1} << 30};
  Arena arena_{"whole weights", size_t{1} << 30};
  Weights weights_;
  MicroBatchPlace place_;
  Model model_;
  std::vector<int64_t> counts_;
  Probe probe_ = [this](int layer, std::string_view point, ConstTensorView rows) {
    if (point == "ffn.ids") count_experts(config_, layer, rows, counts_);
  };
};

// The same list from every rank, by rank.
std::vector<std::vector<int64_t>> gather(std::span<const int64_t> mine) {
  const auto ranks = static_cast<size_t>(world->size());
  std::vector<int64_t> lengths(ranks);
  const auto length = static_cast<int64_t>(mine.size());
  world->all().all_gather(std::span(lengths), std::span(&length, 1), "test");
  const auto longest = static_cast<size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::vector<int64_t> padded(mine.begin(), mine.end()), all(longest * ranks);
  padded.resize(longest);
  world->all().all_gather(std::span(all), std::span<const int64_t>(padded), "test");
  std::vector<std::vector<int64_t>> lists;
  for (size_t r = 0; r < ranks; ++r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * longest);
    lists.emplace_back(begin, begin + lengths[r]);
  }
  return lists;
}

// What this rank's engine did, as numbers that travel.
std::vector<int64_t> to_numbers(const EngineCalls& e) {
  std::vector<int64_t> n = {e.steps, static_cast<int64_t>(e.forwards.size()), static_cast<int64_t>(e.draws.size())};
  n.insert(n.end(), e.draws.begin(), e.draws.end());
  for (const ModelCall& call : e.forwards) {
    n.push_back(call.tokens());
    n.insert(n.end(), call.experts.begin(), call.experts.end());
  }
  return n;
}
EngineCalls from_numbers(const ModelConfig& m, const std::vector<int64_t>& n) {
  EngineCalls e{.forwards = {}, .draws = {}, .steps = n[0]};
  auto at = n.begin() + 3;
  e.draws.assign(at, at + n[2]);
  at += n[2];
  for (int64_t i = 0; i < n[1]; ++i) {
    ModelCall& call = e.forwards.emplace_back();
    call.sequences = {*at++};
    call.experts.assign(at, at + m.num_layers() * m.num_experts);
    at += m.num_layers() * m.num_experts;
  }
  return e;
}

std::vector<Request> some_requests(ReplayKind record) {
  Philox rng(3, RngPurpose::test);
  std::vector<Request> requests;
  for (uint64_t p = 0; p < 5; ++p) {
    Request& r = requests.emplace_back();
    r.prompt_id = p;
    for (int64_t i = 0; i < 3 + static_cast<int64_t>(3 * p); ++i) r.prompt.push_back(static_cast<int32_t>(rng.below(300)));
    r.num_samples = 3;
    r.seed = 5;
    r.record = record;
    r.sampling.temperature = 1;
    r.sampling.max_new_tokens = 8;
    for (int32_t id = 0; id < 40; ++id) r.sampling.stop_ids.push_back(id);  // unequal lengths
  }
  return requests;
}

class TrafficOf : public ::testing::TestWithParam<Case> {};

TEST_P(TrafficOf, AStepIsAsPredicted) {
  const Case& c = GetParam();
  WholeRun run(c);
  const ModelConfig& m = run.config;

  EngineCalls mine;
  const Probe probe = [&](int layer, std::string_view point, ConstTensorView rows) {
    if (point != "ffn.ids") return;
    if (layer == 0) mine.forwards.push_back({.sequences = {rows.rows()}, .wanted = 0, .embedded = {}, .experts = {}});
    count_experts(m, layer, rows, mine.forwards.back().experts);
  };
  run.model.probe = &probe;
  Arena state("state", size_t{1} << 30);
  const EngineOptions engine_options{.max_running = 3, .max_batch_tokens = 7, .max_context = kContext};
  std::optional<Engine> engine;
  if (run.groups.rollout) engine.emplace(run.context, run.model, engine_options, state);
  Hooks hooks;
  double drawn = 0;
  hooks.progress = [&](const std::string&, int64_t, int64_t, double amount, const std::string&) {
    ++mine.steps;
    if (amount > drawn) mine.draws.push_back(static_cast<int64_t>(amount - drawn));
    drawn = amount;
  };
  const std::vector<Request> requests = some_requests(c.replay);

  world->all().barrier("test");
  world->reset_traffic();
  Result<std::vector<Completion>> completions = Peers(world, &run.groups).run(engine ? &*engine : nullptr, run.context, requests, hooks, "rollout");
  ASSERT_TRUE(completions.is_ok()) << completions.message();
  std::vector<TrainSample> samples;
  for (const Completion& done : completions.value()) {
    TrainSample& s = samples.emplace_back();
    s.index = static_cast<int64_t>(samples.size());
    s.tokens = requests[done.prompt_id].prompt;
    s.prompt_length = static_cast<int64_t>(s.tokens.size());
    s.tokens.insert(s.tokens.end(), done.tokens.begin(), done.tokens.end());
    s.mask.assign(done.tokens.size(), samples.size() != 4);  // one sample is not trained
    s.advantage.assign(done.tokens.size(), samples.size() % 2 == 0 ? 1.0f : -0.5f);
    s.rollout_logprob = s.old_logprob = done.logprobs;
    s.choices = done.choices;
  }
  std::vector<TokenLogprobs> seen;
  const auto equal = [&] {
    if (c.quantised) return Status::ok();  // this pair is not exact
    for (size_t i = 0; i < samples.size(); ++i)
      if (samples[i].mask[0] != 0 && seen[i].logprob != samples[i].rollout_logprob) return errorf("sample {}", i);
    return Status::ok();
  };
  if (run.actor) {
    const Result<StepMetrics> step = run.actor->step(samples, {}, &seen, equal);
    ASSERT_TRUE(step.is_ok()) << step.message();
  }
  run.follow_trainers();
  if (run.apart) {
    const Result<SyncReceipt> receipt = run.transfer->update(run.context, run.master());
    ASSERT_TRUE(receipt.is_ok()) << receipt.message();
    EXPECT_EQ(receipt.value().rounds > 1, receipt.value().moved_bytes > 0);
    EXPECT_EQ(world->traffic().contains("masters"), c.quantised && run.groups.train && run.groups.train->dp.size() > 1);
  }
  const TrafficByName counted = world->traffic();

  // What every engine did, from its first rank.
  const Grid rollout(c.rollout);
  const int first_sampler = c.apart ? c.train.ranks() : 0;
  const std::vector<std::vector<int64_t>> numbers = gather(to_numbers(mine));
  const ChoiceLayout layout(m, c.replay);
  std::vector<EngineCalls> engines;
  for (int d = 0; d < c.rollout.dp; ++d) {
    EngineCalls& e = engines.emplace_back(from_numbers(m, numbers[static_cast<size_t>(first_sampler + rollout.rank_of({.tp = 0, .pp = 0, .dp = d}))]));
    // Its samples are consecutive. Of a prompt every token runs, once; of a response all but the last. In which call does not matter for sums.
    std::vector<int64_t> embedded(static_cast<size_t>(c.rollout.tp));
    const auto embed = [&](std::span<const int32_t> ids) {
      for (int r = 0; r < c.rollout.tp; ++r)
        for (const int32_t id : ids) embedded[static_cast<size_t>(r)] += tp_vocabulary(m, c.rollout.tp, r).contains(id);
    };
    const Range own = part_of(static_cast<int64_t>(samples.size()), c.rollout.dp, d);
    for (int64_t i = own.begin; i < own.end; ++i) {
      const Completion& done = completions.value()[static_cast<size_t>(i)];
      if (i == own.begin || done.prompt_id != completions.value()[static_cast<size_t>(i - 1)].prompt_id) embed(requests[done.prompt_id].prompt);
      embed(std::span(done.tokens).first(done.tokens.size() - 1));
      ++e.samples;
      e.tokens += static_cast<int64_t>(done.tokens.size());
      e.choice_words += choice_words(layout, static_cast<int64_t>(requests[done.prompt_id].prompt.size() + done.tokens.size()) - 1);
    }
    for (ModelCall& call : e.forwards) call.embedded.assign(static_cast<size_t>(c.rollout.tp), 0);
    e.forwards.front().embedded = embedded;
  }

  TrafficByName predicted;
  if (engine) add_traffic(predicted, rollout_traffic(m, c.sampler(), c.rollout, kEngineExchangeRows, engines, run.groups.rollout->rank));
  if (c.apart) {
    int64_t tokens = 0, words = 0;
    for (const EngineCalls& e : engines) tokens += e.tokens, words += e.choice_words;
    add_traffic(predicted, share_traffic(static_cast<int64_t>(samples.size()), tokens, words, first_sampler, world->rank(), world->size()));
    add_traffic(predicted, version_traffic(world->rank(), world->size()));
  }
  ActorOptions live = run.options;
  live.replay = ReplayKind::none;
  Router router(m, c.numerics, live);
  const TrainStepCalls calls = train_step_calls(m, c.train, samples, run.options, std::ref(router));
  EXPECT_GT(calls.micro_batches.front().size(), 1u);
  const TrainerShape shape{m, c.numerics, c.train, run.layouts.stages, run.optimizer, Model().exchange_rows};
  if (run.actor) add_traffic(predicted, train_step_traffic(shape, calls, world->rank()));
  if (run.apart) add_traffic(predicted, sync_traffic(shape, run.groups.sampler, run.changes(), WholeRun::kBucketBytes, world->rank()));

  for (const auto& [name, t] : counted) {
    const auto it = predicted.find(name);
    if (it == predicted.end()) {
      ADD_FAILURE() << name << " was not predicted: " << t.calls << " calls, " << t.bytes.sent << " bytes sent, " << t.bytes.received << " received";
      continue;
    }
    EXPECT_EQ(it->second.calls, t.calls) << name;
    EXPECT_EQ(it->second.bytes.sent, t.bytes.sent) << name;
    EXPECT_EQ(it->second.bytes.received, t.bytes.received) << name;
  }
  // One row in each layer that goes elsewhere would show.
  const Shard& shard = run.groups.trainer_shard();
  if (c.train.ep > 1 && run.actor && run.groups.train->dp.rank() == 0 && shard.layers.size() > 0) {
    TrainStepCalls other = calls;
    std::vector<int64_t>& counts = other.micro_batches[0][0].experts;
    for (int64_t layer = 0; layer < m.num_layers(); ++layer) {
      const auto first = counts.begin() + layer * m.num_experts, own = first + shard.experts.begin;
      const auto row = std::find_if(own, first + shard.experts.end, [](int64_t n) { return n > 0; });
      if (row != first + shard.experts.end) --*row, ++first[m.num_experts - 1];
    }
    EXPECT_GT(train_step_traffic(shape, other, world->rank()).at("expert dispatch").bytes.sent,
              train_step_traffic(shape, calls, world->rank()).at("expert dispatch").bytes.sent);
  }

  // And what the arenas reached.
  if (run.actor) {
    const MemoryByOwner memory = actor_bytes(shape, calls, run.options, world->rank());
    EXPECT_EQ(total_bytes(memory), static_cast<int64_t>(run.actor->high_bytes()));
    const auto owned = std::find_if(memory.begin(), memory.end(), [](const OwnerBytes& o) { return o.owner == "masters and moments"; });
    EXPECT_EQ(owned->bytes, static_cast<int64_t>(run.actor->owned_bytes()));
  }
  if (engine) {
    EXPECT_EQ(engine_state_bytes(m, c.sampler(), engine_options), static_cast<int64_t>(state.high_bytes()));
  }
  const WeightBytes trainer = weights_arena_bytes(run.trainer.table(), c.numerics);
  EXPECT_EQ(trainer.rows + trainer.panels, run.trainer_bytes);
  if (run.apart) {
    const WeightBytes sampler = weights_arena_bytes(run.sampler->table(), c.sampler());
    EXPECT_EQ(sampler.rows + sampler.panels + transfer_bytes({run.trainer.table(), c.numerics}, {run.sampler->table(), c.sampler()}, world->size(), WholeRun::kBucketBytes, Device::cpu), run.sampler_bytes);
  }
  for (const auto& [name, t] : predicted) EXPECT_TRUE(counted.contains(name)) << name << " did not happen; " << t.calls << " calls were predicted";
  if (!run.actor) return;
  // Only the largest pieces are predicted of the workspace.
  const std::vector<ModelCall>& own = calls.micro_batches[static_cast<size_t>(run.groups.train->dp.rank())];
  int64_t scratch = 0;
  for (const ModelCall& call : own)
    scratch = std::max(scratch, trainer_scratch_bytes(m, c.numerics, run.trainer.shard(), c.train.ep, shape.exchange_rows, call.tokens(), call.wanted));
  EXPECT_LE(scratch, static_cast<int64_t>(run.context.get().workspace->high_bytes()));
}

std::vector<Case> cases_of_this_world() {
  std::vector<Case> cases;
  for (const Case& c : kCases)
    if (c.ranks() == world->size()) cases.push_back(c);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Layouts, TrafficOf, ::testing::ValuesIn(cases_of_this_world()), [](const auto& info) {
  const auto name = [](const Layout& l) { return fmt::format("tp{}pp{}ep{}dp{}", l.tp, l.pp, l.ep, l.dp); };
  return name(info.param.train) + (info.param.apart ? "_apart_" : "_") + name(info.param.rollout) + (info.param.replay != ReplayKind::none ? "_replay" : "") +
         (info.param.quantised ? numerics_name(*info.param.quantised) : "");
});

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
