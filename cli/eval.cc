// lockstep eval: pass@k of a checkpoint on a file of problems, in one process or in all ranks that mpirun or srun started, whose engines share the problems.

#include <cstdio>
#include <filesystem>
#include <optional>

#include "cli/console.h"
#include "parallel/collective.h"
#include "io/file.h"
#include "io/json.h"

namespace lockstep {

namespace {

// RUN.toml's settings, or the checkpoint's own; the weights are always the checkpoint's when one is known.
Result<ResolvedConfig> eval_config(const EvalArgs& args) {
  if (args.config.empty() && args.checkpoint.empty()) return errorf("eval needs RUN.toml, or --checkpoint DIR --data FILE");
  ResolvedConfig config = default_config();
  std::string run_dir;
  std::error_code error;
  if (std::filesystem::is_directory(args.config, error))
    return errorf("{} is a directory where eval takes RUN.toml; for a checkpoint or run write --checkpoint {}", args.config,
                  args.config);
  if (!args.config.empty()) {
    Result<ResolvedConfig> loaded = load_config(args.config, args.overrides);
    if (!loaded) return loaded.status();
    config = loaded.take();
    LOCKSTEP_RETURN_IF_ERROR(resolve_init(config.values));
    run_dir = config.values.run.dir;
  }
  std::string source = args.checkpoint;
  if (source.empty() && !run_dir.empty() && std::filesystem::exists(run_dir + "/checkpoints", error)) source = run_dir;
  if (!source.empty()) {
    Result<std::string> checkpoint = find_checkpoint(source);
    if (!checkpoint) return checkpoint.status();
    Result<ResolvedConfig> own = checkpoint_config(checkpoint.value());
    if (!own) return own.status();
    if (args.config.empty()) {
      config = own.take();
      for (const std::string& o : args.overrides) LOCKSTEP_RETURN_IF_ERROR(apply_override(config, o));
      LOCKSTEP_RETURN_IF_ERROR(check_config(config));
    } else {
      config.values.model.config.clear();
      config.values.model.tokenizer.clear();
      config.values.model.init = own.value().values.model.init;
    }
  }
  if (!args.data.empty()) config.values.task.eval_file = args.data;
  LOCKSTEP_RETURN_IF_ERROR(check_eval_config(config));
  return config;
}

// Only the sampler's layout counts here; the trainer's belongs to the run that wrote the checkpoint.
ParallelOptions sampler_only(const ParallelOptions& p) { return {.rollout_tp = p.rollout_tp, .rollout_ep = p.rollout_ep}; }

int run_on(RankWorld& world, const Result<ResolvedConfig>& config, const EvalArgs& args) {
  const bool speaks = world.rank() == 0;
  Peers peers(&world);
  if (const Status s = peers.agree(config.status(), "settings"); !s) return speaks ? fail(kExitBadInput, s) : kExitBadInput;
  const RunConfig& c = config.value().values;

  Console console(speaks);
  if (const Status s = peers.same(checksum(config_toml(c)), "settings"); !s) return console.fail(s);
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = static_cast<int>(c.run.threads)};
  use.engine.max_running = c.rollout.max_running;
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.max_context = c.task.max_prompt_tokens + c.eval.max_new_tokens;
  const Result<ModelConfig> model = find_model_config(c.model);
  Result<Layouts> layouts = model ? resolve_layouts(sampler_only(c.parallel), model.value(), use.engine.max_context, world.size()) : model.status();
  if (const Status s = peers.agree(layouts.status(), "layouts"); !s) return console.fail(s);
  std::optional<RunGroups> groups;
  if (!peers.alone()) {
    groups.emplace(make_run_groups(world, layouts.value(), model.value(), c.model.numerics));
    use.ranks = &*groups;
    use.threads = peers.threads(c.run.threads);
    peers = Peers(&world, &groups->rollout);
  }
  Result<std::unique_ptr<Policy>> policy = Policy::make(c.model, use);
  if (const Status s = peers.agree(policy.status(), "weights"); !s) return console.fail(s);
  TaskCounts counts;
  Result<std::vector<Prompt>> problems = load_prompts(c.task.eval_file, policy.value()->tokenizer(), c.task, &counts);
  if (const Status s = peers.agree(problems.status(), "problems"); !s) return console.fail(s);
  if (const Status s = peers.same(checksum(fingerprint(problems.value())), "problems"); !s) return console.fail(s);
  console.hooks().say(fmt::format("{}: {}", c.task.eval_file, counts.str()));
  console.hooks().begin();

  std::string records;
  Result<EvalReport> report =
      evaluate(*policy.value(), problems.value(), c.task.reward, c.eval, console.hooks(), "eval", &records, peers);
  if (!report) return console.fail(report.status());
  console.progress().clear();
  if (!speaks) return kExitOk;
  if (!args.records.empty()) {
    if (const Status s = atomic_write(args.records, records); !s) return console.fail(s);
  }
  const std::string set = std::filesystem::path(c.task.eval_file).stem().string();
  if (args.json) {
    JsonLine line;
    line.add("checkpoint", c.model.init)
        .add("data", c.task.eval_file)
        .add("problems", report.value().num_problems)
        .add("samples", report.value().num_samples)
        .add("temperature", c.eval.temperature)
        .add("top_p", c.eval.top_p);
    for (const auto& [name, value] : report.value().values(set)) line.add(name, value);
    std::printf("%s\n", line.str().c_str());
  } else {
    std::printf("%s on %s, temperature %g, top_p %g\n%s\n", c.model.init.c_str(), c.task.eval_file.c_str(), c.eval.temperature,
                c.eval.top_p, report.value().str().c_str());
  }
  return kExitOk;
}

}  // namespace

int eval_command(const EvalArgs& args) {
  const Result<ResolvedConfig> config = eval_config(args);
  WatchdogOptions watchdog;
  if (config) watchdog.deadline_s = config.value().values.parallel.deadline_s;
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start(watchdog);
  if (!started) return fail(kExitBadInput, started.status());
  RankWorld& world = *started.value();
  const int code = run_on(world, config, args);
  world.finish();
  return code;
}

}  // namespace lockstep
