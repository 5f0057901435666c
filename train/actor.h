#pragma once
// The trainer of one policy: f32 master weights, their rounded copy that the forward reads, gradients, optimizer state. Packs samples into
// micro-batches by a token budget, runs forward, loss and backward, clips, steps.
//
// Memory: gradients of all parameters that the rank's weights hold; masters and moments of those that it owns (train/partition.h); activations of as
// many micro-batches as are in flight (train/pipeline.h). After the first step of the largest size nothing grows. Weights (shared with the sampler on
// one machine) change only inside step, initialize, load_masters and load.
//
// Ranks: the actors of all ranks of a layout train together, each over its shard's weights. All of them call step() and logprobs() with the same
// arguments, and all get the same results. Samples are shared out over dp; the stages and tp ranks of one dp index work on the same ones; every dp index
// runs as many micro-batches, some of which may be empty. Denominators are counted over all samples and gradients are summed in rank order. Log-probs
// and losses are those of one actor alone to the bit, gradients but for the order in which they are added.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/context.h"
#include "model/checkpoint_boxes.h"
#include "model/stack.h"
#include "parallel/groups.h"
#include "train/types.h"

namespace lockstep {

// rl spec 16 names, without the prefix. A metric without data is absent from `values`.
struct StepMetrics {
  std::vector<std::pair<std::string, double>> values;  // loss, pg_loss, kl_loss, entropy, pg_clipfrac, pg_clipfrac_lower, ppo_kl, tis, tis_abs, tis_clipfrac, tis_maskfrac, tis_vetofrac, opsm_maskfrac, grad_norm, lr, skipped, tokens, microbatches
  bool skipped = false;
};

enum class Owned : uint8_t { masters, gradients, first_moments, second_moments };

class Actor {
 public:
  // `weights` is written by this actor and read by anyone between steps; it must have been constructed for the same config, and for the shard of this
  // rank in `groups` (null: alone), which outlives the actor.
  Actor(Context& c, Weights& weights, const RopeTables& rope, const OptimizerConfig& optimizer, const ActorOptions& options, Groups* groups = nullptr);
  ~Actor();

  // Masters and weights from `read`, moments and counters zero, version 0. Every rank for itself. After an error both are unfit for use.
  Status load_masters(const ReadBox& read);
  // The whole f32 master of a tensor in this rank's shard: by ranks that hold the same tensors, for the same ones in the same order. May lie in c's
  // workspace, whose scope the caller holds.
  ConstTensorView master(int id) const;
  void initialize(uint64_t seed);  // load_masters of random_boxes
  // What this rank owns, box by box under the tensor's name: what is trained in table order, of masters then what is frozen. Over all ranks, every
  // number is visited once. Gradients are those of the last step: sums over ranks, unscaled.
  void visit_owned(Owned what, const std::function<void(const BoxView&)>& f) const;

  // Log-probabilities (and entropies) of every response token under the current weights, at each sample's temperature: the trainer's own forward.
  std::vector<TokenLogprobs> logprobs(std::span<const TrainSample> samples);

  // One optimizer step on all samples: every micro-batch forward, loss, backward; then clip, AdamW, weights version + 1.
  // `seen` (may be null) receives the log-probs that the training forward computed, by sample (NaN for samples without a trained token). `accept` (may be
  // empty) is asked once they are all there and nothing has been changed yet: an exact run compares them with the sampler's. Its error ends the step,
  // with masters, moments and weights as they were. An error of one rank is an error of all.
  // Other error: max_skipped non-finite steps in a row.
  Result<StepMetrics> step(std::span<const TrainSample> samples, const LossConfig& loss, std::vector<TokenLogprobs>* seen,
                           const std::function<Status()>& accept = {});

  int64_t steps_done() const;
  // Of the last step, unscaled. With others, sums over ranks are only where this rank owns them (visit_owned).
  const Gradients& gradients() const;

  // Everything resume needs, as boxes (model/checkpoint_boxes.h): the files masters and optimizer of this rank. Moments have the table's names with
  // "m." and "v." before; all files carry the counters. Every rank saves and loads for itself, load from files of any layout. A load that fails has
  // changed nothing.
  Status save(const std::string& directory) const;
  Status load(const std::string& directory);

  // Seconds since construction; forward includes logprobs(), optimizer the rounding of masters to weights.
  double forward_seconds() const;
  double backward_seconds() const;
  double optimizer_seconds() const;
  // Bytes that the actor's arenas have reached together; the context's workspace is not among them.
  size_t high_bytes() const;
  size_t owned_bytes() const;  // of these, masters and moments of what this rank owns

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
