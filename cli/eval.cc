// lockstep eval: what answers to a file of problems are worth: a checkpoint's (in one process or in all ranks that mpirun or srun started, whose engines
// share the samples), a server's, or those that another program left in a file.

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "cli/console.h"
#include "io/file.h"
#include "io/json.h"
#include "parallel/collective.h"
#include "rl/eval_completions.h"
#include "rl/eval_server.h"
#include "rl/fingerprint.h"

namespace lockstep {

namespace {

// RUN.toml's settings, or the checkpoint's own; the weights are always the checkpoint's when one is known.
Result<ResolvedConfig> eval_config(const EvalArgs& args) {
  const bool elsewhere = !args.server.empty() || !args.completions.empty();
  if (elsewhere && !args.checkpoint.empty())
    return errorf("--checkpoint and {} both say whose answers are judged; leave one out", args.server.empty() ? "--completions" : "--server");
  if (args.config.empty() && args.checkpoint.empty() && !elsewhere)
    return errorf("eval needs RUN.toml, or --checkpoint DIR --data FILE; --server and --completions take answers from elsewhere");
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
    if (!elsewhere) LOCKSTEP_RETURN_IF_ERROR(resolve_init(config.values));
    run_dir = config.values.run.dir;
  }
  if (elsewhere) {
    config.values.model.init = args.server.empty() ? args.completions : args.model_name;  // no weights: what the report is about
    if (args.config.empty())
      for (const std::string& o : args.overrides) LOCKSTEP_RETURN_IF_ERROR(apply_override(config, o));
    if (!args.data.empty()) config.values.task.eval_file = args.data;
    LOCKSTEP_RETURN_IF_ERROR(check_config(config));
    LOCKSTEP_RETURN_IF_ERROR(check_eval_config(config));
    return config;
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

class Stopwatch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(start_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

EvalProtocol make_protocol(const RunConfig& c, const EvalArgs& args, std::span<const Prompt> problems) {
  EvalProtocol p{.subject = c.model.init, .set = std::filesystem::path(c.task.eval_file).stem().string(), .settings = {}, .seconds = {}};
  Fingerprint rows;
  for (const Prompt& problem : problems) {
    rows.add(problem.text);
    rows.add(problem.label);
  }
  p.settings = {{"data", c.task.eval_file}, {"prompts and labels", rows.str()}};
  if (!args.server.empty()) p.settings.emplace_back("server", fmt::format("{}, {}", args.server, args.endpoint));
  if (args.completions.empty()) {
    const EvalOptions& e = c.eval;
    p.settings.insert(p.settings.end(), {{"samples", std::to_string(e.samples)},
                                         {"temperature", fmt::format("{}", e.temperature)},
                                         {"top_p", fmt::format("{}", e.top_p)},
                                         {"top_k", std::to_string(e.top_k)},
                                         {"max_new_tokens", std::to_string(e.max_new_tokens)},
                                         {"seed", std::to_string(e.seed)}});
    p.settings.emplace_back("prompt_template", c.task.style.prompt_template.empty() ? "none" : c.task.style.prompt_template);
    p.settings.emplace_back("chat", kPromptChatNames[static_cast<size_t>(c.task.style.chat)]);
  }
  p.settings.emplace_back("reward", kGraderNames[static_cast<size_t>(c.task.reward.grader)]);
  p.settings.emplace_back("reward_thinking", c.task.reward.thinking ? "true" : "false");
  return p;
}

// The report on standard output, and the files.
int write_report(const RunConfig& c, const EvalArgs& args, std::span<const Prompt> problems, std::span<const EvalSample> samples,
                 std::span<const RewardResult> verdicts, const std::vector<std::pair<std::string, double>>& seconds, Console& console) {
  const EvalReport report = make_eval_report(problems, samples, verdicts);
  EvalProtocol protocol = make_protocol(c, args, problems);
  protocol.seconds = seconds;
  std::string records;
  if (!args.records.empty() || !args.out.empty()) records = eval_records(problems, samples, verdicts);
  if (!args.records.empty()) {
    if (const Status s = atomic_write(args.records, records); !s) return console.fail(s);
  }
  if (!args.out.empty()) {
    Status s = make_directories(args.out);
    if (s) s = atomic_write(args.out + "/judged.jsonl", records);
    if (s) s = atomic_write(args.out + "/report.json", eval_report_json(report, protocol));
    if (s) s = atomic_write(args.out + "/report.md", eval_report_markdown(report, protocol));
    if (!s) return console.fail(s);
  }
  console.progress().clear();
  if (args.json) {
    JsonLine line;
    line.add("checkpoint", c.model.init)
        .add("data", c.task.eval_file)
        .add("problems", report.num_problems)
        .add("samples", report.num_samples)
        .add("temperature", c.eval.temperature)
        .add("top_p", c.eval.top_p);
    for (const auto& [name, value] : report.values(protocol.set)) line.add(name, value);
    std::printf("%s\n", line.str().c_str());
  } else if (!args.completions.empty()) {
    std::printf("%s on %s\n%s\n", c.model.init.c_str(), c.task.eval_file.c_str(), report.str().c_str());
  } else {
    std::printf("%s on %s, temperature %g, top_p %g\n%s\n", c.model.init.c_str(), c.task.eval_file.c_str(), c.eval.temperature,
                c.eval.top_p, report.str().c_str());
  }
  return kExitOk;
}

std::string sampling_phase(const SampleLog* log, size_t total) {
  if (log == nullptr || log->num_reused == 0) return "sampling";
  return fmt::format("sampling {} of {} samples", static_cast<int64_t>(total) - log->num_reused, total);
}

int run_on(RankWorld& world, const Result<ResolvedConfig>& config, const EvalArgs& args) {
  Stopwatch watch;
  const bool speaks = world.rank() == 0;
  Peers peers(&world);
  if (const Status s = peers.agree(config.status(), "settings"); !s) return speaks ? fail(kExitBadInput, s) : kExitBadInput;
  const RunConfig& c = config.value().values;

  Console console(speaks);
  if (const Status s = peers.same_settings(fmt::format("--out \"{}\"\n{}", args.out, config_toml(c))); !s) return console.fail(s);
  if (!args.out.empty()) {
    if (const Status s = world.record_in(args.out); !s) return console.fail(s);
  }
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = static_cast<int>(c.run.threads)};
  use.engine.max_running = c.rollout.max_running;
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.graphs = c.rollout.graphs;
  use.engine.max_context = c.task.max_prompt_tokens + c.eval.max_new_tokens;
  const Result<ModelConfig> model = find_model_config(c.model);
  Result<Layouts> layouts = model ? resolve_layouts(sampler_only(c.parallel), model.value(), use.engine.max_context, world.size()) : model.status();
  if (const Status s = peers.agree(layouts.status(), "layouts"); !s) return console.fail(s);
  std::optional<RunGroups> groups;
  if (!peers.alone()) {
    if (c.model.device == Device::gpu) {
      if (const Status s = world.use_devices(c.parallel.transport); !s) return console.fail(s);
    }
    groups.emplace(make_run_groups(world, layouts.value(), model.value(), c.model.numerics, c.model.sampler_numerics()));
    use.ranks = &*groups;
    use.threads = peers.threads(c.run.threads);
    peers = Peers(&world, &*groups);
  }
  Result<std::unique_ptr<Policy>> policy = Policy::make(c.model, use);
  if (const Status s = peers.agree(policy.status(), "weights"); !s) return console.fail(s);
  const Result<uint64_t> weights = weights_key(c.model, use.seed);
  if (const Status s = peers.agree(weights.status(), "weights"); !s) return console.fail(s);
  if (const Status s = peers.same(weights.value(), "weights"); !s) return console.fail(s);
  TaskCounts counts;
  Result<std::vector<Prompt>> loaded = load_prompts(c.task.eval_file, policy.value()->tokenizer(), c.task, &counts);
  if (const Status s = peers.agree(loaded.status(), "problems"); !s) return console.fail(s);
  if (const Status s = peers.same(checksum(fingerprint(loaded.value())), "problems"); !s) return console.fail(s);
  console.hooks().say(fmt::format("{}: {}", c.task.eval_file, counts.str()));
  const std::span<const Prompt> problems = problems_asked(loaded.value(), c.eval);
  std::vector<std::pair<std::string, double>> seconds = {{"loading weights and problems", watch.lap()}};
  std::optional<SampleLog> log;
  if (!args.out.empty()) log.emplace(args.out, world.rank());
  SampleLog* const kept = log ? &*log : nullptr;
  console.hooks().begin();

  const Result<std::vector<EvalSample>> samples =
      sample_answers(*policy.value(), problems, c.eval, console.hooks(), "eval", peers, kept, weights.value());
  if (!samples) return console.fail(samples.status());
  seconds.emplace_back(sampling_phase(kept, samples.value().size()), watch.lap());
  const Result<std::vector<RewardResult>> verdicts = judge_answers(problems, samples.value(), c.task.reward, peers);
  if (!verdicts) return console.fail(verdicts.status());
  seconds.emplace_back("judging", watch.lap());
  return speaks ? write_report(c, args, problems, samples.value(), verdicts.value(), seconds, console) : kExitOk;
}

// Answers of a server or from a file: no weights, no tokenizer.
int run_elsewhere(const RunConfig& c, const EvalArgs& args) {
  Stopwatch watch;
  Console console;
  ServerOptions server{.url = args.server,
                       .model = args.model_name,
                       .chat = args.endpoint == "chat",
                       .concurrency = args.concurrency,
                       .retries = args.retries,
                       .deadline_s = args.deadline_s};
  TaskOptions task = c.task;
  const bool sends_messages = !args.server.empty() && server.chat;
  if (sends_messages) {  // the server writes them in its own format
    if (task.style.chat != PromptChat::none) server.thinking = task.style.chat == PromptChat::thinking ? "true" : "false";
    task.style.chat = PromptChat::chat;
  }
  if (!args.server.empty()) {
    if (const Status s = check_server(server); !s) return console.fail(s);
  }
  if (!args.key_file.empty()) {
    const Result<std::string> key = read_file(args.key_file);
    if (!key) return console.fail(key.status());
    server.key = key.value().substr(0, key.value().find_first_of(" \t\r\n"));
    if (server.key.empty()) return console.fail(errorf("{}: the key is empty", args.key_file));
  }
  TaskCounts counts;
  Result<std::vector<Prompt>> loaded = load_problems(task.eval_file, task, &counts);
  if (!loaded) return console.fail(loaded.status());
  if (sends_messages)
    for (Prompt& p : loaded.value()) p.text = p.messages;
  console.hooks().say(fmt::format("{}: {}", task.eval_file, counts.str()));
  const std::span<const Prompt> problems = problems_asked(loaded.value(), c.eval);
  std::vector<std::pair<std::string, double>> seconds = {{"loading problems", watch.lap()}};
  std::optional<SampleLog> log;
  if (!args.out.empty() && !args.server.empty()) log.emplace(args.out, 0);
  SampleLog* const kept = log ? &*log : nullptr;

  Result<std::vector<EvalSample>> samples = std::vector<EvalSample>();
  if (args.server.empty()) {
    const Result<std::string> text = read_file(args.completions);
    samples = text ? parse_completions(text.value(), args.completions, problems) : Result<std::vector<EvalSample>>(text.status());
    if (!samples) return console.fail(samples.status());
    seconds.emplace_back("reading answers", watch.lap());
    console.hooks().begin();
  } else {
    console.hooks().begin();
    samples = sample_server(server, problems, c.eval, console.hooks(), kept);
    if (!samples) return console.fail(samples.status());
    seconds.emplace_back(sampling_phase(kept, samples.value().size()), watch.lap());
  }
  const Result<std::vector<RewardResult>> verdicts = judge_answers(problems, samples.value(), c.task.reward);
  if (!verdicts) return console.fail(verdicts.status());
  seconds.emplace_back("judging", watch.lap());
  return write_report(c, args, problems, samples.value(), verdicts.value(), seconds, console);
}

}  // namespace

int eval_command(const EvalArgs& args) {
  const Result<ResolvedConfig> config = eval_config(args);
  if (!args.server.empty() || !args.completions.empty()) {
    return run_alone("eval --server or --completions", [&] { return config ? run_elsewhere(config.value().values, args) : fail(kExitBadInput, config.status()); });
  }
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
