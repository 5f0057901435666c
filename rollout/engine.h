#pragma once
// The rollout engine: continuous batching over paged sequence state. One step() is one call of the model's forward: chunks of
// waiting prompts and one token of every running sample, packed together. Which samples run together never changes what any of
// them says (row contract, keyed sampling).
//
// Admission is exact: a sample starts only when a slot and all pages up to prompt + max_new_tokens are free, so a running sample
// never waits for memory. Samples of one request share the prompt's prefill: the prompt is run once, its state is copied into the
// other samples' slots (full pages are shared by reference count, the last partial page is copied). When not all samples of a
// request fit at once, the prompt's state and its last hidden row are kept until they did. Order: requests first in, first out, unless
// Request::expected_tokens says which are long; these go first.
// After construction a step allocates nothing in the forward path. An admitted sample holds all it needs, so none is ever preempted for want of
// memory; retract_all() preempts all on request.
//
// With cache_slots, prompts continue from the state of earlier ones that began alike (rollout/prefix_cache.h), which changes no bit of what is
// said: the state is the one that running the prompt would make. It is forgotten when the weights' version changes; a version names one content.
//
// Ranks. The model's tp ranks are one engine: they are given the same requests, plan the same steps (a plan depends on lengths alone), get
// the same logits and therefore say the same; whoever gathers takes the words of one. Its ep ranks are engines of their own, each with its
// own requests, whose experts need each other in every forward: before a step they ask whether any has work (8 bytes to each, beside the
// exchanges of every layer), and while one has, those without join with an empty batch. So all ep ranks call step() until it is false, in
// evaluations too, and one with nothing to do has no shorter day than the busiest: balance requests over them.
//
// Graphs. On a GPU a step in which every running sample draws its next token, and no prompt runs, is enqueued by one call: rows, entries and lengths are padded to a few shapes, whose
// graphs read the batch and the sampling parameters from where the step before had them. No bit depends on it (row contract). Steps with tp or ep peers, recorded choices or a probe
// are enqueued kernel by kernel.
//
// Request::record: each forward's choices of experts and entries go beside the rows that they are of, with the prompt's to every sample.
//
// Not thread-safe; one engine belongs to one thread. Weights may be reloaded between steps only when load().running is 0, which idle() implies and
// retract_all() brings about (no state of an older version is in use).

#include <memory>
#include <span>
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
  int64_t cache_slots = 0;  // prefixes that later prompts may continue from; their pages are those that are free
  bool graphs = true;       // on a GPU, steps that only draw next tokens are graphs (rollout/decode_graphs.h)
};

struct EngineStats {
  int64_t steps = 0;                 // with work
  int64_t graph_steps = 0;           // of them, enqueued as a graph
  int64_t empty_steps = 0;           // joined for the sake of ep peers
  int64_t prefill_tokens = 0;        // prompt rows run
  int64_t decode_tokens = 0;         // response tokens drawn, each sample's first one (which its prompt's prefill gives) included
  int64_t finished = 0;              // samples, aborted ones included
  int64_t shared_prompt_tokens = 0;  // prompt tokens that did not have to be run again for another sample of the request
  int64_t cached_prompt_tokens = 0;  // prompt tokens that an earlier request's state covered
  double forward_seconds = 0, sample_seconds = 0;  // on a GPU: until the forward was enqueued; from then on
};

struct EngineLoad {
  int64_t running = 0;  // samples and prompts that hold state
  int64_t waiting = 0;  // requests not yet admitted
  int64_t free_slots = 0, free_pages = 0, num_pages = 0;
  int64_t cached_prefixes = 0;
};

class Engine {
 public:
  // State lives in `arena`; scratch comes from c.workspace. `model` and its weights outlive the engine.
  Engine(Context& c, const Model& model, const EngineOptions& options, Arena& arena);
  ~Engine();

  // Errors: empty prompt, token out of vocabulary, prompt + max_new_tokens over max_context, num_samples < 1, bad sampling
  // values, a log that does not fit.
  Status submit(Request request);
  Status check(const Request& request) const;  // what submit() would say; any thread may ask
  // Runs one forward and samples; false when there was nothing to do, here or on any ep peer. All tp and ep ranks together.
  bool step();
  bool idle() const;
  // Finished completions since the last call, in order of finishing.
  std::vector<Completion> take_finished();
  // What the last step drew, at most max_running tokens; until the next call of anything.
  std::span<const Drawn> drawn() const;
  // Stops everything; unfinished samples finish with reason abort.
  void abort_all();
  // Likewise the samples of the requests of this name; false: there are none. Between steps, as all that follows. What they held is free at once.
  bool abort(uint64_t tag);
  // Ends one sample that has drawn a token, with reason stop: for a stop that ids cannot express. False: no such sample is running.
  bool stop(uint64_t tag, int32_t sample_idx);
  // Takes their state from all samples, which start again from their tokens, in order, before requests that were not admitted yet: after an update
  // of the weights, or with the bits they would have had.
  void retract_all();
  void flush_cache();
  EngineLoad load() const;
  const EngineStats& stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
