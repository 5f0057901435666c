#pragma once
// What the Hopper matmul kernels share: the walk over output tiles, the ring of stages, the way out for results, and tensor maps.

#include <algorithm>
#include <span>

#include <cuda_bf16.h>

#include "core/fixed_list.h"
#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/matmul/matmul_gpu.h"

namespace lockstep::gpu::sm90_matmul {

using bf16_t = __nv_bfloat16;
using e4m3_t = unsigned char;

constexpr int kGroupM = 16;
constexpr size_t kStagesBytesMax = size_t{192} << 10;
constexpr int kBoxBytes = 64 * 128;  // of the result on its way out: 64 rows of 128 bytes

// D (+)= A . B^T over a contraction K: A [rows, k], B [columns, k]. Experts cut the rows of D (products, gradients of inputs) or the contraction (gradients of
// weights, one D an expert). Of the products of a launch each has operands and a D of its own; everything here is common to all.
struct Problem {
  int rows, k;           // of all experts together where they cut it, otherwise of each
  int tiles_m, tiles_n;  // of D; tiles_m is not used where experts cut the rows, tiles_n counts those of all products
  int experts;
  const int* offsets;    // null: one expert, everything
  int k_segment;         // 0: none
  int a_box;             // rows of A that are read together, a multiple of 8 (operands along K)
  bool accumulate;
};

// Where the D of a product goes.
struct Result {
  void* y;
  long long stride, expert_stride;
  int columns, first_tile;  // first_tile: of columns, among those of all products
  bool is_f32, pairs;       // pairs: two neighbouring elements at even columns may be stored as one
  bool boxes;               // there is a map of y, and rows may be stored through it
};

template <int Count>
struct Products {
  CUtensorMap a[Count], b[Count], y[Count];
  Result result[Count];
  int count;
};

// One tile of D, and the part of the contraction that it sums.
struct Tile {
  int product, expert, row, row_end, column;
  int k_begin, k_end;
};

// Which tiles there are, and where. CutK: experts cut the contraction. By all threads of the block at first; the caller's barrier must follow.
template <int TileM, int TileN, bool CutK, int Count>
class Walk {
 public:
  GPU_INLINE Walk(const Problem& p, const Products<Count>& products, int* first_tile) : p_(p), products_(products), first_tile_(first_tile) {
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
    t.product = 0;
    t.expert = 0;
    int base = 0;
    t.row_end = p_.rows;
    t.k_begin = 0;
    t.k_end = p_.k;
    if (CutK) {
      t.expert = i / (tiles_m * p_.tiles_n);
      i -= t.expert * tiles_m * p_.tiles_n;
      if (p_.offsets != nullptr) {
        t.k_begin = p_.offsets[t.expert];
        t.k_end = p_.offsets[t.expert + 1];
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
      base = p_.offsets[t.expert];
      t.row_end = p_.offsets[t.expert + 1];
      tiles_m = (t.row_end - base + TileM - 1) / TileM;
    }
    const int band = kGroupM * p_.tiles_n, first = i / band * kGroupM, rows = min(kGroupM, tiles_m - first);
    t.row = base + (first + i % band % rows) * TileM;
    int column = i % band / rows;
    if constexpr (Count > 1) {
      while (t.product + 1 < products_.count && products_.result[t.product + 1].first_tile <= column) ++t.product;
      column -= products_.result[t.product].first_tile;
    }
    t.column = column * TileN;
    return t;
  }

 private:
  GPU_INLINE int tiles_of(int e) const { return (p_.offsets[e + 1] - p_.offsets[e] + TileM - 1) / TileM * p_.tiles_n; }
  const Problem& p_;
  const Products<Count>& products_;
  int* first_tile_;
};

// Rows of A to be read for a tile: whole boxes, of a tile that is part full only those with rows of it. Its other rows meet whatever lies in the stage; a row of A
// makes that row of D alone, and those are not stored.
template <int TileM>
GPU_INLINE int rows_to_read(const Problem& p, const Tile& tile) {
  return (min(TileM, tile.row_end - tile.row) + p.a_box - 1) / p.a_box * p.a_box;
}

// By all threads of the block: the copy engine has the maps at hand when it is asked first.
template <int Count>
GPU_INLINE void prefetch_maps(const Products<Count>& products) {
  const int i = static_cast<int>(threadIdx.x) / 2;
  if (i < products.count) sm90::prefetch_map(threadIdx.x % 2 == 0 ? &products.a[i] : &products.b[i]);
}

// The stages in shared memory between the thread that asks for tiles and the warpgroups that multiply, as one thread sees them. T is a kernel's Shape: its
// Stage, kStages, kConsumers and kBoxes, those of each (two for Output). Behind them lie the boxes on their way out, the barriers and the experts' first tiles.
template <typename T>
struct Stages {
  typename T::Stage* data;
  char* boxes;
  sm90::Barrier *full, *empty;
  int at = 0;
  unsigned phase = 0;

  // By all threads of the block; the caller's barrier must follow. `writers` arrive when a stage is full, `readers` before it is filled again.
  GPU_INLINE explicit Stages(char* shared, unsigned readers = T::kConsumers, unsigned writers = 1)
      : data(reinterpret_cast<typename T::Stage*>(shared)), boxes(shared + T::kStages * sizeof(typename T::Stage)),
        full(reinterpret_cast<sm90::Barrier*>(boxes + T::kConsumers * T::kBoxes * kBoxBytes)), empty(full + T::kStages) {
    if (threadIdx.x != 0) return;
    for (int s = 0; s < T::kStages; ++s) {
      full[s].init(writers);
      empty[s].init(readers);
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
  return T::kStages * (sizeof(typename T::Stage) + 2 * sizeof(sm90::Barrier)) + T::kConsumers * T::kBoxes * kBoxBytes + (kExpertsMax + 1) * sizeof(int);
}

GPU_INLINE void store_pair(float* y, float a, float b) { *reinterpret_cast<float2*>(y) = make_float2(a, b); }
GPU_INLINE void store_pair(bf16_t* y, float a, float b) { *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(a, b); }
GPU_INLINE void store_one(float* y, float a) { *y = a; }
GPU_INLINE void store_one(bf16_t* y, float a) { *y = __float2bfloat16_rn(a); }

// Stores what thread t of a warpgroup holds (core/gpu_sm90.h) of 64 rows of a tile: one rounding, or one addition to what is there.
template <int TileN, int Count>
class Output {
 public:
  GPU_INLINE Output(const Problem& p, const Products<Count>& products, char* boxes, int group, int t)
      : p_(p), products_(products), boxes_(boxes + group * 2 * kBoxBytes), group_(group), t_(t) {}

  // Rows of the tile from `row` on.
  GPU_INLINE void store(const Tile& tile, int row, const float (&acc)[TileN / 2]) {
    asm volatile("" : "+r"(t_));  // addresses are worked out here, not ahead of the products, which need the registers
    if (p_.accumulate) return add(tile, row, acc);
    // Where the tile ends with its expert, rows behind it are others'; at the end of all, the map ends too.
    const Result& to = result(tile);
    const bool boxes = to.boxes && (p_.offsets == nullptr || row + 64 <= tile.row_end) && row < tile.row_end;
    if (to.is_f32) {
      boxes ? through_boxes<float>(tile, row, acc) : directly<float>(tile, row, acc);
    } else if (TileN >= 64 && boxes) {
      through_boxes<bf16_t>(tile, row, acc);
    } else {
      directly<bf16_t>(tile, row, acc);
    }
  }
  // Before the block ends: its shared memory has been read.
  GPU_INLINE void finish() const {
    if (t_ == 0) sm90::store_wait<0>();
  }

 private:
  GPU_INLINE const Result& result(const Tile& tile) const { return products_.result[Count == 1 ? 0 : tile.product]; }
  GPU_INLINE int row_of(int row, int lower) const { return row + t_ / 32 * 16 + t_ % 32 / 4 + 8 * lower; }
  GPU_INLINE int column_of(const Tile& tile, int j) const { return tile.column + t_ % 4 * 2 + 8 * j; }

  // 64 rows of 128 bytes at a time to a box in shared memory, and on from there while the next tile is multiplied. The boxes have the copy engine's 128-byte swizzle.
  template <typename Y>
  GPU_INLINE void through_boxes(const Tile& tile, int row, const float (&acc)[TileN / 2]) {
    constexpr int kGroups = 128 / (8 * sizeof(Y)), kUnits = sizeof(Y) / 2;  // groups of 8 columns a box, 16-byte units of one
#pragma unroll
    for (int first = 0; first + kGroups <= TileN / 8; first += kGroups) {
      char* const box = boxes_ + box_ * kBoxBytes;
      box_ ^= 1;
      if (t_ == 0) sm90::store_wait<1>();
      sm90::sync_warpgroup(group_);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int r = row_of(0, lower), bytes = t_ % 4 * 2 * static_cast<int>(sizeof(Y)), unit = (g * kUnits + bytes / 16) ^ (r % 8);
          const int i = 4 * (first + g) + 2 * lower;
          store_pair(reinterpret_cast<Y*>(box + r * 128 + unit * 16 + bytes % 16), acc[i], acc[i + 1]);
        }
      sm90::publish_stores();
      sm90::sync_warpgroup(group_);
      if (t_ == 0) {
        sm90::store_tile(&products_.y[Count == 1 ? 0 : tile.product], box, tile.column + 8 * first, row, 0);
        sm90::store_commit();
      }
    }
  }

  template <typename Y>
  GPU_INLINE void directly(const Tile& tile, int row, const float (&acc)[TileN / 2]) const {
    const Result& to = result(tile);
#pragma unroll
    for (int j = 0; j < TileN / 8; ++j) {
      const int n = column_of(tile, j);
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int m = row_of(row, lower), i = 4 * j + 2 * lower;
        if (m >= tile.row_end || n >= to.columns) continue;
        Y* const at = static_cast<Y*>(to.y) + m * to.stride + n;
        if (n + 1 < to.columns && to.pairs) {
          store_pair(at, acc[i], acc[i + 1]);
        } else {
          store_one(at, acc[i]);
          if (n + 1 < to.columns) store_one(at + 1, acc[i + 1]);
        }
      }
    }
  }

  // Several loads on their way before the first is needed.
  GPU_INLINE void add(const Tile& tile, int row, const float (&acc)[TileN / 2]) const {
    constexpr int kGroups = 4;
    const Result& to = result(tile);
    float* const y = static_cast<float*>(to.y) + tile.expert * to.expert_stride;
#pragma unroll
    for (int first = 0; first < TileN / 8; first += kGroups) {
      float there[4 * kGroups];
#pragma unroll
      for (int i = 0; i < 4 * kGroups; i += 2) {
        const int n = column_of(tile, first + i / 4), m = row_of(row, i / 2 % 2);
        const float* const at = y + m * to.stride + n;
        const bool both = n + 1 < to.columns;
        if (m < tile.row_end && both && to.pairs) {
          const float2 pair = *reinterpret_cast<const float2*>(at);
          there[i] = pair.x, there[i + 1] = pair.y;
        } else {
          there[i] = m < tile.row_end && n < to.columns ? at[0] : 0;
          there[i + 1] = m < tile.row_end && both ? at[1] : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kGroups; i += 2) {
        const int n = column_of(tile, first + i / 4), m = row_of(row, i / 2 % 2);
        if (m >= tile.row_end || n >= to.columns) continue;
        float* const at = y + m * to.stride + n;
        const float a = there[i] + acc[4 * first + i], b = there[i + 1] + acc[4 * first + i + 1];
        if (n + 1 < to.columns && to.pairs) {
          store_pair(at, a, b);
        } else {
          at[0] = a;
          if (n + 1 < to.columns) at[1] = b;
        }
      }
    }
  }

  const Problem& p_;
  const Products<Count>& products_;
  char* boxes_;
  int group_, t_, box_ = 0;
};

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

// [slabs, rows, columns], slabs rows * row_stride apart, read in boxes of box_rows x 128 (or 64) bytes of one slab with a swizzle of so many bytes; beyond the edges come zeros.
template <typename T, int BoxBytes = 128>
CUtensorMap make_map(const void* data, int64_t slabs, int64_t rows, int64_t columns, int64_t row_stride, int box_rows) {
  static_assert(BoxBytes == 128 || BoxBytes == 64);
  CUtensorMap map;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(slabs)};
  const cuuint64_t pitch = static_cast<cuuint64_t>(row_stride) * sizeof(T), stride[2] = {pitch, pitch * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[3] = {BoxBytes / sizeof(T), static_cast<cuuint32_t>(box_rows), 1}, step[3] = {1, 1, 1};
  constexpr CUtensorMapDataType kType = sizeof(T) == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                        : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult r = encode_tiled()(&map, kType, 3, const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    BoxBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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

// Fills in how the D of product i [rows, columns] may be stored; its map where there is one.
template <int Count>
void prepare_output(Products<Count>& products, int i, const Problem& p) {
  Result& to = products.result[i];
  const int64_t bytes = to.is_f32 ? 4 : 2;
  const auto address = reinterpret_cast<uintptr_t>(to.y);
  to.pairs = to.stride % 2 == 0 && address % static_cast<uintptr_t>(2 * bytes) == 0;
  to.boxes = !p.accumulate && to.stride * bytes % 16 == 0 && address % 16 == 0;
  if (!to.boxes) return;
  products.y[i] = to.is_f32 ? make_map<float>(to.y, 1, p.rows, to.columns, to.stride, 64) : make_map<bf16_t>(to.y, 1, p.rows, to.columns, to.stride, 64);
}
inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
// The most tiles of rows there can be: an expert's last tile may be part full.
inline int64_t most_tiles_m(int64_t m, int64_t experts, int64_t tile_m) { return pieces(m, tile_m) + std::min(experts, m) - 1; }
// Rows that an expert has in a typical batch, which gives every expert its share; the host knows no better.
struct Batch {
  int64_t busy, rows;
  Batch(int64_t m, int64_t experts) : busy(std::min(experts, m)), rows(m / busy) {}
  int64_t tiles_m(int64_t tile_m) const { return busy * pieces(rows, tile_m); }
};

// A way to run a product, and roughly how long it takes: the tiles that a multiprocessor works through, one after the other, times the steps of a tile. Tiles give
// equal bits (matmul_gpu_bench checks it), so the number of rows may decide between them.
template <typename Arguments>
struct Way {
  double ns;
  void (*run)(Arguments, cudaStream_t);
};
template <typename T>  // T::kStepNs, T::kTileNs: measured on an H200
double rough_ns(int64_t tiles, int64_t k) {
  return static_cast<double>(pieces(tiles, multiprocessors())) * (static_cast<double>(pieces(k, T::kStep)) * T::kStepNs + T::kTileNs);
}
constexpr double kLaunchNs = 3000;
template <typename Arguments, size_t N>
const Way<Arguments>& fastest(const Way<Arguments> (&ways)[N]) {
  return *std::min_element(ways, ways + N, [](const auto& a, const auto& b) { return a.ns < b.ns; });
}

// Whether two may share a launch.
inline bool agree(const MatmulProblem& a, const MatmulProblem& b) {
  return a.m == b.m && a.k == b.k && a.offsets == b.offsets && a.experts == b.experts && a.k_segment == 0 && b.k_segment == 0 && !a.accumulate && !b.accumulate;
}

// Runs problems, one by one or together where they agree and that is faster. ns(problems): of the fastest way to run them in one launch, run(problems) does it.
template <typename P, typename Agree, typename Ns, typename Run>
void run_in_groups(std::span<const P> all, const Agree& agree, const Ns& ns, const Run& run) {
  uint64_t done = 0;
  GPU_CHECK(all.size() <= 64, "%zu products in a call", all.size());
  for (size_t first = 0; first < all.size(); ++first) {
    FixedList<P, kProductsMax> some;
    for (size_t i = first; i < all.size() && some.size() < kProductsMax; ++i) {
      if ((done >> i & 1) != 0 || (i != first && !agree(all[first], all[i]))) continue;
      some.push_back(all[i]);
      done |= uint64_t{1} << i;
    }
    if (some.empty()) continue;
    const std::span<const P> together = some;
    double apart = 0;
    for (const P& p : together) apart += ns({&p, 1}) + kLaunchNs;
    if (together.size() > 1 && ns(together) + kLaunchNs < apart) {
      run(together);
    } else {
      for (const P& p : together) run({&p, 1});
    }
  }
}

// Rows of A to be read together: of a short product all of them, of experts some, since how many an expert has is not known here.
inline int box_rows(int64_t m, int64_t experts, int tile_m) {
  const int64_t rows = experts == 1 ? pieces(m, 8) * 8 : m / experts <= 32 ? 16 : tile_m;
  return static_cast<int>(std::min<int64_t>(rows, tile_m));
}

}  // namespace lockstep::gpu::sm90_matmul
