// y = x . w^T of E4M3 codes with block scales on Hopper: scales of x by row and 128 of K, of w by 128 x 128.
//
// As matmul_gpu_sm90_bf16.h, but each step of 128 along K is an accumulator of its own, which the warpgroup then adds to the sum in f32 with
// fma(partial, scale_x * scale_w, sum): the tensor core's own additions keep about 14 bits. While one warpgroup promotes, the other's products run.
//
// Row contract: an element is the ordered sum over blocks of K of such partials, whatever M; with segments such a sum each, added in order.

#include "core/formats.h"
#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

constexpr int kStepK = 128, kTileN = 128;

// Rows in 64 * Squares a consumer. With two squares fewer bytes of w come from the cache for the same work, but there is no room for the sums of segments.
template <int Consumers, int Squares, bool Segments = false>
struct Shape {
  static_assert(Squares == 1 || !Segments);
  static constexpr int kSquares = Squares, kM = 64 * Squares * Consumers, kConsumers = Consumers, kThreads = 128 * (1 + Consumers);
  static constexpr bool kSegments = Segments;
  struct Stage {
    e4m3_t x[kM * kStepK];
    e4m3_t w[kTileN * kStepK];
  };
  static constexpr int kStages = static_cast<int>(kStagesBytesMax / sizeof(Stage));
};

struct Scales {
  const float* x;    // [m, k / 128]
  const ue8m0* w;    // [experts, n / 128, k / 128]
  int x_stride, w_stride;
};

template <typename T, typename Tiles>
GPU_INLINE void feed(Stages<T>& stages, const CUtensorMap& x_map, const CUtensorMap& w_map, const Tiles& tiles) {
  sm90::leave_registers<40>();
  if (threadIdx.x != 0) return;
  sm90::prefetch_map(&x_map);
  sm90::prefetch_map(&w_map);
  const int count = tiles.count();
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    for (int k = 0; k < tile.k_end; k += kStepK) {
      sm90::Barrier* const full = &stages.full[stages.at];
      stages.empty[stages.at].wait(stages.phase ^ 1);
      full->arrive_and_expect(sizeof(typename T::Stage));
      sm90::load_tile(stages.data[stages.at].x, &x_map, full, k, tile.row, 0);
      sm90::load_tile(stages.data[stages.at].w, &w_map, full, k, tile.column, tile.expert);
      stages.advance();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) matmul_fp8_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                                                                    const __grid_constant__ CUtensorMap y_map, const __grid_constant__ Problem p, const Scales scales) {
  extern __shared__ __align__(1024) char shared[];
  Stages<T> stages(shared);
  const Walk<T::kM, kTileN, false> tiles(p, stages.first_tile());
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed(stages, x_map, w_map, tiles);

  sm90::take_registers<T::kConsumers == 2 ? 232 : 248>();
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128, count = tiles.count(), steps = (p.k + kStepK - 1) / kStepK;
  Output<kTileN> output(p, y_map, stages.boxes, half, t);
  const int steps_a_segment = T::kSegments ? p.k_segment / kStepK : steps;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    const int first_row = tile.row + half * 64 * T::kSquares;
    const ue8m0* const scale_w = scales.w + (static_cast<long long>(tile.expert) * p.tiles_n + tile.column / kTileN) * scales.w_stride;
    float sum[T::kSquares][kTileN / 2], part[kTileN / 2];
    [[maybe_unused]] float whole[T::kSegments ? kTileN / 2 : 1] = {};
    // The scales of a step are on their way during the step before: of this thread's rows, two a square. Those beyond the end take the last row's, and are not stored.
    int scale_row = first_row + t / 32 * 16 + t % 32 / 4;
    float next_x[T::kSquares][2], next_w;
    const auto fetch_scales = [&](int step) {
      asm volatile("" : "+r"(scale_row));  // no addresses kept
      next_w = to_f32(ue8m0{__ldg(&scale_w[step].bits)});
#pragma unroll
      for (int q = 0; q < T::kSquares; ++q)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) next_x[q][lower] = __ldg(scales.x + min(scale_row + 64 * q + 8 * lower, tile.row_end - 1) * scales.x_stride + step);
    };
    fetch_scales(0);
#pragma unroll 1
    for (int step = 0; step < steps;) {
      const int end = min(step + steps_a_segment, steps);
#pragma unroll
      for (int q = 0; q < T::kSquares; ++q)
#pragma unroll
        for (int j = 0; j < kTileN / 2; ++j) sum[q][j] = 0;
#pragma unroll 1
      for (; step < end; ++step) {
        float factor[T::kSquares][2];
#pragma unroll
        for (int q = 0; q < T::kSquares; ++q)
#pragma unroll
          for (int lower = 0; lower < 2; ++lower) factor[q][lower] = next_x[q][lower] * next_w;
        if (step + 1 < steps) fetch_scales(step + 1);
        stages.full[stages.at].wait(stages.phase);
#pragma unroll
        for (int q = 0; q < T::kSquares; ++q) {
          sm90::wgmma_fence();
#pragma unroll
          for (int k = 0; k < kStepK / 32; ++k)
            sm90::mma_e4m3_n128(part, sm90::operand_along_k(stages.data[stages.at].x + (half * T::kSquares + q) * 64 * kStepK, 32u * static_cast<unsigned>(k)),
                                sm90::operand_along_k(stages.data[stages.at].w, 32u * static_cast<unsigned>(k)), k != 0);
          sm90::wgmma_commit();
          sm90::wgmma_wait<0>();
          if (q + 1 == T::kSquares && t == 0) stages.empty[stages.at].arrive();
#pragma unroll
          for (int j = 0; j < kTileN / 2; ++j) sum[q][j] = fma(part[j], factor[q][j / 2 % 2], sum[q][j]);
        }
        stages.advance();
      }
      if constexpr (T::kSegments) {
#pragma unroll
        for (int j = 0; j < kTileN / 2; ++j) whole[j] += sum[0][j];
      }
    }
    if constexpr (T::kSegments) {
      output.store(tile, first_row, whole);
    } else {
#pragma unroll
      for (int q = 0; q < T::kSquares; ++q) output.store(tile, first_row + 64 * q, sum[q]);
    }
  }
  output.finish();
}

template <typename T>
void launch(const Fp8Problem& q, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<T>();
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_fp8_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const MatmulProblem& m = q.codes;
  Problem p = {.rows = static_cast<int>(m.m), .columns = static_cast<int>(m.n), .k = static_cast<int>(m.k), .tiles_m = static_cast<int>(pieces(m.m, T::kM)),
                     .tiles_n = static_cast<int>(pieces(m.n, kTileN)), .experts = static_cast<int>(m.experts), .offsets = m.offsets,
                     .k_segment = static_cast<int>(m.k_segment), .y = m.y, .y_stride = m.y_stride, .y_expert_stride = 0, .y_is_f32 = m.y_is_f32,
                     .accumulate = m.accumulate, .y_pairs = false, .y_boxes = false};
  const Scales scales = {q.x_scale, reinterpret_cast<const ue8m0*>(q.w_scale), static_cast<int>(q.x_scale_stride), static_cast<int>(q.w_scale_stride)};
  const CUtensorMap x_map = make_map<e4m3_t>(m.x, 1, m.m, m.k, m.x_stride, T::kM), w_map = make_map<e4m3_t>(m.w, m.experts, m.n, m.k, m.w_stride, kTileN);
  const CUtensorMap y_map = prepare_output(p);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most_tiles_m(m.m, m.experts, T::kM) * p.tiles_n));
  matmul_fp8_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(x_map, w_map, y_map, p, scales);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul fp8 [%ld, %ld, %ld]: %s", static_cast<long>(m.m), static_cast<long>(m.n), static_cast<long>(m.k), cudaGetErrorString(e));
}

template <bool Segments>
void choose(const Fp8Problem& p, cudaStream_t s) {
  const int64_t busy = std::min(p.codes.experts, p.codes.m), rows = p.codes.m / busy;  // of a typical batch: rows spread over all experts
  const auto fills = [&](int64_t tile_m) { return busy * pieces(rows, tile_m) * pieces(p.codes.n, kTileN) >= multiprocessors(); };
  if constexpr (!Segments) {
    if (rows > 128 && fills(256)) return launch<Shape<2, 2>>(p, s);
  }
  if (rows > 64 && fills(128)) return launch<Shape<2, 1, Segments>>(p, s);
  return launch<Shape<1, 1, Segments>>(p, s);
}

}  // namespace

void matmul_fp8(const Fp8Problem& p, void* stream) {
  GPU_CHECK(p.codes.k_segment % kStepK == 0 && (!p.codes.accumulate || p.codes.y_is_f32), "matmul fp8: segments of %ld, accumulate %d",
            static_cast<long>(p.codes.k_segment), p.codes.accumulate);
  GPU_CHECK(p.codes.m * p.x_scale_stride < (int64_t{1} << 31), "matmul fp8: %ld rows of %ld scales", static_cast<long>(p.codes.m), static_cast<long>(p.x_scale_stride));
  if (p.codes.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  p.codes.k_segment > 0 && p.codes.k_segment < p.codes.k ? choose<true>(p, s) : choose<false>(p, s);
}

}  // namespace lockstep::gpu
