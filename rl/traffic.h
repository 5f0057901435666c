#pragma once
// What ranks will send each other in a step of a run, by the name of the operation: what RankWorld::traffic() counts, known before. Pure.
//
// Exact: calls, bytes sent and bytes received of every rank under every name, given which sequences run together and which experts their tokens
// choose. For plans, both may be estimates: even shares, experts equally loaded. tests/traffic_test.cc runs the real thing and compares.
//
//   name                                        who                        what                                                   formula
//   tp ...                                      tp group                   heads and vocabulary                                   model/tensor_parallel.h
//   expert counts, dispatch, combine            ep group, a layer          rows of routed experts                                 model/expert_exchange.h
//   expert gradient dispatch, combine           ep group, a layer          their gradients
//   streams, stream gradients                   neighbours in pp           [T, n, D] in storage dtype forward, f32 back           here
//   loss sums, log-probs                        all                        64 bytes a sample, 8 a response token                  here
//   accept                                      all                        whether the step may change anything                   here
//   gradients                                   dp; replicas of experts    f32, reduce_scatter                                    parallel/collective.h
//   gradient norm                               all                        one f64                                                parallel/collective.h
//   weights                                     dp; replicas of experts    rounded rows of own pieces                             here
//   weights begin, weights, check, agreed       all                        the update of a sampler with another layout            sync/plan.h
//   masters                                     dp; replicas of experts    f32, whole tensors that a quantised sampler is made of  here
//   engine step                                 ep group, a step           whether anyone has work                                here
//   rollout, completions                        all                        16 + 24 bytes, and 28 + 12 a token of each response     here
//
// With train.replay responses have the sampler's choices besides (model/choices.h). `all` are those of a layout. Where trainers and samplers are different ranks, there is between everyone besides:
//
//   weights, weights check, weights agreed      everyone                   as above                                               sync/plan.h
//   weights version                             everyone                   8 bytes                                                here
//   rollout, completions                        everyone                   8 + 8 bytes, and 28 + 12 a token of each response      here

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "parallel/collective.h"
#include "rl/layouts.h"
#include "train/pack.h"
#include "train/types.h"

namespace lockstep {

// By name. wait_s stays 0.
using TrafficByName = std::map<std::string, Traffic, std::less<>>;

// One forward of the ranks of one dp index: a micro-batch, or a step of an engine.
struct ModelCall {
  std::vector<int64_t> sequences;  // new tokens of each; in training, where they begin at position 0, entries follow from them
  int64_t wanted = 0;              // rows whose log-probability is computed; training only
  std::vector<int64_t> embedded;   // [tp] tokens in the vocabulary of each tp rank
  std::vector<int64_t> experts;    // [layers, E] rows that each expert gets of these tokens
  int64_t tokens() const;
};
// Even shares: of the vocabulary, and of all experts.
ModelCall even_call(const ModelConfig& config, int tp, std::vector<int64_t> sequences, int64_t wanted);

// One Actor::step.
struct TrainStepCalls {
  std::vector<std::vector<ModelCall>> micro_batches;  // by dp index, as many for each
  std::vector<int64_t> samples, response_tokens;      // by dp index, of what is trained
  bool recompute = false;
  bool logprobs = true;  // `seen` of Actor::step
  bool asks = true;      // its `accept`
  bool applied = true;   // false: a gradient was not finite
};
// Rows of each expert in each layer [layers, E] for a micro-batch of these samples.
using Routing = std::function<std::vector<int64_t>(std::span<const TrainSample> samples, const MicroBatch& micro)>;
// How an actor of that layout will run the samples. Without `routing`: even_call.
TrainStepCalls train_step_calls(const ModelConfig& config, const Layout& layout, std::span<const TrainSample> samples, const ActorOptions& options,
                                const Routing& routing = {});

// The trainer of a run.
struct TrainerShape {
  const ModelConfig& config;
  Numerics numerics;
  const Layout& layout;
  const StageLayers& stages;
  const OptimizerConfig& optimizer;
  int64_t exchange_rows;  // Model::exchange_rows
};
TrafficByName train_step_traffic(const TrainerShape& trainer, const TrainStepCalls& calls, int rank);

// One Transfer::update, all of what is `wanted` (a delta moves less, how much less is not known before), and the Actor::master that it asks for. `to`: of all
// ranks, the trainer's first.
TrafficByName sync_traffic(const TrainerShape& trainer, const Placement& to, const WantedTensors& wanted, int64_t bucket_bytes, int rank);

// One Peers::run as one engine (the ranks of a dp index) takes part.
struct EngineCalls {
  std::vector<ModelCall> forwards;
  std::vector<int64_t> draws;   // of each call that computes logits: its rows
  int64_t steps = 0;            // with or without own work
  int64_t samples = 0, tokens = 0;  // of its responses
  int64_t choice_words = 0;         // choice_words() of these
};
// 32-bit words that a sample's recorded choices take.
int64_t choice_words(const ChoiceLayout& layout, int64_t rows);
TrafficByName rollout_traffic(const ModelConfig& config, Numerics numerics, const Layout& layout, int64_t exchange_rows, std::span<const EngineCalls> engines,
                              int rank);

// One Peers::share of so many samples, tokens of their responses, and words of choices.
TrafficByName share_traffic(int64_t samples, int64_t tokens, int64_t choice_words, int first_sampler, int rank, int ranks);
// What Policy::sync says before its update.
TrafficByName version_traffic(int rank, int ranks);

// Sums by name.
void add_traffic(TrafficByName& sum, const TrafficByName& more);

}  // namespace lockstep
