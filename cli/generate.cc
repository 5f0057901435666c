// lockstep generate: what a checkpoint says to one prompt.

#include <cstdio>
#include <iostream>
#include <iterator>
#include <numeric>

#include "cli/console.h"
#include "io/json.h"
#include "rl/sampling.h"

namespace lockstep {

int generate_command(const GenerateArgs& args) {
  Result<std::string> checkpoint = find_checkpoint(args.checkpoint);
  if (!checkpoint) return fail(kExitBadInput, checkpoint.status());
  Result<ResolvedConfig> config = checkpoint_config(checkpoint.value());
  if (!config) return fail(kExitBadInput, config.status());
  for (const std::string& o : args.overrides) {
    if (const Status s = apply_override(config.value(), o); !s) return fail(kExitBadInput, s);
  }
  if (const Status s = check_config(config.value()); !s) return fail(kExitBadInput, s);
  const RunConfig& c = config.value().values;
  std::string text = args.prompt;
  if (text == "-") text.assign(std::istreambuf_iterator<char>(std::cin), {});

  Result<std::unique_ptr<Tokenizer>> tokenizer = find_tokenizer(c.model);
  if (!tokenizer) return fail(kExitBadInput, tokenizer.status());
  Result<std::vector<int32_t>> prompt = prompt_tokens(*tokenizer.value(), text);
  if (!prompt) return fail(kExitBadInput, prompt.status());

  Console console;
  PolicyUse use{.seed = static_cast<uint64_t>(c.run.seed), .threads = static_cast<int>(c.run.threads)};
  use.engine.max_running = std::min(c.rollout.max_running, args.samples);
  use.engine.max_batch_tokens = c.rollout.max_batch_tokens;
  use.engine.graphs = c.rollout.graphs;
  use.engine.max_context = static_cast<int64_t>(prompt.value().size()) + c.eval.max_new_tokens;
  Result<std::unique_ptr<Policy>> policy = Policy::make(c.model, use);
  if (!policy) return console.fail(policy.status());

  Request request;
  request.prompt = prompt.value();
  request.num_samples = static_cast<int32_t>(args.samples);
  request.seed = static_cast<uint64_t>(c.eval.seed);
  request.sampling.temperature = c.eval.temperature;
  request.sampling.top_p = c.eval.top_p;
  request.sampling.top_k = static_cast<int32_t>(std::min<int64_t>(c.eval.top_k, policy.value()->config().vocab_size));
  request.sampling.max_new_tokens = c.eval.max_new_tokens;
  request.sampling.stop_ids = {tokenizer.value()->eos_id()};
  console.hooks().begin();
  Result<std::vector<Completion>> completions =
      run_requests(policy.value()->engine(), std::span(&request, 1), console.hooks(), "generate");
  if (!completions) return console.fail(completions.status());
  console.progress().clear();
  for (const Completion& done : completions.value()) {
    const std::string response = response_text(*tokenizer.value(), done.tokens);
    if (args.json) {
      std::printf("%s\n", JsonLine()
                              .add("sample", done.sample_idx)
                              .add("response", response)
                              .add("finish_reason", finish_reason_name(done.reason))
                              .add("logprob", std::accumulate(done.logprobs.begin(), done.logprobs.end(), 0.0))
                              .add("tokens", std::span<const int32_t>(done.tokens))
                              .str()
                              .c_str());
    } else {
      std::printf("%s\n", response.c_str());
    }
  }
  return kExitOk;
}

}  // namespace lockstep
