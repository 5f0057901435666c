#pragma once
// What the gates of rl/gates.h are run on: workloads, and a policy in one pair of layouts with the ways to damage its trainer. Internal to these.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rl/diagnose.h"
#include "rl/gates.h"
#include "rl/peers.h"

namespace lockstep {

// Requests without stop ids, so that every response has the length asked for.
struct Workload {
  std::vector<Request> requests;  // request i has prompt id i
  std::vector<int64_t> lengths;   // of responses, descending
  int64_t context = 0;            // longest prompt with its response
  std::string str() const;
};
// At least `tokens` response tokens, of each length about as many, but of length 1 as many samples as of the shortest other one. Lengths over a quarter of
// `tokens`, and those that the model has no positions for, are left out. Prompts end around the ends of windows and pages, and begin alike.
Workload make_workload(const ModelConfig& config, int64_t tokens, uint64_t seed);

// Samples as the loop would make them, every response token trained, with advantages of 1 and -1.
std::vector<TrainSample> train_samples(const Workload& workload, std::span<const Completion> words);

class Rig {
 public:
  // All ranks of `world` (null: alone). context: of the longest workload. `lr` replaces that of o.optimizer.
  static Result<std::unique_ptr<Rig>> make(const GatesOptions& o, Numerics numerics, const ParallelOptions& parallel, float lr, int64_t context,
                                           RankWorld* world);

  Policy& policy() { return *policy_; }
  Actor& actor() { return policy_->actor(); }
  const Peers& peers() const { return peers_; }
  uint64_t graph_steps() { return peers_.sum(static_cast<uint64_t>(policy_->engine().stats().graph_steps), "steps as graphs"); }  // of the policy's engines
  uint64_t weights_sum() { return peers_.sum(policy_->weights_sum().share, "weights"); }

  // By prompt, then sample; all ranks get all.
  Result<std::vector<Completion>> sample(const Workload& w) { return run(policy_->engine(), w.requests); }
  // The same from an engine with other options, which is given `requests` so many times, one time after the other. `cached`: prompt tokens that its prefix
  // cache gave, on all ranks.
  Result<std::vector<Completion>> sample_with(EngineOptions options, std::span<const Request> requests, int times = 1, uint64_t* cached = nullptr);

  // One step on the samples, and the new weights to the sampler. What the step's own forward saw of them, `judge` hears before anything changes.
  Status update(std::span<const TrainSample> samples, const std::function<void(const Comparison&)>& judge);

  // The log-probs that another trainer computes from the same masters, in micro-batches of at most so many tokens.
  Result<std::vector<TokenLogprobs>> other_logprobs(std::span<const TrainSample> samples, int64_t microbatch_tokens);
  // Likewise of a trainer one of whose weights has its lowest bit flipped, as it is stored.
  Result<std::vector<TokenLogprobs>> damaged_logprobs(std::span<const TrainSample> samples);
  std::string damaged_weight() const;
  // The log-probs of a sample when the forward takes the experts that it chose itself, of which, if so asked, one id is another expert's. Without one to
  // take, nothing.
  std::optional<TokenLogprobs> routed_logprobs(const TrainSample& sample, bool flip);

 private:
  Rig(RankWorld* world, const GatesOptions& options, int64_t context) : peers_(world), options_(options), context_(context) {}
  Result<std::vector<Completion>> run(Engine& engine, std::span<const Request> requests);
  Result<std::vector<TokenLogprobs>> logprobs_of(const std::function<void(Weights&)>& damage, std::span<const TrainSample> samples, int64_t microbatch_tokens);

  Peers peers_;
  const GatesOptions& options_;
  const int64_t context_;
  Numerics numerics_ = Numerics::f32;
  std::optional<RunGroups> groups_;  // none: alone
  std::unique_ptr<Policy> policy_;
};

}  // namespace lockstep
