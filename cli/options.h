#pragma once
// A run described by one TOML file: which settings exist, what they mean, and reading and writing them.
//
// Every setting is one row of settings(): name, type, unit, default, range, help. That row feeds the TOML reader, --set, the help
// table, the table printed at start and the resolved config saved in the run directory, so none of them can disagree.
// Each part of the program receives its own member of RunConfig and nothing else. Not thread-safe, used at start only.

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/status.h"
#include "rl/arithmetic.h"
#include "rl/evaluate.h"
#include "rl/layouts.h"
#include "rl/loop.h"
#include "rl/policy.h"
#include "rl/sft.h"
#include "rl/task.h"
#include "train/types.h"

namespace lockstep {

// The generated task of `lockstep demo`.
struct DemoOptions {
  int64_t train_problems = 0, eval_problems = 0, sft_examples = 0;
  int64_t difficulty_min = 1, difficulty_max = 1;
  std::string families;
  float unboxed_share = 0;
};

struct RunConfig {
  RunOptions run;
  ParallelOptions parallel;
  PolicyOptions model;
  TaskOptions task;
  RolloutOptions rollout;
  SyncOptions sync;
  TrainOptions train;
  OptimizerConfig optimizer;
  SftOptions sft;
  EvalOptions eval;
  DemoOptions demo;
};

// One of a fixed list of words.
struct Choice {
  std::span<const std::string_view> words;
  int (*get)(const RunConfig&);
  void (*set)(RunConfig&, int);
};
using SettingField =
    std::variant<bool& (*)(RunConfig&), int64_t& (*)(RunConfig&), float& (*)(RunConfig&), std::string& (*)(RunConfig&), Choice>;

struct Setting {
  std::string_view name;  // section.key
  SettingField field;
  std::string_view unit;           // "" when a plain number or a word
  std::string_view default_value;  // as --set takes it
  double min = 0, max = 0;         // numbers only; both ends allowed
  std::string_view help;           // effect, and when to change it
  const char* type_name() const;
};
std::span<const Setting> settings();

// A config and where each value came from ("run.toml:14", "--set rollout.top_p", "default"), for later messages.
struct ResolvedConfig {
  RunConfig values;
  std::map<std::string, std::string, std::less<>> origin;  // by setting name; absent: default
  std::string where(std::string_view name) const;
};
ResolvedConfig default_config();

// Reads TOML text on top of `config`. `file` opens every message: "run.toml:14: rollout.temprature is not a known key; ...".
Status read_config(ResolvedConfig& config, std::string_view text, std::string_view file);
Result<ResolvedConfig> load_config(const std::string& path, std::span<const std::string> overrides);
// "rollout.top_p=0.9"
Status apply_override(ResolvedConfig& config, std::string_view assignment);

// What must hold between settings. The first for everything, the others for the command that needs them.
Status check_config(const ResolvedConfig& config);
Status check_train_config(const ResolvedConfig& config);
Status check_sft_config(const ResolvedConfig& config);
Status check_eval_config(const ResolvedConfig& config);

// TOML with every setting, which read_config reads back to the same values.
std::string config_toml(const RunConfig& config);
// The table printed at start: settings of the sections given (none: of all), those that differ from their defaults marked.
std::string config_table(const RunConfig& config, std::span<const std::string_view> sections);
// The table of `lockstep settings`, grouped by section.
std::string settings_help();

}  // namespace lockstep
