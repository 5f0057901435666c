// Forward: a thread reads one piece of a table row and writes it into every stream. Floor: T * n * D elements written and T * D read / 4 TB/s.
//
// Backward: a stable order of the tokens by id is built first, by counting for each token how many come before it (T^2 comparisons of i32: 10 us at
// T = 8192, where the gradients themselves take 0.2 ms). Then a block owns a run of equal ids and a slice of columns, and walks the run in ascending t. Only
// rows of the table that occur are touched, whatever V. Floor: T * n * D * 4 bytes / 4 TB/s.

#include "ops/elements_gpu.h"
#include "ops/embed/embed_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

template <typename T>
GPU_KERNEL embed_kernel(T* x, int64_t x_stride, const T* table, int64_t table_stride, const int32_t* tokens, int64_t rows, int64_t streams, int64_t width,
                        bool aligned) {
  const Piece p = piece_of_thread(rows, width);
  if (p.count == 0) return;
  const Elements<T> e = load(table + tokens[p.row] * table_stride + p.at, p.count, aligned);
  T* const to = x + p.row * x_stride + p.at;
  for (int64_t j = 0; j < streams; ++j) store(to + j * width, e, p.count, aligned);
}

inline constexpr int kRankThreads = 128, kRankTile = 2048;

// sorted and order: ids ascending, and which t each came from, ascending among equal ids.
GPU_KERNEL rank_kernel(int32_t* sorted, int32_t* order, const int32_t* tokens, int64_t rows) {
  SharedMemory memory;
  const auto tile = memory.take<int32_t>(kRankTile);
  const int64_t t = static_cast<int64_t>(block_x()) * kRankThreads + thread_x();
  const int32_t id = t < rows ? tokens[t] : 0;
  int64_t before = 0;
  for (int64_t first = 0; first < rows; first += kRankTile) {
    const int n = rows - first < kRankTile ? static_cast<int>(rows - first) : kRankTile;
    sync_block();
    for (int i = thread_x(); i < n; i += kRankThreads) tile.store(i, tokens[first + i]);
    sync_block();
    // Equal ids count where they stand before t.
    const int64_t here = t - first;
    const int equal = here < 0 ? 0 : here < n ? static_cast<int>(here) : n;
    int count = 0;
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
      const int32_t other = tile.load(i);
      count += other < id || (other == id && i < equal) ? 1 : 0;
    }
    before += count;
  }
  if (t >= rows) return;
  sorted[before] = id;
  order[before] = static_cast<int32_t>(t);
}

inline constexpr int kColumnThreads = 64, kColumnsABlock = kColumnThreads * 4;

GPU_KERNEL embed_backward_kernel(float* dtable, int64_t dtable_stride, int64_t first, int64_t table_rows, const float* dx, int64_t dx_stride,
                                 const int32_t* sorted, const int32_t* order, int64_t rows, int64_t streams, int64_t width, bool aligned) {
  constexpr int kColumns = 4;
  const int64_t begin = block_x();
  const int32_t id = sorted[begin];
  if (begin > 0 && sorted[begin - 1] == id) return;  // another block's run
  if (id < first || id >= first + table_rows) return;
  int64_t end = begin;
  for (int count = kWave; count == kWave; end += count) {
    const int64_t at = end + lane();
    count = trailing_ones(ballot(at < rows && sorted[at] == id));
  }
  const int64_t column = static_cast<int64_t>(block_y()) * kColumnsABlock + thread_x() * kColumns;
  if (column >= width) return;
  float* const to = dtable + (id - first) * dtable_stride + column;
  if (aligned && column + kColumns <= width) {
    auto total = *reinterpret_cast<const Vector<float, kColumns>*>(to);
#pragma unroll 4
    for (int64_t i = begin; i < end; ++i) {
      const float* const from = dx + order[i] * dx_stride + column;
      Vector<float, kColumns> sum = {};
      for (int64_t j = 0; j < streams; ++j) {
        const auto part = *reinterpret_cast<const Vector<float, kColumns>*>(from + j * width);
        for (int k = 0; k < kColumns; ++k) sum.v[k] = sum.v[k] + part.v[k];
      }
      for (int k = 0; k < kColumns; ++k) total.v[k] = total.v[k] + sum.v[k];
    }
    store_vector(to, total);
    return;
  }
  for (int k = 0; k < kColumns && column + k < width; ++k) {
    float total = to[k];
    for (int64_t i = begin; i < end; ++i) {
      const float* const from = dx + order[i] * dx_stride + column + k;
      float sum = 0;
      for (int64_t j = 0; j < streams; ++j) sum = sum + from[j * width];
      total = total + sum;
    }
    to[k] = total;
  }
}

template <typename T>
void forward(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens) {
  const int64_t width = x.dim(2);
  const bool aligned = all_aligned(x, table) && width * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  launch(c, "embed", grid_of_pieces(x.rows(), width), embed_kernel<T>, x.ptr<T>(), x.row_stride, table.ptr<T>(), table.row_stride, tokens.ptr<int32_t>(),
         x.rows(), x.dim(1), width, aligned);
}

}  // namespace

void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens) {
  if (x.empty()) return;
  x.dtype == DType::f32 ? forward<float>(c, x, table, tokens) : forward<bf16>(c, x, table, tokens);
}

void embed_backward(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens) {
  if (dx.empty() || dtable_accum.rows() == 0) return;
  const int64_t rows = dx.rows(), width = dx.dim(2);
  ArenaScope scope(*c.workspace);
  int32_t* sorted = c.workspace->tensor(DType::i32, {rows}, "embed ids in order").ptr<int32_t>();
  int32_t* order = c.workspace->tensor(DType::i32, {rows}, "embed order").ptr<int32_t>();
  launch(c, "embed_rank", {.blocks = blocks_for(rows, kRankThreads), .threads = kRankThreads, .shared_bytes = kRankTile * sizeof(int32_t)}, rank_kernel, sorted,
         order, tokens.ptr<int32_t>(), rows);
  const bool aligned = all_aligned(dtable_accum, dx) && width % 4 == 0;
  launch(c, "embed_backward", {.blocks = rows, .threads = kColumnThreads, .blocks_y = blocks_for(width, kColumnsABlock)}, embed_backward_kernel,
         dtable_accum.ptr<float>(), dtable_accum.row_stride, first, dtable_accum.rows(), dx.ptr<float>(), dx.row_stride, sorted, order, rows, dx.dim(1), width,
         aligned);
}

}  // namespace lockstep::device
