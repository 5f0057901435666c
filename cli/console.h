#pragma once
// What commands share at the terminal: progress and log lines for long work, error lines with exit codes, settings to the parts'
// own configs.

#include <functional>
#include <string>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "rl/checkpoint.h"

namespace lockstep {

// Prints "lockstep: MESSAGE" to standard error and returns `code`.
int fail(int code, const Status& status);

class Console {
 public:
  // `speaks` is false for ranks that leave reports to another one; they log errors only.
  explicit Console(bool speaks = true);
  const Hooks& hooks() const { return hooks_; }
  Progress& progress() { return progress_; }
  // Says it, and returns the exit code of an error that came out of work done with hooks(): bad input until the work had begun.
  int fail(const Status& status);

 private:
  Progress progress_;
  Hooks hooks_;
  bool speaks_;
  bool started_ = false;
};

// The bearer token in a file: one line of visible ASCII characters. An empty path: none.
Result<std::string> read_key(const std::string& path);

// Runs a command that is for one process. Started as several ranks, all of them refuse: each would do the same work over the others' files.
int run_alone(const char* name, const std::function<int()>& command);

LoopConfig make_loop_config(const RunConfig& config);
SftConfig make_sft_config(const RunConfig& config);

// A run directory in model.init becomes its newest complete checkpoint.
Status resolve_init(RunConfig& config);
// The settings that the checkpoint was written under, where it says so, with the model taken from the checkpoint itself.
Result<ResolvedConfig> checkpoint_config(const std::string& checkpoint);

}  // namespace lockstep
