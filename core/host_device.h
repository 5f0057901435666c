#pragma once
// Functions that host and device code share carry HOST_DEVICE; only device compilers (nvcc, clang -x hip) need to be told.

#if defined(__CUDACC__) || defined(__HIP__)
#define LOCKSTEP_DEVICE_COMPILER 1
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
