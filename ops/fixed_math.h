#pragma once
// Elementary functions and reductions whose bits never change: not with the SIMD width, the thread count, the C library
// or the place of an element in a call. Every op uses these and no other exp, log or sum.
//
// Each function is one fixed sequence of IEEE f32 operations with explicit fused multiply-adds. fixed_math-inl.h holds the
// same sequences for Highway vectors; fixed_math_test.cc compares the two bit for bit and against f64 libm.
// Errors measured there: exp and log within 2 ulp over the normal range.

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace lockstep {

// The operations that the functions below are made of, as each compiler spells the single instruction.
namespace ieee {
#if defined(__HIP__)
HOST_DEVICE inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HOST_DEVICE inline float round_even(float x) { return __builtin_rintf(x); }
HOST_DEVICE inline float sqrt(float x) { return __builtin_sqrtf(x); }
#elif defined(__CUDACC__)
HOST_DEVICE inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
HOST_DEVICE inline float round_even(float x) { return ::nearbyintf(x); }
HOST_DEVICE inline float sqrt(float x) { return ::sqrtf(x); }
#else
inline float fma(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float round_even(float x) { return std::nearbyintf(x); }
inline float sqrt(float x) { return std::sqrt(x); }
#endif
}  // namespace ieee

// exp(x). Results below the smallest normal are 0, above the largest finite are +inf; NaN stays NaN.
HOST_DEVICE inline float exp_f32(float x) {
  if (!(x == x)) return x;
  if (x < -87.33654f) return 0.0f;
  if (x > 88.72283f) return std::numeric_limits<float>::infinity();
  const float n = ieee::round_even(x * 1.44269504088896341f);
  float r = ieee::fma(n, -0.693359375f, x);
  r = ieee::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;  // Cephes expf minimax on [-ln2/2, ln2/2]
  p = ieee::fma(p, r, 1.3981999507e-3f);
  p = ieee::fma(p, r, 8.3334519073e-3f);
  p = ieee::fma(p, r, 4.1665795894e-2f);
  p = ieee::fma(p, r, 1.6666665459e-1f);
  p = ieee::fma(p, r, 5.0000001201e-1f);
  const float y = ieee::fma(p, r * r, r) + 1.0f;
  // 2^n in two factors, so that n = 128 does not overflow before the product does.
  const int32_t k = static_cast<int32_t>(n), half = k >> 1;
  const float s1 = std::bit_cast<float>((half + 127) << 23), s2 = std::bit_cast<float>((k - half + 127) << 23);
  return y * s1 * s2;
}

// ln(x) for x > 0 and normal; x == 0 gives -inf, x < 0 NaN, +inf +inf, NaN NaN. Subnormal x is treated as the smallest normal.
HOST_DEVICE inline float log_f32(float x) {
  if (!(x >= 0.0f)) return std::numeric_limits<float>::quiet_NaN();
  if (x == 0.0f) return -std::numeric_limits<float>::infinity();
  if (x == std::numeric_limits<float>::infinity()) return x;
  if (x < 1.17549435e-38f) x = 1.17549435e-38f;
  const int32_t u = std::bit_cast<int32_t>(x);
  int32_t e = (u >> 23) - 126;
  float m = std::bit_cast<float>((u & 0x007fffff) | 0x3f000000);  // [1/2, 1)
  if (m < 0.707106781186547524f) {
    e -= 1;
    m = m + m;
  }
  m = m - 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;  // Cephes logf
  p = ieee::fma(p, m, -1.1514610310e-1f);
  p = ieee::fma(p, m, 1.1676998740e-1f);
  p = ieee::fma(p, m, -1.2420140846e-1f);
  p = ieee::fma(p, m, 1.4249322787e-1f);
  p = ieee::fma(p, m, -1.6668057665e-1f);
  p = ieee::fma(p, m, 2.0000714765e-1f);
  p = ieee::fma(p, m, -2.4999993993e-1f);
  p = ieee::fma(p, m, 3.3333331174e-1f);
  const float fe = static_cast<float>(e);
  float y = p * m * z;
  y = ieee::fma(fe, -2.12194440e-4f, y);
  y = ieee::fma(-0.5f, z, y);
  return ieee::fma(fe, 0.693359375f, m + y);
}

// ln(1 + x) for x >= 0 (Kahan's correction of the rounding of 1 + x).
HOST_DEVICE inline float log1p_f32(float x) {
  const float u = 1.0f + x;
  if (u == 1.0f) return x;
  if (u == std::numeric_limits<float>::infinity()) return u;
  return log_f32(u) * (x / (u - 1.0f));
}

HOST_DEVICE inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
HOST_DEVICE inline float softplus_f32(float x) { return x > 20.0f ? x : log1p_f32(exp_f32(x)); }
HOST_DEVICE inline float sqrtsoftplus_f32(float x) { return ieee::sqrt(softplus_f32(x)); }

// The one reduction tree. Element i belongs to virtual lane i mod 16, each lane adds its elements in order from zero, then
// lanes fold: i + (i + 8), i + (i + 4), i + (i + 2), i + (i + 1). Depends on n alone.
inline constexpr int kTreeLanes = 16;
inline float fold_lanes(float* lane) {
  for (int width = kTreeLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i] + lane[i + width];
  return lane[0];
}
// sum_i term(i) by that tree.
template <typename Term>
float tree_sum(int64_t n, Term term) {
  float lane[kTreeLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kTreeLanes] += term(i);
  return fold_lanes(lane);
}
// sum_i a(i) * b(i) by that tree with fused multiply-adds in each lane.
template <typename A, typename B>
float tree_dot(int64_t n, A a, B b) {
  float lane[kTreeLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kTreeLanes] = std::fmaf(a(i), b(i), lane[i % kTreeLanes]);
  return fold_lanes(lane);
}

}  // namespace lockstep
