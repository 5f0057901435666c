#pragma once
// D (+)= A . B^T in bf16 with f32 accumulation on Hopper: warpgroup matrix products fed by the tensor copy engine.
//
// One thread of a block's first warpgroup asks for tiles, several stages ahead; the other warpgroups multiply, 64 rows each. Blocks are as many as
// multiprocessors and walk the output tiles: the copies of the next tile run while this one is rounded, and its way out to memory while the next is multiplied.
//
// Operands lie along the contraction (rows of x and w in y = x . w^T) or across it (w in dx = dy . w; both in dw = dy^T . x): the matrix unit reads either, so
// nothing is transposed in memory.

#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu::sm90_matmul {

constexpr int kStepK = 64;
constexpr unsigned kSlabBytes = 64 * kStepK * sizeof(bf16_t);  // 64 rows along K, or 64 columns across it

// Rows in 64 a consumer, columns; whether the operands lie across the contraction; whether it has segments, whether experts cut it; how many products there may be.
template <int Consumers, int TileN, bool AAcross = false, bool BAcross = false, bool Segments = false, bool CutK = false, int Count = 1>
struct Bf16Shape {
  static constexpr int kCount = Count, kM = 64 * Consumers, kN = TileN, kConsumers = Consumers, kBoxes = 2, kThreads = 128 * (1 + Consumers);
  static constexpr bool kAAcross = AAcross, kBAcross = BAcross, kSegments = Segments, kCutK = CutK;
  static_assert(!BAcross || TileN % 64 == 0);
  // Small tiles wait for the matrix unit's latency, large ones for its rate; dw passes over memory twice at the end of a tile.
  static constexpr int kStep = kStepK;
  static constexpr double kStepNs = Consumers == 2 ? (TileN == 256 ? 590 : 350) : TileN == 128 ? 230 : TileN == 64 ? 210 : 200;
  static constexpr double kTileNs = CutK ? TileN * Consumers * 25 : 800 + 2.5 * TileN * Consumers;
  struct Stage {
    bf16_t a[kM * kStepK];
    bf16_t b[TileN * kStepK];
  };
  static constexpr int kStages = static_cast<int>(std::min<size_t>(kStagesBytesMax / sizeof(Stage), 16));
};

// All of the first warpgroup: one of its threads asks for the steps of every tile of this block, as stages become free.
template <typename T, typename Tiles>
GPU_INLINE void feed_bf16(Stages<T>& stages, const Problem& p, const Products<T::kCount>& products, const Tiles& tiles) {
  sm90::leave_registers<40>();
  if (threadIdx.x != 0) return;
  const int count = tiles.count();
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    const int b_slab = T::kCutK ? 0 : tile.expert, product = T::kCount == 1 ? 0 : tile.product;
    const CUtensorMap *const a_map = &products.a[product], *const b_map = &products.b[product];
    const int a_rows = T::kAAcross ? T::kM : rows_to_read<T::kM>(p, tile);
    const unsigned bytes = static_cast<unsigned>((a_rows + T::kN) * kStepK) * sizeof(bf16_t);
    for (int k = tile.k_begin; k < tile.k_end; k += kStepK) {
      sm90::Barrier* const full = &stages.full[stages.at];
      typename T::Stage& stage = stages.data[stages.at];
      stages.empty[stages.at].wait(stages.phase ^ 1);
      full->arrive_and_expect(bytes);
      if constexpr (T::kAAcross) {
#pragma unroll
        for (int m = 0; m < T::kM; m += 64) sm90::load_tile(stage.a + m * kStepK, a_map, full, tile.row + m, k, 0);
      } else {
        for (int m = 0; m < a_rows; m += p.a_box) sm90::load_tile(stage.a + m * kStepK, a_map, full, k, tile.row + m, 0);
      }
      if constexpr (T::kBAcross) {
#pragma unroll
        for (int n = 0; n < T::kN; n += 64) sm90::load_tile(stage.b + n * kStepK, b_map, full, tile.column + n, k, b_slab);
      } else {
        sm90::load_tile(stage.b, b_map, full, k, tile.column, b_slab);
      }
      stages.advance();
    }
  }
}

// acc = the sum over the next `steps` stages, K ascending, of warpgroup `half`; thread t. Of the last stage `last_rows` count (operands across K).
template <typename T>
GPU_INLINE void chain(Stages<T>& stages, int steps, int last_rows, int half, int t, float (&acc)[T::kN / 2]) {
  for (int step = 0; step < steps; ++step) {
    stages.full[stages.at].wait(stages.phase);
    typename T::Stage& stage = stages.data[stages.at];
    bf16_t* const a = stage.a + half * 64 * kStepK;
    if constexpr (T::kCutK) {
      if (step + 1 == steps && last_rows < kStepK) {  // what follows belongs to the next expert
        const int vectors = (kStepK - last_rows) * 8;
#pragma unroll 1
        for (int slab = 0; slab <= T::kN / 64; ++slab) {
          bf16_t* const from = (slab == 0 ? a : stage.b + (slab - 1) * 64 * kStepK) + last_rows * 64;
          for (int i = t; i < vectors; i += 128) reinterpret_cast<uint4*>(from)[i] = make_uint4(0, 0, 0, 0);
        }
        sm90::publish_stores();
        sm90::sync_warpgroup(half);
      }
    }
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStepK / 16; ++k) {
      const unsigned along = 32u * static_cast<unsigned>(k), across = 2048u * static_cast<unsigned>(k);
      const unsigned long long a_operand = T::kAAcross ? sm90::operand_across_k(a, across, kSlabBytes) : sm90::operand_along_k(a, along);
      const unsigned long long b_operand = T::kBAcross ? sm90::operand_across_k(stage.b, across, kSlabBytes) : sm90::operand_along_k(stage.b, along);
      sm90::MmaBf16<T::kN, T::kAAcross, T::kBAcross>::run(acc, a_operand, b_operand, (step | k) != 0);
    }
    sm90::wgmma_commit();
    // The products of the step before are done; its stage goes back.
    if (step > 0) {
      sm90::wgmma_wait<1>();
      if (t == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();
    }
    stages.advance();
  }
  sm90::wgmma_wait<0>();
  if (t == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
matmul_bf16_kernel(const __grid_constant__ Products<T::kCount> products, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) char shared[];
  prefetch_maps(products);
  Stages<T> stages(shared);
  const Walk<T::kM, T::kN, T::kCutK, T::kCount> tiles(p, products, stages.first_tile());
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed_bf16(stages, p, products, tiles);

  sm90::take_registers<T::kConsumers == 2 ? 232 : 240>();
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128, count = tiles.count();
  Output<T::kN, T::kCount> output(p, products, stages.boxes, half, t);
  float acc[T::kN / 2];
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    const int k = tile.k_end - tile.k_begin, steps = (k + kStepK - 1) / kStepK;
    if (T::kCutK && steps == 0) continue;
    if constexpr (T::kSegments) {
      const int steps_a_segment = p.k_segment / kStepK;
      float sum[T::kN / 2] = {};
      for (int step = 0; step < steps; step += steps_a_segment) {
        chain(stages, min(steps_a_segment, steps - step), kStepK, half, t, acc);
#pragma unroll
        for (int j = 0; j < T::kN / 2; ++j) sum[j] += acc[j];
      }
      output.store(tile, tile.row + half * 64, sum);
    } else {
      chain(stages, steps, k - (steps - 1) * kStepK, half, t, acc);
      output.store(tile, tile.row + half * 64, acc);
    }
  }
  output.finish();
}

// most_tiles: no more tiles than this can there be. The maps of operands are made; those of results are made here.
template <typename T>
void launch_bf16(Products<T::kCount>& products, const Problem& p, int64_t most_tiles, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<T>();
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_bf16_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  for (int i = 0; i < products.count; ++i) prepare_output(products, i, p);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most_tiles));
  matmul_bf16_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(products, p);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul [%d, %d, %d]: %s", p.rows, products.result[0].columns, p.k, cudaGetErrorString(e));
}

}  // namespace lockstep::gpu::sm90_matmul
