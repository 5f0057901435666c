#pragma once
// What the Hopper matmul kernels share: the walk over output tiles, the ring of stages, stores of the accumulator's layout, and tensor maps.

#include <algorithm>

#include <cuda_bf16.h>

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/matmul/matmul_gpu.h"

namespace lockstep::gpu::sm90_matmul {

using bf16_t = __nv_bfloat16;
using e4m3_t = unsigned char;

constexpr int kGroupM = 16;
constexpr size_t kStagesBytesMax = size_t{200} << 10;

// D (+)= A . B^T over a contraction K: A [rows, k], B [columns, k]. Experts cut the rows of D (products, gradients of inputs) or the contraction (gradients of
// weights, one D an expert).
struct Problem {
  int rows, columns, k;  // of all experts together where they cut it, otherwise of each
  int tiles_m, tiles_n;  // of D; tiles_m is not used where experts cut the rows
  int experts;
  const int* offsets;    // null: one expert, everything
  int k_segment;         // 0: none
  void* y;
  long long y_stride, y_expert_stride;
  bool y_is_f32, accumulate, y_pairs;  // y_pairs: two neighbouring elements at even columns may be stored as one
};

// One tile of D, and the part of the contraction that it sums.
struct Tile {
  int expert, row, row_end, column;
  int k_begin, k_end;
};

// Which tiles there are, and where. CutK: experts cut the contraction. By all threads of the block at first; the caller's barrier must follow.
template <int TileM, int TileN, bool CutK>
class Walk {
 public:
  GPU_INLINE Walk(const Problem& p, int* first_tile) : p_(p), first_tile_(first_tile) {
    if (CutK || p.offsets == nullptr || threadIdx.x >= 32) return;
    // One warp counts: each lane the tiles of neighbouring experts, then the lanes' sums from left to right.
    const int lane = static_cast<int>(threadIdx.x), each = (p.experts + 31) / 32, begin = lane * each, end = min(begin + each, p.experts);
    int mine = 0;
    for (int e = begin; e < end; ++e) mine += tiles_of(e);
    int sum = mine;
    for (int d = 1; d < 32; d *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += left;
    }
    int at = sum - mine;
    for (int e = begin; e < end; ++e) {
      first_tile[e] = at;
      at += tiles_of(e);
    }
    if (lane == 31) first_tile[p.experts] = sum;
  }
  // After the barrier.
  GPU_INLINE int count() const {
    if (!CutK && p_.offsets != nullptr) return first_tile_[p_.experts];
    return p_.tiles_m * p_.tiles_n * p_.experts;
  }
  // Tile i: down kGroupM tiles of rows, then the next of columns, so that tiles in flight share both operands in the cache.
  GPU_INLINE Tile at(int i) const {
    Tile t;
    int tiles_m = p_.tiles_m;
    t.expert = 0;
    int base = 0;
    t.row_end = p_.rows;
    t.k_begin = 0;
    t.k_end = p_.k;
    if (CutK) {
      t.expert = i / (tiles_m * p_.tiles_n);
      i -= t.expert * tiles_m * p_.tiles_n;
      if (p_.offsets != nullptr) {
        t.k_begin = __ldg(p_.offsets + t.expert);
        t.k_end = __ldg(p_.offsets + t.expert + 1);
      }
    } else if (p_.offsets != nullptr) {
      int beyond = p_.experts;  // the last expert whose first tile is not after i: those without rows have none
      while (beyond - t.expert > 1) {
        const int middle = (t.expert + beyond) / 2;
        if (first_tile_[middle] <= i) {
          t.expert = middle;
        } else {
          beyond = middle;
        }
      }
      i -= first_tile_[t.expert];
      base = __ldg(p_.offsets + t.expert);
      t.row_end = __ldg(p_.offsets + t.expert + 1);
      tiles_m = (t.row_end - base + TileM - 1) / TileM;
    }
    const int band = kGroupM * p_.tiles_n, first = i / band * kGroupM, rows = min(kGroupM, tiles_m - first);
    t.row = base + (first + i % band % rows) * TileM;
    t.column = i % band / rows * TileN;
    return t;
  }

 private:
  GPU_INLINE int tiles_of(int e) const { return (__ldg(p_.offsets + e + 1) - __ldg(p_.offsets + e) + TileM - 1) / TileM * p_.tiles_n; }
  const Problem& p_;
  int* first_tile_;
};

// The stages in shared memory between the thread that asks for tiles and the warpgroups that multiply, as one thread sees them. T is a kernel's Shape: its
// Stage, kStages and kConsumers.
template <typename T>
struct Stages {
  typename T::Stage* data;
  sm90::Barrier *full, *empty;
  int at = 0;
  unsigned phase = 0;

  // By all threads of the block; the caller's barrier must follow.
  GPU_INLINE explicit Stages(char* shared)
      : data(reinterpret_cast<typename T::Stage*>(shared)),
        full(reinterpret_cast<sm90::Barrier*>(shared + T::kStages * sizeof(typename T::Stage))), empty(full + T::kStages) {
    if (threadIdx.x != 0) return;
    for (int s = 0; s < T::kStages; ++s) {
      full[s].init(1);
      empty[s].init(T::kConsumers);
    }
    sm90::publish_barriers();
  }
  GPU_INLINE int* first_tile() const { return reinterpret_cast<int*>(empty + T::kStages); }
  GPU_INLINE void advance() {
    if (++at == T::kStages) {
      at = 0;
      phase ^= 1;
    }
  }
};
template <typename T>
constexpr size_t shared_bytes() {
  return T::kStages * (sizeof(typename T::Stage) + 2 * sizeof(sm90::Barrier)) + (kExpertsMax + 1) * sizeof(int);
}

GPU_INLINE void store_pair(float* y, float a, float b) { *reinterpret_cast<float2*>(y) = make_float2(a, b); }
GPU_INLINE void store_pair(bf16_t* y, float a, float b) { *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(a, b); }
GPU_INLINE void store_one(float* y, float a) { *y = a; }
GPU_INLINE void store_one(bf16_t* y, float a) { *y = __float2bfloat16_rn(a); }
GPU_INLINE void add_pair(float* y, float a, float b) {
  const float2 there = *reinterpret_cast<const float2*>(y);
  store_pair(y, there.x + a, there.y + b);
}

// The accumulator of thread t of a warpgroup (core/gpu_sm90.h), one rounding. `write(at, a, b, both)`: to the element at `at` and, if both, the next.
template <int TileN, typename Y, typename Write>
GPU_INLINE void each_pair(const Problem& p, const Tile& tile, int row, int t, const float (&acc)[TileN / 2], Write write) {
  Y* const y = static_cast<Y*>(p.y) + tile.expert * p.y_expert_stride;
#pragma unroll
  for (int j = 0; j < TileN / 8; ++j) {
    const int n = tile.column + t % 4 * 2 + 8 * j;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int m = row + t / 32 * 16 + t % 32 / 4 + 8 * lower;
      if (m < tile.row_end && n < p.columns) write(y + m * p.y_stride + n, acc[4 * j + 2 * lower], acc[4 * j + 2 * lower + 1], n + 1 < p.columns);
    }
  }
}
// Rows of the tile from `row` on.
template <int TileN>
GPU_INLINE void store_accumulator(const Problem& p, const Tile& tile, int row, int t, const float (&acc)[TileN / 2]) {
  if (p.accumulate) {
    each_pair<TileN, float>(p, tile, row, t, acc, [&](float* at, float a, float b, bool both) {
      if (both && p.y_pairs) return add_pair(at, a, b);
      store_one(at, *at + a);
      if (both) store_one(at + 1, at[1] + b);
    });
    return;
  }
  const auto write = [&](auto* at, float a, float b, bool both) {
    if (both && p.y_pairs) return store_pair(at, a, b);
    store_one(at, a);
    if (both) store_one(at + 1, b);
  };
  if (p.y_is_f32) {
    each_pair<TileN, float>(p, tile, row, t, acc, write);
  } else {
    each_pair<TileN, bf16_t>(p, tile, row, t, acc, write);
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

// [slabs, rows, columns], slabs rows * row_stride apart, read in boxes of box_rows x 128 bytes of one slab with 128-byte swizzle; beyond the edges come zeros.
template <typename T>
CUtensorMap make_map(const void* data, int64_t slabs, int64_t rows, int64_t columns, int64_t row_stride, int box_rows) {
  CUtensorMap map;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(slabs)};
  const cuuint64_t pitch = static_cast<cuuint64_t>(row_stride) * sizeof(T), stride[2] = {pitch, pitch * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[3] = {128 / sizeof(T), static_cast<cuuint32_t>(box_rows), 1}, step[3] = {1, 1, 1};
  const CUresult r = encode_tiled()(&map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), size, stride,
                                    box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  GPU_CHECK(r == CUDA_SUCCESS, "cuTensorMapEncodeTiled says %d for [%ld, %ld, %ld] with stride %ld; rows must start at multiples of 16 bytes", static_cast<int>(r),
            static_cast<long>(slabs), static_cast<long>(rows), static_cast<long>(columns), static_cast<long>(row_stride));
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

// Problem::y_pairs: elements of even columns start at multiples of two.
inline bool stores_pairs(const void* y, int64_t stride, bool f32) { return stride % 2 == 0 && reinterpret_cast<uintptr_t>(y) % (f32 ? 8 : 4) == 0; }
inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
// The most tiles of rows there can be: an expert's last tile may be part full.
inline int64_t most_tiles_m(int64_t m, int64_t experts, int64_t tile_m) { return pieces(m, tile_m) + std::min(experts, m) - 1; }

}  // namespace lockstep::gpu::sm90_matmul
