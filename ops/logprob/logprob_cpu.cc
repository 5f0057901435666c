#include "ops/logprob/logprob_cpu.h"

#include <algorithm>
#include <limits>

#include "ops/fixed_math.h"

namespace lockstep::reference {

void chunk_stats(float* max, float* sum, const float* logits, int64_t count, int64_t chunk, float temperature) {
  for (int64_t begin = 0, k = 0; begin < count; begin += chunk, ++k) {
    const int64_t n = std::min(chunk, count - begin);
    const auto y = [&](int64_t i) { return logits[begin + i] / temperature; };
    float m = y(0);
    for (int64_t i = 1; i < n; ++i) m = std::max(m, y(i));
    max[k] = m;
    sum[k] = tree_sum(n, [&](int64_t i) { return exp_f32(y(i) - m); });
  }
}

RowStats merge_stats(const float* max, const float* sum, int64_t chunks) {
  float running = -std::numeric_limits<float>::infinity(), total = 0.0f;
  for (int64_t k = 0; k < chunks; ++k) {
    const float merged = std::max(running, max[k]);
    total = total * exp_f32(running - merged) + sum[k] * exp_f32(max[k] - merged);
    running = merged;
  }
  return {.max = running, .lse = running + log_f32(total)};
}

void chunk_means(float* mean, const float* logits, int64_t count, int64_t chunk, float temperature, float lse) {
  for (int64_t begin = 0, k = 0; begin < count; begin += chunk, ++k) {
    const auto y = [&](int64_t i) { return logits[begin + i] / temperature; };
    mean[k] = tree_dot(std::min(chunk, count - begin), [&](int64_t i) { return exp_f32(y(i) - lse); }, y);
  }
}

RowStats row_stats(const float* logits, int64_t vocab, float temperature) {
  float max[kVocabChunks], sum[kVocabChunks];
  chunk_stats(max, sum, logits, vocab, vocab_chunk(vocab), temperature);
  return merge_stats(max, sum, vocab_chunks(vocab));
}

float row_entropy(const float* logits, int64_t vocab, float temperature, float lse) {
  float mean[kVocabChunks];
  chunk_means(mean, logits, vocab, vocab_chunk(vocab), temperature, lse);
  return merge_means(mean, vocab_chunks(vocab), lse);
}

float dlogit(float logit, bool is_target, const RowGradient& g) {
  const float y = logit / g.temperature, p = exp_f32(y - g.lse);
  const float dy = g.dlogprob * ((is_target ? 1.0f : 0.0f) - p) - g.dentropy * p * (y - g.lse + g.entropy);
  return dy / g.temperature;
}

void row_backward(float* logits, int64_t count, const RowGradient& g) {
  for (int64_t v = 0; v < count; ++v) logits[v] = dlogit(logits[v], v == g.target, g);
}

}  // namespace lockstep::reference
