#pragma once
// What the Hopper matmul kernels share: the walk over output tiles, stores of the accumulator's layout, and tensor maps.

#include <algorithm>

#include <cuda_bf16.h>

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"

namespace lockstep::gpu::sm90_matmul {

using bf16_t = __nv_bfloat16;
using e4m3_t = unsigned char;

constexpr int kGroupM = 16;
constexpr size_t kStagesBytesMax = size_t{200} << 10;

struct Problem {
  int m, n, k;
  int tiles_m, tiles_n;
  void* y;
  long long y_stride;
};

// Output tile `i`: down kGroupM tiles of M, then the next tile of N, so that tiles in flight share rows of w and of x in the cache.
GPU_INLINE void place_tile(const Problem& p, int i, int* tile_m, int* tile_n) {
  const int band = kGroupM * p.tiles_n, first = i / band * kGroupM, rows = min(kGroupM, p.tiles_m - first);
  *tile_m = first + i % band % rows;
  *tile_n = i % band / rows;
}

// The stages in shared memory between the thread that asks for tiles and the warpgroups that multiply, as one thread sees them. T is a kernel's Tile: its
// shape, Stage and kStages.
template <typename T>
struct Stages {
  typename T::Stage* data;
  sm90::Barrier *full, *empty;
  int at = 0;
  unsigned phase = 0;

  // By all threads of the block.
  GPU_INLINE explicit Stages(char* shared)
      : data(reinterpret_cast<typename T::Stage*>(shared)),
        full(reinterpret_cast<sm90::Barrier*>(shared + T::kStages * sizeof(typename T::Stage))), empty(full + T::kStages) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < T::kStages; ++s) {
        full[s].init(1);
        empty[s].init(T::kConsumers);
      }
      sm90::publish_barriers();
    }
    __syncthreads();
  }
  GPU_INLINE void advance() {
    if (++at == T::kStages) {
      at = 0;
      phase ^= 1;
    }
  }
};

// All of the first warpgroup: one of its threads asks for the steps of every tile of this block, as stages become free.
template <typename T>
GPU_INLINE void feed(Stages<T>& stages, const CUtensorMap& x_map, const CUtensorMap& w_map, const Problem& p, int num_tiles, int steps) {
  sm90::leave_registers<40>();
  if (threadIdx.x != 0) return;
  sm90::prefetch_map(&x_map);
  sm90::prefetch_map(&w_map);
  for (int i = static_cast<int>(blockIdx.x); i < num_tiles; i += static_cast<int>(gridDim.x)) {
    int tile_m, tile_n;
    place_tile(p, i, &tile_m, &tile_n);
    for (int step = 0; step < steps; ++step) {
      sm90::Barrier& full = stages.full[stages.at];
      stages.empty[stages.at].wait(stages.phase ^ 1);
      full.arrive_and_expect(sizeof(typename T::Stage));
      sm90::load_tile(stages.data[stages.at].x, &x_map, &full, step * T::kK, tile_m * T::kM);
      sm90::load_tile(stages.data[stages.at].w, &w_map, &full, step * T::kK, tile_n * T::kN);
      stages.advance();
    }
  }
}

GPU_INLINE void store_pair(float* y, float a, float b) { *reinterpret_cast<float2*>(y) = make_float2(a, b); }
GPU_INLINE void store_pair(bf16_t* y, float a, float b) { *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(a, b); }
GPU_INLINE void store_one(float* y, float a) { *y = a; }
GPU_INLINE void store_one(bf16_t* y, float a) { *y = __float2bfloat16_rn(a); }

// The accumulator of thread t of a warpgroup (core/gpu_sm90.h) to rows from `row` and columns from `column`, one rounding.
template <int TileN, typename Y>
GPU_INLINE void store_accumulator(const Problem& p, int row, int column, int t, const float (&acc)[TileN / 2]) {
  Y* const y = static_cast<Y*>(p.y);
#pragma unroll
  for (int j = 0; j < TileN / 8; ++j) {
    const int n = column + t % 4 * 2 + 8 * j;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int m = row + t / 32 * 16 + t % 32 / 4 + 8 * lower;
      if (m >= p.m || n >= p.n) continue;
      Y* const at = y + m * p.y_stride + n;
      if (n + 1 < p.n && (p.y_stride & 1) == 0) {
        store_pair(at, acc[4 * j + 2 * lower], acc[4 * j + 2 * lower + 1]);
      } else {
        store_one(at, acc[4 * j + 2 * lower]);
        if (n + 1 < p.n) store_one(at + 1, acc[4 * j + 2 * lower + 1]);
      }
    }
  }
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline EncodeTiled encode_tiled() {
  static const EncodeTiled f = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    GPU_CHECK(e == cudaSuccess && found != nullptr, "the driver has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return f;
}

// Rows [0, rows) of `columns` elements, read in boxes of box_rows x 128 bytes with 128-byte swizzle; beyond the edges come zeros.
template <typename T>
CUtensorMap make_map(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int box_rows) {
  CUtensorMap map;
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(row_stride) * sizeof(T)};
  const cuuint32_t box[2] = {128 / sizeof(T), static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUresult r = encode_tiled()(&map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  GPU_CHECK(r == CUDA_SUCCESS, "cuTensorMapEncodeTiled says %d for [%ld, %ld] with stride %ld; rows must start at multiples of 16 bytes", static_cast<int>(r),
            static_cast<long>(rows), static_cast<long>(columns), static_cast<long>(row_stride));
  return map;
}

inline int multiprocessors() {
  static const int n = [] {
    int device = 0, count = 0;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  return n;
}

inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace lockstep::gpu::sm90_matmul
