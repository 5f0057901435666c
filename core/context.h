#pragma once
// The first argument of every op: where it runs, who helps, and where its scratch comes from.
//
// On the CPU an op runs on the caller's thread and the pool's workers and has finished when it returns. On the GPU it enqueues on the context's stream
// and returns; its tensors lie in device memory (core/device.h). No op allocates: scratch comes from `workspace`, released before return, which is safe
// on the GPU too because whoever takes that memory next is behind it in the stream.
// A Context belongs to one thread at a time; two contexts may live in one process.

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#include <atomic>

#include "core/arena.h"

namespace lockstep {

// A borrowed callable void(int64_t begin, int64_t end, int worker). Valid only during the call it is passed to.
class RangeFunction {
 public:
  template <typename F>
  RangeFunction(const F& f)
      : object_(&f), call_([](const void* o, int64_t b, int64_t e, int w) { (*static_cast<const F*>(o))(b, e, w); }) {}
  void operator()(int64_t begin, int64_t end, int worker) const { call_(object_, begin, end, worker); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t, int64_t, int);
};

// A fixed set of threads. Work is cut into a few contiguous ranges a thread, which threads take as they come: a thread whose core is busy with something
// else holds up one range, not its whole share, and one that does not wake in time holds up nothing. Which thread does what therefore changes from call
// to call; nothing an op computes may depend on it, and an op's function may be called several times by one worker.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // >= 1; the caller is one of them
  ~ThreadPool();
  int num_threads() const { return num_threads_; }
  // Runs f over [0, count); returns when all is done. Not re-entrant.
  void run(int64_t count, RangeFunction f);

 private:
  void worker_loop(int worker);
  void work(int worker, uint32_t generation);
  uint32_t generation() const { return static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32); }

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  // Number of the run in the high half, ranges not yet taken in the low half. Taking one is a compare-exchange of the whole, so a thread that comes late,
  // in a later run, can take nothing of the one it woke for.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> unfinished_{0};  // ranges of this run
  std::atomic<bool> stop_{false};
  int sleepers_ = 0;  // guarded by mutex_
  // Of this run; read only while holding a range of it.
  const RangeFunction* function_ = nullptr;
  int64_t count_ = 0;
  int64_t num_ranges_ = 0;
};

struct Context {
  Device device = Device::cpu;
  ThreadPool* pool = nullptr;   // nullptr: the caller's thread alone
  Arena* workspace = nullptr;   // in the device's memory
  Arena* host = nullptr;        // scratch that the host reads and writes: the workspace itself on the CPU
  void* stream = nullptr;       // of the GPU
  bool on_gpu() const { return device == Device::gpu; }
  // For work on the host's own memory beside the GPU's; this context itself on the CPU.
  Context on_host() const { return {.pool = pool, .workspace = host, .host = host}; }
  int num_threads() const { return pool == nullptr ? 1 : pool->num_threads(); }
};

// Runs f(begin, end, worker) over [0, count). `cost` is a rough count of simple operations per item; loops too small to
// be worth waking a thread run on the caller.
inline void parallel_for(Context& c, int64_t count, int64_t cost, RangeFunction f) {
  constexpr int64_t kInlineCost = 30000;  // about 10 us of work: twice what waking a spinning worker costs
  if (count <= 0) return;
  if (c.pool == nullptr || c.pool->num_threads() == 1 || count == 1 || count * cost < kInlineCost) {
    f(0, count, 0);
    return;
  }
  c.pool->run(count, f);
}

// A context with its own pool and workspace: what programs and tests start from.
class CpuContext {
 public:
  explicit CpuContext(int num_threads = 1, size_t workspace_reserve_bytes = size_t{16} << 30)
      : pool_(num_threads), workspace_("workspace", workspace_reserve_bytes) {
    context_.pool = &pool_;
    context_.workspace = &workspace_;
    context_.host = &workspace_;
  }
  Context& get() { return context_; }
  operator Context&() { return context_; }
  Arena& workspace() { return workspace_; }

 private:
  ThreadPool pool_;
  Arena workspace_;
  Context context_;
};

}  // namespace lockstep
