#pragma once
// The rollout engine: continuous batching over paged sequence state. One step() is one call of the model's forward: chunks of
// waiting prompts and one token of every running sample, packed together. Which samples run together never changes what any of
// them says (row contract, keyed sampling).
//
// Admission is exact: a sample starts only when a slot and all pages up to prompt + max_new_tokens are free, so a running sample
// never waits for memory. Samples of one request share the prompt's prefill: the prompt is run once, its state is copied into the
// other samples' slots (full pages are shared by reference count, the last partial page is copied). When not all samples of a
// request fit at once, the prompt's state and its last hidden row are kept until they did. Order: requests first in, first out.
// After construction a step allocates nothing in the forward path.
//
// Ranks. The model's tp ranks are one engine: they are given the same requests, plan the same steps (a plan depends on lengths alone), get
// the same logits and therefore say the same; whoever gathers takes the words of one. Its ep ranks are engines of their own, each with its
// own requests, whose experts need each other in every forward: before a step they ask whether any has work (8 bytes to each, beside the
// exchanges of every layer), and while one has, those without join with an empty batch. So all ep ranks call step() until it is false, in
// evaluations too, and one with nothing to do has no shorter day than the busiest: balance requests over them.
//
// Not thread-safe; one engine belongs to one thread. Weights may be reloaded between steps only when idle() (no state of an older
// version remains).

#include <memory>
#include <vector>

#include "core/context.h"
#include "model/stack.h"
#include "rollout/types.h"

namespace lockstep {

struct EngineOptions {
  int64_t max_running = 64;         // slots: samples decoding at once
  int64_t max_batch_tokens = 1024;  // rows of one forward, prefill chunks included
  int64_t max_context = 512;        // prompt + response
  int64_t num_pages = 0;  // 0: enough for max_running samples of max_context; else at least one more than one such sample needs
};

struct EngineStats {
  int64_t steps = 0;                 // with work
  int64_t empty_steps = 0;           // joined for the sake of ep peers
  int64_t prefill_tokens = 0;        // prompt rows run
  int64_t decode_tokens = 0;         // response tokens drawn, each sample's first one (which its prompt's prefill gives) included
  int64_t finished = 0;              // samples, aborted ones included
  int64_t shared_prompt_tokens = 0;  // prompt tokens that did not have to be run again
  double forward_seconds = 0, sample_seconds = 0;
};

class Engine {
 public:
  // State lives in `arena`; scratch comes from c.workspace. `model` and its weights outlive the engine.
  Engine(Context& c, const Model& model, const EngineOptions& options, Arena& arena);
  ~Engine();

  // Errors: empty prompt, token out of vocabulary, prompt + max_new_tokens over max_context, num_samples < 1, bad sampling
  // values.
  Status submit(Request request);
  // Runs one forward and samples; false when there was nothing to do, here or on any ep peer. All tp and ep ranks together.
  bool step();
  bool idle() const;
  // Finished completions since the last call, in order of finishing.
  std::vector<Completion> take_finished();
  // Stops everything; unfinished samples finish with reason abort.
  void abort_all();
  const EngineStats& stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
