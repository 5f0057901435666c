// lockstep gates: the exactness gates of rl spec 15, in one process or in all ranks that mpirun or srun started.

#include <algorithm>
#include <cstdio>

#include "cli/console.h"
#include "io/file.h"
#include "rl/gates.h"

namespace lockstep {

namespace {

Result<GatesOptions> gates_options(const GatesArgs& args) {
  if (!args.model_config.empty() && !args.checkpoint.empty()) return Status::error("gates takes --config or --checkpoint, not both");
  ResolvedConfig config = default_config();
  // Weights must move in ten updates; a run file or --set says otherwise.
  LOCKSTEP_RETURN_IF_ERROR(apply_override(config, "optimizer.lr=1e-3"));
  LOCKSTEP_RETURN_IF_ERROR(apply_override(config, "optimizer.freeze_router=false"));
  if (!args.config.empty()) {
    Result<ResolvedConfig> loaded = load_config(args.config, {});
    if (!loaded) return loaded.status();
    config = loaded.take();
    LOCKSTEP_RETURN_IF_ERROR(resolve_init(config.values));
  }
  for (const std::string& o : args.overrides) LOCKSTEP_RETURN_IF_ERROR(apply_override(config, o));
  PolicyOptions& model = config.values.model;
  if (args.config.empty()) model.init.clear();
  if (!args.model_config.empty()) {
    model.config = args.model_config;
    model.init = "random";
  }
  if (!args.checkpoint.empty()) {
    const Result<std::string> checkpoint = find_checkpoint(args.checkpoint);
    if (!checkpoint) return checkpoint.status();
    model.config.clear();
    model.init = checkpoint.value();
  }
  LOCKSTEP_RETURN_IF_ERROR(check_config(config));
  GatesOptions o;
  o.model = model;
  o.numerics.clear();
  for (const Numerics n : kAllNumerics)
    for (const std::string& name : args.numerics)
      if (name == numerics_name(n)) o.numerics.push_back(n);
  o.tokens = args.tokens;
  o.only = args.only;
  o.seed = static_cast<uint64_t>(config.values.run.seed);
  o.threads = config.values.run.threads;
  o.parallel = config.values.parallel;
  o.optimizer = config.values.optimizer;
  return o;
}

std::string results_json(const std::vector<GateResult>& results, const GatesArgs& args, int ranks, int64_t failed) {
  std::string text = fmt::format("{{\"tokens_asked\":{},\"ranks\":{},\"failed\":{},\"gates\":[", args.tokens, ranks, failed);
  for (size_t i = 0; i < results.size(); ++i) text += (i > 0 ? ",\n" : "\n") + results[i].json();
  return text + "\n]}\n";
}

int run_on(RankWorld& world, const Result<GatesOptions>& options, const GatesArgs& args) {
  const bool speaks = world.rank() == 0;
  if (const Status s = world.all().agree(options.status(), "settings"); !s) return speaks ? fail(kExitBadInput, s) : kExitBadInput;
  Console console(speaks);
  const Result<std::vector<GateResult>> results = run_gates(options.value(), console.hooks(), &world, [&](const GateResult& r) {
    if (!speaks) return;
    std::printf("%s\n", r.str().c_str());
    std::fflush(stdout);
  });
  if (!results) return console.fail(results.status());
  const auto failed = std::count_if(results.value().begin(), results.value().end(), [](const GateResult& r) { return r.verdict == Verdict::fail; });
  Status written;
  if (speaks) {
    if (args.tokens < kGateTokens) std::printf("scaled down: rl spec 15 asks for %lld tokens\n", static_cast<long long>(kGateTokens));
    std::printf(failed == 0 ? "gates: pass\n" : "gates: %lld FAILED\n", static_cast<long long>(failed));
    if (!args.out.empty()) written = atomic_write(args.out, results_json(results.value(), args, world.size(), failed));
  }
  if (const Status s = world.all().agree(written, "results"); !s) return console.fail(s);
  return failed == 0 ? kExitOk : kExitFailure;
}

}  // namespace

int gates_command(const GatesArgs& args) {
  const Result<GatesOptions> options = gates_options(args);
  WatchdogOptions watchdog;
  if (options) watchdog.deadline_s = options.value().parallel.deadline_s;
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start(watchdog);
  if (!started) return fail(kExitBadInput, started.status());
  RankWorld& world = *started.value();
  const int code = run_on(world, options, args);
  world.finish();
  return code;
}

}  // namespace lockstep
