// Blocks of threads take 64 KiB of an item each, eight bytes a thread and turn; then a block an item adds their sums. Bound by memory: bytes / 4 TB/s.

#include <vector>

#include "core/device.h"
#include "ops/checksum/checksum.h"
#include "ops/elements_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 256, kTurns = 32;
constexpr int64_t kPairsABlock = kThreads * kTurns;

struct Item {
  const char* data;
  int64_t stride, row_bytes;  // bytes
  uint64_t key, first_row, first_pair;
  int first_block;
  uint32_t rows, pairs;  // of a row
  int skipped;           // bytes of the first pair that are not the item's
  int aligned;
};

GPU_INLINE uint64_t pair_bytes(const Item& item, uint32_t row, uint32_t pair) {
  const int64_t at = static_cast<int64_t>(pair) * 8 - item.skipped;  // in the item's row
  const char* const from = item.data + row * item.stride + at;
  if (item.aligned != 0 && at + 8 <= item.row_bytes) return *reinterpret_cast<const uint64_t*>(from);
  uint64_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (at + i >= 0 && at + i < item.row_bytes) bytes |= static_cast<uint64_t>(static_cast<uint8_t>(from[i])) << 8 * i;
  return bytes;
}

// The sum over the block; the first thread has it.
GPU_INLINE uint64_t sum_block(uint64_t v) {
  const Shared<uint64_t> sums = SharedMemory().take<uint64_t>(kThreads / kWave);
  for (int width = kWave / 2; width >= 1; width /= 2) v += shuffle_xor(v, width);
  if (lane() == 0) sums.store(wave(), v);
  sync_block();
  uint64_t sum = 0;
  if (thread_x() == 0)
    for (int w = 0; w < kThreads / kWave; ++w) sum += sums.load(w);
  return sum;
}
constexpr size_t kSharedBytes = kThreads / kWave * sizeof(uint64_t);

GPU_KERNEL GPU_BOUNDS(kThreads) checksum_kernel(uint64_t* block_sums, const Item* items, int num_items) {
  const Item item = items[item_of_block(items, num_items, block_x())];
  const int64_t begin = (block_x() - item.first_block) * kPairsABlock + thread_x();
  const auto n = static_cast<int64_t>(item.rows) * item.pairs;
  uint64_t sum = 0;
#pragma unroll 8
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = begin + turn * kThreads;
    if (i >= n) continue;
    const uint32_t row = static_cast<uint32_t>(i) / item.pairs, pair = static_cast<uint32_t>(i) - row * item.pairs;
    sum += checksum_term(item.key, item.first_row + row, item.first_pair + pair, pair_bytes(item, row, pair));
  }
  sum = sum_block(sum);
  if (thread_x() == 0) block_sums[block_x()] = sum;
}

GPU_KERNEL GPU_BOUNDS(kThreads) checksum_merge_kernel(int64_t* out, const uint64_t* block_sums, const Item* items, int num_items, int num_blocks) {
  const int end = block_x() + 1 < num_items ? items[block_x() + 1].first_block : num_blocks;
  uint64_t sum = 0;
  for (int i = items[block_x()].first_block + thread_x(); i < end; i += kThreads) sum += block_sums[i];
  sum = sum_block(sum);
  if (thread_x() == 0) out[block_x()] = static_cast<int64_t>(sum);
}

}  // namespace

void checksum(Context& c, TensorView out, std::span<const ChecksumItem> items) {
  std::vector<Item> host;
  int64_t blocks = 0;
  for (const ChecksumItem& i : items) {
    const auto bytes = static_cast<int64_t>(dtype_bytes(i.rows.dtype));
    const int64_t skipped = i.first_byte % 8, row_bytes = i.rows.dim(1) * bytes, stride = i.rows.row_stride * bytes, pairs = blocks_for(skipped + row_bytes, 8);
    GPU_CHECK(i.rows.rows() * pairs < int64_t{1} << 32, "checksum: %ld rows of %ld bytes", static_cast<long>(i.rows.rows()), static_cast<long>(row_bytes));
    host.push_back({.data = static_cast<const char*>(i.rows.data), .stride = stride, .row_bytes = row_bytes, .key = i.key,
                    .first_row = static_cast<uint64_t>(i.first_row), .first_pair = static_cast<uint64_t>(i.first_byte / 8),
                    .first_block = static_cast<int>(blocks),
                    .rows = static_cast<uint32_t>(i.rows.rows()), .pairs = static_cast<uint32_t>(pairs), .skipped = static_cast<int>(skipped),
                    .aligned = skipped == 0 && reinterpret_cast<uintptr_t>(i.rows.data) % 8 == 0 && (i.rows.rows() <= 1 || stride % 8 == 0)});
    blocks += blocks_for(i.rows.rows() * pairs, kPairsABlock);
  }
  const ArenaScope scope(*c.workspace);
  const auto on_device = static_cast<Item*>(c.workspace->allocate(host.size() * sizeof(Item), "checksum items"));
  const auto sums = static_cast<uint64_t*>(c.workspace->allocate(static_cast<size_t>(blocks) * sizeof(uint64_t), "checksum blocks"));
  upload_bytes(c, on_device, host.data(), host.size() * sizeof(Item));
  const int n = static_cast<int>(items.size());
  launch(c, "checksum", {.blocks = blocks, .threads = kThreads, .shared_bytes = kSharedBytes}, checksum_kernel, sums, on_device, n);
  launch(c, "checksum_merge", {.blocks = n, .threads = kThreads, .shared_bytes = kSharedBytes}, checksum_merge_kernel, out.ptr<int64_t>(), sums, on_device,
         n, blocks);
}

}  // namespace lockstep::device
