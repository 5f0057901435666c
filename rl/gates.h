#pragma once
// The exactness gates G1 to G10 of rl spec 15: what the engine records while it decodes is what the actor computes over packed sequences, bit for bit, whatever
// schedule, layout, version or numerics. A gate compares every token of a workload and counts those whose bits differ; the controls of G10 damage one side and
// want some. Everything runs through the parts that a run uses: Policy (engine, actor, weight transfer), Peers, compare_logprobs.
//
//   G1  lengths and temperatures             G6  on a GPU, decode graphs on and off
//   G2  after 2 and after 10 updates         G7  pairs of layouts, on several ranks
//   G3  batch shuffles, batches of 1 and 64  G8  the bf16 and fp8 columns
//   G4  prefill chunks                       G9  20 steps with lr = 0
//   G5  prefix cache                         G10 one flipped weight bit, one flipped routing id
//
// The sampler has weights of its own and gets every version by transfer, so that the two sides can differ at all; on a GPU it reads the trainer's.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "parallel/collective.h"
#include "rl/hooks.h"
#include "rl/policy.h"

namespace lockstep {

inline constexpr int64_t kGateTokens = 100000;  // that rl spec 15 wants

struct GatesOptions {
  PolicyOptions model;  // init empty: gates_config() with uneven random weights. Its numerics are those of `numerics` in turn
  std::vector<Numerics> numerics = {Numerics::f32, Numerics::bf16, Numerics::fp8};
  int64_t tokens = kGateTokens;  // that each comparison has at least; response lengths over a quarter of it are left out
  std::vector<std::string> only = {};  // "G7": these gates; empty: all
  uint64_t seed = 1;
  int64_t threads = 0;
  ParallelOptions parallel;
  OptimizerConfig optimizer;  // of the updates; G9 takes lr 0
};

inline constexpr const char* kGateNames[] = {"G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G10"};

enum class Verdict : uint8_t { pass, fail, not_run };
const char* verdict_name(Verdict verdict);

struct GateResult {
  std::string gate;  // "G1"
  Numerics numerics = Numerics::f32;
  std::string what;       // "after 10 updates"
  int64_t tokens = 0;     // compared
  int64_t different = 0;  // of them
  Verdict verdict = Verdict::not_run;
  std::string note;  // why it failed or was not run
  std::string str() const;   // a line
  std::string json() const;  // an object
};

// A layer of every attention kind, hash- and score-routed, with the published window and ratios, rows of more than one block of 128, and room for 5,000 tokens.
ModelConfig gates_config();

// All ranks of `world` (null: alone), which get the same results; on_result hears of each when it is known. An error: the gates could not be run.
Result<std::vector<GateResult>> run_gates(const GatesOptions& options, const Hooks& hooks, RankWorld* world,
                                          const std::function<void(const GateResult&)>& on_result);

}  // namespace lockstep
