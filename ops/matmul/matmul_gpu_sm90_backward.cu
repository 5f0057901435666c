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

// Both gradients have the columns of k and are f32.
Products<1> products_of(const CUtensorMap& a, const CUtensorMap& b, const MatmulBackwardProblem& q, int64_t expert_stride) {
  Products<1> products;
  products.a[0] = a, products.b[0] = b, products.count = 1;
  products.result[0] = {.y = q.grad, .stride = q.grad_stride, .expert_stride = expert_stride, .columns = static_cast<int>(q.k), .first_tile = 0, .is_f32 = true,
                        .pairs = false, .boxes = false};
  return products;
}

template <typename T>
void launch_input(const MatmulBackwardProblem& q, cudaStream_t stream) {
  const Problem p = {.rows = static_cast<int>(q.m), .k = static_cast<int>(q.n), .tiles_m = static_cast<int>(pieces(q.m, T::kM)),
                     .tiles_n = static_cast<int>(pieces(q.k, T::kN)), .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = 0,
                     .a_box = box_rows(q.m, q.experts, T::kM), .accumulate = q.accumulate};
  Products<1> products = products_of(make_map<bf16_t>(q.dy, 1, q.m, q.n, q.dy_stride, p.a_box),
                                        make_map<bf16_t>(q.other, q.experts, q.n, q.k, q.other_stride, kStepK), q, 0);
  launch_bf16<T>(products, p, most_tiles_m(q.m, q.experts, T::kM) * p.tiles_n, stream);
}

template <typename T>
void launch_weight(const MatmulBackwardProblem& q, cudaStream_t stream) {
  const Problem p = {.rows = static_cast<int>(q.n), .k = static_cast<int>(q.m), .tiles_m = static_cast<int>(pieces(q.n, T::kM)),
                     .tiles_n = static_cast<int>(pieces(q.k, T::kN)), .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = 0, .a_box = T::kM,
                     .accumulate = true};
  Products<1> products = products_of(make_map<bf16_t>(q.dy, 1, q.m, q.n, q.dy_stride, kStepK), make_map<bf16_t>(q.other, 1, q.m, q.k, q.other_stride, kStepK), q,
                                        q.n * q.grad_stride);
  launch_bf16<T>(products, p, q.experts * p.tiles_m * p.tiles_n, stream);
}

template <int Consumers, int TileN>
using InputShape = Bf16Shape<Consumers, TileN, false, true>;
template <int Consumers, int TileN>
using WeightShape = Bf16Shape<Consumers, TileN, true, true, false, true>;

template <int Consumers, int TileN>
Way<const MatmulBackwardProblem&> input_way(const MatmulBackwardProblem& p) {
  using T = InputShape<Consumers, TileN>;
  return {rough_ns<T>(Batch(p.m, p.experts).tiles_m(T::kM) * pieces(p.k, T::kN), p.n), launch_input<T>};
}
template <int Consumers, int TileN>
Way<const MatmulBackwardProblem&> weight_way(const MatmulBackwardProblem& p) {
  using T = WeightShape<Consumers, TileN>;
  return {rough_ns<T>(p.experts * pieces(p.n, T::kM) * pieces(p.k, T::kN), Batch(p.m, p.experts).rows), launch_weight<T>};
}

}  // namespace

void matmul_backward_input_bf16(const MatmulBackwardProblem& p, void* stream) {
  if (p.m == 0) return;
  const Way<const MatmulBackwardProblem&> ways[] = {input_way<2, 256>(p), input_way<2, 128>(p), input_way<1, 128>(p), input_way<1, 64>(p)};
  fastest(ways).run(p, static_cast<cudaStream_t>(stream));
}

void matmul_backward_weight_bf16(const MatmulBackwardProblem& p, void* stream) {
  if (p.m == 0) return;
  const Way<const MatmulBackwardProblem&> ways[] = {weight_way<2, 256>(p), weight_way<2, 128>(p), weight_way<1, 128>(p), weight_way<1, 64>(p)};
  fastest(ways).run(p, static_cast<cudaStream_t>(stream));
}

}  // namespace lockstep::gpu
