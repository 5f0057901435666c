#pragma once
// What a run will need and how long a step of it must take at least: bytes by owner, communication, and a roofline, before anything is started. Pure.
//
// Bytes and communication are those of rl/memory.h and rl/traffic.h, with equal sequences, experts equally loaded (memory and time of the fullest rank
// with `hot` times that), and a full sampler. Times are lower bounds: peak rates, the program's own order of work. Real kernels reach a part of them.
//
//   rollout    waves of max_running samples decode together: weights (experts that some token chose) and state are read once a token; prefill at peak
//   train      (M + pp - 1) times the slowest stage's micro-batch: products at peak or memory, whichever is longer, then its exchanges, which wait;
//              streams between stages travel meanwhile
//   optimizer  sums of gradients, masters and moments once through memory (of the host if they are kept there), rounded rows to all
//   sync       the busiest rank's copies

#include <span>
#include <string>
#include <vector>

#include "rl/memory.h"

namespace lockstep {

// One accelerator, its share of the host, and its ways to others. Bytes and operations a second, one direction.
struct DeviceSpec {
  const char* name;
  double memory_bytes;
  double bf16_flops, fp8_flops;  // dense
  double memory_rate;
  double link_rate;     // to the others of a node, all links together
  double network_rate;  // to other nodes
  double host_rate;     // to the host's memory
  double host_memory_rate;
  int per_node;
};
std::span<const DeviceSpec> device_specs();

struct PlanInput {
  std::string model_name;
  ModelConfig model;
  DeviceSpec device;
  int ranks = 1;          // of the trainer
  int rollout_ranks = 0;  // of the sampler; 0: the trainer's
  Layout train, rollout;  // dp 0: what the ranks allow
  StageLayers stages;     // of layouts with the pp of `train`; empty: balanced
  Numerics numerics = Numerics::bf16;
  bool rollout_fp8 = false;  // else as the trainer
  int64_t prompts = 32, samples = 8, prompt_tokens = 1024, response_tokens = 4096;
  int64_t microbatch_tokens = 8192, max_running = 48;
  bool recompute = false, offload_optimizer = false;
  ReplayKind replay = ReplayKind::none;
  bool ahead = false;  // ranks of their own sample while others train
  double hot = 1.5;  // rows of the fullest rank's experts, of an even share
};

// Seconds of one part of a step, by resource.
struct PlanPart {
  std::string name;
  double seconds = 0;
  double compute = 0, memory = 0, links = 0, network = 0, host = 0;  // what each takes of it alone
  const char* bound() const;                                         // the largest
};

struct SidePlan {  // the fullest rank of trainer or sampler
  Layout layout;
  StageLayers stages;
  int rank = 0;
  MemoryByOwner memory;       // on the device
  MemoryByOwner host_memory;  // beside it
  TrafficByName traffic;      // of the trainer's step, or of the rollout
};

struct RunPlan {
  PlanInput input;
  int64_t parameters = 0, draft_parameters = 0, active_parameters = 0;
  SidePlan trainer, sampler;
  bool shared = false;  // the same ranks train and sample
  bool fits = false;
  std::string misfit;      // which rank, and which owner is largest
  std::string suggestion;  // a layout that fits, where this one does not
  int64_t micro_batches = 0;
  double bubble = 0;  // share of the training time in which a stage waits for the pipeline to fill and drain
  double train_flops = 0, rollout_flops = 0;  // of all ranks, a step
  CommBytes sync;                             // of the busiest rank
  std::vector<PlanPart> parts;                // rollout, train, optimizer, sync
  double seconds() const;
  double rescore_seconds() const;  // with `ahead`, of an exact pair: the trainers' forward over what was drawn, within seconds()
  double memory_traffic() const;  // bytes that the busiest rank reads and writes in its own memory, a step
};

// An error names what is impossible, the nearest layouts, and the fastest that fits.
Result<RunPlan> make_run_plan(const PlanInput& input);
std::string plan_text(const RunPlan& plan);
std::string plan_json(const RunPlan& plan);  // one object, without a newline

// Bytes of `elements` numbers of a tensor as a sampler holds and receives it: with fp8, E4M3 and a scale byte for each 128 x 128 where the fp8 mode
// quantises (TensorSpec::quant_format, rl spec 20.2); all else as in bf16.
double sampler_bytes(const TensorSpec& spec, int64_t elements, Numerics numerics, bool fp8);

}  // namespace lockstep
