// y = x . w^T of E4M3 codes x with scales of 128 columns and E2M1 codes w with scales of 32 (MXFP4) on Hopper, whose units know no E2M1: its numbers are E4M3's as well.
//
// w is the A of the products, from registers: codes come packed to shared memory, a thread takes those of its places and moves their bits to where E4M3 has them, which is
// the number times 2^-6. x is the B; so the result lies transposed, and few rows of x make a narrow tile instead of an empty one. Each step of 32 along K is an accumulator
// of its own, exact scales come after: any scales beside each other are as good as equal ones, and 4.25 bits a number of w are all that is read.
//
// Row contract: an element is sum = fma(block, scale_x, sum) over blocks of 128, block = fma(partial, scale_w, block) over its four partials, ascending, whatever M.
// A scale of w beyond 2^121 counts as infinite.
//
// Floor: for small M the bytes of w over the memory's rate; for large M the 5 fused multiply-adds that an element needs every 128 of K, and the unpacking of w, take as
// long as 1.3 to 1.7 times the products at their peak of 1.9e15 operations a second.

#include "core/formats.h"
#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

constexpr int kStepK = 128, kBlockK = 32, kBlocks = kStepK / kBlockK, kTileN = 128, kRowBytes = kStepK / 2;

// Rows of x in a tile, and how many accumulators are on their way at once.
template <int Rows, int Batch>
struct Shape {
  static constexpr int kM = Rows, kBatch = Batch, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  struct Stage {
    e4m3_t x[kM * kStepK];
    unsigned char w[kTileN * kRowBytes];
  };
  static constexpr int kStages = static_cast<int>(std::min<size_t>(kStagesBytesMax / sizeof(Stage), 16));
};

struct Scales {
  const float* x;          // [m, k / 128]
  const unsigned char* w;  // [experts, n, k / 32]
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
      sm90::load_tile(stages.data[stages.at].w, &w_map, full, k / 2, tile.column, tile.expert);
      sm90::load_tile(stages.data[stages.at].x, &x_map, full, k, tile.row, 0);
      stages.advance();
    }
  }
}

// Four codes from the bits `low`, four from `high`, as E4M3 of 2^-6 times their numbers.
GPU_INLINE void unpack(unsigned low, unsigned high, unsigned& of_low, unsigned& of_high) {
  const unsigned codes = low | high << 16;
  const unsigned even = (codes & 0x08080808u) << 4 | (codes & 0x07070707u) << 2, odd = (codes & 0x80808080u) | (codes & 0x70707070u) >> 2;
  of_low = __byte_perm(even, odd, 0x5140);
  of_high = __byte_perm(even, odd, 0x7362);
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) matmul_fp4_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                                                                    const __grid_constant__ Problem p, const Scales scales) {
  extern __shared__ __align__(1024) char shared[];
  Stages<T> stages(shared, T::kConsumers * 4);
  const Walk<T::kM, kTileN, false> tiles(p, stages.first_tile());
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed(stages, x_map, w_map, tiles);

  sm90::take_registers<232>();
  constexpr int kEach = T::kM / 2;  // elements of an accumulator
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128, c = t % 4, row = half * 64 + t / 32 * 16 + t % 32 / 4, count = tiles.count(), steps = p.k / kStepK;
  float* const x_scales = reinterpret_cast<float*>(stages.boxes + half * 2 * kBoxBytes);  // of this step and the next, kM each
  int turn = 0;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    // Scales of w of this thread's two rows, four bytes a step, are asked for kAhead steps before; those of x a step before, one a thread. Rows beyond the end take the
    // last one's, and are not stored.
    constexpr int kAhead = T::kM > 64 ? 2 : 4;
    const unsigned char* scale_w[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      scale_w[r] = scales.w + (static_cast<long long>(tile.expert) * p.columns + min(tile.column + row + 8 * r, p.columns - 1)) * scales.w_stride;
    const float* const scale_x = scales.x + static_cast<long long>(min(tile.row + t, tile.row_end - 1)) * scales.x_stride;
    unsigned next_w[kAhead][2];
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) next_w[s][r] = s < steps ? __ldg(reinterpret_cast<const unsigned*>(scale_w[r]) + s) : 0;
    float next_x = t < T::kM ? __ldg(scale_x) : 0.0f;
    float sum[kEach] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned bytes[2] = {next_w[0][0], next_w[0][1]};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int s = 0; s + 1 < kAhead; ++s) next_w[s][r] = next_w[s + 1][r];
        if (step + kAhead < steps) next_w[kAhead - 1][r] = __ldg(reinterpret_cast<const unsigned*>(scale_w[r]) + step + kAhead);
      }
      float* const factors = x_scales + turn * T::kM;
      turn ^= 1;
      if (t < T::kM) factors[t] = next_x;
      if (t < T::kM && step + 1 < steps) next_x = __ldg(scale_x + step + 1);
      sm90::sync_warpgroup(half);

      stages.full[stages.at].wait(stages.phase);
      const typename T::Stage& stage = stages.data[stages.at];
      float block[kEach];
#pragma unroll
      for (int first = 0; first < kBlocks; first += T::kBatch) {
        unsigned a[T::kBatch][4];
        float part[T::kBatch][kEach];
#pragma unroll
        for (int b = 0; b < T::kBatch; ++b)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            // The copy engine's 64-byte swizzle: two rows are 128 bytes, the next two begin with another 16.
            const unsigned char* const from = stage.w + (row + 8 * r) * kRowBytes + ((first + b) ^ (row / 2 % 4)) * 16 + 2 * c;
            unpack(*reinterpret_cast<const unsigned short*>(from), *reinterpret_cast<const unsigned short*>(from + 8), a[b][r], a[b][2 + r]);
          }
        sm90::wgmma_fence();
#pragma unroll
        for (int b = 0; b < T::kBatch; ++b)
          sm90::MmaE4m3Registers<T::kM>::run(part[b], a[b], sm90::operand_along_k(stage.x, static_cast<unsigned>(kBlockK * (first + b))));
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();
        if (first + T::kBatch == kBlocks && t % 32 == 0) stages.empty[stages.at].arrive();
#pragma unroll
        for (int b = 0; b < T::kBatch; ++b) {
          float factor[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) factor[r] = to_f32(ue8m0{static_cast<uint8_t>(bytes[r] >> 8 * (first + b))}) * 64.0f;
#pragma unroll
          for (int e = 0; e < kEach; ++e) block[e] = fma(part[b][e], factor[e / 2 % 2], first + b == 0 ? 0.0f : block[e]);
        }
      }
      stages.advance();
#pragma unroll
      for (int j = 0; j < kEach / 4; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * c);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[4 * j + e] = fma(block[4 * j + e], e % 2 == 0 ? factor.x : factor.y, sum[4 * j + e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int m = tile.row + e / 4 * 8 + 2 * c + e % 2, n = tile.column + row + e / 2 % 2 * 8;
      if (m >= tile.row_end || n >= p.columns) continue;
      const long long at = m * p.y_stride + n;
      if (p.y_is_f32) {
        store_one(static_cast<float*>(p.y) + at, sum[e]);
      } else {
        store_one(static_cast<bf16_t*>(p.y) + at, sum[e]);
      }
    }
  }
}

template <typename T>
void launch(const Fp8Problem& q, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<T>();
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_fp4_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const MatmulProblem& m = q.codes;
  const Problem p = {.rows = static_cast<int>(m.m), .columns = static_cast<int>(m.n), .k = static_cast<int>(m.k), .tiles_m = static_cast<int>(pieces(m.m, T::kM)),
                     .tiles_n = static_cast<int>(pieces(m.n, kTileN)), .experts = static_cast<int>(m.experts), .offsets = m.offsets, .k_segment = 0, .y = m.y,
                     .y_stride = m.y_stride, .y_expert_stride = 0, .y_is_f32 = m.y_is_f32, .accumulate = false, .y_pairs = false, .y_boxes = false};
  const Scales scales = {q.x_scale, q.w_scale, static_cast<int>(q.x_scale_stride), static_cast<int>(q.w_scale_stride)};
  const CUtensorMap x_map = make_map<e4m3_t>(m.x, 1, m.m, m.k, m.x_stride, T::kM), w_map = make_map<e4m3_t, kRowBytes>(m.w, m.experts, m.n, m.k / 2, m.w_stride, kTileN);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most_tiles_m(m.m, m.experts, T::kM) * p.tiles_n));
  matmul_fp4_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(x_map, w_map, p, scales);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul fp4 [%ld, %ld, %ld]: %s", static_cast<long>(m.m), static_cast<long>(m.n), static_cast<long>(m.k), cudaGetErrorString(e));
}

}  // namespace

void matmul_fp4(const Fp8Problem& p, void* stream) {
  const MatmulProblem& m = p.codes;
  GPU_CHECK(m.k % kStepK == 0 && m.k_segment == 0 && !m.accumulate, "matmul fp4: k %ld, segments of %ld, accumulate %d", static_cast<long>(m.k), static_cast<long>(m.k_segment),
            m.accumulate);
  if (m.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t rows = m.m / std::min(m.experts, m.m);  // of a typical batch: rows spread over all experts
  if (rows <= 16) return launch<Shape<16, 4>>(p, s);
  if (rows <= 64) return launch<Shape<64, 2>>(p, s);
  launch<Shape<128, 1>>(p, s);
}

}  // namespace lockstep::gpu
