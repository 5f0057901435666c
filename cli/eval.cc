// lockstep eval: pass@k of a checkpoint on a file of problems.

#include <cstdio>
#include <filesystem>

#include "cli/console.h"
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

}  // namespace

int eval_command(const EvalArgs& args) {
  Result<ResolvedConfig> config = eval_config(args);
  if (!config) return fail(kExitBadInput, config.status());
  const RunConfig& c = config.value().values;

  Console console;
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = static_cast<int>(c.run.threads)};
  use.engine.max_running = c.rollout.max_running;
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.max_context = c.task.max_prompt_tokens + c.eval.max_new_tokens;
  Result<std::unique_ptr<Policy>> policy = Policy::make(c.model, use);
  if (!policy) return console.fail(policy.status());
  TaskCounts counts;
  Result<std::vector<Prompt>> problems = load_prompts(c.task.eval_file, policy.value()->tokenizer(), c.task, &counts);
  if (!problems) return console.fail(problems.status());
  console.hooks().say(fmt::format("{}: {}", c.task.eval_file, counts.str()));
  console.hooks().begin();

  std::string records;
  Result<EvalReport> report =
      evaluate(*policy.value(), problems.value(), c.task.reward, c.eval, console.hooks(), "eval", &records);
  if (!report) return console.fail(report.status());
  console.progress().clear();
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

}  // namespace lockstep
