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

// Rows of w in 64 a consumer; rows of x.
template <int Consumers, int TileM>
struct Shape {
  static constexpr int kM = TileM, kN = 64 * Consumers, kConsumers = Consumers, kBoxes = 0, kThreads = 128 * (1 + Consumers);
  static constexpr int kStep = kStepK;
  static constexpr double kStepNs = (150 + 1.5 * TileM) * Consumers, kTileNs = 40 * TileM;  // unpacking, then products, of a consumer
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

// What thread t of a consumer has of its 64 rows of w, the tile's from 64 half on.
struct Place {
  int pair_row, odd;  // two rows, pair_row and the next; odd: the next is the upper one
  int quarter;        // of a row's codes
  GPU_INLINE Place(int half, int t) : pair_row(half * 64 + t / 32 * 16 + t % 32 / 4 * 2), odd(t / 4 % 2), quarter(t % 4) {}
  // Upper and lower row: of neighbouring pairs one begins with the even row, one with the odd, so that eight threads read all banks.
  GPU_INLINE int row(int lower) const { return pair_row + (odd ^ lower); }
  GPU_INLINE uint4 codes(const unsigned char* w, int lower) const {
    return *reinterpret_cast<const uint4*>(w + row(lower) * kRowBytes + (quarter ^ (pair_row / 2 % 4)) * 16);
  }
  GPU_INLINE unsigned factor(const unsigned* scales, int lower) const { return scale_pair(scales[row(lower)] >> 8 * quarter & 255); }
};

// Of a tile.
template <typename T>
using Sums = float[T::kM / 2];

// The sums of a warpgroup's 64 rows of w: half a step's operands are made while the other half's are multiplied.
template <typename T>
GPU_INLINE void sum(Stages<T>& stages, int steps, const Place& place, int t, Sums<T>& acc) {
  constexpr int kEach = kProducts / 2;
  unsigned a[2][4 * kEach];
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    stages.full[stages.at].wait(stages.phase);
    const typename T::Stage& stage = stages.data[stages.at];
    uint4 codes[2];
    unsigned factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) codes[r] = place.codes(stage.w, r), factor[r] = place.factor(stage.scales, r);
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
      for (int j = 0; j < kEach; ++j)
        sm90::MmaBf16Registers<T::kM, 0>::run(acc, a[h] + 4 * j, sm90::operand_along_k(stage.x[h], 32u * static_cast<unsigned>(j)), (step | h | j) != 0);
      sm90::wgmma_commit();
    }
    stages.advance();
  }
  sm90::wgmma_wait<0>();
  if (t % 32 == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();
}

// Stores a tile: 8 threads of a warp 16 columns of a row. kPairs: two columns at once, which both are there.
template <typename T, typename Y, bool kPairs>
GPU_INLINE void store_as(const Result& to, const Tile& tile, const Place& place, const Sums<T>& acc) {
  constexpr float kScale = 0x1p32f;
  static_assert(kBias == 32);
  const int n = tile.column + place.pair_row, row = tile.row + 2 * place.quarter, left = tile.row_end - row;
  if (n >= to.columns) return;
  Y* y = static_cast<Y*>(to.y) + row * to.stride + n;
#pragma unroll
  for (int i = 0; i < T::kM / 8; ++i, y += 8 * to.stride) {
    const float* const sums = acc + 4 * i;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (8 * i + j >= left) return;
      const float upper = sums[j] * kScale, lower = sums[2 + j] * kScale, first = place.odd ? lower : upper, second = place.odd ? upper : lower;
      Y* const at = j == 0 ? y : y + to.stride;
      if constexpr (kPairs) {
        store_pair(at, first, second);
      } else {
        store_one(at, first);
        if (n + 1 < to.columns) store_one(at + 1, second);
      }
    }
  }
}
template <typename T>
GPU_INLINE void store_sums(const Result& to, const Tile& tile, const Place& place, const Sums<T>& acc) {
  if (to.pairs && tile.column + place.pair_row + 1 < to.columns) {
    to.is_f32 ? store_as<T, float, true>(to, tile, place, acc) : store_as<T, bf16_t, true>(to, tile, place, acc);
  } else {
    to.is_f32 ? store_as<T, float, false>(to, tile, place, acc) : store_as<T, bf16_t, false>(to, tile, place, acc);
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
  const Place place(group - 1, t);
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    Sums<T> acc;
    sum<T>(stages, tile.k_end / kStepK, place, t, acc);
    store_sums<T>(products.result[0], tile, place, acc);
    __syncwarp();  // the products are of whole warps again
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
                     .experts = static_cast<int>(m.experts), .offsets = m.offsets, .k_segment = 0, .a_box = std::min(64, box_rows(m.m, m.experts, T::kM)), .accumulate = false};
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

template <typename T>
Way<const Fp8Problem&> way(const Fp8Problem& p) {
  return {rough_ns<T>(Batch(p.codes.m, p.codes.experts).tiles_m(T::kM) * pieces(p.codes.n, T::kN), p.codes.k), launch<T>};
}

}  // namespace

bool fp4_takes_bf16_rows() { return true; }

void matmul_fp4(const Fp8Problem& p, void* stream) {
  const MatmulProblem& m = p.codes;
  GPU_CHECK(m.k % kStepK == 0 && m.k_segment == 0 && !m.accumulate, "matmul fp4: k %ld, segments of %ld, accumulate %d", static_cast<long>(m.k), static_cast<long>(m.k_segment),
            m.accumulate);
  if (m.m == 0) return;
  fastest({way<Shape<3, 192>>(p), way<Shape<3, 128>>(p), way<Shape<4, 64>>(p), way<Shape<4, 16>>(p)}).run(p, static_cast<cudaStream_t>(stream));
}

}  // namespace lockstep::gpu
