// lockstep sft RUN.toml: supervised training on prompts with completions.

#include <cstdio>

#include "cli/console.h"

namespace lockstep {

int sft_command(const RunArgs& args) {
  Result<ResolvedConfig> config = load_config(args.config, args.overrides);
  if (!config) return fail(kExitBadInput, config.status());
  if (const Status s = check_sft_config(config.value()); !s) return fail(kExitBadInput, s);
  if (const Status s = resolve_init(config.value().values); !s) return fail(kExitBadInput, s);
  constexpr std::string_view kSections[] = {"run", "model", "sft", "optimizer"};
  std::fputs(config_table(config.value().values, kSections).c_str(), stderr);

  Console console;
  Result<SftReport> report = run_sft(make_sft_config(config.value().values), args.resume, console.hooks());
  if (!report) return console.fail(report.status());
  console.progress().clear();
  const SftReport& r = report.value();
  if (args.resume && r.steps == 0) {
    std::printf("nothing left to do: sft.steps is %lld; checkpoint %s\n",
                static_cast<long long>(config.value().values.sft.steps), r.checkpoint.c_str());
    return kExitOk;
  }
  std::printf("%lld steps, loss %.4f to %.4f; checkpoint %s\n", static_cast<long long>(r.steps), r.first_loss, r.last_loss,
              r.checkpoint.c_str());
  return kExitOk;
}

}  // namespace lockstep
