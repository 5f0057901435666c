#include "rl/order.h"

#include <limits>
#include <numeric>
#include <utility>

#include "core/rng.h"
#include "core/status.h"

namespace lockstep {

std::vector<uint32_t> shuffled_order(int64_t count, uint64_t seed, int64_t epoch) {
  CHECK(count >= 0 && count <= std::numeric_limits<uint32_t>::max(), "{} rows", count);
  std::vector<uint32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0u);
  Philox random(seed, RngPurpose::shuffle, static_cast<uint64_t>(epoch));
  for (size_t i = order.size(); i-- > 1;) std::swap(order[i], order[random.below(static_cast<uint32_t>(i + 1))]);
  return order;
}

EpochOrder::EpochOrder(int64_t count, uint64_t seed) : count_(count), seed_(seed), order_(shuffled_order(count, seed, 0)) {
  CHECK_GE(count, 1);
}

int64_t EpochOrder::next() {
  if (cursor_.offset == count_) {
    ++cursor_.epoch;
    cursor_.offset = 0;
    order_ = shuffled_order(count_, seed_, cursor_.epoch);
  }
  ++cursor_.issued;
  return order_[static_cast<size_t>(cursor_.offset++)];
}

void EpochOrder::restore(const OrderCursor& cursor) {
  CHECK(cursor.epoch >= 0 && cursor.offset >= 0 && cursor.offset <= count_, "cursor {}:{} in {} rows", cursor.epoch,
        cursor.offset, count_);
  cursor_ = cursor;
  order_ = shuffled_order(count_, seed_, cursor.epoch);
}

}  // namespace lockstep
