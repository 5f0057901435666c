#pragma once
// What a model costs on this machine: sampling, training, one step of both. Random weights and tokens of the config's shape; medians over repeats after a
// warm-up. The measurements and their units are those of common peers' benches, so that lines can be laid side by side.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/status.h"
#include "model/weights.h"

namespace lockstep {

struct EngineOptions;

struct ModelBenchOptions {
  Numerics numerics = Numerics::bf16;
  Device device = Device::cpu;
  int threads = 1;
  int64_t batch = 64, prompt = 512, new_tokens = 128;  // generate and rl: samples, each with a prompt of its own
  int64_t train_tokens = 8192, row_tokens = 4096;      // train: in rows of
  int64_t microbatch_tokens = 8192;
  bool recompute = false;
  bool graphs = true;  // generate and rl, on a GPU: EngineOptions::graphs
  int repeat = 3;
};

struct ModelBenchResult {
  std::string what;           // generate | train | rl
  int64_t tokens = 0;         // generated, or trained
  double seconds = 0, seconds_min = 0, seconds_max = 0;
  double prefill_s = 0, decode_s = 0, train_s = 0;  // of the median run, where it has these parts
  int64_t decode_steps = 0, graph_steps = 0;        // of the median run
  double host_s = 0;                                // of decode_s, until the host had enqueued the steps' forwards; on a CPU, until they were done
  int64_t differing = -1;     // rl: log-probs of the trainer whose bits are not the sampler's; -1: not compared
  double memory_gb = 0;       // that the arenas reached
};

// Numbers of the size that initialisation gives, by a generator that fills billions of them in seconds; experts of hash tables are distinct in a row.
ReadBox quick_boxes(Context& c, const ModelConfig& config);

// An error where weights, training state (if `train`) and the state of the samples of `engine` (null: none) are more than the machine, or the GPU, has.
Status check_bench_memory(const ModelConfig& config, const ModelBenchOptions& options, bool train, const EngineOptions* engine);

// `what`: generate, train, rl.
Result<ModelBenchResult> bench_model(const ModelConfig& config, const std::string& what, const ModelBenchOptions& options);

}  // namespace lockstep
