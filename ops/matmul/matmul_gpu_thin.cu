// Products with thin weights in f32, at most kThinRows rows: the hyper-connections' fn [24, n D]. Portable, the CPU's bits: an output is one chain of fused
// multiply-adds, its index ascending, or one a segment of K, left for the caller to add up.
//
// Both operands come through shared memory by copies in the background, several stages ahead, as they are; bf16 is widened on its way to registers.
//   forward          a block has one segment of some rows and all of 24 columns. A few rows wait for their chains, so a thread has three, and more blocks than
//                    multiprocessors have the segments; many rows share what they load, a thread having 4 x 6 chains.
//   weight gradient  a thread has 6 rows x 2 columns, a block 24 x 64, so that 8192 columns are about one block a multiprocessor and one wave a scheduler.
//
// Floors for N = 24, K = 8192: a chain of 256 links x 4 cycles, 0.6 us (of all of K, 19 us; so too the weight gradient's, over 8192 rows); 8192 rows take 1.6 G
// multiply-adds, 54 us, and the bytes of x / 4 TB/s, 34 us.

#include "core/gpu.h"
#include "ops/fixed_math.h"
#include "ops/matmul/matmul_cpu.h"

namespace lockstep::device::thin {

namespace {

using namespace gpu;

constexpr int kChunkBytes = 16;  // of a copy

// `count` consecutive elements, a multiple of 16 bytes, in shared memory.
template <typename T, int Count>
GPU_INLINE void load_widened(float (&to)[Count], Shared<T> from, int at) {
  constexpr int kWords = kChunkBytes / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < Count; i += kWords) {
    const auto words = from.template load_vector<kWords>(at + i);
#pragma unroll
    for (int j = 0; j < kWords; ++j) to[i + j] = to_f32(words.v[j]);
  }
}

struct Forward {
  const void* x;
  const float* w;
  void* y;  // of segment s at s * y_segment
  int64_t x_stride, w_stride, y_stride, y_segment;
  int rows, cols, chain, segment, segments;
  bool y_is_f32;
};

// A thread has Rows x Cols chains of one segment, lanes along rows and columns of them as told; Step links a stage, Group of them in registers at once, the next
// ones already on their way if Ahead.
template <int Rows, int Cols, int RowLanes, int ColLanes, int Step, int Stages, int Group, bool Ahead>
struct ForwardTile {
  static constexpr int kRows = Rows, kCols = Cols, kStep = Step, kStages = Stages, kGroup = Group;
  static constexpr bool kAhead = Ahead;
  static constexpr int kRowLanes = RowLanes, kColLanes = ColLanes, kThreads = RowLanes * ColLanes;
  static constexpr int kM = Rows * RowLanes, kN = Cols * ColLanes;
  // A chunk between lines puts those of the lanes into different banks.
  template <typename X>
  static constexpr int kXLine = Step + kChunkBytes / static_cast<int>(sizeof(X));
  static constexpr int kWLine = Step + kChunkBytes / static_cast<int>(sizeof(float));
  template <typename X>
  static constexpr size_t kSharedBytes = Stages * (sizeof(X) * kM * kXLine<X> + sizeof(float) * kN * kWLine);
};
using Few = ForwardTile<1, 3, 8, 8, 128, 3, 8, true>;
using Many = ForwardTile<4, 6, 32, 4, 32, 3, 8, false>;
constexpr int64_t kManyRows = 256;  // from here on blocks of Many are enough
constexpr int kWholeLinks = 16;     // chains and segments are multiples of it

// Squares of the same x, while it is at hand: a group of eight elements is half of the tree's lanes, its even and odd groups are the two halves, and each of the
// threads along the columns has an eighth or a quarter of them.
template <typename T, typename X>
struct Squares {
  static constexpr int kEach = T::kGroup / T::kColLanes;
  static_assert(2 * T::kGroup == kTreeLanes && T::kStep % kTreeLanes == 0);
  float sum[T::kRows][2][kEach] = {};
  GPU_INLINE void add(int row, int half, Shared<X> x, int at, int col_lane) {
    const auto v = x.template load_vector<kEach>(at + col_lane * kEach);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum[row][half][i] = fma(to_f32(v.v[i]), to_f32(v.v[i]), sum[row][half][i]);
  }
  GPU_INLINE float fold(int row) const {  // in all threads of the row
    float s[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) s[i] = sum[row][0][i] + sum[row][1][i];
#pragma unroll
    for (int width = T::kGroup / 2; width >= kEach; width /= 2)
#pragma unroll
      for (int i = 0; i < kEach; ++i) s[i] = s[i] + shuffle_xor(s[i], width / kEach);
    static_assert(kEach <= 2);
    return kEach == 2 ? s[0] + s[kEach - 1] : s[0];
  }
};

template <typename T, typename X, bool kSquares>
GPU_KERNEL GPU_BOUNDS(T::kThreads) forward_kernel(const Forward p) {
  constexpr int kXLine = T::template kXLine<X>, kXWords = kChunkBytes / static_cast<int>(sizeof(X));
  constexpr int kWLine = T::kWLine, kWWords = kChunkBytes / static_cast<int>(sizeof(float));
  SharedMemory memory;
  const Shared<X> xs = memory.take<X>(T::kStages * T::kM * kXLine);
  const Shared<float> ws = memory.take<float>(T::kStages * T::kN * kWLine);
  const int segment = block_y() % p.segments, thread = thread_x();
  const int row0 = block_x() * T::kM, col0 = block_y() / p.segments * T::kN, link0 = segment * p.segment;
  const int chain = p.chain - link0 < p.segment ? p.chain - link0 : p.segment;

  // Lines [0, Lines) of an operand from line0 on, the last again for those past it, links [at, chain).
  const auto copy = [&](auto to, int line_size, auto words, auto lines, const auto* from, int64_t stride, int line0, int num_lines, int at) {
    constexpr int kAcross = T::kStep / decltype(words)::value, kChunks = decltype(lines)::value * kAcross;
#pragma unroll
    for (int c = 0; c < kChunks; c += T::kThreads) {
      const int chunk = c + thread, line = chunk / kAcross, link = chunk % kAcross * decltype(words)::value;
      if ((kChunks % T::kThreads != 0 && chunk >= kChunks) || at + link >= chain) continue;
      const int source = line0 + line < num_lines ? line0 + line : num_lines - 1;
      copy_async(to, line * line_size + link, from + source * stride + link0 + at + link);
    }
  };
  const auto bring = [&](int stage, int at) {
    using XWords = std::integral_constant<int, kXWords>;
    using WWords = std::integral_constant<int, kWWords>;
    if (at < chain) {
      copy(xs.from(stage * T::kM * kXLine), kXLine, XWords(), std::integral_constant<int, T::kM>(), static_cast<const X*>(p.x), p.x_stride, row0, p.rows, at);
      copy(ws.from(stage * T::kN * kWLine), kWLine, WWords(), std::integral_constant<int, T::kN>(), p.w, p.w_stride, col0, p.cols, at);
    }
    copy_commit();
  };

  const int row_lane = thread / T::kColLanes, col_lane = thread % T::kColLanes;
  const auto row_of = [&](int r) { return r * T::kRowLanes + row_lane; };
  const auto col_of = [&](int c) { return c * T::kColLanes + col_lane; };
  struct Links {
    float x[T::kRows][T::kGroup], w[T::kCols][T::kGroup];
  };
  float acc[T::kRows][T::kCols] = {};
  Squares<T, X> squares;
#pragma unroll
  for (int s = 0; s + 1 < T::kStages; ++s) bring(s, s * T::kStep);
  int stage = 0;
  for (int at = 0; at < chain; at += T::kStep) {
    copy_wait<T::kStages - 2>();
    sync_block();
    bring(stage == 0 ? T::kStages - 1 : stage - 1, at + (T::kStages - 1) * T::kStep);
    const Shared<X> x = xs.from(stage * T::kM * kXLine);
    const Shared<float> w = ws.from(stage * T::kN * kWLine);
    const auto load = [&](Links& to, int k) {
#pragma unroll
      for (int r = 0; r < T::kRows; ++r) load_widened(to.x[r], x, row_of(r) * kXLine + k);
#pragma unroll
      for (int c = 0; c < T::kCols; ++c) load_widened(to.w[c], w, col_of(c) * kWLine + k);
    };
    const auto multiply = [&](const Links& links) {
#pragma unroll
      for (int k = 0; k < T::kGroup; ++k)
#pragma unroll
        for (int r = 0; r < T::kRows; ++r)
#pragma unroll
          for (int c = 0; c < T::kCols; ++c) acc[r][c] = fma(links.x[r][k], links.w[c][k], acc[r][c]);
    };
    const auto square = [&](int k, int half) {
      if constexpr (kSquares) {
#pragma unroll
        for (int r = 0; r < T::kRows; ++r) squares.add(r, half, x, row_of(r) * kXLine + k, col_lane);
      }
    };
    Links now, next;
    if (chain - at >= T::kStep) {  // a whole stage is one piece of code, so that nothing is copied between registers
      if constexpr (T::kAhead) load(now, 0);
#pragma unroll
      for (int k = 0; k < T::kStep; k += T::kGroup) {
        square(k, k / T::kGroup % 2);
        if constexpr (T::kAhead) {
          if (k + T::kGroup < T::kStep) load(next, k + T::kGroup);
          multiply(now);
          now = next;
        } else {
          load(now, k);
          multiply(now);
        }
      }
    } else {
      for (int k = 0; k < chain - at; k += 2 * T::kGroup) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          square(k + half * T::kGroup, half);
          load(now, k + half * T::kGroup);
          multiply(now);
        }
      }
    }
    stage = stage + 1 == T::kStages ? 0 : stage + 1;
  }
#pragma unroll
  for (int r = 0; r < T::kRows; ++r)
#pragma unroll
    for (int c = 0; c < T::kCols; ++c) {
      const int row = row0 + row_of(r), col = col0 + col_of(c);
      if (row >= p.rows || col >= p.cols) continue;
      const int64_t i = row * p.y_stride + segment * p.y_segment + col;
      if (p.y_is_f32) static_cast<float*>(p.y)[i] = acc[r][c];
      else static_cast<bf16*>(p.y)[i] = to_bf16(acc[r][c]);
    }
  if constexpr (kSquares) {
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      const float sum = squares.fold(r);
      const int row = row0 + row_of(r);
      if (col0 == 0 && col_lane == 0 && row < p.rows) static_cast<float*>(p.y)[row * p.y_stride + segment * p.y_segment + p.cols] = sum;
    }
  }
}

struct WeightGradient {
  const float* dy;
  float* dw;
  int64_t dy_stride, x_stride, dw_stride;
  int rows, cols, chain;
};

constexpr int kGradRows = 6, kGradCols = 2, kGradLineRows = 24, kGradLineCols = 64;  // of a thread and of a block
constexpr int kGradWords = 2;  // of dy at once
constexpr int kGradColLanes = kGradLineCols / kGradCols, kGradThreads = kGradLineRows / kGradRows * kGradColLanes;
constexpr int kGradStep = 64, kGradStages = 4, kGradGroup = 4;  // links of the chain: of a stage, and in registers at once

template <typename X>
GPU_KERNEL GPU_BOUNDS(kGradThreads) weight_gradient_kernel(const WeightGradient p, const X* x) {
  constexpr int kXWords = kChunkBytes / static_cast<int>(sizeof(X)), kXChunks = kGradLineCols / kXWords, kDyWords = 4, kDyChunks = kGradLineRows / kDyWords;
  SharedMemory memory;
  const Shared<X> xs = memory.take<X>(kGradStages * kGradStep * kGradLineCols);
  const Shared<float> dys = memory.take<float>(kGradStages * kGradStep * kGradLineRows);
  const int thread = thread_x(), col0 = block_x() * kGradLineCols, row0 = block_y() * kGradLineRows;
  const int rows = p.rows - row0 < kGradLineRows ? p.rows - row0 : kGradLineRows, cols = p.cols - col0 < kGradLineCols ? p.cols - col0 : kGradLineCols;
  if (rows < kGradLineRows || cols < kGradLineCols) {  // what no copy will touch
    for (int i = thread; i < kGradStages * kGradStep * kGradLineRows; i += kGradThreads) dys.store(i, 0.0f);
    for (int i = thread; i < kGradStages * kGradStep * kGradLineCols; i += kGradThreads) xs.store(i, from_f32<X>(0.0f));
    sync_block();
  }
  const auto bring = [&](int stage, int at) {
#pragma unroll
    for (int c = 0; c < kGradStep * kXChunks; c += kGradThreads) {
      const int link = (c + thread) / kXChunks, col = (c + thread) % kXChunks * kXWords;
      if (link < kGradStep && at + link < p.chain && col < cols)
        copy_async(xs, (stage * kGradStep + link) * kGradLineCols + col, x + (at + link) * p.x_stride + col0 + col);
    }
#pragma unroll
    for (int c = 0; c < kGradStep * kDyChunks; c += kGradThreads) {
      const int link = (c + thread) / kDyChunks, row = (c + thread) % kDyChunks * kDyWords;
      if (link < kGradStep && at + link < p.chain && row < rows)
        copy_async(dys, (stage * kGradStep + link) * kGradLineRows + row, p.dy + (at + link) * p.dy_stride + row0 + row);
    }
    copy_commit();
  };

  const int col = thread % kGradColLanes * kGradCols, row = thread / kGradColLanes * kGradRows;
  const auto each = [&](const auto& f) {  // outputs of this thread
#pragma unroll
    for (int r = 0; r < kGradRows; ++r)
#pragma unroll
      for (int k = 0; k < kGradCols; ++k)
        if (row + r < rows && col + k < cols) f(r, k, p.dw[(row0 + row + r) * p.dw_stride + col0 + col + k]);
  };
  float acc[kGradRows][kGradCols] = {};
  each([&](int r, int k, const float& dw) { acc[r][k] = dw; });
#pragma unroll
  for (int s = 0; s + 1 < kGradStages; ++s) bring(s, s * kGradStep);
  int stage = 0;
  for (int at = 0; at < p.chain; at += kGradStep) {
    copy_wait<kGradStages - 2>();
    sync_block();
    bring(stage == 0 ? kGradStages - 1 : stage - 1, at + (kGradStages - 1) * kGradStep);
    const Shared<X> from_x = xs.from(stage * kGradStep * kGradLineCols + col);
    const Shared<float> from_dy = dys.from(stage * kGradStep * kGradLineRows + row);
    struct Link {
      float x[kGradCols], dy[kGradRows];
    };
    const auto load = [&](Link& to, int link) {
      const auto v = from_x.template load_vector<kGradCols>(link * kGradLineCols);
#pragma unroll
      for (int k = 0; k < kGradCols; ++k) to.x[k] = to_f32(v.v[k]);
#pragma unroll
      for (int r = 0; r < kGradRows; r += kGradWords) {
        const auto d = from_dy.template load_vector<kGradWords>(link * kGradLineRows + r);
#pragma unroll
        for (int i = 0; i < kGradWords; ++i) to.dy[r + i] = d.v[i];
      }
    };
    const auto multiply = [&](const Link& link) {
#pragma unroll
      for (int r = 0; r < kGradRows; ++r)
#pragma unroll
        for (int k = 0; k < kGradCols; ++k) acc[r][k] = fma(link.dy[r], link.x[k], acc[r][k]);
    };
    Link now[kGradGroup], next[kGradGroup];
    if (p.chain - at >= kGradStep) {  // a whole stage is one piece of code, so that nothing is copied between registers
#pragma unroll
      for (int i = 0; i < kGradGroup; ++i) load(now[i], i);
#pragma unroll
      for (int link = 0; link < kGradStep; link += kGradGroup) {
#pragma unroll
        for (int i = 0; i < kGradGroup; ++i)
          if (link + kGradGroup < kGradStep) load(next[i], link + kGradGroup + i);
#pragma unroll
        for (int i = 0; i < kGradGroup; ++i) multiply(now[i]), now[i] = next[i];
      }
    } else {
      for (int link = 0; link < p.chain - at; ++link) {
        load(now[0], link);
        multiply(now[0]);
      }
    }
    stage = stage + 1 == kGradStages ? 0 : stage + 1;
  }
  each([&](int r, int k, float& dw) { dw = acc[r][k]; });
}

// Whether rows of v can be copied in chunks.
bool has_chunks(ConstTensorView v) {
  return reinterpret_cast<uintptr_t>(v.data) % kChunkBytes == 0 && v.row_stride * static_cast<int64_t>(dtype_bytes(v.dtype)) % kChunkBytes == 0;
}

bool is_float(DType t) { return t == DType::f32 || t == DType::bf16; }

}  // namespace

bool supports(ConstTensorView x, const WeightView& w) {
  return !w.quantized() && w.rows.dtype == DType::f32 && is_float(x.dtype) && w.rows.rows() <= kThinRows && x.dim(1) > 0 && x.dim(1) % kWholeLinks == 0 &&
         has_chunks(x) && has_chunks(w.rows);
}

namespace {

template <bool kSquares>
void forward(Context& c, const Forward& p, DType x_dtype) {
  const auto run = [&](auto tile, auto type) {
    using T = decltype(tile);
    using X = decltype(type);
    const Grid grid = {.blocks = blocks_for(p.rows, T::kM), .threads = T::kThreads, .blocks_y = p.segments * blocks_for(p.cols, T::kN),
                       .shared_bytes = T::template kSharedBytes<X>};
    launch(c, "matmul_thin", grid, forward_kernel<T, X, kSquares>, p);
  };
  const auto with_tile = [&](auto tile) { x_dtype == DType::f32 ? run(tile, float()) : run(tile, bf16()); };
  p.rows >= kManyRows ? with_tile(Many()) : with_tile(Few());
}

}  // namespace

void matmul(Context& c, TensorView y, ConstTensorView x, ConstTensorView w) {
  const int k = static_cast<int>(x.dim(1));
  forward<false>(c,
          {.x = x.data, .w = w.ptr<float>(), .y = y.data, .x_stride = x.row_stride, .w_stride = w.row_stride, .y_stride = y.row_stride, .y_segment = 0,
           .rows = static_cast<int>(x.rows()), .cols = static_cast<int>(w.rows()), .chain = k, .segment = k, .segments = 1, .y_is_f32 = y.dtype == DType::f32},
          x.dtype);
}

void segment_sums(Context& c, TensorView sums, ConstTensorView x, ConstTensorView w, int64_t k_segment) {
  GPU_CHECK(k_segment % kWholeLinks == 0 && sums.dim(1) == blocks_for(x.dim(1), k_segment) && sums.dim(2) == w.rows() + 1, "matmul_thin: %ld segments of %ld",
            static_cast<long>(sums.dim(1)), static_cast<long>(k_segment));
  forward<true>(c,
          {.x = x.data, .w = w.ptr<float>(), .y = sums.data, .x_stride = x.row_stride, .w_stride = w.row_stride, .y_stride = sums.row_stride,
           .y_segment = sums.dim(2), .rows = static_cast<int>(x.rows()), .cols = static_cast<int>(w.rows()), .chain = static_cast<int>(x.dim(1)),
           .segment = static_cast<int>(k_segment), .segments = static_cast<int>(sums.dim(1)), .y_is_f32 = true},
          x.dtype);
}

bool supports_weight_gradient(ConstTensorView dw, ConstTensorView dy, ConstTensorView x) {
  return dw.shape.rank == 2 && dw.rows() <= kThinRows && dw.rows() % 4 == 0 && dw.dim(1) % 8 == 0 && is_float(x.dtype) && has_chunks(dy) && has_chunks(x);
}

void matmul_backward_weight(Context& c, TensorView dw, ConstTensorView dy, ConstTensorView x) {
  const WeightGradient p = {.dy = dy.ptr<float>(), .dw = dw.ptr<float>(), .dy_stride = dy.row_stride, .x_stride = x.row_stride, .dw_stride = dw.row_stride,
                            .rows = static_cast<int>(dw.rows()), .cols = static_cast<int>(dw.dim(1)), .chain = static_cast<int>(x.rows())};
  const auto run = [&](const auto* from) {
    using X = std::remove_cvref_t<decltype(*from)>;
    const Grid grid = {.blocks = blocks_for(p.cols, kGradLineCols), .threads = kGradThreads, .blocks_y = blocks_for(p.rows, kGradLineRows),
                       .shared_bytes = kGradStages * kGradStep * (kGradLineCols * sizeof(X) + kGradLineRows * sizeof(float))};
    launch(c, "matmul_thin_dw", grid, weight_gradient_kernel<X>, p, from);
  };
  x.dtype == DType::f32 ? run(x.ptr<float>()) : run(x.ptr<bf16>());
}

}  // namespace lockstep::device::thin
