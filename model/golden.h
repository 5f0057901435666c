#pragma once
// Runs the model on a golden file: a safetensors file whose metadata `config` is the model's config.json and whose tensors are inputs, weights and the
// reference's results (input_ids, weight.*, logits.f64, logprob.f64, hidden.*, grad.*, decode_logits.f64; format in tests/golden/README.md).
// Used by `lockstep verify` and by tests.

#include <string>
#include <vector>

#include "core/context.h"
#include "model/weights.h"

namespace lockstep {

// relative_l2 = |ours - reference|_2 / max(|reference|_2, kGradientFloor * |all reference gradients|_2). Some gradients vanish by symmetry (a router with
// one expert a token, the head mix of a single stream); what is left of them is rounding of both sides, f32 epsilon times the whole gradient, and no ratio
// of the two means anything. The floor makes the limit of 1e-4 an absolute error of 1e-7 of the whole gradient there.
inline constexpr double kGradientFloor = 1e-3;
struct GoldenGradient {
  std::string name;
  double relative_l2 = 0;
};

struct GoldenReport {
  bool has_logits = false, has_logprobs = false, has_hidden = false, has_gradients = false, has_decode_logits = false;
  double logits_max_abs = 0;
  double logprob_max_abs = 0, logprob_mean_abs = 0;
  std::vector<double> hidden_max_abs;             // by entry of transformers' list
  double hidden_max_abs_all = 0;
  std::vector<GoldenGradient> gradients;          // worst first
  double grad_rel_l2_max = 0;
  std::vector<std::string> grad_unexpected;       // gradients we have (not all zero) and the file does not, or the reverse
  bool decode_bit_equal = false;                  // prefill of S/3 tokens, then one at a time, gives the packed forward's bits
  double decode_logits_max_abs = 0;               // against decode_logits.f64
};

// Limits of a passing run. bf16 storage is compared for presence and decode equality only; its errors are reported.
struct GoldenLimits {
  double logits = 2e-5, logprob = 2e-5, hidden = 5e-5, gradient = 1e-4;
};
// Empty when everything the file holds is within the limits, else what failed.
std::string golden_failures(const GoldenReport& report, Numerics numerics, const GoldenLimits& limits);

Result<GoldenReport> verify_golden(Context& c, const std::string& path, Numerics numerics);

}  // namespace lockstep
