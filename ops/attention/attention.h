#pragma once
// attention: every query head reads one shared list of rows, which are keys and values at once, plus a sink in the denominator.
//
// The list of query t at position p of its sequence, in this order:
//   window:     positions max(0, p - w + 1) .. p, ascending. A position inside this call is a row of `kv`, an earlier one is
//               ring[slot, position mod w];
//   compressed: entries s < (p + 1) / ratio (integer division) in ascending s, all of them or, with `selected`, those listed.
//   l_j = scale * (q . row_j);  M = max(max_j l_j, sink_h);  P_j = exp(l_j - M) / (sum_i exp(l_i - M) + exp(sink_h - M));  o = sum_j P_j row_j
//   q        [T, H, d]           f32 | bf16 (rotated)
//   kv       [T, d]              dtype of q (rotated): this call's rows
//   ring     [slots, w, d]       dtype of q; may be empty when every sequence starts at position 0
//   entries  [pages*per_page, d] dtype of q; empty when ratio == 0
//   selected [T, k] i32          ascending, -1 padding at the end; empty: all visible entries
//   sink     [H] f32
//   o        [T, H, d]           dtype of q (not yet un-rotated)
//   lse      [T, H] f32          M + log(denominator), sink included; empty if not wanted
// Numerics: l_j is one fma chain over d ascending, times scale; e_j = exp_f32(l_j - M); the denominator adds e_j in list order, then the
//   sink's; o = (fma chain over the list of e_j * row_j) / denominator; one rounding. Row contract holds.
// attention_backward: every sequence must start at position 0. P is recomputed from lse: P_j = exp_f32(l_j - lse).
//   do, dq [T, H, d] f32; dkv [T, d] f32 written; dentries_accum [pages*per_page, d] f32 added to; dsink_accum [H] f32 added to
//   o as returned by attention; delta = o . do.
//   dP_j = do . row_j (one chain); dl_j = P_j * (dP_j - delta) * scale; dq = chain over the list of dl_j * row_j; the gradient of
//   a row is one chain over its queries and their heads, ascending, of dl_j * q and then P_j * do.
//   Deterministic: one thread sums a sequence's key gradients over its queries in ascending order; sinks add over sequences in
//   order. Two sequences of a call may not share a page.
// On the GPU: the same bits for at most 512 channels. On Hopper, bf16 with 128, 256 or 512 channels (rows at multiples of 16 bytes) takes the tensor cores, with the
//   order of attention_gpu_sm90.cu and attention_gpu_sm90_backward.cu: f32 sums in steps of 16, the softmax in pieces of 64 rows of the list, the unit's exponential
//   (2^-22 of the result), e_j and dl_j rounded to bf16. The row contract holds there too, a head's bits do not depend on how many there are, and gradients are
//   deterministic. Scratch of backward: up to 1 GiB, and the output's gradient in bf16.
// Scratch on the CPU, a worker: f32 copies, plain and transposed, of the rows of one tile of 32 queries (w + 31 window rows and the longest
//   list of entries), and H * list length logits (twice that in backward).
// Source: V4 spec 2.3, 2.5, 6.4.

#include "core/context.h"
#include "ops/sequence/sequence.h"

namespace lockstep {

struct AttentionShape {
  int64_t window = 0;
  int64_t ratio = 0;     // 0: no compressed entries
  int64_t per_page = 0;  // entries a page, page_tokens / ratio
  float scale = 0.0f;    // head_dim^(-1/2)
};

struct AttentionKeys {
  ConstTensorView kv, ring, entries, selected;
};

void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys,
               ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape);
void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                        ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q,
                        const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                        const AttentionShape& shape);

}  // namespace lockstep
