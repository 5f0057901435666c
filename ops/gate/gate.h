#pragma once
// The router: which K experts a token visits and with what weight. s(z) = sqrt(softplus(z)).
// route_scored: ids = top K of s(z) + bias, ties to the lower id; route_hashed: ids = table[token].
//   weight_i = s(z[id_i]) / (sum_i s(z[id_i]) + 1e-20) * factor, without the bias
//   z      [T, E] f32     bias [E] f32 (empty: none)     tokens [T] i32     table [V, K] i32, ids in [0, E) (CHECK, on the CPU)
//   ids    [T, K] i32     ascending in every row: slot order is ascending expert id; a repeated id of a hash row keeps both slots
//   weight [T, K] f32
// route_backward (both kinds): dz [T, E] f32, written: zero for unselected experts. dweight [T, K] f32. Repeated ids add.
//   ds_j = (factor / S) (dweight_j - sum_i dweight_i s_i / S), S = sum_i s_i + 1e-20
//   dz = ds * sigmoid(z) / (2 s), 0 where s == 0
// Numerics: f32; sums over slots run in ascending slot order. Row contract holds. K <= kMaxExpertsPerToken, E <= kMaxExperts.
// Scratch: none. Source: V4 spec 2.8, 6.4.

#include "core/context.h"

namespace lockstep {

inline constexpr int64_t kMaxExpertsPerToken = 16;
inline constexpr int64_t kMaxExperts = 1024;

void route_scored(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView bias, float factor);
void route_hashed(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView tokens,
                  ConstTensorView table, float factor);
void route_backward(Context& c, TensorView dz, ConstTensorView dweight, ConstTensorView ids, ConstTensorView z,
                    float factor);

}  // namespace lockstep
