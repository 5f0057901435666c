// y = x . w^T in bf16 on Hopper; the kernel is told in matmul_gpu_sm90_bf16.h.
//
// Row contract: an output element is one chain of k16 products, K ascending (one a segment, added in order), whatever M and wherever its row lies. The
// instruction's N does not change an element's bits (matmul_gpu_units_test checks it on the device), so tall and flat problems take different tiles: large ones until
// the device is full, and for few rows many narrow ones, which keep more of w on its way.
//
// Floor: 2 M N K operations over the tensor peak; for small M, the bytes of w over the memory's rate.

#include "ops/matmul/matmul_gpu_sm90_bf16.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

template <typename T>
void launch(const MatmulProblem& q, cudaStream_t stream) {
  const Problem p = {.rows = static_cast<int>(q.m), .columns = static_cast<int>(q.n), .k = static_cast<int>(q.k), .tiles_m = static_cast<int>(pieces(q.m, T::kM)),
                     .tiles_n = static_cast<int>(pieces(q.n, T::kN)), .experts = static_cast<int>(q.experts), .offsets = q.offsets,
                     .k_segment = static_cast<int>(q.k_segment), .y = q.y, .y_stride = q.y_stride, .y_expert_stride = 0, .y_is_f32 = q.y_is_f32,
                     .accumulate = q.accumulate, .y_pairs = false, .y_boxes = false};
  launch_bf16<T>(make_map<bf16_t>(q.x, 1, q.m, q.k, q.x_stride, T::kM), make_map<bf16_t>(q.w, q.experts, q.n, q.k, q.w_stride, T::kN), p,
                 most_tiles_m(q.m, q.experts, T::kM) * pieces(q.n, T::kN), stream);
}

template <int Consumers, int TileN, bool Segments>
using Shape = Bf16Shape<Consumers, TileN, false, false, Segments>;

template <bool Segments>
void choose(const MatmulProblem& p, cudaStream_t s) {
  constexpr int kWide = Segments ? 128 : 256;  // with segments two accumulators must fit
  // Tiles of a typical batch: rows spread over all experts.
  const int64_t busy = std::min(p.experts, p.m), rows = p.m / busy;
  const auto fills = [&](int64_t tile_m, int64_t tile_n) { return busy * pieces(rows, tile_m) * pieces(p.n, tile_n) >= multiprocessors(); };
  if (rows > 64 && fills(128, kWide)) return launch<Shape<2, kWide, Segments>>(p, s);
  if (rows > 64 && fills(128, 128)) return launch<Shape<2, 128, Segments>>(p, s);
  if (p.experts > 1 && fills(64, 512)) return launch<Shape<1, 128, Segments>>(p, s);
  if (fills(64, 64)) return launch<Shape<1, 64, Segments>>(p, s);
  return launch<Shape<1, 32, Segments>>(p, s);
}

}  // namespace

void matmul_bf16(const MatmulProblem& p, void* stream) {
  GPU_CHECK(p.k_segment % kStepK == 0 && (!p.accumulate || p.y_is_f32), "matmul: segments of %ld, accumulate %d", static_cast<long>(p.k_segment), p.accumulate);
  if (p.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  p.k_segment > 0 && p.k_segment < p.k ? choose<true>(p, s) : choose<false>(p, s);
}

}  // namespace lockstep::gpu
