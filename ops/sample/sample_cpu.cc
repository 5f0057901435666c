#include "ops/sample/sample_cpu.h"

#include <algorithm>
#include <limits>

#include "ops/fixed_math.h"
#include "ops/logprob/logprob.h"

namespace lockstep::reference {

namespace {

// One worker's scratch, V elements each.
struct Scratch {
  float* e;
  float* y;
  int32_t* ids;
};

int32_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i)
    if (x[i] > x[best]) best = i;
  return static_cast<int32_t>(best);
}

// Index in [0, n) drawn with probability proportional to e(i).
template <typename E>
int64_t draw(int64_t n, E e, const SampleParams& p) {
  uint64_t total = 0, running = 0;
  for (int64_t i = 0; i < n; ++i) total += sample_weight(e(i));
  const double threshold = static_cast<double>(uniform_of(p)) * static_cast<double>(total);
  for (int64_t i = 0; i < n; ++i) {
    running += sample_weight(e(i));
    if (static_cast<double>(running) > threshold) return i;
  }
  return n - 1;  // nothing has weight
}

// Filters take a set of n ids, ascending, and leave the kept ones at the front, ascending; they return how many.

int64_t keep_top_k(int32_t* ids, int64_t n, int64_t k, const float* y) {
  if (k >= n) return n;
  std::nth_element(ids, ids + k, ids + n, [&](int32_t a, int32_t b) { return y[a] > y[b] || (y[a] == y[b] && a < b); });
  std::sort(ids, ids + k);
  return k;
}

// A heap gives the ids in order of probability, as many as needed: the nucleus is mostly far smaller than the vocabulary.
int64_t keep_top_p(int32_t* ids, int64_t n, float top_p, const float* y, const float* e) {
  uint64_t total = 0, mass = 0;
  for (int64_t i = 0; i < n; ++i) total += sample_weight(e[ids[i]]);
  const auto after = [&](int32_t a, int32_t b) { return y[a] < y[b] || (y[a] == y[b] && a > b); };
  const double wanted = static_cast<double>(top_p) * static_cast<double>(total);
  int64_t rest = n;
  std::make_heap(ids, ids + n, after);
  while (rest > 0 && (rest == n || static_cast<double>(mass) < wanted)) {
    std::pop_heap(ids, ids + rest, after);
    mass += sample_weight(e[ids[--rest]]);
  }
  std::sort(ids + rest, ids + n);
  std::copy(ids + rest, ids + n, ids);
  return n - rest;
}

int64_t keep_min_p(int32_t* ids, int64_t n, float min_p, const float* e) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i)
    if (e[ids[i]] >= min_p) ids[kept++] = ids[i];
  return std::max<int64_t>(kept, 1);  // none only when all are NaN
}

void sample_row(int32_t* token, float* logprob, const float* logits, int64_t vocab, const SampleParams& p, const Scratch& s,
                ExpRow exponentials) {
  const bool greedy = is_greedy(p), filtered = truncates(p, vocab);
  const float temperature = temperature_of(p);
  if (!filtered && p.forbid < 0) {
    const RowStats stats = row_stats(logits, vocab, temperature);
    if (greedy) {
      *token = argmax(logits, vocab);
    } else {
      exponentials(s.e, logits, vocab, temperature, stats.max);
      *token = static_cast<int32_t>(draw(vocab, [&](int64_t i) { return s.e[i]; }, p));
    }
    *logprob = logits[*token] / temperature - stats.lse;
    return;
  }

  // Every id but the forbidden one. A NaN goes last: sorting needs an order.
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  int64_t n = 0;
  float max = kLowest;
  for (int64_t v = 0; v < vocab; ++v) {
    const float y = logits[v] / temperature;
    s.y[v] = y == y ? y : kLowest;
    if (v == p.forbid) continue;
    s.ids[n++] = static_cast<int32_t>(v);
    if (y > max) max = y;
  }
  exponentials(s.e, logits, vocab, temperature, max);
  if (filtered) {
    if (p.top_k > 0) n = keep_top_k(s.ids, n, p.top_k, s.y);
    if (p.top_p < 1.0f) n = keep_top_p(s.ids, n, p.top_p, s.y, s.e);
    if (p.min_p > 0.0f) n = keep_min_p(s.ids, n, p.min_p, s.e);
  }
  const auto weight = [&](int64_t i) { return s.e[s.ids[i]]; };
  if (greedy) {
    *token = *std::max_element(s.ids, s.ids + n, [&](int32_t a, int32_t b) { return s.y[a] < s.y[b]; });
  } else {
    *token = s.ids[draw(n, weight, p)];
  }
  *logprob = logits[*token] / temperature - (max + log_f32(tree_sum(n, weight)));
}

}  // namespace

void exp_row(float* e, const float* logits, int64_t n, float temperature, float max) {
  for (int64_t i = 0; i < n; ++i) e[i] = exp_f32(logits[i] / temperature - max);
}

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, const SampleParams* params,
            ExpRow exponentials) {
  const int64_t vocab = logits.dim(1);
  ArenaScope scope(*c.workspace);
  const Shape per_worker = {c.num_threads(), vocab};
  const TensorView e = c.workspace->tensor(DType::f32, per_worker, "sample weights");
  const TensorView y = c.workspace->tensor(DType::f32, per_worker, "sample logits");
  const TensorView ids = c.workspace->tensor(DType::i32, per_worker, "sample ids");
  parallel_for(c, logits.rows(), vocab * 8, [&](int64_t begin, int64_t end, int worker) {
    const Scratch s = {e.row<float>(worker), y.row<float>(worker), ids.row<int32_t>(worker)};
    for (int64_t r = begin; r < end; ++r)
      sample_row(token.row<int32_t>(r), logprob.row<float>(r), logits.row<float>(r), vocab, params[r], s, exponentials);
  });
}

}  // namespace lockstep::reference
