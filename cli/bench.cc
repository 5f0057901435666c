// lockstep bench: what a model costs on this machine. One JSON line a measurement.

#include <cstdio>
#include <thread>

#include "cli/console.h"
#include "core/device.h"
#include "io/json.h"
#include "rl/model_bench.h"

namespace lockstep {

int bench_command(const BenchArgs& args) {
  Result<ModelConfig> config = load_model_config(args.config);
  if (!config) return fail(kExitBadInput, config.status());
  ModelBenchOptions o = args.options;
  for (const Numerics n : kAllNumerics)
    if (args.numerics == numerics_name(n)) o.numerics = n;
  o.device = args.device == device_name(Device::gpu) ? Device::gpu : Device::cpu;
  if (o.threads == 0) o.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (o.device == Device::gpu)
    if (const Status s = device_available(); !s) return fail(kExitBadInput, s);
  int64_t parameters = 0;
  for (const TensorSpec& t : tensor_table(config.value())) parameters += t.is_buffer() ? 0 : t.shape.elements();
  for (const std::string& what : args.what) {
    const Result<ModelBenchResult> r = bench_model(config.value(), what, o);
    if (!r) return fail(kExitBadInput, r.status());
    JsonLine line;
    line.add("what", what)
        .add("device", o.device == Device::gpu ? device_info().name : "cpu")
        .add("numerics", args.numerics)
        .add("params", parameters)
        .add("tokens", r.value().tokens)
        .add("seconds", r.value().seconds)
        .add("seconds_min", r.value().seconds_min)
        .add("seconds_max", r.value().seconds_max)
        .add("tokens_per_s", static_cast<double>(r.value().tokens) / r.value().seconds)
        .add("memory_gb", r.value().memory_gb);
    if (what != "train")
      line.add("batch", o.batch).add("prompt", o.prompt).add("new", o.new_tokens).add("prefill_s", r.value().prefill_s).add("decode_s", r.value().decode_s)
          .add("decode_steps", r.value().decode_steps).add("graph_steps", r.value().graph_steps).add("host_s", r.value().host_s);
    if (what == "rl") line.add("train_s", r.value().train_s).add("logprobs_differing", r.value().differing);
    std::printf("%s\n", line.str().c_str());
    std::fflush(stdout);
  }
  return kExitOk;
}

}  // namespace lockstep
