#include "rl/model_bench.h"

#include <algorithm>
#include <bit>
#include <chrono>

#include "core/device.h"
#include "core/rng.h"
#include "model/stack.h"
#include "rl/memory.h"
#include "rollout/engine.h"
#include "train/actor.h"

namespace lockstep {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Times {
  double all = 0, prefill = 0, decode = 0, train = 0, host = 0;
  int64_t decode_steps = 0, graph_steps = 0;
};

EngineOptions engine_options(const ModelBenchOptions& o) {
  return {.max_running = o.batch, .max_batch_tokens = std::max<int64_t>(4096, o.batch), .max_context = o.prompt + o.new_tokens, .graphs = o.graphs};
}

// Tokens of a training step, in rows of row_tokens: a single one that is left has nothing to predict.
int64_t trained_tokens(const ModelBenchOptions& o) { return o.train_tokens - (o.train_tokens % o.row_tokens == 1 ? 1 : 0); }

// A policy on one device, as much of it as is asked for.
class Bench {
 public:
  Bench(const ModelConfig& config, const ModelBenchOptions& o, bool sample, bool train)
      : config_(config), o_(o), context_(o.device, o.threads, size_t{110} << 30), arena_("model", size_t{110} << 30, o.device),
        weights_(config, o.numerics, arena_) {
    Context& c = context_;
    const int64_t context_tokens = std::max(o.prompt + o.new_tokens, train ? o.row_tokens : 0);
    model_.weights = &weights_;
    model_.rope = make_rope_tables(c, config_, context_tokens, arena_);
    const ReadBox boxes = quick_boxes(c, config_);
    if (train) {
      OptimizerConfig optimizer;
      optimizer.lr = 1e-6f;
      actor_ = std::make_unique<Actor>(c, weights_, model_.rope, optimizer, ActorOptions{.max_tokens_per_microbatch = o.microbatch_tokens, .recompute = o.recompute});
      CHECK(actor_->load_masters(boxes).is_ok(), "random masters");
    } else {
      CHECK(weights_.load(c, boxes, 0).is_ok(), "random weights");
    }
    if (sample) engine_ = std::make_unique<Engine>(c, model_, engine_options(o), arena_);
  }

  Times generate(std::vector<Completion>* completions) {
    Times t;
    Philox rng(round_++, RngPurpose::test);
    prompts_.clear();
    for (int64_t i = 0; i < o_.batch; ++i) {
      Request r;
      r.tag = r.prompt_id = static_cast<uint64_t>(i);
      r.seed = 1;
      for (int64_t p = 0; p < o_.prompt; ++p) r.prompt.push_back(static_cast<int32_t>(2 + rng.below(static_cast<uint32_t>(config_.vocab_size - 2))));
      r.sampling.max_new_tokens = o_.new_tokens;
      prompts_.push_back(r.prompt);
      CHECK(engine_->submit(std::move(r)).is_ok(), "a prompt of the bench");
    }
    const double start = now();
    double last = start;
    EngineStats before = engine_->stats();
    while (engine_->step()) {
      const double at = now();
      const EngineStats& after = engine_->stats();
      if (after.prefill_tokens > before.prefill_tokens) {
        t.prefill += at - last;
      } else {
        t.decode += at - last;
        t.host += after.forward_seconds - before.forward_seconds;
        ++t.decode_steps;
        t.graph_steps += after.graph_steps - before.graph_steps;
      }
      before = after;
      last = at;
    }
    t.all = now() - start;
    std::vector<Completion> done = engine_->take_finished();
    if (completions != nullptr) *completions = std::move(done);
    return t;
  }

  Times train(std::span<const TrainSample> samples, LossKind kind, std::vector<TokenLogprobs>* seen) {
    const double start = now();
    const Result<StepMetrics> step = actor_->step(samples, {.kind = kind}, seen);
    CHECK(step.is_ok(), "a step of the bench");
    synchronize(context_.get());
    Times t;
    t.all = t.train = now() - start;
    return t;
  }

  std::vector<TrainSample> rows() {
    std::vector<TrainSample> samples;
    Philox rng(round_++, RngPurpose::test);
    for (int64_t left = trained_tokens(o_); left > 0; left -= o_.row_tokens) {
      TrainSample s;
      s.index = static_cast<int64_t>(samples.size());
      s.prompt_length = 1;
      for (int64_t t = 0; t < std::min(left, o_.row_tokens); ++t) s.tokens.push_back(static_cast<int32_t>(rng.below(static_cast<uint32_t>(config_.vocab_size))));
      s.mask.assign(s.tokens.size() - 1, 1);
      s.advantage.assign(s.tokens.size() - 1, 1.0f);
      samples.push_back(std::move(s));
    }
    return samples;
  }

  // A whole step: sample, then one optimizer step on what was said. `differing`: log-probs that trainer and sampler do not have in common, bit for bit.
  Times rl(int64_t* differing) {
    std::vector<Completion> completions;
    Times t = generate(&completions);
    std::vector<TrainSample> samples;
    Philox rng(round_++, RngPurpose::test);
    for (const Completion& done : completions) {
      TrainSample s;
      s.index = static_cast<int64_t>(done.prompt_id);
      s.tokens = prompts_[done.prompt_id];
      s.prompt_length = static_cast<int64_t>(s.tokens.size());
      s.tokens.insert(s.tokens.end(), done.tokens.begin(), done.tokens.end());
      s.mask.assign(done.tokens.size(), 1);
      s.advantage.assign(done.tokens.size(), rng.uniform() - 0.5f);
      s.old_logprob = s.rollout_logprob = done.logprobs;
      samples.push_back(std::move(s));
    }
    std::sort(samples.begin(), samples.end(), [](const TrainSample& a, const TrainSample& b) { return a.index < b.index; });
    std::vector<TokenLogprobs> seen;
    const Times step = train(samples, LossKind::policy, &seen);
    for (size_t i = 0; i < samples.size(); ++i)
      for (size_t k = 0; k < samples[i].mask.size(); ++k)
        *differing += std::bit_cast<uint32_t>(seen[i].logprob[k]) != std::bit_cast<uint32_t>(samples[i].rollout_logprob[k]);
    t.train = step.all;
    t.all += step.all;
    return t;
  }

  double memory_gb() const {
    return static_cast<double>(arena_.high_bytes() + context_.high_bytes() + (actor_ ? actor_->high_bytes() : 0)) * 1e-9;
  }

 private:
  const ModelConfig config_;
  const ModelBenchOptions o_;
  DeviceContext context_;
  Arena arena_;
  Weights weights_;
  Model model_;
  std::unique_ptr<Actor> actor_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::vector<int32_t>> prompts_;
  uint64_t round_ = 1;
};

}  // namespace

ReadBox quick_boxes(Context& c, const ModelConfig& config) {
  return [&c, config](const TensorSpec& spec, const Box& box, TensorView out) {
    const float range = spec.role == TensorRole::norm ? 0.0f : config.initializer_range * 1.7320508f;
    parallel_for(c, out.rows(), out.dim(1), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        uint64_t x = (static_cast<uint64_t>(spec.id) << 40 ^ static_cast<uint64_t>(box.rows.begin + r)) * 0x9e3779b97f4a7c15u | 1;
        for (int64_t i = 0; i < out.dim(1); ++i) {
          x ^= x << 13, x ^= x >> 7, x ^= x << 17;
          if (out.dtype == DType::i32) {
            out.row<int32_t>(r)[i] = static_cast<int32_t>((r * 7 + i) % config.num_experts);
          } else {
            out.row<float>(r)[i] = (spec.role == TensorRole::norm ? 1.0f : 0.0f) + (static_cast<float>(x >> 40) * 0x1p-23f - 1.0f) * range;
          }
        }
      }
    });
    return Status::ok();
  };
}

Status check_bench_memory(const ModelConfig& config, const ModelBenchOptions& o, bool train, const EngineOptions* engine) {
  const std::vector<TensorSpec> table = tensor_table(config);
  const WeightBytes weight = weights_arena_bytes(table, o.numerics);
  const double weights = static_cast<double>(weight.rows + (o.device == Device::cpu ? weight.panels : 0));
  double training = 0;  // gradient, master and two moments
  for (const TensorSpec& t : table) training += train && !t.is_buffer() ? 4.0 * sizeof(float) * static_cast<double>(t.shape.elements()) : 0.0;
  const double state = engine != nullptr ? static_cast<double>(engine_state_bytes(config, o.numerics, *engine)) : 0.0;
  const double there = memory_bytes(o.device);
  if (weights + training + state <= there) return Status::ok();
  constexpr double kGiB = 1 << 30;
  return errorf("bench: at least {:.1f} GiB of memory are needed (weights {:.1f}, masters, gradients and moments {:.1f}, state of {} samples {:.1f}), this {} has {:.1f}; "
                "take a smaller --config or fewer samples of fewer tokens",
                (weights + training + state) / kGiB, weights / kGiB, training / kGiB, engine != nullptr ? engine->max_running : 0, state / kGiB,
                o.device == Device::gpu ? "GPU" : "machine", there / kGiB);
}

Result<ModelBenchResult> bench_model(const ModelConfig& config, const std::string& what, const ModelBenchOptions& o) {
  if (o.device == Device::gpu) LOCKSTEP_RETURN_IF_ERROR(device_available());
  if (what != "generate" && what != "train" && what != "rl") return errorf("bench: {} is not measured; there are generate, train and rl", what);
  const int64_t longest = what == "train" ? o.row_tokens : o.prompt + o.new_tokens;
  if (longest > config.max_positions)
    return errorf("bench: sequences of {} tokens for a model with max_position_embeddings {}; lower --prompt, --new or --tokens", longest, config.max_positions);
  if (what == "train" && std::min(o.train_tokens, o.row_tokens) < 2)
    return errorf("bench: sequences of training hold a prompt and a response, --tokens {} and --row {} leave 1 token; raise them to 2 or more", o.train_tokens, o.row_tokens);
  const EngineOptions sampler = engine_options(o);
  LOCKSTEP_RETURN_IF_ERROR(check_bench_memory(config, o, what != "generate", what != "train" ? &sampler : nullptr));
  Bench bench(config, o, what != "train", what != "generate");
  ModelBenchResult result{.what = what, .tokens = what == "train" ? trained_tokens(o) : o.batch * o.new_tokens};
  std::vector<Times> runs;
  if (what == "rl") result.differing = 0;
  for (int i = 0; i <= o.repeat; ++i) {
    Times t;
    if (what == "generate") t = bench.generate(nullptr);
    if (what == "train") t = bench.train(bench.rows(), LossKind::sft, nullptr);
    if (what == "rl") t = bench.rl(&result.differing);
    if (i > 0) runs.push_back(t);  // the first warms up
  }
  std::sort(runs.begin(), runs.end(), [](const Times& a, const Times& b) { return a.all < b.all; });
  const Times& median = runs[runs.size() / 2];
  result.seconds = median.all;
  result.seconds_min = runs.front().all;
  result.seconds_max = runs.back().all;
  result.prefill_s = median.prefill;
  result.decode_s = median.decode;
  result.train_s = median.train;
  result.host_s = median.host;
  result.decode_steps = median.decode_steps;
  result.graph_steps = median.graph_steps;
  result.memory_gb = bench.memory_gb();
  return result;
}

}  // namespace lockstep
