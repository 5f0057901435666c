#include "rl/step_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <span>

#include "core/device.h"
#include "core/rng.h"
#include "io/json.h"
#include "model/cost.h"
#include "ops/measure.h"
#include "rollout/engine.h"
#include "sync/transfer.h"

namespace lockstep {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

float written(double x) { return static_cast<float>(x); }  // in as many digits as a measurement has

// Positions of the samples that decode: measured steps, and those in which some draw while others' prompts still run.
int64_t decode_context(const ModelBenchOptions& o, std::span<const int64_t> batches) {
  return o.prompt + o.new_tokens + *std::max_element(batches.begin(), batches.end()) * o.prompt / o.microbatch_tokens + 4;
}

EngineOptions decode_engine(const ModelBenchOptions& o, int64_t batch) {
  return {.max_running = batch, .max_batch_tokens = std::max(o.microbatch_tokens, batch), .max_context = decode_context(o, {&batch, 1})};
}
EngineOptions prefill_engine(const ModelBenchOptions& o) {
  const int64_t prompts = std::max<int64_t>(1, o.microbatch_tokens / o.prompt);
  return {.max_running = prompts, .max_batch_tokens = prompts * o.prompt, .max_context = o.prompt + 2};
}

// A context, what it gives at best, and lines about what was done on it.
class Bench {
 public:
  Bench(const ModelConfig& config, const ModelBenchOptions& o, const std::function<void(const std::string& line)>& tell)
      : config_(config), o_(o), tell_(tell), context_(o.device, o.threads) {
    Operands operands(context_);
    Clock clock(context_, false);
    ceiling_ = measure_ceiling(clock, operands);
  }

  void decode(std::span<const int64_t> batches) {
    load(decode_context(o_, batches));
    for (const int64_t batch : batches) {
      Arena state("bench state", kReserve, o_.device);
      const EngineOptions options = decode_engine(o_, batch);
      Engine engine(context_, model_, options, state);
      submit(engine, batch, options.max_context - o_.prompt);
      while (engine.stats().prefill_tokens < batch * o_.prompt) engine.step();
      std::vector<double> seconds;
      for (int64_t i = 0; i < o_.new_tokens; ++i) seconds.push_back(timed([&] { engine.step(); }));
      CHECK(engine.load().running == batch, "samples ended within the measurement");
      const int64_t visible = o_.prompt + engine.stats().decode_tokens / batch;
      const double bytes = decode_weight_bytes(config_, weights_->table(), o_.numerics, batch, o_.device == Device::cpu) +
                           static_cast<double>(batch) * decode_state_bytes(config_, o_.numerics, visible);
      JsonLine line = begin("decode");
      line.add("batch", batch).add("visible", visible);
      end(line, seconds, bytes, static_cast<double>(batch) * decode_flops(config_, visible), batch);
    }
  }

  void prefill() {
    load(o_.prompt + 2);
    const EngineOptions options = prefill_engine(o_);
    const int64_t prompts = options.max_running, tokens = options.max_batch_tokens;
    Arena state("bench state", kReserve, o_.device);
    Engine engine(context_, model_, options, state);
    std::vector<double> seconds;
    for (int i = 0; i <= o_.repeat; ++i) {
      submit(engine, prompts, 1);
      const double s = timed([&] { engine.step(); });
      CHECK(engine.idle(), "prompts were left after one call");
      if (i > 0) seconds.push_back(s);
    }
    const double operations = static_cast<double>(prompts) * (layers_forward_flops(config_, {0, config_.num_layers()}, o_.prompt) + head_forward_flops(config_));
    JsonLine line = begin("prefill");
    line.add("prompts", prompts).add("prompt", o_.prompt);
    end(line, seconds, decode_weight_bytes(config_, weights_->table(), o_.numerics, tokens, o_.device == Device::cpu), operations, tokens);
  }

  Status sync() {
    Context& c = context_;
    Arena arena("bench weights", kReserve, o_.device);
    const Numerics trained = o_.numerics == Numerics::f32 ? Numerics::f32 : Numerics::bf16;
    Weights trainer(config_, trained, arena), sampler(config_, o_.numerics, arena);
    Operands operands(c);
    TensorSet masters;
    double master_bytes = 0, sampler_bytes = 0;
    for (const TensorSpec& t : trainer.table()) {
      masters.views.push_back(t.master_dtype() == DType::f32 ? operands.random(DType::f32, t.shape) : operands.zeros(t.master_dtype(), t.shape));
      master_bytes += static_cast<double>(masters.views.back().bytes());
      sampler_bytes += static_cast<double>(weight_bytes({t}, o_.numerics));
    }
    trainer.load(c, masters, 0);
    std::vector<double> seconds;
    for (int i = 0; i <= o_.repeat; ++i) {
      const double s = timed([&] { sampler.load(c, masters, 0); });
      if (i > 0) seconds.push_back(s);
    }
    JsonLine converted = begin("sync");
    converted.add("path", "convert").add("sampler_bytes", sampler_bytes);
    end(converted, seconds, master_bytes + sampler_bytes, 0, 0);

    const Shard shard = whole_shard(config_);
    Transfer transfer(nullptr, trainer, sampler, {{shard}, trained}, {{shard}, o_.numerics}, [](const TensorSpec& t) { return !t.is_buffer(); }, arena);
    seconds.clear();
    int64_t moved = 0;
    for (int i = 0; i <= o_.repeat; ++i) {
      Status refused;
      const double s = timed([&] {
        const Result<SyncReceipt> receipt = transfer.update(c, [&](int id) { return masters.views[static_cast<size_t>(id)]; });
        if (!receipt) refused = receipt.status();
        else moved = receipt.value().local_bytes;
      });
      LOCKSTEP_RETURN_IF_ERROR(refused);
      trainer.commit(c, i + 1);
      if (i > 0) seconds.push_back(s);
    }
    JsonLine transferred = begin("sync");
    transferred.add("path", "transfer").add("moved_bytes", moved).add("from", numerics_name(trained));
    end(transferred, seconds, 2 * static_cast<double>(moved), 0, 0);
    return Status::ok();
  }

 private:
  static constexpr size_t kReserve = size_t{110} << 30;

  void load(int64_t positions) {
    weights_arena_.emplace("bench weights", kReserve, o_.device);
    weights_.emplace(config_, o_.numerics, *weights_arena_);
    CHECK(weights_->load(context_, quick_boxes(context_, config_), 0).is_ok(), "random weights");
    model_.weights = &*weights_;
    model_.rope = make_rope_tables(context_, config_, positions, *weights_arena_);
  }
  void submit(Engine& engine, int64_t samples, int64_t new_tokens) {
    Philox rng(1, RngPurpose::test);
    for (int64_t i = 0; i < samples; ++i) {
      Request r;
      r.tag = r.prompt_id = static_cast<uint64_t>(i);
      for (int64_t t = 0; t < o_.prompt; ++t) r.prompt.push_back(static_cast<int32_t>(rng.below(static_cast<uint32_t>(config_.vocab_size))));
      r.sampling.max_new_tokens = new_tokens;
      CHECK(engine.submit(std::move(r)).is_ok(), "a request of the bench");
    }
  }
  template <typename F>
  double timed(const F& f) {
    const double start = now();
    f();
    synchronize(context_);
    return now() - start;
  }
  JsonLine begin(const char* what) {
    JsonLine line;
    line.add("what", what).add("device", o_.device == Device::gpu ? device_info().name : "cpu").add("numerics", numerics_name(o_.numerics)).add("threads", o_.threads);
    return line;
  }
  void end(JsonLine& line, std::vector<double> seconds, double bytes, double operations, int64_t tokens) {
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2];
    const DType unit = o_.numerics == Numerics::f32 ? DType::f32 : o_.numerics == Numerics::bf16 ? DType::bf16 : DType::e4m3;
    const double floor = ceiling_.seconds(bytes, operations, unit);
    line.add("ms", written(median * 1e3)).add("ms_min", written(seconds.front() * 1e3)).add("ms_max", written(seconds.back() * 1e3));
    if (tokens > 0) line.add("tokens", tokens).add("tokens_per_s", written(static_cast<double>(tokens) / median)).add("operations", operations);
    line.add("bytes", bytes).add("gb_s", written(bytes / median * 1e-9)).add("floor_ms", written(floor * 1e3)).add("share", written(floor / median));
    tell_(line.add("copy_gb_s", written(ceiling_.copy_bytes * 1e-9)).add("unit_tflops", written(ceiling_.operations(unit) * 1e-12)).str());
  }

  const ModelConfig& config_;
  const ModelBenchOptions& o_;
  const std::function<void(const std::string& line)>& tell_;
  DeviceContext context_;
  Ceiling ceiling_;
  std::optional<Arena> weights_arena_;
  std::optional<Weights> weights_;
  Model model_;
};

}  // namespace

Status bench_steps(const ModelConfig& config, const std::string& what, const std::vector<int64_t>& batches, const ModelBenchOptions& o,
                   const std::function<void(const std::string& line)>& tell) {
  const int64_t longest = what == "decode" ? decode_context(o, batches) : what == "prefill" ? o.prompt + 2 : 0;
  if (longest > config.max_positions)
    return errorf("bench: sequences of {} tokens for a model with max_position_embeddings {}; lower --prompt or --new", longest, config.max_positions);
  std::vector<EngineOptions> engines;
  if (what == "prefill") engines.push_back(prefill_engine(o));
  if (what == "decode")
    for (const int64_t batch : batches) engines.push_back(decode_engine(o, batch));
  LOCKSTEP_RETURN_IF_ERROR(check_bench_memory(config, o, /*train=*/false, nullptr));
  for (const EngineOptions& e : engines) LOCKSTEP_RETURN_IF_ERROR(check_bench_memory(config, o, /*train=*/false, &e));
  Bench bench(config, o, tell);
  if (what == "sync") return bench.sync();
  what == "decode" ? bench.decode(batches) : bench.prefill();
  return Status::ok();
}

}  // namespace lockstep
