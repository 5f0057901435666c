// y = x . w^T of E4M3 codes with block scales on Hopper: scales of x by row and 128 of K, of w by 128 x 128.
//
// As matmul_gpu_sm90.cu, but each step of 128 along K is an accumulator of its own, which the warpgroup then adds to the sum in f32 with
// fma(partial, scale_x * scale_w, sum): the tensor core's own additions keep about 14 bits. While one warpgroup promotes, the other's products run.
//
// Row contract: an element is the ordered sum over blocks of K of such partials, whatever M.

#include "ops/matmul/matmul_gpu.h"
#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

constexpr int kTileK = 128, kTileN = 128;

template <int Consumers>
struct Tile {
  static constexpr int kM = 64 * Consumers, kN = kTileN, kK = kTileK, kConsumers = Consumers, kThreads = 128 * (1 + Consumers);
  struct Stage {
    e4m3_t x[kM * kTileK];
    e4m3_t w[kTileN * kTileK];
  };
  static constexpr int kStages = static_cast<int>(kStagesBytesMax / sizeof(Stage));
  static constexpr size_t kSharedBytes = kStages * (sizeof(Stage) + 2 * sizeof(sm90::Barrier));
};

struct Scales {
  const float* x;  // [m, k / 128]
  const float* w;  // [n / 128, k / 128]
  long long x_stride, w_stride;
};

template <typename T, typename Y>
__global__ void __launch_bounds__(T::kThreads, 1)
matmul_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const Problem p, const Scales scales) {
  extern __shared__ __align__(1024) char shared[];
  Stages<T> stages(shared);
  const int num_tiles = p.tiles_m * p.tiles_n, steps = (p.k + kTileK - 1) / kTileK;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed(stages, x_map, w_map, p, num_tiles, steps);

  sm90::take_registers<T::kConsumers == 2 ? 232 : 240>();
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128;
  for (int i = static_cast<int>(blockIdx.x); i < num_tiles; i += static_cast<int>(gridDim.x)) {
    int tile_m, tile_n;
    place_tile(p, i, &tile_m, &tile_n);
    const int row = tile_m * T::kM + half * 64;
    // This thread's two rows; those beyond the end take the last row's scale, and are not stored.
    const int upper = min(row + t / 32 * 16 + t % 32 / 4, p.m - 1), lower = min(row + t / 32 * 16 + t % 32 / 4 + 8, p.m - 1);
    const float* const scale_upper = scales.x + upper * scales.x_stride;
    const float* const scale_lower = scales.x + lower * scales.x_stride;
    const float* const scale_w = scales.w + tile_n * scales.w_stride;
    float sum[kTileN / 2] = {}, part[kTileN / 2];
    for (int step = 0; step < steps; ++step) {
      const float w = __ldg(scale_w + step), a = __ldg(scale_upper + step) * w, b = __ldg(scale_lower + step) * w;
      stages.full[stages.at].wait(stages.phase);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileK / 32; ++k)
        sm90::mma_e4m3_n128(part, sm90::operand(stages.data[stages.at].x + half * 64 * kTileK, 32u * static_cast<unsigned>(k)),
                            sm90::operand(stages.data[stages.at].w, 32u * static_cast<unsigned>(k)), k != 0);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      if (t == 0) stages.empty[stages.at].arrive();
      stages.advance();
#pragma unroll
      for (int j = 0; j < kTileN / 2; ++j) sum[j] = fma(part[j], j & 2 ? b : a, sum[j]);
    }
    store_accumulator<kTileN, Y>(p, row, tile_n * kTileN, t, sum);
  }
}

template <typename T, typename Y>
void launch(const Fp8Problem& q, cudaStream_t stream) {
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_kernel<T, Y>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(T::kSharedBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", T::kSharedBytes, cudaGetErrorString(allowed));
  const MatmulProblem& m = q.codes;
  const Problem p = {static_cast<int>(m.m), static_cast<int>(m.n), static_cast<int>(m.k), static_cast<int>(pieces(m.m, T::kM)), static_cast<int>(pieces(m.n, kTileN)),
                     m.y, m.y_stride};
  const Scales scales = {q.x_scale, q.w_scale, q.x_scale_stride, q.w_scale_stride};
  const CUtensorMap x_map = make_map<e4m3_t>(m.x, m.m, m.k, m.x_stride, T::kM), w_map = make_map<e4m3_t>(m.w, m.n, m.k, m.w_stride, kTileN);
  const int blocks = std::min(multiprocessors(), p.tiles_m * p.tiles_n);
  matmul_kernel<T, Y><<<blocks, T::kThreads, T::kSharedBytes, stream>>>(x_map, w_map, p, scales);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul fp8 [%ld, %ld, %ld]: %s", static_cast<long>(m.m), static_cast<long>(m.n), static_cast<long>(m.k), cudaGetErrorString(e));
}

template <typename Y>
void choose(const Fp8Problem& p, cudaStream_t s) {
  if (pieces(p.codes.m, 128) * pieces(p.codes.n, kTileN) >= multiprocessors()) return launch<Tile<2>, Y>(p, s);
  return launch<Tile<1>, Y>(p, s);
}

}  // namespace

void matmul_fp8(const Fp8Problem& p, void* stream) {
  if (p.codes.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  p.codes.y_is_f32 ? choose<float>(p, s) : choose<bf16_t>(p, s);
}

}  // namespace lockstep::gpu
