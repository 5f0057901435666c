// lockstep demo RUN.toml: from random weights to a model that has learned by reinforcement, in one command.
//
//   make the task -> supervised warm start -> evaluate -> reinforcement learning -> evaluate -> table
//
// RUN.toml's run.dir receives data/, sft/ and train/, the last two ordinary run directories.

#include <chrono>
#include <cstdio>
#include <filesystem>

#include "cli/arithmetic_task.h"
#include "cli/console.h"
#include "core/log.h"
#include "io/file.h"
#include "io/json.h"

namespace lockstep {

namespace {

// An earlier demo is never overwritten: DIR, else DIR-2, DIR-3 and so on.
std::string unused_directory(const std::string& wanted) {
  std::error_code error;
  std::string path = wanted;
  for (int n = 2; std::filesystem::exists(path, error); ++n) path = fmt::format("{}-{}", wanted, n);
  return path;
}

Result<EvalReport> evaluate_checkpoint(const RunConfig& c, const std::string& checkpoint, const std::string& records_path,
                                       Console& console) {
  PolicyOptions model = c.model;
  model.config.clear();
  model.init = checkpoint;
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = static_cast<int>(c.run.threads)};
  use.engine.max_running = c.rollout.max_running;
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.graphs = c.rollout.graphs;
  use.engine.max_context = c.task.max_prompt_tokens + c.eval.max_new_tokens;
  Result<std::unique_ptr<Policy>> policy = Policy::make(model, use);
  if (!policy) return policy.status();
  Result<std::vector<Prompt>> problems = load_prompts(c.task.eval_file, policy.value()->tokenizer(), c.task, nullptr);
  if (!problems) return problems.status();
  std::string records;
  Result<EvalReport> report =
      evaluate(*policy.value(), problems.value(), c.task.reward, c.eval, console.hooks(), "eval", &records);
  if (!report) return report;
  LOCKSTEP_RETURN_IF_ERROR(atomic_write(records_path, records));
  console.hooks().say("eval: " + report.value().str());
  return report;
}

double rate(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

}  // namespace

int demo_command(const RunArgs& args) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  Result<ResolvedConfig> loaded = load_config(args.config, args.overrides);
  if (!loaded) return fail(kExitBadInput, loaded.status());
  ResolvedConfig config = loaded.take();
  RunConfig& c = config.values;
  if (c.run.dir.empty()) return fail(kExitBadInput, errorf("{}: run.dir is empty; the demo needs a directory", args.config));
  const std::string dir = unused_directory(c.run.dir), data = dir + "/data";
  c.model.tokenizer = data;
  c.sft.file = data + "/sft.jsonl";
  c.task.train_file = data + "/train.jsonl";
  c.task.eval_file = data + "/eval.jsonl";
  for (const Status& s : {check_sft_config(config), check_train_config(config), check_eval_config(config)}) {
    if (!s) return fail(kExitBadInput, s);
  }

  Console console;
  const Hooks& hooks = console.hooks();
  const Status made = write_arithmetic_task({.directory = data,
                                             .seed = c.run.seed,
                                             .num_train = c.demo.train_problems,
                                             .num_eval = c.demo.eval_problems,
                                             .num_sft = c.demo.sft_examples,
                                             .difficulty_min = static_cast<int>(c.demo.difficulty_min),
                                             .difficulty_max = static_cast<int>(c.demo.difficulty_max),
                                             .families = c.demo.families,
                                             .unboxed_share = c.demo.unboxed_share});
  if (!made) return console.fail(made);
  if (const Status s = log_to_file(dir + "/demo.log"); !s) return console.fail(s);
  hooks.say(fmt::format("1/5  task: {} worked examples, {} problems, {} held out, in {}", c.demo.sft_examples,
                        c.demo.train_problems, c.demo.eval_problems, data));

  hooks.say("2/5  supervised warm start from random weights");
  c.run.dir = dir + "/sft";
  Result<SftReport> sft = run_sft(make_sft_config(c), false, hooks);
  if (!sft) return console.fail(sft.status());

  hooks.say("3/5  evaluation before reinforcement learning");
  Result<EvalReport> before = evaluate_checkpoint(c, sft.value().checkpoint, dir + "/eval_before.jsonl", console);
  if (!before) return console.fail(before.status());

  hooks.say(
      fmt::format("4/5  reinforcement learning: {} steps of {} prompts x {} samples; sampler and trainer must agree bit for bit",
                  c.run.steps, c.rollout.prompts_per_step, c.rollout.samples_per_prompt));
  c.run.dir = dir + "/train";
  c.model.init = sft.value().checkpoint;
  Result<LoopReport> loop = run_loop(make_loop_config(c), false, hooks);
  if (!loop) return console.fail(loop.status());

  hooks.say("5/5  evaluation after reinforcement learning");
  Result<EvalReport> after = evaluate_checkpoint(c, loop.value().checkpoint, dir + "/eval_after.jsonl", console);
  if (!after) return console.fail(after.status());
  console.progress().clear();

  const SftReport& s = sft.value();
  const LoopReport& r = loop.value();
  const EvalReport &b = before.value(), &a = after.value();
  const double total_s = std::chrono::duration<double>(Clock::now() - start).count();
  const double eval_s = b.seconds + a.seconds + r.eval_seconds;
  std::printf("\n%lld held-out problems, %lld samples each, temperature %g\n", static_cast<long long>(b.num_problems),
              static_cast<long long>(b.num_samples), c.eval.temperature);
  std::printf("             before RL   after RL\n");
  for (size_t i = 0; i < b.pass_at_k.size(); ++i) {
    std::printf("  pass@%-4lld  %8.3f   %8.3f\n", static_cast<long long>(b.pass_at_k[i].k), b.pass_at_k[i].estimate.value,
                a.pass_at_k[i].estimate.value);
  }
  std::printf("  std error  %8.3f   %8.3f   of pass@1, from sampling\n", b.standard_error, a.standard_error);
  std::printf("  truncated  %7.1f%%   %7.1f%%\n\n", 100 * b.truncated_ratio.value_or(0), 100 * a.truncated_ratio.value_or(0));
  std::printf("sampler against trainer: largest log-prob gap %g over %lld tokens of %lld steps\n\n", r.max_gap,
              static_cast<long long>(r.compared_tokens), static_cast<long long>(r.last_step - r.first_step));
  std::printf("  phase               time     tokens/s\n");
  std::printf("  warm start      %8.1f s   %10.0f\n", s.seconds, rate(s.num_tokens, s.seconds));
  std::printf("  rollout         %8.1f s   %10.0f   sampled\n", r.rollout_seconds, rate(r.rollout_tokens, r.rollout_seconds));
  std::printf("  training        %8.1f s   %10.0f   prompts and responses\n", r.train_seconds,
              rate(r.train_tokens, r.train_seconds));
  std::printf("  evaluation      %8.1f s\n", eval_s);
  std::printf("  everything      %8.1f s\n\n", total_s);
  std::printf("Everything is in %s; try\n  lockstep generate %s/train '12+34:'\n", dir.c_str(), dir.c_str());

  JsonLine line;
  line.add("steps", r.last_step - r.first_step).add("compared_tokens", r.compared_tokens).add("max_logprob_gap", r.max_gap);
  for (size_t i = 0; i < b.pass_at_k.size(); ++i) {
    line.add(fmt::format("before/pass@{}", b.pass_at_k[i].k), b.pass_at_k[i].estimate.value);
    line.add(fmt::format("after/pass@{}", a.pass_at_k[i].k), a.pass_at_k[i].estimate.value);
  }
  line.add("sft_tok_per_s", rate(s.num_tokens, s.seconds)).add("rollout_tok_per_s", rate(r.rollout_tokens, r.rollout_seconds));
  line.add("train_tok_per_s", rate(r.train_tokens, r.train_seconds))
      .add("sft_time", s.seconds)
      .add("rollout_time", r.rollout_seconds);
  line.add("train_time", r.train_seconds).add("eval_time", eval_s).add("total_time", total_s);
  if (const Status written = atomic_write(dir + "/demo.json", line.str() + "\n"); !written) return console.fail(written);
  return kExitOk;
}

}  // namespace lockstep
