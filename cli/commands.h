#pragma once
// What main.cc hands to each command, and the exit codes they return. One .cc a command; only main.cc knows how a command line is
// read.

#include <cstdint>
#include <string>
#include <vector>

#include "rl/kernel_bench.h"
#include "rl/model_bench.h"

namespace lockstep {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;   // the work failed
inline constexpr int kExitBadInput = 2;  // usage, settings or files
// 75: a job of many ranks could not go on (parallel/watchdog.h)

struct RunArgs {
  std::string config;                  // RUN.toml
  std::vector<std::string> overrides;  // section.key=value
  bool resume = false;
};
int train_command(const RunArgs& args);
int sft_command(const RunArgs& args);
int demo_command(const RunArgs& args);

struct EvalArgs {
  std::string config;      // RUN.toml, or empty
  std::string checkpoint;  // checkpoint or run directory; empty: the newest of the run
  std::string data;        // replaces task.eval_file
  std::string records;     // where to write every sample, or empty
  std::string out;         // directory of report, samples and their log; empty: none
  std::string completions;  // file of answers to judge instead of a model's; empty: none
  std::string server;       // URL of a server to ask instead of a model; empty: none
  std::string model_name, key_file;  // of the server
  std::string endpoint = "chat";     // or completions
  int64_t concurrency = 16, retries = 5;
  float deadline_s = 600;
  std::vector<std::string> overrides;
  bool json = false;
};
int eval_command(const EvalArgs& args);

struct GradeArgs {
  std::string grader;   // one of kGraderNames; empty: the one that `command` or `url` means, else default
  std::string command;  // that judges
  std::string url;      // that judges
  int64_t threads = 0;  // 0: one a core
  float deadline_s = 10;
  bool thinking = false;
};
int grade_command(const GradeArgs& args);

struct GenerateArgs {
  std::string checkpoint;
  std::string prompt;  // "-": standard input
  int64_t samples = 1;
  std::vector<std::string> overrides;  // eval.* says how to sample
  bool json = false;
};
int generate_command(const GenerateArgs& args);

struct ServeArgs {
  std::string config;  // RUN.toml; or
  std::string model;   // checkpoint or run directory
  std::string host = "127.0.0.1";
  int64_t port = 0;          // 0: any that is free
  std::string api_key_file;  // empty: no token is asked for
  std::string name;          // empty: the directory's
  int64_t max_context = 0;   // 0: the model's, at most 4096
  int64_t max_samples = 512, max_connections = 320, max_body_mib = 8, cache_slots = 32;
  int64_t drain_s = 60;
  std::vector<std::string> overrides;
};
int serve_command(const ServeArgs& args);

struct MakeTaskArgs {
  std::string directory;
  int64_t seed = 0;
  int64_t num_train = 4000, num_eval = 200, num_sft = 4000;
  int difficulty_min = 1, difficulty_max = 3;
  std::string families;  // separated by commas; empty: all
  float unboxed_share = 0;  // of the worked examples: they stop before the boxed answer
};
int make_task_command(const MakeTaskArgs& args);

struct ExportArgs {
  std::string checkpoint;
  std::string directory;
};
int export_command(const ExportArgs& args);

struct ConvertArgs {
  std::string source;     // checkpoint or run directory
  std::string directory;  // made
  std::string layout;     // one of kCheckpointLayouts
  uint64_t shard_bytes = uint64_t{4} << 30;
};
int convert_command(const ConvertArgs& args);

struct SynthArgs {
  std::string config;     // config.json
  std::string directory;  // made; empty with headers_only
  std::string layout = "released-fp4";
  uint64_t shard_bytes = uint64_t{4} << 30;
  int64_t seed = 0;
  bool headers_only = false;  // print the totals, write nothing
};
int synth_command(const SynthArgs& args);

struct TokenizeArgs {
  std::string tokenizer;  // file or directory
  bool decode = false;
  bool skip_special = false;  // of --decode
};
int tokenize_command(const TokenizeArgs& args);

struct ChatEncodeArgs {
  std::string tokenizer;      // empty: no ids
  std::string thinking_mode;  // of rows that do not say; empty: an error
  bool parse = false;
};
int chat_encode_command(const ChatEncodeArgs& args);

// Numbers that are 0 come from RUN.toml or a default.
struct PlanArgs {
  std::string config;                  // RUN.toml, or empty
  std::vector<std::string> overrides;  // of it
  std::string model, device = "mi355x";
  int64_t ranks = 0, tp = 0, pp = 0, ep = 0, dp = 0;
  int64_t rollout_ranks = 0, rollout_tp = 0, rollout_ep = 0;
  std::string numerics, rollout_numerics;
  int64_t prompts = 0, samples = 0, prompt_tokens = 0, response_tokens = 0, microbatch_tokens = 0, max_running = 0;
  double hot = 1.5;
  bool recompute = false, offload_optimizer = false, ahead = false, json = false;
};
int plan_command(const PlanArgs& args);

int stall_command(const std::string& run_dir);
struct InspectArgs {
  std::string path;
  bool headers_only = false;  // read no tensor's bytes, so no scales
};
int inspect_command(const InspectArgs& args);
int settings_command();

inline const std::vector<std::string> kBenchNames = {"generate", "train", "rl", "decode", "prefill", "sync", "kernels"};
struct BenchArgs {
  std::vector<std::string> what = {"generate", "train", "rl"};  // of kBenchNames
  std::string config, numerics = "bf16", device = "cpu";
  ModelBenchOptions options = {.threads = 0};
  std::vector<int64_t> batches;  // of decode, and tokens of the kernels' calls that decode; empty: 64 and 256, of a CPU 8 and 64
  int64_t train_tokens = 0;      // 0: 8192, of the kernels on a CPU 512
  KernelBenchOptions kernels;
};
int bench_command(const BenchArgs& args);

int doctor_command(bool machine_only);

struct GatesArgs {
  std::string config;        // RUN.toml, or empty
  std::string model_config;  // config.json, for random weights
  std::string checkpoint;    // checkpoint or run directory
  int64_t tokens = 100000;
  std::vector<std::string> numerics = {"f32", "bf16", "fp8"};
  std::vector<std::string> only;  // empty: all gates
  std::string out;                // JSON; empty: none
  std::vector<std::string> overrides;
};
int gates_command(const GatesArgs& args);

struct CheckWeightsArgs {
  std::string checkpoint;  // checkpoint or run directory
  std::string numerics;    // of the sampler; empty: the checkpoint's settings
  std::string server;      // http://HOST:PORT; empty: a sampler of this process
  std::string key_file;
};
int check_weights_command(const CheckWeightsArgs& args);

struct VerifyArgs {
  std::vector<std::string> golden;
  std::string mode = "f32", device = "cpu";
  bool json = false;
};
int verify_command(const VerifyArgs& args);

}  // namespace lockstep
