// lockstep plan: whether a model fits onto devices under a layout, what its ranks tell each other, and how long a step takes at least.

#include <cstdio>
#include <vector>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/known_models.h"
#include "cli/names.h"
#include "rl/layouts.h"
#include "rl/run_plan.h"

namespace lockstep {

namespace {

Result<DeviceSpec> find_device(const std::string& name) {
  std::vector<std::string_view> names;
  std::string list;
  for (const DeviceSpec& d : device_specs()) {
    if (name == d.name) return d;
    names.emplace_back(d.name);
    list += fmt::format("{}{}", list.empty() ? "" : ", ", d.name);
  }
  const std::string near = nearest_name(name, names);
  return errorf("--device {}: not a known device{}; there are {}", name, near.empty() ? "" : ", did you mean " + near + "?", list);
}

Result<PlanInput> read_input(const PlanArgs& a) {
  PlanInput p;
  ParallelOptions parallel;
  std::string model = a.model;
  if (!a.config.empty()) {
    Result<ResolvedConfig> config = load_config(a.config, a.overrides);
    if (!config) return config.status();
    LOCKSTEP_RETURN_IF_ERROR(resolve_init(config.value().values));
    const RunConfig& run = config.value().values;
    parallel = run.parallel;
    p.numerics = run.model.numerics;
    p.prompts = run.rollout.prompts_per_step;
    p.samples = run.rollout.samples_per_prompt;
    p.prompt_tokens = run.task.max_prompt_tokens;
    p.response_tokens = run.rollout.max_new_tokens;
    p.microbatch_tokens = run.train.microbatch_tokens;
    p.max_running = run.rollout.max_running;
    p.recompute = run.train.recompute;
    p.replay = run.train.replay;
    p.ahead = run.rollout.ahead > 0;
    if (model.empty()) {
      Result<ModelConfig> found = find_model_config(run.model);
      if (!found) return found.status();
      p.model = found.take();
      p.model_name = run.model.config.empty() ? run.model.init : run.model.config;
    }
  } else if (model.empty()) {
    model = "flash";
  }
  if (!model.empty()) {
    Result<ModelConfig> found = known_model(model);
    if (!found) return found.status();
    p.model = found.take();
    p.model_name = model;
  }
  const Result<DeviceSpec> device = find_device(a.device);
  if (!device) return device.status();
  p.device = device.value();

  // A flag that is 0 was not given.
  const auto take = [](int64_t flag, int64_t& value) {
    if (flag > 0) value = flag;
  };
  take(a.tp, parallel.tp), take(a.pp, parallel.pp), take(a.ep, parallel.ep), take(a.dp, parallel.dp);
  take(a.rollout_tp, parallel.rollout_tp), take(a.rollout_ep, parallel.rollout_ep);
  take(a.prompts, p.prompts), take(a.samples, p.samples), take(a.prompt_tokens, p.prompt_tokens), take(a.response_tokens, p.response_tokens);
  take(a.microbatch_tokens, p.microbatch_tokens), take(a.max_running, p.max_running);
  if (!a.numerics.empty()) p.numerics = a.numerics == "f32" ? Numerics::f32 : Numerics::bf16;
  p.rollout_fp8 = a.rollout_numerics == "fp8";
  p.recompute = p.recompute || a.recompute;
  p.offload_optimizer = a.offload_optimizer;
  p.ahead = p.ahead || a.ahead;
  p.hot = a.hot;
  p.ranks = static_cast<int>(a.ranks > 0 ? a.ranks : parallel.tp * parallel.pp * std::max(parallel.dp, parallel.ep));
  take(a.rollout_ranks, parallel.rollout_ranks);
  p.rollout_ranks = static_cast<int>(parallel.rollout_ranks);
  p.train = {.tp = static_cast<int>(parallel.tp), .pp = static_cast<int>(parallel.pp), .ep = static_cast<int>(parallel.ep), .dp = static_cast<int>(parallel.dp)};
  p.rollout = {.tp = static_cast<int>(std::max<int64_t>(1, parallel.rollout_tp)), .ep = static_cast<int>(parallel.rollout_ep > 0 ? parallel.rollout_ep : parallel.ep)};
  if (!parallel.stages.empty()) {
    Result<StageLayers> stages = listed_stages(parallel.stages, p.train.pp, p.model.num_layers());
    if (!stages) return stages.status();
    p.stages = stages.take();
  }
  if (p.prompts * p.samples < 1) return errorf("{} prompts of {} samples", p.prompts, p.samples);
  return p;
}

}  // namespace

int plan_command(const PlanArgs& args) {
  const Result<PlanInput> input = read_input(args);
  if (!input) return fail(kExitBadInput, input.status());
  const Result<RunPlan> plan = make_run_plan(input.value());
  if (!plan) return fail(kExitBadInput, plan.status());
  std::printf("%s", args.json ? (plan_json(plan.value()) + "\n").c_str() : plan_text(plan.value()).c_str());
  return plan.value().fits ? kExitOk : kExitFailure;
}

}  // namespace lockstep
