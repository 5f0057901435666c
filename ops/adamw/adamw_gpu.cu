// Bound by memory: 28 bytes an element for the step, 4 for the others. Floor: bytes / 4 TB/s.
//
// sum_squares: 16 threads take a block of kSumSquaresBlock of a tensor, thread l the tree's virtual lane l in f64, all tensors in one launch; then a block of
// threads a tensor adds its blocks' sums in order, other waves fetching tiles for the thread that adds (a chain of N / 4096 f64 additions of 8 cycles).

#include <vector>

#include "core/device.h"
#include "ops/adamw/adamw_cpu.h"
#include "ops/chain_gpu.h"
#include "ops/elements_gpu.h"
#include "ops/fixed_math.h"

namespace lockstep::device {

namespace {

using namespace gpu;

// The step's constants as the CPU takes them.
struct Constants {
  AdamWStep step;
  float c1, c2, decay;
};

GPU_KERNEL adamw_kernel(float* w, float* m, float* v, const float* grad, Constants k, bool aligned, int64_t n) {
  const Piece p = piece_of_thread(1, n);
  if (p.count == 0) return;
  const Elements<float> g = load(grad + p.at, p.count, aligned);
  Elements<float> wi = load(static_cast<const float*>(w) + p.at, p.count, aligned), mi = load(static_cast<const float*>(m) + p.at, p.count, aligned),
                  vi = load(static_cast<const float*>(v) + p.at, p.count, aligned);
  for (int i = 0; i < kPiece; ++i) {
    const float gi = g.v[i] * k.step.grad_scale;
    mi.v[i] = k.step.beta1 * mi.v[i] + k.c1 * gi;
    vi.v[i] = k.step.beta2 * vi.v[i] + k.c2 * (gi * gi);
    const float update = k.step.lr * (mi.v[i] / k.step.bias1) / (ieee::sqrt(vi.v[i] / k.step.bias2) + k.step.eps);
    wi.v[i] = wi.v[i] - k.decay * wi.v[i] - update;
  }
  store(w + p.at, wi, p.count, aligned);
  store(m + p.at, mi, p.count, aligned);
  store(v + p.at, vi, p.count, aligned);
}

inline constexpr int kSumThreads = 256, kSumTile = 512;

// A tensor, the thread block that begins it, and where its blocks' sums begin.
struct Gradient {
  const float* data;
  int64_t n, first_sum;
  int first_block;
};
constexpr int kBlocksABlock = kSumThreads / kTreeLanes;

GPU_KERNEL square_blocks_kernel(double* sums, const Gradient* gradients, int num_gradients) {
  const Gradient g = gradients[item_of_block(gradients, num_gradients, block_x())];
  const int64_t block = static_cast<int64_t>(block_x() - g.first_block) * kBlocksABlock + thread_x() / kTreeLanes, begin = block * kSumSquaresBlock;
  const int64_t end = begin + kSumSquaresBlock < g.n ? begin + kSumSquaresBlock : g.n;
  double sum = 0;
#pragma unroll 32
  for (int64_t i = begin + thread_x() % kTreeLanes; i < end; i += kTreeLanes) sum = sum + static_cast<double>(g.data[i] * g.data[i]);
  for (int width = kTreeLanes / 2; width >= 1; width /= 2) sum = sum + shuffle_xor(sum, width);
  if (begin < g.n && thread_x() % kTreeLanes == 0) sums[g.first_sum + block] = sum;
}

GPU_KERNEL sum_in_order_kernel(double* out, const double* all_sums, const Gradient* gradients) {
  const Gradient g = gradients[block_x()];
  const double* const sums = all_sums + g.first_sum;
  const int64_t blocks = (g.n + kSumSquaresBlock - 1) / kSumSquaresBlock;
  const auto tiles = SharedMemory().take<double>(2 * kSumTile);
  const int64_t num_tiles = (blocks + kSumTile - 1) / kSumTile;
  const auto count = [&](int64_t tile) { return blocks - tile * kSumTile < kSumTile ? static_cast<int>(blocks - tile * kSumTile) : kSumTile; };
  double sum = 0;
  for (int64_t tile = 0; tile <= num_tiles; ++tile) {
    if (tile < num_tiles)
      for (int i = thread_x() - kWave; i >= 0 && i < count(tile); i += kSumThreads)
        tiles.store(static_cast<int>(tile % 2) * kSumTile + i, sums[tile * kSumTile + i]);
    if (tile > 0 && thread_x() == 0) {
      const auto from = tiles.from(static_cast<int>((tile - 1) % 2) * kSumTile);
      in_order(count(tile - 1), [&](int i) { return from.load(i); }, [&](double v) { sum = sum + v; });
    }
    sync_block();
  }
  if (thread_x() == 0) out[block_x()] = sum;
}

GPU_KERNEL set_kernel(int32_t* out, int32_t value) { *out = value; }

// Whoever finds one that is not finite says so; all say the same.
GPU_KERNEL all_finite_kernel(int32_t* out, const float* x, bool aligned, int64_t n) {
  const Piece p = piece_of_thread(1, n);
  const Elements<float> e = load(x + p.at, p.count, aligned);
  bool finite = true;
  for (int i = 0; i < kPiece; ++i) finite &= (std::bit_cast<uint32_t>(e.v[i]) & 0x7f800000u) != 0x7f800000u;
  if (!finite) *out = 0;
}

}  // namespace

void adamw(Context& c, TensorView w, TensorView m, TensorView v, ConstTensorView grad, const AdamWStep& step) {
  const int64_t n = w.shape.elements();
  const bool aligned = reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && reinterpret_cast<uintptr_t>(grad.data) % 16 == 0;
  launch(c, "adamw", grid_of_pieces(1, n), adamw_kernel, w.ptr<float>(), m.ptr<float>(), v.ptr<float>(), grad.ptr<float>(),
         Constants{step, 1.0f - step.beta1, 1.0f - step.beta2, step.lr * step.weight_decay}, aligned, n);
}

void sum_squares(Context& c, TensorView out, std::span<const ConstTensorView> grads) {
  std::vector<Gradient> host;
  int64_t first_sum = 0, thread_blocks = 0;
  for (const ConstTensorView& grad : grads) {
    const int64_t n = grad.shape.elements(), blocks = blocks_for(n, kSumSquaresBlock);
    host.push_back({.data = grad.ptr<float>(), .n = n, .first_sum = first_sum, .first_block = static_cast<int>(thread_blocks)});
    first_sum += blocks;
    thread_blocks += blocks_for(blocks, kBlocksABlock);
  }
  ArenaScope scope(*c.workspace);
  const auto gradients = static_cast<Gradient*>(c.workspace->allocate(host.size() * sizeof(Gradient), "sum_squares tensors"));
  double* sums = c.workspace->tensor(DType::f64, {first_sum}, "sum_squares blocks").ptr<double>();
  upload_bytes(c, gradients, host.data(), host.size() * sizeof(Gradient));
  const int n = static_cast<int>(grads.size());
  launch(c, "square_blocks", {.blocks = thread_blocks, .threads = kSumThreads}, square_blocks_kernel, sums, gradients, n);
  launch(c, "sum_in_order", {.blocks = n, .threads = kWave + kSumThreads, .shared_bytes = 2 * kSumTile * sizeof(double)}, sum_in_order_kernel,
         out.ptr<double>(), sums, gradients);
}

void all_finite(Context& c, TensorView out, ConstTensorView x) {
  const int64_t n = x.shape.elements();
  launch(c, "set", {.blocks = 1, .threads = 1}, set_kernel, out.ptr<int32_t>(), 1);
  launch(c, "all_finite", grid_of_pieces(1, n), all_finite_kernel, out.ptr<int32_t>(), x.ptr<float>(), reinterpret_cast<uintptr_t>(x.data) % 16 == 0, n);
}

}  // namespace lockstep::device
