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

void check_targets(const Context& c, const char* op, ConstTensorView target, int64_t rows, int64_t vocab) {
  CHECK(vocab >= 1, "{}: the vocabulary is empty", op);
  check_vector(op, "target", target, DType::i32, rows);
  if (c.on_gpu()) return;
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t id = *target.row<int32_t>(r);
    CHECK(id >= 0 && id < vocab, "{}: target {} in row {}, the vocabulary has {}", op, id, r, vocab);
  }
}

void check_temperatures(const Context& c, const char* op, ConstTensorView temperature, int64_t rows) {
  check_vector(op, "temperature", temperature, DType::f32, rows);
  if (c.on_gpu()) return;
  for (int64_t r = 0; r < rows; ++r) CHECK(*temperature.row<float>(r) > 0, "{}: temperature {} in row {}", op, *temperature.row<float>(r), r);
}

// Fills in part.vocab where `count` ids are all.
void check_part(const char* op, VocabPart& part, int64_t count) {
  if (part.vocab == 0) part.vocab = count;
  const int64_t chunk = vocab_chunk(part.vocab), end = part.first + count;
  CHECK(part.first >= 0 && end <= part.vocab && (count == 0 || (part.first % chunk == 0 && (end % chunk == 0 || end == part.vocab))),
        "{}: ids [{}, {}) of {} are not whole chunks of {}", op, part.first, end, part.vocab, chunk);
}

void check_inputs(const Context& c, const char* op, ConstTensorView hidden, const WeightView& head, ConstTensorView target,
                  ConstTensorView temperature, VocabPart& part) {
  CHECK(hidden.shape.rank == 2 && head.rows.shape.rank == 2 && hidden.dim(1) == head.rows.dim(1),
        "{}: hidden is {}, head {}; wanted [R, D] and [V, D]", op, hidden.shape.str(), head.rows.shape.str());
  check_part(op, part, head.rows.rows());
  check_targets(c, op, target, hidden.rows(), part.vocab);
  check_temperatures(c, op, temperature, hidden.rows());
}

void check_matrix(const char* op, const char* name, ConstTensorView v, int64_t rows, int64_t columns) {
  CHECK(v.dtype == DType::f32 && v.shape == Shape({rows, columns}), "{}: {} is {} {}, wanted f32 [{}, {}]", op, name,
        dtype_name(v.dtype), v.shape.str(), rows, columns);
}

// Rough cost of a row of V logits for parallel_for.
constexpr int64_t kLogitCost = 4;

// Rows of logits at a time: on the GPU more, since each block of rows reads the head and, for its gradient, reads and writes that too.
int64_t row_block(const Context& c) { return c.on_gpu() ? kLogprobRowBlockGpu : kLogprobRowBlock; }

// The same rows of a vector that may be absent.
template <typename View>
View rows_of(const View& v, int64_t first, int64_t count) { return v.data == nullptr ? v : v.slice(first, count); }

float value_or_zero(ConstTensorView v, int64_t r) { return v.data == nullptr ? 0.0f : *v.row<float>(r); }

}  // namespace

RowStats row_stats(const float* logits, int64_t vocab, float temperature) { return simd::row_stats(logits, vocab, temperature); }

void select_logprob(Context& c, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView hidden,
                    const WeightView& head, ConstTensorView target, ConstTensorView temperature) {
  VocabPart whole;
  check_inputs(c, "select_logprob", hidden, head, target, temperature, whole);
  const int64_t rows = hidden.rows(), vocab = head.rows.rows();
  check_vector("select_logprob", "logprob", logprob, DType::f32, rows);
  check_vector("select_logprob", "lse", lse, DType::f32, rows, true);
  check_vector("select_logprob", "entropy", entropy, DType::f32, rows, true);
  ArenaScope scope(*c.workspace);
  const TensorView block = c.workspace->tensor(DType::f32, {std::min(rows, row_block(c)), vocab}, "select_logprob logits");
  for (int64_t first = 0; first < rows; first += row_block(c)) {
    const TensorView logits = block.slice(0, std::min(row_block(c), rows - first));
    const int64_t count = logits.rows();
    matmul(c, logits, hidden.slice(first, count), head);
    if (c.on_gpu()) {
      device::select_logprob(c, logprob.slice(first, count), rows_of(lse, first, count), rows_of(entropy, first, count), logits, target.slice(first, count),
                             temperature.slice(first, count));
      continue;
    }
    parallel_for(c, count, vocab * kLogitCost, [&](int64_t begin, int64_t end, int) {
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
                             ConstTensorView entropy, VocabPart part) {
  check_inputs(c, "select_logprob_backward", hidden, head, target, temperature, part);
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
  const TensorView block = c.workspace->tensor(DType::f32, {std::min(rows, row_block(c)), vocab}, "select_logprob dlogits");
  for (int64_t first = 0; first < rows; first += row_block(c)) {
    const TensorView dlogits = block.slice(0, std::min(row_block(c), rows - first));
    const int64_t count = dlogits.rows();
    const ConstTensorView x = hidden.slice(first, count);
    matmul(c, dlogits, x, head);
    if (c.on_gpu())
      device::row_backward(c, dlogits, dlogprob.slice(first, count), rows_of(dentropy, first, count), target.slice(first, count),
                           temperature.slice(first, count), lse.slice(first, count), rows_of(entropy, first, count), part.first);
    else parallel_for(c, count, vocab * kLogitCost, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = first + i;
        simd::row_backward(dlogits.row<float>(i), vocab,
                           {.target = *target.row<int32_t>(r) - part.first,
                            .temperature = *temperature.row<float>(r),
                            .lse = *lse.row<float>(r),
                            .entropy = value_or_zero(entropy, r),
                            .dlogprob = *dlogprob.row<float>(r),
                            .dentropy = value_or_zero(dentropy, r)});
      }
    });
    matmul_backward_input(c, dhidden.slice(first, count), dlogits, head);
    if (dhead_accum.data != nullptr) matmul_backward_weight(c, dhead_accum, dlogits, x);
  }
}

void logprob_partials(Context& c, TensorView partials, ConstTensorView logits, ConstTensorView target,
                      ConstTensorView temperature, VocabPart part) {
  const int64_t rows = logits.rows(), count = logits.dim(1);
  check_part("logprob_partials", part, count);
  const int64_t chunk = vocab_chunk(part.vocab), chunks = (count + chunk - 1) / chunk;
  check_matrix("logprob_partials", "logits", logits, rows, count);
  check_matrix("logprob_partials", "partials", partials, rows, kChunkPartials * chunks);
  check_targets(c, "logprob_partials", target, rows, part.vocab);
  check_temperatures(c, "logprob_partials", temperature, rows);
  if (c.on_gpu()) return device::logprob_partials(c, partials, logits, target, temperature, part);
  parallel_for(c, rows, count * kLogitCost, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = logits.row<float>(r);
      const float t = *temperature.row<float>(r);
      float max[kVocabChunks], sum[kVocabChunks];
      simd::chunk_stats(max, sum, x, count, chunk, t);
      float* out = partials.row<float>(r);
      for (int64_t k = 0; k < chunks; ++k) {
        out[kChunkPartials * k] = max[k];
        out[kChunkPartials * k + 1] = sum[k];
        out[kChunkPartials * k + 2] = 0.0f;
      }
      const int64_t at = *target.row<int32_t>(r) - part.first;
      if (at >= 0 && at < count) out[kChunkPartials * (at / chunk) + 2] = x[at] / t;
    }
  });
}

void logprob_merge(Context& c, TensorView logprob, TensorView lse, ConstTensorView partials, ConstTensorView target,
                   int64_t vocab) {
  const int64_t rows = partials.rows(), chunks = vocab_chunks(vocab);
  check_matrix("logprob_merge", "partials", partials, rows, kChunkPartials * chunks);
  check_targets(c, "logprob_merge", target, rows, vocab);
  check_vector("logprob_merge", "logprob", logprob, DType::f32, rows);
  check_vector("logprob_merge", "lse", lse, DType::f32, rows, true);
  if (c.on_gpu()) return device::logprob_merge(c, logprob, lse, partials, target, vocab);
  parallel_for(c, rows, kVocabChunks * kLogitCost, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* in = partials.row<float>(r);
      float max[kVocabChunks], sum[kVocabChunks];
      for (int64_t k = 0; k < chunks; ++k) {
        max[k] = in[kChunkPartials * k];
        sum[k] = in[kChunkPartials * k + 1];
      }
      const RowStats stats = simd::merge_stats(max, sum, chunks);
      *logprob.row<float>(r) = in[kChunkPartials * (*target.row<int32_t>(r) / vocab_chunk(vocab)) + 2] - stats.lse;
      if (lse.data != nullptr) *lse.row<float>(r) = stats.lse;
    }
  });
}

void entropy_partials(Context& c, TensorView means, ConstTensorView logits, ConstTensorView temperature, ConstTensorView lse,
                      VocabPart part) {
  const int64_t rows = logits.rows(), count = logits.dim(1);
  check_part("entropy_partials", part, count);
  const int64_t chunk = vocab_chunk(part.vocab);
  check_matrix("entropy_partials", "logits", logits, rows, count);
  check_matrix("entropy_partials", "means", means, rows, (count + chunk - 1) / chunk);
  check_temperatures(c, "entropy_partials", temperature, rows);
  check_vector("entropy_partials", "lse", lse, DType::f32, rows);
  if (c.on_gpu()) return device::entropy_partials(c, means, logits, temperature, lse, part);
  parallel_for(c, rows, count * kLogitCost, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      simd::chunk_means(means.row<float>(r), logits.row<float>(r), count, chunk, *temperature.row<float>(r), *lse.row<float>(r));
  });
}

void entropy_merge(Context& c, TensorView entropy, ConstTensorView means, ConstTensorView lse) {
  const int64_t rows = means.rows();
  check_matrix("entropy_merge", "means", means, rows, means.dim(1));
  check_vector("entropy_merge", "lse", lse, DType::f32, rows);
  check_vector("entropy_merge", "entropy", entropy, DType::f32, rows);
  if (c.on_gpu()) return device::entropy_merge(c, entropy, means, lse);
  parallel_for(c, rows, kVocabChunks, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) *entropy.row<float>(r) = merge_means(means.row<float>(r), means.dim(1), *lse.row<float>(r));
  });
}

}  // namespace lockstep
