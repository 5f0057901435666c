#pragma once
// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011). A number is a pure function of what it
// is for, so nothing drawn elsewhere, before or beside it can change it. There is no stream and no state to save.

#include <array>
#include <cstdint>

namespace lockstep {

using PhiloxBlock = std::array<uint32_t, 4>;

// One block: four 32-bit words from a 128-bit counter and a 64-bit key.
constexpr PhiloxBlock philox4x32(PhiloxBlock counter, std::array<uint32_t, 2> key) {
  constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kM0} * counter[0];
    const uint64_t p1 = uint64_t{kM1} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += kW0;
    key[1] += kW1;
  }
  return counter;
}

// What a number is for; kept apart so that two uses never share a counter.
enum class RngPurpose : uint32_t { sample = 1, init = 2, shuffle = 3, task = 4, test = 5 };

// Four words for (seed, purpose, a, b, c): a is 64 bits wide (a prompt id, a tensor id), b and c 32 (sample, position).
// The counter is (a low, a high, b, c) and the key (seed low, seed high) with the purpose mixed into the key.
constexpr PhiloxBlock philox(uint64_t seed, RngPurpose purpose, uint64_t a, uint32_t b, uint32_t c) {
  return philox4x32({static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), b, c},
                    {static_cast<uint32_t>(seed) ^ (static_cast<uint32_t>(purpose) * 0x85EBCA6Bu),
                     static_cast<uint32_t>(seed >> 32)});
}

// Uniform in the open interval (0, 1): (top 23 bits + 1/2) / 2^23. Exact in f32 (a 24th bit would round up to 1).
constexpr float uniform_open(uint32_t word) { return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f; }

// Small sequential helper for places that need many numbers for one purpose (initialisation, generated tasks, tests).
class Philox {
 public:
  Philox(uint64_t seed, RngPurpose purpose, uint64_t a = 0, uint32_t b = 0) : seed_(seed), purpose_(purpose), a_(a), b_(b) {}
  uint32_t next() {
    if (index_ == 4) {
      block_ = philox(seed_, purpose_, a_, b_, counter_++);
      index_ = 0;
    }
    return block_[index_++];
  }
  float uniform() { return uniform_open(next()); }
  // Passes over as many words as next() would give.
  void skip(uint64_t words) {
    const uint64_t at = 4 * uint64_t{counter_} - static_cast<uint64_t>(4 - index_) + words;  // words given so far
    counter_ = static_cast<uint32_t>(at / 4);
    index_ = 4;
    for (uint64_t i = 0; i < at % 4; ++i) next();
  }
  // Uniform integer in [0, n); the bias of the multiply-shift is below n / 2^32.
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((uint64_t{next()} * n) >> 32); }
  float normal();  // standard normal, Box-Muller, one number per two words

 private:
  uint64_t seed_;
  RngPurpose purpose_;
  uint64_t a_;
  uint32_t b_;
  uint32_t counter_ = 0;
  PhiloxBlock block_{};
  int index_ = 4;
};

}  // namespace lockstep
