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
template <int Consumers, int Squares, bool Segments = false, int Count = 1>
struct Shape {
  static_assert(Squares == 1 || !Segments);
  static constexpr int kCount = Count, kSquares = Squares, kM = 64 * Squares * Consumers, kConsumers = Consumers, kBoxes = 2, kThreads = 128 * (1 + Consumers);
  static constexpr bool kSegments = Segments;
  static constexpr int kStep = kStepK;
  static constexpr double kStepNs = Squares == 2 ? 940 : Consumers == 2 ? 540 : 410, kTileNs = 750 * (1 + Squares * Consumers);
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

template <int Count>
struct ProductScales {
  Scales of[Count];
};

template <typename T, typename Tiles>
GPU_INLINE void feed(Stages<T>& stages, const Problem& p, const Products<T::kCount>& products, const Tiles& tiles) {
  sm90::leave_registers<40>();
  if (threadIdx.x != 0) return;
  const int count = tiles.count();
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    const int product = T::kCount == 1 ? 0 : tile.product, x_rows = rows_to_read<T::kM>(p, tile);
    const CUtensorMap *const x_map = &products.a[product], *const w_map = &products.b[product];
    const unsigned bytes = static_cast<unsigned>((x_rows + kTileN) * kStepK);
    for (int k = 0; k < tile.k_end; k += kStepK) {
      sm90::Barrier* const full = &stages.full[stages.at];
      stages.empty[stages.at].wait(stages.phase ^ 1);
      full->arrive_and_expect(bytes);
      for (int m = 0; m < x_rows; m += p.a_box) sm90::load_tile(stages.data[stages.at].x + m * kStepK, x_map, full, k, tile.row + m, 0);
      sm90::load_tile(stages.data[stages.at].w, w_map, full, k, tile.column, tile.expert);
      stages.advance();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) matmul_fp8_kernel(const __grid_constant__ Products<T::kCount> products, const __grid_constant__ Problem p,
                                                                    const __grid_constant__ ProductScales<T::kCount> all_scales) {
  extern __shared__ __align__(1024) char shared[];
  prefetch_maps(products);
  Stages<T> stages(shared);
  const Walk<T::kM, kTileN, false, T::kCount> tiles(p, products, stages.first_tile());
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed(stages, p, products, tiles);

  sm90::take_registers<T::kConsumers == 2 ? 232 : 248>();
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128, count = tiles.count(), steps = (p.k + kStepK - 1) / kStepK;
  Output<kTileN, T::kCount> output(p, products, stages.boxes, half, t);
  const int steps_a_segment = T::kSegments ? p.k_segment / kStepK : steps;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    const int first_row = tile.row + half * 64 * T::kSquares;
    const int product = T::kCount == 1 ? 0 : tile.product;
    const Scales& scales = all_scales.of[product];
    const int tiles_n = (products.result[product].columns + kTileN - 1) / kTileN;
    const ue8m0* const scale_w = scales.w + (static_cast<long long>(tile.expert) * tiles_n + tile.column / kTileN) * scales.w_stride;
    float sum[T::kSquares][kTileN / 2], part[kTileN / 2];
    [[maybe_unused]] float whole[T::kSegments ? kTileN / 2 : 1] = {};
    // The scales of a step are on their way during the step before: of this thread's rows, two a square. Those beyond the end take the last row's, and are not stored.
    int scale_row = first_row + t / 32 * 16 + t % 32 / 4;
    float next_x[T::kSquares][2], next_w;
    const auto fetch_scales = [&](int step) {
      asm volatile("" : "+r"(scale_row));  // no addresses kept
      next_w = to_f32(scale_w[step]);
#pragma unroll
      for (int q = 0; q < T::kSquares; ++q)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) next_x[q][lower] = scales.x[min(scale_row + 64 * q + 8 * lower, tile.row_end - 1) * scales.x_stride + step];
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

// Products that agree in all but n, operands and y.
template <typename T>
void launch(std::span<const Fp8Problem> all, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<T>();
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_fp8_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const MatmulProblem& q = all[0].codes;
  Problem p = {.rows = static_cast<int>(q.m), .k = static_cast<int>(q.k), .tiles_m = static_cast<int>(pieces(q.m, T::kM)), .tiles_n = 0,
               .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = static_cast<int>(q.k_segment), .a_box = box_rows(q.m, q.experts, T::kM),
               .accumulate = q.accumulate};
  Products<T::kCount> products;
  ProductScales<T::kCount> scales;
  products.count = static_cast<int>(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const MatmulProblem& m = all[i].codes;
    products.a[i] = make_map<e4m3_t>(m.x, 1, m.m, m.k, m.x_stride, p.a_box);
    products.b[i] = make_map<e4m3_t>(m.w, m.experts, m.n, m.k, m.w_stride, kTileN);
    products.result[i] = {.y = m.y, .stride = m.y_stride, .expert_stride = 0, .columns = static_cast<int>(m.n), .first_tile = p.tiles_n, .is_f32 = m.y_is_f32,
                          .pairs = false, .boxes = false};
    prepare_output(products, static_cast<int>(i), p);
    scales.of[i] = {all[i].x_scale, reinterpret_cast<const ue8m0*>(all[i].w_scale), static_cast<int>(all[i].x_scale_stride), static_cast<int>(all[i].w_scale_stride)};
    p.tiles_n += static_cast<int>(pieces(m.n, kTileN));
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most_tiles_m(q.m, q.experts, T::kM) * p.tiles_n));
  matmul_fp8_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(products, p, scales);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul fp8 [%ld, %ld, %ld]: %s", static_cast<long>(q.m), static_cast<long>(q.n), static_cast<long>(q.k), cudaGetErrorString(e));
}

using Problems = std::span<const Fp8Problem>;

template <typename T>
Way<Problems> way(Problems all) {
  const MatmulProblem& first = all[0].codes;
  int64_t tiles_n = 0;
  for (const Fp8Problem& p : all) tiles_n += pieces(p.codes.n, kTileN);
  return {rough_ns<T>(Batch(first.m, first.experts).tiles_m(T::kM) * tiles_n, first.k), launch<T>};
}

Way<Problems> choose(Problems all) {
  const MatmulProblem& p = all[0].codes;
  if (all.size() > 1) return way<Shape<1, 1, false, static_cast<int>(kProductsMax)>>(all);
  if (p.k_segment > 0 && p.k_segment < p.k) return fastest({way<Shape<2, 1, true>>(all), way<Shape<1, 1, true>>(all)});
  return fastest({way<Shape<2, 2>>(all), way<Shape<2, 1>>(all), way<Shape<1, 1>>(all)});
}

void check(const Fp8Problem& p) {
  GPU_CHECK(p.codes.k_segment % kStepK == 0 && (!p.codes.accumulate || p.codes.y_is_f32), "matmul fp8: segments of %ld, accumulate %d",
            static_cast<long>(p.codes.k_segment), p.codes.accumulate);
  GPU_CHECK(p.codes.m * p.x_scale_stride < (int64_t{1} << 31), "matmul fp8: %ld rows of %ld scales", static_cast<long>(p.codes.m), static_cast<long>(p.x_scale_stride));
}

}  // namespace

void matmul_fp8(const Fp8Problem& p, void* stream) {
  check(p);
  if (p.codes.m == 0) return;
  choose({&p, 1}).run({&p, 1}, static_cast<cudaStream_t>(stream));
}

void matmul_fp8(std::span<const Fp8Problem> all, void* stream) {
  for (const Fp8Problem& p : all) check(p);
  if (all.empty() || all[0].codes.m == 0) return;
  run_in_groups(all, [](const Fp8Problem& a, const Fp8Problem& b) { return agree(a.codes, b.codes); }, [](Problems some) { return choose(some).ns; }, [&](Problems some) { choose(some).run(some, static_cast<cudaStream_t>(stream)); });
}

}  // namespace lockstep::gpu
