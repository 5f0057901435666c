#pragma once
// index_select: which compressed entries each query of a CSA layer attends.
//   score[t, s] = sum_h weight[t, h] * max(0, q[t, h, :] . key_s)   over visible s < (p + 1) / ratio
//   selected[t, :] = the top min(k, visible) entries, larger score first, ties to the lower index, listed in ascending index; -1 after them
//   q      [T, H, di]           f32 | bf16 (rotated)
//   weight [T, H]               f32, already scaled; signed
//   keys   [pages*per_page, di] dtype of q
//   selected [T, k] i32
// When visible <= k every visible entry is listed and no score is computed.
// Numerics: dot is one fma chain over di ascending; the sum over heads is the 16-lane tree of weight * relu(dot) (tree_dot). Row contract holds.
//   On a GPU with matrix units a dot of bf16 in heads of 64 or 128 channels, 16, 32 or 64 of them, is the unit's sum, channels ascending in steps of 16; the tree is
//   the same (indexer_gpu.h). The choice is by dtype and shape alone, so that decode, prefill and training choose the same entries.
// No gradient exists through this op (V4 spec 6.1). Scratch, a worker: scores of 16 queries, one block of keys; on the GPU the
// scores of as many queries as 512 MiB hold.
// Source: V4 spec 2.5, 2.6.

#include "core/context.h"
#include "ops/sequence/sequence.h"

namespace lockstep {

struct IndexerShape {
  int64_t ratio = 4;
  int64_t per_page = 0;
};

void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape);

}  // namespace lockstep
