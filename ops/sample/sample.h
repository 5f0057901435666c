#pragma once
// sample: draws one token a row and returns the log of the probability it was drawn with.
//   logits [R, V] f32;  token [R] i32, logprob [R] f32 out;  params: R records in host memory
// Order: y = logits / temperature -> top-k -> renormalise -> top-p -> renormalise -> min-p -> renormalise -> draw (rl spec 3.1).
//   temperature == 0: the argmax, lowest id wins ties, logprob at temperature 1; top-k, top-p and min-p do not apply.
//   top_k <= 0 or >= V, top_p == 1 and min_p == 0 are off; with all off logprob = y_a - row_stats(...).lse, bit for bit what
//   select_logprob returns.
//   With a filter on: logprob = y_a - logsumexp over the kept set (kept ids ascending, 16-lane tree).
//   Ties at the top-k boundary and in the top-p order go to the lower id; at least one token is kept. forbid (if >= 0): that id
//   is never drawn (min_new_tokens masks the stop id this way); it is taken out before top-k and then counts as a filter, at
//   temperature 0 too.
//   With e = exp_f32(y - max), max over all ids but forbid, an id's weight is the integer floor(e * 2^40): sums of weights are exact in any order, so that
//   any number of threads find the same token, and what is lost is less than u resolves. top-p keeps the shortest prefix of (y descending, id ascending)
//   whose weight reaches top_p times the set's; min-p keeps e >= min_p.
// Draw: inverse CDF over the kept ids in ascending order with u = uniform_open(philox(seed, RngPurpose::sample, prompt_id,
//   sample_idx, position)[0]); the first id whose running sum of weights exceeds u * total. Both comparisons are of sums and products in f64.
// Logits are finite; NaN among them still gives a valid id, with logprob NaN unless a filter took the NaN out.
// The result is a function of the row and its params alone. V is at most kSampleVocabMax. Source: rl spec 3.
// Scratch: V * 12 bytes a worker; on the GPU, if a row has a filter or forbid, V * 12 bytes for each row, of up to 128 at a time.

#include "core/context.h"

namespace lockstep {

struct SampleParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;
  int32_t forbid = -1;
  uint64_t seed = 0;
  uint64_t prompt_id = 0;
  uint32_t sample_idx = 0;
  uint32_t position = 0;
};

inline constexpr int64_t kSampleVocabMax = int64_t{1} << 22;  // so many weights of 2^40 fit in 64 bits

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, const SampleParams* params);

// On the GPU, the same in two steps, for a caller whose kernels are enqueued again and again (DeviceGraph) and read other params each time. pack_sample_params writes, on the
// host, params of rows as kernels read them; the caller brings them to the context's memory. Which kernels are needed the filters say: `some` serves every mixture.
enum class SampleFilters : uint8_t { none, some, all };  // how many rows have a filter or forbid
inline constexpr int64_t kSampleParamWords = 9;
SampleFilters pack_sample_params(TensorView packed, const SampleParams* params, int64_t vocab);  // packed [R * kSampleParamWords] i32
void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, ConstTensorView packed, SampleFilters filters);

}  // namespace lockstep
