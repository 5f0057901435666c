#pragma once
// In which order the rows of a data file are used: a fresh permutation for every epoch, computed from (seed, epoch) alone, so
// that a cursor of three numbers is all that resume needs.

#include <cstdint>
#include <vector>

namespace lockstep {

// Fisher-Yates from the last place down. The word for place i (count - 1 .. 1) is the next one of Philox(seed, shuffle, epoch);
// its partner is (word * (i + 1)) >> 32.
std::vector<uint32_t> shuffled_order(int64_t count, uint64_t seed, int64_t epoch);

struct OrderCursor {
  int64_t epoch = 0;
  int64_t offset = 0;  // rows of this epoch already used
  int64_t issued = 0;  // rows used since the start of the run
  bool operator==(const OrderCursor&) const = default;
};

class EpochOrder {
 public:
  EpochOrder(int64_t count, uint64_t seed);  // count >= 1
  int64_t next();                            // row index
  const OrderCursor& cursor() const { return cursor_; }
  void restore(const OrderCursor& cursor);  // REQUIRES: a cursor of an order with the same count and seed
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  uint64_t seed_;
  OrderCursor cursor_;
  std::vector<uint32_t> order_;  // of cursor_.epoch
};

}  // namespace lockstep
