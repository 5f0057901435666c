// lockstep serve: the sampler as an HTTP server, until SIGTERM or SIGINT.

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/console.h"
#include "core/log.h"
#include "serve/server.h"

namespace lockstep {

namespace {

// RUN.toml's settings with the run's newest checkpoint, or model.init before there is one; or a checkpoint with its own settings.
Result<ResolvedConfig> serve_config(const ServeArgs& args) {
  if (args.config.empty() == args.model.empty()) return Status::error("serve needs either RUN.toml or --model DIR");
  ResolvedConfig config = default_config();
  std::string source = args.model;
  std::error_code error;
  if (!args.config.empty()) {
    if (std::filesystem::is_directory(args.config, error))
      return errorf("{} is a directory where serve takes RUN.toml; for a checkpoint or run write --model {}", args.config, args.config);
    Result<ResolvedConfig> loaded = load_config(args.config, args.overrides);
    if (!loaded) return loaded.status();
    config = loaded.take();
    LOCKSTEP_RETURN_IF_ERROR(resolve_init(config.values));
    if (std::filesystem::exists(config.values.run.dir + "/checkpoints", error)) source = config.values.run.dir;
  }
  if (!source.empty()) {
    Result<std::string> checkpoint = find_checkpoint(source);
    if (!checkpoint) return checkpoint.status();
    if (args.config.empty()) {
      Result<ResolvedConfig> own = checkpoint_config(checkpoint.value());
      if (!own) return own.status();
      config = own.take();
      for (const std::string& o : args.overrides) LOCKSTEP_RETURN_IF_ERROR(apply_override(config, o));
    } else {
      config.values.model.config.clear();
      config.values.model.tokenizer.clear();
      config.values.model.init = checkpoint.take();
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(check_config(config));
  return config;
}

std::string served_name(const ServeArgs& args, const RunConfig& c) {
  if (!args.name.empty()) return args.name;
  const std::string path = !args.model.empty() ? args.model : c.run.dir;
  const std::string name = std::filesystem::path(path).lexically_normal().filename().string();
  return name.empty() ? std::filesystem::path(path).lexically_normal().parent_path().filename().string() : name;
}

}  // namespace

int serve_command(const ServeArgs& args) {
  // Before any thread is made, so that all inherit it and the signals come to sigwait() alone.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  signal(SIGPIPE, SIG_IGN);

  const Result<ResolvedConfig> config = serve_config(args);
  if (!config) return fail(kExitBadInput, config.status());
  const RunConfig& c = config.value().values;
  const Result<std::string> key = read_key(args.api_key_file);
  if (!key) return fail(kExitBadInput, key.status());
  const Result<ModelConfig> model = find_model_config(c.model);
  if (!model) return fail(kExitBadInput, model.status());

  Console console;
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = static_cast<int>(c.run.threads)};
  use.engine.max_running = c.rollout.max_running;
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.graphs = c.rollout.graphs;
  use.engine.max_context = args.max_context > 0 ? args.max_context : std::min<int64_t>(model.value().max_positions, 4096);
  use.engine.cache_slots = args.cache_slots;
  Result<std::unique_ptr<Policy>> policy = Policy::make(c.model, use);
  if (!policy) return console.fail(policy.status());

  ServerOptions o{.host = args.host, .port = static_cast<int>(args.port)};
  o.api_key = key.value();
  o.model_name = served_name(args, c);
  o.model_path = c.model.init;
  o.tokenizer_path = c.model.tokenizer.empty() ? c.model.init : c.model.tokenizer;
  o.max_context = use.engine.max_context;
  o.max_samples = args.max_samples;
  o.max_connections = args.max_connections;
  o.max_body_bytes = args.max_body_mib << 20;
  Server server(*policy.value(), o);
  if (const Status s = server.start(); !s) return console.fail(s);
  console.hooks().begin();
  if (!args.host.starts_with("127.") && args.host != "localhost" && args.host != "::1" && key.value().empty())
    log_warn("{} may be reached from other machines, and no --api-key-file is asked for", args.host);
  std::printf("serving %s at http://%s:%d\n", o.model_name.c_str(), o.host.c_str(), server.port());
  std::fflush(stdout);

  int signal_number = 0;
  sigwait(&ends, &signal_number);
  pthread_sigmask(SIG_UNBLOCK, &ends, nullptr);  // a second one does not wait
  console.hooks().say(fmt::format("{}: no new requests, waiting up to {} s for those under way", signal_number == SIGTERM ? "SIGTERM" : "SIGINT", args.drain_s));
  const bool ended = server.stop(std::chrono::seconds(args.drain_s));
  console.hooks().say(ended ? "all requests ended" : "requests were still under way and have been aborted");
  return kExitOk;
}

}  // namespace lockstep
