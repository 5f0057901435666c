#include "cli/console.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "core/log.h"
#include "io/file.h"
#include "io/run_dir.h"
#include "io/utf8.h"
#include "parallel/collective.h"

namespace lockstep {

namespace {

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

int fail(int code, const Status& status) {
  std::fprintf(stderr, "lockstep: %s\n", without_controls(status.message()).c_str());
  return code;
}

Console::Console(bool speaks) : speaks_(speaks) {
  hooks_.started = [this] { started_ = true; };
  if (!speaks) {
    set_log_level(LogLevel::error);
    return;
  }
  hooks_.progress = [this](const std::string& label, int64_t done, int64_t total, double amount, const std::string& unit) {
    progress_.update(label, done, total, amount, unit);
  };
  hooks_.line = [this](const std::string& text) {
    progress_.clear();
    log_info("{}", text);
  };
}

int Console::fail(const Status& status) {
  progress_.clear();
  const int code = started_ ? kExitFailure : kExitBadInput;
  return speaks_ ? lockstep::fail(code, status) : code;
}

Result<std::string> read_key(const std::string& path) {
  if (path.empty()) return std::string();
  Result<std::string> text = read_file(path);
  if (!text) return text.status();
  std::string key = text.take();
  while (!key.empty() && (key.back() == '\n' || key.back() == '\r' || key.back() == ' ')) key.pop_back();
  if (key.empty() || std::any_of(key.begin(), key.end(), [](char c) { return c <= ' ' || c > '~'; }))
    return errorf("{}: one line of visible ASCII characters is wanted, the token that clients send", path);
  return key;
}

int run_alone(const char* name, const std::function<int()>& command) {
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start();
  if (!started) return fail(kExitBadInput, started.status());
  RankWorld& world = *started.value();
  int code = kExitBadInput;
  if (world.size() == 1) {
    code = command();
  } else if (world.rank() == 0) {
    fail(code, errorf("`lockstep {}` is for one process and {} were started; leave out mpirun or srun (train and eval work on many)", name, world.size()));
  }
  world.finish();
  return code;
}

LoopConfig make_loop_config(const RunConfig& c) {
  return {.run = c.run,
          .model = c.model,
          .task = c.task,
          .rollout = c.rollout,
          .train = c.train,
          .optimizer = c.optimizer,
          .eval = c.eval,
          .parallel = c.parallel,
          .sync = c.sync,
          .resolved = config_toml(c)};
}

SftConfig make_sft_config(const RunConfig& c) {
  return {.run = c.run,
          .model = c.model,
          .sft = c.sft,
          .style = c.task.style,
          .optimizer = c.optimizer,
          .actor = {.max_tokens_per_microbatch = c.train.microbatch_tokens, .recompute = c.train.recompute},
          .resolved = config_toml(c)};
}

Status resolve_init(RunConfig& config) {
  if (!exists(config.model.init + "/checkpoints")) return Status::ok();
  Result<std::string> checkpoint = find_checkpoint(config.model.init);
  if (!checkpoint) return errorf("model.init: {}", checkpoint.message());
  config.model.init = checkpoint.take();
  return Status::ok();
}

Result<ResolvedConfig> checkpoint_config(const std::string& checkpoint) {
  ResolvedConfig config = default_config();
  const std::string file = checkpoint + "/config.resolved.toml";
  if (exists(file)) {
    Result<std::string> text = read_file(file);
    if (!text) return text.status();
    LOCKSTEP_RETURN_IF_ERROR(read_config(config, text.value(), file));
  }
  config.values.model.config.clear();
  config.values.model.tokenizer.clear();
  config.values.model.init = checkpoint;
  return config;
}

}  // namespace lockstep
