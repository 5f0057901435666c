#include "rl/policy.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "io/file.h"
#include "model/checkpoint_io.h"
#include "model/state.h"
#include "rl/checkpoint.h"
#include "train/optimizer.h"

namespace lockstep {

namespace fs = std::filesystem;

namespace {

// Address space only; pages are committed by first touch.
constexpr size_t kArenaReserve = size_t{256} << 30;
constexpr const char* kConfigFile = "config.json";
constexpr const char* kRandom = "random";

bool is_directory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
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
  return load_checkpoint(options.init, config, table, masters);
}

Status check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config) {
  if (tokenizer.vocab_size() > config.vocab_size) {
    return errorf("the tokenizer has {} ids, the model's vocab_size is {}; name the right tokenizer in model.tokenizer (without it "
                  "the one beside the weights or config.json is taken, else bytes)",
                  tokenizer.vocab_size(), config.vocab_size);
  }
  if (tokenizer.bos_id() != config.bos_id || tokenizer.eos_id() != config.eos_id) {
    return errorf("the tokenizer begins with id {} and ends with id {}, config.json says bos_token_id {} and eos_token_id {}; a "
                  "tokenizer.json has them from the tokenizer_config.json beside it",
                  tokenizer.bos_id(), tokenizer.eos_id(), config.bos_id, config.eos_id);
  }
  return Status::ok();
}

// What the run cannot do without, against what the machine has: a model or settings far too large are an error here, not a process
// that the system kills later. Activations come on top.
Status check_memory(const ModelConfig& m, Numerics numerics, const PolicyUse& use) {
  double weights = 0, training = 0, state = 0;
  for (const TensorSpec& t : tensor_table(m)) {
    const auto elements = static_cast<double>(t.shape.elements());
    weights += elements * static_cast<double>(dtype_bytes(t.weight_dtype(numerics))) * (t.has_panels() ? 2 : 1);
    training += elements * sizeof(float) * (use.train && is_trained(t, use.optimizer) ? 4 : 1);  // master, gradient, two moments
  }
  if (use.sample) {
    const int64_t page_tokens = default_page_tokens(m);
    const StateSize size = StatePool::size(m, numerics, page_tokens);
    const int64_t pages = (use.engine.max_context + page_tokens - 1) / page_tokens;
    state = static_cast<double>(use.engine.max_running + 1) *
            (static_cast<double>(size.slot_bytes) + static_cast<double>(pages) * static_cast<double>(size.page_bytes));
  }
  const double physical = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  const double largest = std::max({weights, training, state});
  if (weights + training + state <= physical && largest <= static_cast<double>(kArenaReserve)) return Status::ok();
  constexpr double kGiB = 1 << 30;
  return errorf("at least {:.1f} GiB of memory are needed (weights {:.1f}, masters{} {:.1f}, state of {} running samples {:.1f}), this "
                "machine has {:.1f}; take a smaller model, or lower rollout.max_running",
                (weights + training + state) / kGiB, weights / kGiB, use.train ? ", gradients and moments" : "", training / kGiB,
                use.sample ? use.engine.max_running : 0, state / kGiB, physical / kGiB);
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
    if (is_directory(path) && has_tokenizer(path)) return load_tokenizer(path);
  }
  return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
}

namespace {

// Weights trained under one tokenizer say nothing under another, and the run would not notice.
Status check_trained_tokenizer(const PolicyOptions& options, const Tokenizer& tokenizer) {
  if (options.tokenizer.empty() || !is_directory(options.init) || !has_tokenizer(options.init)) return Status::ok();
  Result<std::unique_ptr<Tokenizer>> own = load_tokenizer(options.init);
  if (!own) return own.status();
  bool same = own.value()->vocab_size() == tokenizer.vocab_size();
  for (int32_t id = 0; same && id < tokenizer.vocab_size(); ++id) same = own.value()->token_bytes(id) == tokenizer.token_bytes(id);
  if (same) return Status::ok();
  return errorf("model.tokenizer is \"{}\", but {} was trained with another tokenizer, which lies beside it; leave model.tokenizer empty to use that one",
                options.tokenizer, options.init);
}

}  // namespace

Policy::Policy(int threads) : context_(threads) {}

Result<std::unique_ptr<Policy>> Policy::make(const PolicyOptions& options, const PolicyUse& use) {
  if (options.init.empty()) return errorf("model.init is empty; name a checkpoint, or write random");
  const int rank = use.ranks == nullptr ? 0 : use.ranks->rank(), ranks = use.ranks == nullptr ? 1 : use.ranks->size();
  if (is_directory(options.init)) LOCKSTEP_RETURN_IF_ERROR(check_checkpoint(options.init, rank, ranks));
  Result<ModelConfig> config = find_model_config(options);
  if (!config) return config.status();
  Result<std::unique_ptr<Tokenizer>> tokenizer = find_tokenizer(options);
  if (!tokenizer) return tokenizer.status();
  LOCKSTEP_RETURN_IF_ERROR(check_vocabulary(*tokenizer.value(), config.value()));
  LOCKSTEP_RETURN_IF_ERROR(check_trained_tokenizer(options, *tokenizer.value()));
  if (use.engine.max_context > config.value().max_positions) {
    return errorf("a prompt with its response may reach {} tokens, the model's max_position_embeddings is {}; lower "
                  "task.max_prompt_tokens, rollout.max_new_tokens or eval.max_new_tokens, or leave out long examples",
                  use.engine.max_context, config.value().max_positions);
  }

  LOCKSTEP_RETURN_IF_ERROR(check_memory(config.value(), options.numerics, use));

  std::unique_ptr<Policy> p(new Policy(num_threads(use.threads)));
  p->ranks_ = use.ranks;
  p->config_ = config.take();
  p->tokenizer_ = tokenizer.take();
  p->weights_arena_ = std::make_unique<Arena>("weights", kArenaReserve);
  p->rope_arena_ = std::make_unique<Arena>("rope tables", kArenaReserve);
  p->weights_ = std::make_unique<Weights>(p->config_, options.numerics, *p->weights_arena_);
  p->model_.weights = p->weights_.get();
  p->model_.rope = make_rope_tables(p->config_, use.engine.max_context, *p->rope_arena_);
  if (use.train) {
    p->actor_ = std::make_unique<Actor>(p->context(), *p->weights_, p->model_.rope, use.optimizer, use.actor, use.ranks);
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
  if (ranks_ != nullptr && ranks_->rank() > 0) return Status::ok();  // the first one has all of it
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
  r->actor_ = std::make_unique<Actor>(policy.context(), *r->weights_, policy.model().rope, use.optimizer, use.actor, use.ranks);
  LOCKSTEP_RETURN_IF_ERROR(fill_masters(options, policy.config(), r->weights_->table(), use.seed, r->actor_->masters()));
  r->actor_->publish();
  return r;
}

Result<std::vector<int32_t>> prompt_tokens(const Tokenizer& tokenizer, const std::string& text) {
  Result<std::vector<int32_t>> ids = tokenizer.encode(text);
  if (!ids) return ids.status();
  std::vector<int32_t> tokens;
  if (ids.value().empty() || ids.value().front() != tokenizer.bos_id()) tokens.push_back(tokenizer.bos_id());  // chat prompts hold it
  tokens.insert(tokens.end(), ids.value().begin(), ids.value().end());
  return tokens;
}

std::string response_text(const Tokenizer& tokenizer, std::span<const int32_t> response) {
  if (!response.empty() && response.back() == tokenizer.eos_id()) response = response.first(response.size() - 1);
  return tokenizer.decode(response);
}

}  // namespace lockstep
