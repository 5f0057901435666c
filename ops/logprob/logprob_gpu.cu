// 16 threads take a chunk of a row's logits (ops/row_gpu.h), so that a row alone already keeps 1024 threads busy; 64 threads then merge its chunks, one chunk
// each, up to the chain of adds. Logits come from device::matmul in blocks of rows. Floor: the head product's; around it one write and three reads of the
// block's logits, the second and third mostly from L2.

#include <limits>

#include "core/gpu_check.h"
#include "ops/elements_gpu.h"
#include "ops/logprob/logits_gpu.h"
#include "ops/logprob/logprob_cpu.h"
#include "ops/row_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

// Row, chunk and its logits, of the calling 16 threads. n is 0 where there is none.
struct Chunk {
  int64_t row = 0, chunk = 0, first = 0, n = 0;
};
GPU_INLINE Chunk chunk_of_thread(int64_t rows, int64_t count, int64_t chunk, int64_t chunks) {
  const int64_t i = row_of_thread();
  Chunk k;
  k.row = i / chunks;
  k.chunk = i - k.row * chunks;
  k.first = k.chunk * chunk;
  if (k.row < rows) k.n = count - k.first < chunk ? count - k.first : chunk;
  return k;
}
Grid grid_of_chunks(int64_t rows, int64_t chunks) { return {.blocks = blocks_for(rows * chunks, kRowsABlock), .threads = kRowThreads}; }

// Per chunk max, sum, and y of the target if the chunk has it. target may be null; `stride` floats a chunk's record.
GPU_KERNEL chunk_stats_kernel(float* partials, int64_t partials_stride, const float* logits, int64_t logits_stride, const int32_t* target,
                              const float* temperature, int64_t part_first, int64_t rows, int64_t count, int64_t chunk, int64_t chunks) {
  const Chunk k = chunk_of_thread(rows, count, chunk, chunks);
  const bool mine = k.n > 0;
  const float* const x = logits + k.row * logits_stride + k.first;
  const Cooled y_of = {mine ? temperature[k.row] : 1.0f};
  float max = -std::numeric_limits<float>::infinity();
  each_logit(x, k.n, [&](float v, int64_t) {
    const float y = y_of(v);
    max = max < y ? y : max;
  });
  for (int width = kTreeLanes / 2; width >= 1; width /= 2) {
    const float other = shuffle_xor(max, width);
    max = max < other ? other : max;
  }
  float sum = 0;
  each_logit(x, k.n, [&](float v, int64_t) { sum = sum + exp_f32(y_of(v) - max); });
  sum = fold_row(sum);
  if (!mine || row_lane() != 0) return;
  float* const out = partials + k.row * partials_stride + kChunkPartials * k.chunk;
  out[0] = max;
  out[1] = sum;
  const int64_t at = target == nullptr ? -1 : target[k.row] - part_first - k.first;
  out[2] = at >= 0 && at < k.n ? y_of(x[at]) : 0.0f;
}

inline constexpr int kMergeThreads = static_cast<int>(kVocabChunks);

// One row a block. `max` and `logprob` may be null.
GPU_KERNEL merge_stats_kernel(float* logprob, float* lse, float* max, const float* partials, int64_t partials_stride, const int32_t* target, int64_t chunk,
                              int64_t chunks) {
  SharedMemory memory;
  const auto keeps = memory.take<float>(kMergeThreads), sums = memory.take<float>(kMergeThreads), maxima = memory.take<float>(kMergeThreads);
  const float* const in = partials + block_x() * partials_stride;
  const int64_t k = thread_x();
  if (k < chunks) maxima.store(static_cast<int>(k), in[kChunkPartials * k]);
  sync_block();
  // The running maximum before this chunk and with it, so that all exponentials are taken at once and only a multiply and an add a chunk stay in sequence.
  float before = -std::numeric_limits<float>::infinity(), running = before;
#pragma unroll 8
  for (int i = 0; i <= k && i < chunks; ++i) {
    const float m = maxima.load(i);
    before = running;
    running = running < m ? m : running;
  }
  if (k < chunks) {
    keeps.store(static_cast<int>(k), exp_f32(before - running));
    sums.store(static_cast<int>(k), in[kChunkPartials * k + 1] * exp_f32(in[kChunkPartials * k] - running));
  }
  sync_block();
  if (k != chunks - 1) return;  // whose maximum is the row's
  float total = 0;
#pragma unroll 8
  for (int i = 0; i < chunks; ++i) total = total * keeps.load(i) + sums.load(i);
  const float row_lse = running + log_f32(total);
  if (lse != nullptr) lse[block_x()] = row_lse;
  if (max != nullptr) max[block_x()] = running;
  if (logprob != nullptr) logprob[block_x()] = in[kChunkPartials * (target[block_x()] / chunk) + 2] - row_lse;
}

GPU_KERNEL chunk_means_kernel(float* means, int64_t means_stride, const float* logits, int64_t logits_stride, const float* temperature, const float* lse,
                              int64_t rows, int64_t count, int64_t chunk, int64_t chunks) {
  const Chunk k = chunk_of_thread(rows, count, chunk, chunks);
  const bool mine = k.n > 0;
  const float* const x = logits + k.row * logits_stride + k.first;
  const Cooled y_of = {mine ? temperature[k.row] : 1.0f};
  const float row_lse = mine ? lse[k.row] : 0.0f;
  float sum = 0;
  each_logit(x, k.n, [&](float v, int64_t) {
    const float y = y_of(v);
    sum = fma(exp_f32(y - row_lse), y, sum);
  });
  sum = fold_row(sum);
  if (mine && row_lane() == 0) means[k.row * means_stride + k.chunk] = sum;
}

GPU_KERNEL merge_means_kernel(float* entropy, const float* means, int64_t means_stride, const float* lse, int64_t rows, int64_t chunks) {
  const int64_t r = static_cast<int64_t>(block_x()) * block_dim() + thread_x();
  if (r >= rows) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t k = 0; k < chunks; ++k) sum = sum + means[r * means_stride + k];
  entropy[r] = lse[r] - sum;
}

// Logits become dlogits.
GPU_KERNEL row_backward_kernel(float* logits, int64_t logits_stride, const int32_t* target, const float* temperature, const float* lse, const float* entropy,
                               const float* dlogprob, const float* dentropy, int64_t part_first, bool aligned, int64_t rows, int64_t count) {
  const Piece p = piece_of_thread(rows, count);
  if (p.count == 0) return;
  float* const at = logits + p.row * logits_stride + p.at;
  const Cooled cooled = {temperature[p.row]};
  const float row_lse = lse[p.row], e = entropy == nullptr ? 0.0f : entropy[p.row];
  const float dl = dlogprob[p.row], de = dentropy == nullptr ? 0.0f : dentropy[p.row];
  const int64_t to_target = target[p.row] - part_first - p.at;
  Elements<float> x = load(static_cast<const float*>(at), p.count, aligned);
  for (int i = 0; i < kPiece; ++i) {
    const float y = cooled(x.v[i]), shifted = y - row_lse, prob = exp_f32(shifted);
    const float dy = dl * ((i == to_target ? 1.0f : 0.0f) - prob) - de * prob * (shifted + e);
    x.v[i] = cooled(dy);
  }
  store(at, x, p.count, aligned);
}

// A vector's numbers, which kernels take side by side; null for none.
template <typename T, typename View>
auto vector(const View& v) -> decltype(v.template ptr<T>()) {
  if (v.data == nullptr) return nullptr;
  GPU_CHECK(v.contiguous(), "a vector with stride %lld", static_cast<long long>(v.row_stride));
  return v.template ptr<T>();
}

void chunk_stats(Context& c, TensorView partials, ConstTensorView logits, ConstTensorView target, ConstTensorView temperature, VocabPart part) {
  const int64_t rows = logits.rows(), count = logits.dim(1), chunk = vocab_chunk(part.vocab), chunks = blocks_for(count, chunk);
  launch(c, "logprob_chunks", grid_of_chunks(rows, chunks), chunk_stats_kernel, partials.ptr<float>(), partials.row_stride, logits.ptr<float>(),
         logits.row_stride, vector<int32_t>(target), vector<float>(temperature), part.first, rows, count, chunk, chunks);
}

void merge_stats(Context& c, TensorView logprob, TensorView lse, TensorView max, ConstTensorView partials, ConstTensorView target, int64_t vocab) {
  launch(c, "logprob_merge", {.blocks = partials.rows(), .threads = kMergeThreads, .shared_bytes = 3 * kMergeThreads * sizeof(float)}, merge_stats_kernel,
         vector<float>(logprob), vector<float>(lse), vector<float>(max), partials.ptr<float>(), partials.row_stride, vector<int32_t>(target),
         vocab_chunk(vocab), vocab_chunks(vocab));
}

}  // namespace

void logprob_partials(Context& c, TensorView partials, ConstTensorView logits, ConstTensorView target, ConstTensorView temperature, VocabPart part) {
  chunk_stats(c, partials, logits, target, temperature, part);
}

void logprob_merge(Context& c, TensorView logprob, TensorView lse, ConstTensorView partials, ConstTensorView target, int64_t vocab) {
  merge_stats(c, logprob, lse, {}, partials, target, vocab);
}

void entropy_partials(Context& c, TensorView means, ConstTensorView logits, ConstTensorView temperature, ConstTensorView lse, VocabPart part) {
  const int64_t rows = logits.rows(), count = logits.dim(1), chunk = vocab_chunk(part.vocab), chunks = blocks_for(count, chunk);
  launch(c, "entropy_chunks", grid_of_chunks(rows, chunks), chunk_means_kernel, means.ptr<float>(), means.row_stride, logits.ptr<float>(), logits.row_stride,
         vector<float>(temperature), vector<float>(lse), rows, count, chunk, chunks);
}

void entropy_merge(Context& c, TensorView entropy, ConstTensorView means, ConstTensorView lse) {
  constexpr int kThreads = 64;
  launch(c, "entropy_merge", {.blocks = blocks_for(means.rows(), kThreads), .threads = kThreads}, merge_means_kernel, vector<float>(entropy),
         means.ptr<float>(), means.row_stride, vector<float>(lse), means.rows(), means.dim(1));
}

void select_logprob(Context& c, TensorView logprob, TensorView lse, TensorView entropy, ConstTensorView logits, ConstTensorView target,
                    ConstTensorView temperature) {
  ArenaScope scope(*c.workspace);
  const int64_t rows = logits.rows(), vocab = logits.dim(1), chunks = vocab_chunks(vocab);
  const VocabPart whole{.first = 0, .vocab = vocab};
  const TensorView partials = c.workspace->tensor(DType::f32, {rows, kChunkPartials * chunks}, "select_logprob partials");
  if (lse.data == nullptr) lse = c.workspace->tensor(DType::f32, {rows}, "select_logprob lse");
  device::logprob_partials(c, partials, logits, target, temperature, whole);
  device::logprob_merge(c, logprob, lse, partials, target, vocab);
  if (entropy.data == nullptr) return;
  const TensorView means = c.workspace->tensor(DType::f32, {rows, chunks}, "select_logprob means");
  device::entropy_partials(c, means, logits, temperature, lse, whole);
  device::entropy_merge(c, entropy, means, lse);
}

void row_stats(Context& c, TensorView max, TensorView lse, ConstTensorView logits, ConstTensorView temperature) {
  ArenaScope scope(*c.workspace);
  const int64_t vocab = logits.dim(1);
  const TensorView partials = c.workspace->tensor(DType::f32, {logits.rows(), kChunkPartials * vocab_chunks(vocab)}, "row_stats partials");
  chunk_stats(c, partials, logits, {}, temperature, {.first = 0, .vocab = vocab});
  merge_stats(c, {}, lse, max, partials, {}, vocab);
}

void row_backward(Context& c, TensorView logits, ConstTensorView dlogprob, ConstTensorView dentropy, ConstTensorView target, ConstTensorView temperature,
                  ConstTensorView lse, ConstTensorView entropy, int64_t first) {
  launch(c, "logprob_backward", grid_of_pieces(logits.rows(), logits.dim(1)), row_backward_kernel, logits.ptr<float>(), logits.row_stride,
         vector<int32_t>(target), vector<float>(temperature), vector<float>(lse), vector<float>(entropy), vector<float>(dlogprob), vector<float>(dentropy),
         first, is_aligned(logits), logits.rows(), logits.dim(1));
}

}  // namespace lockstep::device
