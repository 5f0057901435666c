#pragma once
// sample: draws one token a row and returns the log of the probability it was drawn with.
//   logits [R, V] f32;  token [R] i32, logprob [R] f32 out;  params: R records (host or device memory, plain structs)
// Order: y = logits / temperature -> top-k -> renormalise -> top-p -> renormalise -> min-p -> renormalise -> draw (rl spec 3.1).
//   temperature == 0: the argmax, lowest id wins ties, logprob at temperature 1; top-k, top-p and min-p do not apply.
//   top_k <= 0 or >= V, top_p == 1 and min_p == 0 are off; with all off logprob = y_a - row_stats(...).lse, bit for bit what
//   select_logprob returns.
//   With a filter on: logprob = y_a - logsumexp over the kept set (kept ids ascending, 16-lane tree).
//   Ties at the top-k boundary and in the top-p order go to the lower id; at least one token is kept. forbid (if >= 0): that id
//   is never drawn (min_new_tokens masks the stop id this way); it is taken out before top-k and then counts as a filter, at
//   temperature 0 too.
//   With e = exp_f32(y - max), max over all ids but forbid: top-p keeps the shortest prefix of (y descending, id ascending) whose
//   f64 sum of e reaches top_p times the sum over the set (ids ascending); min-p keeps e >= min_p.
// Draw: inverse CDF over the kept ids in ascending order with u = uniform_open(philox(seed, RngPurpose::sample, prompt_id,
//   sample_idx, position)[0]); the first id whose running f64 sum of e exceeds u * total, total being the whole of the same sum.
// Logits are finite; NaN among them still gives a valid id, with logprob NaN unless a filter took the NaN out.
// The result is a function of the row and its params alone. Scratch: V * 12 bytes a worker. Source: rl spec 3.

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

void sample(Context& c, TensorView token, TensorView logprob, ConstTensorView logits, const SampleParams* params);

}  // namespace lockstep
