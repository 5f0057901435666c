// The command line. Reads it, checks the processor, and hands over to one function a command; nothing else in the program sees
// flags.

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/names.h"
#include "model/checkpoint_layout.h"
#include "rl/arithmetic.h"
#include "rl/gates.h"
#include "rl/grader/grader.h"

namespace lockstep {

namespace {

constexpr const char* kDescription =
    "Reinforcement learning on DeepSeek-V4-class models, sampler and trainer in one program with one set of numerics:\n"
    "their log-probabilities are equal bit for bit, and every training step checks it.";

// The build assumes these; without them the first op would die of an illegal instruction.
bool processor_is_supported() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

// The argument that nothing understands, and the known name nearest to it. "" when there is none: the error is another one.
std::string explain_unknown(const CLI::App& app, int argc, char** argv) {
  const CLI::App* command = nullptr;
  if (argc > 1 && argv[1][0] != '-') {
    std::vector<std::string_view> names;
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
      if (sub->get_name() == argv[1]) command = sub;
      names.push_back(sub->get_name());
    }
    if (command == nullptr) {
      const std::string near = nearest_name(argv[1], names);
      return fmt::format("{} is not a command{}", argv[1],
                         near.empty() ? "; `lockstep --help` lists them" : "; did you mean " + near + "?");
    }
  }
  std::vector<std::string> flags;
  for (const CLI::Option* option : (command == nullptr ? app : *command).get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  const std::vector<std::string_view> known(flags.begin(), flags.end());
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = std::string_view(argv[i]).substr(0, std::string_view(argv[i]).find('='));
    if (!flag.starts_with("--") || flag == "--" || std::find(known.begin(), known.end(), flag) != known.end()) continue;
    const std::string near = nearest_name(flag, known);
    return fmt::format("{} is not a known flag{}", flag, near.empty() ? "; --help lists them" : "; did you mean " + near + "?");
  }
  return "";
}

int run(int argc, char** argv) {
  CLI::App app{kDescription, "lockstep"};
  app.require_subcommand(1);
  app.footer("Exit codes: 0 done, 1 the work failed, 2 wrong usage, settings or files, 75 ranks stalled: start again with --resume.");
  int exit_code = kExitOk;

  const auto add_run = [&](const char* name, const char* help, RunArgs& args, std::function<int(const RunArgs&)> command) {
    CLI::App* c = app.add_subcommand(name, help);
    c->add_option("RUN.toml", args.config, "Describes the run; `lockstep settings` lists what it may say")->required();
    c->add_option("--set", args.overrides, "Override one setting, as section.key=value; may be repeated")
        ->allow_extra_args(false);
    c->callback([&exit_code, &args, command] { exit_code = command(args); });
    return c;
  };
  RunArgs train, sft, demo;
  add_run("train", "Reinforcement learning: sample, judge, train, repeat", train, train_command)
      ->add_flag("--resume", train.resume, "Continue from the newest checkpoint of run.dir");
  add_run("sft", "Supervised training on prompts with completions", sft, [](const RunArgs& a) { return run_alone("sft", [&] { return sft_command(a); }); })
      ->add_flag("--resume", sft.resume, "Continue from the newest checkpoint of run.dir");
  add_run("demo", "Teach a tiny model arithmetic, from random weights to before and after numbers", demo,
          [](const RunArgs& a) { return run_alone("demo", [&] { return demo_command(a); }); });

  EvalArgs eval;
  CLI::App* e = app.add_subcommand("eval", "pass@k of a checkpoint, a server or a file of answers, on a file of problems");
  e->add_option("RUN.toml", eval.config,
                "Settings; the weights are the newest checkpoint of run.dir, or model.init before there is one");
  e->add_option("--checkpoint,--model", eval.checkpoint, "Checkpoint or run directory; without RUN.toml its own settings are used");
  e->add_option("--data", eval.data, "Problems instead of task.eval_file, as JSON lines with prompt and label");
  e->add_option("--records", eval.records, "Write every sample to this file, as JSON lines");
  e->add_option("--out", eval.out, "Directory for report.md, report.json, judged.jsonl and the log of samples, from which the same command goes on if it is killed");
  CLI::Option* completions = e->add_option("--completions", eval.completions, "Judge the answers in this file, which another program produced");
  CLI::Option* server = e->add_option("--server", eval.server, "Ask the OpenAI-compatible server at this URL")->excludes(completions);
  CLI::Option* model_name = e->add_option("--model-name", eval.model_name, "The model's name there")->needs(server);
  server->needs(model_name);
  e->add_option("--endpoint", eval.endpoint, "Of the server: chat sends messages, completions the prompt's text")
      ->check(CLI::IsMember({"chat", "completions"}))
      ->needs(server)
      ->capture_default_str();
  e->add_option("--concurrency", eval.concurrency, "Requests at once")->check(CLI::Range(1, 4096))->needs(server)->capture_default_str();
  e->add_option("--retries", eval.retries, "Further attempts at a request that fails in passing")->check(CLI::Range(0, 1000))->needs(server)->capture_default_str();
  e->add_option("--deadline", eval.deadline_s, "Seconds to wait for one answer")->check(CLI::Range(0.01, 1e6))->needs(server)->capture_default_str();
  e->add_option("--key-file", eval.key_file, "File with the server's key, sent as a bearer token")->needs(server);
  e->add_option("--set", eval.overrides, "Override one setting, such as eval.samples=32")->allow_extra_args(false);
  e->add_flag("--json", eval.json, "Print one JSON object");
  e->callback([&] { exit_code = eval_command(eval); });

  GradeArgs grade;
  CLI::App* r = app.add_subcommand("grade", "Judge responses: JSON lines {response, label} in, {score, correct, pred, reason} out, in order");
  r->add_option("--grader", grade.grader, "How; `lockstep settings` explains the names under task.reward (default)")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kGraderNames), std::end(kGraderNames))));
  r->add_option("--command", grade.command, "Ask this program, as task.reward_command does");
  r->add_option("--url", grade.url, "Ask this server, as task.reward_url does");
  r->add_option("--threads", grade.threads, "Threads, programs or connections; 0 means one a core")->check(CLI::Range(0, 1024))->capture_default_str();
  r->add_option("--deadline", grade.deadline_s, "Seconds to wait for a program or server")->check(CLI::Range(0.01, 1e5))->capture_default_str();
  r->add_flag("--thinking", grade.thinking, "Responses begin inside a thinking block: judge what follows the last </think>");
  r->callback([&] { exit_code = grade_command(grade); });

  GenerateArgs generate;
  CLI::App* g = app.add_subcommand("generate", "Let a checkpoint answer one prompt");
  g->add_option("CHECKPOINT", generate.checkpoint, "Checkpoint or run directory")->required();
  g->add_option("PROMPT", generate.prompt, "The text; - reads it from standard input")->required();
  g->add_option("--samples", generate.samples, "How many answers")->check(CLI::Range(1, 65536))->capture_default_str();
  g->add_option("--set", generate.overrides, "Override one setting, such as eval.temperature=0")->allow_extra_args(false);
  g->add_flag("--json", generate.json, "Print one JSON object an answer, with ids and log-prob");
  g->callback([&] { exit_code = run_alone("generate", [&] { return generate_command(generate); }); });

  ServeArgs serve;
  CLI::App* serving = app.add_subcommand("serve", "Answer HTTP requests with a checkpoint, as OpenAI's and SGLang's servers do, until SIGTERM");
  serving->add_option("RUN.toml", serve.config, "Settings; the weights are the newest checkpoint of run.dir, or model.init before there is one");
  serving->add_option("--model", serve.model, "Checkpoint or run directory, instead of RUN.toml");
  serving->add_option("--host", serve.host, "Address to listen at; 0.0.0.0 is all of this machine's")->capture_default_str();
  serving->add_option("--port", serve.port, "Port; 0 is any that is free, and is printed")->check(CLI::Range(0, 65535))->capture_default_str();
  serving->add_option("--api-key-file", serve.api_key_file, "File with the bearer token that clients must send");
  serving->add_option("--name", serve.name, "What clients call the model; without it the directory's name");
  serving->add_option("--max-context", serve.max_context, "Prompt and answer, in tokens; 0 is the model's, at most 4096")->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  serving->add_option("--max-samples", serve.max_samples, "Unfinished samples; requests beyond are answered 429")->check(CLI::Range(1, 65536))->capture_default_str();
  serving->add_option("--max-connections", serve.max_connections, "Connections, a thread each; more of them wait")->check(CLI::Range(1, 900))->capture_default_str();
  serving->add_option("--max-body", serve.max_body_mib, "Largest request body in MiB")->check(CLI::Range(1, 1024))->capture_default_str();
  serving->add_option("--cache-slots", serve.cache_slots, "Prompts whose beginnings are kept for later ones; 0 is off")->check(CLI::Range(0, 65536))->capture_default_str();
  serving->add_option("--drain", serve.drain_s, "Seconds that requests under way are given after SIGTERM")->check(CLI::Range(0, 86400))->capture_default_str();
  serving->add_option("--set", serve.overrides, "Override one setting, such as rollout.max_running=16")->allow_extra_args(false);
  serving->callback([&] { exit_code = run_alone("serve", [&] { return serve_command(serve); }); });

  MakeTaskArgs make_task;
  const CLI::Range problem_count(int64_t{1}, kMaxArithmeticItems);
  CLI::App* m =
      app.add_subcommand("make-task", "Write an arithmetic task: training and held-out problems, worked examples, tokenizer");
  m->add_option("DIR", make_task.directory, "Where train.jsonl, eval.jsonl, sft.jsonl and the tokenizer go")->required();
  m->add_option("--seed", make_task.seed, "Other seeds draw other problems")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 53))
      ->capture_default_str();
  m->add_option("--train", make_task.num_train, "Training problems")->check(problem_count)->capture_default_str();
  m->add_option("--eval", make_task.num_eval, "Held-out problems, none of which is in the other files")
      ->check(problem_count)
      ->capture_default_str();
  m->add_option("--sft", make_task.num_sft, "Worked examples")->check(problem_count)->capture_default_str();
  m->add_option("--difficulty-min", make_task.difficulty_min, "Easiest problems; 1 is mostly one digit")
      ->check(CLI::Range(1, 3))
      ->capture_default_str();
  m->add_option("--difficulty-max", make_task.difficulty_max, "Hardest problems; 3 is three digits")
      ->check(CLI::Range(1, 3))
      ->capture_default_str();
  m->add_option("--unboxed-share", make_task.unboxed_share, "Share of the worked examples that stop before the boxed answer")->check(CLI::Range(0.0, 1.0));
  m->add_option("--families", make_task.families,
                "Kinds of problems, separated by commas: add subtract multiply remainder gcd linear max mixed (all)");
  m->callback([&] { exit_code = run_alone("make-task", [&] { return make_task_command(make_task); }); });

  InspectArgs inspected;
  CLI::App* i = app.add_subcommand("inspect", "What a safetensors file, checkpoint directory or config.json holds");
  i->add_option("PATH", inspected.path, "The file or directory")->required();
  i->add_flag("--headers-only", inspected.headers_only, "Leave out the statistics of scales, which are read from the tensors' bytes");
  i->callback([&] { exit_code = inspect_command(inspected); });

  ExportArgs exported;
  CLI::App* x = app.add_subcommand("export", "Write a checkpoint's weights in released names, for other programs");
  x->add_option("CHECKPOINT", exported.checkpoint, "Checkpoint or run directory")->required();
  x->add_option("DIR", exported.directory, "Where config.json, model.safetensors and the tokenizer go")->required();
  x->callback([&] { exit_code = run_alone("export", [&] { return export_command(exported); }); });

  const CLI::IsMember layouts(std::vector<std::string>(std::begin(kCheckpointLayouts), std::end(kCheckpointLayouts)));
  const auto add_shard_size = [](CLI::App* command, uint64_t& bytes) {
    command->add_option("--shard-size", bytes, "Bytes a file may have, such as 512MB (4GB)")->transform(CLI::AsSizeValue(false))->check(CLI::PositiveNumber);
  };
  ConvertArgs converted;
  CLI::App* k = app.add_subcommand("convert", "Write a checkpoint in another layout, quantised or not, and say what it could not represent");
  k->add_option("SRC", converted.source, "Checkpoint or run directory, in any layout")->required();
  k->add_option("DST", converted.directory, "Directory to make; appears whole or not at all")->required();
  k->add_option("--to", converted.layout, "The layout")->required()->check(layouts);
  add_shard_size(k, converted.shard_bytes);
  k->callback([&] { exit_code = run_alone("convert", [&] { return convert_command(converted); }); });

  SynthArgs synth;
  CLI::App* y = app.add_subcommand("synth", "Write a checkpoint with random weights for any config.json");
  y->add_option("CONFIG", synth.config, "config.json")->required();
  CLI::Option* made = y->add_option("DST", synth.directory, "Directory to make");
  y->add_option("--to", synth.layout, "The layout")->check(layouts)->capture_default_str();
  y->add_option("--seed", synth.seed, "Of the weights")->capture_default_str();
  y->add_flag("--headers-only", synth.headers_only, "Print how many tensors and bytes it would have; write nothing")->excludes(made);
  add_shard_size(y, synth.shard_bytes);
  y->callback([&] {
    if (synth.directory.empty() && !synth.headers_only) throw CLI::RequiredError("DST");
    exit_code = run_alone("synth", [&] { return synth_command(synth); });
  });

  TokenizeArgs tokenize;
  CLI::App* t = app.add_subcommand("tokenize", "JSON lines with \"text\" to lines with \"ids\", standard input to standard output");
  t->add_option("--tokenizer", tokenize.tokenizer, "tokenizer.json or tokenizer_lockstep.json, or the directory of one")->required();
  CLI::Option* decode = t->add_flag("--decode", tokenize.decode, "The other way: \"ids\" to \"text\"");
  t->add_flag("--skip-special", tokenize.skip_special, "Leave out tokens that the vocabulary marks as special")->needs(decode);
  t->callback([&] { exit_code = tokenize_command(tokenize); });

  ChatEncodeArgs chat;
  CLI::App* h = app.add_subcommand("chat-encode", "JSON lines with \"messages\" to lines with \"prompt\", standard input to standard output");
  h->add_option("--tokenizer", chat.tokenizer, "Write the prompt's \"ids\" too");
  h->add_option("--thinking-mode", chat.thinking_mode, "For rows without \"thinking_mode\"")->check(CLI::IsMember({"chat", "thinking"}));
  h->add_flag("--parse", chat.parse, "The other way: \"completion\" to \"message\", null with a \"reason\" if it breaks the format");
  h->callback([&] { exit_code = chat_encode_command(chat); });

  VerifyArgs verify;
  CLI::App* v = app.add_subcommand("verify", "Compare the model with a reference's tensors");
  v->add_option("--golden", verify.golden, "Golden file; may be repeated")->required();
  v->add_option("--mode", verify.mode, "Numerics")->check(CLI::IsMember({"f32", "bf16", "fp8", "fp4"}))->capture_default_str();
  v->add_option("--device", verify.device, "Where the model runs")->check(CLI::IsMember({"cpu", "gpu"}))->capture_default_str();
  v->add_flag("--json", verify.json, "Print one JSON object a file");
  v->callback([&] { exit_code = verify_command(verify); });

  BenchArgs bench;
  CLI::App* b = app.add_subcommand("bench", "What a model of random weights costs on this machine: a JSON line a measurement");
  b->add_option("what", bench.what,
                "generate, train, rl (a step of both): whole parts of a run, the default; decode, prefill, sync: a step of each beside its floor; kernels: every operator "
                "at the model's shapes, beside its floor and the GPU maker's library")
      ->check(CLI::IsMember(kBenchNames));
  b->add_option("--config", bench.config, "config.json of the model")->required();
  b->add_option("--numerics", bench.numerics, "Of sampler and trainer")->check(CLI::IsMember({"f32", "bf16", "fp8", "fp4"}))->capture_default_str();
  b->add_option("--device", bench.device, "Where the model runs")->check(CLI::IsMember({"cpu", "gpu"}))->capture_default_str();
  b->add_option("--threads", bench.options.threads, "CPU threads; 0: one a core")->check(CLI::Range(0, 1024))->capture_default_str();
  const auto size = [&](const char* name, int64_t& value, const char* help) { b->add_option(name, value, help)->check(CLI::Range(int64_t{1}, int64_t{1} << 24))->capture_default_str(); };
  size("--batch", bench.options.batch, "Samples, each of a prompt of its own");
  size("--prompt", bench.options.prompt, "Tokens of a prompt");
  size("--new", bench.options.new_tokens, "Tokens of a response");
  b->add_option("--tokens", bench.train_tokens, "Tokens of a training step (8192; of the kernels on a CPU 512)")->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  size("--row", bench.options.row_tokens, "Tokens of its sequences");
  size("--microbatch", bench.options.microbatch_tokens, "Tokens of a micro-batch");
  b->add_flag("--recompute", bench.options.recompute, "Keep each layer's input alone for the backward");
  b->add_flag("!--no-graphs", bench.options.graphs, "On a GPU, enqueue decode steps kernel by kernel");
  b->add_option("--repeat", bench.options.repeat, "Measured runs, after one that warms up")->check(CLI::Range(1, 1000))->capture_default_str();
  b->add_option("--decode", bench.batches, "Samples of a decode step, separated by commas (64,256; on a CPU 8,64)")->delimiter(',')->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  b->add_option("--context", bench.kernels.context, "Positions behind each sample of the kernels' decode steps (4096)")->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  b->add_option("--only", bench.kernels.only, "Of kernels: a regular expression for \"OP NAME PASS DTYPE\", such as '^attention' or 'wq_b dx'");
  b->add_flag("--warm", bench.kernels.warm, "Of kernels: leave the caches as the run before left them");
  b->callback([&] { exit_code = bench_command(bench); });

  GatesArgs gates;
  CLI::App* a = app.add_subcommand("gates", "Sampler against trainer, bit by bit: the exactness gates, and controls that must fail");
  a->add_option("RUN.toml", gates.config, "Settings; without it a small model with random weights");
  a->add_option("--config", gates.model_config, "config.json of another model, with random weights");
  a->add_option("--checkpoint", gates.checkpoint, "Checkpoint or run directory");
  a->add_option("--tokens", gates.tokens, "Tokens that each gate compares at least")->check(CLI::Range(int64_t{500}, int64_t{1} << 30))->capture_default_str();
  a->add_option("--numerics", gates.numerics, "Which, separated by commas")->delimiter(',')->check(CLI::IsMember({"f32", "bf16", "fp8", "fp4"}))->capture_default_str();
  a->add_option("--only", gates.only, "These gates, separated by commas, such as G1,G7")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kGateNames), std::end(kGateNames))));
  a->add_option("--out", gates.out, "Write the results to this file, as JSON");
  a->add_option("--set", gates.overrides, "Override one setting, such as parallel.pp=2")->allow_extra_args(false);
  a->callback([&] { exit_code = gates_command(gates); });

  CheckWeightsArgs check_weights;
  CLI::App* w = app.add_subcommand("check-weights", "Are the weights that a sampler reads, de-quantised, the trainer's export bit for bit?");
  w->add_option("CHECKPOINT", check_weights.checkpoint, "Checkpoint or run directory")->required();
  w->add_option("--numerics", check_weights.numerics, "Of the sampler; without it the checkpoint's settings")->check(CLI::IsMember({"f32", "bf16", "fp8", "fp4"}));
  CLI::Option* serving_at = w->add_option("--server", check_weights.server, "Ask the `lockstep serve` at this URL, instead of loading a sampler");
  w->add_option("--key-file", check_weights.key_file, "File with the server's key, sent as a bearer token")->needs(serving_at);
  w->callback([&] { exit_code = run_alone("check-weights", [&] { return check_weights_command(check_weights); }); });

  bool machine_only = false;
  CLI::App* d = app.add_subcommand("doctor", "What this machine has, and whether sampler and trainer agree on it");
  d->add_flag("--machine", machine_only, "Only what it has");
  d->callback([&] { exit_code = run_alone("doctor", [&] { return doctor_command(machine_only); }); });

  PlanArgs plan;
  CLI::App* p = app.add_subcommand("plan", "Whether a model fits onto devices under a layout, what ranks tell each other, how long a step takes at least");
  const auto count = [&](const char* name, int64_t& value, const char* help) { p->add_option(name, value, help)->check(CLI::Range(int64_t{1}, int64_t{1} << 24)); };
  p->add_option("RUN.toml", plan.config, "Settings that the flags below change; without it defaults of the published run");
  p->add_option("--set", plan.overrides, "Override one setting of RUN.toml")->allow_extra_args(false);
  p->add_option("--model", plan.model, "flash, pro, a config.json or a directory that holds one (flash)");
  p->add_option("--device", plan.device, "mi355x, h200, h100 or cpu, of which a rank has one core")->capture_default_str();
  p->add_option("--ranks", plan.ranks, "Of the trainer, one a device (tp x pp x dp, or ep)")->check(CLI::Range(1, 4096));
  count("--tp", plan.tp, "Ranks that share heads and vocabulary (1)");
  count("--pp", plan.pp, "Pipeline stages (1)");
  count("--ep", plan.ep, "Ranks that experts are spread over (1)");
  count("--dp", plan.dp, "Ranks that see other samples (what the ranks allow)");
  p->add_option("--rollout-ranks", plan.rollout_ranks, "Ranks of the sampler alone; without it the trainer's sample too")->check(CLI::Range(1, 4096));
  count("--rollout-tp", plan.rollout_tp, "The sampler's tp (1)");
  count("--rollout-ep", plan.rollout_ep, "The sampler's ep (the trainer's)");
  p->add_option("--numerics", plan.numerics, "Of the trainer (bf16)")->check(CLI::IsMember({"f32", "bf16"}));
  p->add_option("--rollout-numerics", plan.rollout_numerics, "fp8: large linear layers of the sampler in E4M3 (the trainer's)")->check(CLI::IsMember({"bf16", "fp8"}));
  count("--prompts", plan.prompts, "Prompts of a step (32)");
  count("--samples", plan.samples, "Samples of each (8)");
  count("--prompt-tokens", plan.prompt_tokens, "Length of every prompt (1024)");
  count("--response-tokens", plan.response_tokens, "Length of every response (4096)");
  count("--microbatch-tokens", plan.microbatch_tokens, "Budget of a micro-batch; a longer sample forms its own (8192)");
  count("--max-running", plan.max_running, "Samples that an engine decodes at once (48)");
  p->add_option("--hot", plan.hot, "Rows of the fullest rank's experts, of an even share")->check(CLI::Range(1.0, 4096.0))->capture_default_str();
  p->add_flag("--recompute", plan.recompute, "Keep only the inputs of layers and run them again in the backward");
  p->add_flag("--ahead", plan.ahead, "Ranks of their own sample the next step while this one trains: rollout.ahead");
  p->add_flag("--offload-optimizer", plan.offload_optimizer, "Masters and moments in the host's memory, and stepped there");
  p->add_flag("--json", plan.json, "Print one JSON object");
  p->callback([&] { exit_code = run_alone("plan", [&] { return plan_command(plan); }); });

  std::string stalled;
  CLI::App* l = app.add_subcommand("stall", "Why the ranks of a run could not go on, from the records they left");
  l->add_option("RUN_DIR", stalled, "The run directory, or one of the directories below its flight/")->required();
  l->callback([&] { exit_code = stall_command(stalled); });

  app.add_subcommand("settings", "List every setting of RUN.toml")->callback([&] { exit_code = settings_command(); });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help arrives here too
      app.exit(error);
      return kExitOk;
    }
    if (const std::string unknown = explain_unknown(app, argc, argv); !unknown.empty()) {
      std::fprintf(stderr, "lockstep: %s\n", unknown.c_str());
    } else {
      std::fprintf(stderr, "lockstep: %s; --help shows the usage\n", error.what());
    }
    return kExitBadInput;
  }
  if (exit_code == kExitOk && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    std::fprintf(stderr, "lockstep: cannot write to standard output: %s\n", std::strerror(errno));
    return kExitFailure;
  }
  return exit_code;
}

}  // namespace

}  // namespace lockstep

int main(int argc, char** argv) {
  if (!lockstep::processor_is_supported()) {
    std::fputs(
        "lockstep: this processor lacks AVX2 or FMA, which every x86 build needs (Intel Haswell, AMD Excavator, or newer)\n",
        stderr);
    return lockstep::kExitFailure;
  }
  std::signal(SIGXFSZ, SIG_IGN);  // a write over the limit of a file's size fails like one to a full disk, and says so
  try {
    return lockstep::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("lockstep: out of memory\n", stderr);
    return lockstep::kExitFailure;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "lockstep: %s\n", e.what());
    return lockstep::kExitFailure;
  }
}
