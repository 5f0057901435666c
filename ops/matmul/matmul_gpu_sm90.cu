// y = x . w^T in bf16 with f32 accumulation on Hopper: warpgroup matrix products fed by the tensor copy engine.
//
// One thread of a block's first warpgroup asks for tiles, several stages ahead; the other warpgroups multiply, 64 rows each. Blocks are as many as
// multiprocessors and walk the output tiles, so that the copies of a block's next tile run under the stores of the last.
//
// Row contract: an output element is one chain of k16 products, K ascending, whatever M and wherever its row lies. The instruction's N does not change an
// element's bits (matmul_gpu_bench checks it on the device), so tall and flat problems take different tiles: large ones until the device is full, and for few
// rows many narrow ones, which keep more of w on its way.
//
// Floor: 2 M N K operations over the tensor peak; for small M, the bytes of w over the memory's rate.

#include "core/gpu_check.h"
#include "core/gpu_sm90.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

constexpr int kTileK = 64;

// Rows in 64 a consumer, columns.
template <int Consumers, int TileN>
struct Tile {
  static constexpr int kM = 64 * Consumers, kN = TileN, kK = kTileK, kConsumers = Consumers, kThreads = 128 * (1 + Consumers);
  struct Stage {
    bf16_t x[kM * kTileK];
    bf16_t w[TileN * kTileK];
  };
  static constexpr int kStages = static_cast<int>(std::min<size_t>(kStagesBytesMax / sizeof(Stage), 16));
  static constexpr size_t kSharedBytes = kStages * (sizeof(Stage) + 2 * sizeof(sm90::Barrier));
};

template <typename T, typename Y>
__global__ void __launch_bounds__(T::kThreads, 1) matmul_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const Problem p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kStages = T::kStages, TileN = T::kN;
  Stages<T> stages(shared);
  const int num_tiles = p.tiles_m * p.tiles_n, steps = (p.k + kTileK - 1) / kTileK;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed(stages, x_map, w_map, p, num_tiles, steps);

  sm90::take_registers<T::kConsumers == 2 ? 232 : 240>();
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128;
  float acc[TileN / 2];
  for (int i = static_cast<int>(blockIdx.x); i < num_tiles; i += static_cast<int>(gridDim.x)) {
    int tile_m, tile_n;
    place_tile(p, i, &tile_m, &tile_n);
    for (int step = 0; step < steps; ++step) {
      stages.full[stages.at].wait(stages.phase);
      const bf16_t* const x = stages.data[stages.at].x + half * 64 * kTileK;
      const bf16_t* const w = stages.data[stages.at].w;
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k)
        sm90::MmaBf16<TileN>::run(acc, sm90::operand(x, 32u * static_cast<unsigned>(k)), sm90::operand(w, 32u * static_cast<unsigned>(k)), (step | k) != 0);
      sm90::wgmma_commit();
      // The products of the step before are done; its stage goes back.
      if (step > 0) {
        sm90::wgmma_wait<1>();
        if (t == 0) stages.empty[(stages.at + kStages - 1) % kStages].arrive();
      }
      stages.advance();
    }
    sm90::wgmma_wait<0>();
    if (t == 0) stages.empty[(stages.at + kStages - 1) % kStages].arrive();

    store_accumulator<TileN, Y>(p, tile_m * T::kM + half * 64, tile_n * TileN, t, acc);
  }
}

template <typename T, typename Y>
void launch(const MatmulProblem& q, cudaStream_t stream) {
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_kernel<T, Y>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(T::kSharedBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", T::kSharedBytes, cudaGetErrorString(allowed));
  const Problem p = {static_cast<int>(q.m), static_cast<int>(q.n), static_cast<int>(q.k), static_cast<int>(pieces(q.m, T::kM)), static_cast<int>(pieces(q.n, T::kN)),
                     q.y, q.y_stride};
  const CUtensorMap x_map = make_map<bf16_t>(q.x, q.m, q.k, q.x_stride, T::kM), w_map = make_map<bf16_t>(q.w, q.n, q.k, q.w_stride, T::kN);
  const int blocks = std::min(multiprocessors(), p.tiles_m * p.tiles_n);
  matmul_kernel<T, Y><<<blocks, T::kThreads, T::kSharedBytes, stream>>>(x_map, w_map, p);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul [%ld, %ld, %ld]: %s", static_cast<long>(q.m), static_cast<long>(q.n), static_cast<long>(q.k), cudaGetErrorString(e));
}

template <typename Y>
void choose(const MatmulProblem& p, cudaStream_t s) {
  const auto fills = [&](int64_t tile_m, int64_t tile_n) { return pieces(p.m, tile_m) * pieces(p.n, tile_n) >= multiprocessors(); };
  if (fills(128, 256)) return launch<Tile<2, 256>, Y>(p, s);
  if (fills(128, 128)) return launch<Tile<2, 128>, Y>(p, s);
  if (fills(64, 64)) return launch<Tile<1, 64>, Y>(p, s);
  return launch<Tile<1, 32>, Y>(p, s);
}

}  // namespace

void matmul_bf16(const MatmulProblem& p, void* stream) {
  if (p.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  p.y_is_f32 ? choose<float>(p, s) : choose<bf16_t>(p, s);
}

}  // namespace lockstep::gpu
