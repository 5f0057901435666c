#pragma once
// One policy in one process: the model's config, tokenizer, weights and memory, and the two users of the weights, engine and
// actor. Owns them all; everything else in this room borrows. One thread at a time.
//
// Of many ranks each has its shards in both layouts. Where these are the same on every rank, and the numerics are, engine and actor read the same
// weights; otherwise the engine has its own, which publish() and sync() bring to the actor's version (sync/transfer.h). Where trainers and samplers are
// different ranks, a rank has an actor or an engine, and weights of the other kind without a tensor in them.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "io/tokenizer.h"
#include "model/config.h"
#include "model/stack.h"
#include "rl/layouts.h"
#include "rollout/engine.h"
#include "sync/transfer.h"
#include "train/actor.h"

namespace lockstep {

// rollout.numerics; same: the model's, an exact pair.
enum class SamplerNumerics : uint8_t { same, f32, bf16, fp8, fp4 };

struct PolicyOptions {
  std::string config;     // path of config.json; empty: the one in the checkpoint directory `init`
  std::string init;       // "random", a checkpoint directory or a safetensors file
  std::string tokenizer;  // file or directory, "bytes", or empty: beside the checkpoint or config.json, else bytes
  Numerics numerics = Numerics::bf16;
  bool kv_fp8 = false, index_fp4 = false;  // CacheRounding
  SamplerNumerics sampler = SamplerNumerics::same;
  Device device = Device::cpu;  // where weights, state and everything computed lie
  std::optional<ModelConfig> shape = {};  // instead of a config.json
  Numerics sampler_numerics() const { return sampler == SamplerNumerics::same ? numerics : static_cast<Numerics>(static_cast<int>(sampler) - 1); }
  bool exact() const { return sampler_numerics() == numerics; }  // sampler and trainer compute the same bits
};

// What the policy will be used for; decides which parts are made.
struct PolicyUse {
  uint64_t seed = 0;          // of random weights
  int threads = 0;            // 0: one a core
  EngineOptions engine = {};  // max_context bounds prompt + response, in sampling and training
  bool sample = true;         // make an engine, on ranks that sample
  bool train = false;         // make an actor, on ranks that train
  bool apart = false;         // of both: the sampler has weights of its own even where it could read the actor's
  bool text = true;           // false: no tokenizer is looked for, and neither tokenizer() nor save() may be called
  OptimizerConfig optimizer = {};
  ActorOptions actor = {};
  SyncOptions sync = {};       // of weights that the sampler has for itself
  RunGroups* ranks = nullptr;  // that work together, and outlive the policy; null: alone
};

class Policy {
 public:
  // Reads config and tokenizer, reserves memory, loads or draws the weights. Version 0. Nothing is communicated: ranks agree that all succeeded,
  // and then publish().
  static Result<std::unique_ptr<Policy>> make(const PolicyOptions& options, const PolicyUse& use);

  Context& context() { return context_.get(); }
  const ModelConfig& config() const { return config_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const Weights& weights() const { return *model_.weights; }  // the sampler's, or without one the actor's
  const Model& model() const { return model_; }               // of these weights
  int64_t trained_version() const { return weights_->version(); }  // of the actor's
  // Of the actor's rounded weights, bit by bit and place by place.
  struct WeightsSum {
    uint64_t held = 0;   // what this rank holds: equal on ranks that hold the same parts
    uint64_t share = 0;  // added over all ranks it depends on the weights alone, not on the layout
  };
  WeightsSum weights_sum();
  Engine& engine() { return *engine_; }        // REQUIRES: use.sample
  Engine* own_engine() { return engine_.get(); }  // null on ranks without
  Actor& actor() { return *actor_; }           // REQUIRES: use.train, on ranks that train
  // All ranks: the actor's weights to the sampler's. publish: all of them, after make() or load(). sync: what optimizer steps change. Both give the
  // receipt if anything was transferred; an error leaves the sampler as it was.
  Result<std::optional<SyncReceipt>> publish();
  Result<std::optional<SyncReceipt>> sync();

  // Weights of the same model and tokenizer, from a checkpoint directory or a run's newest, into storage beside the sampler's, which goes on being read
  // meanwhile by whoever samples: on a thread of the caller's, one at a time. An error changes nothing that is in use. Not for a policy that trains.
  Status load_beside(const std::string& checkpoint);
  // What load_beside() read becomes what the engine reads, one version up. REQUIRES: load_beside() succeeded, and no sample holds state (Engine::load).
  void adopt();

  // Bytes that memory has reached, for the start and end lines.
  std::string memory_report();

  // This rank's files of a checkpoint directory: masters and optimizer of the actor and, by the first rank, config.json and the tokenizer.
  // The directory as a whole is not atomic: rl/checkpoint.h is.
  Status save(const std::string& directory) const;
  // Masters and optimizer of the actor; the config must be the same. publish() follows.
  Status load(const std::string& directory);

 private:
  Policy(Device device, int threads);
  Result<std::optional<SyncReceipt>> transfer();
  void follow_trainers();

  DeviceContext context_;
  ModelConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Arena> weights_arena_, rope_arena_, state_arena_;
  std::unique_ptr<Weights> weights_;          // the actor's, or the only ones
  std::unique_ptr<Weights> sampler_weights_;  // null: the same
  std::unique_ptr<Arena> spare_arena_;
  std::unique_ptr<DeviceContext> spare_context_;
  std::unique_ptr<Weights> spare_;  // that load_beside() fills
  // On a GPU whose updates of a sampler with weights of its own go by way of the host (sync.delta, parallel.transport): the transfer is between these.
  std::unique_ptr<Arena> mirror_arena_;
  std::unique_ptr<Weights> trainer_mirror_, sampler_mirror_;
  std::unique_ptr<Transfer> transfer_;
  Model model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Actor> actor_;
  RunGroups* ranks_ = nullptr;
};

// The frozen initial policy of a KL term: weights of their own, on the same context.
class ReferencePolicy {
 public:
  // The same weights that Policy::make starts from.
  static Result<std::unique_ptr<ReferencePolicy>> make(Policy& policy, const PolicyOptions& options, const PolicyUse& use);
  std::vector<TokenLogprobs> logprobs(std::span<const TrainSample> samples) { return actor_->logprobs(samples); }

 private:
  ReferencePolicy() = default;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Actor> actor_;
};

// One config.json and tokenizer, found as `options` says.
Result<ModelConfig> find_model_config(const PolicyOptions& options);
Result<std::unique_ptr<Tokenizer>> find_tokenizer(const PolicyOptions& options);

// What the model is given for a prompt: the begin token, unless the text itself begins with it, then the ids of the text.
Result<std::vector<int32_t>> prompt_tokens(const Tokenizer& tokenizer, const std::string& text);
// The text of a response: its ids without a final end token.
std::string response_text(const Tokenizer& tokenizer, std::span<const int32_t> response);

}  // namespace lockstep
