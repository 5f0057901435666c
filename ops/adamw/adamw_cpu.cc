#include "ops/adamw/adamw_cpu.h"

#include <bit>
#include <cmath>

#include "ops/fixed_math.h"

namespace lockstep::reference {

void adamw_range(float* w, float* m, float* v, const float* grad, int64_t n, const AdamWStep& step) {
  const float c1 = 1.0f - step.beta1, c2 = 1.0f - step.beta2, decay = step.lr * step.weight_decay;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * step.grad_scale;
    m[i] = step.beta1 * m[i] + c1 * g;
    v[i] = step.beta2 * v[i] + c2 * (g * g);
    const float update = step.lr * (m[i] / step.bias1) / (std::sqrt(v[i] / step.bias2) + step.eps);
    w[i] = w[i] - decay * w[i] - update;
  }
}

double sum_squares_block(const float* grad, int64_t n) {
  double lane[kTreeLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kTreeLanes] += static_cast<double>(grad[i] * grad[i]);
  for (int width = kTreeLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i] + lane[i + width];
  return lane[0];
}

bool all_finite_range(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if ((std::bit_cast<uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u) return false;
  return true;
}

}  // namespace lockstep::reference
