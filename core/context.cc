#include "core/context.h"

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
  {
    std::lock_guard lock(mutex_);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void ThreadPool::run_part(int worker) {
  const int64_t begin = count_ * worker / num_threads_;
  const int64_t end = count_ * (worker + 1) / num_threads_;
  if (begin < end) (*function_)(begin, end, worker);
}

void ThreadPool::worker_loop(int worker) {
  uint64_t seen = 0;
  for (;;) {
    const bool ready = spin_until([&] { return generation_.load(std::memory_order_acquire) != seen; }, kSpinNs);
    if (!ready) {
      std::unique_lock lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      --sleepers_;
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    run_part(worker);
    unfinished_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::run(int64_t count, RangeFunction f) {
  function_ = &f;
  count_ = count;
  unfinished_.store(num_threads_ - 1, std::memory_order_relaxed);
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
    wake = sleepers_ > 0;
  }
  if (wake) wake_.notify_all();
  run_part(0);
  while (!spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; }, kSpinNs)) std::this_thread::yield();
}

}  // namespace lockstep
