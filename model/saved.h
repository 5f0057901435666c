#pragma once
// What one layer computes on the way and its backward reads again. Forward fills it always; whether the memory outlives the call (training)
// or goes with the workspace (rollout) is the caller's choice of arena. Shapes: T tokens, n streams, D width; see docs/architecture.md.

#include "core/tensor.h"
#include "ops/hyperconn/hyperconn.h"

namespace lockstep {

// One mHC site: what feeds the branch, and the branch output [T, D].
struct SavedSite : HyperFeed {
  TensorView y;
};

// H heads and g groups: those of the rank.
struct SavedAttention {
  TensorView qr_in, qr_inv, qr;        // [T, Rq] before the norm, [T] f32, [T, Rq]
  TensorView q_in, q_inv, q;           // [T, H*d] before the head norm, [T*H] f32, [T, H*d] rotated
  TensorView kv_in, kv_inv, kv;        // [T, d] before the norm, [T] f32, [T, d] rotated
  TensorView proj;                     // [T, 2*c*d] f32 kv | gate of the compressor
  TensorView pooled, pooled_inv;       // [E, d] before the norm, [E] f32
  TensorView selected;                 // [T, k] i32, csa
  TensorView o, lse;                   // [T, H*d] un-rotated, [T, H] f32
  TensorView a;                        // [T, g*Ro]
};

struct SavedMoe {
  TensorView z;                             // [T, E] f32 router logits
  TensorView ids, weight;                   // [T, K] i32, [T, K] f32
  TensorView offsets, row_token, slot_row;  // [E + 1], [R], [T, K] i32, R = T*K
  // Rows as the experts of this rank met them: its own R, or the A that came here if experts are spread over an ep group.
  TensorView rho;                           // [R or A] f32 weight of each row
  TensorView g, u;                          // [R or A, I]
  TensorView counts, x;                     // spread alone: [ep, E] i64 rows that each rank has for each expert; [A, D]
  TensorView shared_g, shared_u;            // [T, I]
};

struct SavedLayer {
  SavedSite attn_site, ffn_site;
  SavedAttention attention;
  SavedMoe moe;
  TensorView x_mid;  // [T, n, D] streams between the two sites
};

}  // namespace lockstep
