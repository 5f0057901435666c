#include "sync/delta.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

namespace {

int64_t blocks_in(int64_t row_bytes) { return (row_bytes + kDeltaBlock - 1) / kDeltaBlock; }

bool differ(const char* a, const char* b, int64_t bytes) {
  if (bytes != kDeltaBlock) return std::memcmp(a, b, static_cast<size_t>(bytes)) != 0;
  uint64_t x, y;
  std::memcpy(&x, a, sizeof(x));
  std::memcpy(&y, b, sizeof(y));
  return x != y;
}

// Makes `before` equal to `now`; calls f(number of the block, its bytes, how many) for every block that was not.
template <typename F>
void for_changed(const ByteRows& now, const ByteRows& before, F f) {
  CHECK(now.rows == before.rows && now.row_bytes == before.row_bytes, "{} rows of {} bytes against {} of {}", now.rows, now.row_bytes, before.rows, before.row_bytes);
  constexpr int64_t kAtOnce = 256;  // most rows do not change in most places
  int64_t block = 0;
  for (int64_t r = 0; r < now.rows; ++r, block += blocks_in(now.row_bytes)) {
    const char* from = now.data + r * now.stride;
    char* to = before.data + r * before.stride;
    for (int64_t first = 0; first < now.row_bytes; first += kAtOnce) {
      const int64_t end = std::min(now.row_bytes, first + kAtOnce);
      if (std::memcmp(from + first, to + first, static_cast<size_t>(end - first)) == 0) continue;
      for (int64_t i = first; i < end; i += kDeltaBlock) {
        const int64_t bytes = std::min(kDeltaBlock, end - i);
        if (!differ(from + i, to + i, bytes)) continue;
        std::memcpy(to + i, from + i, static_cast<size_t>(bytes));
        f(block + i / kDeltaBlock, from + i, bytes);
      }
    }
  }
}

}  // namespace

int64_t delta_bitmap_bytes(int64_t rows, int64_t row_bytes) { return (rows * blocks_in(row_bytes) + 7) / 8; }

int64_t make_delta(char* out, const ByteRows& now, const ByteRows& before) {
  char* at = out + delta_bitmap_bytes(now.rows, now.row_bytes);
  std::memset(out, 0, static_cast<size_t>(at - out));
  for_changed(now, before, [&](int64_t block, const char* from, int64_t bytes) {
    out[block / 8] = static_cast<char>(out[block / 8] | 1 << block % 8);
    std::memcpy(at, from, static_cast<size_t>(bytes));
    at += bytes;
  });
  return at - out;
}

int64_t overwrite_changed(const ByteRows& now, const ByteRows& before) {
  int64_t changed = 0;
  for_changed(now, before, [&](int64_t, const char*, int64_t bytes) { changed += bytes; });
  return changed;
}

Result<int64_t> apply_delta(const ByteRows& rows, std::span<const char> bytes) {
  const int64_t bitmap = delta_bitmap_bytes(rows.rows, rows.row_bytes), length = static_cast<int64_t>(bytes.size());
  if (bitmap > length) return errorf("a delta of {} rows of {} bytes begins with a bitmap of {} bytes; {} came", rows.rows, rows.row_bytes, bitmap, length);
  int64_t at = bitmap, block = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t i = 0; i < rows.row_bytes; i += kDeltaBlock, ++block) {
      if (block % 8 == 0 && bytes[static_cast<size_t>(block / 8)] == 0 && i + 8 * kDeltaBlock <= rows.row_bytes) {
        block += 7, i += 7 * kDeltaBlock;
        continue;
      }
      if ((bytes[static_cast<size_t>(block / 8)] >> block % 8 & 1) == 0) continue;
      const int64_t n = std::min(kDeltaBlock, rows.row_bytes - i);
      if (at + n > length) return errorf("a delta of {} rows of {} bytes is longer than the {} bytes that came", rows.rows, rows.row_bytes, length);
      std::memcpy(rows.data + r * rows.stride + i, bytes.data() + at, static_cast<size_t>(n));
      at += n;
    }
  }
  return at;
}

}  // namespace lockstep
