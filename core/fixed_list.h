#pragma once
// A list of at most N, without memory from the heap: for what a forward step puts together, which must not allocate once it is warm.

#include <cstddef>
#include <span>

#include "core/gpu_check.h"

namespace lockstep {

template <typename T, size_t N>
class FixedList {
 public:
  void push_back(const T& item) {
    GPU_CHECK(count_ < N, "a list of more than %zu", N);
    items_[count_++] = item;
  }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  T* begin() { return items_; }
  T* end() { return items_ + count_; }
  operator std::span<const T>() const { return {items_, count_}; }

 private:
  T items_[N] = {};
  size_t count_ = 0;
};

}  // namespace lockstep
