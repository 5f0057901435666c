// dx = dy . w of a weight in E4M3 on Hopper: the product of matmul_gpu_sm90_backward.cu, with the bits of one whose w was de-quantised to bf16 first, but w is read as it
// is. The first warpgroup turns codes into bf16, once a block, while the others multiply what it made before; one of its threads also asks for tiles.
//
// A step of 64 along the contraction: dy and the codes come as stages of a ring; what is made of the codes lies in one of two buffers, laid out as the copy engine would
// have laid w. When the multiplying warpgroups give a stage back, its codes have long been read, and the buffer is free as well.
//
// Floor: 2 M N K operations over the bf16 peak, or a byte of w over the memory's rate (de-quantised first: 1 + 2 + 2). Converting 64 x 256 codes takes a warpgroup
// some 500 clocks of the 1000 in which two multiply them.

#include "core/gpu_formats.h"
#include "ops/matmul/matmul_gpu_sm90.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

constexpr int kStepK = 64, kBuffers = 2, kBlock = 128;
constexpr int kSlabBytes = 64 * kStepK * static_cast<int>(sizeof(bf16_t));  // 64 columns of a buffer
constexpr int kBoxCodes = kBlock * kStepK;                                  // 128 columns of codes

template <int Consumers, int TileN>
struct Shape {
  static_assert(TileN % kBlock == 0);
  static constexpr int kM = 64 * Consumers, kN = TileN, kConsumers = Consumers, kBoxes = 2, kThreads = 128 * (1 + Consumers);
  static constexpr int kStep = kStepK;
  static constexpr double kStepNs = Consumers == 2 ? (TileN == 256 ? 650 : 400) : 260, kTileNs = 800 + 2.5 * TileN * Consumers;
  static constexpr int kBufferBytes = TileN / 64 * kSlabBytes;
  struct Stage {
    bf16_t dy[kM * kStepK];
    e4m3_t codes[TileN * kStepK];
  };
  static constexpr int kStages = static_cast<int>(std::min<size_t>((kStagesBytesMax - kBuffers * kBufferBytes) / sizeof(Stage), 12));
  static_assert(kStages > kBuffers);
};

// The buffers of w in bf16, as one thread sees them: before the stages in shared memory, their barriers behind all else.
template <typename T>
struct Buffers {
  char* data;
  sm90::Barrier* full;
  int at = 0;
  unsigned phase = 0;

  // By all threads of the block; the caller's barrier must follow.
  GPU_INLINE Buffers(char* shared, int* first_tile) : data(shared), full(reinterpret_cast<sm90::Barrier*>(first_tile + kExpertsMax + 2)) {
    if (threadIdx.x != 0) return;
    for (int b = 0; b < kBuffers; ++b) full[b].init(4);  // warps of the first warpgroup
    sm90::publish_barriers();
  }
  GPU_INLINE char* buffer() const { return data + at * T::kBufferBytes; }
  GPU_INLINE void advance() {
    if (++at == kBuffers) {
      at = 0;
      phase ^= 1;
    }
  }
};
template <typename T>
constexpr size_t all_shared_bytes() {
  return kBuffers * T::kBufferBytes + shared_bytes<T>() + sizeof(int) + kBuffers * sizeof(sm90::Barrier);
}

struct Scales {
  const ue8m0* w;  // [experts, blocks_n, blocks_k], rows `stride` apart
  int stride, blocks_n, blocks_k;
};

// The loads of a block's steps, one after the other, across tiles; of one thread.
template <typename T, typename Tiles>
class Loads {
 public:
  GPU_INLINE Loads(const Stages<T>& stages, const Problem& p, const Products<1>& products, const Tiles& tiles)
      : stages_(stages), p_(p), products_(products), tiles_(tiles), count_(tiles.count()), i_(static_cast<int>(blockIdx.x)) {}
  // Of the next step, if there is one, to the stage after the last one's, which is free.
  GPU_INLINE void next() {
    if (i_ >= count_) return;
    if (k_ == 0) {
      tile_ = tiles_.at(i_);
      rows_ = rows_to_read<T::kM>(p_, tile_);
    }
    sm90::Barrier* const full = &stages_.full[stages_.at];
    typename T::Stage& stage = stages_.data[stages_.at];
    full->arrive_and_expect(static_cast<unsigned>(rows_ * kStepK) * sizeof(bf16_t) + sizeof(stage.codes));
    for (int m = 0; m < rows_; m += p_.a_box) sm90::load_tile(stage.dy + m * kStepK, &products_.a[0], full, k_, tile_.row + m, 0);
#pragma unroll
    for (int n = 0; n < T::kN; n += kBlock) sm90::load_tile(stage.codes + n * kStepK, &products_.b[0], full, tile_.column + n, k_, tile_.expert);
    stages_.advance();
    k_ += kStepK;
    if (k_ < p_.k) return;
    k_ = 0;
    i_ += static_cast<int>(gridDim.x);
  }

 private:
  Stages<T> stages_;
  const Problem& p_;
  const Products<1>& products_;
  const Tiles& tiles_;
  Tile tile_ = {};
  int count_, i_, k_ = 0, rows_ = 0;
};

// By the first warpgroup. Thread t takes units of sixteen codes: unit q + 4 h of rows r and r + 32 of each box of 128 columns, and puts two units into slab h of the
// box. Boxes and slabs have rows of 128 bytes, whose unit u lies at u ^ (row % 8). Four threads have a row, the next four row ^ 5: then eight neighbours read, and
// write, eight different units.
template <typename T, typename Tiles>
GPU_INLINE void convert(Stages<T>& stages, Buffers<T>& buffers, const Problem& p, const Products<1>& products, const Scales& scales, const Tiles& tiles) {
  const int t = static_cast<int>(threadIdx.x), q = t % 4, r = (t / 8 * 2) ^ (t / 4 % 2 * 5), swizzle = r % 8, count = tiles.count();
  const int from = r * 128 + (q ^ swizzle) * 16, to = r * 128 + (2 * q ^ swizzle) * 16;
  Loads<T, Tiles> loads(stages, p, products, tiles);
  Stages<T> given_back = stages;
  if (t == 0)
    for (int s = 0; s < T::kStages - kBuffers; ++s) loads.next();
  int begun = 0;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    // Scales are on their way during the block before. Beyond the edge nothing is stored.
    float scale[T::kN / kBlock];
    ue8m0 next[T::kN / kBlock];
    const auto fetch_scales = [&](int k) {
      const ue8m0* const row = scales.w + (static_cast<long long>(tile.expert) * scales.blocks_n + min(k / kBlock, scales.blocks_n - 1)) * scales.stride;
#pragma unroll
      for (int b = 0; b < T::kN / kBlock; ++b) next[b] = row[min(tile.column / kBlock + b, scales.blocks_k - 1)];
    };
    fetch_scales(0);
    for (int k = 0; k < p.k; k += kStepK) {
      if (k % kBlock == 0) {
#pragma unroll
        for (int b = 0; b < T::kN / kBlock; ++b) scale[b] = to_f32(next[b]);
        fetch_scales(k + kBlock);
      }
      // The step that had this buffer is multiplied; its stage is the next to be filled.
      if (begun < kBuffers) {
        ++begun;
      } else {
        given_back.empty[given_back.at].wait(given_back.phase);
        given_back.advance();
      }
      if (t == 0) loads.next();
      __syncwarp();
      stages.full[stages.at].wait(stages.phase);
      const char* const codes = reinterpret_cast<const char*>(stages.data[stages.at].codes);
#pragma unroll
      for (int b = 0; b < T::kN / kBlock; ++b)
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int h = part / 2, lower = part % 2 * 32 * 128;
          const uint4 unit = *reinterpret_cast<const uint4*>(codes + b * kBoxCodes + lower + (from ^ (h * 64)));
          const unsigned words[4] = {unit.x, unit.y, unit.z, unit.w};
          unsigned pairs[8];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            float v[4];
            decode_four<e4m3>(words[w], v);
            pairs[2 * w] = round_two(v[0] * scale[b], v[1] * scale[b]);
            pairs[2 * w + 1] = round_two(v[2] * scale[b], v[3] * scale[b]);
          }
          char* const slab = buffers.buffer() + (2 * b + h) * kSlabBytes + lower;
          *reinterpret_cast<uint4*>(slab + to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
          *reinterpret_cast<uint4*>(slab + (to ^ 16)) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        }
      sm90::publish_stores();
      __syncwarp();
      if (t % 32 == 0) buffers.full[buffers.at].arrive();
      stages.advance();
      buffers.advance();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) matmul_backward_fp8_kernel(const __grid_constant__ Products<1> products, const __grid_constant__ Problem p, const Scales scales) {
  extern __shared__ __align__(1024) char shared[];
  prefetch_maps(products);
  Stages<T> stages(shared + kBuffers * T::kBufferBytes);
  Buffers<T> buffers(shared, stages.first_tile());
  const Walk<T::kM, T::kN, false, 1> tiles(p, products, stages.first_tile());
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::leave_registers<T::kConsumers == 2 ? 72 : 120>();  // with 216 of two others no more than the 3 x 168 that the block has
    return convert(stages, buffers, p, products, scales, tiles);
  }
  sm90::take_registers<T::kConsumers == 2 ? 216 : 240>();
  const int half = group - 1, t = static_cast<int>(threadIdx.x) % 128, count = tiles.count(), steps = (p.k + kStepK - 1) / kStepK;
  Output<T::kN, 1> output(p, products, stages.boxes, half, t);
  float acc[T::kN / 2];
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const Tile tile = tiles.at(i);
    for (int step = 0; step < steps; ++step) {
      stages.full[stages.at].wait(stages.phase);
      buffers.full[buffers.at].wait(buffers.phase);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStepK / 16; ++k)
        sm90::MmaBf16<T::kN, 0, 1>::run(acc, sm90::operand_along_k(stages.data[stages.at].dy + half * 64 * kStepK, 32u * static_cast<unsigned>(k)),
                                        sm90::operand_across_k(buffers.buffer(), 2048u * static_cast<unsigned>(k), kSlabBytes), (step | k) != 0);
      sm90::wgmma_commit();
      // The products of the step before are done; its stage goes back.
      if (step > 0) {
        sm90::wgmma_wait<1>();
        if (t == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();
      }
      stages.advance();
      buffers.advance();
    }
    sm90::wgmma_wait<0>();
    if (t == 0) stages.empty[(stages.at + T::kStages - 1) % T::kStages].arrive();
    output.store(tile, tile.row + half * 64, acc);
  }
  output.finish();
}

template <typename T>
void launch(const MatmulBackwardFp8Problem& problem, cudaStream_t stream) {
  const MatmulBackwardProblem& q = problem.codes;
  constexpr size_t kBytes = all_shared_bytes<T>();
  static_assert(kBytes <= kSharedBytesMax);
  static const cudaError_t allowed = cudaFuncSetAttribute(matmul_backward_fp8_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  GPU_CHECK(allowed == cudaSuccess, "%zu bytes of shared memory a block: %s", kBytes, cudaGetErrorString(allowed));
  const Problem p = {.rows = static_cast<int>(q.m), .k = static_cast<int>(q.n), .tiles_m = static_cast<int>(pieces(q.m, T::kM)), .tiles_n = static_cast<int>(pieces(q.k, T::kN)),
                     .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = 0, .a_box = box_rows(q.m, q.experts, T::kM), .accumulate = q.accumulate};
  Products<1> products;
  products.a[0] = make_map<bf16_t>(q.dy, 1, q.m, q.n, q.dy_stride, p.a_box);
  products.b[0] = make_map<e4m3_t>(q.other, q.experts, q.n, q.k, q.other_stride, kStepK);
  products.count = 1;
  products.result[0] = {.y = q.grad, .stride = q.grad_stride, .expert_stride = 0, .columns = static_cast<int>(q.k), .first_tile = 0, .is_f32 = true, .pairs = false, .boxes = false};
  prepare_output(products, 0, p);
  const Scales scales = {.w = reinterpret_cast<const ue8m0*>(problem.w_scale), .stride = static_cast<int>(problem.w_scale_stride),
                         .blocks_n = static_cast<int>(pieces(q.n, kBlock)), .blocks_k = static_cast<int>(pieces(q.k, kBlock))};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most_tiles_m(q.m, q.experts, T::kM) * p.tiles_n));
  matmul_backward_fp8_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(products, p, scales);
  const cudaError_t e = cudaGetLastError();
  GPU_CHECK(e == cudaSuccess, "matmul backward fp8 [%ld, %ld, %ld]: %s", static_cast<long>(q.m), static_cast<long>(q.n), static_cast<long>(q.k), cudaGetErrorString(e));
}

template <int Consumers, int TileN>
Way<const MatmulBackwardFp8Problem&> way(const MatmulBackwardFp8Problem& p) {
  using T = Shape<Consumers, TileN>;
  return {rough_ns<T>(Batch(p.codes.m, p.codes.experts).tiles_m(T::kM) * pieces(p.codes.k, T::kN), p.codes.n), launch<T>};
}

}  // namespace

void matmul_backward_input_fp8(const MatmulBackwardFp8Problem& p, void* stream) {
  if (p.codes.m == 0) return;
  const Way<const MatmulBackwardFp8Problem&> ways[] = {way<2, 256>(p), way<2, 128>(p), way<1, 128>(p)};
  fastest(ways).run(p, static_cast<cudaStream_t>(stream));
}

}  // namespace lockstep::gpu
