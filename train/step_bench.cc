// A whole training step of a small model: how much of it is spent inside matrix products, and what the products reach beside the cores' measured peak
// of fused multiply-adds. The linker puts a stopwatch around the six products (--wrap); nothing in the program knows of it.
//
//   step_bench [CONFIG.json [THREADS [NUMERICS]]]        one JSON line, then a table

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/rng.h"
#include "ops/fma_peak.h"
#include "ops/matmul/matmul.h"
#include "train/actor.h"

namespace lockstep {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Totals {
  double seconds = 0, operations = 0;
} products;

// Adds one product's time and operations to the totals.
template <typename F>
void timed(double operations, F product) {
  const double start = now();
  product();
  products.seconds += now() - start;
  products.operations += operations;
}
double operations(ConstTensorView a, ConstTensorView b) {  // of [M, N] and [M, K]
  return 2.0 * static_cast<double>(a.rows()) * static_cast<double>(a.dim(1)) * static_cast<double>(b.dim(1));
}

}  // namespace

}  // namespace lockstep

// The products by their mangled names, before and after wrapping.
#define WRAPPED(name, symbol, parameters, arguments, operations_of)                                   \
  extern "C" void __real_##symbol parameters;                                                         \
  extern "C" void __wrap_##symbol parameters {                                                        \
    lockstep::timed(operations_of, [&] { __real_##symbol arguments; });                               \
  }
using lockstep::ConstTensorView;
using lockstep::Context;
using lockstep::TensorView;
using lockstep::WeightView;
WRAPPED(matmul, _ZN8lockstep6matmulERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEERKNS_10WeightViewEl,
        (Context & c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment), (c, y, x, w, k_segment), lockstep::operations(y, x))
WRAPPED(matmul_backward_input, _ZN8lockstep21matmul_backward_inputERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEERKNS_10WeightViewEb,
        (Context & c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate), (c, dx, dy, w, accumulate), lockstep::operations(dx, dy))
WRAPPED(matmul_backward_weight, _ZN8lockstep22matmul_backward_weightERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEES5_,
        (Context & c, TensorView dw, ConstTensorView dy, ConstTensorView x), (c, dw, dy, x), lockstep::operations(dy, x))
WRAPPED(grouped_matmul, _ZN8lockstep14grouped_matmulERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEERKNS_10WeightViewES5_,
        (Context & c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets), (c, y, x, w, offsets), lockstep::operations(y, x))
WRAPPED(grouped_matmul_backward_input, _ZN8lockstep29grouped_matmul_backward_inputERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEERKNS_10WeightViewES5_b,
        (Context & c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate), (c, dx, dy, w, offsets, accumulate),
        lockstep::operations(dx, dy))
WRAPPED(grouped_matmul_backward_weight, _ZN8lockstep30grouped_matmul_backward_weightERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEES5_S5_,
        (Context & c, TensorView dw, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets), (c, dw, dy, x, offsets), lockstep::operations(dy, x))

namespace lockstep {

namespace {

// Random prompts and responses about as long as the demo's.
std::vector<TrainSample> make_samples(const ModelConfig& config, int64_t count) {
  Philox rng(1, RngPurpose::test);
  std::vector<TrainSample> samples;
  for (int64_t i = 0; i < count; ++i) {
    TrainSample s;
    s.index = i;
    s.prompt_length = 8 + rng.below(6);
    const int64_t response = 20 + rng.below(16);
    for (int64_t t = 0; t < s.prompt_length + response; ++t) s.tokens.push_back(static_cast<int32_t>(rng.below(static_cast<uint32_t>(config.vocab_size))));
    s.mask.assign(static_cast<size_t>(response), 1);
    s.advantage.assign(static_cast<size_t>(response), rng.uniform() - 0.5f);
    samples.push_back(std::move(s));
  }
  return samples;
}

int run(const std::string& path, int threads, Numerics numerics) {
  Result<ModelConfig> config = load_model_config(path);
  if (!config) {
    std::fprintf(stderr, "step_bench: %s\n", config.message().c_str());
    return 2;
  }
  CpuContext context(threads);
  Arena arena("bench", size_t{8} << 30);
  Weights weights(config.value(), numerics, arena);
  OptimizerConfig optimizer;
  optimizer.freeze_router = false;
  Actor actor(context, weights, make_rope_tables(config.value(), config.value().max_positions, arena), optimizer, ActorOptions());
  actor.initialize(1);
  const std::vector<TrainSample> samples = make_samples(config.value(), 512);
  int64_t tokens = 0;
  for (const TrainSample& s : samples) tokens += static_cast<int64_t>(s.tokens.size());

  // Rounds of one step and one measurement of the peak; the fastest of each, since other work on the machine only slows.
  double step_s = 1e30, product_s = 0, product_ops = 0, peak = 0;
  for (int round = 0; round < 8; ++round) {
    products = {};
    const double start = now();
    if (const auto done = actor.step(samples, LossConfig(), nullptr); !done) return 1;
    const double seconds = now() - start;
    if (seconds < step_s) {
      step_s = seconds;
      product_s = products.seconds;
      product_ops = products.operations;
    }
    const double peak_start = now();
    const double peak_ops = fma_chains(context);
    peak = std::max(peak, peak_ops / (now() - peak_start));
  }
  std::printf("{\"bench\":\"train_step\",\"threads\":%d,\"numerics\":\"%s\",\"tokens\":%lld,\"seconds\":%.4f,\"tokens_per_s\":%.0f,\"gemm_share\":%.3f,"
              "\"gemm_gflops\":%.1f,\"step_gflops\":%.1f,\"fma_peak_gflops\":%.1f}\n",
              threads, numerics_name(numerics), static_cast<long long>(tokens), step_s, static_cast<double>(tokens) / step_s, product_s / step_s,
              product_ops / product_s * 1e-9, product_ops / step_s * 1e-9, peak * 1e-9);
  std::printf("training step, %d threads, %s: %.0f tokens/s; %.0f%% of the time inside matrix products, which reach %.0f GFLOP/s = %.0f%% of the %.0f GFLOP/s "
              "fma peak; the whole step %.0f GFLOP/s = %.0f%%\n",
              threads, numerics_name(numerics), static_cast<double>(tokens) / step_s, 100 * product_s / step_s, product_ops / product_s * 1e-9,
              100 * product_ops / product_s / peak, peak * 1e-9, product_ops / step_s * 1e-9, 100 * product_ops / step_s / peak);
  return 0;
}

}  // namespace

}  // namespace lockstep

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : LOCKSTEP_SOURCE_DIR "/configs/demo.config.json";
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  const bool f32 = argc > 3 && std::string(argv[3]) == "f32";
  return lockstep::run(path, std::max(threads, 1), f32 ? lockstep::Numerics::f32 : lockstep::Numerics::bf16);
}
