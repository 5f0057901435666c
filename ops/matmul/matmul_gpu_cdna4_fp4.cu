// y = x . w^T of E4M3 codes x and E2M1 codes w (MXFP4) on CDNA4's matrix units, which take both formats and the scales of 32 columns: nothing is unpacked.
//
// As matmul_gpu_cdna4.cu: steps of 128 columns go from memory to registers while the step before is multiplied, then to the other half of shared memory. Scales go from memory to the
// registers of the lanes that multiply by them: of x, of 128 columns, one a row; of w the four bytes of a row, of which a lane has use for two.
//
// Row contract: an element is one chain of instructions of 64 columns, ascending, whatever the tile.
//
// Floor: 2 M N K operations over 4.6e15 a second (the rate is that of E4M3); for small M, 4.25 bits of w an element over the memory's rate.

#include "ops/matmul/matmul_gpu_cdna4.h"

namespace lockstep::gpu {

namespace {

using namespace cdna4_matmul;

constexpr int kStep = 128, kRowBytes = kStep / 2, kRowUnits = kRowBytes / kUnit;  // of w in a tile

template <int WaveM, int WaveN>
struct Shape {
  using Element = e4m3;
  static constexpr int kWavesM = 2, kWavesN = 2, kWaveM = WaveM, kWaveN = WaveN, kM = 32 * kWavesM * WaveM, kN = 32 * kWavesN * WaveN;
  static constexpr int kThreads = 64 * kWavesM * kWavesN;
  static constexpr bool kCutK = false;
  static constexpr size_t kSharedBytes = size_t{2} * (kM * kStepBytes + kN * kRowBytes);
};

// Where unit u of a row of w lies in its tile: four rows fill the banks, the next four begin with another unit.
GPU_INLINE int place_of_w(int row, int u) { return row * kRowBytes + (u ^ (row >> 2 & 3)) * kUnit; }

template <typename S>
GPU_KERNEL GPU_BOUNDS(S::kThreads) matmul_fp4_cdna4_kernel(Problem p, int num_blocks) {
  constexpr int kWaveM = S::kWaveM, kWaveN = S::kWaveN, kCount = S::kN * kRowUnits / S::kThreads;
  SharedMemory memory;
  const Shared<e4m3> x_tiles = memory.take<e4m3>(2 * S::kM * kStepBytes, 128);
  const Shared<e2m1x2> w_tiles = memory.take<e2m1x2>(2 * S::kN * kRowBytes, 128);
  const Tile tile = find_tile<S>(p, tile_of_block(num_blocks));
  if (!tile.there) return;
  const int steps = p.k / kStep, a_row = wave() / S::kWavesN * kWaveM * 32, b_row = wave() % S::kWavesN * kWaveN * 32, half = lane() / 32;

  Staged<S, S::kM, false> x;
  Words w[kCount];
  uint32_t x_scale[kWaveM], w_scale[kWaveN], next_x_scale[kWaveM] = {}, next_w_scale[kWaveN] = {};
  const auto fetch = [&](int step) {
    x.fetch(p.a, 0, tile.row, tile.row_end, step * kStep, p.k);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = i * S::kThreads + thread_x(), n = tile.column + at / kRowUnits;
      w[i] = load_unit(static_cast<const e2m1x2*>(p.b.data) + tile.expert * p.b.slab + n * p.b.stride + step * kRowBytes + at % kRowUnits * kUnit, n < p.b.rows ? kUnit : 0);
    }
    // Those beyond the edges take the last one's, and are not stored.
#pragma unroll
    for (int m = 0; m < kWaveM; ++m) {
      const int row = tile.row + a_row + 32 * m + lane() % 32;
      next_x_scale[m] = std::bit_cast<uint32_t>(p.a_scale[(row < tile.row_end ? row : tile.row_end - 1) * p.a_scale_stride + step]) >> 23;
    }
#pragma unroll
    for (int n = 0; n < kWaveN; ++n) {
      const int column = tile.column + b_row + 32 * n + lane() % 32;
      const int64_t row = static_cast<int64_t>(tile.expert) * p.b.rows + (column < p.b.rows ? column : p.b.rows - 1);
      next_w_scale[n] = *reinterpret_cast<const uint32_t*>(p.b_scale + row * p.b_scale_stride + step * 4) >> 8 * half;
    }
  };
  const auto put = [&](int step) {
    x.put(x_tiles.from(step % 2 * S::kM * kStepBytes));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = i * S::kThreads + thread_x();
      w_tiles.from(step % 2 * S::kN * kRowBytes).store_vector(place_of_w(at / kRowUnits, at % kRowUnits), __builtin_bit_cast(Vector<e2m1x2, kUnit>, w[i]));
    }
#pragma unroll
    for (int m = 0; m < kWaveM; ++m) x_scale[m] = next_x_scale[m];
#pragma unroll
    for (int n = 0; n < kWaveN; ++n) w_scale[n] = next_w_scale[n];
  };

  Float16 acc[kWaveM][kWaveN] = {};
  // Columns 64 turn + 32 half of the step on are this lane's.
  const auto multiply = [&](int step, auto turn) {
    constexpr int kTurn = decltype(turn)::value;
    const Shared<e4m3> x_tile = x_tiles.from(step % 2 * S::kM * kStepBytes);
    const Shared<e2m1x2> w_tile = w_tiles.from(step % 2 * S::kN * kRowBytes);
    Vector<e4m3, 32> rows[kWaveM];
    Vector<e2m1x2, 16> columns[kWaveN];
#pragma unroll
    for (int m = 0; m < kWaveM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto part = x_tile.load_vector<kUnit>(place(a_row + 32 * m + lane() % 32, (kTurn * 2 + half) * 2 + i));
#pragma unroll
        for (int j = 0; j < kUnit; ++j) rows[m].v[i * kUnit + j] = part.v[j];
      }
#pragma unroll
    for (int n = 0; n < kWaveN; ++n) columns[n] = w_tile.load_vector<kUnit>(place_of_w(b_row + 32 * n + lane() % 32, kTurn * 2 + half));
#pragma unroll
    for (int m = 0; m < kWaveM; ++m)
#pragma unroll
      for (int n = 0; n < kWaveN; ++n) cdna4::multiply_e4m3_e2m1<2 * kTurn>(acc[m][n], rows[m], x_scale[m], columns[n], w_scale[n]);
  };
  fetch(0);
  put(0);
  sync_block();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    multiply(step, std::integral_constant<int, 0>());
    multiply(step, std::integral_constant<int, 1>());
    if (step + 1 < steps) put(step + 1);
    sync_block();
  }
  store_results<S>(p, tile, a_row, b_row, [&](int m, int n, int r) { return acc[m][n][r]; });
}

template <typename S>
void run(Problem p, void* stream) {
  p.tiles_m = static_cast<int>(blocks_for(p.a.rows, S::kM));
  p.tiles_n = static_cast<int>(blocks_for(p.b.rows, S::kN));
  // Where experts cut rows, each may have a part-full tile.
  const int64_t partial = p.offsets == nullptr ? 0 : (p.experts < p.a.rows ? p.experts : p.a.rows) - 1, blocks = (p.tiles_m + partial) * p.tiles_n;
  Context c;
  c.device = Device::gpu;
  c.stream = stream;
  launch(c, "matmul", {.blocks = blocks, .threads = S::kThreads, .shared_bytes = S::kSharedBytes}, matmul_fp4_cdna4_kernel<S>, p, blocks);
}

}  // namespace

bool fp4_takes_bf16_rows() { return false; }

void matmul_fp4(const Fp8Problem& q, void* stream) {
  const MatmulProblem& m = q.codes;
  GPU_CHECK(m.k % kStep == 0 && m.k_segment == 0 && !m.accumulate, "matmul fp4: k %ld, segments of %ld, accumulate %d", static_cast<long>(m.k), static_cast<long>(m.k_segment),
            m.accumulate);
  if (m.m == 0) return;
  const Problem p = product(q);
  if (fills(m.m, m.experts, m.n, 128, 128)) return run<Shape<2, 2>>(p, stream);
  run<Shape<1, 1>>(p, stream);
}

}  // namespace lockstep::gpu
