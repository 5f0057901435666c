#include "rl/gates_rig.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/device.h"
#include "core/formats.h"
#include "core/rng.h"
#include "model/state.h"
#include "rl/sampling.h"

namespace lockstep {

namespace {

constexpr int64_t kLengths[] = {5000, 1000, 500, 129, 128, 127, 1};  // the longest are begun first
constexpr float kTemperatures[] = {1.0f, 0.8f};
constexpr int64_t kSamplesPerPrompt = 4;
constexpr int64_t kMicrobatchTokens = 8192;
constexpr size_t kReserve = size_t{256} << 30;  // address space

// Random weights away from the values that models begin with (gains of 1, biases and sinks of 0), so that no part is idle. Keyed by place, as random_boxes.
ReadBox uneven_boxes(const ModelConfig& config, uint64_t seed) {
  return [drawn = random_boxes(config, seed), seed](const TensorSpec& spec, const Box& box, TensorView out) {
    LOCKSTEP_RETURN_IF_ERROR(drawn(spec, box, out));
    if (spec.whole.rank > 1 && spec.role != TensorRole::ape) return Status::ok();
    for (int64_t r = 0; r < out.rows(); ++r) {
      Philox random(seed, RngPurpose::test, static_cast<uint64_t>(spec.id), static_cast<uint32_t>(box.rows.begin + r));
      random.skip(2 * static_cast<uint64_t>(box.columns.begin));
      for (int64_t k = 0; k < out.dim(1); ++k) out.row<float>(r)[k] += 0.3f * random.normal();
    }
    return Status::ok();
  };
}

// Every token passes it; in the middle of the stack.
std::string damaged_tensor(const ModelConfig& m) { return fmt::format("layers.{}.attn.wkv.weight", m.num_layers() / 2); }

float stored_number(ConstTensorView v, int64_t row, int64_t column) {
  switch (v.dtype) {
    case DType::f32: return v.row<float>(row)[column];
    case DType::bf16: return to_f32(v.row<bf16>(row)[column]);
    default: return to_f32(v.row<e4m3>(row)[column]);
  }
}

// The lowest bit of the largest number of the tensor's first row, where this rank holds it.
void flip_weight_bit(Context& c, Weights& weights) {
  for (const TensorSpec& spec : weights.table()) {
    if (!spec.held() || spec.name != damaged_tensor(weights.config())) continue;
    const ArenaScope scope(*c.host);
    const TensorView rows = host_copy(c, weights.rows(spec.id));
    int64_t largest = 0;
    for (int64_t k = 1; k < rows.dim(1); ++k)
      if (std::abs(stored_number(rows, 0, k)) > std::abs(stored_number(rows, 0, largest))) largest = k;
    static_cast<unsigned char*>(rows.data)[static_cast<size_t>(largest) * dtype_bytes(rows.dtype)] ^= 1;  // little-endian: of the mantissa
    upload(c, weights.rows(spec.id), rows);
    weights.commit(c, weights.version());
  }
}

}  // namespace

std::string Workload::str() const {
  std::string text = "lengths";
  for (const int64_t l : lengths) text += fmt::format(" {}", l);
  text += ", temperatures";
  for (const float t : kTemperatures) text += fmt::format(" {:.1f}", t);
  return text;
}

Workload make_workload(const ModelConfig& m, int64_t tokens, uint64_t seed) {
  const int64_t page = default_page_tokens(m);
  const int64_t prompt_lengths[] = {1, 2 * page + 44, 3, 129, 17, 128, 127};
  Workload w;
  for (const int64_t length : kLengths)
    if (length <= tokens / 4 && length < m.max_positions) w.lengths.push_back(length);
  if (w.lengths.size() == 1) w.lengths.insert(w.lengths.begin(), std::max<int64_t>(2, std::min(tokens / 4, m.max_positions / 2)));
  const auto pairs = static_cast<int64_t>((w.lengths.size() - 1) * std::size(kTemperatures));
  const int64_t share = (tokens + pairs - 1) / pairs;

  const auto draw = [&](Philox& random) { return static_cast<int32_t>(random.below(static_cast<uint32_t>(m.vocab_size))); };
  Philox beginning(seed, RngPurpose::test, 0);
  std::vector<int32_t> common(static_cast<size_t>(2 * page));
  for (int32_t& t : common) t = draw(beginning);
  int64_t samples = 0;
  for (const int64_t length : w.lengths) {
    if (length > 1) samples = (share + length - 1) / length;
    for (const float temperature : kTemperatures) {
      for (int64_t left = samples; left > 0; left -= kSamplesPerPrompt) {
        Request r;
        r.prompt_id = w.requests.size();
        const int64_t prompt = std::min(prompt_lengths[r.prompt_id % std::size(prompt_lengths)], m.max_positions - length);
        Philox own(seed, RngPurpose::test, 1 + r.prompt_id);
        for (size_t i = 0; i < static_cast<size_t>(prompt); ++i) r.prompt.push_back(i < common.size() ? common[i] : draw(own));
        r.num_samples = static_cast<int32_t>(std::min(left, kSamplesPerPrompt));
        r.seed = seed;
        r.sampling.temperature = temperature;
        r.sampling.max_new_tokens = length;
        w.context = std::max(w.context, prompt + length);
        w.requests.push_back(std::move(r));
      }
    }
  }
  return w;
}

std::vector<TrainSample> train_samples(const Workload& w, std::span<const Completion> words) {
  std::vector<TrainSample> samples;
  for (const Completion& c : words) {
    const Request& r = w.requests[c.prompt_id];
    TrainSample s;
    s.index = static_cast<int64_t>(samples.size());
    s.tokens = r.prompt;
    s.tokens.insert(s.tokens.end(), c.tokens.begin(), c.tokens.end());
    s.prompt_length = static_cast<int64_t>(r.prompt.size());
    s.mask.assign(c.tokens.size(), 1);
    s.advantage.assign(c.tokens.size(), s.index % 2 == 0 ? 1.0f : -1.0f);
    s.old_logprob = s.rollout_logprob = c.logprobs;
    s.temperature = r.sampling.temperature;
    samples.push_back(std::move(s));
  }
  return samples;
}

Result<std::unique_ptr<Rig>> Rig::make(const GatesOptions& o, Numerics numerics, const ParallelOptions& parallel, float lr, int64_t context,
                                       RankWorld* world) {
  std::unique_ptr<Rig> rig(new Rig(world, o, context));
  rig->numerics_ = numerics;
  PolicyOptions model = o.model;
  model.numerics = numerics;
  model.sampler = SamplerNumerics::same;
  PolicyUse use{.seed = o.seed, .threads = rig->peers_.threads(o.threads), .sample = true, .train = true, .text = false};
  use.apart = model.device == Device::cpu;
  use.engine = {.max_running = 64, .max_batch_tokens = 512, .max_context = context};
  use.optimizer = o.optimizer;
  use.optimizer.lr = lr;
  use.actor.max_tokens_per_microbatch = kMicrobatchTokens;
  if (!rig->peers_.alone()) {
    const Result<ModelConfig> config = find_model_config(model);
    LOCKSTEP_RETURN_IF_ERROR(rig->peers_.agree(config.status(), "config"));
    const Result<Layouts> layouts = resolve_layouts(parallel, config.value(), context, rig->peers_.size());
    LOCKSTEP_RETURN_IF_ERROR(rig->peers_.agree(layouts.status(), "layouts"));
    if (model.device == Device::gpu) LOCKSTEP_RETURN_IF_ERROR(world->use_devices(parallel.transport));
    rig->groups_.emplace(make_run_groups(*world, layouts.value(), config.value(), numerics, numerics));
    rig->peers_ = Peers(world, &*rig->groups_);
    use.ranks = &*rig->groups_;
  }
  const auto make = [&] {
    Result<std::unique_ptr<Policy>> policy = Policy::make(model, use);
    if (!policy) return policy.status();
    rig->policy_ = policy.take();
    return model.init == "random" ? rig->actor().load_masters(uneven_boxes(rig->policy_->config(), o.seed)) : Status::ok();
  };
  LOCKSTEP_RETURN_IF_ERROR(rig->peers_.agree(make(), "policy"));
  if (const Result<std::optional<SyncReceipt>> published = rig->policy_->publish(); !published) return published.status();
  return rig;
}

Result<std::vector<Completion>> Rig::run(Engine& engine, std::span<const Request> requests) {
  Result<std::vector<Completion>> words = peers_.run(&engine, policy_->context(), requests, Hooks(), "gates");
  if (!words) return words;
  std::sort(words.value().begin(), words.value().end(), by_prompt_and_sample);
  return words;
}

Result<std::vector<Completion>> Rig::sample_with(EngineOptions options, std::span<const Request> requests, int times, uint64_t* cached) {
  options.max_context = context_;
  Arena arena("another engine's state", kReserve, options_.model.device);
  Engine engine(policy_->context(), policy_->model(), options, arena);
  Result<std::vector<Completion>> words = run(engine, requests);
  for (int i = 1; i < times && words; ++i) words = run(engine, requests);
  if (cached != nullptr) *cached = peers_.sum(static_cast<uint64_t>(engine.stats().cached_prompt_tokens), "cached tokens");
  return words;
}

Status Rig::update(std::span<const TrainSample> samples, const std::function<void(const Comparison&)>& judge) {
  std::vector<TokenLogprobs> seen;
  const Result<StepMetrics> step = actor().step(samples, LossConfig(), &seen, [&] {
    judge(compare_logprobs(samples, seen));
    return Status::ok();
  });
  if (!step) return step.status();
  if (step.value().skipped) return Status::error("an update of the gates was skipped: its gradients were not finite");
  return policy_->sync().status();
}

Result<std::vector<TokenLogprobs>> Rig::logprobs_of(const std::function<void(Weights&)>& damage, std::span<const TrainSample> samples,
                                                    int64_t microbatch_tokens) {
  const ModelConfig& m = policy_->config();
  Arena arena("another trainer's weights", kReserve, options_.model.device);
  Weights weights(m, numerics_, groups_ ? groups_->trainer_shard() : whole_shard(m), arena);
  const auto copy_master = [&](const TensorSpec& spec, const Box&, TensorView out) {
    download(policy_->context(), out, matrix_view(actor().master(spec.id)));
    return Status::ok();
  };
  LOCKSTEP_RETURN_IF_ERROR(weights.load(policy_->context(), copy_master, policy_->weights().version()));
  if (damage) damage(weights);
  const ActorOptions options{.max_tokens_per_microbatch = microbatch_tokens, .cache = policy_->model().cache};
  Actor other(policy_->context(), weights, policy_->model().rope, options_.optimizer, options, groups_ ? &*groups_->train : nullptr);
  return other.logprobs(samples);
}

Result<std::vector<TokenLogprobs>> Rig::other_logprobs(std::span<const TrainSample> samples, int64_t microbatch_tokens) {
  return logprobs_of({}, samples, microbatch_tokens);
}

Result<std::vector<TokenLogprobs>> Rig::damaged_logprobs(std::span<const TrainSample> samples) {
  return logprobs_of([this](Weights& weights) { flip_weight_bit(policy_->context(), weights); }, samples, kMicrobatchTokens);
}

std::string Rig::damaged_weight() const { return damaged_tensor(policy_->config()); }

std::optional<TokenLogprobs> Rig::routed_logprobs(const TrainSample& sample, bool flip) {
  Context& c = policy_->context();
  const ModelConfig& m = policy_->config();
  if (flip && m.experts_per_token == m.num_experts) return std::nullopt;
  Trace own = trace_sequence(c, policy_->model(), sample.tokens, 0, sample.temperature);
  const ArenaScope scope(*c.workspace);
  Choices choices;
  choices.experts.resize(static_cast<size_t>(m.num_layers()));
  for (Trace::Point& p : own.points) {
    if (p.name != "ffn.ids") continue;
    auto* const ids = reinterpret_cast<int32_t*>(p.rows.data());
    const int64_t K = m.experts_per_token, T = static_cast<int64_t>(p.rows.size() / p.row_bytes);
    if (flip && p.layer == m.num_layers() / 2) {
      // One token of the response, in its middle: its first expert is another one, the ids ascend again.
      int32_t* const row = ids + (sample.prompt_length - 1 + sample.response_length() / 2) * K;
      int32_t other = 0;
      while (std::find(row, row + K, other) != row + K) ++other;
      row[0] = other;
      std::sort(row, row + K);
    }
    choices.experts[static_cast<size_t>(p.layer)] = on_device(c, TensorView(ids, DType::i32, {T, K}), *c.workspace);
  }
  Model repeating = policy_->model();
  repeating.replay = &choices;
  const Trace routed = trace_sequence(c, repeating, sample.tokens, 0, sample.temperature);
  return TokenLogprobs{.logprob = {routed.logprobs.begin() + sample.prompt_length - 1, routed.logprobs.end()}, .entropy = {}};
}

}  // namespace lockstep
