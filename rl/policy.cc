#include "rl/policy.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <thread>

#include "io/file.h"
#include "io/run_dir.h"
#include "model/checkpoint_io.h"
#include "model/state.h"
#include "ops/checksum/checksum.h"
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
Result<ReadBox> weight_source(const PolicyOptions& options, const ModelConfig& config, uint64_t seed) {
  if (options.init == kRandom) return random_boxes(config, seed);
  Result<ReadBox> source = checkpoint_source(options.init, config);
  if (!source && !is_directory(options.init)) return errorf("model.init: {}", source.message());  // commands that are given a directory have looked at it
  return source;
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

// Whether updates of a sampler with weights of its own pass through the host's memory although the weights are a GPU's: deltas, and what goes to other ranks
// by way of the host anyway. The same on all ranks.
bool updates_by_host(const PolicyUse& use) { return use.sync.delta || (use.ranks != nullptr && use.ranks->all->size() > 1 && !use.ranks->all->between_gpus()); }

// What the run cannot do without, against what the machine has: a model or settings far too large are an error here, not a process
// that the system kills later. Activations come on top.
// `use` is that of this rank.
Status check_memory(const ModelConfig& m, Numerics numerics, const PolicyUse& use, const Shard& held, const Shard* sampler, Numerics sampler_numerics, Device device) {
  const double owners = use.ranks == nullptr ? 1 : use.ranks->layouts.train.dp;
  double weights = 0, training = 0, state = 0;
  const auto weight_bytes = [&](const TensorSpec& t, Numerics n) {
    return static_cast<double>(t.stored_shape(n).elements()) * static_cast<double>(dtype_bytes(t.weight_dtype(n))) * (t.has_panels() && device == Device::cpu ? 2 : 1);
  };
  const double landing = device == Device::gpu && !updates_by_host(use) ? 1 : 0;  // where an update lands (sync/transfer.h)
  if (sampler != nullptr)
    for (const TensorSpec& t : tensor_table(m, *sampler)) weights += (1 + landing) * weight_bytes(t, sampler_numerics);
  for (const TensorSpec& t : tensor_table(m, held)) {
    const auto elements = static_cast<double>(t.shape.elements());
    weights += weight_bytes(t, numerics);
    // Gradients of everything; master and two moments of what this rank owns.
    training += elements * sizeof(float) * (use.train && is_trained(t, use.optimizer) ? 1 + 3.0 / owners : 1);
  }
  if (use.sample) {
    const int64_t page_tokens = default_page_tokens(m);
    const StateSize size = StatePool::size(m, numerics, page_tokens);
    const int64_t pages = (use.engine.max_context + page_tokens - 1) / page_tokens;
    state = static_cast<double>(use.engine.max_running + 1) *
                (static_cast<double>(size.slot_bytes) + static_cast<double>(pages) * static_cast<double>(size.page_bytes)) +
            static_cast<double>(use.engine.cache_slots) * static_cast<double>(size.slot_bytes);
  }
  const double physical = memory_bytes(device), largest = std::max({weights, training, state});
  if (weights + training + state <= physical && largest <= static_cast<double>(kArenaReserve)) return Status::ok();
  constexpr double kGiB = 1 << 30;
  return errorf("at least {:.1f} GiB of memory are needed (weights {:.1f}, masters{} {:.1f}, state of {} running samples {:.1f}), this "
                "{} has {:.1f}; take a smaller model, or lower rollout.max_running",
                (weights + training + state) / kGiB, weights / kGiB, use.train ? ", gradients and moments" : "", training / kGiB,
                use.sample ? use.engine.max_running : 0, state / kGiB, device == Device::gpu ? "GPU" : "machine", physical / kGiB);
}

Groups* trainers(const PolicyUse& use) { return use.ranks == nullptr ? nullptr : &*use.ranks->train; }

std::string mebibytes(size_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

}  // namespace

Result<ModelConfig> find_model_config(const PolicyOptions& options) {
  if (options.shape) return *options.shape;
  if (!options.config.empty()) {
    return load_model_config(is_directory(options.config) ? options.config + "/" + kConfigFile : options.config);
  }
  if (is_directory(options.init)) return load_model_config(options.init + "/" + kConfigFile);
  if (options.init != kRandom)
    return errorf("model.init is {}, which is no directory; if it was a checkpoint, its run has deleted it since, as it keeps run.keep_checkpoints", options.init);
  return errorf("model.config is empty and model.init is {}; name a config.json, or a checkpoint directory that holds one",
                options.init);
}

Result<std::unique_ptr<Tokenizer>> find_tokenizer(const PolicyOptions& options) {
  if (options.tokenizer == "bytes") return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
  if (!options.tokenizer.empty()) {
    Result<std::unique_ptr<Tokenizer>> named = load_tokenizer(options.tokenizer);
    if (!named) return errorf("model.tokenizer: {}", named.message());
    return named;
  }
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

ActorOptions actor_options(const PolicyOptions& options, const PolicyUse& use) {
  ActorOptions a = use.actor;
  a.cache = {options.kv_fp8, options.index_fp4};
  return a;
}

}  // namespace

Policy::Policy(Device device, int threads) : context_(device, threads) {}

Result<std::unique_ptr<Policy>> Policy::make(const PolicyOptions& options, const PolicyUse& use) {
  if (options.init.empty()) return errorf("model.init is empty; name a checkpoint, or write random");
  RunGroups* const ranks = use.ranks;
  if (options.device == Device::gpu) LOCKSTEP_RETURN_IF_ERROR(device_available());
  if (is_directory(options.init)) {
    LOCKSTEP_RETURN_IF_ERROR(ranks == nullptr ? check_checkpoint(options.init) : check_checkpoint(options.init, ranks->rank(), ranks->all->size()));
  }
  Result<ModelConfig> config = find_model_config(options);
  if (!config) return config.status();
  std::unique_ptr<Tokenizer> tokenizer;
  if (use.text) {
    Result<std::unique_ptr<Tokenizer>> found = find_tokenizer(options);
    if (!found) return found.status();
    tokenizer = found.take();
    LOCKSTEP_RETURN_IF_ERROR(check_vocabulary(*tokenizer, config.value()));
    LOCKSTEP_RETURN_IF_ERROR(check_trained_tokenizer(options, *tokenizer));
  }
  if (use.engine.max_context > config.value().max_positions) {
    return errorf("a prompt with its response may reach {} tokens, the model's max_position_embeddings is {}; lower "
                  "task.max_prompt_tokens, rollout.max_new_tokens or eval.max_new_tokens, or leave out long examples",
                  use.engine.max_context, config.value().max_positions);
  }

  if (options.index_fp4 && !std::has_single_bit(static_cast<uint64_t>(config.value().index_head_dim))) {
    return errorf("model.index_fp4 rotates index rows by a Hadamard matrix, which exists for powers of two; the model's index_head_dim is {}; set "
                  "model.index_fp4 to false",
                  config.value().index_head_dim);
  }
  // What this rank holds: in training, and where the sampler's layout is another one, for sampling.
  const Numerics numerics = use.train ? options.numerics : options.sampler_numerics();
  const Shard whole = whole_shard(config.value());
  const Placement trainer = ranks != nullptr ? ranks->trainer : Placement{.shards = {whole}, .numerics = options.numerics};
  const Placement sampler = ranks != nullptr ? ranks->sampler : Placement{.shards = {whole}, .numerics = options.sampler_numerics()};
  const bool apart = use.train && use.sample && (use.apart || trainer != sampler);
  PolicyUse own = use;
  own.train = use.train && (ranks == nullptr || ranks->train);
  own.sample = use.sample && (ranks == nullptr || ranks->rollout);
  const Shard& sampled = ranks != nullptr ? ranks->sampler_shard() : whole;
  const Shard held = ranks == nullptr ? whole_shard(config.value()) : use.train ? ranks->trainer_shard() : ranks->sampler_shard();
  if (apart && !can_follow(trainer.numerics, sampler.numerics)) {
    return errorf("rollout.numerics is {}, which cannot be made from weights trained in model.numerics {}; a trainer in bf16 goes with a sampler in bf16, fp8 or fp4",
                  numerics_name(sampler.numerics), numerics_name(trainer.numerics));
  }
  LOCKSTEP_RETURN_IF_ERROR(check_memory(config.value(), numerics, own, held, apart ? &sampled : nullptr, sampler.numerics, options.device));

  std::unique_ptr<Policy> p(new Policy(options.device, num_threads(use.threads)));
  p->config_ = config.take();
  p->tokenizer_ = std::move(tokenizer);
  p->weights_arena_ = std::make_unique<Arena>("weights", kArenaReserve, options.device);
  p->rope_arena_ = std::make_unique<Arena>("rope tables", kArenaReserve, options.device);
  p->weights_ = std::make_unique<Weights>(p->config_, numerics, held, *p->weights_arena_);
  p->model_.weights = p->weights_.get();
  if (apart) {
    p->sampler_weights_ = std::make_unique<Weights>(p->config_, sampler.numerics, sampled, *p->weights_arena_);
    p->model_.weights = p->sampler_weights_.get();
    Weights *from = p->weights_.get(), *to = p->sampler_weights_.get();
    Arena* scratch = p->weights_arena_.get();
    if (options.device == Device::gpu && updates_by_host(use)) {
      p->mirror_arena_ = std::make_unique<Arena>("weights on the host", kArenaReserve);
      p->trainer_mirror_ = std::make_unique<Weights>(p->config_, numerics, held, *p->mirror_arena_);
      p->sampler_mirror_ = std::make_unique<Weights>(p->config_, sampler.numerics, sampled, *p->mirror_arena_);
      from = p->trainer_mirror_.get();
      to = p->sampler_mirror_.get();
      scratch = p->mirror_arena_.get();
    }
    p->transfer_ = std::make_unique<Transfer>(ranks != nullptr ? ranks->all : nullptr, *from, *to, trainer, sampler,
                                              [&](const TensorSpec& t) { return is_trained(t, use.optimizer); }, *scratch, use.sync);
  }
  if (ranks != nullptr && own.sample) {
    if (ranks->rollout->tp.size() > 1) p->model_.tp = &ranks->rollout->tp;
    if (ranks->rollout->ep.size() > 1) p->model_.ep = &ranks->rollout->ep;
  }
  p->model_.rope = make_rope_tables(p->context(), p->config_, use.engine.max_context, *p->rope_arena_);
  p->model_.cache = {options.kv_fp8, options.index_fp4};
  p->ranks_ = ranks;
  const Result<ReadBox> source = weight_source(options, p->config_, use.seed);
  if (!source) return source.status();
  if (own.train) {
    p->actor_ = std::make_unique<Actor>(p->context(), *p->weights_, p->model_.rope, use.optimizer, actor_options(options, use), trainers(use));
    LOCKSTEP_RETURN_IF_ERROR(p->actor_->load_masters(source.value()));
  } else if (!use.train) {
    LOCKSTEP_RETURN_IF_ERROR(p->weights_->load(p->context(), source.value(), 0));
  }
  if (own.sample) {
    p->state_arena_ = std::make_unique<Arena>("sequence state", kArenaReserve, options.device);
    p->engine_ = std::make_unique<Engine>(p->context(), p->model_, use.engine, *p->state_arena_);
  }
  return p;
}

// Ranks that do not train hear from the first one which version the trainers have.
void Policy::follow_trainers() {
  if (ranks_ == nullptr || !ranks_->layouts.apart) return;
  int64_t version = weights_->version();
  ranks_->all->broadcast(std::span(&version, 1), 0, "weights version");
  if (!actor_) weights_->commit(context(), version);
}

Result<std::optional<SyncReceipt>> Policy::publish() {
  if (!transfer_) return std::optional<SyncReceipt>();
  transfer_->forget();
  follow_trainers();
  return transfer();
}

Result<std::optional<SyncReceipt>> Policy::sync() {
  if (transfer_) follow_trainers();
  if (!transfer_ || weights_->version() == sampler_weights_->version()) return std::optional<SyncReceipt>();
  return transfer();
}

Result<std::optional<SyncReceipt>> Policy::transfer() {
  const int64_t running = engine_ ? engine_->load().running : 0;
  const Status quiet = running == 0 ? Status::ok() : errorf("{} samples hold state of version {}", running, sampler_weights_->version());
  Context& c = context();
  Context host = c.on_host();
  if (trainer_mirror_) trainer_mirror_->copy_across(c, *weights_);
  const auto master = [&](int id) {
    if (!trainer_mirror_) return actor_->master(id);
    const ArenaScope scope(*c.workspace);
    return on_host(c, actor_->master(id));
  };
  Result<SyncReceipt> receipt = transfer_->update(trainer_mirror_ ? host : c, master, quiet);
  if (!receipt) return receipt.status();
  if (sampler_mirror_) sampler_weights_->copy_across(c, *sampler_mirror_);
  return std::optional(receipt.take());
}

Policy::WeightsSum Policy::weights_sum() {
  if (ranks_ != nullptr && !ranks_->train) return {};
  const Coordinates at = ranks_ == nullptr ? Coordinates() : ranks_->train->at();
  const int replica = ranks_ == nullptr ? 0 : ranks_->train->grid.ep_block(ranks_->train->rank);
  const Numerics numerics = weights_->numerics();
  std::vector<ChecksumItem> items;
  std::vector<bool> counts;
  for (const TensorSpec& t : weights_->table()) {
    if (!t.held()) continue;
    // One rank of those that hold a number counts it.
    const bool counted = t.cut == Cut::experts ? replica == 0 && at.tp == 0 : at.dp == 0 && (t.cut != Cut::none || at.tp == 0);
    const auto add = [&](ConstTensorView v, uint64_t key, int64_t first_row, int64_t first_column) {
      items.push_back({.rows = v, .key = key, .first_row = first_row, .first_byte = first_column * static_cast<int64_t>(dtype_bytes(v.dtype))});
      counts.push_back(counted);
    };
    const WeightView& w = weights_->view(t.id);
    const ConstTensorView rows = matrix_view(w.rows);
    const auto key = static_cast<uint64_t>(t.id) << 32;
    // Two numbers of fp4 are one element.
    add(rows, key, t.box.rows.begin, t.box.columns.begin * rows.dim(1) / t.box.columns.size());
    if (!w.quantized()) continue;
    const BlockGrid row_grid = t.row_grid(numerics), col_grid = t.col_grid(numerics);
    add(matrix_view(w.scales), ~key, row_grid.blocks_in(t.box.rows.begin), col_grid.blocks_in(t.box.columns.begin));
  }
  Context& c = context();
  const ArenaScope scope(*c.workspace), host_scope(*c.host);
  const TensorView sums = c.workspace->tensor(DType::i64, {static_cast<int64_t>(items.size())}, "weights sums");
  checksum(c, sums, items);
  const auto* of_item = on_host(c, sums).ptr<int64_t>();
  WeightsSum sum;
  for (size_t i = 0; i < items.size(); ++i) {
    sum.held += static_cast<uint64_t>(of_item[i]);
    if (counts[i]) sum.share += static_cast<uint64_t>(of_item[i]);
  }
  return sum;
}

std::string Policy::memory_report() {
  std::string text = fmt::format("weights {}", mebibytes(weights_arena_->high_bytes()));
  if (actor_) text += fmt::format(", training {}", mebibytes(actor_->high_bytes()));
  if (engine_) text += fmt::format(", sequence state {}", mebibytes(state_arena_->high_bytes()));
  return text + fmt::format(", scratch {}", mebibytes(context_.workspace().high_bytes()));
}

Status Policy::save(const std::string& directory) const {
  if (!actor_) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(actor_->save(directory));
  if (ranks_ != nullptr && ranks_->rank() > 0) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kConfigFile, model_config_json(config_)));
  return tokenizer_->save(directory);
}

Status Policy::load(const std::string& directory) {
  Result<ModelConfig> config = load_model_config(directory + "/" + kConfigFile);
  if (!config) return config.status();
  if (config.value() != config_)
    return errorf("{}/{}: the checkpoint's model is not the one that the run describes", directory, kConfigFile);
  return actor_ ? actor_->load(directory) : Status::ok();
}

Status Policy::load_beside(const std::string& checkpoint) {
  CHECK(actor_ == nullptr && engine_ != nullptr, "weights are replaced under a policy that trains");
  const Result<std::string> found = find_checkpoint(checkpoint);
  if (!found) return found.status();
  const std::string& directory = found.value();
  if (!is_directory(directory)) return errorf("{}: a checkpoint directory is wanted", directory);
  LOCKSTEP_RETURN_IF_ERROR(check_checkpoint(directory));
  const Result<ModelConfig> config = load_model_config(directory + "/" + kConfigFile);
  if (!config) return config.status();
  if (config.value() != config_) return errorf("{}/{}: the checkpoint's model is not the one that is served", directory, kConfigFile);
  LOCKSTEP_RETURN_IF_ERROR(check_trained_tokenizer({.config = "", .init = directory, .tokenizer = "the one that is served"}, *tokenizer_));
  const Result<ReadBox> source = checkpoint_source(directory, config_);
  if (!source) return source.status();
  if (spare_ == nullptr) {
    if (spare_arena_ == nullptr) spare_arena_ = std::make_unique<Arena>("weights beside", kArenaReserve, context_.get().device);
    spare_context_ = std::make_unique<DeviceContext>(context_.get().device);
    spare_ = std::make_unique<Weights>(config_, weights_->numerics(), weights_->shard(), *spare_arena_);
  }
  return spare_->load(*spare_context_, source.value(), weights_->version() + 1);
}

void Policy::adopt() {
  CHECK(spare_ != nullptr && spare_->version() == weights_->version() + 1, "nothing was loaded beside version {}", weights_->version());
  CHECK(engine_->load().running == 0, "{} samples hold state of version {}", engine_->load().running, weights_->version());
  std::swap(weights_, spare_);
  model_.weights = weights_.get();
}

Result<std::unique_ptr<ReferencePolicy>> ReferencePolicy::make(Policy& policy, const PolicyOptions& options,
                                                               const PolicyUse& use) {
  std::unique_ptr<ReferencePolicy> r(new ReferencePolicy);
  r->arena_ = std::make_unique<Arena>("reference weights", kArenaReserve, options.device);
  const Shard held = use.ranks == nullptr ? whole_shard(policy.config()) : use.ranks->trainer_shard();
  r->weights_ = std::make_unique<Weights>(policy.config(), options.numerics, held, *r->arena_);
  ActorOptions actor = actor_options(options, use);
  actor.replay = ReplayKind::none;  // of its own mind
  r->actor_ = std::make_unique<Actor>(policy.context(), *r->weights_, policy.model().rope, use.optimizer, actor, trainers(use));
  const Result<ReadBox> source = weight_source(options, policy.config(), use.seed);
  if (!source) return source.status();
  LOCKSTEP_RETURN_IF_ERROR(r->actor_->load_masters(source.value()));
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
