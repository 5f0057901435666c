// lockstep train RUN.toml: the reinforcement learning loop.

#include <cstdio>

#include "cli/console.h"

namespace lockstep {

int train_command(const RunArgs& args) {
  Result<ResolvedConfig> config = load_config(args.config, args.overrides);
  if (!config) return fail(kExitBadInput, config.status());
  if (const Status s = check_train_config(config.value()); !s) return fail(kExitBadInput, s);
  if (const Status s = resolve_init(config.value().values); !s) return fail(kExitBadInput, s);
  constexpr std::string_view kSections[] = {"run", "model", "task", "rollout", "train", "optimizer", "eval"};
  std::fputs(config_table(config.value().values, kSections).c_str(), stderr);

  Console console;
  Result<LoopReport> report = run_loop(make_loop_config(config.value().values), args.resume, console.hooks());
  if (!report) return console.fail(report.status());
  console.progress().clear();
  const LoopReport& r = report.value();
  if (args.resume && r.first_step == r.last_step) {
    std::printf("nothing left to do: the run is at step %lld and run.steps is %lld\n", static_cast<long long>(r.last_step),
                static_cast<long long>(config.value().values.run.steps));
    return kExitOk;
  }
  std::printf("steps %lld to %lld; %lld log-probs compared, largest gap %g; checkpoint %s\n",
              static_cast<long long>(r.first_step), static_cast<long long>(r.last_step),
              static_cast<long long>(r.compared_tokens), r.max_gap, r.checkpoint.c_str());
  return kExitOk;
}

}  // namespace lockstep
