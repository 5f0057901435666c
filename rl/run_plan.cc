#include "rl/run_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <thread>
#include <tuple>

#include "core/device.h"
#include "io/json.h"
#include "model/cost.h"
#include "sync/transfer.h"
#include "train/optimizer.h"

namespace lockstep {

namespace {

constexpr double kUsable = 0.95;  // of a device's memory; the rest is for its runtime and libraries

// A rank on the CPU has one core: 2 FMA of 8 f32 a cycle at 3 GHz (AVX2), and its share of memory.
DeviceSpec cpu_core() {
  const auto cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return {"cpu", memory_bytes(Device::cpu) / cores, 96e9, 96e9, 10e9, 5e9, 1.25e9, 10e9, 10e9 * cores, cores};
}

double longer(const CommBytes& b) { return static_cast<double>(std::max(b.sent, b.received)); }

// Equal samples over dp, so many to a micro-batch as its tokens allow.
TrainStepCalls step_calls(const PlanInput& p, const Layout& layout) {
  const int64_t rows = p.prompt_tokens + p.response_tokens - 1, each = std::max<int64_t>(1, p.microbatch_tokens / rows), total = p.prompts * p.samples;
  TrainStepCalls calls{.micro_batches = {}, .samples = {}, .response_tokens = {}, .recompute = p.recompute};
  const int64_t most = (part_of(total, layout.dp, 0).size() + each - 1) / each;
  for (int d = 0; d < layout.dp; ++d) {
    int64_t left = part_of(total, layout.dp, d).size();
    calls.samples.push_back(left);
    calls.response_tokens.push_back(left * p.response_tokens);
    std::vector<ModelCall>& own = calls.micro_batches.emplace_back();
    for (int64_t i = 0; i < most; ++i) {
      const int64_t n = std::min(each, left);
      left -= n;
      own.push_back(even_call(p.model, layout.tp, std::vector<int64_t>(static_cast<size_t>(n), rows), n * p.response_tokens));
    }
  }
  return calls;
}

// Share of a group's other members that are on other nodes.
double outside(const std::vector<int>& members, int rank, int per_node) {
  int others = 0, far = 0;
  for (const int r : members) {
    others += r != rank;
    far += r != rank && r / per_node != rank / per_node;
  }
  return others == 0 ? 0 : static_cast<double>(far) / others;
}

struct Ways {
  double links = 0, network = 0;  // seconds
  double sum() const { return links + network; }
};

class Planner {
 public:
  explicit Planner(const PlanInput& p) : p_(p), rows_(p.prompt_tokens + p.response_tokens - 1), costs_(stage_costs(p.model, rows_)) {}

  LayoutLimits limits(bool train) const {
    return {.ranks = train || p_.rollout_ranks == 0 ? p_.ranks : p_.rollout_ranks, .layers = train ? p_.model.num_layers() : 1, .experts = p_.model.num_experts,
            .output_groups = p_.model.o_groups};
  }
  StageLayers stages(const Layout& layout, bool train) const {
    if (!train) return {{0, p_.model.num_layers()}};
    return p_.stages.empty() || layout.pp != p_.train.pp ? balance_layers(costs_, layout.pp) : p_.stages;
  }

  struct Side {
    SidePlan plan;
    std::vector<PlanPart> parts;  // train and optimizer, or rollout
    double device_bytes = 0;
    int64_t micro_batches = 0;
    double bubble = 0, flops = 0;
    double seconds() const {
      double s = 0;
      for (const PlanPart& part : parts) s += part.seconds;
      return s;
    }
  };
  Side trainer(const Layout& layout) const;
  Side sampler(const Layout& layout) const;
  PlanPart sync(const Side& trainer, const Side& sampler, CommBytes* busiest) const;
  bool apart(const Side& trainer, const Side& sampler) const {
    return p_.rollout_ranks > 0 || p_.rollout_fp8 || trainer.plan.layout != sampler.plan.layout;
  }

  // The fastest layout whose fullest rank needs at most `room`.
  std::optional<Side> fastest(bool train, double room) const {
    std::optional<Side> best;
    for (const Layout& layout : possible_layouts(limits(train))) {
      if (layout.tp > p_.device.per_node) continue;
      Side side = train ? trainer(layout) : sampler(layout);
      if (side.device_bytes <= room && (!best || side.seconds() < best->seconds())) best = std::move(side);
    }
    return best;
  }

 private:
  Ways ways(const TrafficByName& traffic, const Grid& grid, int rank, const std::function<bool(std::string_view)>& wanted) const {
    Ways w;
    for (const auto& [name, t] : traffic) {
      if (!wanted(name)) continue;
      std::vector<int> members;
      if (name.starts_with("tp ")) {
        members = grid.tp_group(rank);
      } else if (name.starts_with("expert ") || name == "engine step") {
        members = grid.ep_group(rank);
      } else if (name.starts_with("stream")) {
        for (const int r : {grid.previous_stage(rank), grid.next_stage(rank)})
          if (r >= 0) members.push_back(r);
      } else if (name == "gradients" || name == "weights") {
        members = grid.dp_group(rank);
      } else {
        for (int r = 0; r < grid.ranks(); ++r) members.push_back(r);
      }
      const double far = outside(members, rank, p_.device.per_node), bytes = longer(t.bytes);
      w.links += bytes * (1 - far) / p_.device.link_rate;
      w.network += bytes * far / p_.device.network_rate;
    }
    return w;
  }

  const PlanInput& p_;
  const int64_t rows_;
  const StageCosts costs_;
};

Planner::Side Planner::trainer(const Layout& layout) const {
  const ModelConfig& m = p_.model;
  const DeviceSpec& dev = p_.device;
  const Grid grid(layout);
  const StageLayers stages = this->stages(layout, true);
  const OptimizerConfig optimizer;
  const int64_t exchange_rows = Model().exchange_rows;
  const TrainerShape shape{m, p_.numerics, layout, stages, optimizer, exchange_rows};
  const TrainStepCalls calls = step_calls(p_, layout);
  const ActorOptions options{.max_tokens_per_microbatch = p_.microbatch_tokens, .recompute = p_.recompute, .replay = p_.replay};
  const std::vector<ModelCall>& own = calls.micro_batches.front();
  const ModelCall& full = own.front();
  const auto M = static_cast<double>(own.size());
  const int64_t T = full.tokens();

  Side side;
  side.micro_batches = static_cast<int64_t>(own.size());
  side.bubble = (layout.pp - 1) / (M + layout.pp - 1);
  PlanPart train{.name = "train"}, step{.name = "optimizer"};
  double slowest = -1;
  for (int stage = 0; stage < layout.pp; ++stage) {
    const int rank = grid.rank_of({.tp = 0, .pp = stage, .dp = 0});  // the first of each kind has the largest share
    const Shard shard = shard_of(m, grid, stages, rank);
    const std::vector<TensorSpec> table = tensor_table(m, shard);
    const WeightBytes weights = weights_arena_bytes(table, p_.numerics);
    const TrafficByName traffic = train_step_traffic(shape, calls, rank);

    MemoryByOwner memory = {{"weights", weights.rows}}, host;
    if (std::string_view(dev.name) == "cpu") memory.push_back({"panels", weights.panels});
    double owned = 0;
    for (const OwnerBytes& o : actor_bytes(shape, calls, options, rank)) {
      const bool state = o.owner.ends_with("masters") || o.owner == "masters and moments";
      if (o.owner == "masters and moments") owned = static_cast<double>(o.bytes) / 12;
      (state && p_.offload_optimizer ? host : memory).push_back(o);
      if (o.owner == "expert rows" && layout.ep > 1)
        memory.push_back({"expert rows, hot", static_cast<int64_t>((p_.hot - 1) * static_cast<double>(o.bytes))});
    }
    memory.push_back({"rotation tables", 2 * (p_.prompt_tokens + p_.response_tokens) * m.rope_dim * 4});
    memory.push_back({"scratch", trainer_scratch_bytes(m, p_.numerics, shard, layout.ep, exchange_rows, T, full.wanted)});

    // One micro-batch.
    const double hot = layout.ep > 1 ? p_.hot : 1.0, rows = static_cast<double>(T * m.experts_per_token);
    const double forward = shard_forward_flops(m, shard, T, rows_, full.wanted, rows * hot), passes = p_.recompute ? 4 : 3;
    const double kept = static_cast<double>(kept_activation_bytes(
        m, p_.numerics, shard,
        {.sequences = full.sequences, .wanted = full.wanted, .ep = layout.ep,
         .expert_rows = std::vector<int64_t>(static_cast<size_t>(m.num_layers()), static_cast<int64_t>(rows * hot)), .recompute = false}));
    const GradientPlaces places = gradient_places(table, [&](const TensorSpec& s) { return is_trained(s, optimizer); });
    const double gradients = 4.0 * static_cast<double>(places.dense + places.experts);
    PlanPart micro{.name = "train"};
    micro.compute = passes * forward / dev.bf16_flops;
    // Weights once a pass but that of the weights' gradients, which are read and written; what is kept written and read.
    micro.memory = ((passes - 1) * static_cast<double>(weights.rows) + 2 * gradients + (p_.recompute ? 3 : 2) * kept) / dev.memory_rate;
    const Ways exchange = ways(traffic, grid, rank, [](std::string_view n) { return n.starts_with("tp ") || n.starts_with("expert "); });
    const Ways streams = ways(traffic, grid, rank, [](std::string_view n) { return n.starts_with("stream"); });
    micro.links = (exchange.links + streams.links) / M;
    micro.network = (exchange.network + streams.network) / M;
    micro.seconds = std::max(std::max(micro.compute, micro.memory) + exchange.sum() / M, streams.sum() / M);
    if (micro.seconds > slowest) {
      slowest = micro.seconds;
      const double times = M + layout.pp - 1;
      train = {.name = "train", .seconds = times * micro.seconds, .compute = M * micro.compute, .memory = M * micro.memory, .links = M * micro.links,
               .network = M * micro.network};
    }
    side.flops += passes * shard_forward_flops(m, shard, T, rows_, full.wanted, rows) * M * layout.tp * layout.dp;

    // Gradients and rounded rows travel; masters, both moments, gradient and weight go through memory once.
    PlanPart end{.name = "optimizer"};
    const Ways sums = ways(traffic, grid, rank, [](std::string_view n) { return !n.starts_with("tp ") && !n.starts_with("expert ") && !n.starts_with("stream"); });
    end.links = sums.links;
    end.network = sums.network;
    if (p_.offload_optimizer) {
      end.host = owned * 6 / dev.host_rate + owned * 30 * dev.per_node / dev.host_memory_rate;
    } else {
      end.memory = owned * 30 / dev.memory_rate;
    }
    end.seconds = sums.sum() + end.memory + end.host;
    if (end.seconds > step.seconds) step = end;

    if (const auto bytes = static_cast<double>(total_bytes(memory)); bytes > side.device_bytes) {
      side.device_bytes = bytes;
      side.plan = {.layout = layout, .stages = stages, .rank = rank, .memory = memory, .host_memory = host, .traffic = traffic};
    }
  }
  side.parts = {train, step};
  return side;
}

Planner::Side Planner::sampler(const Layout& layout) const {
  const ModelConfig& m = p_.model;
  const DeviceSpec& dev = p_.device;
  const Grid grid(layout);
  const Shard shard = shard_of(m, grid, stages(layout, false), 0);
  const std::vector<TensorSpec> table = tensor_table(m, shard);
  const int64_t total = p_.prompts * p_.samples, own = part_of(total, layout.dp, 0).size(), batch = std::min(p_.max_running, own);
  const int64_t context = p_.prompt_tokens + p_.response_tokens, steps = (own + batch - 1) / batch * p_.response_tokens, exchange_rows = Model().exchange_rows;
  const auto B = static_cast<double>(batch);
  const double hot = layout.ep > 1 ? p_.hot : 1.0, peak = p_.rollout_fp8 ? dev.fp8_flops : dev.bf16_flops;

  double dense = 0, experts = 0, by_row = 0;  // by_row: only rows of tokens are read
  for (const TensorSpec& t : table) {
    if (!t.held()) continue;
    const bool is_table = t.role == TensorRole::embedding || t.role == TensorRole::hash_table;
    (t.role == TensorRole::expert ? experts : is_table ? by_row : dense) += sampler_bytes(t, t.shape.elements(), p_.numerics, p_.rollout_fp8);
  }
  Side side;
  side.plan = {.layout = layout, .stages = stages(layout, false), .rank = 0, .memory = {}, .host_memory = {}, .traffic = {}};
  MemoryByOwner& memory = side.plan.memory;
  memory.push_back({"weights", static_cast<int64_t>(dense + experts + by_row)});
  if (std::string_view(dev.name) == "cpu") memory.push_back({"panels", weights_arena_bytes(table, p_.numerics).panels});
  memory.push_back({"state cache", engine_state_bytes(m, p_.numerics, {.max_running = p_.max_running, .max_context = context})});
  memory.push_back({"rotation tables", 2 * context * m.rope_dim * 4});
  memory.push_back({"scratch", sampler_scratch_bytes(m, p_.numerics, shard, layout.ep, exchange_rows, EngineOptions().max_batch_tokens, batch)});
  side.device_bytes = static_cast<double>(total_bytes(memory));

  // Decoding: half the response is there on average.
  const int64_t n = p_.prompt_tokens + p_.response_tokens / 2;
  const auto forward_flops = [&](double tokens, double fullness) {
    return tokens * (shard_forward_flops(m, shard, 1, 1, 1, static_cast<double>(m.experts_per_token) * fullness) + (decode_flops(m, n) - decode_flops(m, 1)) / layout.tp);
  };
  const double chosen = 1 - std::pow(1 - static_cast<double>(m.experts_per_token) / static_cast<double>(m.num_experts), B * layout.ep);
  const ModelCall call = even_call(m, layout.tp, std::vector<int64_t>(static_cast<size_t>(batch), 1), 0);
  EngineCalls engine{.forwards = {call}, .draws = {batch}, .steps = 1, .samples = 0, .tokens = 0};
  std::vector<EngineCalls> engines(static_cast<size_t>(layout.dp), engine);
  const TrafficByName one = rollout_traffic(m, p_.numerics, layout, exchange_rows, engines, 0);
  for (const auto& [name, t] : one) {
    const bool repeated = name.starts_with("tp ") || name.starts_with("expert ") || name == "engine step";
    Traffic& sum = side.plan.traffic[name];
    sum = t;
    if (repeated) sum.calls *= steps, sum.bytes.sent *= steps, sum.bytes.received *= steps;
  }
  const int64_t words_of_choices = choice_words(ChoiceLayout(m, p_.replay), rows_);
  for (int d = 0; d < layout.dp; ++d) {
    EngineCalls& e = engines[static_cast<size_t>(d)];
    e = {.forwards = {}, .draws = {}, .steps = 0, .samples = part_of(total, layout.dp, d).size(), .tokens = part_of(total, layout.dp, d).size() * p_.response_tokens};
    e.choice_words = e.samples * words_of_choices;
  }
  const TrafficByName ends = rollout_traffic(m, p_.numerics, layout, exchange_rows, engines, 0);
  if (const auto it = ends.find("completions"); it != ends.end()) side.plan.traffic["completions"] = it->second;
  if (p_.rollout_ranks > 0) add_traffic(side.plan.traffic, share_traffic(total, total * p_.response_tokens, total * words_of_choices, p_.ranks, p_.ranks, p_.ranks + p_.rollout_ranks));

  const Ways w = ways(side.plan.traffic, grid, 0, [](std::string_view) { return true; });
  const auto decode_steps = static_cast<double>(steps);
  const double prompts = std::ceil(static_cast<double>(own) / static_cast<double>(p_.samples)) * static_cast<double>(p_.prompt_tokens);
  PlanPart part{.name = "rollout"};
  const double prefill = forward_flops(prompts, hot) / peak;
  const double decode = decode_steps * forward_flops(B, hot) / peak;
  part.compute = decode + prefill;
  part.memory = decode_steps * (dense + experts * chosen + B * decode_state_bytes(m, p_.numerics, n)) / dev.memory_rate;
  part.links = w.links;
  part.network = w.network;
  part.seconds = std::max(decode, part.memory) + prefill + w.sum();
  side.parts = {part};
  side.flops = static_cast<double>(total) * static_cast<double>(p_.response_tokens) * decode_flops(m, n) +
               static_cast<double>(p_.prompts) * layers_forward_flops(m, {0, m.num_layers()}, p_.prompt_tokens);
  return side;
}

PlanPart Planner::sync(const Side& trainer, const Side& sampler, CommBytes* busiest) const {
  PlanPart part{.name = "sync"};
  if (!apart(trainer, sampler)) return part;
  const OptimizerConfig optimizer;
  Placement from = placement_of(p_.model, Grid(trainer.plan.layout), trainer.plan.stages, p_.numerics);
  Placement to = placement_of(p_.model, Grid(sampler.plan.layout), sampler.plan.stages, p_.numerics);
  if (p_.rollout_ranks > 0) place_apart(from, to);
  const SyncPlan plan = make_plan(p_.model, from, to, [&](const TensorSpec& t) { return is_trained(t, optimizer); });
  const std::vector<TensorSpec> table = tensor_table(p_.model);
  struct Moved {
    double near[2] = {0, 0}, far[2] = {0, 0};  // sent, received
  };
  std::vector<Moved> moved(from.shards.size());
  for (const Copy& c : plan.copies) {
    if (c.local()) continue;
    const double bytes = sampler_bytes(table[static_cast<size_t>(c.tensor)], c.box.elements(), p_.numerics, p_.rollout_fp8);
    const bool near = c.from / p_.device.per_node == c.to / p_.device.per_node;
    for (const int way : {0, 1}) {
      Moved& rank = moved[static_cast<size_t>(way == 0 ? c.from : c.to)];
      (near ? rank.near : rank.far)[way] += bytes;
    }
  }
  for (const Moved& rank : moved) {
    const double links = std::max(rank.near[0], rank.near[1]) / p_.device.link_rate, network = std::max(rank.far[0], rank.far[1]) / p_.device.network_rate;
    if (links + network <= part.seconds) continue;
    part.seconds = links + network;
    part.links = links;
    part.network = network;
    *busiest = {static_cast<int64_t>(rank.near[0] + rank.far[0]), static_cast<int64_t>(rank.near[1] + rank.far[1])};
  }
  return part;
}

// The fastest layout of a side that fits; if none does, with what a trainer can do without.
std::string suggestion(const PlanInput& p, bool train, double room) {
  const char* side = train ? "trainer" : "sampler";
  const auto say = [&](const Planner::Side& s, const char* with) {
    return fmt::format("suggested {}: {}{}: {:.1f} GB, {:.2f} s", side, s.plan.layout.str(), with, s.device_bytes / 1e9, s.seconds());
  };
  if (const auto found = Planner(p).fastest(train, room)) return say(*found, "");
  if (train) {
    const std::tuple<bool, bool, const char*> savings[] = {
        {true, false, " with --recompute"}, {false, true, " with --offload-optimizer"}, {true, true, " with --recompute --offload-optimizer"}};
    for (const auto& [recompute, offload, with] : savings) {
      PlanInput frugal = p;
      frugal.recompute = recompute || p.recompute;
      frugal.offload_optimizer = offload || p.offload_optimizer;
      if (const auto found = Planner(frugal).fastest(train, room)) return say(*found, with);
    }
  }
  return fmt::format("no layout of these ranks leaves the {} within {:.1f} GB; more ranks are needed", side, room / 1e9);
}

std::string largest_owner(const MemoryByOwner& memory) {
  const auto most = std::max_element(memory.begin(), memory.end(), [](const OwnerBytes& a, const OwnerBytes& b) { return a.bytes < b.bytes; });
  return fmt::format("{} ({:.1f} GB)", most->owner, static_cast<double>(most->bytes) / 1e9);
}

std::string remedies(const PlanInput& p, const MemoryByOwner& memory) {
  std::string text;
  int64_t activations = 0, state = 0;
  for (const OwnerBytes& o : memory) {
    if (o.owner == "activations" || o.owner.starts_with("expert rows")) activations += o.bytes;
    if (o.owner == "masters and moments") state = o.bytes;
  }
  if (state > 0 && !p.offload_optimizer) text += fmt::format("; --offload-optimizer takes {:.1f} GB away", static_cast<double>(state) / 1e9);
  if (activations > 0 && !p.recompute) text += fmt::format("; --recompute keeps a part of the {:.1f} GB of activations", static_cast<double>(activations) / 1e9);
  return text;
}

}  // namespace

std::span<const DeviceSpec> device_specs() {
  // Memory in bytes as sold. Vendors' data sheets, dense rates:
  //   MI355X  AMD Instinct MI355X data sheet: 288 GB HBM3E, 8 TB/s; BF16 2.5 and FP8 5.0 PFLOP/s (matrix, without sparsity); seven Infinity Fabric
  //           links of 153.6 GB/s both directions together
  //   H200    NVIDIA H200 SXM data sheet: 141 GB, 4.8 TB/s; BF16 989 and FP8 1979 TFLOP/s without sparsity; NVLink 900 GB/s both directions
  //   H100    NVIDIA H100 SXM5 data sheet: 80 GB, 3.35 TB/s; otherwise as H200
  // Not of the device but of usual nodes of 8: a 400 Gb/s adapter and PCIe 5.0 x16 for each, two sockets of 12 channels DDR5-4800 (460 GB/s each).
  static const DeviceSpec specs[] = {
      {"mi355x", 288e9, 2.5e15, 5.0e15, 8.0e12, 7 * 76.8e9, 50e9, 64e9, 920e9, 8},
      {"h200", 141e9, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 64e9, 920e9, 8},
      {"h100", 80e9, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 64e9, 920e9, 8},
      cpu_core(),
  };
  return specs;
}

double sampler_bytes(const TensorSpec& t, int64_t elements, Numerics numerics, bool fp8) {
  const auto n = static_cast<double>(elements);
  if (fp8 && t.quant_format(Numerics::fp8)) return n + std::ceil(n / (128 * 128));
  return n * static_cast<double>(dtype_bytes(t.weight_dtype(fp8 ? Numerics::bf16 : numerics)));
}

const char* PlanPart::bound() const {
  const std::pair<double, const char*> all[] = {{compute, "compute"}, {memory, "memory"}, {links, "links"}, {network, "network"}, {host, "host"}};
  const auto most = std::max_element(std::begin(all), std::end(all), [](const auto& a, const auto& b) { return a.first < b.first; });
  return most->first > 0 ? most->second : "nothing";
}

double RunPlan::seconds() const {
  double sum = 0;
  for (const PlanPart& part : parts) sum += part.seconds;
  // The trainers run what was drawn once, forward alone, before their optimizer: a third or a quarter of what they do besides.
  const double rollout = parts[0].seconds, train = parts[1].seconds;
  return input.ahead && !shared ? sum - std::min(rollout, train) + rescore_seconds() : sum;
}

double RunPlan::rescore_seconds() const {
  const bool exact = !input.rollout_fp8 || is_quantized(input.numerics);
  return input.ahead && exact ? parts[1].seconds / (input.recompute ? 4 : 3) : 0;
}

double RunPlan::memory_traffic() const {
  double sum = 0;
  for (const PlanPart& part : parts) sum += part.memory * input.device.memory_rate;
  return sum;
}

Result<RunPlan> make_run_plan(const PlanInput& input) {
  const int64_t context = input.prompt_tokens + input.response_tokens;
  if (context > input.model.max_positions)
    return errorf("a prompt of {} tokens with a response of {} is longer than the model's {} positions", input.prompt_tokens, input.response_tokens,
                  input.model.max_positions);
  const Planner planner(input);
  const double usable = kUsable * input.device.memory_bytes;
  const auto resolve = [&](const Layout& wanted, bool train) -> Result<Layout> {
    Result<Layout> layout = resolve_layout(wanted, planner.limits(train));
    if (layout) return layout;
    return errorf("{}: {}\n  {}", train ? "trainer" : "sampler", layout.message(), suggestion(input, train, usable));
  };
  const Result<Layout> train = resolve(input.train, true), rollout = resolve(input.rollout, false);
  if (!train) return train.status();
  if (!rollout) return rollout.status();

  const Planner::Side t = planner.trainer(train.value());
  const Planner::Side s = planner.sampler(rollout.value());
  RunPlan plan;
  plan.input = input;
  plan.trainer = t.plan;
  plan.sampler = s.plan;
  const std::vector<TensorSpec> table = tensor_table(input.model);
  plan.parameters = count_parameters(table);
  plan.draft_parameters = draft_block_parameters(input.model);
  plan.active_parameters = active_parameters(input.model);
  plan.shared = input.rollout_ranks == 0;
  plan.micro_batches = t.micro_batches;
  plan.bubble = t.bubble;
  plan.train_flops = t.flops;
  plan.rollout_flops = s.flops;
  plan.parts = {s.parts.front(), t.parts[0], t.parts[1], planner.sync(t, s, &plan.sync)};
  if (planner.apart(t, s)) {
    const Grid grid(rollout.value());
    const auto held = tensor_table(input.model, shard_of(input.model, grid, s.plan.stages, 0));
    const auto trained = tensor_table(input.model, shard_of(input.model, Grid(train.value()), t.plan.stages, t.plan.rank));
    const Numerics sampler = input.rollout_fp8 ? Numerics::fp8 : input.numerics;
    const Device device = std::string_view(input.device.name) == "cpu" ? Device::cpu : Device::gpu;
    const auto buffers = [&](const std::vector<TensorSpec>& from, const std::vector<TensorSpec>& to) {
      return OwnerBytes{"sync buffers", transfer_bytes({from, input.numerics}, {to, sampler}, input.ranks + input.rollout_ranks, Transfer::kBucketBytes, device)};
    };
    if (plan.shared) {
      plan.sampler.memory.push_back(buffers(trained, held));
    } else {  // codes are the trainer's, what lands is the sampler's
      plan.trainer.memory.push_back(buffers(trained, {}));
      plan.sampler.memory.push_back(buffers({}, held));
    }
  } else {
    std::erase_if(plan.sampler.memory, [](const OwnerBytes& o) { return o.owner == "weights" || o.owner == "panels"; });  // the trainer's
  }

  const auto trainer_needs = static_cast<double>(total_bytes(plan.trainer.memory)), sampler_needs = static_cast<double>(total_bytes(plan.sampler.memory));
  const auto check = [&](const char* side, double needs, double other, const MemoryByOwner& memory, bool is_train) {
    if (needs + other <= usable) return;
    plan.misfit += fmt::format("{}the {} needs {:.1f} GB{} of {:.1f} usable; its largest owner: {}{}", plan.misfit.empty() ? "" : "\n", side, needs / 1e9,
                               other > 0 ? fmt::format(" beside the other's {:.1f} GB", other / 1e9) : "", usable / 1e9, largest_owner(memory), remedies(input, memory));
    plan.suggestion += fmt::format("{}{}", plan.suggestion.empty() ? "" : "\n", suggestion(input, is_train, usable - other));
  };
  if (plan.shared) {
    const bool trainer_is_larger = trainer_needs >= sampler_needs;
    check(trainer_is_larger ? "trainer" : "sampler", std::max(trainer_needs, sampler_needs), std::min(trainer_needs, sampler_needs),
          trainer_is_larger ? plan.trainer.memory : plan.sampler.memory, trainer_is_larger);
  } else {
    check("trainer", trainer_needs, 0, plan.trainer.memory, true);
    check("sampler", sampler_needs, 0, plan.sampler.memory, false);
  }
  plan.fits = plan.misfit.empty();
  return plan;
}

namespace {

std::string memory_text(const char* side, const SidePlan& s, const PlanInput& p) {
  std::string text = fmt::format("\nmemory of the fullest {} rank ({})\n", side, s.rank);
  for (const OwnerBytes& o : s.memory) text += fmt::format("  {:<22} {:>9.3f} GB\n", o.owner, static_cast<double>(o.bytes) / 1e9);
  text += fmt::format("  {:<22} {:>9.3f} GB of {:.0f}\n", "together", static_cast<double>(total_bytes(s.memory)) / 1e9, p.device.memory_bytes / 1e9);
  for (const OwnerBytes& o : s.host_memory) text += fmt::format("  {:<22} {:>9.3f} GB on the host, {:.0f} a node\n", o.owner, static_cast<double>(o.bytes) / 1e9,
                                                            static_cast<double>(o.bytes) / 1e9 * p.device.per_node);
  return text;
}

std::string traffic_text(const char* what, const SidePlan& s) {
  if (s.traffic.empty()) return "";
  std::string text = fmt::format("\ncommunication of rank {} in {}{:<14}{:>10} {:>16} {:>16}\n", s.rank, what, "", "calls", "bytes sent", "bytes received");
  for (const auto& [name, t] : s.traffic) text += fmt::format("  {:<40} {:>10} {:>16} {:>16}\n", name, t.calls, t.bytes.sent, t.bytes.received);
  return text;
}

JsonLine memory_json(const MemoryByOwner& memory) {
  JsonLine line;
  for (const OwnerBytes& o : memory) line.add(o.owner, o.bytes);
  return line;
}

JsonLine side_json(const SidePlan& s) {
  JsonLine traffic;
  for (const auto& [name, t] : s.traffic) traffic.add(name, JsonLine().add("calls", t.calls).add("sent", t.bytes.sent).add("received", t.bytes.received));
  std::vector<int64_t> stages;
  for (const Range& r : s.stages) stages.push_back(r.size());
  return JsonLine()
      .add("tp", s.layout.tp).add("pp", s.layout.pp).add("ep", s.layout.ep).add("dp", s.layout.dp)
      .add("stages", std::span<const int64_t>(stages))
      .add("rank", s.rank)
      .add("bytes", memory_json(s.memory))
      .add("bytes_together", total_bytes(s.memory))
      .add("host_bytes", memory_json(s.host_memory))
      .add("traffic", traffic);
}

}  // namespace

std::string plan_text(const RunPlan& plan) {
  const PlanInput& p = plan.input;
  std::string stages;
  for (const Range& r : plan.trainer.stages) stages += fmt::format("{}{}", stages.empty() ? "" : ",", r.size());
  std::string text = fmt::format(
      "model     {}: {:.3f} B parameters, {:.3f} B active; draft block {:.3f} B, with it {:.3f} B\n"
      "device    {}: {:.0f} GB, {:.1f} TFLOP/s bf16, {:.1f} fp8, memory {:.2f} TB/s, links {:.0f} GB/s, network {:.1f} GB/s, {} a node\n"
      "trainer   {} ranks: {}; layers {}; {}{}{}\n"
      "sampler   {} ranks{}: {}; {}\n"
      "step      {} prompts x {} samples of {} + {} tokens; {} micro-batches of up to {} tokens; {} running samples an engine\n",
      p.model_name, static_cast<double>(plan.parameters) / 1e9, static_cast<double>(plan.active_parameters) / 1e9, static_cast<double>(plan.draft_parameters) / 1e9,
      static_cast<double>(plan.parameters + plan.draft_parameters) / 1e9, p.device.name, p.device.memory_bytes / 1e9, p.device.bf16_flops / 1e12,
      p.device.fp8_flops / 1e12, p.device.memory_rate / 1e12, p.device.link_rate / 1e9, p.device.network_rate / 1e9, p.device.per_node, plan.trainer.layout.ranks(),
      plan.trainer.layout.str(), stages, numerics_name(p.numerics), p.recompute ? ", recompute" : "", p.offload_optimizer ? ", optimizer on the host" : "",
      plan.sampler.layout.ranks(), plan.shared ? ", the trainer's" : " of their own", plan.sampler.layout.str(), p.rollout_fp8 ? "fp8" : numerics_name(p.numerics),
      p.prompts, p.samples, p.prompt_tokens, p.response_tokens, plan.micro_batches, p.microbatch_tokens, p.max_running);
  text += memory_text("trainer", plan.trainer, p) + memory_text("sampler", plan.sampler, p);
  text += plan.fits ? "\nit fits\n" : fmt::format("\nit does not fit: {}\n{}\n", plan.misfit, plan.suggestion);
  text += fmt::format("\n{:<10} {:>9}  {:<9} {:>9} {:>9} {:>9} {:>9} {:>9}   at least; seconds by resource\n", "one step", "seconds", "bound by", "compute", "memory",
                      "links", "network", "host");
  for (const PlanPart& part : plan.parts)
    text += fmt::format("{:<10} {:>9.3f}  {:<9} {:>9.3f} {:>9.3f} {:>9.3f} {:>9.3f} {:>9.3f}\n", part.name, part.seconds, part.bound(), part.compute, part.memory,
                        part.links, part.network, part.host);
  const std::string ahead = p.ahead && !plan.shared ? fmt::format("; rollout beside training, and {:.3f} s to compare its log-probs", plan.rescore_seconds()) : "";
  text += fmt::format("{:<10} {:>9.3f}  pipeline bubble {:.1f}% of train{}\n", "together", plan.seconds(), 100 * plan.bubble, ahead);
  text += fmt::format("{:.3g} FLOP of training, {:.3g} of rollout, all ranks; {:.2f} TB through the memory of the busiest; its sync {:.2f} GB sent, {:.2f} received\n",
                      plan.train_flops, plan.rollout_flops, plan.memory_traffic() / 1e12, static_cast<double>(plan.sync.sent) / 1e9,
                      static_cast<double>(plan.sync.received) / 1e9);
  return text + traffic_text("training", plan.trainer) + traffic_text("rollout ", plan.sampler);
}

std::string plan_json(const RunPlan& plan) {
  JsonLine parts;
  for (const PlanPart& part : plan.parts) {
    parts.add(part.name, JsonLine().add("seconds", part.seconds).add("bound", part.bound()).add("compute", part.compute).add("memory", part.memory)
                             .add("links", part.links).add("network", part.network).add("host", part.host));
  }
  return JsonLine()
      .add("model", plan.input.model_name).add("device", plan.input.device.name)
      .add("parameters", plan.parameters).add("active_parameters", plan.active_parameters).add("draft_parameters", plan.draft_parameters)
      .add("fits", plan.fits).add("misfit", plan.misfit).add("suggestion", plan.suggestion)
      .add("trainer", side_json(plan.trainer)).add("sampler", side_json(plan.sampler))
      .add("micro_batches", plan.micro_batches).add("bubble", plan.bubble)
      .add("memory_traffic", plan.memory_traffic()).add("train_flops", plan.train_flops).add("rollout_flops", plan.rollout_flops)
      .add("sync", JsonLine().add("sent", plan.sync.sent).add("received", plan.sync.received))
      .add("parts", parts).add("seconds", plan.seconds())
      .str();
}

}  // namespace lockstep
