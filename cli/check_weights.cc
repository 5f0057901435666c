// lockstep check-weights: what a sampler would read, or a server does read, against what the trainer of a checkpoint exports.

#include <algorithm>

#include <fmt/core.h>

#include "cli/console.h"
#include "model/checkpoint_io.h"
#include "rl/weights_check.h"
#include "serve/weights.h"

namespace lockstep {

namespace {

struct Source {
  RunConfig config;
  ModelConfig model;
  ReadBox masters;
};

Result<Source> open_source(const CheckWeightsArgs& args) {
  const Result<std::string> checkpoint = find_checkpoint(args.checkpoint);
  if (!checkpoint) return checkpoint.status();
  LOCKSTEP_RETURN_IF_ERROR(check_checkpoint(checkpoint.value()));
  const Result<ResolvedConfig> config = checkpoint_config(checkpoint.value());
  if (!config) return config.status();
  const Result<ModelConfig> model = find_model_config(config.value().values.model);
  if (!model) return model.status();
  const Result<ReadBox> masters = checkpoint_source(checkpoint.value(), model.value());
  if (!masters) return masters.status();
  return Source{config.value().values, model.value(), masters.value()};
}

// A policy's sampler, which got its weights from the trainer by transfer.
Result<ServedWeights> compare_transferred(const Source& source, const CheckWeightsArgs& args) {
  PolicyOptions model = source.config.model;
  for (const Numerics n : kAllNumerics)
    if (args.numerics == numerics_name(n)) model.sampler = static_cast<SamplerNumerics>(static_cast<int>(n) + 1);
  model.device = Device::cpu;  // where a sampler may have weights of its own
  // The masters decide what the sampler gets, not how they are trained.
  if (!can_follow(model.numerics, model.sampler_numerics())) model.numerics = Numerics::f32;
  PolicyUse use{.threads = static_cast<int>(source.config.run.threads), .sample = true, .train = true, .apart = true, .text = false};
  use.engine = {.max_running = 1, .max_batch_tokens = 16, .max_context = std::min<int64_t>(source.model.max_positions, 16)};
  use.actor.max_tokens_per_microbatch = 16;
  const Result<std::unique_ptr<Policy>> policy = Policy::make(model, use);
  if (!policy) return policy.status();
  const Result<std::optional<SyncReceipt>> published = policy.value()->publish();
  if (!published) return published.status();
  const Weights& served = policy.value()->weights();
  const Result<WeightsComparison> comparison = compare_weights(policy.value()->context(), served, source.masters);
  if (!comparison) return comparison.status();
  return ServedWeights{served.numerics(), std::to_string(served.version()), comparison.value()};
}

}  // namespace

int check_weights_command(const CheckWeightsArgs& args) {
  const Result<Source> source = open_source(args);
  if (!source) return fail(kExitBadInput, source.status());
  const Result<std::string> key = read_key(args.key_file);
  if (!key) return fail(kExitBadInput, key.status());
  CpuContext c(1);
  const Source& s = source.value();
  const Result<ServedWeights> served =
      args.server.empty() ? compare_transferred(s, args) : compare_served_weights(c, {args.server, key.value()}, s.model, s.masters);
  if (!served) return fail(kExitBadInput, served.status());
  const WeightsComparison& r = served.value().comparison;
  const std::string where = args.server.empty() ? "the sampler" : fmt::format("{}, weight version {}", args.server, served.value().version);
  if (!args.server.empty() && !args.numerics.empty() && args.numerics != numerics_name(served.value().numerics))
    return fail(kExitFailure, errorf("{} serves in {}, not in {}", where, numerics_name(served.value().numerics), args.numerics));
  if (r.different > 0) {
    fmt::print("check-weights: DIFFERENT in {} of {} tensors of {} in {}; first {}\n", r.different, r.tensors, where, numerics_name(served.value().numerics),
               r.first->str());
    return kExitFailure;
  }
  fmt::print("check-weights: all {} numbers of {} tensors of {} in {} equal the trainer's export bit for bit\n", r.numbers, r.tensors, where,
             numerics_name(served.value().numerics));
  return kExitOk;
}

}  // namespace lockstep
