#include "core/context.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep {

namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins for a short while for a condition that another running thread is about to make true. Decode steps are a chain of
// loops of tens of microseconds each, and a sleeping thread takes longer than that to wake.
template <typename Condition>
bool spin_until(Condition done, int64_t spin_ns) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
    if ((std::chrono::steady_clock::now() - start).count() > spin_ns) return done();
  }
}

constexpr int64_t kSpinNs = 50'000;

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  CHECK(num_threads >= 1 && num_threads <= 1024, "a pool of {} threads", num_threads);
  for (int w = 1; w < num_threads; ++w) threads_.emplace_back([this, w] { worker_loop(w); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  ticket_.store(uint64_t{generation() + 1} << 32, std::memory_order_release);
  {
    std::lock_guard lock(mutex_);  // a worker between its look at the ticket and its sleep is now asleep
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void ThreadPool::work(int worker, uint32_t generation) {
  for (;;) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (static_cast<uint32_t>(ticket >> 32) != generation || static_cast<uint32_t>(ticket) == 0) return;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const int64_t range = num_ranges_ - static_cast<int64_t>(static_cast<uint32_t>(ticket));
    (*function_)(count_ * range / num_ranges_, count_ * (range + 1) / num_ranges_, worker);
    unfinished_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::worker_loop(int worker) {
  uint32_t seen = 0;
  for (;;) {
    if (!spin_until([&] { return generation() != seen; }, kSpinNs)) {
      std::unique_lock lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return generation() != seen; });
      --sleepers_;
    }
    seen = generation();
    if (stop_.load()) return;
    work(worker, seen);
  }
}

void ThreadPool::run(int64_t count, RangeFunction f) {
  constexpr int64_t kRangesPerThread = 4;
  if (count <= 0) return;
  function_ = &f;
  count_ = count;
  num_ranges_ = std::min<int64_t>(count, num_threads_ * kRangesPerThread);
  unfinished_.store(num_ranges_, std::memory_order_relaxed);
  const uint32_t run = generation() + 1;
  ticket_.store(uint64_t{run} << 32 | static_cast<uint64_t>(num_ranges_), std::memory_order_release);
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    wake = sleepers_ > 0;
  }
  if (wake) wake_.notify_all();
  work(0, run);
  while (!spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; }, kSpinNs)) std::this_thread::yield();
}

}  // namespace lockstep
