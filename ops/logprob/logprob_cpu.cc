#include "ops/logprob/logprob_cpu.h"

#include <algorithm>
#include <limits>

#include "ops/fixed_math.h"

namespace lockstep::reference {

RowStats row_stats(const float* logits, int64_t vocab, float temperature) {
  const int64_t chunk = vocab_chunk(vocab);
  float max = -std::numeric_limits<float>::infinity(), sum = 0.0f;
  for (int64_t begin = 0; begin < vocab; begin += chunk) {
    const int64_t n = std::min(chunk, vocab - begin);
    const auto y = [&](int64_t i) { return logits[begin + i] / temperature; };
    float m = y(0);
    for (int64_t i = 1; i < n; ++i) m = std::max(m, y(i));
    const float s = tree_sum(n, [&](int64_t i) { return exp_f32(y(i) - m); });
    const float merged = std::max(max, m);
    sum = sum * exp_f32(max - merged) + s * exp_f32(m - merged);
    max = merged;
  }
  return {.max = max, .lse = max + log_f32(sum)};
}

float row_entropy(const float* logits, int64_t vocab, float temperature, float lse) {
  const int64_t chunk = vocab_chunk(vocab);
  float mean = 0.0f;  // of y
  for (int64_t begin = 0; begin < vocab; begin += chunk) {
    const auto y = [&](int64_t i) { return logits[begin + i] / temperature; };
    mean += tree_dot(std::min(chunk, vocab - begin), [&](int64_t i) { return exp_f32(y(i) - lse); }, y);
  }
  return lse - mean;
}

float dlogit(float logit, bool is_target, const RowGradient& g) {
  const float y = logit / g.temperature, p = exp_f32(y - g.lse);
  const float dy = g.dlogprob * ((is_target ? 1.0f : 0.0f) - p) - g.dentropy * p * (y - g.lse + g.entropy);
  return dy / g.temperature;
}

void row_backward(float* logits, int64_t vocab, const RowGradient& g) {
  for (int64_t v = 0; v < vocab; ++v) logits[v] = dlogit(logits[v], v == g.target, g);
}

}  // namespace lockstep::reference
