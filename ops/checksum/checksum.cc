#include "ops/checksum/checksum.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace lockstep {

namespace {

uint64_t row_sum(const ChecksumItem& item, int64_t r) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(item.rows.dtype));
  const char* from = static_cast<const char*>(item.rows.data) + r * item.rows.row_stride * bytes;
  const auto row = static_cast<uint64_t>(item.first_row + r);
  auto at = static_cast<uint64_t>(item.first_byte);
  const uint64_t end = at + static_cast<uint64_t>(item.rows.dim(1) * bytes);
  uint64_t sum = 0;
  while (at < end) {
    const uint64_t skipped = at % 8, n = std::min(8 - skipped, end - at);
    uint64_t word = 0;
    if (n == 8) std::memcpy(&word, from, 8);
    else std::memcpy(&word, from, n);
    sum += checksum_term(item.key, row, at / 8, word << 8 * skipped);
    at += n;
    from += n;
  }
  return sum;
}

}  // namespace

void checksum(Context& c, TensorView out, std::span<const ChecksumItem> items) {
  const auto n = static_cast<int64_t>(items.size());
  CHECK(out.dtype == DType::i64 && out.shape == Shape{n} && out.contiguous(), "checksum: out {} {} for {} items", dtype_name(out.dtype), out.shape.str(), n);
  for (const ChecksumItem& item : items)
    CHECK(item.rows.shape.rank == 2 && item.first_row >= 0 && item.first_byte >= 0, "checksum: rows {} at row {}, byte {}", item.rows.shape.str(),
          item.first_row, item.first_byte);
  if (n == 0) return;
  if (c.on_gpu()) return device::checksum(c, out, items);
  for (int64_t i = 0; i < n; ++i) {
    const ChecksumItem& item = items[static_cast<size_t>(i)];
    std::atomic<uint64_t> total = 0;
    parallel_for(c, item.rows.rows(), item.rows.dim(1), [&](int64_t begin, int64_t end, int) {
      uint64_t part = 0;
      for (int64_t r = begin; r < end; ++r) part += row_sum(item, r);
      total += part;
    });
    out.ptr<int64_t>()[i] = static_cast<int64_t>(total.load());
  }
}

}  // namespace lockstep
