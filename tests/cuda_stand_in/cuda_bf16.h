#pragma once
// What kernel sources use of CUDA's bf16. See cuda_runtime.h beside this file.

#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
__device__ inline float __bfloat162float(__nv_bfloat16 v) { return __builtin_bit_cast(float, static_cast<unsigned>(v.bits) << 16); }
__device__ inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  __nv_bfloat16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}
__device__ inline __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }
__device__ inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return __builtin_bit_cast(__nv_bfloat162, both);
}
