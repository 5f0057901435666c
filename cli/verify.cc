// lockstep verify: the model against a reference's tensors, one golden file at a time.

#include <cstdio>
#include <thread>

#include "cli/console.h"
#include "core/device.h"
#include "io/json.h"
#include "model/golden.h"

namespace lockstep {

namespace {

void print_json(const std::string& path, const GoldenReport& r, const std::string& failures) {
  JsonLine line;
  line.add("file", path).add("ok", failures.empty());
  // What the file does not hold is absent, never 0.
  if (r.has_logits) line.add("logits_max_abs", r.logits_max_abs);
  if (r.has_logprobs) line.add("logprob_max_abs", r.logprob_max_abs).add("logprob_mean_abs", r.logprob_mean_abs);
  if (r.has_hidden) line.add("hidden_max_abs", r.hidden_max_abs_all);
  if (r.has_gradients) line.add("grad_rel_l2_max", r.grad_rel_l2_max);
  line.add("grad_unexpected", std::span<const std::string>(r.grad_unexpected));
  line.add("decode_bit_equal", r.decode_bit_equal);
  if (!failures.empty()) line.add("failed", failures);
  std::printf("%s\n", line.str().c_str());
}

void print_text(const std::string& path, const GoldenReport& r, const std::string& failures) {
  std::printf("%s\n", path.c_str());
  if (r.has_logits) std::printf("  logits          max abs error %.3g\n", r.logits_max_abs);
  if (r.has_logprobs) std::printf("  log-probs       max abs error %.3g, mean %.3g\n", r.logprob_max_abs, r.logprob_mean_abs);
  for (size_t i = 0; i < r.hidden_max_abs.size(); ++i) std::printf("  hidden state %-2zu max abs error %.3g\n", i, r.hidden_max_abs[i]);
  if (r.has_gradients) std::printf("  gradients       relative L2 error, worst first\n");
  for (const GoldenGradient& g : r.gradients) std::printf("    %.3g  %s\n", g.relative_l2, g.name.c_str());
  for (const std::string& name : r.grad_unexpected) std::printf("    unexpected: %s\n", name.c_str());
  std::printf("  decode          %s the packed forward", r.decode_bit_equal ? "bit-equal to" : "DIFFERS from");
  if (r.has_decode_logits) std::printf(", max abs error %.3g against the reference's decoding", r.decode_logits_max_abs);
  std::printf("\n");
  if (failures.empty()) {
    std::printf("verify: ok\n");
  } else {
    std::printf("verify: FAILED %s\n", failures.c_str());
  }
}

}  // namespace

int verify_command(const VerifyArgs& args) {
  Numerics numerics = Numerics::f32;
  for (const Numerics n : kAllNumerics)
    if (args.mode == numerics_name(n)) numerics = n;
  const Device device = args.device == device_name(Device::gpu) ? Device::gpu : Device::cpu;
  if (device == Device::gpu)
    if (const Status status = device_available(); !status) return fail(kExitBadInput, status);
  DeviceContext context(device, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  int exit_code = kExitOk;
  for (const std::string& path : args.golden) {
    Result<GoldenReport> report = verify_golden(context, path, numerics);
    if (!report) {
      if (!args.json) std::printf("verify: FAILED %s\n", report.message().c_str());
      return fail(kExitBadInput, report.status());
    }
    const std::string failures = golden_failures(report.value(), numerics, GoldenLimits());
    if (args.json) {
      print_json(path, report.value(), failures);
    } else {
      print_text(path, report.value(), failures);
    }
    if (!failures.empty()) exit_code = kExitFailure;
  }
  return exit_code;
}

}  // namespace lockstep
