// lockstep bench: what a model costs on this machine. One JSON line a measurement.

#include <cstdio>
#include <thread>

#include "cli/console.h"
#include "core/device.h"
#include "io/json.h"
#include "rl/step_bench.h"

namespace lockstep {

namespace {

void print(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

Status bench_run(const ModelConfig& config, const std::string& what, const ModelBenchOptions& o) {
  int64_t parameters = 0;
  for (const TensorSpec& t : tensor_table(config)) parameters += t.is_buffer() ? 0 : t.shape.elements();
  const Result<ModelBenchResult> r = bench_model(config, what, o);
  if (!r) return r.status();
  JsonLine line;
  line.add("what", what)
      .add("device", o.device == Device::gpu ? device_info().name : "cpu")
      .add("numerics", numerics_name(o.numerics))
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
  print(line.str());
  return Status::ok();
}

}  // namespace

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
  const bool small = o.device == Device::cpu;
  o.train_tokens = args.train_tokens > 0 ? args.train_tokens : 8192;
  KernelBenchOptions kernels = args.kernels;
  kernels.device = o.device;
  kernels.threads = o.threads;
  kernels.decode = !args.batches.empty() ? args.batches : small ? std::vector<int64_t>{8, 64} : std::vector<int64_t>{64, 256};
  kernels.train_tokens = args.train_tokens == 0 && small ? 512 : o.train_tokens;
  kernels.row_tokens = o.row_tokens;
  kernels.repeat = o.repeat;
  for (const std::string& what : args.what) {
    const bool step = what == "decode" || what == "prefill" || what == "sync";
    const Status done = what == "kernels" ? bench_kernels(config.value(), kernels, print)
                        : step            ? bench_steps(config.value(), what, kernels.decode, o, print)
                                          : bench_run(config.value(), what, o);
    if (!done) return fail(kExitBadInput, done);
  }
  return kExitOk;
}

}  // namespace lockstep
