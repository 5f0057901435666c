#pragma once
// rope: rotates the trailing r channels of each head by the row's position, interleaved pairs (e, o):
//   e' = e cos a - o sin a,  o' = e sin a + o cos a,  a = position * theta_j;  inverse = true uses -a.
//   x     [T, H * d]  f32 | bf16   rotated in place; row_stride may exceed H * d
//   pos   [T] i32
//   table [P, r]      f32, r <= kMaxRopeDim: for each position cos a_0, sin a_0, cos a_1, sin a_1, ...; every pos in [0, P) (CHECK on the CPU)
//   heads H, head width d = x.dim(1) / H >= r
// The backward of a rotation is the inverse rotation of the gradient (f32): call rope with the other flag.
// Numerics: e' = fma(e, cos, -(o * sin)), o' = fma(e, sin, o * cos) in f32, one rounding. Row contract holds.
// rope_frequencies: theta_j = base^(-2j/r), j < r/2, with YaRN's interpolation when factor > 1 (V4 spec 2.0): the power rounded
//   to f32, its reciprocal and the interpolation in f32, as the reference has it.
// rope_table fills rows [0, P): angles are the f32 product f32(p) * theta_j, cos and sin of that f32 value rounded to f32.
// Scratch: none. Source: V4 spec 2.0; Su et al. 2021; Peng et al. 2023 (YaRN).

#include "core/context.h"

namespace lockstep {

inline constexpr int64_t kMaxRopeDim = 1024;

struct RopeScaling {
  float factor = 1.0f;  // 1: plain rotation
  int64_t original_positions = 0;
  float beta_fast = 32.0f;
  float beta_slow = 1.0f;
  bool operator==(const RopeScaling&) const = default;
};

void rope_frequencies(float* theta, int64_t rope_dim, double base, const RopeScaling& scaling);  // theta [rope_dim / 2]
void rope_table(TensorView table, double base, const RopeScaling& scaling);                        // table [P, r] f32
void rope(Context& c, TensorView x, ConstTensorView pos, ConstTensorView table, int64_t heads, bool inverse);

}  // namespace lockstep
