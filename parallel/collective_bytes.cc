#include "parallel/collective.h"

namespace lockstep {

CommBytes broadcast_bytes(int64_t bytes, int size, bool root) {
  if (size == 1) return {};
  return root ? CommBytes{(size - 1) * bytes, 0} : CommBytes{0, bytes};
}

CommBytes all_gather_bytes(std::span<const int64_t> rows, int64_t row_bytes, int rank) {
  CommBytes b;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    b.sent += rows[rank] * row_bytes;
    b.received += rows[r] * row_bytes;
  }
  return b;
}

CommBytes all_to_all_bytes(std::span<const int64_t> recv_rows, std::span<const int64_t> send_rows, int64_t row_bytes, int rank) {
  CommBytes b;
  for (size_t r = 0; r < recv_rows.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    b.sent += send_rows[r] * row_bytes;
    b.received += recv_rows[r] * row_bytes;
  }
  return b;
}

CommBytes exchange_counts_bytes(int64_t counts_per_rank, int size) {
  const int64_t bytes = 8 * counts_per_rank * (size - 1);
  return {bytes, bytes};
}

CommBytes reduce_scatter_bytes(std::span<const Range> parts, DType dtype, int rank) {
  const auto width = static_cast<int64_t>(dtype_bytes(dtype));
  CommBytes b;
  for (size_t r = 0; r < parts.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    b.sent += parts[r].size() * width;
    b.received += parts[rank].size() * width;
  }
  return b;
}

CommBytes all_reduce_bytes(int64_t elements, DType dtype, int size, int rank) {
  const int64_t bytes = elements * static_cast<int64_t>(dtype_bytes(dtype));
  if (size == 1) return {};
  if (bytes <= RankGroup::kGatherSumBytes) return {(size - 1) * bytes, (size - 1) * bytes};
  const int64_t own = part_of(elements, size, rank).size() * static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t moved = bytes + (size - 2) * own;
  return {moved, moved};
}

CommBytes all_reduce_int_bytes(int64_t count, int size) {
  const int64_t bytes = 8 * count * (size - 1);
  return {bytes, bytes};
}

}  // namespace lockstep
