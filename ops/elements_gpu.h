#pragma once
// How elementwise kernels walk a matrix: a thread takes kPiece consecutive elements of one row, in 16-byte loads and stores where every row of every operand
// begins at a multiple of 16 bytes.

#include <bit>

#include "core/dtype.h"
#include "core/gpu.h"
#include "core/tensor.h"

namespace lockstep::gpu {

inline constexpr int kPiece = 8;
inline constexpr int kElementThreads = 256;  // of a block

// Piece i of [rows, n], or the thread's; rows may be padded to a multiple of more than a piece. count is 0 past the end of a row or of all.
struct Piece {
  int64_t row = 0, at = 0;
  int count = 0;
};
GPU_INLINE Piece piece_at(int64_t i, int64_t rows, int64_t n, int64_t padded) {
  const int64_t a_row = (padded + kPiece - 1) / kPiece;
  Piece p;
  p.row = rows == 1 ? 0 : i / a_row;
  p.at = (i - p.row * a_row) * kPiece;
  if (p.row < rows && p.at < n) p.count = n - p.at < kPiece ? static_cast<int>(n - p.at) : kPiece;
  return p;
}
GPU_INLINE Piece piece_of_thread(int64_t rows, int64_t n, int64_t padded) {
  return piece_at(static_cast<int64_t>(block_x()) * block_dim() + thread_x(), rows, n, padded);
}
GPU_INLINE Piece piece_of_thread(int64_t rows, int64_t n) { return piece_of_thread(rows, n, n); }
inline Grid grid_of_pieces(int64_t rows, int64_t n) {
  return {.blocks = blocks_for(rows * blocks_for(n, kPiece), kElementThreads), .threads = kElementThreads};
}

// Of several tensors that one launch works on, in ascending first_block: the one that a block belongs to. (Those without blocks share the next one's first.)
template <typename Item>
GPU_INLINE int item_of_block(const Item* items, int num_items, int block) {
  int begin = 0, end = num_items;
  while (end - begin > 1) {
    const int middle = (begin + end) / 2;
    if (items[middle].first_block <= block) begin = middle;
    else end = middle;
  }
  return begin;
}

// A piece in registers; what is past its count is zero.
template <typename T>
struct Elements {
  T v[kPiece];
};
// Words leave the branch as they came: were they taken apart inside, each of several loads would be waited for before the next.
template <typename T>
GPU_INLINE Elements<T> load(const T* from, int count, bool aligned) {
  using Word = Vector<uint32_t, sizeof(Elements<T>) < 16 ? sizeof(Elements<T>) / 4 : 4>;
  struct Words {
    Word v[sizeof(Elements<T>) / sizeof(Word)];
  };
  Words words = {};
  if (aligned && count == kPiece) {
#pragma unroll
    for (size_t i = 0; i < sizeof(words) / sizeof(Word); ++i) words.v[i] = reinterpret_cast<const Word*>(from)[i];
  } else {
    Elements<T> e = {};
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (i < count) e.v[i] = from[i];
    words = std::bit_cast<Words>(e);
  }
  return std::bit_cast<Elements<T>>(words);
}
template <typename T>
GPU_INLINE void store(T* to, const Elements<T>& e, int count, bool aligned) {
  constexpr int kWords = kPiece * sizeof(T) >= 16 ? 16 / static_cast<int>(sizeof(T)) : kPiece;
  if (aligned && count == kPiece) {
#pragma unroll
    for (int i = 0; i < kPiece; i += kWords) {
      Vector<T, kWords> part;
#pragma unroll
      for (int k = 0; k < kWords; ++k) part.v[k] = e.v[i + k];
      store_vector(to + i, part);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (i < count) to[i] = e.v[i];
  }
}

// Whether every row begins at a multiple of 16 bytes.
template <typename View>
bool is_aligned(const View& v) {
  const size_t bytes = dtype_bytes(v.dtype);
  return reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && (v.rows() <= 1 || static_cast<size_t>(v.row_stride) * bytes % 16 == 0);
}
template <typename... Views>
bool all_aligned(const Views&... v) {
  return (is_aligned(v) && ...);
}
// As a matrix with the fewest rows: one where all are contiguous.
template <typename... Views>
Shape as_rows(const Shape& s, const Views&... v) {
  return (v.contiguous() && ...) ? Shape{1, s.elements()} : Shape{s[0], s.row_elements()};
}

}  // namespace lockstep::gpu
