#include "ops/sample/sample.h"

#include "core/device.h"
#include "ops/sample/sample_cpu.h"

namespace lockstep {

namespace {

void check_tensors(TensorView token, TensorView logprob, ConstTensorView logits) {
  CHECK(logits.dtype == DType::f32 && logits.shape.rank == 2 && logits.dim(1) >= 1 && logits.dim(1) <= kSampleVocabMax,
        "sample: logits are {} {}, wanted f32 [R, V] with V from 1 to {}", dtype_name(logits.dtype), logits.shape.str(), kSampleVocabMax);
  const int64_t rows = logits.rows();
  CHECK(token.dtype == DType::i32 && token.shape == Shape({rows}), "sample: token is {} {}, wanted i32 [{}]",
        dtype_name(token.dtype), token.shape.str(), rows);
  CHECK(logprob.dtype == DType::f32 && logprob.shape == Shape({rows}), "sample: logprob is {} {}, wanted f32 [{}]",
        dtype_name(logprob.dtype), logprob.shape.str(), rows);
}

void check_params(const SampleParams* params, int64_t rows, int64_t vocab) {
  for (int64_t r = 0; r < rows; ++r) {
    const SampleParams& p = params[r];
    CHECK(p.temperature >= 0 && p.top_p >= 0 && p.top_p <= 1 && p.min_p >= 0 && p.min_p <= 1,
          "sample: row {} has temperature {}, top_p {}, min_p {}", r, p.temperature, p.top_p, p.min_p);
    CHECK(p.forbid < vocab && (p.forbid < 0 || vocab > 1), "sample: row {} forbids id {} of {}", r, p.forbid, vocab);
  }
}

}  // namespace

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, const SampleParams* params) {
  check_tensors(token, logprob, logits);
  const int64_t rows = logits.rows(), vocab = logits.dim(1);
  if (!c.on_gpu()) {
    check_params(params, rows, vocab);
    return reference::sample(c, token, logprob, logits, params, simd::exp_row);
  }
  const ArenaScope scope(*c.workspace), host_scope(*c.host);
  const TensorView packed = c.host->tensor(DType::i32, {rows * kSampleParamWords}, "sample params");
  const SampleFilters filters = pack_sample_params(packed, params, vocab);
  sample(c, token, logprob, logits, on_device(c, packed, *c.workspace), filters);
}

SampleFilters pack_sample_params(TensorView packed, const SampleParams* params, int64_t vocab) {
  CHECK(packed.dtype == DType::i32 && packed.shape.rank == 1 && packed.dim(0) % kSampleParamWords == 0, "sample: packed params are {} {}, wanted i32 [{} R]",
        dtype_name(packed.dtype), packed.shape.str(), kSampleParamWords);
  check_params(params, packed.dim(0) / kSampleParamWords, vocab);
  return device::pack_sample_params(packed, params, vocab);
}

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, ConstTensorView packed, SampleFilters filters) {
  check_tensors(token, logprob, logits);
  CHECK(c.on_gpu() && packed.dtype == DType::i32 && packed.shape == Shape({logits.rows() * kSampleParamWords}),
        "sample: packed params are {} {} for {} rows on the {}, wanted i32 [{} R] on the gpu", dtype_name(packed.dtype), packed.shape.str(), logits.rows(),
        device_name(c.device), kSampleParamWords);
  if (logits.rows() > 0) device::sample(c, token, logprob, logits, packed, filters);
}

}  // namespace lockstep
