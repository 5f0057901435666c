// Gradients of a linear layer on Hopper, of operands in bf16, into f32; the kernel is told in matmul_gpu_sm90_bf16.h.
//   dx = dy . w     contraction over n: w lies across it
//   dw += dy^T . x  contraction over rows, from the expert's first to its last: both lie across it
// Each element is one chain of k16 products in ascending order, then one addition to what is there.
//
// Floor: 2 M N K operations over the tensor peak; dw reads and writes 8 bytes an element.

#include "ops/matmul/matmul_gpu_sm90_bf16.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

template <typename T>
void launch_input(const MatmulBackwardProblem& q, cudaStream_t stream) {
  const Problem p = {.rows = static_cast<int>(q.m), .columns = static_cast<int>(q.k), .k = static_cast<int>(q.n), .tiles_m = static_cast<int>(pieces(q.m, T::kM)),
                     .tiles_n = static_cast<int>(pieces(q.k, T::kN)), .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = 0, .y = q.grad,
                     .y_stride = q.grad_stride, .y_expert_stride = 0, .y_is_f32 = true, .accumulate = q.accumulate, .y_pairs = false, .y_boxes = false};
  launch_bf16<T>(make_map<bf16_t>(q.dy, 1, q.m, q.n, q.dy_stride, T::kM), make_map<bf16_t>(q.other, q.experts, q.n, q.k, q.other_stride, kStepK), p,
                 most_tiles_m(q.m, q.experts, T::kM) * pieces(q.k, T::kN), stream);
}

template <typename T>
void launch_weight(const MatmulBackwardProblem& q, cudaStream_t stream) {
  const Problem p = {.rows = static_cast<int>(q.n), .columns = static_cast<int>(q.k), .k = static_cast<int>(q.m), .tiles_m = static_cast<int>(pieces(q.n, T::kM)),
                     .tiles_n = static_cast<int>(pieces(q.k, T::kN)), .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = 0, .y = q.grad,
                     .y_stride = q.grad_stride, .y_expert_stride = q.n * q.grad_stride, .y_is_f32 = true, .accumulate = true, .y_pairs = false, .y_boxes = false};
  launch_bf16<T>(make_map<bf16_t>(q.dy, 1, q.m, q.n, q.dy_stride, kStepK), make_map<bf16_t>(q.other, 1, q.m, q.k, q.other_stride, kStepK), p,
                 q.experts * pieces(q.n, T::kM) * pieces(q.k, T::kN), stream);
}

template <int Consumers, int TileN>
using InputShape = Bf16Shape<Consumers, TileN, false, true>;
template <int Consumers, int TileN>
using WeightShape = Bf16Shape<Consumers, TileN, true, true, false, true>;

}  // namespace

void matmul_backward_input_bf16(const MatmulBackwardProblem& p, void* stream) {
  if (p.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t busy = std::min(p.experts, p.m), rows = p.m / busy;
  const auto fills = [&](int64_t tile_m, int64_t tile_n) { return busy * pieces(rows, tile_m) * pieces(p.k, tile_n) >= multiprocessors(); };
  if (rows > 64 && fills(128, 256)) return launch_input<InputShape<2, 256>>(p, s);
  if (rows > 64 && fills(128, 128)) return launch_input<InputShape<2, 128>>(p, s);
  return launch_input<InputShape<1, 64>>(p, s);
}

void matmul_backward_weight_bf16(const MatmulBackwardProblem& p, void* stream) {
  if (p.m == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  const auto fills = [&](int64_t tile_m, int64_t tile_n) { return p.experts * pieces(p.n, tile_m) * pieces(p.k, tile_n) >= multiprocessors(); };
  if (fills(128, 256)) return launch_weight<WeightShape<2, 256>>(p, s);
  if (fills(128, 128)) return launch_weight<WeightShape<2, 128>>(p, s);
  return launch_weight<WeightShape<1, 64>>(p, s);
}

}  // namespace lockstep::gpu
