#include "ops/sample/sample.h"

#include "ops/sample/sample_cpu.h"

namespace lockstep {

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, const SampleParams* params) {
  CHECK(logits.dtype == DType::f32 && logits.shape.rank == 2 && logits.dim(1) >= 1 && logits.dim(1) <= kSampleVocabMax,
        "sample: logits are {} {}, wanted f32 [R, V] with V from 1 to {}", dtype_name(logits.dtype), logits.shape.str(), kSampleVocabMax);
  const int64_t rows = logits.rows(), vocab = logits.dim(1);
  CHECK(token.dtype == DType::i32 && token.shape == Shape({rows}), "sample: token is {} {}, wanted i32 [{}]",
        dtype_name(token.dtype), token.shape.str(), rows);
  CHECK(logprob.dtype == DType::f32 && logprob.shape == Shape({rows}), "sample: logprob is {} {}, wanted f32 [{}]",
        dtype_name(logprob.dtype), logprob.shape.str(), rows);
  for (int64_t r = 0; r < rows; ++r) {
    const SampleParams& p = params[r];
    CHECK(p.temperature >= 0 && p.top_p >= 0 && p.top_p <= 1 && p.min_p >= 0 && p.min_p <= 1,
          "sample: row {} has temperature {}, top_p {}, min_p {}", r, p.temperature, p.top_p, p.min_p);
    CHECK(p.forbid < vocab && (p.forbid < 0 || vocab > 1), "sample: row {} forbids id {} of {}", r, p.forbid, vocab);
  }
  if (c.on_gpu()) return device::sample(c, token, logprob, logits, params);
  reference::sample(c, token, logprob, logits, params, simd::exp_row);
}

}  // namespace lockstep
