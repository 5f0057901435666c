#include "ops/logprob/logprob.h"

#include <algorithm>

#include "ops/logprob/logprob_cpu.h"

namespace lockstep {

namespace {

void check_vector(const char* op, const char* name, ConstTensorView v, DType dtype, int64_t rows, bool optional = false) {
  if (optional && v.data == nullptr) return;
  CHECK(v.dtype == dtype && v.shape == Shape({rows}), "{}: {} is {} {}, wanted {} [{}]", op, name, dtype_name(v.dtype),
        v.shape.str(), dtype_name(dtype), rows);
}

void check_inputs(const char* op, ConstTensorView hidden, const WeightView& head, ConstTensorView target,
                  ConstTensorView temperature) {
  CHECK(hidden.shape.rank == 2 && head.rows.shape.rank == 2 && hidden.dim(1) == head.rows.dim(1),
        "{}: hidden is {}, head {}; wanted [R, D] and [V, D]", op, hidden.shape.str(), head.rows.shape.str());
  const int64_t rows = hidden.rows(), vocab = head.rows.rows();
  CHECK(vocab >= 1, "{}: the vocabulary is empty", op);
  check_vector(op, "target", target, DType::i32, rows);
  check_vector(op, "temperature", temperature, DType::f32, rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t id = *target.row<int32_t>(r);
    const float t = *temperature.row<float>(r);
    CHECK(id >= 0 && id < vocab, "{}: target {} in row {}, the vocabulary has {}", op, id, r, vocab);
    CHECK(t > 0, "{}: temperature {} in row {}", op, t, r);
  }
}

// Rough cost of a row of V logits for parallel_for.
constexpr int64_t kLogitCost = 4;

float value_or_zero(ConstTensorView v, int64_t r) { return v.data == nullptr ? 0.0f : *v.row<float>(r); }

}  // namespace

RowStats row_stats(const float* logits, int64_t vocab, float temperature) { return simd::row_stats(logits, vocab, temperature); }

void select_logprob(Context& c, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                    const WeightView& head, ConstTensorView target, ConstTensorView temperature) {
  check_inputs("select_logprob", hidden, head, target, temperature);
  const int64_t rows = hidden.rows(), vocab = head.rows.rows();
  check_vector("select_logprob", "logprob", logprob, DType::f32, rows);
  check_vector("select_logprob", "lse", lse, DType::f32, rows, true);
  check_vector("select_logprob", "entropy", entropy, DType::f32, rows, true);
  ArenaScope scope(*c.workspace);
  const TensorView block = c.workspace->tensor(DType::f32, {std::min(rows, kLogprobRowBlock), vocab}, "select_logprob logits");
  for (int64_t first = 0; first < rows; first += kLogprobRowBlock) {
    const TensorView logits = block.slice(0, std::min(kLogprobRowBlock, rows - first));
    matmul(c, logits, hidden.slice(first, logits.rows()), head);
    parallel_for(c, logits.rows(), vocab * kLogitCost, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = first + i;
        const float* x = logits.row<float>(i);
        const float t = *temperature.row<float>(r);
        const RowStats stats = simd::row_stats(x, vocab, t);
        *logprob.row<float>(r) = x[*target.row<int32_t>(r)] / t - stats.lse;
        if (lse.data != nullptr) *lse.row<float>(r) = stats.lse;
        if (entropy.data != nullptr) *entropy.row<float>(r) = simd::row_entropy(x, vocab, t, stats.lse);
      }
    });
  }
}

void select_logprob_backward(Context& c, TensorView dhidden, TensorView dhead_accum, ConstTensorView dlogprob,
                             ConstTensorView dentropy, ConstTensorView hidden, const WeightView& head,
                             ConstTensorView target, ConstTensorView temperature, ConstTensorView lse,
                             ConstTensorView entropy) {
  check_inputs("select_logprob_backward", hidden, head, target, temperature);
  const int64_t rows = hidden.rows(), vocab = head.rows.rows();
  check_vector("select_logprob_backward", "dlogprob", dlogprob, DType::f32, rows);
  check_vector("select_logprob_backward", "dentropy", dentropy, DType::f32, rows, true);
  check_vector("select_logprob_backward", "lse", lse, DType::f32, rows);
  check_vector("select_logprob_backward", "entropy", entropy, DType::f32, rows, dentropy.data == nullptr);
  CHECK(dhidden.dtype == DType::f32 && dhidden.shape == hidden.shape, "select_logprob_backward: dhidden is {} {}, wanted f32 {}",
        dtype_name(dhidden.dtype), dhidden.shape.str(), hidden.shape.str());
  CHECK(dhead_accum.data == nullptr || (dhead_accum.dtype == DType::f32 && dhead_accum.shape == head.rows.shape),
        "select_logprob_backward: dhead_accum is {} {}, wanted f32 {} or empty", dtype_name(dhead_accum.dtype),
        dhead_accum.shape.str(), head.rows.shape.str());
  ArenaScope scope(*c.workspace);
  const TensorView block = c.workspace->tensor(DType::f32, {std::min(rows, kLogprobRowBlock), vocab}, "select_logprob dlogits");
  for (int64_t first = 0; first < rows; first += kLogprobRowBlock) {
    const TensorView dlogits = block.slice(0, std::min(kLogprobRowBlock, rows - first));
    const ConstTensorView x = hidden.slice(first, dlogits.rows());
    matmul(c, dlogits, x, head);
    parallel_for(c, dlogits.rows(), vocab * kLogitCost, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = first + i;
        simd::row_backward(dlogits.row<float>(i), vocab,
                           {.target = *target.row<int32_t>(r),
                            .temperature = *temperature.row<float>(r),
                            .lse = *lse.row<float>(r),
                            .entropy = value_or_zero(entropy, r),
                            .dlogprob = *dlogprob.row<float>(r),
                            .dentropy = value_or_zero(dentropy, r)});
      }
    });
    matmul_backward_input(c, dhidden.slice(first, dlogits.rows()), dlogits, head);
    if (dhead_accum.data != nullptr) matmul_backward_weight(c, dhead_accum, dlogits, x);
  }
}

}  // namespace lockstep
