#pragma once
// Quotients by a number that the host knows and kernels do not: a product and a shift, where a division takes some twenty instructions, of 64 bits a hundred.

#include <bit>
#include <cstdint>

#include "core/host_device.h"

namespace lockstep {

// n / d for n < 2^31 and 1 <= d < 2^31. With s = ceil(log2 d) and m = (2^(31 + s) + e) / d, 0 <= e < d <= 2^s, n m / 2^(31 + s) is n / d + n e / (d 2^(31 + s)), and what
// is too much is less than 1 / d. Of 2 n the product's upper half is wanted.
struct Divisor {
  uint32_t divisor, multiplier;
  int shift;
  constexpr explicit Divisor(int64_t d)
      : divisor(static_cast<uint32_t>(d)), shift(std::bit_width(static_cast<uint32_t>(d) - 1u)) {
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1u) / divisor);
  }
  HOST_DEVICE constexpr uint32_t quotient(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    return __umulhi(n << 1, multiplier) >> shift;
#else
    return static_cast<uint32_t>(uint64_t{n << 1} * multiplier >> 32) >> shift;
#endif
  }
};

}  // namespace lockstep
