#pragma once
// One micro-batch on this rank's part of the model: everything that lives between the beginning of its forward and the end of its backward. A pipeline
// stage has as many of these as micro-batches in flight; the next micro-batch in the same place allocates nothing that the largest did not.

#include <optional>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "model/stack.h"
#include "train/pack.h"
#include "train/types.h"

namespace lockstep {

class MicroBatchPlace {
 public:
  // On the last stage: response rows of all samples of the micro-batch, in order.
  struct HeadRows {
    TensorView hidden;                 // [R, D]
    TensorView target, temperature;    // [R]
    TensorView logprob, lse, entropy;  // [R]
  };

  MicroBatchPlace(Context& c, const Weights& weights, const ActorOptions& options);

  // Packs the samples of `micro` (maybe none) and runs the stage over them, and on the last one the head. `keep`: for a backward, until which `input`
  // stays. With options.replay the samples' choices are repeated, here and in the backward. Returns what the stage hands on, streams [T, n, D] in the
  // context's workspace, whose scope the caller holds; nothing on the last.
  ConstTensorView forward(Context& c, const Model& model, std::span<const TrainSample> samples, const MicroBatch& micro, bool keep, ConstTensorView input);
  const HeadRows& head() const { return head_; }
  // From gradients of the log-probs and entropies (empty: none) [R] to that of the hidden rows [R, D], which backward takes; adds the head's.
  TensorView head_backward(Context& c, const Model& model, ConstTensorView dlogprob, ConstTensorView dentropy, Gradients& gradients);
  // The stage's backward, after its forward with `keep`; model/stack.h.
  void backward(Context& c, const Model& model, ConstTensorView doutput, Gradients& gradients, TensorView dinput);

  // Scratch until the next forward.
  Arena& arena() { return arena_; }
  size_t high_bytes() const { return arena_.high_bytes() + state_arena_.high_bytes(); }

 private:
  int64_t pages_for(int64_t positions) const { return (positions + builder_.page_tokens() - 1) / builder_.page_tokens(); }
  void reserve_pages(int64_t pages);
  void pack_rows(Context& c, std::span<const TrainSample> samples, const MicroBatch& micro);

  void unpack_choices(Context& c, std::span<const TrainSample> samples, const MicroBatch& micro);
  Model repeating(const Model& model) const;

  const Weights& weights_;
  const ChoiceLayout layout_;
  Choices choices_;  // to be repeated on this micro-batch, by layer
  Arena state_arena_, arena_;
  BatchBuilder builder_;
  std::optional<StatePool> pool_;  // pages of compressed entries; training has no slots
  Saved saved_;
  SequenceBatch batch_;
  std::vector<SequenceRows> rows_;
  std::vector<int32_t> page_ids_;  // 0, 1, 2, ...: sequences take consecutive pieces
  HeadRows head_;
};

}  // namespace lockstep
