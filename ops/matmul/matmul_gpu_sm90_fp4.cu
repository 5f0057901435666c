// y = x . w^T of E2M1 codes w with scales of [1, 32] (MXFP4) and x rounded to E4M3 on Hopper, whose units know no E2M1: products in bf16, which holds a code times its scale, and
// a code of x times its scale, exactly.
//
// w is the A of the products, from registers: its codes come packed to shared memory, a thread takes those of its places, moves their bits to where bf16 has them and multiplies
// by the scale. x, which fp4_rows has made, is the B. So 4.25 bits a number of w are read from memory, no tile of w in bf16 lies anywhere, and few rows of x make a narrow tile
// instead of an empty one. The result lies transposed in registers; rows of w are dealt to threads so that each has two neighbouring columns of y.
//
// Columns: a step is 128 of K, a quarter of a row's codes (16 bytes, one scale) each of the four threads that hold the row. Product j of its 8 takes of every quarter q the columns
// 32 q + 8 (j / 2) + 2 (j % 2) + {0, 1, 4, 5}, as bit tricks on words of 8 codes want it; the columns of x are in that order in memory (fp4_rows).
//
// Row contract: an element is one chain of such products, steps and j ascending, whatever M; a tile's width does not change its bits (as in matmul_gpu_sm90.cu).
//
// Numbers: w enters times 2^-32, and the sum is multiplied by 2^32. Exact are scales from 2^-100 to 2^33; smaller ones lose bits below 2^-101, larger ones count as NaN.
//
// Floor: 2 M N K operations over the peak of bf16; for small M 4.25 bits of w an element over the memory's rate, beside which unpacking, 2.2 instructions an element, takes some
// 70 % of what a multiprocessor can issue.

#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

constexpr int kStepK = 128, kRowBytes = kStepK / 2, kProducts = kStepK / 16;
constexpr unsigned kBias = 32;  // see Numbers

// Rows of w in 64 a consumer; rows of x, in parts of Width: of a tile that is part full, only those with rows in it are read and multiplied.
template <int Consumers, int TileM, int Width>
struct Shape {
  static constexpr int kM = TileM, kWidth = Width, kN = 64 * Consumers, kConsumers = Consumers, kBoxes = 0, kThreads = 128 * (1 + Consumers);
  // What a part and what a consumer's unpacking take of a step, measured on an H200.
  static constexpr double kPartNs = Width == 64 ? 165 : 40, kUnpackNs = 130, kTileNs = 1500;
  struct alignas(1024) Stage {
    bf16_t x[2][kM * 64];  // columns in halves of 64
    unsigned char w[kN * kRowBytes];
    unsigned scales[kN];  // four a row
  };
  static constexpr int kStages = static_cast<int>(std::min<size_t>((size_t{224} << 10) / sizeof(Stage), 16));
};

struct Scales {
  const unsigned char* w;  // [experts, n, k / 32]
  int stride;
};

// All of the first warpgroup: one thread asks for tiles of x and w, all for the scales of w, a row each.
template <typename T, typename Tiles>
GPU_INLINE void feed(Stages<T>& stages, const Problem& p, const Products<1>& products, const Scales& scales, const Tiles& tiles) {
  sm90::leave_registers<T::kConsumers == 2 ? 40 : 24>();
  const int count = tiles.count(), t = static_cast<int>(threadIdx.x), columns = products.result[0].columns;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    const int x_rows = rows_to_read<T::kM>(p, tile);
    const unsigned char* scale[(T::kN + 127) / 128];  // rows beyond the end take the last one's, and are not stored
#pragma unroll
    for (int r = 0; r < T::kN; r += 128)
      scale[r / 128] = scales.w + (static_cast<long long>(tile.expert) * columns + min(tile.column + r + t, columns - 1)) * scales.stride;
    for (int k = 0; k < tile.k_end; k += kStepK) {
      sm90::Barrier* const full = &stages.full[stages.at];
      typename T::Stage& stage = stages.data[stages.at];
      stages.empty[stages.at].wait(stages.phase ^ 1);
      if (t == 0) {
        full->arrive_and_expect(static_cast<unsigned>(x_rows * kStepK) * sizeof(bf16_t) + T::kN * kRowBytes);
        sm90::load_tile(stage.w, &products.b[0], full, k / 2, tile.column, tile.expert);
        for (int m = 0; m < x_rows; m += p.a_box)
#pragma unroll
          for (int half = 0; half < 2; ++half) sm90::load_tile(stage.x[half] + m * 64, &products.a[0], full, k + 64 * half, tile.row + m, 0);
      }
#pragma unroll
      for (int r = 0; r < T::kN; r += 128) {
        if (r + t < T::kN) sm90::copy_4(stage.scales + r + t, scale[r / 128]);
        scale[r / 128] += kStepK / 32;
      }
      sm90::arrive_when_copied(full);
      stages.advance();
    }
  }
}

// 2^-kBias times the scale of exponent e, twice.
GPU_INLINE unsigned scale_pair(unsigned e) {
  const unsigned exponent = e + 126 - kBias;  // the bits of a code are 2^-126 times its number
  return (exponent < 255 ? exponent << 7 : 0x7fffu) * 0x10001u;
}
GPU_INLINE unsigned times(unsigned pair, unsigned factor) {
  unsigned r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(factor));
  return r;
}
// Eight codes as pairs of bf16: code i and i + 4, which lie in both halves of the word at the same place. Sign to bit 15, the rest to bits 8 to 6: E2M1's numbers, its subnormal
// one among them, times 2^-126.
GPU_INLINE void unpack(unsigned codes, unsigned factor, unsigned* pairs, int apart) {
  constexpr unsigned kLow = 0x000f000fu, kHigh = 0x00f000f0u, kBits = 0x81c081c0u;
  const unsigned upper = codes >> 8;
  pairs[0] = times((codes & kLow) * 0x1040u & kBits, factor);
  pairs[apart] = times((codes & kHigh) * 0x104u & kBits, factor);
  pairs[2 * apart] = times((upper & kLow) * 0x1040u & kBits, factor);
  pairs[3 * apart] = times((upper & kHigh) * 0x104u & kBits, factor);
}

// One tile: part `half` of 64 rows of w, thread t.
template <typename T>
GPU_INLINE void make_tile(Stages<T>& stages, const Problem& p, const Result& to, const Tile& tile, int half, int t) {
  constexpr int kEach = kProducts / 2;  // products of half a step, whose operands are in registers while the other half's are made
  const int warp = t / 32, q = t % 32 / 4, c = t % 4, pair_row = half * 64 + warp * 16 + 2 * q, odd = q & 1;
  // Upper and lower row of this thread: of neighbouring pairs one begins with the even row, one with the odd, so that eight threads read all banks.
  const int rows[2] = {pair_row + odd, pair_row + 1 - odd}, unit = (c ^ (pair_row / 2 % 4)) * 16;
  float acc[T::kM / T::kWidth][T::kWidth / 2];
  const int parts = (tile.row_end - tile.row + T::kWidth - 1) / T::kWidth;
  unsigned a[2][4 * kEach];
  const int steps = tile.k_end / kStepK;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    stages.full[stages.at].wait(stages.phase);
    const typename T::Stage& stage = stages.data[stages.at];
    uint4 codes[2];
    unsigned factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      codes[r] = *reinterpret_cast<const uint4*>(stage.w + rows[r] * kRowBytes + unit);
      factor[r] = scale_pair(stage.scales[rows[r]] >> 8 * c & 255);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sm90::wgmma_wait<1>();  // the products before the last are done
      if (h == 1 && step > 0 && t % 32 == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unpack(h == 0 ? codes[r].x : codes[r].z, factor[r], a[h] + r, 2);
        unpack(h == 0 ? codes[r].y : codes[r].w, factor[r], a[h] + 8 + r, 2);
      }
      sm90::wgmma_fence();
#pragma unroll
      for (int i = 0; i < T::kM / T::kWidth; ++i) {
        if (i != 0 && i >= parts) break;
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sm90::MmaBf16Registers<T::kWidth, 0>::run(acc[i], a[h] + 4 * j, sm90::operand_along_k(stage.x[h] + i * T::kWidth * 64, 32u * static_cast<unsigned>(j)), (step | h | j) != 0);
      }
      sm90::wgmma_commit();
    }
    stages.advance();
  }
  sm90::wgmma_wait<0>();
  if (t % 32 == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();

  // 8 threads of a warp store 16 columns of a row.
  constexpr float kScale = 0x1p32f;
  static_assert(kBias == 32);
  const int n = tile.column + pair_row;
#pragma unroll
  for (int i = 0; i < T::kM / 4; ++i) {
    const int m = tile.row + 8 * (i / 2) + 2 * c + i % 2, at = 4 * (i / 2) + i % 2;
    if (m >= tile.row_end || n >= to.columns) continue;
    const auto& part = acc[at / (T::kWidth / 2)];
    const float upper = part[at % (T::kWidth / 2)] * kScale, lower = part[at % (T::kWidth / 2) + 2] * kScale, first = odd ? lower : upper, second = odd ? upper : lower;
    const auto store = [&](auto* y) {
      y += m * to.stride + n;
      if (n + 1 < to.columns && to.pairs) {
        store_pair(y, first, second);
      } else {
        store_one(y, first);
        if (n + 1 < to.columns) store_one(y + 1, second);
      }
    };
    to.is_f32 ? store(static_cast<float*>(to.y)) : store(static_cast<bf16_t*>(to.y));
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) matmul_fp4_kernel(const __grid_constant__ Products<1> products, const __grid_constant__ Problem p,
                                                                    const __grid_constant__ Scales scales) {
  extern __shared__ __align__(1024) char shared[];
  prefetch_maps(products);
  Stages<T> stages(shared, 4 * T::kConsumers, 1 + 128);
  const Walk<T::kM, T::kN, false, 1> tiles(p, products, stages.first_tile());
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) return feed(stages, p, products, scales, tiles);

  sm90::take_registers<T::kConsumers == 2 ? 232 : T::kConsumers == 3 ? 160 : 112>();
  const int t = static_cast<int>(threadIdx.x) % 128, count = tiles.count();
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    make_tile(stages, p, products.result[0], tile, group - 1, t);
  }
}

template <typename T>
void launch(const Fp8Problem& all, cudaStream_t stream) {
  constexpr size_t kBytes = shared_bytes<T>();
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_fp4_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const MatmulProblem& m = all.codes;
  const Problem p = {.rows = static_cast<int>(m.m), .k = static_cast<int>(m.k), .tiles_m = static_cast<int>(pieces(m.m, T::kM)), .tiles_n = static_cast<int>(pieces(m.n, T::kN)),
                     .experts = static_cast<int>(m.experts), .offsets = m.offsets, .k_segment = 0, .a_box = std::min(T::kWidth, box_rows(m.m, m.experts, T::kM)), .accumulate = false};
  Products<1> products;
  products.count = 1;
  products.a[0] = make_map<bf16_t>(m.x, 1, m.m, m.k, m.x_stride, p.a_box);
  products.b[0] = make_map<unsigned char, 64>(m.w, m.experts, m.n, m.k / 2, m.w_stride, T::kN);
  products.result[0] = {.y = m.y, .stride = m.y_stride, .expert_stride = 0, .columns = static_cast<int>(m.n), .first_tile = 0, .is_f32 = m.y_is_f32,
                        .pairs = m.y_stride % 2 == 0 && reinterpret_cast<uintptr_t>(m.y) % (m.y_is_f32 ? 8 : 4) == 0, .boxes = false};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most_tiles_m(m.m, m.experts, T::kM) * p.tiles_n));
  matmul_fp4_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(products, p, Scales{all.w_scale, static_cast<int>(all.w_scale_stride)});
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul fp4 [%ld, %ld, %ld]: %s", static_cast<long>(m.m), static_cast<long>(m.n), static_cast<long>(m.k), cudaGetErrorString(e));
}

// Tiles differ by the parts they have: the average of those of a typical batch.
template <typename T>
Way<const Fp8Problem&> way(const Fp8Problem& p) {
  const Batch batch(p.codes.m, p.codes.experts);
  const double parts = static_cast<double>(batch.tiles_m(T::kWidth)) / static_cast<double>(batch.tiles_m(T::kM)), step = T::kConsumers * std::max(T::kUnpackNs, parts * T::kPartNs);
  return {static_cast<double>(pieces(batch.tiles_m(T::kM) * pieces(p.codes.n, T::kN), multiprocessors())) * (static_cast<double>(p.codes.k / kStepK) * step + T::kTileNs), launch<T>};
}

}  // namespace

bool fp4_takes_bf16_rows() { return true; }

void matmul_fp4(const Fp8Problem& p, void* stream) {
  const MatmulProblem& m = p.codes;
  GPU_CHECK(m.k % kStepK == 0 && m.k_segment == 0 && !m.accumulate, "matmul fp4: k %ld, segments of %ld, accumulate %d", static_cast<long>(m.k), static_cast<long>(m.k_segment),
            m.accumulate);
  if (m.m == 0) return;
  fastest({way<Shape<3, 192, 64>>(p), way<Shape<2, 256, 64>>(p), way<Shape<2, 128, 64>>(p), way<Shape<2, 64, 64>>(p), way<Shape<4, 16, 16>>(p), way<Shape<2, 16, 16>>(p)})
      .run(p, static_cast<cudaStream_t>(stream));
}

}  // namespace lockstep::gpu
