// Decoding beside what the machine allows: tokens a second of the engine at several batch sizes, and the floor of a step,
//   max(bytes / (GB/s of memory), operations / (peak of fused multiply-adds)),
// with both rates measured in the same run. Bytes: weights that a step reads, each once, and the sequences' state; of B tokens that choose K of E experts,
// as many experts as chance has them touch. Operations: model/cost.h. Prompts are short and have run before the clock starts.
//
//   engine_bench [CONFIG.json [THREADS [bf16|fp8|fp4|f32 [BATCH]]]]        a line of a table for each batch size, and one of JSON to standard error

#include <algorithm>
#include <cmath>
#include <ctime>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/rng.h"
#include "model/cost.h"
#include "ops/fma_peak.h"
#include "rollout/engine.h"

namespace lockstep {

namespace {

constexpr int64_t kPrompt = 32, kContext = 512;

// Seconds of the calling thread's own: what else runs on the machine then does not count, but for its share of memory and cache. With more threads, of the clock.
bool g_one_thread = true;
double now() {
  timespec t{};
  ::clock_gettime(g_one_thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Bytes a second of memory on all threads: the better of copying, reads and writes counted, and reading alone.
double memory_rate(Context& c, std::vector<uint64_t>& from, std::vector<uint64_t>& to) {
  const auto n = static_cast<int64_t>(from.size());
  const double bytes = static_cast<double>(from.size() * sizeof(uint64_t));
  const double start = now();
  parallel_for(c, n, 8, [&](int64_t b, int64_t e, int) { std::memcpy(&to[static_cast<size_t>(b)], &from[static_cast<size_t>(b)], static_cast<size_t>(e - b) * sizeof(uint64_t)); });
  const double copied = now();
  std::vector<uint64_t> sums(static_cast<size_t>(c.num_threads()) * 8);
  parallel_for(c, n / 32, 256, [&](int64_t b, int64_t e, int worker) {
    uint64_t sum[32] = {};
    for (int64_t i = b * 32; i < e * 32; i += 32)
      for (int64_t j = 0; j < 32; ++j) sum[j] += from[static_cast<size_t>(i + j)];
    for (const uint64_t s : sum) sums[static_cast<size_t>(worker) * 8] += s;
  });
  const double read = now();
  to[0] = sums[0];
  return std::max(2 * bytes / (copied - start), bytes / (read - copied));
}

int run(const std::string& path, int threads, Numerics numerics, const std::vector<int64_t>& batches) {
  const Result<ModelConfig> config = load_model_config(path);
  if (!config) {
    std::fprintf(stderr, "engine_bench: %s\n", config.message().c_str());
    return 2;
  }
  const ModelConfig& m = config.value();
  g_one_thread = threads == 1;
  CpuContext context(threads);
  Context& c = context;
  Arena arena("bench", size_t{16} << 30);
  Weights weights(m, numerics, arena);
  {
    Arena once("bench.masters", size_t{16} << 30);
    TensorSet masters = make_tensor_set(weights.table(), once, [](const TensorSpec&) { return true; });
    initialize_masters(m, weights.table(), masters, 1);
    weights.load(c, masters, 0);
  }
  Model model;
  model.weights = &weights;
  model.rope = make_rope_tables(m, kContext, arena);
  std::vector<uint64_t> from(size_t{32} << 20, 1), to(from.size());

  std::printf("%s, %s, %d threads: %.1f M parameters, %.0f MB of weights\n", path.c_str(), numerics_name(numerics), threads, 1e-6 * static_cast<double>(count_parameters(weights.table())),
              1e-6 * decode_weight_bytes(m, weights.table(), numerics, 1 << 20, true));
  std::printf("%6s %10s %10s | %9s %9s %9s %6s | %7s %7s %9s\n", "batch", "tokens/s", "ms/step", "floor ms", "of bytes", "of flops", "ratio", "GB/s", "GFLOP/s", "sample ms");
  for (const int64_t batch : batches) {
    Arena state("bench.state", size_t{16} << 30);
    Engine engine(c, model, {.max_running = batch, .max_batch_tokens = 2048, .max_context = kContext}, state);
    Philox rng(1, RngPurpose::test);
    for (int64_t i = 0; i < batch; ++i) {
      Request r;
      r.prompt_id = static_cast<uint64_t>(i);
      for (int64_t t = 0; t < kPrompt; ++t) r.prompt.push_back(static_cast<int32_t>(rng.below(static_cast<uint32_t>(m.vocab_size))));
      r.sampling.max_new_tokens = kContext - kPrompt;
      CHECK(engine.submit(r).is_ok(), "a request of the bench");
    }
    while (engine.stats().prefill_tokens < batch * kPrompt) engine.step();
    // Each step beside the two rates, at best of all rounds: what else runs on the machine only slows.
    double step = 1e30, sampling = 0, memory = 0, peak = 0;
    const double begin = now();
    for (int round = 0; round < 16 && (round < 4 || now() - begin < 20); ++round) {
      const int steps = batch < 64 ? 12 : 4;
      for (int i = 0; i < steps; ++i) {
        const double sampled = engine.stats().sample_seconds, start = now();
        CHECK(engine.step(), "nothing to do");
        const double seconds = now() - start;
        if (seconds >= step) continue;
        step = seconds;
        sampling = engine.stats().sample_seconds - sampled;
      }
      memory = std::max(memory, memory_rate(c, from, to));
      const double start = now();
      const double operations = fma_chains(c);
      peak = std::max(peak, operations / (now() - start));
    }
    CHECK(engine.load().running == batch, "samples ended within the measurement");
    const int64_t visible = kPrompt + engine.stats().decode_tokens / batch;
    const double bytes = decode_weight_bytes(m, weights.table(), numerics, batch, true) + static_cast<double>(batch) * decode_state_bytes(m, numerics, visible), flops = static_cast<double>(batch) * decode_flops(m, visible);
    const double floor = std::max(bytes / memory, flops / peak);
    std::printf("%6lld %10.0f %10.3f | %9.3f %9.3f %9.3f %6.2f | %7.1f %7.0f %9.3f\n", static_cast<long long>(batch), static_cast<double>(batch) / step, 1e3 * step, 1e3 * floor,
                1e3 * bytes / memory, 1e3 * flops / peak, floor / step, 1e-9 * memory, 1e-9 * peak, 1e3 * sampling);
    std::fprintf(stderr, "{\"bench\":\"decode\",\"config\":\"%s\",\"numerics\":\"%s\",\"threads\":%d,\"batch\":%lld,\"tokens_per_s\":%.0f,\"step_s\":%.6f,\"floor_s\":%.6f,\"bytes\":%.0f,\"flops\":%.0f}\n",
                 path.c_str(), numerics_name(numerics), threads, static_cast<long long>(batch), static_cast<double>(batch) / step, step, floor, bytes, flops);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

}  // namespace lockstep

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : LOCKSTEP_SOURCE_DIR "/configs/bench_1024.config.json";
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  lockstep::Numerics numerics = lockstep::Numerics::bf16;
  for (const auto n : {lockstep::Numerics::f32, lockstep::Numerics::fp8, lockstep::Numerics::fp4})
    if (argc > 3 && argv[3] == std::string(lockstep::numerics_name(n))) numerics = n;
  return lockstep::run(path, std::max(threads, 1), numerics, argc > 4 ? std::vector<int64_t>{std::atoll(argv[4])} : std::vector<int64_t>{1, 8, 64, 256});
}
