// lockstep train RUN.toml: the reinforcement learning loop, in one process or in all ranks that mpirun or srun started.

#include <cstdio>

#include <fmt/core.h>

#include "cli/console.h"
#include "parallel/collective.h"

namespace lockstep {

namespace {

Result<ResolvedConfig> read_settings(const RunArgs& args) {
  Result<ResolvedConfig> config = load_config(args.config, args.overrides);
  if (!config) return config;
  LOCKSTEP_RETURN_IF_ERROR(check_train_config(config.value()));
  LOCKSTEP_RETURN_IF_ERROR(resolve_init(config.value().values));
  return config;
}

int run_on(RankWorld& world, const Result<ResolvedConfig>& config, bool resume) {
  const bool speaks = world.rank() == 0;
  if (const Status s = world.all().agree(config.status(), "settings"); !s) return speaks ? fail(kExitBadInput, s) : kExitBadInput;
  const RunConfig& values = config.value().values;
  constexpr std::string_view kSections[] = {"run", "parallel", "model", "task", "rollout", "train", "optimizer", "eval"};
  if (speaks) std::fputs(config_table(values, kSections).c_str(), stderr);

  Console console(speaks);
  Result<LoopReport> report = run_loop(make_loop_config(values), resume, console.hooks(), &world);
  if (!report) return console.fail(report.status());
  console.progress().clear();
  if (!speaks) return kExitOk;
  const LoopReport& r = report.value();
  if (resume && r.first_step == r.last_step) {
    std::printf("nothing left to do: the run is at step %lld and run.steps is %lld\n", static_cast<long long>(r.last_step),
                static_cast<long long>(values.run.steps));
    return kExitOk;
  }
  fmt::print("steps {} to {}; {} samples drawn, {} taken from the log; {} log-probs compared, largest gap {}; checkpoint {}\n", r.first_step, r.last_step,
             r.samples_drawn, r.samples_logged, r.compared_tokens, r.max_gap, r.checkpoint);
  return kExitOk;
}

}  // namespace

int train_command(const RunArgs& args) {
  // Settings come first because the watchdog needs its deadline; what is wrong with them is said once all ranks can agree on it.
  const Result<ResolvedConfig> config = read_settings(args);
  WatchdogOptions watchdog;
  if (config) watchdog.deadline_s = config.value().values.parallel.deadline_s;
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start(watchdog);
  if (!started) return fail(kExitBadInput, started.status());
  RankWorld& world = *started.value();
  const int code = run_on(world, config, args.resume);
  world.finish();
  return code;
}

}  // namespace lockstep
