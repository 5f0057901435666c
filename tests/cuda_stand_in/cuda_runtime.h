#pragma once
// What kernel sources use of CUDA's runtime, declared for `clang -x cuda -nocudainc`: enough to compile them to PTX where there is no CUDA toolkit
// (tests/sm90_test.sh), and nothing to run. Names and meanings are those of the CUDA 13 runtime API and programming guide.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __grid_constant__ __attribute__((grid_constant))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

#include <__clang_cuda_builtin_vars.h>

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  __host__ __device__ constexpr operator uint3() const { return {x, y, z}; }
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
__host__ __device__ inline float2 make_float2(float x, float y) { return {x, y}; }
__host__ __device__ inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
__host__ __device__ inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
inline constexpr unsigned long long cudaEnableDefault = 0;
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags, cudaDriverEntryPointQueryResult* result = nullptr);
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
// How clang spells <<<>>>.
extern "C" int cudaConfigureCall(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr);
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr);
extern "C" cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes, cudaStream_t stream);

// Device functions, as the instructions that they are.
__device__ inline void __syncwarp(unsigned mask = 0xffffffffu) { __nvvm_bar_warp_sync(mask); }
__device__ inline unsigned __ballot_sync(unsigned mask, int vote) { return __nvvm_vote_ballot_sync(mask, vote != 0); }
__device__ inline int __all_sync(unsigned mask, int vote) { return __nvvm_vote_all_sync(mask, vote != 0); }
__device__ inline int __popc(unsigned v) { return __builtin_popcount(v); }
__device__ inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
__device__ inline int __ffsll(long long v) { return __builtin_ffsll(v); }
__device__ inline float fmaf(float a, float b, float c) { return __nvvm_fma_rn_f(a, b, c); }
__host__ __device__ inline int min(int a, int b) { return a < b ? a : b; }
__host__ __device__ inline int max(int a, int b) { return a > b ? a : b; }
__device__ inline float fmaxf(float a, float b) { return __nvvm_fmax_f(a, b); }
__device__ inline float nearbyintf(float v) {
  float r;
  asm("cvt.rni.f32.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ inline float sqrtf(float v) { return __nvvm_sqrt_rn_f(v); }
__device__ inline size_t __cvta_generic_to_shared(const void* p) {
  return (size_t)(const __attribute__((address_space(3))) void*)p;  // only the old cast changes address spaces
}
template <typename T>
__device__ T __ldg(const T* p) {
  return *p;
}
template <typename T>
__device__ void __stwb(T* p, T v) {
  *p = v;
}
// A shuffle of 4 or 8 bytes is one or two of 32 bits.
__device__ inline unsigned atomicAdd(unsigned* to, unsigned v) { return __atomic_fetch_add(to, v, __ATOMIC_RELAXED); }
__device__ inline unsigned __byte_perm(unsigned a, unsigned b, unsigned at) { return __nvvm_prmt(a, b, at); }
__device__ inline unsigned __umulhi(unsigned a, unsigned b) { return __nvvm_mulhi_ui(a, b); }
__device__ inline float fabsf(float v) { return __builtin_fabsf(v); }
#define LOCKSTEP_SHUFFLE(name, instruction, last)                                                                     \
  template <typename T>                                                                                              \
  __device__ inline T name(unsigned mask, T v, int by) {                                                             \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);                                                                 \
    int words[sizeof(T) / 4];                                                                                        \
    __builtin_memcpy(words, &v, sizeof v);                                                                           \
    for (int& w : words) w = instruction(mask, w, by, last);                                                         \
    __builtin_memcpy(&v, words, sizeof v);                                                                           \
    return v;                                                                                                        \
  }
LOCKSTEP_SHUFFLE(__shfl_sync, __nvvm_shfl_sync_idx_i32, 0x1f)
LOCKSTEP_SHUFFLE(__shfl_xor_sync, __nvvm_shfl_sync_bfly_i32, 0x1f)
LOCKSTEP_SHUFFLE(__shfl_up_sync, __nvvm_shfl_sync_up_i32, 0)
