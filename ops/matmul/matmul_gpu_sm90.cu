// y = x . w^T in bf16 on Hopper; the kernel is told in matmul_gpu_sm90_bf16.h.
//
// Row contract: an output element is one chain of k16 products, K ascending (one a segment, added in order), whatever M and wherever its row lies. The
// instruction's N does not change an element's bits (matmul_gpu_units_test checks it), so tall and flat problems take different tiles: of large ones a
// multiprocessor makes more in the same time, narrow ones are enough for all multiprocessors.
//
// Floor: 2 M N K operations over the tensor peak; for small M, the bytes of w over the memory's rate.

#include "ops/matmul/matmul_gpu_sm90_bf16.h"

namespace lockstep::gpu {

namespace {

using namespace sm90_matmul;

// Products that agree in all but n, operands and y.
template <typename T>
void launch(std::span<const MatmulProblem> all, cudaStream_t stream) {
  const MatmulProblem& q = all[0];
  Problem p = {.rows = static_cast<int>(q.m), .k = static_cast<int>(q.k), .tiles_m = static_cast<int>(pieces(q.m, T::kM)), .tiles_n = 0,
               .experts = static_cast<int>(q.experts), .offsets = q.offsets, .k_segment = static_cast<int>(q.k_segment), .a_box = box_rows(q.m, q.experts, T::kM),
               .accumulate = q.accumulate};
  Products<T::kCount> products;
  products.count = static_cast<int>(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const MatmulProblem& one = all[i];
    products.a[i] = make_map<bf16_t>(one.x, 1, one.m, one.k, one.x_stride, p.a_box);
    products.b[i] = make_map<bf16_t>(one.w, one.experts, one.n, one.k, one.w_stride, T::kN);
    products.result[i] = {.y = one.y, .stride = one.y_stride, .expert_stride = 0, .columns = static_cast<int>(one.n), .first_tile = p.tiles_n,
                          .is_f32 = one.y_is_f32, .pairs = false, .boxes = false};
    p.tiles_n += static_cast<int>(pieces(one.n, T::kN));
  }
  launch_bf16<T>(products, p, most_tiles_m(q.m, q.experts, T::kM) * p.tiles_n, stream);
}

template <int Consumers, int TileN, bool Segments = false, int Count = 1>
using Shape = Bf16Shape<Consumers, TileN, false, false, Segments, false, Count>;

using Problems = std::span<const MatmulProblem>;

template <typename T>
Way<Problems> way(Problems all) {
  const Batch batch(all[0].m, all[0].experts);
  int64_t tiles_n = 0;
  for (const MatmulProblem& p : all) tiles_n += pieces(p.n, T::kN);
  return {rough_ns<T>(batch.tiles_m(T::kM) * tiles_n, all[0].k), launch<T>};
}

Way<Problems> choose(Problems all) {
  const MatmulProblem& p = all[0];
  if (all.size() > 1) {
    constexpr int kMost = static_cast<int>(kProductsMax);
    return fastest({way<Shape<1, 128, false, kMost>>(all), way<Shape<1, 64, false, kMost>>(all), way<Shape<1, 32, false, kMost>>(all)});
  }
  if (p.k_segment > 0 && p.k_segment < p.k)  // two accumulators must fit
    return fastest({way<Shape<2, 128, true>>(all), way<Shape<1, 128, true>>(all), way<Shape<1, 64, true>>(all), way<Shape<1, 32, true>>(all)});
  return fastest({way<Shape<2, 256>>(all), way<Shape<2, 128>>(all), way<Shape<1, 128>>(all), way<Shape<1, 64>>(all), way<Shape<1, 32>>(all)});
}

}  // namespace

void matmul_bf16(const MatmulProblem& p, void* stream) {
  GPU_CHECK(p.k_segment % kStepK == 0 && (!p.accumulate || p.y_is_f32), "matmul: segments of %ld, accumulate %d", static_cast<long>(p.k_segment), p.accumulate);
  if (p.m == 0) return;
  choose({&p, 1}).run({&p, 1}, static_cast<cudaStream_t>(stream));
}

void matmul_bf16(std::span<const MatmulProblem> all, void* stream) {
  if (all.empty() || all[0].m == 0) return;
  run_in_groups(all, agree, [](Problems some) { return choose(some).ns; }, [&](Problems some) { choose(some).run(some, static_cast<cudaStream_t>(stream)); });
}

}  // namespace lockstep::gpu
