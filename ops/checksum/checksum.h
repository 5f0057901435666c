#pragma once
// checksum: a 64-bit number of a matrix's bits, each at its place. Parts of a whole, however it is cut, add up to the number of the whole, modulo 2^64, so that
// ranks that hold parts can compare what they hold together.
//   items  N of them: rows [R, W] of any dtype, row_stride may exceed W; their place in the whole: row of the first one, byte of its first element in the
//          whole's row; key: the whole's name
//   out    [N] i64
// A row of the whole is words of 4 bytes, the first one lowest, the last one filled up with zeros. out = sum over words of word * multiplier(key, row, place):
// multipliers are odd, so that a change of one word always shows, and mixed, so that exchanged ones do. The words 2p and 2p + 1 have z | 1 and (z rotated by
// 32 bits) | 1 with z = mix(key + row * a + p * b).
// Integers: the sum is exact in any order. Cost: memory-bound. Scratch: on the GPU 8 bytes for every 64 KiB, and the items.

#include <span>

#include "core/context.h"
#include "core/host_device.h"

namespace lockstep {

struct ChecksumItem {
  ConstTensorView rows;
  uint64_t key = 0;
  int64_t first_row = 0, first_byte = 0;
};

void checksum(Context& c, TensorView out, std::span<const ChecksumItem> items);

// The eight bytes of pair p of a row, first one lowest, as they count.
HOST_DEVICE inline uint64_t checksum_term(uint64_t key, uint64_t row, uint64_t pair, uint64_t bytes) {
  uint64_t z = key + row * 0x9e3779b97f4a7c15u + pair * 0xd6e8feb86659fd93u;
  z = (z ^ z >> 32) * 0xbf58476d1ce4e5b9u;
  z = z ^ z >> 29;
  return (bytes & 0xffffffffu) * (z | 1) + (bytes >> 32) * ((z << 32 | z >> 32) | 1);
}

namespace device {
void checksum(Context& c, TensorView out, std::span<const ChecksumItem> items);
}  // namespace device

}  // namespace lockstep
