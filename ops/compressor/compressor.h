#pragma once
// compress: pools groups of m tokens into one entry by a per-channel softmax over the group's gates.
//
//   proj [T, 2*c*dc] f32: columns [0, c*dc) are kv, [c*dc, 2*c*dc) the gate without position bias; c = 2 when overlapping, else 1
//   ape  [m, c*dc] f32, added to the gate by position mod m
//   ring [slots, c*m, 2*c*dc] f32: proj rows of earlier positions at position mod (c*m) (kept by ring_update); may be empty when every
//        sequence starts at 0
//   pooled [E, dc] f32 | bf16: one row an entry of `entries`, before norm and rotation; zeros for padding
// Entry s, overlapping: slots 0..m-1 are half A (channels [0, dc)) of tokens (s-1)m .. sm-1, slots m..2m-1 half B ([dc, 2dc)) of tokens
//   sm .. sm+m-1; for s = 0 the first m slots are absent. Not overlapping: m slots, tokens sm .. sm+m-1.
//   a = softmax over slots of (gate + ape), pooled = sum_slots a * kv, channel by channel.
// Numerics: f32; max over slots, e = exp_f32(g - max), denominator adds e in slot order, numerator fma chain in slot order, one division, one
//   rounding. Row contract holds: an entry depends on its own tokens' rows alone, from this call or from the ring.
// compress_backward (sequences start at 0): dproj [T, 2*c*dc] f32 written (zero for tokens in no entry), dape_accum [m, c*dc] f32.
//   dpooled [E, dc] f32. Formulas: V4 spec 6.4. dape is summed over entries in ascending order.
// Scratch: c*m row pointers a worker. Source: V4 spec 2.4, 2.7.

#include "core/context.h"
#include "ops/sequence/sequence.h"

namespace lockstep {

struct CompressorShape {
  int64_t ratio = 4;  // m
  bool overlap = true;
  int64_t width = 0;  // dc
  int64_t halves() const { return overlap ? 2 : 1; }          // c
  int64_t proj_width() const { return 2 * halves() * width; }  // columns of proj
  int64_t ring_rows() const { return halves() * ratio; }
};

void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);

}  // namespace lockstep
