#pragma once
// The trainer of one policy: f32 master weights, their rounded copy that the forward reads, gradients, optimizer state. Packs samples into
// micro-batches by a token budget, runs forward, loss and backward, clips, steps.
//
// Memory: masters, gradients and moments in arenas of the actor; activations in a step arena. After the first step of the largest size nothing
// grows. Weights (shared with the sampler on one machine) change only inside optimizer_step and load.
//
// Ranks: actors with the same weights may train together. All of them call step() and logprobs() with the same arguments; each runs
// forward and backward of its share of the samples, and all get the same results. Denominators are counted over all samples,
// gradients are summed in rank order, and every rank takes the same optimizer step. Results are those of one actor alone, but
// for the order in which gradients are added.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/context.h"
#include "model/stack.h"
#include "parallel/collective.h"
#include "train/types.h"

namespace lockstep {

struct TokenLogprobs {
  std::vector<float> logprob, entropy;  // [R] of one sample
};

// rl spec 16 names, without the prefix. A metric without data is absent from `values`.
struct StepMetrics {
  std::vector<std::pair<std::string, double>> values;  // loss, pg_loss, kl_loss, entropy, pg_clipfrac, pg_clipfrac_lower, ppo_kl, grad_norm, lr, skipped, tokens, microbatches
  bool skipped = false;
};

class Actor {
 public:
  // `weights` is written by this actor and read by anyone between steps; it must have been constructed for the same config.
  // `ranks` (null: this actor is alone) outlives it.
  Actor(Context& c, Weights& weights, const RopeTables& rope, const OptimizerConfig& optimizer, const ActorOptions& options,
        RankGroup* ranks = nullptr);
  ~Actor();

  void initialize(uint64_t seed);                   // random masters; version 0
  TensorSet& masters();                             // f32 (i32 tables), in tensor_table order
  void publish();                                   // masters -> weights, same version (after masters were loaded from a file)

  // Log-probabilities (and entropies) of every response token under the current weights, at each sample's temperature: the trainer's own forward.
  std::vector<TokenLogprobs> logprobs(std::span<const TrainSample> samples);

  // One optimizer step on all samples: every micro-batch forward, loss, backward; then clip, AdamW, weights version + 1.
  // `seen` (may be null) receives the log-probs that the training forward computed, by sample (NaN for samples without a trained token). `accept` (may be
  // empty) is asked once they are all there and nothing has been changed yet: an exact run compares them with the sampler's. Its error ends the step,
  // with masters, moments and weights as they were. Of many ranks, an error of one is an error of all.
  // Other error: max_skipped non-finite steps in a row.
  Result<StepMetrics> step(std::span<const TrainSample> samples, const LossConfig& loss, std::vector<TokenLogprobs>* seen,
                           const std::function<Status()>& accept = {});

  int64_t steps_done() const;
  const Gradients& gradients() const;  // of the last step, after clipping was decided, unscaled

  // Everything resume needs, one safetensors file each, written atomically: masters.safetensors, optimizer.safetensors. Masters
  // have the table's names, moments the same with "m." and "v." before; both files carry the counters. A load that fails has
  // changed nothing.
  Status save(const std::string& directory) const;
  Status load(const std::string& directory);

  // Seconds since construction; forward includes logprobs(), optimizer the rounding of masters to weights.
  double forward_seconds() const;
  double backward_seconds() const;
  double optimizer_seconds() const;
  // Bytes that the actor's arenas have reached together; the context's workspace is not among them.
  size_t high_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
