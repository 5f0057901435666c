// The products and gradients of matmul_gpu.h on CDNA4's matrix units.
//
// A block makes a tile of the result; a wave kWaveM x kWaveN squares of 32 x 32 of it. Steps of 128 bytes along the contraction go from memory to registers while the
// step before is multiplied, then to the other half of shared memory, so that one barrier a step is enough. Operands that lie across the contraction (w in dx = dy . w,
// both in dw = dy^T . x) are transposed on that way, in squares of 8 x 8.
//
// Row contract: an element is one chain of instructions, K ascending (16 a time in bf16; in E4M3 64, promoted to f32 every 128), whatever the tile.
//
// Floor: 2 M N K operations over the tensor peak (2.3e15 bf16 a second, twice that E4M3); for small M, the bytes of w over the memory's rate.

#include "ops/matmul/matmul_gpu_cdna4.h"

namespace lockstep::gpu {

namespace {

using namespace cdna4_matmul;

// Waves along rows and columns of the tile, squares of a wave along them; whether operands lie across the contraction, whether it has segments, whether experts cut it.
template <typename T, int WavesM, int WavesN, int WaveM, int WaveN, bool AAcross = false, bool BAcross = false, bool CutK = false>
struct Shape {
  using Element = T;
  static constexpr int kWavesM = WavesM, kWavesN = WavesN, kWaveM = WaveM, kWaveN = WaveN, kM = 32 * WavesM * WaveM, kN = 32 * WavesN * WaveN;
  static constexpr int kThreads = 64 * WavesM * WavesN, kStep = kStepBytes / static_cast<int>(sizeof(T));
  static constexpr bool kAAcross = AAcross, kBAcross = BAcross, kCutK = CutK, kFp8 = sizeof(T) == 1;
  static constexpr size_t kSharedBytes = size_t{2} * (kM + kN) * kStepBytes;
};

// acc += the products of one step.
template <typename S>
GPU_INLINE void multiply_step(Shared<typename S::Element> a, Shared<typename S::Element> b, int a_row, int b_row, Float16 (&acc)[S::kWaveM][S::kWaveN]) {
  using T = typename S::Element;
  constexpr int kEach = kUnit / sizeof(T), kFragments = S::kFp8 ? 2 : 1, kTurns = kUnits / (2 * kFragments);  // 16-byte units a lane has of an operand
  using Fragment = Vector<T, kEach * kFragments>;
  const int row = lane() % 32, half = lane() / 32;
  const auto load = [&](Shared<T> tile, int first, int turn) {
    Fragment f;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const auto part = tile.template load_vector<kEach>(place(first + row, (turn * 2 + half) * kFragments + i) / static_cast<int>(sizeof(T)));
#pragma unroll
      for (int j = 0; j < kEach; ++j) f.v[i * kEach + j] = part.v[j];
    }
    return f;
  };
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    Fragment rows[S::kWaveM], columns[S::kWaveN];
#pragma unroll
    for (int i = 0; i < S::kWaveM; ++i) rows[i] = load(a, a_row + 32 * i, turn);
#pragma unroll
    for (int j = 0; j < S::kWaveN; ++j) columns[j] = load(b, b_row + 32 * j, turn);
#pragma unroll
    for (int i = 0; i < S::kWaveM; ++i)
#pragma unroll
      for (int j = 0; j < S::kWaveN; ++j) {
        if constexpr (S::kFp8) {
          cdna4::multiply_e4m3(acc[i][j], rows[i], columns[j]);
        } else {
          cdna4::multiply_bf16(acc[i][j], rows[i], columns[j]);
        }
      }
  }
}

// Sums: 1, or 2 with segments (bf16): of the segment and of those before; E4M3 has one more, of the block.
template <typename S, bool Segments>
GPU_KERNEL GPU_BOUNDS(S::kThreads) matmul_cdna4_kernel(Problem p, int num_blocks) {
  using T = typename S::Element;
  constexpr int kWaveM = S::kWaveM, kWaveN = S::kWaveN;
  SharedMemory memory;
  const Shared<T> a_tiles = memory.take<T>(2 * S::kM * S::kStep, 128), b_tiles = memory.take<T>(2 * S::kN * S::kStep, 128);
  const Tile tile = find_tile<S>(p, tile_of_block(num_blocks));
  if (!tile.there) return;
  const int steps = (tile.k_end - tile.k_begin + S::kStep - 1) / S::kStep, b_slab = S::kCutK ? 0 : tile.expert;
  if (S::kCutK && steps == 0) return;

  Staged<S, S::kM, S::kAAcross> a;
  Staged<S, S::kN, S::kBAcross> b;
  const auto fetch = [&](int step) {
    const int k = tile.k_begin + step * S::kStep;
    a.fetch(p.a, 0, tile.row, tile.row_end, k, tile.k_end);
    b.fetch(p.b, b_slab, tile.column, p.b.rows, k, tile.k_end);
  };
  const auto put = [&](int step) {
    a.put(a_tiles.from(step % 2 * S::kM * S::kStep));
    b.put(b_tiles.from(step % 2 * S::kN * S::kStep));
  };
  const int a_row = wave() / S::kWavesN * kWaveM * 32, b_row = wave() % S::kWavesN * kWaveN * 32;
  constexpr bool kSums = Segments || S::kFp8;
  Float16 acc[kWaveM][kWaveN] = {};
  [[maybe_unused]] Float16 sum[kSums ? kWaveM : 1][kSums ? kWaveN : 1] = {};
  [[maybe_unused]] Float16 before[Segments && S::kFp8 ? kWaveM : 1][Segments && S::kFp8 ? kWaveN : 1] = {};
  fetch(0);
  put(0);
  sync_block();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    multiply_step<S>(a_tiles.from(step % 2 * S::kM * S::kStep), b_tiles.from(step % 2 * S::kN * S::kStep), a_row, b_row, acc);
    if constexpr (S::kFp8) {
#pragma unroll
      for (int m = 0; m < kWaveM; ++m)
#pragma unroll
        for (int n = 0; n < kWaveN; ++n) {
          const int column = tile.column + b_row + 32 * n;
          const float w = to_f32(p.b_scale[(static_cast<int64_t>(tile.expert) * ((p.b.rows + 127) / 128) + column / 128) * p.b_scale_stride + step]);
#pragma unroll
          for (int r = 0; r < 16; ++r) {
            const int row = tile.row + a_row + 32 * m + cdna4::result_row(r);
            sum[m][n][r] = fma(acc[m][n][r], p.a_scale[(row < tile.row_end ? row : tile.row_end - 1) * p.a_scale_stride + step] * w, sum[m][n][r]);
          }
          acc[m][n] = Float16{};
        }
    }
    if constexpr (Segments) {
      if ((step + 1) * S::kStep % p.k_segment == 0 || step + 1 == steps) {
#pragma unroll
        for (int m = 0; m < kWaveM; ++m)
#pragma unroll
          for (int n = 0; n < kWaveN; ++n) {
            if constexpr (S::kFp8) {
              before[m][n] += sum[m][n];
              sum[m][n] = Float16{};
            } else {
              sum[m][n] += acc[m][n];
              acc[m][n] = Float16{};
            }
          }
      }
    }
    if (step + 1 < steps) put(step + 1);
    sync_block();
  }

  const auto result = [&](int m, int n, int r) {
    if constexpr (Segments && S::kFp8) {
      return before[m][n][r];
    } else if constexpr (kSums) {
      return sum[m][n][r];
    } else {
      return acc[m][n][r];
    }
  };
  store_results<S>(p, tile, a_row, b_row, result);
}

// experts_rows: rows of the result are cut by experts.
template <typename S, bool Segments = false>
void run(Problem p, void* stream) {
  p.tiles_m = static_cast<int>(blocks_for(p.a.rows, S::kM));
  p.tiles_n = static_cast<int>(blocks_for(p.b.rows, S::kN));
  // Where experts cut rows, each may have a part-full tile.
  const int64_t partial = p.offsets == nullptr ? 0 : (p.experts < p.a.rows ? p.experts : p.a.rows) - 1;
  const int64_t blocks = S::kCutK ? static_cast<int64_t>(p.experts) * p.tiles_m * p.tiles_n : (p.tiles_m + partial) * p.tiles_n;
  Context c;
  c.device = Device::gpu;
  c.stream = stream;
  launch(c, "matmul", {.blocks = blocks, .threads = S::kThreads, .shared_bytes = S::kSharedBytes}, matmul_cdna4_kernel<S, Segments>, p, blocks);
}

}  // namespace

void matmul_bf16(const MatmulProblem& q, void* stream) {
  GPU_CHECK(q.k_segment % 64 == 0 && (!q.accumulate || q.y_is_f32), "matmul: segments of %ld, accumulate %d", static_cast<long>(q.k_segment), q.accumulate);
  if (q.m == 0) return;
  const Problem p = product(q);
  using Small = Shape<bf16, 2, 2, 1, 1>;
  using Middle = Shape<bf16, 2, 2, 2, 2>;
  using Large = Shape<bf16, 2, 2, 4, 2>;
  if (q.k_segment > 0 && q.k_segment < q.k) {
    if (fills(q.m, q.experts, q.n, 128, 128)) return run<Middle, true>(p, stream);
    return run<Small, true>(p, stream);
  }
  if (fills(q.m, q.experts, q.n, 256, 128)) return run<Large>(p, stream);
  if (fills(q.m, q.experts, q.n, 128, 128)) return run<Middle>(p, stream);
  run<Small>(p, stream);
}

void matmul_fp8(const Fp8Problem& q, void* stream) {
  const MatmulProblem& m = q.codes;
  GPU_CHECK(m.k_segment % 128 == 0 && (!m.accumulate || m.y_is_f32), "matmul fp8: segments of %ld, accumulate %d", static_cast<long>(m.k_segment), m.accumulate);
  if (m.m == 0) return;
  const Problem p = product(q);
  using Small = Shape<e4m3, 2, 2, 1, 1>;
  using Middle = Shape<e4m3, 2, 2, 2, 2>;
  const bool large = fills(m.m, m.experts, m.n, 128, 128);
  if (m.k_segment > 0 && m.k_segment < m.k) {
    if (large) return run<Middle, true>(p, stream);
    return run<Small, true>(p, stream);
  }
  if (large) return run<Middle>(p, stream);
  run<Small>(p, stream);
}

void matmul_bf16(std::span<const MatmulProblem> all, void* stream) {
  for (const MatmulProblem& p : all) matmul_bf16(p, stream);
}
void matmul_fp8(std::span<const Fp8Problem> all, void* stream) {
  for (const Fp8Problem& p : all) matmul_fp8(p, stream);
}

void matmul_backward_input_bf16(const MatmulBackwardProblem& q, void* stream) {
  if (q.m == 0) return;
  Problem p = product({.m = q.m, .n = q.k, .k = q.n, .x = q.dy, .w = q.other, .y = q.grad, .x_stride = q.dy_stride, .w_stride = q.other_stride, .y_stride = q.grad_stride,
                       .y_is_f32 = true, .accumulate = q.accumulate, .offsets = q.offsets, .experts = q.experts});
  p.b.slab = q.n * q.other_stride;
  if (fills(q.m, q.experts, q.k, 128, 128)) return run<Shape<bf16, 2, 2, 2, 2, false, true>>(p, stream);
  run<Shape<bf16, 2, 2, 1, 1, false, true>>(p, stream);
}

void matmul_backward_weight_bf16(const MatmulBackwardProblem& q, void* stream) {
  if (q.m == 0) return;
  Problem p = product({.m = q.n, .n = q.k, .k = q.m, .x = q.dy, .w = q.other, .y = q.grad, .x_stride = q.dy_stride, .w_stride = q.other_stride, .y_stride = q.grad_stride,
                       .y_is_f32 = true, .accumulate = true, .offsets = q.offsets, .experts = q.experts});
  p.y_slab = q.n * q.grad_stride;
  if (q.experts * blocks_for(q.n, 128) * blocks_for(q.k, 128) >= kFull) return run<Shape<bf16, 2, 2, 2, 2, true, true, true>>(p, stream);
  run<Shape<bf16, 2, 2, 1, 1, true, true, true>>(p, stream);
}

}  // namespace lockstep::gpu
