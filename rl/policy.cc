#include "rl/policy.h"

#include <algorithm>
#include <filesystem>
#include <thread>

#include "io/file.h"
#include "model/checkpoint_io.h"

namespace lockstep {

namespace fs = std::filesystem;

namespace {

// Address space only; pages are committed by first touch.
constexpr size_t kArenaReserve = size_t{256} << 30;
constexpr const char* kConfigFile = "config.json";
constexpr const char* kMastersFile = "masters.safetensors";
constexpr const char* kRandom = "random";

bool is_directory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

int num_threads(int asked) {
  if (asked > 0) return asked;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Random weights, or those of a checkpoint.
Status fill_masters(const PolicyOptions& options, const ModelConfig& config, const std::vector<TensorSpec>& table, uint64_t seed,
                    TensorSet& masters) {
  if (options.init == kRandom) {
    initialize_masters(config, table, masters, seed);
    return Status::ok();
  }
  // A directory that a run wrote holds masters beside the optimizer's state; any other is a released checkpoint.
  const std::string masters_file = options.init + "/" + kMastersFile;
  return load_checkpoint(exists(masters_file) ? masters_file : options.init, config, table, masters);
}

Status check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config) {
  if (tokenizer.vocab_size() > config.vocab_size) {
    return errorf("the tokenizer has {} ids, the model's vocab_size is {}; they do not belong together", tokenizer.vocab_size(),
                  config.vocab_size);
  }
  if (tokenizer.bos_id() != config.bos_id || tokenizer.eos_id() != config.eos_id) {
    return errorf("the tokenizer begins with id {} and ends with id {}, config.json says bos_token_id {} and eos_token_id {}",
                  tokenizer.bos_id(), tokenizer.eos_id(), config.bos_id, config.eos_id);
  }
  return Status::ok();
}

std::string mebibytes(size_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

}  // namespace

Result<ModelConfig> find_model_config(const PolicyOptions& options) {
  if (!options.config.empty()) {
    return load_model_config(is_directory(options.config) ? options.config + "/" + kConfigFile : options.config);
  }
  if (is_directory(options.init)) return load_model_config(options.init + "/" + kConfigFile);
  return errorf("model.config is empty and model.init is {}; name a config.json, or a checkpoint directory that holds one",
                options.init);
}

Result<std::unique_ptr<Tokenizer>> find_tokenizer(const PolicyOptions& options) {
  if (options.tokenizer == "bytes") return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
  if (!options.tokenizer.empty()) return load_tokenizer(options.tokenizer);
  for (const std::string& path :
       {options.init, is_directory(options.config) ? options.config : parent_directory(options.config)}) {
    if (is_directory(path) && exists(path + "/" + kTokenizerFile)) return load_tokenizer(path);
  }
  return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
}

Policy::Policy(int threads) : context_(threads) {}

Result<std::unique_ptr<Policy>> Policy::make(const PolicyOptions& options, const PolicyUse& use) {
  Result<ModelConfig> config = find_model_config(options);
  if (!config) return config.status();
  Result<std::unique_ptr<Tokenizer>> tokenizer = find_tokenizer(options);
  if (!tokenizer) return tokenizer.status();
  LOCKSTEP_RETURN_IF_ERROR(check_vocabulary(*tokenizer.value(), config.value()));
  if (use.engine.max_context > config.value().max_positions) {
    return errorf("prompts and responses may reach {} tokens, the model's max_position_embeddings is {}", use.engine.max_context,
                  config.value().max_positions);
  }

  std::unique_ptr<Policy> p(new Policy(num_threads(use.threads)));
  p->config_ = config.take();
  p->tokenizer_ = tokenizer.take();
  p->weights_arena_ = std::make_unique<Arena>("weights", kArenaReserve);
  p->rope_arena_ = std::make_unique<Arena>("rope tables", kArenaReserve);
  p->weights_ = std::make_unique<Weights>(p->config_, options.numerics, *p->weights_arena_);
  p->model_.weights = p->weights_.get();
  p->model_.rope = make_rope_tables(p->config_, use.engine.max_context, *p->rope_arena_);
  if (use.train) {
    p->actor_ = std::make_unique<Actor>(p->context(), *p->weights_, p->model_.rope, use.optimizer, use.actor);
    LOCKSTEP_RETURN_IF_ERROR(fill_masters(options, p->config_, p->weights_->table(), use.seed, p->actor_->masters()));
    p->actor_->publish();
  } else {
    // Masters are needed once, to round them.
    Arena masters_arena("masters", kArenaReserve);
    TensorSet masters = make_tensor_set(p->weights_->table(), masters_arena, [](const TensorSpec&) { return true; });
    LOCKSTEP_RETURN_IF_ERROR(fill_masters(options, p->config_, p->weights_->table(), use.seed, masters));
    p->weights_->load(p->context(), masters, 0);
  }
  if (use.sample) {
    p->state_arena_ = std::make_unique<Arena>("sequence state", kArenaReserve);
    p->engine_ = std::make_unique<Engine>(p->context(), p->model_, use.engine, *p->state_arena_);
  }
  return p;
}

std::string Policy::memory_report() {
  std::string text = fmt::format("weights {}", mebibytes(weights_arena_->high_bytes()));
  if (actor_) text += fmt::format(", training {}", mebibytes(actor_->high_bytes()));
  if (engine_) text += fmt::format(", sequence state {}", mebibytes(state_arena_->high_bytes()));
  return text + fmt::format(", scratch {}", mebibytes(context_.workspace().high_bytes()));
}

Status Policy::save(const std::string& directory) const {
  LOCKSTEP_RETURN_IF_ERROR(actor_->save(directory));
  LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kConfigFile, model_config_json(config_)));
  return tokenizer_->save(directory);
}

Status Policy::load(const std::string& directory) {
  Result<ModelConfig> config = load_model_config(directory + "/" + kConfigFile);
  if (!config) return config.status();
  if (config.value() != config_)
    return errorf("{}/{}: the checkpoint's model is not the one that the run describes", directory, kConfigFile);
  return actor_->load(directory);
}

Result<std::unique_ptr<ReferencePolicy>> ReferencePolicy::make(Policy& policy, const PolicyOptions& options,
                                                               const PolicyUse& use) {
  std::unique_ptr<ReferencePolicy> r(new ReferencePolicy);
  r->arena_ = std::make_unique<Arena>("reference weights", kArenaReserve);
  r->weights_ = std::make_unique<Weights>(policy.config(), options.numerics, *r->arena_);
  r->actor_ = std::make_unique<Actor>(policy.context(), *r->weights_, policy.model().rope, use.optimizer, use.actor);
  LOCKSTEP_RETURN_IF_ERROR(fill_masters(options, policy.config(), r->weights_->table(), use.seed, r->actor_->masters()));
  r->actor_->publish();
  return r;
}

Result<std::vector<int32_t>> prompt_tokens(const Tokenizer& tokenizer, const std::string& text) {
  Result<std::vector<int32_t>> ids = tokenizer.encode(text);
  if (!ids) return ids.status();
  std::vector<int32_t> tokens = {tokenizer.bos_id()};
  tokens.insert(tokens.end(), ids.value().begin(), ids.value().end());
  return tokens;
}

std::string response_text(const Tokenizer& tokenizer, std::span<const int32_t> response) {
  if (!response.empty() && response.back() == tokenizer.eos_id()) response = response.first(response.size() - 1);
  return tokenizer.decode(response);
}

}  // namespace lockstep
